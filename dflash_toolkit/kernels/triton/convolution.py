"""The short convolution along the rows of a block, in Triton: forward, fused with add and norm, and backward.

A program holds some rows of some groups of channels as a tile [rows, groups, channels of a group]. A row has one
coefficient per group, which is broadcast over the group's channels.
"""

# mypy: disable-error-code="no-untyped-def"
import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import next_power_of_two, pdl

CHANNELS = 512  # channels of a forward program
BACKWARD_ROWS, BACKWARD_CHANNELS = 64, 64


@triton.jit
def _rows(p, parts, stride_part, o_m, stride, o_c, mask):
    """Loads rows o_m of channels o_c, added up over split-K parts in order."""
    p_rows = p + o_m.to(tl.int64)[:, None, None] * stride + o_c[None, :, :]
    b_sum = tl.load(p_rows, mask=mask, other=0.0).to(tl.float32)
    for i in range(1, parts):
        b_sum += tl.load(p_rows + i * stride_part, mask=mask, other=0.0).to(tl.float32)
    return b_sum


@triton.jit
def _kernel_of_tap(
    dynamic_p, base_p, parts, stride_part, o_m, stride, o_g, o_c, groups, D, m_row, m_c, TAU: tl.constexpr
):
    """Returns the coefficients [rows, groups, channels] of one tap."""
    p_own = dynamic_p + o_m.to(tl.int64)[:, None] * stride + TAU * groups + o_g[None, :]
    mask = m_row[:, None] & (o_g < groups)[None, :]
    b_own = tl.load(p_own, mask=mask, other=0.0).to(tl.float32)
    for i in range(1, parts):
        b_own += tl.load(p_own + i * stride_part, mask=mask, other=0.0).to(tl.float32)
    b_base = tl.load(base_p + TAU * D + o_c, mask=m_c, other=0.0).to(tl.float32)
    return b_base[None, :, :] + b_own[:, :, None]


@triton.jit
def _channels(o_g, groups, GROUP: tl.constexpr, WIDTH: tl.constexpr):
    """Returns the channels [groups, WIDTH] of groups o_g, and their mask."""
    o_j = tl.arange(0, WIDTH)
    return o_g[:, None] * GROUP + o_j[None, :], (o_g < groups)[:, None] & (o_j < GROUP)[None, :]


@triton.jit
def _convolved(
    x_p, dynamic_p, base_p, o_m, o_g, o_c, m_c, M, D, groups, S, parts, dynamic_parts, stride_dynamic, stride_part,
    TAPS: tl.constexpr,
):  # fmt: skip
    """Returns rows o_m of the convolution, summed in fp32."""
    b_acc = tl.zeros([o_m.shape[0], o_c.shape[0], o_c.shape[1]], dtype=tl.float32)
    for tau in tl.static_range(TAPS):
        seen = (o_m < M) & (o_m % S >= tau)
        b_x = _rows(x_p, parts, M.to(tl.int64) * D, o_m - tau, D, o_c, seen[:, None, None] & m_c[None, :, :])
        b_acc += b_x * _kernel_of_tap(
            dynamic_p, base_p, dynamic_parts, stride_part, o_m, stride_dynamic, o_g, o_c, groups, D, seen, m_c, tau
        )
    return b_acc


