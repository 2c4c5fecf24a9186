"""How the Triton kernels are launched."""

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

MAX_ROWS = 128  # rows of the GEMMs that kernels here compute; larger ones are cuBLAS's
MOST_SPLIT = 8  # requests; more of them fill the device without splitting
LONGEST_SPLIT = 64  # slots; a prefill fills it too
LOG2_E = 1.4426950408889634


@dataclass(slots=True)
class DependentLaunches:
    """Whether Triton kernels of a step may overlap where the device lets them. No result depends on it."""

    on: bool = True


dependent_launches = DependentLaunches()  # the setting of this process; captured graphs keep theirs


def pdl(tensor: Tensor) -> dict[str, Any]:
    """Keyword arguments of a launch: programmatic dependent launch where the device has it (sm_90 and later).

    A kernel may then start while the one before it still runs, so it waits (`wait_for_previous`) before it touches
    anything that another one reads or writes, and says when the next one may start (`start_next`), once its own loads
    are under way. It waits in any case, whatever it has to do: only so the end of a launch is also that of all launches
    before it. One launched without the attribute begins when all before it have ended.

    A kernel that lets the next one start before it has waited itself (attention, and `rope_write` where
    `keys_are_split`) may have it run with those before itself. So only what is older than the last launch that starts
    the next one after its wait may be touched before waiting. The norm that a pass begins with is such a launch: what
    is older than a pass may be. A step in FP8 of one request took 2 to 6 % longer where GEMMs and norms did so too, and
    had L2 load weights meanwhile (results/step_early_fp8_h100.json).
    """
    if dependent_launches.on and tensor.is_cuda and _has_pdl(tensor.device.index):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


def keys_are_split(rows: int, batch: int) -> bool:
    """Whether attention of so many rows, those of all `batch` requests, cuts the keys of each into splits.

    By the batch and not by the work: with a drafter and without, a request is to be summed in the same order.
    """
    return batch <= MOST_SPLIT and rows <= LONGEST_SPLIT * batch


@functools.cache
def _has_pdl(device: int) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)


@functools.cache
def is_hopper(device: int) -> bool:
    return torch.cuda.get_device_capability(device)[0] == 9


def shared_memory(device: torch.device) -> int:
    """Bytes that a thread block may take on this GPU."""
    properties: Any = torch.cuda.get_device_properties(device)  # its types do not know all of it
    return properties.shared_memory_per_block_optin


@functools.cache
def multiprocessors(device: int | None) -> int:
    """Returns their number on this GPU; a small one for None, where kernels are interpreted."""
    return 4 if device is None else torch.cuda.get_device_properties(device).multi_processor_count


def padded(n: int) -> int:
    """A side of a tile that holds n: matrix instructions take powers of two from 16 on."""
    return max(16, next_power_of_two(n))


def next_power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()
