#!/bin/sh
# Serve a target with its drafter and send it a question through OpenAI's client.
set -eu
: "${TARGET:=Qwen/Qwen3-8B}" "${DRAFTER:=z-lab/Qwen3-8B-DFlash-b16}" "${PORT:=8000}" "${QUESTION:=Why is the sky blue?}"

dflash-serve --target "$TARGET" --drafter "$DRAFTER" --port "$PORT" --served-model-name chat "$@" &
server=$!
trap 'kill $server; wait $server || true' EXIT
until curl --silent --fail --output /dev/null "http://127.0.0.1:$PORT/health"; do
    kill -0 $server # ends the script if the server has ended
    sleep 1
done
python examples/chat.py "http://127.0.0.1:$PORT/v1" chat "$QUESTION"
