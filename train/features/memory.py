"""A GPU's memory: what features may take of it once a step was measured, and what is said where it is too little."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from dflash_toolkit.config import UserError

from ..config import TrainConfig

MARGIN = 0.05  # of a GPU's memory: for what no step has shown yet, as the steps that an evaluation captures


class OutOfMemory(UserError):
    """Of one process: the others do not know, and would wait for it."""


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Of a GPU, in bytes."""

    total: int
    free: int  # once the allocator has given back what it does not use
    allocated: int  # by tensors, between steps
    peak: int  # by tensors, at most since `begin`


def begin(device: torch.device) -> None:
    """Peaks count from now on."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def memory_use(device: torch.device) -> MemoryUse | None:
    """None of a device that is no GPU."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return MemoryUse(total, free, torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device))


def room_behind_step(use: MemoryUse, share: float, aside: int) -> int:
    """Bytes that features may take: a share of what is free while a step is at its peak.

    Args:
        aside: bytes that are kept free beside the margin.
    """
    spare = use.free - (use.peak - use.allocated) - aside - int(MARGIN * use.total)
    return max(0, int(share * spare))


@contextlib.contextmanager
def enough_memory(config: TrainConfig) -> Iterator[None]:
    """Says which options need less where a GPU's memory does not suffice in here. Raises OutOfMemory."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        said = " ".join(str(error).split()).partition(" GPU ")[0].rstrip(".")
        optim, run, loss = config.optim, config.run, config.loss
        packed = optim.pack_tokens if optim.pack_tokens is not None else "the default"
        raise OutOfMemory(
            f"{said}: give a lower run.feature_gpu_share ({run.feature_gpu_share:g} now), optim.recompute=true "
            f"({str(optim.recompute).lower()} now) or a lower loss.head_rows ({loss.head_rows} now) and run again, "
            f"which goes on from the last resume point; in a new run a lower optim.pack_tokens ({packed} now) needs "
            f"less too"
        ) from error
