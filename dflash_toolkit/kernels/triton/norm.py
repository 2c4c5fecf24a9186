"""Residual add and RMSNorm in Triton, one row per program; also adds up the split-K partial sums of a GEMM."""

# mypy: disable-error-code="no-untyped-def"
import torch
import triton
import triton.language as tl
from torch import Tensor

from ..formats import BLOCK, FP8_MAX, LEAST, Operand, QuantizedRows
from ..launch import next_power_of_two, pdl
from .fp8_blocks import empty_rows, quantize
from .pdl import start_next, wait_for_previous


@triton.jit
def _rms_norm(b_x, b_w, D, eps):
    """Returns the RMSNorm of a row [BLOCK] of D numbers, rounded as in the reference."""
    b_wide = b_x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(b_wide * b_wide, axis=0) / D + eps)
    return ((b_wide * scale).to(b_w.dtype) * b_w).to(b_x.dtype)


@triton.jit(do_not_specialize=["M", "stride_tap", "SCALE_M", "SCALE_D"])
def _add_rms_norm_kernel(
    x_p, part_p, w_p, output_w_p, scalar_p, sum_p, h_p, tap_p, data_p, scale_p, M, D, eps, stride_tap, SCALE_M, SCALE_D,
    PARTS: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr, TAP: tl.constexpr, QUANTIZE: tl.constexpr,
    NORM: tl.constexpr, OUTPUT_NORM: tl.constexpr,
    GROUP: tl.constexpr, FP8_MAX: tl.constexpr, LEAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    i_m = tl.program_id(0).to(tl.int64)
    o_d = tl.arange(0, BLOCK)
    mask = o_d < D
    if NORM:  # weights do not depend on other kernels
        b_w = tl.load(w_p + o_d, mask=mask, other=0.0)
    if OUTPUT_NORM:
        b_output_w = tl.load(output_w_p + o_d, mask=mask, other=0.0)
    wait_for_previous(PDL)
    b_x = tl.load(x_p + i_m * D + o_d, mask=mask, other=0.0)
    if ADD:
        b_sum = tl.zeros([BLOCK], dtype=tl.float32)
        # in order, so that the result does not depend on scheduling; unrolled, so that a row's loads overlap
        for i in tl.static_range(PARTS):
            b_sum += tl.load(part_p + (i * M + i_m) * D + o_d, mask=mask, other=0.0).to(tl.float32)
        if OUTPUT_NORM:
            b_sum = _rms_norm(b_sum.to(b_x.dtype), b_output_w, D, eps).to(tl.float32)
        b_x = (b_x.to(tl.float32) + b_sum).to(b_x.dtype)
    if scalar_p is not None:
        b_x = (b_x.to(tl.float32) * tl.load(scalar_p).to(tl.float32)).to(b_x.dtype)
    start_next(PDL)
    if ADD:
        tl.store(sum_p + i_m * D + o_d, b_x, mask=mask)
    if TAP:
        tl.store(tap_p + i_m * stride_tap + o_d, b_x, mask=mask)
    b_h = b_x
    if NORM:
        b_h = _rms_norm(b_x, b_w, D, eps)
        tl.store(h_p + i_m * D + o_d, b_h, mask=mask)
    if QUANTIZE:
        o_g = tl.arange(0, BLOCK // GROUP)
        o_in = o_g[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        b_y, b_scale = quantize(tl.reshape(b_h, (BLOCK // GROUP, GROUP)), 1, data_p.dtype.element_ty, FP8_MAX, LEAST)
        tl.store(data_p + i_m * D + o_in, b_y, mask=o_in < D)
        tl.store(scale_p + i_m * SCALE_M + o_g * SCALE_D, b_scale, mask=o_g < D // GROUP)


@triton.jit
def _norm_queries_keys_kernel(
    part_p, bias_p, qw_p, kw_p, out_p, M, Q, K, eps,
    PARTS: tl.constexpr, BLOCK: tl.constexpr, BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Norms the queries or keys of a row, or copies its values; Q and K are the widths of queries and of keys."""
    i_m, i_s = tl.program_id(0).to(tl.int64), tl.program_id(1)
    width, start, p_w = Q, 0, qw_p
    if i_s > 0:
        width, start, p_w = K, Q + (i_s - 1) * K, kw_p
    o_d = tl.arange(0, BLOCK)
    mask = o_d < width
    b_w = tl.load(p_w + o_d, mask=mask, other=0.0)
    wait_for_previous(PDL)
    start_next(PDL)
    p_in = i_m * (Q + 2 * K) + start + o_d
    b_sum = tl.zeros([BLOCK], dtype=tl.float32)
    for i in tl.static_range(PARTS):  # in order, so that the result does not depend on scheduling
        b_sum += tl.load(part_p + i * M * (Q + 2 * K) + p_in, mask=mask, other=0.0).to(tl.float32)
    if BIAS:
        b_sum += tl.load(bias_p + start + o_d, mask=mask, other=0.0).to(tl.float32)
    b_x = b_sum.to(out_p.dtype.element_ty)
    if i_s < 2:
        b_x = _rms_norm(b_x, b_w, width, eps)
    tl.store(out_p + p_in, b_x, mask=mask)


def norm_queries_keys(
    partial_sums: Tensor, bias: Tensor | None, q_weight: Tensor, k_weight: Tensor, eps: float, dtype: torch.dtype
) -> Tensor:
    """Adds up partial_sums [P, M, (N + 2 G) H] and norms queries and keys of all heads; returns [1, M, ...]."""
    parts, m, columns = partial_sums.shape
    out = torch.empty(1, m, columns, dtype=dtype, device=partial_sums.device)
    _norm_queries_keys_kernel[(m, 3)](
        partial_sums, partial_sums if bias is None else bias, q_weight, k_weight, out, m, len(q_weight), len(k_weight),
        eps, PARTS=parts, BLOCK=next_power_of_two(len(q_weight)), BIAS=bias is not None, num_warps=8, **pdl(out),
    )  # fmt: skip
    return out


def add_rms_norm(
    x: Tensor,
    partial_sums: Tensor | None,
    weight: Tensor | None,
    eps: float,
    tap: Tensor | None = None,
    output_norm: Tensor | None = None,
    scalar: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Adds partial_sums [P, M, D], or their norm, to x [M, D], also into `tap`; returns the sum and its RMSNorm."""
    return _launch(x, partial_sums, weight, eps, tap, output_norm, scalar, None)


def add_rms_norm_quantized(
    x: Tensor,
    partial_sums: Tensor | None,
    weight: Tensor | None,
    eps: float,
    tap: Tensor | None = None,
    output_norm: Tensor | None = None,
    scalar: Tensor | None = None,
) -> tuple[Tensor, Operand]:
    """Computes `add_rms_norm`; also quantizes the rows for GEMMs with block-scaled fp8 weights."""
    m, d = x.shape
    if d % BLOCK:
        return _launch(x, partial_sums, weight, eps, tap, output_norm, scalar, None)
    quantized = empty_rows(m, d, x.device)
    total, normed = _launch(x, partial_sums, weight, eps, tap, output_norm, scalar, quantized)
    return total, QuantizedRows(normed, *quantized)


def _launch(
    x: Tensor, partial_sums: Tensor | None, weight: Tensor | None, eps: float, tap: Tensor | None,
    output_norm: Tensor | None, scalar: Tensor | None, quantized: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    m, d = x.shape
    total = x if partial_sums is None else torch.empty_like(x)
    if weight is None and tap is None and partial_sums is None and quantized is None:
        return x, x
    normed = total if weight is None else torch.empty_like(x)
    _add_rms_norm_kernel[(m,)](
        x, x if partial_sums is None else partial_sums, x if weight is None else weight,
        x if output_norm is None else output_norm, scalar, total, normed, x if tap is None else tap,
        *(quantized or (x, x)), m, d, eps, 0 if tap is None else tap.stride(0), *(quantized or (x, x))[1].stride(),
        PARTS=0 if partial_sums is None else len(partial_sums), BLOCK=next_power_of_two(d),
        ADD=partial_sums is not None, TAP=tap is not None, QUANTIZE=quantized is not None,
        NORM=weight is not None, OUTPUT_NORM=output_norm is not None, GROUP=BLOCK, FP8_MAX=FP8_MAX, LEAST=LEAST,
        num_warps=4 if d <= 2048 else 8,
        **pdl(x),
    )  # fmt: skip
    return total, normed
