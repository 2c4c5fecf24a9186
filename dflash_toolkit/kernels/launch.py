"""How the Triton kernels are launched."""

import functools
from typing import Any

import torch
from torch import Tensor

MAX_ROWS = 128  # of the GEMMs that kernels here compute; larger ones are cuBLAS's
MOST_SPLIT = 8  # requests; more of them fill the device without splitting
LONGEST_SPLIT = 64  # slots; a prefill fills it too
LOG2_E = 1.4426950408889634


def pdl(tensor: Tensor) -> dict[str, Any]:
    """Keyword arguments of a launch: programmatic dependent launch where the device has it (sm_90 and later).

    A kernel may then start while the one before it still runs, so it calls `gdc_wait` before it touches anything that
    another one reads or writes, and `gdc_launch_dependents` once its own loads are under way. One that calls the latter
    first (attention, and `rope_write` where `keys_are_split`) lets the next kernel start while those before itself run.
    So only what is older than the last launch that calls it behind its wait may be touched before waiting.
    """
    if tensor.is_cuda and _has_pdl(tensor.device.index):
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
    """Of this GPU; None, where kernels are interpreted, has few."""
    return 4 if device is None else torch.cuda.get_device_properties(device).multi_processor_count


def padded(n: int) -> int:
    """A side of a tile that holds n: matrix instructions take powers of two from 16 on."""
    return max(16, next_power_of_two(n))


def next_power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()
