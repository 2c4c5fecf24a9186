"""Measures our engine on workloads by name, plain and with drafts, and compares the result with vLLM's.

    python scripts/bench/workloads.py --shape qwen3-8b --workload chat retrieval agent summary --requests 1 8 32 64 \
        --output ours.json
    python scripts/bench/workloads.py --target MODEL --drafter OUT/drafter-dflash --prompts gsm8k=gsm8k_test.jsonl \
        --workload chat mixed first-token --output ours.json
    python scripts/bench/workloads.py --compare ours.json vllm.json

`peers/vllm_workloads.py` writes the same file for vLLM; `scripts/traffic.py` defines the workloads. All requests of a
job are sent at once, have new prompts and write all their tokens. `agent` has two turns: the second prompt is the
first one, its answer and a new part; the row is the second turn. `mixed` sends a long prompt while requests decode;
`writing` has short prompts and long answers, so decoding decides.
`first-token` sends one prompt of each length. Each job runs once without counting, then `--repeats` times; the run
with the median time counts.

Weights of a shape are random, and each drafted position is accepted at random (`--accept`). Ways: `plain`; `blocks`,
with lengths that the engine chooses; `kN`, blocks of N drafted tokens; `trees`, for a real pair.
"""

import argparse
import gc
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dflash_toolkit import SamplingParams
from dflash_toolkit.command_line import run_command
from dflash_toolkit.config import UserError
from dflash_toolkit.data.prompts import encode_chat, read_prompt_sets
from dflash_toolkit.evaluation.report.markdown import render_table
from dflash_toolkit.files import write_json
from dflash_toolkit.generation import Step
from dflash_toolkit.models.target_files import load_tokenizer
from dflash_toolkit.runtime import Engine, EngineOptions, SyntheticAcceptance
from dflash_toolkit.runtime.graphs import no_collection
from dflash_toolkit.runtime.load import Parts, load_parts
from dflash_toolkit.runtime.request import Request

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, for `scripts`

from scripts.bench.tree_load import WAYS
from scripts.measure import setting, without_folders
from scripts.shapes import random_parts
from scripts.traffic import (
    WORKLOADS,
    Answer,
    Cell,
    Client,
    Source,
    cells_of,
    compare,
    measure_cells,
    random_tokens,
    show,
    text_tokens,
)


