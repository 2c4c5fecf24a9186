"""Operands of the kernel tests and the bound on a kernel's error, on the GPU or in Triton's interpreter."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dflash_toolkit.kernels import features

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# tl.dot of the interpreter does not support bf16
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else [])]


def in_turn(cases: Sequence[tuple[object, ...]], values: Sequence[object] = DTYPES) -> list[tuple[object, ...]]:
    """Combines cases and dtypes (or other values): all pairs on a GPU, one dtype per case in the slow interpreter."""
    if DEVICE == "cuda":
        return [(*case, value) for case in cases for value in values]
    return [(*case, values[i % len(values)]) for i, case in enumerate(cases)]


EPS = 1e-6


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def integers(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def assert_as_exact_as_torch(ours: Tensor, torchs: Tensor, exact: Tensor, slack: float = 0.0) -> None:
    """Checks that the error is at most twice that of torch, plus two roundings of the largest element and `slack`."""
    assert ours.dtype == torchs.dtype and ours.shape == torchs.shape == exact.shape
    assert ours.isfinite().all()
    ours_off, torchs_off = ((x.double() - exact).abs().max().item() for x in (ours, torchs))
    assert ours_off <= 2 * torchs_off + 2 * torch.finfo(ours.dtype).eps * exact.abs().max().item() + slack


def exact_norm(x: Tensor, weight: Tensor) -> Tensor:
    x = x.double()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weight.double()


def make_rope(positions: int, width: int) -> Tensor:
    angles = torch.arange(positions)[:, None] / 1e4 ** (torch.arange(width // 2) / (width // 2))
    return torch.stack([angles.cos(), angles.sin()]).to(DEVICE)


def guarded(values: Tensor) -> Tensor:
    """`values` with NaN before and after it in memory, which a masked load must not read."""
    room = torch.full((values.numel() + 2 * 4096,), math.nan, dtype=values.dtype, device=DEVICE)
    inside = room[4096 : 4096 + values.numel()].view(values.shape)
    return inside.copy_(values)


def operands(m: int, n: int, k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """x [M, K], weight [N, K] and bias [N], with products of order one."""
    x, weight, bias = torch.randn(m, k), torch.randn(n, k) / k**0.5, torch.randn(n)
    return guarded(x.to(dtype)), guarded(weight.to(dtype)), guarded(bias.to(dtype))


@pytest.fixture(params=["fp8", "uint8"])
def fp8_type(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The type in which kernels hold fp8 values; a GPU without fp8 products has uint8."""
    device, fp8 = torch.empty(0, device=DEVICE).device, request.param == "fp8"
    found = features.features_of(device)
    if fp8 and DEVICE == "cuda" and not found.fp8_products:
        pytest.skip("needs a GPU that multiplies fp8")
    blocks = fp8 and found.cublas_fp8_blocks
    found = replace(found, fp8_products=fp8, cublas_fp8_rows=fp8, cublas_fp8_blocks=blocks)  # also of an emulated GPU
    monkeypatch.setitem(features._features, device, found)
    return request.param


def fp8_kinds(test: Callable[..., None]) -> Callable[..., None]:
    """Runs a test with every `fp8_type` and `kind` of rows.

    Triton's interpreter rounds 124.3 to 64 and not to 128 (the carry into the exponent is lost), so there rows in its
    fp8 type hold values that the format has, and its rounding is tested on the GPU.
    """
    lost = pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter's rounding loses carries")
    kinds = [("fp8", "in the format"), pytest.param("fp8", "any", marks=lost), ("uint8", "any")]
    test = pytest.mark.parametrize(("fp8_type", "kind"), kinds, indirect=["fp8_type"])(test)
    return pytest.mark.usefixtures("fp8_type")(test)
