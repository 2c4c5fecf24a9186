#!/usr/bin/env bash
# Both kinds of drafters for one target at equal minutes, and vLLM with each: on two GPUs, a kind on each.
#
#     scripts/bench/two_kinds.sh TARGET PROMPTS OUTPUT [MINUTES] [VLLM_ENV]
#
# PROMPTS is a folder with gsm8k_train.jsonl, gsm8k_test.jsonl, mbpp.jsonl, alpaca.jsonl, humaneval.jsonl.gz,
# mt_bench.jsonl and math500.jsonl. The target answers once, on the first GPU; the second one waits for that. VLLM_ENV is
# sourced before vLLM runs (by VLLM_PYTHON, or python3); without it vLLM is left out. The same command goes on where it
# was interrupted.
set -euo pipefail
target=$(realpath "$1") prompts=$(realpath "$2") minutes=${4:-8} vllm=${5:+$(realpath "$5")}
mkdir -p "$3"
output=$(realpath "$3") here=$(cd "$(dirname "$0")" && pwd) python=${PYTHON:-python3}
cd "$prompts"
sets=(gsm8k=gsm8k_test.jsonl 'mbpp=mbpp.jsonl[800:]' humaneval=humaneval.jsonl.gz mt_bench=mt_bench.jsonl math500=math500.jsonl)
IFS=, read -r -a gpus <<< "${CUDA_VISIBLE_DEVICES:-}"
common=(--target "$target" --held-out 0 --minutes "$minutes" --prompts "${sets[@]}" --limit 80 --pool gsm8k mbpp humaneval mt_bench)

beside_vllm() { # KIND
    [ -n "$vllm" ] || return 0
    (
        # shellcheck disable=SC1090
        . "$vllm"
        "${VLLM_PYTHON:-python3}" "$here/../peers/vllm_decode.py" --target "$target" --drafter "$output/$1/drafter-$1" \
            --prompts "${sets[@]}" --limit 80 --ours "$output/$1/result.json" \
            --output "$output/vllm-$1.json"
    )
}

first() {
    export CUDA_VISIBLE_DEVICES=${gpus[0]:-0}
    [ -e "$output/dflash/result.json" ] ||
        "$python" "$here/train_real.py" "${common[@]}" --variant dflash drafter.kind=dflash --baseline gsm8k \
            --output "$output/dflash" \
            --prompts-train gsm8k=gsm8k_train.jsonl 'mbpp=mbpp.jsonl[:800]' alpaca=alpaca.jsonl
    beside_vllm dflash
}

second() {
    export CUDA_VISIBLE_DEVICES=${gpus[1]:-1}
    until [ -e "$output/dflash/result.json" ] || grep -qs '^== dflash' "$output/dflash.log"; do
        kill -0 "$1" 2> /dev/null || { echo "the first GPU ended without answers: $output/dflash.log" >&2; return 1; }
        sleep 1
    done
    [ -e "$output/dflash2/result.json" ] ||
        "$python" "$here/train_real.py" "${common[@]}" --variant dflash2 drafter.kind=dflash2 --output "$output/dflash2" \
            --answers "$output/dflash/answers.jsonl"
    beside_vllm dflash2
}

: > "$output/dflash.log"
first >> "$output/dflash.log" 2>&1 &
one=$!
second "$one" > "$output/dflash2.log" 2>&1 &
two=$!
wait "$one" && wait "$two" || { tail -n 5 "$output"/dflash*.log; exit 1; }
tail -n 30 "$output"/dflash*.log
