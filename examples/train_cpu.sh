#!/bin/sh
# Train a small drafter on a CPU, in minutes. The target is SmolLM2-135M-Instruct, fetched on the first run
# with the package gguf.
set -eu
: "${TARGET:=demo/target}" "${DATA:=scripts/demo/prompts/count_train.jsonl}" "${OUTPUT:=out/cpu}"

test -e "$TARGET" || python scripts/demo/fetch_target.py "$TARGET"
dflash-train --target "$TARGET" --data "$DATA" --output "$OUTPUT" --device cpu --dtype float32 \
    --drafter.layers 1 --drafter.taps 2 --drafter.block-size 4 \
    --prompts.max-length 128 --responses.max-tokens 32 --responses.samples 1 \
    --optim.batch-size 4 --optim.epochs 4 --optim.learning-rate 1e-3 "$@"
