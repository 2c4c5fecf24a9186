"""What a GPU has used so far, by NVML's counter; nothing has to be installed but the driver."""

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import torch


def joules(device: torch.device) -> float | None:
    """Joules that this GPU has used since the driver was loaded, by all programs; None where nobody counts them."""
    count = _counter(device) if device.type == "cuda" else None
    return None if count is None else count()


@functools.cache
def _counter(device: torch.device) -> Callable[[], float | None] | None:
    try:
        nvml: Any = ctypes.CDLL("libnvidia-ml.so.1")
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}".encode()
    except (OSError, AttributeError):  # no driver's library, or a device without a name of its own
        return None
    handle, millijoules = ctypes.c_void_p(), ctypes.c_ulonglong()
    if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetHandleByUUID(uuid, ctypes.byref(handle)):
        return None

    def count() -> float | None:
        failed = nvml.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(millijoules))
        return None if failed else millijoules.value / 1000

    return count if count() is not None else None
