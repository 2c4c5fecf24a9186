"""Measured times, and where they are kept: a user's cache, by what they depend on."""

import hashlib
import importlib
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

Times = dict[tuple[int, int], float]  # seconds of a step, by batch and block
KERNELS = Path(__file__).parents[1] / "kernels"  # other ones take other times, as do other
PASSES = [Path(__file__).with_name(f"{name}.py") for name in ("runner", "stack", "proposer", "verifier", "sampler")]


def place_of(device: torch.device) -> tuple[str, ...]:
    """What runs there, as far as it decides about times beside PyTorch."""
    if device.type != "cuda":
        return (device.type,)
    return torch.cuda.get_device_name(device), importlib.import_module("triton").__version__


def cached_times(key: object, measure: Callable[[], Times]) -> Times:
    """Times from the user's cache, or measured and put there. `key`: what they depend on besides the code."""
    written = hashlib.sha256(json.dumps(key, sort_keys=True, default=str).encode())
    for path in [*sorted(KERNELS.rglob("*.py")), *PASSES]:
        written.update(path.read_bytes())
    digest = written.hexdigest()[:16]
    root = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    if not root.is_absolute():  # a user without a home
        return measure()
    path = root / "dflash-toolkit" / f"times-{digest}.json"
    try:
        return {(b, s): t for b, s, t in json.loads(path.read_text())["seconds"]}
    except (OSError, ValueError, KeyError, TypeError):
        times = measure()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(
            json.dumps({"key": key, "seconds": [[b, s, t] for (b, s), t in times.items()]}, default=str)
        )
        temporary.replace(path)
    except OSError:
        pass  # a cache that cannot be written costs a second at the next start
    return times


def median_seconds(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median time of `run`, on the device's clock where it has one."""
    seconds = []
    for _ in range(repeats):
        if device.type == "cuda":
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            run()
            end.record()
            end.synchronize()
            seconds.append(start.elapsed_time(end) / 1e3)
        else:
            began = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)
