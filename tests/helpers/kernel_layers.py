"""Weights of one decoder layer, and the bound on the error of a layer kernel."""

from typing import Any

import torch
from torch import Tensor

from dflash_toolkit.kernels.formats import RowScaledFp8

EPS = 1e-6


def matrices(shape: tuple[int, int, int, int], device: str, dtype: torch.dtype) -> dict[str, Tensor]:
    d, width, ffn, qkv = shape
    found = {
        "o": torch.randn(d, width) / width**0.5,
        "post_norm": 1 + torch.randn(d) / 10,
        "gate_up": torch.randn(2 * ffn, d) / d**0.5,
        "down": torch.randn(d, ffn) / ffn**0.5,
        "norm": 1 + torch.randn(d) / 10,
        "qkv": torch.randn(qkv, d) / d**0.5,
    }
    return {name: t.to(device, dtype) for name, t in found.items()}


def double(weights: dict[str, Any]) -> dict[str, Any]:
    return {name: t.double() if isinstance(t, Tensor) else t for name, t in weights.items()}


def in_fp8(weights: dict[str, Tensor]) -> dict[str, Any]:
    """Returns the same layer with quantized weights."""
    return {name: RowScaledFp8.of(t) if t.ndim == 2 else t for name, t in weights.items()}


def assert_close(found: tuple[Tensor, ...], torchs: tuple[Tensor, ...], exact: tuple[Tensor, ...]) -> None:
    """At most twice the worst error of torch's own GEMMs in the same dtype; of qkv, the sum of its parts."""
    for ours, theirs, true in zip(*((y, h, qkv.sum(0)) for y, h, qkv in (found, torchs, exact)), strict=True):
        bound = 2 * (theirs.double() - true).abs().max() + torch.finfo(theirs.dtype).eps
        assert bool(((ours.double() - true).abs() <= bound).all())  # NaN fails too
