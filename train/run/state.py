"""Everything a run needs to continue exactly where it stopped, in one file replaced atomically.

Data order and anchors are functions of (seed, micro batch), so no generator state has to be kept. The file is the same
however many processes wrote it and however they shared the state, so any number of them can continue.
"""

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from dflash_toolkit.config import UserError

T = TypeVar("T")
COUNTER = 16  # values: the optimiser's count of its steps is on the host, and in use


@dataclass(slots=True)
class TrainState:
    """Where a run stands, the same on every process."""

    step: int = 0  # optimiser steps done
    micro: int = 0  # micro batches of the schedule done, by all processes together
    rate: float = 0.0  # the share of the peak learning rate that the last step had
    done: float = 0.0  # share of the run, between 0 and 1


@dataclass(slots=True)
class ResumePoint:
    """What a run goes on from."""

    step: int  # optimiser steps done
    fingerprint: dict[str, Any]  # what must be equal for a resume to make sense
    drafter: dict[str, torch.Tensor]
    optimizer: dict[str, Any]
    best: dict[str, Any] | None  # the best evaluation so far, prompt by prompt; its weights are in `best.STEP`
    elapsed_s: float  # of training alone
    micro: int  # micro batches of the schedule done, by all processes together
    average: dict[str, torch.Tensor] | None = None  # of the drafter's weights, if one is kept
    latest: dict[str, Any] | None = None  # the latest evaluation
    plan: dict[str, Any] | None = None  # when the run was to end; None, and what follows, before the first step
    rate: float = 0.0  # the share of the peak learning rate that the last step had
    joint: dict[str, Any] | None = None  # where a longer plan goes on from, see `schedule.Joint`
    history: list[tuple[int, int, int]] | None = None  # of the schedule; None is of one lane


def save_state(state: ResumePoint, path: Path) -> None:
    """Write to a temporary name, then rename. Raises UserError when the disk is full; the older file stays."""
    partial = path.with_suffix(".partial")
    try:
        with open(partial, "wb") as handle:
            torch.save({name: getattr(state, name) for name in ResumePoint.__slots__}, handle)
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(partial, path)
    except (OSError, RuntimeError) as error:
        partial.unlink(missing_ok=True)
        raise UserError(
            f"{path}: cannot save the run ({error}); free some space and run again, the last resume point is intact"
        ) from error


def host_copy(value: T, device: torch.device) -> T:
    """Nested values whose tensors are in host memory and nobody else's, so that the next step does not change them.

    What is on a GPU goes to pinned memory, which is kept for the next time. Large host tensors of a run on a GPU were
    gathered for the caller and are taken as they are.

    Args:
        device: that the run is on.
    """
    on_gpu = device.type == "cuda"

    def copied(item: Any) -> Any:
        if isinstance(item, dict):
            return {key: copied(part) for key, part in item.items()}
        if isinstance(item, list | tuple):
            return type(item)(copied(part) for part in item)
        if not isinstance(item, torch.Tensor):
            return item
        if item.is_cuda:
            return torch.empty(item.shape, dtype=item.dtype, pin_memory=True).copy_(item.detach(), non_blocking=True)
        return item if on_gpu and item.numel() > COUNTER else item.detach().clone()

    found = copied(value)
    if on_gpu:
        torch.cuda.synchronize(device)
    return found


class Writer:
    """Writes in a thread of its own, one thing at a time, while training goes on."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    @property
    def failed(self) -> bool:
        return self._error is not None

    def begin(self, write: Callable[[], None]) -> None:
        """Write once what is being written is done. Raises what that one raised."""
        self.wait()

        def work() -> None:
            try:
                write()
            except BaseException as error:  # for whoever waits
                self._error = error

        self._thread = threading.Thread(target=work, name="state-writer", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Until nothing is being written. Raises what a write raised, UserError for a full disk."""
        self.close()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """Until nothing is being written; what a write raised is left for `wait`."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None


def load_state(path: Path, fingerprint: dict[str, Any]) -> ResumePoint | None:
    """The resume point at `path`, or None.

    Raises:
        UserError: the file is corrupt, or belongs to a run with other settings (the first difference is named).
    """
    if not path.exists():
        return None
    try:
        state = ResumePoint(**torch.load(path, map_location="cpu", weights_only=True, mmap=True))
    except Exception as error:  # torch.load raises a dozen kinds
        raise UserError(f"{path}: not a resume point of this version; remove it to start afresh") from error
    if difference := first_difference(state.fingerprint, fingerprint):
        raise UserError(
            f"{path.parent.parent} holds a run with other settings ({difference}); choose another --output or remove it"
        )
    return state


def read_plan(path: Path) -> dict[str, Any] | None:
    """The plan of the run whose resume point is at `path`; None where that cannot be known."""
    try:
        return ResumePoint(**torch.load(path, map_location="cpu", weights_only=True, mmap=True)).plan
    except Exception:  # torch.load raises a dozen kinds; `load_state` says what is wrong with a file
        return None


def first_difference(old: Any, new: Any, where: str = "") -> str | None:
    """The first place where two nested mappings differ, as `key: old, now new`."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*old, *(k for k in new if k not in old)]:
            found = first_difference(old.get(key), new.get(key), f"{where}.{key}" if where else str(key))
            if found:
                return found
        return None
    return None if old == new else f"{where}: {old!r}, now {new!r}"
