"""Metrics of a run: metrics.jsonl (cut back to the resume point when a run resumes), W&B, and speed."""

import contextlib
import json
import math
import resource
import secrets
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from dflash_toolkit.config import UserError
from dflash_toolkit.files import append_lines, write_text
from dflash_toolkit.roofline import roofline_of
from dflash_toolkit.tracking import start_run

WANDB_OPTION = "run.wandb"
MAXRSS_UNIT = 1 if sys.platform == "darwin" else 1024  # bytes; Linux counts in KiB


class Speed:
    """Speed of a run since the last line of metrics.jsonl. Never waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.peak = 1e12 * roofline_of(device).bf16_tflops if device.type == "cuda" else 0.0
        self._restart()

    def _restart(self) -> None:
        self._steps = self._tokens = self._sequences = 0
        self._data_s, self._since = 0.0, time.perf_counter()

    def count(self, tokens: int, sequences: int) -> None:
        """Counts one step over `tokens` context tokens."""
        self._steps += 1
        self._tokens += tokens
        self._sequences += sequences

    @contextlib.contextmanager
    def data(self) -> Iterator[None]:
        """Times the host's wait for features; concurrent work of a GPU is not seen."""
        began = time.perf_counter()
        yield
        self._data_s += time.perf_counter() - began

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Excludes the time inside: an evaluation, a save."""
        began = time.perf_counter()
        yield
        self._since += time.perf_counter() - began

    def take(self, step_flops: float) -> dict[str, float]:
        """Returns the rates and starts counting again.

        Args:
            step_flops: of the drafter's last step on this device; earlier steps count as equal.
        """
        seconds = time.perf_counter() - self._since
        values = {
            "tokens_per_second": self._tokens / seconds,
            "sequences_per_second": self._sequences / seconds,
            "data_share": self._data_s / seconds,
        }
        if self.peak:
            values["mfu"] = step_flops * self._steps / seconds / self.peak
        values |= self._peak()
        self._restart()
        return values

    def _peak(self) -> dict[str, float]:
        if self._device.type == "cuda":
            return {"peak_memory_gb": torch.cuda.max_memory_allocated(self._device) / 1e9}
        # peak of this process since its start, responses included
        return {"peak_resident_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * MAXRSS_UNIT / 1e9}

    def memory(self) -> str:
        """Returns the peak memory in words."""
        ((name, gigabytes),) = self._peak().items()
        where = "GPU memory" if name == "peak_memory_gb" else "memory"
        return f"{gigabytes:.1f} GB of {where} used at most so far"


class MetricsLog:
    """Appends one JSON object per line to `path` and mirrors it to W&B when a project is given.

    Args:
        config: configuration that W&B shows for the run.
    """

    def __init__(self, path: Path, resume_step: int, wandb_project: str | None, config: dict[str, Any]) -> None:
        self._path = path
        write_text(path, "".join(_lines_up_to(path, resume_step)))
        self._wandb: Any = None
        if wandb_project:
            given = {"config": config, "dir": str(path.parent), "resume": "allow", "id": _run_id(path)}
            self._wandb = start_run(WANDB_OPTION, wandb_project, **given)

    def write(self, step: int, values: dict[str, Any]) -> None:
        """Logs `values` at `step`, with NaN as null. Raises UserError when the disk is full."""
        clean = {"step": step} | {k: _plain(v) for k, v in values.items()}
        append_lines(self._path, [clean])
        if self._wandb is not None:
            flat = {k: v for k, v in clean.items() if not isinstance(v, list | dict)}
            flat |= {f"{k}/{i}": v for k, vs in clean.items() if isinstance(vs, list) for i, v in enumerate(vs, 1)}
            flat |= {f"{k}/{name}": v for k, vs in clean.items() if isinstance(vs, dict) for name, v in vs.items()}
            self._wandb.log(flat, step=step)

    def summarise(self, **values: float) -> None:
        """Sets the run's summary in W&B, without values that are not finite."""
        if self._wandb is not None:
            self._wandb.summary.update({k: v for k, v in values.items() if math.isfinite(v)})

    def close(self) -> None:
        if self._wandb is not None:
            self._wandb.finish()


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 6) if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _plain(v) for key, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, list) else value


def _lines_up_to(path: Path, step: int) -> list[str]:
    """Returns the complete lines up to the resume point's step; later ones will be computed again."""
    if not path.exists() or step == 0:
        return []
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        return [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UserError(f"{path}: damaged ({error!r}); remove it to continue without the earlier metrics") from error


def _run_id(path: Path) -> str:
    """Returns the id of the W&B run, which a resumed run continues. Raises UserError if it cannot be stored."""
    name = path.with_name("wandb_id")
    if not name.exists():
        write_text(name, secrets.token_hex(4))
    return name.read_text()
