"""Devices and number formats by the names that options have."""

import torch

from ..config import UserError
from ..kernels.features import emulated


def resolve_device(device: str) -> torch.device:
    """Returns the device; `auto` is cuda if there is one, else cpu. Raises UserError for a missing or unknown one."""
    try:
        emulated()
    except ValueError as error:
        raise UserError(str(error)) from error
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        resolved = torch.device(device)
    except RuntimeError as error:
        raise UserError(f"device {device!r}: not a torch device; use auto, cpu or cuda") from error
    if resolved.type not in ("cpu", "cuda"):
        raise UserError(f"device {device!r} is not supported; use auto, cpu or cuda")
    if resolved.type == "cuda" and (
        not torch.cuda.is_available() or (resolved.index or 0) >= torch.cuda.device_count()
    ):
        raise UserError(
            f"device {device!r}: this machine has {torch.cuda.device_count()} CUDA devices; use cpu or auto"
        )
    return resolved


def use_device(device: str) -> torch.device:
    """Calls `resolve_device` and makes the device current in this thread: kernels are launched there."""
    resolved = resolve_device(device)
    if resolved.type == "cuda" and resolved.index is not None:
        torch.cuda.set_device(resolved)
    return resolved


def resolve_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """Returns the dtype; `auto` is bfloat16 on a GPU, float32 on a CPU (most lack bf16 units). Raises UserError."""
    known = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
    if dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if dtype not in known:
        raise UserError(f"dtype {dtype!r} is not one of auto, {', '.join(known)}")
    return known[dtype]
