"""Measures a drafter that learns from an engine's traffic: tokens per second and per step against time.

    python scripts/bench/adapt.py --target MODEL --prompts math=math.jsonl code=code.jsonl --answers gsm8k_train.jsonl \
        --phases math=150 code=80 math=10 tune math=60 kill=3 --output adapt.json

1. An engine without a drafter decodes each set for --short seconds (`plain`), and answers the first CHECKED prompts.
2. An engine with --adapt, from --drafter or from nothing, serves the phases one after the other, so many requests at a
   time, greedily. `tune` fine-tunes the target on --answers (`warm_start.py`) and replaces it; `kill=SECONDS` kills the
   trainer and serves on.
3. The drafter that each phase began with serves that phase's set again for --short seconds, without a trainer
   (`frozen`), and so does no drafter after `tune`.

Each CHECK_EVERY-th request is one of the first CHECKED prompts of its set. It is never learned from: `held_out` is the
tokens per step of these requests, and `wrong` counts those with another answer than the plain one. Windows without an
end are not reported. The file is written after every window.
"""

import argparse
import copy
import os
import signal
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import load_file
from torch import Tensor

from dflash_toolkit import SamplingParams
from dflash_toolkit.checkpoint.reader import weight_files
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

from scripts.bench.warm_start import fine_tuned
from scripts.measure import setting, without_folders

PREPARE_S = 30.0  # most time to capture steps before the first request
CHECKED, CHECK_EVERY = 64, 8
Answers = dict[tuple[str, int], list[int]]  # by set and number of the prompt


