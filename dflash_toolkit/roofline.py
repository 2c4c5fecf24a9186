"""Peak rates of GPUs: from their data sheets by name, and computed from what the driver reports for other GPUs."""

import ctypes
import re
from dataclasses import dataclass, replace
from typing import Any

import torch

# Read bandwidth that a copy reaches, as a share of the data sheet, where it was not measured: 0.90 on an H100, 0.94 on
# an H200
READ_SHARE = 0.9


@dataclass(frozen=True, slots=True)
class Roofline:
    """Peak rates of a GPU. FLOP/s are of tensor cores, dense (without sparsity), with sums in fp32."""

    name: str
    capability: tuple[int, int]
    memory_gib: float  # as PyTorch reports it
    bandwidth_tb_s: float
    bf16_tflops: float  # rate of the fp32 cores, without such tensor cores
    fp8_tflops: float  # 0 without such tensor cores
    measured_tb_s: float | None = None

    @property
    def read_tb_s(self) -> float:
        """Bandwidth that a copy reaches."""
        return self.measured_tb_s or READ_SHARE * self.bandwidth_tb_s


# NVIDIA's data sheets; for RTX cards the rows "with FP32 Accumulate" of the white papers on GA102, Ada and RTX
# Blackwell, compared with hmc-tech.com. GeForce cards sum in fp32 at half the rate of other cards with the same chip.
# GB10: a quarter of its dense FP4 rate, which is half of 1 PFLOP/s. Memory: "total capacity" in PyTorch's messages.
SHEETS = {
    sheet.name: sheet
    for sheet in (
        Roofline("RTX 3090", (8, 6), 23.7, 0.936, 71.0, 0.0),
        Roofline("RTX 4070", (8, 9), 11.6, 0.504, 58.3, 116.6),
        Roofline("RTX 4070 Ti SUPER", (8, 9), 15.7, 0.672, 88.2, 176.4),
        Roofline("RTX 4080", (8, 9), 15.7, 0.717, 97.5, 194.9),
        Roofline("RTX 4080 SUPER", (8, 9), 15.7, 0.736, 104.4, 208.9),
        Roofline("RTX 4090", (8, 9), 23.6, 1.008, 165.2, 330.3),
        Roofline("RTX 5070 Ti", (12, 0), 15.5, 0.896, 87.9, 175.8),
        Roofline("RTX 5080", (12, 0), 15.5, 0.960, 112.6, 225.1),
        Roofline("RTX 5090", (12, 0), 31.4, 1.792, 209.5, 419.0),
        Roofline("RTX A6000", (8, 6), 47.5, 0.768, 154.8, 0.0),
        Roofline("RTX 6000 Ada", (8, 9), 47.5, 0.960, 364.2, 728.5),
        Roofline("RTX PRO 6000 Blackwell", (12, 0), 95.0, 1.792, 503.8, 1007.6),
        Roofline("RTX PRO 6000 Blackwell Max-Q", (12, 0), 95.0, 1.792, 438.9, 877.7),
        Roofline("RTX PRO 6000 Blackwell Server", (12, 0), 95.0, 1.597, 503.8, 1007.6),
        Roofline("A10", (8, 6), 22.1, 0.600, 125.0, 0.0),
        Roofline("L4", (8, 9), 22.0, 0.300, 121.0, 242.0),
        Roofline("L40", (8, 9), 44.4, 0.864, 181.0, 362.0),
        Roofline("L40S", (8, 9), 44.4, 0.864, 362.0, 733.0),
        Roofline("A100 40GB", (8, 0), 39.5, 1.555, 312.0, 0.0),
        Roofline("A100 80GB", (8, 0), 79.2, 2.039, 312.0, 0.0),
        Roofline("A100 80GB PCIe", (8, 0), 79.2, 1.935, 312.0, 0.0),
        Roofline("H20", (9, 0), 95.1, 4.000, 148.0, 296.0),
        Roofline("H100", (9, 0), 79.1, 3.352, 989.0, 1979.0, measured_tb_s=3.0),
        Roofline("H100 PCIe", (9, 0), 79.1, 2.039, 756.0, 1513.0),
        Roofline("H100 NVL", (9, 0), 93.1, 3.938, 835.0, 1671.0),
        Roofline("H200", (9, 0), 139.8, 4.800, 989.0, 1979.0, measured_tb_s=4.53),
        Roofline("H200 NVL", (9, 0), 139.8, 4.800, 835.0, 1671.0),
        Roofline("B200", (10, 0), 178.4, 8.000, 2250.0, 4500.0),
        Roofline("GB10", (12, 1), 119.7, 0.273, 125.0, 250.0),
    )
}
VARIANTS = frozenset({"ti", "super", "d", "laptop", "max", "mig"})  # a card with such a word is another card

# dense bf16 FLOPs with sums in fp32 per cycle and multiprocessor, by the least capability
FLOPS_PER_CYCLE = {(0, 0): 128, (8, 0): 2048, (8, 6): 1024, (9, 0): 4096, (10, 0): 8192, (12, 0): 1024}


def _words(name: str) -> frozenset[str]:
    return frozenset(re.findall(r"[a-z0-9]+", name.lower()))


def sheet_of(device_name: str) -> Roofline | None:
    """Returns the rates of the card with this name, as the driver spells it; None if it is unknown."""
    given = _words(device_name)
    fitting = [name for name in SHEETS if (own := _words(name)) <= given and own & VARIANTS == given & VARIANTS]
    return SHEETS[max(fitting, key=lambda name: len(_words(name)))] if fitting else None


def driver_attribute(number: int, index: int) -> int:
    """Returns CU_DEVICE_ATTRIBUTE number `number` of a device. PyTorch for CUDA 13 does not report all of them."""
    value = ctypes.c_int()
    ctypes.CDLL("libcuda.so.1").cuDeviceGetAttribute(ctypes.byref(value), number, index)
    return value.value


def computed(properties: Any, index: int) -> Roofline:
    """Returns the rates of a card from its clocks, memory bus and multiprocessors.

    Integrated GPUs report no memory clock; they get the lowest known bandwidth.

    Args:
        properties: PyTorch's of the device.
        index: of the device.
    """
    clock, memory_clock, bus = (driver_attribute(number, index) for number in (13, 36, 37))  # kHz, kHz, bits
    capability = properties.major, properties.minor
    per_cycle = FLOPS_PER_CYCLE[max(each for each in FLOPS_PER_CYCLE if each <= capability)]
    if capability >= (8, 0) and "geforce" in _words(properties.name):
        per_cycle //= 2
    bf16 = per_cycle * properties.multi_processor_count * clock / 1e9
    bandwidth = 2 * memory_clock * bus / 8 / 1e9  # two transfers per cycle
    return Roofline(
        properties.name.removeprefix("NVIDIA "),
        capability,
        properties.total_memory / 2**30,
        bandwidth or min(sheet.bandwidth_tb_s for sheet in SHEETS.values()),
        bf16,
        2 * bf16 if capability >= (8, 9) else 0.0,
    )


def roofline_of(device: torch.device) -> Roofline:
    """Returns the rates of a GPU, with the memory that the driver reports."""
    index = torch.cuda.current_device() if device.index is None else device.index
    properties = torch.cuda.get_device_properties(index)
    if found := sheet_of(properties.name):
        return replace(found, memory_gib=properties.total_memory / 2**30)
    return computed(properties, index)
