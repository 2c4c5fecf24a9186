"""Measures tokens per second with blocks, chains and draft trees, at several numbers of requests, for a real pair.

    python scripts/bench/tree_load.py --target MODEL --drafter OUT/drafter-dflash --output tree_load.json \
        --prompts gsm8k=gsm8k_test.jsonl mbpp=mbpp.jsonl[800:] --limit 64 --requests 1 4 8 16 32 64

Answers are greedy. A load keeps the given number of requests running, of one set or of all sets in turn; the clock
stops when no request is left to start. Every way of drafting has its own engine over the same weights. Each engine
decodes a load once without counting, to learn the acceptance. Then the ways take turns `--repeats` times, and the
fastest run counts. With `--first` the first run counts and is the only one. `same` is the share of answers equal to
plain decoding at that load.
"""

import argparse
import itertools
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from dflash_toolkit import SamplingParams
from dflash_toolkit.command_line import run_command
from dflash_toolkit.data.prompts import encode_chat, read_prompt_sets
from dflash_toolkit.evaluation.report.markdown import render_table
from dflash_toolkit.evaluation.report.table import Table, number
from dflash_toolkit.files import write_json
from dflash_toolkit.models.target_files import load_tokenizer
from dflash_toolkit.runtime import Engine, EngineOptions
from dflash_toolkit.runtime.graphs import no_collection
from dflash_toolkit.runtime.load import load_parts
from dflash_toolkit.runtime.request import Request

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, for `scripts`

from scripts.measure import StepEngine, add_loads, decode_load, fastest, loads_of, setting, without_folders

WAYS: dict[str, dict[str, Any]] = {
    "plain": {"num_speculative_tokens": 0},
    "blocks": {"draft_tree": 0},
    "chains": {"draft_tree": 15, "draft_tree_width": 1},
    "trees": {"draft_tree": 63, "draft_tree_width": 8},
}
OVERRUN = 128  # tokens that steps in flight may write after an answer: a block of 64 and a tree


class Ours(StepEngine):
    """Our engine."""

    def __init__(self, engine: Engine, max_tokens: int) -> None:
        self._engine, self._params = engine, SamplingParams(max_tokens=max_tokens)

    def submit(self, prompt: list[int]) -> Request:
        return self._engine.submit(prompt, self._params)

    def step(self) -> bool:
        return self._engine.step()


def counts_of(engine: Engine) -> tuple[Counter[Any], ...]:
    """Steps of requests, steps of the batch by their rows, and of them those over trees."""
    return Counter(steps=engine.stats.steps), Counter(engine.runner.step_rows), Counter(engine.runner.tree_rows)


def engines_of(args: argparse.Namespace) -> dict[str, Engine]:
    """One for every way, plain decoding first, with room for the longest requests that may run together."""
    most = max(args.requests)
    common = {"max_num_seqs": most, "max_model_len": args.max_model_len, "prefix_cache": False}
    ways = ["plain", *(way for way in args.ways if way != "plain")]
    parts, engines = load_parts(args.target, args.drafter), dict[str, Engine]()
    for way in ways:
        room = most * (args.max_model_len + OVERRUN)
        engines[way] = parts.engine(EngineOptions(**common, kv_cache_tokens=room, **WAYS[way]))
        while engines[way].prepare(everything=True):
            pass
    return engines


def run(args: argparse.Namespace) -> None:
    asked, tokenizer = read_prompt_sets(args.prompts, args.limit), load_tokenizer(args.target)
    sets = {name: [encode_chat(tokenizer, row.messages) for row in rows] for name, rows in asked.items()}
    words = [without_folders(word) for word in sys.argv[1:]]
    engines, found = engines_of(args), list[dict[str, Any]]()
    decoders = {way: Ours(engine, args.max_tokens) for way, engine in engines.items()}
    for name, at_a_time, prompts in loads_of(sets, args):
        for way, engine in engines.items():
            engine.reset_acceptance()
            if not args.first:
                decode_load(decoders[way], prompts, at_a_time)
        before = {way: counts_of(engine) for way, engine in engines.items()}
        every: dict[str, list[tuple[dict[str, float], list[list[int]]]]] = {way: [] for way in engines}
        with no_collection():  # in which load one would fall is chance
            for _ in range(1 if args.first else args.repeats):
                for way, decoder in decoders.items():
                    every[way].append(decode_load(decoder, prompts, at_a_time))
        for way, engine in engines.items():
            row, answers = fastest([figures for figures, _ in every[way]]), every[way][-1][1]
            written = sum(len(answer) - 1 for _, each in every[way] for answer in each)
            steps, of_rows, of_trees = (now - was for now, was in zip(counts_of(engine), before[way], strict=True))
            row |= {"tau_pooled": round(written / max(steps["steps"], 1), 4)}
            row |= {"rows": dict(sorted(of_rows.items())), "tree_rows": dict(sorted(of_trees.items()))}
            plain = every["plain"][-1][1]
            same = sum(a == b for a, b in zip(answers, plain, strict=True)) / len(answers)
            found.append({"way": way, "set": name, "requests": at_a_time, "same": round(same, 4), **row})
        if args.output:
            write_json(args.output, setting("bench/tree_load.py", words) | {"ways": WAYS, "rows": found})
    each = {(row["way"], row["set"], row["requests"]): row for row in found}
    rows = []
    names = dict.fromkeys(row["set"] for row in found)
    for name, at_a_time, way in itertools.product(names, args.requests, engines):
        row, base = each[way, name, at_a_time], each.get(("blocks", name, at_a_time))
        gain = f"{row['tokens_per_second'] / base['tokens_per_second'] - 1:+.1%}" if base else ""
        speed, tau = number(row["tokens_per_second"]), number(row["tau_pooled"])
        rows.append((name, str(at_a_time), way, speed, tau, gain, f"{row['same']:.1%}"))
    print(render_table(Table("", ("set", "requests", "way", "tokens/s", "tau", "to blocks", "same"), tuple(rows))))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_loads(parser)
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--first", action="store_true", help="measure the first requests of an engine only")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    return run_command(lambda: run(args))


if __name__ == "__main__":
    raise SystemExit(main())
