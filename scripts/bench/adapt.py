"""Measures a drafter that learns from an engine's traffic: tokens per step and per second against time.

    python scripts/bench/adapt.py --target MODEL --drafter OUT/mine --prompts mbpp=mbpp.jsonl --requests 8 \
        --seconds 300 --ways plain frozen adapted --output adapt.json

Every way serves the prompts in the same order, so many at a time, greedily, until the time is over. `frozen` keeps the
drafter. `adapted` trains it in another process, on `--device` or on the same GPU at `--share` of the time. With
`--fresh` both start from random weights of that drafter's shape. `wrong` counts answers that differ from the first
way's.
"""

import argparse
import itertools
import sys
import time
from collections.abc import Iterator
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import torch

from dflash_toolkit import Drafter, SamplingParams, load_drafter
from dflash_toolkit.config import run_command
from dflash_toolkit.data.prompts import encode_chat, read_prompt_sets
from dflash_toolkit.files import write_json
from dflash_toolkit.models.target import load_config, load_tokenizer
from dflash_toolkit.runtime import Engine, EngineOptions
from dflash_toolkit.runtime.load import load_parts
from dflash_toolkit.runtime.request import Request
from dflash_toolkit.train.config import LossOptions, OptimOptions, RunOptions, TrainConfig
from dflash_toolkit.train.live.process import TrainerProcess
from dflash_toolkit.train.objective.target_head import HeadWeights

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, for `scripts`

from scripts.measure import setting, without_folders


def prompts_of(args: argparse.Namespace) -> list[list[int]]:
    """Returns the prompts of all sets in turn."""
    tokenizer = load_tokenizer(args.target)
    sets = read_prompt_sets(args.prompts, args.limit)
    turns = itertools.zip_longest(*sets.values())
    return [encode_chat(tokenizer, prompt.messages) for turn in turns for prompt in turn if prompt is not None]


def serve(engine: Engine, prompts: list[list[int]], args: argparse.Namespace, poll: Any) -> Iterator[dict[str, Any]]:
    """Yields a row for each window, and then the answers."""
    params = SamplingParams(max_tokens=args.max_tokens)
    coming, running = itertools.cycle(enumerate(prompts)), list[tuple[int, Request]]()
    answers = dict[int, list[int]]()
    began, done, before = time.perf_counter(), False, (0, 0)
    tokens = steps = 0
    closes = args.window
    while not done:
        while len(running) < args.requests:
            number, prompt = next(coming)
            running.append((number, engine.submit(prompt, params)))
        engine.step()
        poll()
        for number, request in [entry for entry in running if entry[1].finished]:
            running.remove((number, request))
            answers[number] = request.tokens
            tokens += sum(len(step.tokens) for step in request.generation.steps)
            steps += len(request.generation.steps)
        now = time.perf_counter() - began
        if now >= closes:
            counted = tokens - before[0], max(steps - before[1], 1)
            yield {"second": now, "tokens_per_second": counted[0] / (now - closes + args.window),
                   "tokens_per_step": counted[0] / counted[1], "drafter_version": engine.drafter_version}  # fmt: skip
            before, closes = (tokens, steps), now + args.window
            done = now >= args.seconds
    for _, request in running:
        engine.cancel(request)
    yield {"answers": answers}


def measure(way: str, drafter: Drafter, prompts: list[list[int]], args: argparse.Namespace) -> dict[str, Any]:
    parts = load_parts(args.target, None if way == "plain" else drafter)
    options = EngineOptions(
        max_num_seqs=args.requests, max_model_len=args.max_model_len, keep_taps=way == "adapted", draft_tree=0,
        num_speculative_tokens=0 if way == "plain" else drafter.config.block_size - 1 if args.fixed else None,
        gpu_memory_utilization=args.memory, prefix_cache=False,
    )  # fmt: skip
    engine = parts.engine(options)
    while engine.prepare(everything=True):
        pass
    trainer: Any = nullcontext()
    if way == "adapted":
        head = HeadWeights(parts.target.embedding, parts.target.head, None, load_config(args.target))
        optim = OptimOptions(ema=0.9, learning_rate=args.learning_rate, pack_tokens=args.pack, batch_size=4)
        config = TrainConfig(target="", optim=optim, loss=LossOptions(), run=RunOptions(compile="off"))
        made = TrainerProcess(
            engine, head, drafter, config, device=args.device, share=args.share, batch=args.batch, every=args.every,
            memory=int(args.buffer * 2**30),
        )  # fmt: skip
        trainer = closing(made)
    with trainer:
        *rows, last = serve(engine, prompts, args, made.poll if way == "adapted" else lambda: None)
        status = [getattr(made.status, name) for name in made.status.__slots__] if way == "adapted" else []
        found = {"rows": rows, "answers": last["answers"]}
        if way == "adapted":
            found |= {"status": dict(zip(made.status.__slots__, status, strict=True)), "error": made.error}
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--drafter", required=True)
    parser.add_argument("--prompts", nargs="+", required=True, metavar="NAME=SOURCE")
    parser.add_argument("--limit", type=int, default=4000)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--window", type=float, default=10.0)
    parser.add_argument("--ways", nargs="+", default=["plain", "frozen", "adapted"])
    parser.add_argument("--fresh", action="store_true", help="start from random weights of the drafter's shape")
    parser.add_argument("--fixed", action="store_true", help="draft whole blocks in every step")
    parser.add_argument("--device", help="of the trainer (default: the engine's)")
    parser.add_argument("--share", type=float, default=0.1)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--every", type=int, default=20)
    parser.add_argument("--buffer", type=float, default=4.0, help="GiB of captured records")
    parser.add_argument("--pack", type=int, help="tokens of a training batch (default: that of dflash-train)")
    parser.add_argument("--learning-rate", type=float)
    parser.add_argument("--memory", type=float, default=0.5, help="share of the GPU's memory for the engine")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args(argv)
    return run_command(lambda: run(args, argv))


def run(args: argparse.Namespace, argv: list[str] | None) -> None:
    prompts = prompts_of(args)
    drafter = load_drafter(args.drafter, dtype=torch.float32)
    if args.fresh:
        drafter = Drafter.fresh(drafter.config, 0)
    result = setting("bench/adapt.py", argv) | {"ways": {}}
    result["command"] = [without_folders(word) for word in result["command"]]
    expected: dict[int, list[int]] = {}
    for way in args.ways:
        found = measure(way, drafter, prompts, args)
        answers = found.pop("answers")
        both = [number for number in answers if number in expected]
        found["wrong"], found["compared"] = sum(answers[n] != expected[n] for n in both), len(both)
        expected = expected or answers
        result["ways"][way] = found
        write_json(args.output, result)
        last = found["rows"][-1]
        print(f"{way}: {last['tokens_per_second']:.0f} tokens/s, {last['tokens_per_step']:.2f} tokens per step at the "
              f"end, version {last['drafter_version']}, {found['wrong']} of {len(both)} answers differ")  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main())
