"""DSpine's operations between the slots of blocks, in Triton; see `reference/slots.py`.

A row's result does not depend on the number of rows, also beyond MAX_ROWS.
"""

# mypy: disable-error-code="no-untyped-def"
import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import next_power_of_two, padded, pdl
from .pdl import start_next, wait_for_previous

PAIR_CHANNELS = 64  # channels of the states of pairs in registers at a time
ROWS, COLUMNS, DEPTH = 64, 64, 64  # tile of a product of many rows


@triton.jit(do_not_specialize=["S"])
def _messages_kernel(
    projected_p, before_p, bias_p, out_p, S, C, WIDTH, BLOCK: tl.constexpr, PAIRS: tl.constexpr, PDL: tl.constexpr
):
    """One message: from the slot before (at slot 1 from the anchor), or from the token of a pair."""
    i = tl.program_id(0).to(tl.int64)
    o = tl.arange(0, BLOCK)
    mask = o < WIDTH
    b_bias = tl.load(bias_p + o, mask=mask, other=0.0).to(tl.float32)
    if PAIRS:
        slot = i // C
        row = slot // (S - 1) * S + slot % (S - 1) + 1
        gate_p = before_p + i * 2 * WIDTH
        sent = mask
    else:
        row, place = i, i % S
        gate_p = projected_p + (i - 1) * 3 * WIDTH + WIDTH
        if place == 1:
            gate_p = before_p + i // S * 2 * WIDTH
        sent = mask & (place > 0)
    wait_for_previous(PDL)
    b_receiver = tl.load(projected_p + row * 3 * WIDTH + o, mask=sent, other=0.0).to(tl.float32)
    b_gate = tl.load(gate_p + o, mask=sent, other=0.0).to(tl.float32)
    b_message = tl.load(gate_p + WIDTH + o, mask=sent, other=0.0).to(tl.float32)
    start_next(PDL)
    b_out = tl.sigmoid(b_receiver + b_gate + b_bias) * b_message
    tl.store(out_p + i * WIDTH + o, b_out.to(out_p.dtype.element_ty), mask=mask)


def slot_messages(projected: Tensor, anchors: Tensor, bias: Tensor, block: int) -> Tensor:
    """Returns the gated message to every row from the slot before it, [B * block, m]; see the reference."""
    return _messages(projected, anchors, bias, block, len(projected), pairs=False)


def pair_messages(projected: Tensor, predecessors: Tensor, bias: Tensor, block: int) -> Tensor:
    """Returns the message to slots 1..K from each of C tokens before them, [B * K * C, m]; see the reference."""
    return _messages(projected, predecessors, bias, block, len(predecessors), pairs=True)


def _messages(projected: Tensor, before: Tensor, bias: Tensor, block: int, count: int, *, pairs: bool) -> Tensor:
    out = projected.new_empty(count, len(bias))
    each = count * block // (len(projected) * (block - 1)) if pairs else 1
    _messages_kernel[(count,)](
        projected, before, bias, out, block, each, len(bias), BLOCK=next_power_of_two(len(bias)), PAIRS=pairs,
        num_warps=2, **pdl(projected),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["M"])
def _inject_kernel(
    x_p, part_p, w_p, sum_p, h_p, M, D, eps, PARTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    i = tl.program_id(0).to(tl.int64)
    o = tl.arange(0, BLOCK)
    mask = o < D
    b_w = tl.load(w_p + o, mask=mask, other=0.0)
    wait_for_previous(PDL)
    b_x = tl.load(x_p + i * D + o, mask=mask, other=0.0)
    b_sum = tl.zeros([BLOCK], dtype=tl.float32)
    for part in tl.static_range(PARTS):
        b_sum += tl.load(part_p + (part * M + i) * D + o, mask=mask, other=0.0).to(tl.float32)
    start_next(PDL)
    b_wide = b_x.to(tl.float32)
    length = tl.sqrt(tl.sum(b_wide * b_wide, axis=0) / D)
    b_x = (b_wide + length * b_sum).to(b_x.dtype)
    tl.store(sum_p + i * D + o, b_x, mask=mask)
    b_wide = b_x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(b_wide * b_wide, axis=0) / D + eps)
    tl.store(h_p + i * D + o, ((b_wide * scale).to(b_w.dtype) * b_w).to(b_x.dtype), mask=mask)


