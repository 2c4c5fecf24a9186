"""Reads the energy that a GPU has used from NVML's counter; only the driver is needed."""

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import torch


def joules(device: torch.device) -> float | None:
    """Returns the joules this GPU has used since the driver was loaded, by all programs; None without a counter."""
    count = _counter(device) if device.type == "cuda" else None
    return None if count is None else count()


@functools.cache
def _counter(device: torch.device) -> Callable[[], float | None] | None:
    try:
        nvml: Any = ctypes.CDLL("libnvidia-ml.so.1")
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}".encode()
    except (OSError, AttributeError):  # no driver library, or a device without a UUID
        return None
    handle, millijoules = ctypes.c_void_p(), ctypes.c_ulonglong()
    if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetHandleByUUID(uuid, ctypes.byref(handle)):
        return None

    def count() -> float | None:
        failed = nvml.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(millijoules))
        return None if failed else millijoules.value / 1000

    return count if count() is not None else None
