"""Code that the programs under scripts/ share: machine, versions and command of a result; CUDA graphs; loads."""

import argparse
import contextlib
import fcntl
import importlib.metadata
import itertools
import os
import platform
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from dflash_toolkit.kernels.features import VARIABLE

PACKAGES = ("dflash-toolkit", "torch", "triton", "transformers")
PATIENCE_S = 300  # for engines that start together


def setting(script: str, argv: Sequence[str] | None = None) -> dict[str, Any]:
    """`gpu`, `versions` and `command` of a run of `scripts/{script}`.

    Args:
        argv: the script's arguments; None takes those of this process.
    """
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else f"cpu, {torch.get_num_threads()} threads"
    versions = {"python": platform.python_version()} | {
        name: importlib.metadata.version(name) for name in PACKAGES if _installed(name)
    }
    words = without_output(sys.argv[1:] if argv is None else argv)
    gpu += f", emulating {name}" if (name := os.environ.get(VARIABLE)) else ""
    return {"gpu": gpu, "versions": versions, "command": ["python", f"scripts/{script}", *words]}


def without_output(argv: Sequence[str]) -> list[str]:
    """A command's arguments for the record: where the result went does not matter to a reader."""
    kept = list(argv)
    if "--output" in kept:
        at = kept.index("--output")
        del kept[at : at + 2]
    return kept


def without_folders(argument: str) -> str:
    """Returns the command with absolute paths cut to their last part, for publication."""
    return re.sub(r"(^|=)/(?:[^/]*/)*", r"\1", argument)


def captured(work: Callable[..., Any], *args: Any) -> torch.cuda.CUDAGraph:
    """Captures `work(*args)` as a CUDA graph, after running it once."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # the stream may still write the inputs
    with torch.cuda.stream(stream):
        work(*args)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work(*args)
    graph.replay()
    return graph


def _installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


# ---- programs that share a GPU --------------------------------------------------------------------------------------


def add_together(parser: argparse.ArgumentParser) -> None:
    """Adds `--together`; `turn` takes its value."""
    text = "an empty folder for N engines that start together"
    parser.add_argument("--together", nargs=2, metavar=("FOLDER", "N"), help=text)


@contextlib.contextmanager
def turn(together: Sequence[str] | None) -> Iterator[None]:
    """Waits until all engines are ready, at most PATIENCE_S, and then for those that are timed.

    Args:
        together: a folder that the engines share, and their number; None for a single engine.
    """
    if together is None:
        yield
        return
    folder, count = Path(together[0]), int(together[1])
    (folder / f"ready-{os.getpid()}").touch()
    until = time.monotonic() + PATIENCE_S
    while len([*folder.glob("ready-*")]) < count and time.monotonic() < until:
        time.sleep(0.2)
    with open(folder / "timed", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


# ---- loads: requests at a time ---------------------------------------------------------------------------------------


class StepEngine(Protocol):
    """An engine that decodes requests; each step advances all of them."""

    def submit(self, prompt: list[int]) -> Any:
        """Returns a request, with `tokens` and `finished`."""

    def step(self) -> bool:
        """Runs a step; returns whether there may be more to do."""


def decode_load(
    engine: StepEngine, prompts: Sequence[list[int]], at_a_time: int
) -> tuple[dict[str, float], list[list[int]]]:
    """Decodes all prompts, `at_a_time` at once; a finished request makes room for the next.

    Returns:
        Tokens per second and seconds until fewer than `at_a_time` are left, the longest step in ms; and all answers.
    """
    waiting, running, done = iter(prompts), list[Any](), list[Any]()
    counted, seconds, longest = 0, 0.0, 0.0
    began = time.perf_counter()
    while True:
        running = [request for request in running if not request.finished]
        for prompt in itertools.islice(waiting, at_a_time - len(running)):
            running.append(engine.submit(prompt))
            done.append(running[-1])
        if len(running) < at_a_time and not seconds:  # fewer requests are left
            seconds, counted = time.perf_counter() - began, sum(len(request.tokens) for request in done)
        if not running:
            break
        at = time.perf_counter()
        engine.step()
        longest = max(longest, time.perf_counter() - at)
    while engine.step():
        pass  # steps that were still in flight
    figures = {"tokens_per_second": round(counted / seconds, 1), "seconds": round(seconds, 3)}
    return figures | {"longest_step_ms": round(1e3 * longest, 2)}, [request.tokens for request in done]


def fastest(runs: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Returns the fastest of equal runs, with all their tokens per second: other load on the machine only adds time."""
    best = max(runs, key=lambda figures: figures["tokens_per_second"])
    return best | {"every_tokens_per_second": [figures["tokens_per_second"] for figures in runs]}


def loads_of(sets: dict[str, list[list[int]]], args: argparse.Namespace) -> list[tuple[str, int, list[list[int]]]]:
    """Set, requests at a time and prompts of every load; a set that is too small comes again."""
    if len(sets) > 1:
        sets = sets | {"mixed": [p for turn in itertools.zip_longest(*sets.values()) for p in turn if p is not None]}
    return [
        (name, count, list(itertools.islice(itertools.cycle(sets[name]), max(args.rounds * count, args.least))))
        for name in sets
        if name in (args.sets or sets)
        for count in args.requests
    ]


def add_loads(parser: argparse.ArgumentParser) -> None:
    """The options that say what is decoded."""
    parser.add_argument("--target", required=True)
    parser.add_argument("--drafter", required=True)
    parser.add_argument("--prompts", nargs="+", required=True, metavar="NAME=SOURCE")
    parser.add_argument("--sets", nargs="+", metavar="NAME", help="decode these alone; `mixed` is all in turn")
    parser.add_argument("--limit", type=int, default=256, help="prompts of a set")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 4, 8, 16, 32, 64], help="at a time")
    parser.add_argument("--rounds", type=int, default=3, help="prompts of a load, times its requests")
    parser.add_argument("--least", type=int, default=8, help="prompts of a load")
    parser.add_argument("--repeats", type=int, default=3, help="of a load; the fastest counts")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--max-model-len", type=int, default=2048)
