"""Rows in fp8 and GEMMs with them, on the interpreter where there is no GPU."""

from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from kernel_inputs import fp8_kinds
from kernel_inputs import fp8_type as fp8_type
from torch import Tensor

from dflash_toolkit.kernels import gpu
from dflash_toolkit.kernels.formats import FP8_MAX, RowScaledFp8
from dflash_toolkit.kernels.triton import fp8

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROUNDING = 2.0**-4  # half the distance of adjacent values in e4m3, of the smaller one


def rows_of(kind: str, m: int, k: int) -> Tensor:
    """Rows of very different sizes that fp16 has, with an outlier each."""
    x = torch.randn(m, k) * torch.logspace(-4, 2, m)[:, None]
    x[:, k // 2] *= 50
    if kind == "in the format":
        quantized = RowScaledFp8.of(x)
        # as bf16 has them exactly: the scale a power of two
        x = quantized.data.float() * torch.exp2(quantized.scale.log2().round())[:, None]
    return x.to(torch.bfloat16).to(DEVICE)


@fp8_kinds
@pytest.mark.parametrize("k", [1, 10, 64, 300, 4096])
@pytest.mark.parametrize("m", [1, 3, 129])
def test_rows_are_quantized_as_weights_are(m: int, k: int, kind: str) -> None:
    x = rows_of(kind, m, k)
    x[0] = 0
    found, expected = fp8.quantize_rows(x), RowScaledFp8.of(x)
    torch.testing.assert_close(found.scale, expected.scale, rtol=1e-6, atol=0)
    exact, error = x.double(), (found.dense(torch.float64) - x.double()).abs()
    # values below the normal numbers of the format have its spacing there
    tiny = found.scale.double()[:, None] * 2.0**-10
    assert (error <= ROUNDING * exact.abs() * 1.001 + tiny).all()
    assert (found.data.float().abs().amax(1)[1:] == FP8_MAX).all()
    if kind == "in the format":
        assert torch.equal(found.data.float(), expected.data.float()) and not error.any()


@pytest.mark.parametrize(
    ("m", "n", "k", "biased"),
    [(129, 48, 64, False), (129, 48, 64, True), (160, 16, 320, True), (256, 640, 256, False), (300, 1152, 896, True)],
)
@fp8_kinds
@pytest.mark.sampled
def test_wide_gemms_with_quantized_weights_are_within_their_rounding(
    m: int, n: int, k: int, biased: bool, kind: str
) -> None:
    x, weight = rows_of(kind, m, k), RowScaledFp8.of(torch.randn(n, k, device=DEVICE) / k**0.5)
    bias = torch.randn(n, device=DEVICE).to(torch.bfloat16) if biased else None
    exact_weight = weight.dense(torch.float64)
    exact = x.double() @ exact_weight.T + (0 if bias is None else bias.double())
    found = gpu.linear(x, weight, bias).double()
    terms = x.double().abs() @ exact_weight.abs().T
    # the sum's own rounding in bf16; and fast accumulation, which cuts the sum to 13 bits every 32 columns
    bound = 2.0**-7 * exact.abs() + -(-k // 32) * 2.0**-13 * terms
    if kind == "any":  # then every term is off by its row's rounding at most
        smallest = x.double().abs().amax(1, keepdim=True) / FP8_MAX * 2.0**-10 * exact_weight.abs().sum(1)
        bound += ROUNDING * terms + smallest
    assert ((found - exact).abs() <= bound).all()
    parts = gpu.linear_split_k(x, weight, bias)
    assert torch.equal(parts.sum(0).double(), found)
    if bias is None:
        gate, up = found[:, 0::2], found[:, 1::2]
        for activation, active in (("silu", F.silu(gate)), ("gelu_tanh", F.gelu(gate, approximate="tanh"))):
            given = gpu.linear_swiglu(x, weight, activation).double()
            torch.testing.assert_close(given, active * up, rtol=2.0**-6, atol=2.0**-12)
    with patch.object(gpu, "scaled_linear", side_effect=AssertionError("of bf16 only, in whole tiles of 16")):
        gpu.linear(x.float(), weight)
        gpu.linear(x[:, :-1].contiguous(), RowScaledFp8.of(exact_weight[:, :-1].float()))
        gpu.linear(x, RowScaledFp8.of(exact_weight[:-1].float()))


@fp8_kinds
@pytest.mark.parametrize(
    ("m", "n", "k"), [(1, 2000, 256), (16, 48, 80), (33, 2000, 256), (140, 304, 896), (257, 80, 96)]
)
@pytest.mark.sampled
def test_a_head_in_fp8_takes_a_nearly_largest_column_by_tiles(
    m: int, n: int, k: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, head = rows_of(kind, m, k), RowScaledFp8.of(torch.randn(n, k, device=DEVICE))
    monkeypatch.setattr(gpu, "_cublas_linear", None)  # which would have logits in memory
    logits = x.double() @ head.dense(torch.float64).T
    found = gpu.linear_argmax(x, head)
    assert (found.dtype, found.shape) == (torch.int64, (m,))
    chosen = logits.gather(1, found[:, None])[:, 0]
    spread = x.double().abs() @ head.dense(torch.float64).abs().T
    # the latter for fast accumulation, which cuts the sum to 13 bits every 32 columns
    slack = ROUNDING if kind == "any" else 2.0**-7
    assert (logits.amax(1) - chosen <= 2 * slack * spread.amax(1)).all()
    assert (chosen == logits.amax(1)).float().mean() > 0.7


@pytest.mark.usefixtures("fp8_type")
@pytest.mark.parametrize("long", [0, 1000], ids=["256 at a time", "128"])
def test_fp8_head_is_batch_invariant(long: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "LONG_SUM", long)
    x, head = rows_of("in the format", 300, 192), RowScaledFp8.of(torch.randn(272, 192, device=DEVICE))
    whole = gpu.linear_argmax(x, head)
    for rows in (1, 17, 129):
        assert torch.equal(gpu.linear_argmax(x[:rows], head), whole[:rows]), rows
    assert torch.equal(gpu.linear_argmax(x[290:], head), whole[290:])


@pytest.mark.usefixtures("fp8_type")
def test_fp8_head_breaks_ties_by_lowest_column() -> None:
    x = torch.ones(3, 32, dtype=torch.bfloat16, device=DEVICE)
    head = torch.full((400, 32), -1.0, device=DEVICE)
    head[[37, 130, 399]] = 1.0
    assert gpu.linear_argmax(x, RowScaledFp8.of(head)).tolist() == [37] * 3
    assert gpu.linear_argmax(-x, RowScaledFp8.of(head)).tolist() == [0] * 3


def test_rows_of_other_types_are_not_quantized_for_a_head_in_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    x, head = rows_of("in the format", 33, 256), RowScaledFp8.of(torch.randn(2000, 256, device=DEVICE))
    monkeypatch.setattr(gpu, "quantize_rows", None)
    exact = x.double() @ head.dense(torch.float64).T
    chosen = exact.gather(1, gpu.linear_argmax(x.float(), head)[:, None])[:, 0]
    assert (exact.amax(1) - chosen <= 2.0**-10 * exact.abs().amax(1)).all()


@pytest.mark.usefixtures("fp8_type")
def test_largest_values_do_not_leave_the_format() -> None:
    x = torch.full((2, 64), 3.3895e38, dtype=torch.bfloat16, device=DEVICE)
    x[1] = 1e-38
    found = fp8.quantize_rows(x)
    assert found.data.float().isfinite().all() and (found.data.float()[0] == FP8_MAX).all()
