"""The features of a GPU. Other modules query them here, and never test its name or its generation.

DFLASH_EMULATE_GPU=sm_86 lets a larger GPU run the kernels that an sm_86 would run, for tests and diagnosis: features
that the card lacks are off, Triton chooses the card's instructions, and a kernel with more shared memory than that of
the card is refused. The speed stays that of the real GPU.
"""

import contextlib
import logging
import os
from dataclasses import dataclass, replace
from typing import Any, Self

import torch

VARIABLE = "DFLASH_EMULATE_GPU"
OWN_PRODUCTS = (9, 10)  # major versions of GPUs with matrix instructions that no other GPU has
LEAST_CAPABILITY = (8, 0)  # bf16 matrix products and asynchronous copies
log = logging.getLogger(__name__)
_features: dict[torch.device, "Features"] = {}  # of devices that were queried; tests replace it


@dataclass(frozen=True, slots=True)
class Features:
    """The properties of a GPU that kernels and the runtime depend on."""

    capability: tuple[int, int]
    shared_memory: int  # maximum bytes of a thread block
    multiprocessors: int
    dependent_launches: bool  # programmatic dependent launch
    fp8_products: bool  # tensor cores multiply fp8, and instructions convert to it
    hopper: bool  # runs the kernels of `hopper/`, which use wgmma and TMA
    cublas_fp8_rows: bool  # torch multiplies fp8 with one scale for each row
    cublas_fp8_blocks: bool  # torch multiplies fp8 with scales for 1 by 128 and 128 by 128

    @classmethod
    def of(cls, capability: tuple[int, int], shared_memory: int, multiprocessors: int) -> Self:
        """Returns the features of a GPU of this compute capability."""
        hopper, fp8 = capability[0] == 9, capability >= (8, 9)
        return cls(
            capability, shared_memory, multiprocessors,
            dependent_launches=capability >= (9, 0), fp8_products=fp8, hopper=hopper,
            # `scaled_mm` of PyTorch 2.10 and later: rows on 8.9, 9.x, 10.x, 11.x and 12.x, blocks on 9.x
            cublas_fp8_rows=fp8, cublas_fp8_blocks=hopper,
        )  # fmt: skip

    def limited_to(self, card: "Features") -> "Features":
        """Returns the features that this GPU has when it emulates `card`."""
        return replace(
            self,
            capability=card.capability,
            shared_memory=min(self.shared_memory, card.shared_memory),
            dependent_launches=self.dependent_launches and card.dependent_launches,
            fp8_products=self.fp8_products and card.fp8_products,
            hopper=self.hopper and card.hopper,
            cublas_fp8_rows=self.cublas_fp8_rows and card.cublas_fp8_rows,
            cublas_fp8_blocks=self.cublas_fp8_blocks and card.cublas_fp8_blocks,
        )


# CUDA programming guide, "Technical Specifications per Compute Capability"; the multiprocessors are those of A100, RTX
# 3090, RTX 4090, H100, B200, B300, RTX 5090 and GB10
KNOWN = {
    "sm_80": Features.of((8, 0), 163 << 10, 108),
    "sm_86": Features.of((8, 6), 99 << 10, 82),
    "sm_89": Features.of((8, 9), 99 << 10, 128),
    "sm_90": Features.of((9, 0), 227 << 10, 132),
    "sm_100": Features.of((10, 0), 227 << 10, 148),
    "sm_103": Features.of((10, 3), 227 << 10, 160),
    "sm_120": Features.of((12, 0), 99 << 10, 170),
    "sm_121": Features.of((12, 1), 99 << 10, 48),
}
# of a device without kernels, when they are interpreted: tiles as on Hopper, and few programs
INTERPRETED = replace(
    KNOWN["sm_90"], multiprocessors=4, dependent_launches=False, hopper=False, cublas_fp8_blocks=False
)


def emulated() -> Features | None:
    """Returns the features of the card in DFLASH_EMULATE_GPU, or None without it. Raises ValueError if unknown."""
    name = os.environ.get(VARIABLE)
    if not name:
        return None
    if name not in KNOWN:
        raise ValueError(f"{VARIABLE} is {name!r}; it must be one of {', '.join(KNOWN)}")
    return KNOWN[name]


def features_of(device: torch.device) -> Features:
    """Returns the features of a device; `cuda` without an index is the current one of this thread.

    Raises:
        ValueError: DFLASH_EMULATE_GPU names an unknown card.
    """
    if device not in _features:
        if device.type == "cuda" and device.index is None:
            return features_of(torch.device("cuda", torch.cuda.current_device()))
        found, card = _query(device) if device.type == "cuda" else INTERPRETED, emulated()
        if card is not None:
            log.warning("%s=%s: %s runs the kernels for that card", VARIABLE, os.environ[VARIABLE], device)
            found = found.limited_to(card)
            _compile_for(found)
        _features[device] = found
    return _features[device]


def _compile_for(card: Features) -> None:
    """Makes Triton choose the instructions of the card, and refuse kernels with more shared memory than it has.

    A later GPU runs those of an earlier one, and Hopper those of sm_120, but not those of OWN_PRODUCTS.
    """
    with contextlib.suppress(ModuleNotFoundError):
        from triton import knobs
        from triton.compiler import compiler

        compiler.max_shared_mem = lambda _device: card.shared_memory
        if card.capability[0] not in OWN_PRODUCTS:
            knobs.runtime.override_arch = "sm{}{}".format(*card.capability)


def _query(device: torch.device) -> Features:
    properties: Any = torch.cuda.get_device_properties(device)  # the type stubs lack some attributes
    capability = properties.major, properties.minor
    return Features.of(capability, properties.shared_memory_per_block_optin, properties.multi_processor_count)
