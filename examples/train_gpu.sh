#!/bin/sh
# Train a drafter for an hour on one GPU. Without --data the prompts are a public dataset. The target answers them first;
# the hour begins after that. The same command resumes.
set -eu
: "${TARGET:=Qwen/Qwen3-8B}" "${OUTPUT:=out/one-gpu}" "${MINUTES:=60}"

dflash-train --target "$TARGET" --output "$OUTPUT" --prompts.max-prompts 20000 --optim.minutes "$MINUTES" "$@"