@triton.jit(do_not_specialize=["M", "S", "parts", "dynamic_parts"])
def _block_conv_kernel(
    x_p, dynamic_p, base_p, out_p, M, D, groups, S, parts, dynamic_parts, stride_dynamic, stride_part,
    TAPS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    o_m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    o_g = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    o_c, m_c = _channels(o_g, groups, GROUP, WIDTH)
    if PDL:
        tl.extra.cuda.gdc_wait()
    b_acc = _convolved(
        x_p, dynamic_p, base_p, o_m, o_g, o_c, m_c, M, D, groups, S, parts, dynamic_parts, stride_dynamic, stride_part,
        TAPS,
    )  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    p_out = out_p + o_m.to(tl.int64)[:, None, None] * D + o_c[None, :, :]
    tl.store(p_out, b_acc.to(out_p.dtype.element_ty), mask=(o_m < M)[:, None, None] & m_c[None, :, :])


@triton.jit(do_not_specialize=["M", "S", "stride_tap", "parts", "dynamic_parts"])
def _conv_add_rms_norm_kernel(
    x_p, part_p, dynamic_p, base_p, w_p, sum_p, h_p, tap_p, M, D, groups, S, parts, dynamic_parts,
    stride_dynamic, stride_part, stride_tap, eps,
    TAPS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, GROUPS: tl.constexpr, TAP: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    i_m = tl.program_id(0)
    o_m, o_g = i_m + tl.arange(0, 1), tl.arange(0, GROUPS)
    o_c, m_c = _channels(o_g, groups, GROUP, WIDTH)
    b_w = tl.load(w_p + o_c, mask=m_c, other=0.0)  # weights do not depend on other kernels
    if PDL:
        tl.extra.cuda.gdc_wait()
    b_y = _convolved(
        part_p, dynamic_p, base_p, o_m, o_g, o_c, m_c, M, D, groups, S, parts, dynamic_parts, stride_dynamic,
        stride_part, TAPS,
    )  # fmt: skip
    b_y = tl.reshape(b_y, (GROUPS, WIDTH)).to(base_p.dtype.element_ty).to(tl.float32)
    o_x = i_m.to(tl.int64) * D + o_c
    b_x = tl.load(x_p + o_x, mask=m_c, other=0.0)
    b_x = (b_x.to(tl.float32) + b_y).to(b_x.dtype)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    tl.store(sum_p + o_x, b_x, mask=m_c)
    if TAP:
        tl.store(tap_p + i_m.to(tl.int64) * stride_tap + o_c, b_x, mask=m_c)
    b_wide = b_x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(tl.sum(b_wide * b_wide, axis=1), axis=0) / D + eps)
    b_h = (b_wide * scale).to(b_x.dtype) * b_w
    tl.store(h_p + o_x, b_h.to(b_x.dtype), mask=m_c)


@triton.jit(do_not_specialize=["M", "S"])
def _block_conv_backward_kernel(
    d_out_p, x_p, dynamic_p, base_p, d_x_p, d_dynamic_p, d_base_p, M, D, groups, S, stride_dynamic,
    TAPS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Computes gradients of x, the rows' coefficients, and the base over ROWS rows: d_base [programs, TAPS, D]."""
    i_m = tl.program_id(0).to(tl.int64)
    o_m = i_m * ROWS + tl.arange(0, ROWS)
    o_g = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    o_c, m_c = _channels(o_g, groups, GROUP, WIDTH)
    m_m = o_m < M
    b_d_out = _rows(d_out_p, 1, 0, o_m, D, o_c, m_m[:, None, None] & m_c[None, :, :])
    b_d_x = tl.zeros([ROWS, GROUPS, WIDTH], dtype=tl.float32)
    for tau in tl.static_range(TAPS):
        seen = m_m & (o_m % S >= tau)
        b_product = b_d_out * _rows(x_p, 1, 0, o_m - tau, D, o_c, seen[:, None, None] & m_c[None, :, :])
        p_own = d_dynamic_p + (o_m[:, None] * TAPS + tau) * groups + o_g[None, :]
        b_own = tl.sum(b_product, axis=2)
        tl.store(p_own, b_own.to(d_dynamic_p.dtype.element_ty), mask=m_m[:, None] & (o_g < groups)[None, :])
        tl.store(d_base_p + (i_m * TAPS + tau) * D + o_c, tl.sum(b_product, axis=0), mask=m_c)
        seer = m_m & (o_m % S + tau < S)  # the row that sees this one through the tap
        b_d_x += _rows(d_out_p, 1, 0, o_m + tau, D, o_c, seer[:, None, None] & m_c[None, :, :]) * _kernel_of_tap(
            dynamic_p, base_p, 1, 0, o_m + tau, stride_dynamic, o_g, o_c, groups, D, seer, m_c, tau
        )
    p_d_x = d_x_p + o_m[:, None, None] * D + o_c[None, :, :]
    tl.store(p_d_x, b_d_x.to(d_x_p.dtype.element_ty), mask=m_m[:, None, None] & m_c[None, :, :])


def _group(dynamic: Tensor, base: Tensor) -> int:
    """Returns the channels of a group."""
    return base.numel() // dynamic.shape[-1]


def _parts(rows: Tensor) -> tuple[int, int, int]:
    """Returns the number of parts, their stride and the rows' stride of [M, N] or split-K parts [P, M, N]."""
    return (len(rows), rows.stride(0), rows.stride(1)) if rows.dim() == 3 else (1, 0, rows.stride(0))


def block_conv(x: Tensor, dynamic: Tensor, base: Tensor, block: int, dtype: torch.dtype | None = None) -> Tensor:
    """Returns the convolution [M, D] of x [M, D] or [P, M, D] in blocks of `block` rows; see the reference.

    Args:
        dtype: dtype of the result; None is that of `base`.
    """
    (m, d), group = x.shape[-2:], _group(dynamic, base)
    out = torch.empty(m, d, dtype=dtype or base.dtype, device=x.device)
    width, groups = next_power_of_two(group), d // group
    rows = 1 if m <= 1024 else 8
    tile = max(1, min(CHANNELS // width, next_power_of_two(groups)))
    dynamic_parts, stride_part, stride = _parts(dynamic)
    _block_conv_kernel[(-(-m // rows), -(-groups // tile))](
        x, dynamic, base, out, m, d, groups, block, _parts(x)[0], dynamic_parts, stride, stride_part,
        TAPS=len(base), GROUP=group, WIDTH=width, ROWS=rows, GROUPS=tile, num_warps=2 if rows == 1 else 4, **pdl(x),
    )  # fmt: skip
    return out


def conv_add_rms_norm(
    x: Tensor,
    partial_sums: Tensor,
    dynamic: Tensor,
    base: Tensor,
    block: int,
    weight: Tensor,
    eps: float,
    tap: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Adds the convolution of partial_sums [P, M, D] to x [M, D], also into `tap`; returns the sum and its RMSNorm."""
    (m, d), group = x.shape, _group(dynamic, base)
    total, normed = torch.empty_like(x), torch.empty_like(x)
    width, groups = next_power_of_two(group), d // group
    dynamic_parts, stride_part, stride = _parts(dynamic)
    _conv_add_rms_norm_kernel[(m,)](
        x, partial_sums, dynamic, base, weight, total, normed, x if tap is None else tap, m, d, groups, block,
        len(partial_sums), dynamic_parts, stride, stride_part, 0 if tap is None else tap.stride(0), eps,
        TAPS=len(base), GROUP=group, WIDTH=width, GROUPS=next_power_of_two(groups), TAP=tap is not None,
        num_warps=4 if d <= 2048 else 8, **pdl(x),
    )  # fmt: skip
    return total, normed


def block_conv_backward(
    d_out: Tensor, x: Tensor, dynamic: Tensor, base: Tensor, block: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of x [M, D], dynamic [M, T * (D / g)] and base [T, D], each in its dtype, for d_out."""
    (m, d), group, taps = x.shape, _group(dynamic, base), len(base)
    width, groups = next_power_of_two(group), d // group
    rows, tile = BACKWARD_ROWS, max(1, min(BACKWARD_CHANNELS // width, next_power_of_two(groups)))
    programs = -(-m // rows)
    d_x = torch.empty_like(x)
    d_dynamic = torch.empty(m, taps * groups, dtype=dynamic.dtype, device=x.device)
    d_base = torch.empty(programs, taps, d, dtype=torch.float32, device=x.device)
    _block_conv_backward_kernel[(programs, -(-groups // tile))](
        d_out, x, dynamic, base, d_x, d_dynamic, d_base, m, d, groups, block, dynamic.stride(0),
        TAPS=taps, GROUP=group, WIDTH=width, ROWS=rows, GROUPS=tile,
    )  # fmt: skip
    return d_x, d_dynamic, d_base.sum(0).to(base.dtype)
