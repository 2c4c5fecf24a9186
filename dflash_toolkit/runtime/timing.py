"""Measured times, and where they are kept: a user's cache, by what they depend on."""

import hashlib
import importlib
import itertools
import json
import math
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import torch

Shape = tuple[int, ...]  # of a step: batch and block; of one that verifies trees batch, rows and the drafter's block
Times = dict[Shape, float]  # seconds of a step
# the code whose changes make measured times void: kernels, and the passes that are measured
KERNELS = Path(__file__).parents[1] / "kernels"
PASSES = ("graphs", "runner", "stack", "proposer", "verifier", "sampler", "batch_state", "step_times", "timing")
NOISE = 1.02  # a step of more rows may have been faster by so much
AGAIN = 3  # rounds in which times are measured again, at most


def place_of(device: torch.device) -> tuple[str, ...]:
    """What runs there, as far as it decides about times beside PyTorch."""
    if device.type != "cuda":
        return (device.type,)
    return torch.cuda.get_device_name(device), importlib.import_module("triton").__version__


def cached_times(key: object, measure: Callable[[], Times], anew: bool = False) -> Times:
    """Times from the user's cache, or measured and put there.

    Args:
        key: what they depend on besides the code.
        anew: measure, whatever is there.
    """
    written = hashlib.sha256(json.dumps(key, sort_keys=True, default=str).encode())
    here = Path(__file__).parent
    programs = [*sorted((here / "programs").glob("*.py")), *sorted((here / "trees").glob("*.py"))]
    for path in [*sorted(KERNELS.rglob("*.py")), *programs, *(here / f"{name}.py" for name in PASSES)]:
        written.update(path.read_bytes())
    digest = written.hexdigest()[:16]
    root = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    if not root.is_absolute():  # a user without a home
        return measure()
    path = root / "dflash-toolkit" / f"times-{digest}.json"
    try:
        if anew:
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
        pass  # a cache that cannot be written costs a second at the next start
    return times


def measured_times(
    steps: Mapping[Shape, Callable[[], object]],
    clock: Callable[[Callable[[], object]], float],
    samples: int,
    again_s: float,
) -> Times:
    """Median seconds of every step, whose samples take turns with those of the others: nothing else that runs for a
    while is in one step's alone. Where a step of more rows was faster, both are measured again.

    Args:
        steps: what to run, by shape.
        clock: the seconds of one run.
        again_s: seconds that measuring again may take.
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
    """Shapes of which one is larger than the next smaller along one axis, alike along the others, and was faster."""
    odd: set[Shape] = set()
    for axis in range(max(map(len, times), default=0)):
        alike = defaultdict[object, list[Shape]](list)
        for shape in sorted(times):
            if axis < len(shape):
                alike[shape[:axis], shape[axis + 1 :]].append(shape)
        for line in alike.values():
            for smaller, shape in itertools.pairwise(line):
                if times[smaller] > NOISE * times[shape]:
                    odd |= {smaller, shape}
    return sorted(odd)


def seconds_of(run: Callable[[], object], device: torch.device) -> float:
    """On the device's clock where it has one."""
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
    """Median time of `run`, see `seconds_of`."""
    return statistics.median(seconds_of(run, device) for _ in range(repeats))