def inject_rms_norm(x: Tensor, partial_sums: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Adds |x| / sqrt(D) times the sum of partial_sums [P, M, D] to x [M, D]; returns it and its RMSNorm."""
    (m, d), total, normed = x.shape, torch.empty_like(x), torch.empty_like(x)
    _inject_kernel[(m,)](
        x, partial_sums, weight, total, normed, m, d, eps, PARTS=len(partial_sums), BLOCK=next_power_of_two(d),
        num_warps=4 if d <= 2048 else 8, **pdl(x),
    )  # fmt: skip
    return total, normed


@triton.jit(do_not_specialize=["S"])
def _pair_scores_kernel(
    x_p, written_p, w_p, head_p, candidates_p, out_p, S, C, D, eps,
    BLOCK: tl.constexpr, C_BLOCK: tl.constexpr, CHANNELS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The scores of one slot: [candidates, candidates before]."""
    i = tl.program_id(0).to(tl.int64)
    row = i // (S - 1) * S + i % (S - 1) + 1
    o_c, o_d = tl.arange(0, C_BLOCK), tl.arange(0, BLOCK)
    m_c = o_c < C
    wait_for_previous(PDL)
    b_x = tl.load(x_p + row * D + o_d, mask=o_d < D, other=0.0).to(tl.float32)
    length = tl.sqrt(tl.sum(b_x * b_x, axis=0) / D)
    b_ids = tl.load(candidates_p + i * C + o_c, mask=m_c, other=0)
    b_scores = tl.zeros([C_BLOCK, C_BLOCK], dtype=tl.float32)
    b_square = tl.zeros([C_BLOCK], dtype=tl.float32)
    for first in range(0, D, CHANNELS):
        o = first + tl.arange(0, CHANNELS)
        m_o = o < D
        m = m_c[:, None] & m_o[None, :]
        b_part = tl.load(x_p + row * D + o, mask=m_o, other=0.0)
        b_w = tl.load(w_p + o, mask=m_o, other=0.0).to(tl.float32)
        b_written = tl.load(written_p + (i * C + o_c)[:, None] * D + o[None, :], mask=m, other=0.0).to(tl.float32)
        b_head = tl.load(head_p + b_ids[:, None] * D + o[None, :], mask=m, other=0.0)
        b_refined = (b_part.to(tl.float32)[None, :] + length * b_written).to(b_part.dtype).to(tl.float32)
        b_square += tl.sum(b_refined * b_refined, axis=1)
        b_weighted = (b_refined * b_w[None, :]).to(b_head.dtype)
        b_scores = tl.dot(b_head, tl.trans(b_weighted), b_scores, input_precision="ieee")
    start_next(PDL)
    b_scores *= tl.rsqrt(b_square / D + eps)[None, :]
    p_out = out_p + i * C * C + o_c[:, None] * C + o_c[None, :]
    tl.store(p_out, b_scores, mask=m_c[:, None] & m_c[None, :])


def pair_scores(
    x: Tensor, written: Tensor, weight: Tensor, eps: float, head: Tensor, candidates: Tensor, block: int
) -> Tensor:
    """Returns the scores of every candidate after every candidate of the slot before; see the reference."""
    batch, slots, count = candidates.shape
    assert candidates.is_contiguous() and written.is_contiguous() and len(x) == batch * block
    out = torch.empty(batch, slots, count, count, dtype=torch.float32, device=x.device)
    d = x.shape[1]
    _pair_scores_kernel[(batch * slots,)](
        x, written, weight, head, candidates, out, block, count, d, eps, BLOCK=next_power_of_two(d),
        C_BLOCK=padded(count), CHANNELS=PAIR_CHANNELS, num_warps=4, **pdl(x),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["M"])
def _many_rows_kernel(
    x_p, w_p, out_p, M, N, K, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PDL: tl.constexpr
):
    o_m = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    o_n = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    wait_for_previous(PDL)
    b_acc = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for first in range(0, K, DEPTH):
        o_k = first + tl.arange(0, DEPTH)
        m_x, m_w = (o_m < M)[:, None] & (o_k < K)[None, :], (o_n < N)[:, None] & (o_k < K)[None, :]
        b_x = tl.load(x_p + o_m[:, None] * K + o_k[None, :], mask=m_x, other=0.0)
        b_w = tl.load(w_p + o_n[:, None] * K + o_k[None, :], mask=m_w, other=0.0)
        b_acc = tl.dot(b_x, tl.trans(b_w), b_acc, input_precision="ieee")
    start_next(PDL)
    p_out = out_p + o_m[:, None] * N + o_n[None, :]
    tl.store(p_out, b_acc.to(out_p.dtype.element_ty), mask=(o_m < M)[:, None] & (o_n < N)[None, :])


def linear_many_rows(x: Tensor, weight: Tensor) -> Tensor:
    """Multiplies x [M, K] with weight [N, K] transposed; a row's sum does not depend on M, however large."""
    (m, k), n = x.shape, len(weight)
    assert x.is_contiguous() and weight.is_contiguous()
    out = x.new_empty(m, n)
    _many_rows_kernel[(-(-m // ROWS), -(-n // COLUMNS))](
        x, weight, out, m, n, k, ROWS=ROWS, COLUMNS=COLUMNS, DEPTH=DEPTH, num_warps=4, num_stages=3, **pdl(x)
    )
    return out
