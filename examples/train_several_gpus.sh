#!/bin/sh
# Train on all GPUs of a machine: each process computes its own micro batches. --run.fsdp shards the drafter.
set -eu
: "${TARGET:=Qwen/Qwen3-8B}" "${OUTPUT:=out/several-gpus}" "${GPUS:=8}" "${MINUTES:=60}"

torchrun --nproc-per-node "$GPUS" -m dflash_toolkit.train.cli \
    --target "$TARGET" --output "$OUTPUT" --prompts.max-prompts 100000 --optim.minutes "$MINUTES" "$@"