@dataclass
class Traffic:
    """Endless prompts of one set; the first ones are only checked."""

    name: str
    prompts: list[list[int]]
    sent: int = 0

    @property
    def checked(self) -> int:
        return max(1, min(CHECKED, len(self.prompts) // 2))

    def next(self) -> tuple[int, list[int]]:
        """Returns the number of a prompt and its tokens."""
        turn, place = divmod(self.sent, CHECK_EVERY)
        self.sent += 1
        learned = len(self.prompts) - self.checked
        at = turn % self.checked if place == 0 else self.checked + (self.sent - turn - 2) % learned
        return at, self.prompts[at]


@dataclass
class Counts:
    """Tokens and steps of requests, and the answers to checked prompts."""

    tokens: int = 0
    steps: int = 0
    held_out: list[int] = field(default_factory=lambda: [0, 0])
    requests: int = 0
    compared: int = 0
    wrong: int = 0


def read_traffic(args: Namespace) -> dict[str, Traffic]:
    tokenizer = load_tokenizer(args.target)
    sets = read_prompt_sets(args.prompts, args.limit)
    return {
        name: Traffic(name, [encode_chat(tokenizer, prompt.messages) for prompt in prompts])
        for name, prompts in sets.items()
    }


def serve(
    engine: Engine, traffic: Traffic, args: Namespace, seconds: float, expected: Answers,
    poll: Callable[[], object] = lambda: None,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Yields a row for each window. Answers to checked prompts without an expected one are added to `expected`."""
    params, running = SamplingParams(max_tokens=args.max_tokens), list[tuple[int, Request]]()
    began, closes, longest, turned = time.perf_counter(), args.window, 0.0, 0.0
    total, before = Counts(), Counts()
    while closes <= max(seconds, args.window) + 1e-6:
        while len(running) < args.requests:
            number, prompt = traffic.next()
            running.append((number, engine.submit(prompt, params, store=number >= traffic.checked)))
        engine.step()
        poll()
        now = time.perf_counter() - began
        longest, turned = max(longest, now - turned), now
        for number, request in [entry for entry in running if entry[1].finished]:
            running.remove((number, request))
            tokens, steps = counts_of(request)
            total.tokens, total.steps, total.requests = total.tokens + tokens, total.steps + steps, total.requests + 1
            if number < traffic.checked:
                answer = expected.setdefault((traffic.name, number), request.tokens)
                total.held_out = [total.held_out[0] + tokens, total.held_out[1] + steps]
                total.compared, total.wrong = total.compared + 1, total.wrong + (answer != request.tokens)
        if now < closes:
            continue
        under_way = [counts_of(request) for _, request in running]
        reached = [total.tokens + sum(t for t, _ in under_way), total.steps + sum(s for _, s in under_way)]
        counted = [reached[0] - before.tokens, max(reached[1] - before.steps, 1)]
        held = [after - earlier for after, earlier in zip(total.held_out, before.held_out, strict=True)]
        yield {
            "phase_second": now, "tokens_per_second": counted[0] / (now - closes + args.window),
            "tokens_per_step": counted[0] / counted[1], "held_out": held[0] / held[1] if held[1] else None,
            "requests": total.requests - before.requests, "compared": total.compared - before.compared,
            "wrong": total.wrong - before.wrong, "longest_turn_ms": 1e3 * longest,
            "drafter_version": engine.drafter_version, "gib": used_gib(engine.runner.device),
            "host_mib": resident_mib(os.getpid()),
        }  # fmt: skip
        before = Counts(*reached, list(total.held_out), total.requests, total.compared, total.wrong)
        closes, longest = now + args.window, 0.0
    for _, request in running:
        engine.cancel(request)
    while engine.step():
        pass


def counts_of(request: Request) -> tuple[int, int]:
    """Returns the tokens that steps have committed, and the number of these steps."""
    return sum(len(step.tokens) for step in request.generation.steps), len(request.generation.steps)


def used_gib(device: torch.device) -> float | None:
    """Returns the memory of the GPU in use, of all processes."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    return (total - free) / 2**30


def resident_mib(process: int) -> float | None:
    """Returns the host memory of a process, where the system tells it."""
    try:
        pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def answer_checked(engine: Engine, traffic: Traffic, args: Namespace) -> Answers:
    """Returns answers to the checked prompts, no more at a time than requests, see docs/correctness.md."""
    params, found = SamplingParams(max_tokens=args.max_tokens), Answers()
    for at in range(0, traffic.checked, args.requests):
        some = traffic.prompts[at : min(at + args.requests, traffic.checked)]
        found |= {(traffic.name, at + i): each.tokens for i, each in enumerate(engine.generate(some, params))}
    return found


def prepare(engine: Engine) -> None:
    began = time.perf_counter()
    while time.perf_counter() - began < PREPARE_S and engine.prepare(everything=True):
        pass


class Study:
    """The phases of a run, and the file with their rows."""

    def __init__(self, args: Namespace, argv: list[str] | None) -> None:
        self._args, self._traffic = args, read_traffic(args)
        self._targets, self._answers = [args.target], [Answers()]  # directories, and answers of each target
        self._began = time.perf_counter()
        self.result = setting("bench/adapt.py", argv)
        self.result["command"] = [without_folders(word) for word in self.result["command"]]
        self.result |= {"plain": [], "adapted": [], "frozen": [], "seconds": {}}

    def run(self) -> None:
        args = self._args
        adaptation = AdaptOptions(
            adapt=True, adapt_device=args.device, adapt_share=args.share, adapt_memory_gib=args.buffer,
            adapt_learning_rate=args.rate,
        )  # fmt: skip
        config = ServeConfig(target=args.target, drafter=args.drafter, adaptation=adaptation)
        options = EngineOptions(
            max_num_seqs=args.requests, max_model_len=args.max_model_len, prefix_cache=False,
            gpu_memory_utilization=args.memory,
        )  # fmt: skip
        self._decode_plainly(load_parts(args.target, None).engine(replace(options, num_speculative_tokens=0)))
        drafter = first_drafter(config)
        engine = load_parts(args.target, copy.deepcopy(drafter)).engine(replace(options, keep_taps=True))
        with closing(Adapting(engine, drafter, config)) as adapting:
            prepare(engine)
            self._note("engine ready")
            self.result["break_even"] = engine.break_even
            begins = self._adapt(engine, adapting)
        for name, number, tensors in begins[1:]:
            engine.update_target(weights_of(self._targets[number]))
            if number and not any(row["target"] == number for row in self.result["plain"]):
                engine.stop_drafting()
                self._rows("plain", engine, name, args.short, number)
            engine.stop_drafting() if tensors is None else engine.update_drafter(tensors)
            self._rows("frozen", engine, name, args.short, number)

    def _decode_plainly(self, engine: Engine) -> None:
        prepare(engine)
        self._note("plain engine ready")
        for name in dict.fromkeys(phase.partition("=")[0] for phase in self._args.phases):
            if name in self._traffic:
                self._answers[0] |= answer_checked(engine, self._traffic[name], self._args)
                self._rows("plain", engine, name, self._args.short, 0)

    def _adapt(self, engine: Engine, adapting: Adapting) -> list[tuple[str, int, dict[str, Tensor] | None]]:
        """Serves the phases; returns the set of each, and the target and the drafter that it began with."""
        begins: list[tuple[str, int, dict[str, Tensor] | None]] = []
        for phase in self._args.phases:
            name, _, seconds = phase.partition("=")
            if name == "tune":
                self._tune(engine, adapting.trainer.pid)
                continue
            if name == "kill":
                os.kill(adapting.trainer.pid, signal.SIGKILL)
                name = begins[-1][0]
            else:
                begins.append((name, len(self._targets) - 1, drafter_of(engine)))
            self._rows("adapted", engine, name, float(seconds), len(self._targets) - 1, adapting)
        return begins

    def _rows(
        self, kind: str, engine: Engine, name: str, seconds: float, target: int, adapting: Adapting | None = None
    ) -> None:
        """Serves a set, and adds a row for each window."""
        poll = adapting.poll if adapting is not None else lambda: None
        for row in serve(engine, self._traffic[name], self._args, seconds, self._answers[target], poll):
            row |= {"set": name, "second": time.perf_counter() - self._began, "target": target}
            if adapting is not None:
                row["training"] = msgspec.to_builtins(adapting.report())
                row["trainer_mib"] = resident_mib(adapting.trainer.pid)
            self.result[kind].append(row)
            write_json(self._args.output, self.result)
        last = self.result[kind][-1]
        print(
            f"{kind} {name}: {last['tokens_per_second']:.0f} tokens/s, {last['tokens_per_step']:.2f} tokens per step, "
            f"version {last['drafter_version']}, {last['wrong']} of {last['compared']} differ",
            flush=True,
        )

    def _tune(self, engine: Engine, trainer: int) -> None:
        """Replaces the target by a fine-tuned one, while the trainer waits."""
        folder = self._args.output.with_suffix(".target")
        os.kill(trainer, signal.SIGSTOP)
        try:
            self.result["tuning"] = fine_tuned(Namespace(**vars(self._args) | {"device": "auto"}), folder)
        finally:
            os.kill(trainer, signal.SIGCONT)
        engine.update_target(weights_of(str(folder)))
        self._targets.append(str(folder))
        self._answers.append(Answers())
        self._note("tuned")

    def _note(self, what: str) -> None:
        self.result["seconds"][what] = time.perf_counter() - self._began
        print(f"{what}: {self.result['seconds'][what]:.0f} s", flush=True)


def drafter_of(engine: Engine) -> dict[str, Tensor] | None:
    """Returns a copy of the served drafter, or None if the engine decodes plainly."""
    weights = engine.runner.drafter
    if weights is None or not engine.runner.drafting:
        return None
    return {name: view.clone() for name, view in weights.parameter_views().items()}


def weights_of(folder: str) -> dict[str, Tensor]:
    return {name: tensor for file in weight_files(Path(folder)) for name, tensor in load_file(file).items()}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--target", required=True, help="folder of the target")
    add("--drafter", help="drafter to start from (default: random weights, and plain decoding at first)")
    add("--prompts", nargs="+", required=True, metavar="NAME=SOURCE")
    add("--phases", nargs="+", required=True, metavar="NAME=SECONDS", help="sets to serve; also tune and kill=SECONDS")
    add("--limit", type=int, default=10000, help="prompts of a set")
    add("--requests", type=int, default=8, help="requests at a time")
    add("--max-tokens", type=int, default=256)
    add("--max-model-len", type=int, default=2048)
    add("--window", type=float, default=5.0, help="seconds of a row")
    add("--short", type=float, default=5.0, help="seconds of `plain` and `frozen`")
    add("--device", help="of the trainer (default: the engine's)")
    add("--share", type=float, default=0.1)
    add("--rate", type=float, help="learning rate (default: that of dflash-serve)")
    add("--buffer", type=float, default=4.0, help="GiB of captured records")
    add("--memory", type=float, default=0.4, help="share of the GPU's memory for the engine")
    add("--answers", nargs="+", default=[], metavar="SOURCE", help="conversations of `tune`")
    add("--tokens", type=int, default=256, help="half of the longest conversation of `tune`")
    add("--tune-layers", type=int, default=8)
    add("--tune-steps", type=int, default=100)
    add("--tune-rate", type=float, default=1e-4)
    add("--tune-rows", type=int, default=16)
    add("--output", type=Path, required=True)
    args = parser.parse_args(argv)
    sets = {name.partition("=")[0] for name in args.prompts}
    for phase in args.phases:
        word, _, seconds = phase.partition("=")
        if word != "tune" and (word not in sets | {"kill"} or not seconds.replace(".", "", 1).isdigit()):
            known = ", ".join(sorted(sets))
            parser.error(f"phase {phase!r} is neither tune nor kill=SECONDS nor one of {known}=SECONDS")
    return run_command(lambda: Study(args, argv).run())


if __name__ == "__main__":
    raise SystemExit(main())
