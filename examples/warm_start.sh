#!/bin/sh
# Fit an existing drafter to a fine-tuned or quantized target. The drafter gives the shape; it is measured first, and
# exported again if training makes it worse. The learning rate starts at 3e-4 (Muon) or 6e-5 (AdamW); lower
# --optim.learning-rate for a target that changed little.
set -eu
: "${TARGET:=my/fine-tune}" "${DRAFTER:=z-lab/Qwen3-8B-DFlash-b16}" "${DATA:=prompts.jsonl}" "${OUTPUT:=out/fine-tune}"

dflash-train --target "$TARGET" --init-from "$DRAFTER" --data "$DATA" --output "$OUTPUT" \
    --responses.samples 1 --optim.epochs 1 "$@"
