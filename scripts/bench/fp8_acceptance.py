"""What drafting in fp8 costs a trained drafter's acceptance: full precision, fp8 head, fp8 head and layers.

    python scripts/bench/fp8_acceptance.py --target MODEL --drafter OUT/drafter-8m --output fp8_acceptance.json \
        --prompts gsm8k=gsm8k_test.jsonl humaneval=humaneval.jsonl.gz --limit 320

Layers are quantized in models that are wide enough to gain by it; here that limit is taken away. Answers
are greedy. All variants verify alike, in the target's own precision, but the texts may part where drafts of other
lengths cut a near tie otherwise; so `same_answers` compares the answers that are the same in full precision.
"""

import argparse
import gc
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from dflash_toolkit import SamplingParams
from dflash_toolkit.acceptance import ratio
from dflash_toolkit.benchmark import setting, without_folders
from dflash_toolkit.checkpoint.reader import locate
from dflash_toolkit.config import run_command
from dflash_toolkit.data.prompts import encode_chat, read_prompt_sets
from dflash_toolkit.evaluation.markdown import render_table
from dflash_toolkit.evaluation.tables import Table, number
from dflash_toolkit.files import write_json
from dflash_toolkit.generation import Generation
from dflash_toolkit.kernels.weight import RowScaledFp8
from dflash_toolkit.models.dflash.checkpoint import read_config
from dflash_toolkit.runtime import EngineOptions, load_engine
from dflash_toolkit.runtime import weights as model

NEVER = 1 << 30
VARIANTS = {"full": ("full", NEVER), "head": ("fp8", NEVER), "head and layers": ("fp8", 0)}


def length(answers: Sequence[Generation]) -> dict[str, Any]:
    """Steps and acceptance length of answers, the first token of each left out."""
    steps, tokens = (sum(map(len, found)) for found in ([a.steps for a in answers], [a.tokens[1:] for a in answers]))
    return {
        "requests": len(answers),
        "tokens": tokens,
        "verify_steps": steps,
        "tau_pooled": round(ratio(tokens, steps), 4),
    }


def run(args: argparse.Namespace) -> None:
    asked = read_prompt_sets(args.prompts, args.limit)
    block = read_config(locate("drafter", args.drafter)).block_size
    found: dict[str, dict[str, Any]] = {}
    full: dict[str, list[Generation]] = {}
    for name, (dtype, narrowest) in VARIANTS.items():
        model.WIDE_IN_FP8 = narrowest
        options = EngineOptions(
            max_num_seqs=args.batch, num_speculative_tokens=block - 1, draft_dtype=dtype, prefix_cache=False
        )
        engine, tokenizer = load_engine(args.target, args.drafter, options=options)
        drafter = engine.runner.drafter
        assert drafter is not None and isinstance(drafter.layers[0].o, RowScaledFp8) == (name == "head and layers")
        found[name] = {}
        for of, prompts in asked.items():
            ids = [encode_chat(tokenizer, p.messages, tools=p.tools) for p in prompts]
            answers = engine.generate(ids, SamplingParams(max_tokens=args.tokens))
            first = full.setdefault(of, answers)
            same = [(a, b) for a, b in zip(answers, first, strict=True) if a.tokens == b.tokens]
            found[name][of] = length(answers) | {
                "same_answers": length([a for a, _ in same]) | {"full": length([b for _, b in same])["tau_pooled"]}
            }
            print(name, of, found[name][of], flush=True)
        del engine, drafter
        gc.collect()
        torch.cuda.empty_cache()
    header = ("Set", *VARIANTS)
    rows = [(of, *(number(found[name][of]["tau_pooled"]) for name in VARIANTS)) for of in asked]
    print(render_table(Table("", header, tuple(rows))))
    if args.output:
        words = [without_folders(word) for word in args.argv]
        write_json(args.output, {**setting("bench/fp8_acceptance.py", words), "variants": found})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--drafter", required=True)
    parser.add_argument("--prompts", nargs="+", required=True, metavar="NAME=FILE")
    parser.add_argument("--limit", type=int, default=320, help="prompts of each set")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=512, help="longest answer")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    args.argv = sys.argv[1:]
    return run_command(lambda: run(args))


if __name__ == "__main__":
    raise SystemExit(main())
