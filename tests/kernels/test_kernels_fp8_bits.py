"""The conversions to and from fp8 of GPUs without a type for it, against those of torch."""

import pytest
import torch
import triton
import triton.language as tl
from kernel_inputs import DEVICE
from torch import Tensor

from dflash_toolkit.kernels.formats import FP8_MAX
from dflash_toolkit.kernels.triton.fp8 import of_fp8, to_fp8

pytestmark = [pytest.mark.gpu] * (DEVICE == "cuda")  # `make test-gpu` runs them there
SIZE = 4096


@triton.jit
def _to_fp8_kernel(x_p, out_p, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(out_p + at, to_fp8(tl.load(x_p + at), out_p.dtype.element_ty))


@triton.jit
def _of_fp8_kernel(x_p, out_p, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, SIZE)
    tl.store(out_p + at, of_fp8(tl.load(x_p + at)))


def rounded(x: Tensor) -> Tensor:
    """Returns values that a kernel rounds to fp8."""
    padded = torch.zeros(-(-len(x) // SIZE) * SIZE, device=DEVICE)
    padded[: len(x)] = x
    out = torch.empty_like(padded, dtype=torch.float16)
    _to_fp8_kernel[(len(padded) // SIZE,)](padded, out, SIZE=SIZE)
    return out[: len(x)].float()


def values() -> Tensor:
    """Returns all values of fp8, but NaN."""
    codes = torch.arange(256, dtype=torch.uint8, device=DEVICE)
    return codes[codes & 0x7F != 0x7F].view(torch.float8_e4m3fn).float()


def test_fp8_bits_are_decoded_exactly() -> None:
    codes = torch.arange(256, dtype=torch.uint8, device=DEVICE)
    out = torch.empty(256, dtype=torch.float16, device=DEVICE)
    _of_fp8_kernel[(1,)](codes, out, SIZE=256)
    expected = codes.view(torch.float8_e4m3fn).float()
    nan = expected.isnan()
    assert nan.sum() == 2 and torch.equal(out[~nan].float(), expected[~nan])
    assert torch.equal(out.signbit(), expected.signbit())
    assert (out[nan].abs() == 480).all(), "no NaN, but no value of fp8 either"


def test_rounding_to_fp8_equals_that_of_torch() -> None:
    """Rounds every value of fp8, every tie, and the numbers next to them; and random numbers of all sizes."""
    every = values().unique()
    ties = (every[1:] + every[:-1]) / 2
    exact = torch.cat([every, ties])
    near = [torch.nextafter(exact, torch.full_like(exact, limit)) for limit in (-torch.inf, torch.inf)]
    sizes = torch.randint(-40, 9, (20_000,), device=DEVICE)
    x = torch.cat([exact, *near, torch.randn(20_000, device=DEVICE) * 2.0**sizes]).clamp(-FP8_MAX, FP8_MAX)
    assert torch.equal(rounded(x), x.to(torch.float8_e4m3fn).float())
