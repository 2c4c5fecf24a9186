"""Measures a drafter that learns from an engine's traffic: tokens per step and per second against time.

    python scripts/bench/adapt.py --target MODEL --drafter OUT/mine --prompts mbpp=mbpp.jsonl --requests 8 \
        --seconds 300 --ways plain frozen adapted --output adapt.json

Every way serves the prompts in the same order, N at a time, greedily, until the time is over, with the options of
dflash-serve. `frozen` keeps the drafter. `adapted` trains it in another process, on `--device` or on the same GPU at
`--share` of its speed. Without `--drafter` both start from random weights. A way may have its own seconds, as plain=30.
`wrong` counts answers that differ from the first way's, of the first prompts, which are sent again at the end.
"""

import argparse
import copy
import itertools
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import msgspec
import torch

from dflash_toolkit import SamplingParams
from dflash_toolkit.command_line import run_command
from dflash_toolkit.data.prompts import encode_chat, read_prompt_sets
from dflash_toolkit.files import write_json
from dflash_toolkit.models.target_files import load_tokenizer
from dflash_toolkit.runtime import Engine, EngineOptions
from dflash_toolkit.runtime.load import load_parts
from dflash_toolkit.runtime.request import Request
from dflash_toolkit.serve.adapt import Adapting, first_drafter
from dflash_toolkit.serve.config import AdaptOptions, ServeConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, for `scripts`

from scripts.measure import setting, without_folders

PREPARE_S = 40.0  # most time to capture steps before the first request
CHECKED = 64  # prompts; their answers are compared


def prompts_of(args: argparse.Namespace) -> list[list[int]]:
    """Returns the prompts of all sets in turn."""
    tokenizer = load_tokenizer(args.target)
    sets = read_prompt_sets(args.prompts, args.limit)
    turns = itertools.zip_longest(*sets.values())
    return [encode_chat(tokenizer, prompt.messages) for turn in turns for prompt in turn if prompt is not None]


def serve(
    engine: Engine, prompts: list[list[int]], args: argparse.Namespace, seconds: float, poll: Any
) -> Iterator[dict[str, Any]]:
    """Yields a row for each window."""
    params = SamplingParams(max_tokens=args.max_tokens)
    coming, running = itertools.cycle(enumerate(prompts)), list[tuple[int, Request]]()
    began, done, before = time.perf_counter(), False, (0, 0)
    finished, closes = [0, 0], args.window
    while not done:
        while len(running) < args.requests:
            number, prompt = next(coming)
            running.append((number, engine.submit(prompt, params)))
        engine.step()
        poll()
        for number, request in [entry for entry in running if entry[1].finished]:
            running.remove((number, request))
            finished = [sum(pair) for pair in zip(finished, counts_of(request), strict=True)]
        now = time.perf_counter() - began
        if now >= closes:
            tokens, steps = map(sum, zip(finished, *(counts_of(request) for _, request in running), strict=True))
            counted = tokens - before[0], max(steps - before[1], 1)
            yield {"second": now, "tokens_per_second": counted[0] / (now - closes + args.window),
                   "tokens_per_step": counted[0] / counted[1], "drafter_version": engine.drafter_version,
                   "gib": used_gib(engine.runner.device)}  # fmt: skip
            before, closes = (tokens, steps), now + args.window
            done = now >= seconds
    for _, request in running:
        engine.cancel(request)


def counts_of(request: Request) -> tuple[int, int]:
    """Returns the tokens that steps have committed, and the number of these steps."""
    return sum(len(step.tokens) for step in request.generation.steps), len(request.generation.steps)


def used_gib(device: torch.device) -> float:
    """Returns the memory in use, of all processes on a GPU, or of this process on a CPU."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return (total - free) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def measure(
    way: str,
    seconds: float,
    config: ServeConfig,
    prompts: list[list[int]],
    args: argparse.Namespace,
    report: Callable[[dict[str, Any]], object],
) -> tuple[dict[str, Any], dict[int, list[int]]]:
    """Returns a row for each window, and the answers to the first prompts by the last drafter."""
    drafter = first_drafter(config)
    parts = load_parts(args.target, None if way == "plain" else copy.deepcopy(drafter))
    options = EngineOptions(
        max_num_seqs=args.requests, max_model_len=args.max_model_len, keep_taps=way == "adapted",
        num_speculative_tokens=0 if way == "plain" else None, gpu_memory_utilization=args.memory, prefix_cache=False,
    )  # fmt: skip
    engine = parts.engine(options)
    found: dict[str, Any] = {"rows": []}
    with closing(Adapting(engine, drafter, config)) if way == "adapted" else nullcontext() as adapting:
        began = time.perf_counter()
        while time.perf_counter() - began < PREPARE_S and engine.prepare(everything=True):
            pass
        for row in serve(engine, prompts, args, seconds, adapting.poll if adapting else lambda: None):
            found["rows"].append(row)
            if adapting:
                found["training"] = msgspec.to_builtins(adapting.report())
                row |= {name: found["training"][name] for name in ("steps", "busy_share")}
            report(found)
    answers = dict[int, list[int]]()
    for at in range(0, min(CHECKED, len(prompts)), args.requests):  # no more at a time, see docs/correctness.md
        some = prompts[at : min(at + args.requests, CHECKED)]
        got = engine.generate(some, SamplingParams(max_tokens=args.max_tokens))
        answers |= {at + i: each.tokens for i, each in enumerate(got)}
    return found, answers


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--drafter")
    parser.add_argument("--prompts", nargs="+", required=True, metavar="NAME=SOURCE")
    parser.add_argument("--limit", type=int, default=4000)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--window", type=float, default=10.0)
    parser.add_argument("--ways", nargs="+", default=["plain", "frozen", "adapted"])
    parser.add_argument("--device", help="of the trainer (default: the engine's)")
    parser.add_argument("--share", type=float, default=0.1)
    parser.add_argument("--rate", type=float, help="learning rate (default: that of dflash-serve)")
    parser.add_argument("--buffer", type=float, default=4.0, help="GiB of captured records")
    parser.add_argument("--memory", type=float, default=0.5, help="share of the GPU's memory for the engine")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args(argv)
    return run_command(lambda: run(args, argv))


def run(args: argparse.Namespace, argv: list[str] | None) -> None:
    prompts = prompts_of(args)
    adaptation = AdaptOptions(
        adapt=True, adapt_device=args.device, adapt_share=args.share, adapt_memory_gib=args.buffer,
        adapt_learning_rate=args.rate,
    )  # fmt: skip
    config = ServeConfig(target=args.target, drafter=args.drafter, adaptation=adaptation)
    result = setting("bench/adapt.py", argv) | {"ways": {}}
    result["command"] = [without_folders(word) for word in result["command"]]
    expected: dict[int, list[int]] = {}
    for way in args.ways:
        way, _, seconds = way.partition("=")

        def report(found: dict[str, Any], way: str = way) -> None:
            result["ways"][way] = found
            write_json(args.output, result)

        found, answers = measure(way, float(seconds or args.seconds), config, prompts, args, report)
        expected = expected or answers
        found |= {"wrong": sum(answers[n] != expected[n] for n in answers), "compared": len(answers)}
        report(found)
        last = found["rows"][-1]
        print(f"{way}: {last['tokens_per_second']:.0f} tokens/s, {last['tokens_per_step']:.2f} tokens per step at the "
              f"end, version {last['drafter_version']}, {found['wrong']} of {len(answers)} answers differ")  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main())
