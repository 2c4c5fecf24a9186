"""The resume point of a run: one file, replaced atomically, from which the run continues exactly where it stopped.

Data order and anchors are functions of (seed, micro batch), so no generator state is stored. The file does not depend
on the number of processes or their sharding, so any number of them can continue.
"""

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from dflash_toolkit.config import UserError

from .settings import defaults, first_difference

T = TypeVar("T")
COUNTER = 16  # values: smaller tensors are the optimiser's step counts, which are on the host and in use


@dataclass(slots=True)
class TrainState:
    """The place of a run, the same on every process."""

    step: int = 0  # optimiser steps done
    micro: int = 0  # micro batches of the schedule done, by all processes together
    rate: float = 0.0  # the last step's share of the peak learning rate
    done: float = 0.0  # share of the run that is done, between 0 and 1


@dataclass(slots=True)
class ResumePoint:
    """The state from which a run resumes."""

    step: int  # optimiser steps done
    fingerprint: dict[str, Any]  # settings that must be equal to resume
    drafter: dict[str, torch.Tensor]
    optimizer: dict[str, Any]
    best: dict[str, Any] | None  # the best evaluation so far, prompt by prompt; its weights are in `best.STEP`
    elapsed_s: float  # time of training alone
    micro: int  # micro batches of the schedule done, by all processes together
    average: dict[str, torch.Tensor] | None = None  # average of the drafter's weights, if `ema` is on
    latest: dict[str, Any] | None = None  # the latest evaluation
    plan: dict[str, Any] | None = None  # the option that ends the run; None, as all that follow, before the first step
    rate: float = 0.0  # the last step's share of the peak learning rate
    joint: dict[str, Any] | None = None  # start of a longer plan, see `schedule.Joint`
    history: list[tuple[int, int, int]] | None = None  # history of the schedule; None is a single lane


def save_state(state: ResumePoint, path: Path) -> None:
    """Writes under a temporary name, then renames. Raises UserError when the disk is full; the older file stays."""
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
    """Copies the tensors of nested values to host memory, so that the next step does not change them.

    Tensors on a GPU go to pinned memory, which is reused. In a run on a GPU, large host tensors were gathered for the
    caller and are not copied.

    Args:
        device: of the run.
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
    """Writes in its own thread, one thing at a time."""

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
        """Starts a write after the previous one. Raises the previous one's error."""
        self.wait()

        def work() -> None:
            try:
                write()
            except BaseException as error:  # raised by `wait`
                self._error = error

        self._thread = threading.Thread(target=work, name="state-writer", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Waits until nothing is being written. Raises the write's error, UserError for a full disk."""
        self.close()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """Waits until nothing is being written; `wait` raises errors."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None


def load_state(path: Path, fingerprint: dict[str, Any]) -> ResumePoint | None:
    """Returns the resume point at `path`, or None.

    Raises:
        UserError: the file is corrupt, or another run's (the first different setting is named).
    """
    if not path.exists():
        return None
    try:
        state = ResumePoint(**torch.load(path, map_location="cpu", weights_only=True, mmap=True))
    except Exception as error:  # torch.load raises a dozen types
        raise UserError(f"{path}: not a resume point of this version; remove it to start afresh") from error
    if difference := first_difference(state.fingerprint, fingerprint, defaults()):
        raise UserError(
            f"{path.parent.parent} holds a run with other settings ({difference}); choose another --output or remove it"
        )
    return state


def read_plan(path: Path) -> dict[str, Any] | None:
    """Returns the plan of the resume point at `path`; None if there is none."""
    try:
        return ResumePoint(**torch.load(path, map_location="cpu", weights_only=True, mmap=True)).plan
    except Exception:  # torch.load raises a dozen types; `load_state` reports the error
        return None
