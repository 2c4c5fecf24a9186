"""Tokens a second of the engine with blocks of one length, chains of their own and draft trees, at several loads.

    python scripts/bench/tree_load.py --target MODEL --drafter OUT/drafter-dflash --output tree_load.json \
        --prompts gsm8k=gsm8k_test.jsonl mbpp=mbpp.jsonl[800:] --limit 64 --requests 1 4 8 16 32 64

Answers are greedy. So many requests are decoded at a time, of one set and of all sets in turn; whoever ends makes room
for the next. Of what is running when none is left to follow only the first part counts: the clock stops there. The
ways come one after another in one process. Every load is decoded once for nothing, so that the engine knows what is
accepted, as one that has served for a while, and then `--repeats` times, of which the fastest counts; with `--first`
the first time counts, and there is no other.
`same` is the share of answers that are those of plain decoding at that load.
"""

import argparse
import gc
import itertools
import sys
from pathlib import Path
from typing import Any

import torch

from dflash_toolkit import SamplingParams
from dflash_toolkit.benchmark import StepEngine, add_loads, decode_load, fastest, loads_of, setting, without_folders
from dflash_toolkit.config import run_command
from dflash_toolkit.data.prompts import encode_chat, read_prompt_sets
from dflash_toolkit.evaluation.markdown import render_table
from dflash_toolkit.evaluation.tables import Table, number
from dflash_toolkit.files import write_json
from dflash_toolkit.runtime import Engine, EngineOptions, load_engine
from dflash_toolkit.runtime.capture import no_collection
from dflash_toolkit.runtime.request import Request

WAYS: dict[str, dict[str, Any]] = {
    "plain": {"num_speculative_tokens": 0},
    "blocks": {},
    "chains": {"draft_tree": 15, "draft_tree_width": 1},
    "trees": {"draft_tree": 63},
}


class Ours(StepEngine):
    """Our engine."""

    def __init__(self, engine: Engine, max_tokens: int) -> None:
        self._engine, self._params = engine, SamplingParams(max_tokens=max_tokens)

    def submit(self, prompt: list[int]) -> Request:
        return self._engine.submit(prompt, self._params)

    def step(self) -> bool:
        return self._engine.step()


def run(args: argparse.Namespace) -> None:
    asked = read_prompt_sets(args.prompts, args.limit)
    words = [without_folders(word) for word in sys.argv[1:]]
    found: list[dict[str, Any]] = []
    plain: dict[tuple[str, int], list[list[int]]] = {}
    ways = ["plain", *(way for way in args.ways if way != "plain")]
    for way in ways:
        most = {"max_num_seqs": max(args.requests), "max_model_len": args.max_model_len}
        options = EngineOptions(prefix_cache=False, **most, **WAYS[way])
        engine, tokenizer = load_engine(args.target, args.drafter, options=options)
        while engine.prepare():
            pass
        sets = {name: [encode_chat(tokenizer, row.messages) for row in rows] for name, rows in asked.items()}
        decoder, stats = Ours(engine, args.max_tokens), engine.stats
        for name, at_a_time, prompts in loads_of(sets, args):
            engine.reset_acceptance()
            if not args.first:
                decode_load(decoder, prompts, at_a_time)
            steps, rows = stats.steps, dict(engine.runner.step_rows)
            with no_collection():  # in which load one would fall is chance
                every = [decode_load(decoder, prompts, at_a_time) for _ in range(1 if args.first else args.repeats)]
            row, answers = fastest([figures for figures, _ in every]), every[-1][1]
            written = sum(len(answer) - 1 for _, answers in every for answer in answers)
            tau = written / max(stats.steps - steps, 1)
            row |= {"tau_pooled": round(tau, 4)}
            row |= {"rows": {n: count - rows.get(n, 0) for n, count in sorted(engine.runner.step_rows.items())}}
            if way == "plain":
                plain[name, at_a_time] = answers
            same = sum(a == b for a, b in zip(answers, plain[name, at_a_time], strict=True)) / len(answers)
            found.append({"way": way, "set": name, "requests": at_a_time, "same": round(same, 4), **row})
            if args.output:
                write_json(args.output, setting("bench/tree_load.py", words) | {"ways": WAYS, "rows": found})
        del engine, decoder
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    each = {(row["way"], row["set"], row["requests"]): row for row in found}
    rows = []
    names = dict.fromkeys(row["set"] for row in found)
    for name, at_a_time, way in itertools.product(names, args.requests, ways):
        row, base = each[way, name, at_a_time], each.get(("blocks", name, at_a_time))
        gain = f"{row['tokens_per_second'] / base['tokens_per_second'] - 1:+.1%}" if base else ""
        speed, tau = number(row["tokens_per_second"]), number(row["tau_pooled"])
        rows.append((name, str(at_a_time), way, speed, tau, gain, f"{row['same']:.1%}"))
    print(render_table(Table("", ("set", "requests", "way", "tokens/s", "tau", "to blocks", "same"), tuple(rows))))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_loads(parser)
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--first", action="store_true", help="an engine's first requests, all of them")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    return run_command(lambda: run(args))


if __name__ == "__main__":
    raise SystemExit(main())
