"""Everything a run needs to continue exactly where it stopped, in one file replaced atomically.

Data order and anchors are functions of (seed, micro batch), so no generator state has to be kept. The file is the same
however many processes wrote it and however they shared the state, so any number of them can continue.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dflash_toolkit.config import UserError


@dataclass(slots=True)
class RunState:
    """A resume point."""

    step: int  # optimiser steps done
    fingerprint: dict[str, Any]  # what must be equal for a resume to make sense
    drafter: dict[str, torch.Tensor]
    optimizer: dict[str, Any]
    best: float  # best measured acceptance length so far
    elapsed_s: float
    micro: int  # micro batches of the schedule done, by all processes together
    average: dict[str, torch.Tensor] | None = None  # of the drafter's weights, if one is kept


def save_state(state: RunState, path: Path) -> None:
    """Write to a temporary name, then rename. Raises UserError when the disk is full; the older file stays."""
    partial = path.with_suffix(".partial")
    try:
        with open(partial, "wb") as handle:
            torch.save({name: getattr(state, name) for name in RunState.__slots__}, handle)
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(partial, path)
    except (OSError, RuntimeError) as error:
        partial.unlink(missing_ok=True)
        raise UserError(
            f"{path}: cannot save the run ({error}); free some space and run again, the last resume point is intact"
        ) from error


def load_state(path: Path, fingerprint: dict[str, Any]) -> RunState | None:
    """The resume point at `path`, or None.

    Raises:
        UserError: the file is corrupt, or belongs to a run with other settings (the first difference is named).
    """
    if not path.exists():
        return None
    try:
        state = RunState(**torch.load(path, map_location="cpu", weights_only=True, mmap=True))
    except Exception as error:  # torch.load raises a dozen kinds
        raise UserError(f"{path}: not a resume point of this version; remove it to start afresh") from error
    if difference := first_difference(state.fingerprint, fingerprint):
        raise UserError(
            f"{path.parent.parent} holds a run with other settings ({difference}); choose another --output or remove it"
        )
    return state


def first_difference(old: Any, new: Any, where: str = "") -> str | None:
    """The first place where two nested mappings differ, as `key: old, now new`."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*old, *(k for k in new if k not in old)]:
            found = first_difference(old.get(key), new.get(key), f"{where}.{key}" if where else str(key))
            if found:
                return found
        return None
    return None if old == new else f"{where}: {old!r}, now {new!r}"
