"""A GPU's memory: how much of it features may use after a measured step, and the error if it is too small."""

import contextlib
import gc
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from dflash_toolkit.config import UserError
from dflash_toolkit.models.target import Target

from ..config import TrainConfig

MARGIN = 0.05  # share of a GPU's memory for peaks that no step has shown yet, such as graph captures of an evaluation


HOST = torch.device("cpu")


def offload(target: Target) -> None:
    """Moves the target's layers to host memory; embedding, norm and head stay on the device."""
    for layer in target.layers:
        layer.to(HOST)
    gc.collect()
    if target.device.type == "cuda":
        torch.cuda.empty_cache()


class OutOfMemory(UserError):
    """Raised on one process; the others do not know and would wait for it."""


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Memory of a GPU, in bytes."""

    total: int
    free: int  # after the allocator has released its cache
    allocated: int  # by tensors, between steps
    peak: int  # by tensors, since `begin`


def begin(device: torch.device) -> None:
    """Starts the measurement of peaks."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def memory_use(device: torch.device) -> MemoryUse | None:
    """Returns the use of a GPU's memory; None for another device."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return MemoryUse(total, free, torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device))


def room_after_step(use: MemoryUse, share: float, aside: int) -> int:
    """Returns the bytes that features may use: a share of the memory that is free at a step's peak.

    Args:
        aside: bytes to keep free in addition to the margin.
    """
    spare = use.free - (use.peak - use.allocated) - aside - int(MARGIN * use.total)
    return max(0, int(share * spare))


@contextlib.contextmanager
def enough_memory(config: TrainConfig) -> Iterator[None]:
    """Raises OutOfMemory, with the options that need less, if a GPU's memory is too small for the work inside."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        said = " ".join(str(error).split()).partition(" GPU ")[0].rstrip(".")
        optim, run, loss = config.optim, config.run, config.loss
        packed = optim.pack_tokens if optim.pack_tokens is not None else "the default"
        raise OutOfMemory(
            f"{said}: lower run.feature_gpu_share ({run.feature_gpu_share:g} now), raise optim.splits "
            f"({optim.splits or 1} now), set optim.recompute=true ({str(bool(optim.recompute)).lower()} now) or lower "
            f"loss.head_rows ({loss.head_rows} now), and run again to resume; in a new run, a lower optim.pack_tokens "
            f"({packed} now) also needs less"
        ) from error
