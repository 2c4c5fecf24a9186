"""How the Triton kernels are launched."""

import functools
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

MAX_ROWS = 128  # of the GEMMs that kernels here compute; larger ones are cuBLAS's
MOST_SPLIT = 8  # requests; more of them fill the device without splitting
LONGEST_SPLIT = 64  # slots; a prefill fills it too
LOG2_E = 1.4426950408889634


Start = Literal["off", "late", "early"]


@dataclass(slots=True)
class DependentLaunches:
    """How the launches of a step follow one another where the device lets them overlap. No result depends on it.

    Attributes:
        start: when a Triton kernel lets the next one start: at its own end; once its own loads are under way; or, in
            the middle of a pass (`pdl` with `early`), at once.
        ahead: bytes of its weight that a GEMM of few rows asks L2 for before it waits, all programs together.
    """

    start: Start = "late"
    ahead: int = 0


dependent_launches = DependentLaunches()  # of this process; what has been captured in graphs stays as it is
LATE, EARLY = 1, 2  # what kernels are told as PDL


def pdl(tensor: Tensor, *, early: bool = False) -> dict[str, Any]:
    """Keyword arguments of a launch: programmatic dependent launch where the device has it (sm_90 and later).

    A kernel may then start while the one before it still runs, so it waits (`wait_for_previous`) before it touches
    anything that another one reads or writes, and says when the next one may start. It waits in any case, whatever it
    has to do: only so the end of a launch is also that of all launches before it. One launched without the attribute
    begins when all before it have ended.

    A kernel that lets the next one start before it has waited itself (attention; `rope_write` where `keys_are_split`;
    with `early` any, where `dependent_launches` says so) may have it run beside those before itself. So only what is
    older than the last launch that starts the next one behind its wait may be touched before waiting. The norm that a
    pass begins with is such a launch: what is older than a pass may be.
    """
    if dependent_launches.start == "off" or not (tensor.is_cuda and _has_pdl(tensor.device.index)):
        return {"PDL": 0}
    return {"PDL": EARLY if early and dependent_launches.start == "early" else LATE, "launch_pdl": True}


def bytes_ahead(weight: Tensor, rows: int, columns: int) -> int:
    """Bytes of each of its rows that a program of a GEMM asks L2 for before it waits, a multiple of 256.

    Args:
        weight: [N, K], of which programs have `columns` columns of rows each.
        rows: of all programs.
    """
    aligned = weight.data_ptr() % 16 == 0 and weight.stride(0) * weight.element_size() % 16 == 0
    return min(dependent_launches.ahead // rows, columns * weight.element_size()) // 256 * 256 if aligned else 0


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
