#!/usr/bin/env bash
# What draft trees are worth, beside blocks and vLLM: a real pair at several loads, and its drafts at the Qwen3-8B shape.
#
#     scripts/bench/trees.sh TARGET DRAFTER PROMPTS OUTPUT [VLLM_ENV]
#
# PROMPTS is a folder with gsm8k_test.jsonl, mbpp.jsonl, humaneval.jsonl.gz, mt_bench.jsonl and math500.jsonl. VLLM_ENV is
# sourced before vLLM runs (by VLLM_PYTHON, or python3); without it vLLM is left out. One GPU, what matters most first; a
# second one takes vLLM's steps of the 8B meanwhile. The same command goes on with the first part that is not there.
set -euo pipefail
target=$(realpath "$1") drafter=$(realpath "$2") prompts=$(realpath "$3") vllm=${5:+$(realpath "$5")}
mkdir -p "$4"
output=$(realpath "$4") here=$(cd "$(dirname "$0")" && pwd) python=${PYTHON:-python3}
cd "$prompts"
pair=(--target "$target" --drafter "$drafter")
sets=(gsm8k=gsm8k_test.jsonl 'mbpp=mbpp.jsonl[800:]' humaneval=humaneval.jsonl.gz mt_bench=mt_bench.jsonl math500=math500.jsonl)
loads=("${pair[@]}" --prompts "${sets[@]}" --sets gsm8k mixed mt_bench --limit 64)

part() { # FILE PROGRAM ARGUMENTS: runs the program unless FILE, which it writes, is there
    [ -e "$output/$1" ] && return
    echo "== $1"
    "$python" "$here/$2" "${@:3}" --output "$output/new-$1" && mv "$output/new-$1" "$output/$1"
}

peer() { # the same in vLLM's environment
    [ -n "$vllm" ] || return 0
    (
        # shellcheck disable=SC1090
        . "$vllm"
        python=${VLLM_PYTHON:-python3}
        part "$@"
    )
}

vllm_steps() {
    for k in 15 7 3; do
        peer "vllm_step_k$k.json" ../peers/vllm_step.py --shape qwen3-8b --batch 1 4 8 16 32 64 --k "$k" \
            --prompt 64 --short 32 --long 224 || return
    done
}

count=$("$python" -c 'import torch; print(torch.cuda.device_count())')
IFS=, read -r -a gpus <<< "${CUDA_VISIBLE_DEVICES:-}"
if [ "$count" -gt 1 ]; then
    export CUDA_VISIBLE_DEVICES=${gpus[0]:-0}
    set -m # a process group of its own, which ends with this script
    CUDA_VISIBLE_DEVICES=${gpus[1]:-1} vllm_steps > "$output/vllm_steps.log" 2>&1 &
    beside=$!
    set +m
    trap 'kill -- "-$beside" 2> /dev/null || true' EXIT
fi

part tree_load.json tree_load.py "${loads[@]}"
peer vllm_requests.json ../peers/vllm_requests.py "${loads[@]}" --k 15 7 3
part trace.pt record_drafts.py "${pair[@]}" --prompts "${sets[@]}" --limit 40
part replay.json replay_drafts.py "$output/trace.pt" --shape qwen3-8b --prompt 64 --failing 1
if [ "$count" -gt 1 ]; then
    wait "$beside" || { tail -n 5 "$output/vllm_steps.log" >&2; exit 1; }
else
    vllm_steps
fi
