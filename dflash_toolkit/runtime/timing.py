"""Measures the times of steps, and keeps them in the user's cache; the key has everything they depend on."""

import hashlib
import importlib
import itertools
import json
import math
import os
import statistics
import time
from bisect import bisect
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from ..kernels.features import features_of
from .graphs import buckets_up_to

Shape = tuple[int, ...]  # a step's batch and block; over trees: batch, rows, block
Times = dict[Shape, float]  # seconds of a step
# code that invalidates measured times when it changes: kernels, and the passes that are measured
KERNELS = Path(__file__).parents[1] / "kernels"
PASSES = ("graphs", "runner", "stack", "proposer", "verifier", "sampler", "batch_state", "step_times", "timing")
NOISE = 1.02  # speed-up of a step with more rows that counts as noise
AGAIN = 3  # maximum rounds of measuring again
MEASURED_ROWS = 1024  # rows of a step; the times of longer blocks are extrapolated


def measured_batches(max_num_seqs: int) -> list[int]:
    """Returns the batch sizes for which steps are measured: powers of two, and the largest."""
    return [n for n in buckets_up_to(max_num_seqs) if n == max_num_seqs or n & (n - 1) == 0]


def shapes_to_measure(max_num_seqs: int, sizes: Sequence[int]) -> list[Shape]:
    """Returns the batch and block of the steps to measure; `extended` derives the others."""
    return [
        (batch, size)
        for batch in measured_batches(max_num_seqs)
        for size in sizes
        if batch * size <= MEASURED_ROWS or size in sizes[:2]
    ]


def extended(times: Times, batches: Iterable[int], sizes: Sequence[int]) -> Times:
    """Returns the measured times and those of the other batches and blocks, which follow straight lines.

    A step over trees of a batch that was not measured takes the time of the same rows in the next smaller one, if the
    next larger one has none.
    """
    found, measured = dict(times), sorted({batch for batch, *_ in times})
    for batch in measured:
        for size in sizes[2:]:
            if (batch, size) not in found:
                shorter, shortest = sizes[sizes.index(size) - 1], sizes[sizes.index(size) - 2]
                slope = (found[batch, shorter] - found[batch, shortest]) / (shorter - shortest)
                found[batch, size] = found[batch, shorter] + max(slope, 0.0) * (size - shorter)
    for batch in batches:
        if batch not in measured:
            lower, upper = (measured[bisect(measured, batch) + i] for i in (-1, 0))
            share = (batch - lower) / (upper - lower)
            for _, *shape in [key for key in found if key[0] == lower and (len(key) == 2 or key[1] > batch)]:
                less = found[lower, *shape]
                found[batch, *shape] = less + share * (found.get((upper, *shape), less) - less)
    return found


def place_of(device: torch.device) -> tuple[object, ...]:
    """Returns the hardware, and the software except PyTorch, that times depend on.

    The features differ between cards of one name, slices of a card, and cards that it emulates.
    """
    if device.type != "cuda":
        return (device.type,)
    triton = importlib.import_module("triton").__version__
    return torch.cuda.get_device_name(device), asdict(features_of(device)), triton


def digest_of(key: object) -> str:
    """Returns a digest of a key and of the code of kernels and passes."""
    written = hashlib.sha256(json.dumps(key, sort_keys=True, default=str).encode())
    here = Path(__file__).parent
    programs = [*sorted((here / "programs").glob("*.py")), *sorted((here / "trees").glob("*.py"))]
    for path in [*sorted(KERNELS.rglob("*.py")), *programs, *(here / f"{name}.py" for name in PASSES)]:
        written.update(path.read_bytes())
    return written.hexdigest()[:16]


def cached_times(key: object, measure: Callable[[], Times], again: bool = False) -> Times:
    """Returns times from the user's cache; measures and stores them if necessary.

    Args:
        key: everything they depend on, except the code.
        again: measure in any case.
    """
    digest = digest_of(key)
    root = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    if not root.is_absolute():  # the user has no home directory
        return measure()
    path = root / "dflash-toolkit" / f"times-{digest}.json"
    try:
        if again:
            raise FileNotFoundError
        return {tuple(shape): t for *shape, t in json.loads(path.read_text())["seconds"]}
    except (OSError, ValueError, KeyError, TypeError):
        times = measure()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(
            json.dumps({"key": key, "seconds": [[*shape, t] for shape, t in times.items()]}, default=str)
        )
        temporary.replace(path)
    except OSError:
        pass  # without a cache, the next start takes a second longer
    return times


def measured_times(
    steps: Mapping[Shape, Callable[[], object]],
    clock: Callable[[Callable[[], object]], float],
    samples: int,
    again_s: float,
) -> Times:
    """Returns the median seconds of every step.

    The samples of all steps alternate, so that other load does not slow down one step alone. If a step of more rows was
    faster, both are measured again.

    Args:
        steps: functions that run a step, by shape.
        clock: returns the seconds of one run.
        again_s: maximum seconds of measuring again.
    """

    def sampled(shapes: Collection[Shape], until: float) -> Times:
        found: dict[Shape, list[float]] = {shape: [] for shape in shapes}
        for _ in range(samples):
            if time.perf_counter() > until:
                return {}
            for shape in shapes:
                found[shape].append(clock(steps[shape]))
        return {shape: statistics.median(seconds) for shape, seconds in found.items()}

    times = sampled(steps, math.inf)
    until = time.perf_counter() + again_s
    for _ in range(AGAIN):
        if not (odd := out_of_order(times)):
            break
        times |= sampled(odd, until)
    return times


def out_of_order(times: Times) -> list[Shape]:
    """Returns pairs of shapes that differ along one axis, where the larger one was faster."""
    odd: set[Shape] = set()
    for axis in range(max(map(len, times), default=0)):
        lines = defaultdict[object, list[Shape]](list)
        for shape in sorted(times):
            if axis < len(shape):
                lines[shape[:axis], shape[axis + 1 :]].append(shape)
        for line in lines.values():
            for smaller, shape in itertools.pairwise(line):
                if times[smaller] > NOISE * times[shape]:
                    odd |= {smaller, shape}
    return sorted(odd)


def seconds_of(run: Callable[[], object], device: torch.device) -> float:
    """Returns the seconds of a run, by the device's clock if it has one."""
    if device.type == "cuda":
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def median_seconds(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Returns the median seconds of `run`, see `seconds_of`."""
    return statistics.median(seconds_of(run, device) for _ in range(repeats))