class Ours(Client):
    """Our engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def submit(self, prompt: list[int], max_tokens: int) -> Answer:
        answer = Answer(time.perf_counter())

        def arrived(request: Request, step: Step | None) -> None:
            if request.error is not None:
                raise request.error
            answer.add(time.perf_counter(), request.tokens[len(answer.tokens) :])
            answer.cached, answer.finished = request.cached_tokens, request.finished

        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        answer.handle = self._engine.submit(prompt, params, arrived)
        return answer

    def step(self) -> bool:
        return self._engine.step()

    def cancel(self, answer: Answer) -> None:
        self._engine.cancel(answer.handle)


def add_arguments(parser: argparse.ArgumentParser, ways: Sequence[str]) -> None:
    """Adds the arguments that both engines have.

    Args:
        ways: the ways of drafting, by default.
    """
    add = parser.add_argument
    add("--shape", help="named shape with random weights")
    add("--target", help="real target")
    add("--drafter", help="drafter of a real target")
    add("--prompts", nargs="+", default=[], metavar="NAME=SOURCE", help="text of a real target's prompts")
    names = f"{', '.join(WORKLOADS)}; first-token for all; chat=1,8 with its own requests"
    add("--workload", nargs="+", default=["chat"], metavar="NAME", help=names)
    add("--requests", type=int, nargs="+", default=[], help="requests at the same time (default: those of the goals)")
    add("--ways", nargs="+", metavar="WAY", help=f"ways of drafting (default: {' '.join(ways)})")
    add("--accept", type=float, default=0.865, help="acceptance rate of each position, with --shape")
    add("--repeats", type=int, default=3)
    add("--gpu-memory-utilization", type=float, default=0.85)
    add("--output", type=Path)


def check(args: argparse.Namespace) -> None:
    """Checks the arguments that both engines have. Raises UserError."""
    if bool(args.shape) == bool(args.target):
        raise UserError("give either --shape or --target")
    if args.target and not (args.drafter and args.prompts):
        raise UserError("--target needs --drafter and --prompts")
    if not 0.0 < args.accept < 1.0:
        raise UserError(f"--accept is {args.accept}; it must be between 0 and 1")
    if args.repeats < 1:
        raise UserError(f"--repeats is {args.repeats}; it must be >= 1")
    if args.output is None:
        raise UserError("--output is missing")
    if not args.output.absolute().parent.is_dir():
        raise UserError(f"--output {args.output}: no such directory")


def heading(script: str, engine: str, args: argparse.Namespace) -> dict[str, Any]:
    """Returns a result without rows."""
    result = setting(script, [without_folders(word) for word in args.argv])
    accept = args.accept if args.shape else None
    model = args.shape or Path(args.target).name
    return result | {"engine": engine, "model": model, "accept": accept, "engines": {}, "rows": []}


def source_of(args: argparse.Namespace, vocabulary: int) -> Source:
    """Returns the source of prompts: random tokens of a shape, or the given text. Raises UserError."""
    if args.shape:
        return random_tokens(vocabulary)
    tokenizer = load_tokenizer(args.target)
    return text_tokens(
        [encode_chat(tokenizer, r.messages) for rows in read_prompt_sets(args.prompts).values() for r in rows]
    )


def options_of(way: str, cells: Sequence[Cell], args: argparse.Namespace) -> EngineOptions:
    """Returns the options of an engine for a way of drafting. Raises UserError for an unknown way."""
    fixed = re.fullmatch(r"k([1-9]\d*)", way)
    if (way not in ("plain", "blocks", "trees") and not fixed) or (way == "trees" and args.shape):
        more = "" if args.shape else ", trees"
        raise UserError(f"--ways {way!r} is not known; known: plain, blocks, k15 and other lengths{more}")
    drafts = {"draft_tree": 0, "num_speculative_tokens": int(fixed[1])} if fixed else WAYS[way]
    accept = SyntheticAcceptance(rate=args.accept) if args.shape and way != "plain" else None
    return EngineOptions(
        max_num_seqs=max(cell.most for cell in cells),
        max_model_len=max(cell.workload.context for cell in cells),
        max_num_batched_tokens=args.max_num_batched_tokens,
        gpu_memory_utilization=args.gpu_memory_utilization,
        synthetic=accept,
        **drafts,
    )


def measure(parts: Parts, way: str, options: EngineOptions, args: argparse.Namespace, result: dict[str, Any]) -> None:
    """Measures all cells with one engine and writes the result after each of them. Raises UserError."""
    began = time.perf_counter()
    engine = (replace(parts, drafter=None) if way == "plain" else parts).engine(options)
    while engine.prepare(everything=True):
        pass
    result["engines"][way] = {"start_s": time.perf_counter() - began}
    source, cells = source_of(args, engine.vocabulary), cells_of(args.workload, args.requests)
    with no_collection():
        for row in measure_cells(Ours(engine), cells, source, args.repeats, way):
            result["rows"].append(row)
            show(row)
            write_json(args.output, result)
    lengths = {str(length): steps for length, steps in sorted(engine.stats.draft_lengths.items())}
    result["engines"][way]["draft_lengths"] = lengths
    write_json(args.output, result)


def run(args: argparse.Namespace) -> None:
    if args.compare:
        if len(args.compare) < 2:
            raise UserError("--compare needs our result and at least one of vLLM")
        print(render_table(compare(*args.compare)))
        return
    check(args)
    ways = args.ways or ["plain", "blocks", *(["trees"] if args.target else [])]
    cells = cells_of(args.workload, args.requests)
    options = {way: options_of(way, cells, args) for way in ways}
    if args.target:
        parts = load_parts(args.target, args.drafter, args.device)
    else:
        parts = random_parts(args.shape, args.layers, args.device, drafts=ways != ["plain"])
    result, refused = heading("bench/workloads.py", "ours", args), list[str]()
    for way in ways:
        try:
            measure(parts, way, options[way], args, result)
        except UserError as error:
            refused.append(f"{way}: {error}")
        gc.collect()  # frees the engine
    if refused:
        raise UserError("; ".join(refused))


def main(argv: Sequence[str] | None = None) -> int:
    """The program. Exit codes: 0 done, 2 a mistake (one line)."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, ["plain", "blocks", "trees"])
    parser.add_argument(
        "--compare", nargs="+", type=Path, metavar="OURS VLLM", help="print the ratios of results: ours, then vLLM's"
    )
    parser.add_argument(
        "--max-num-batched-tokens", type=int, help="prompt tokens between two steps (default: engine's)"
    )
    parser.add_argument("--layers", type=int, help="layers of the shape (default: all)")
    parser.add_argument("--device", default="auto")
    args = parser.parse_args(argv)
    args.argv = list(sys.argv[1:] if argv is None else argv)
    return run_command(lambda: run(args))


if __name__ == "__main__":
    raise SystemExit(main())
