"""Launch parameters of the Triton kernels, and the sizes that choose among kernels."""

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .features import features_of

MAX_ROWS = 128  # maximum rows of this project's GEMM kernels; cuBLAS computes larger ones
MOST_SPLIT = 8  # maximum requests with split keys; more fill the device without splitting
LONGEST_SPLIT = 64  # maximum slots with split keys; a prefill fills the device without splitting
# splits of up to FAR_REQUESTS requests above MOST_SPLIT have FAR keys, or more, so that there are at most MOST_FAR
FAR, MOST_FAR, FAR_REQUESTS = 2048, 8, 64
LOG2_E = 1.4426950408889634


@dataclass(slots=True)
class DependentLaunches:
    """Whether Triton kernels of a step may overlap, on devices that support it. Results do not depend on it."""

    on: bool = True


dependent_launches = DependentLaunches()  # the setting of this process; captured graphs keep theirs


def pdl(tensor: Tensor) -> dict[str, Any]:
    """Returns keyword arguments that enable programmatic dependent launch on devices that have it.

    A kernel may then start while the previous one still runs. So it waits (`wait_for_previous`) before it accesses
    memory that another kernel reads or writes. It lets the next kernel start (`start_next`) after issuing its own
    loads. Every kernel waits, even without work, so that the end of a launch implies the end of all earlier launches.
    A launch without the attribute begins when all earlier launches have ended.

    Attention, and `rope_write` where `keys_are_split`, start the next kernel before their own wait, so that kernel may
    overlap with even earlier launches. Before its wait, it may only access data older than the last launch that starts
    the next kernel after its wait. The norm at the beginning of a pass is such a launch, so data from earlier passes is
    safe. When GEMMs and norms also started the next kernel early, to prefetch weights into L2, an FP8 step of one
    request took 2 to 6 % longer (results/step_early_fp8_h100.json).
    """
    if dependent_launches.on and features_of(tensor.device).dependent_launches:
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


def keys_are_split(rows: int, batch: int) -> bool:
    """Returns whether attention of `rows` rows of `batch` requests splits the keys of each.

    This depends on the batch and not on the work, so that sums have the same order with and without a drafter.
    """
    return batch <= MOST_SPLIT and rows <= LONGEST_SPLIT * batch


def far_keys(batch: int, reach: int, width: int) -> int:
    """Returns the keys of a split of more than MOST_SPLIT requests with contexts of up to `reach`; 0: one split.

    With a single split, one long context would take a step as long as if all were that long. Heads of `width` above 128
    have one, as trees would spill registers.
    """
    far = FAR
    while reach > MOST_FAR * far:
        far *= 2
    return far if MOST_SPLIT < batch <= FAR_REQUESTS and far < reach and width <= 128 else 0


@functools.cache
def multiprocessors(device: int | None) -> int:
    """Returns the number of multiprocessors of this GPU, or for None of the interpreter."""
    return features_of(torch.device("cpu") if device is None else torch.device("cuda", device)).multiprocessors


def padded(n: int) -> int:
    """Returns the tile size that holds n: matrix instructions need powers of two from 16 on."""
    return max(16, next_power_of_two(n))


def next_power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()
