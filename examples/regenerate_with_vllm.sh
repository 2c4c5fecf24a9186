#!/bin/sh
# Let a vLLM server write the target's responses, then train on them. The server may run on other machines too: give
# their addresses to --endpoint. Both commands resume.
set -eu
: "${TARGET:=Qwen/Qwen3-8B}" "${DATA:=mlabonne/open-perfectblend}" "${OUTPUT:=out/with-vllm}" "${PORT:=8100}"

vllm serve "$TARGET" --port "$PORT" &
server=$!
trap 'kill $server' EXIT
until curl --silent --fail --output /dev/null "http://127.0.0.1:$PORT/health"; do
    kill -0 $server # ends the script if the server has ended
    sleep 5
done
dflash-data --target "$TARGET" --data "$DATA" --output "$OUTPUT.jsonl" --endpoint "http://127.0.0.1:$PORT" \
    --samples 2 --temperature 1.0 --greedy-first --batch-size 256 --prompts.max-prompts 100000 "$@"

trap - EXIT
kill $server # leaves the GPU to the trainer
wait $server || true
dflash-train --target "$TARGET" --responses "$OUTPUT.jsonl" --output "$OUTPUT" --optim.epochs 3
