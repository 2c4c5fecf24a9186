"""Per-head norm, RoPE and the write into the pages, in Triton.

For a block's queries, keys and values, whose split-K partial sums it adds up too, and for the context keys and values
of every draft layer at once. One program handles a few heads of one row.
"""

# mypy: disable-error-code="no-untyped-def"
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import keys_are_split, next_power_of_two, pdl


@triton.jit
def _load(p_in, HALF, HEADS: tl.constexpr, BLOCK: tl.constexpr):
    """Both halves [HEADS, BLOCK] of heads."""
    o_h = tl.arange(0, BLOCK)
    p_heads = p_in + tl.arange(0, HEADS)[:, None] * 2 * HALF + o_h[None, :]
    mask = (o_h < HALF)[None, :]
    return tl.load(p_heads, mask=mask, other=0.0), tl.load(p_heads + HALF, mask=mask, other=0.0)


@triton.jit
def _load_constants(w_p, rope_p, positions, position, HALF, BLOCK: tl.constexpr, NORM: tl.constexpr):
    """Of a position's heads: both halves of the norm's weight (1 without NORM), cosines and sines; all [1, BLOCK]."""
    o_h = tl.arange(0, BLOCK)[None, :]
    mask = o_h < HALF
    b_cos = tl.load(rope_p + position * HALF + o_h, mask=mask, other=0.0)
    b_sin = tl.load(rope_p + (positions + position) * HALF + o_h, mask=mask, other=0.0)
    if NORM:
        w_first = tl.load(w_p + o_h, mask=mask, other=0.0)
        w_second = tl.load(w_p + HALF + o_h, mask=mask, other=0.0)
    else:
        w_first = tl.full([1, BLOCK], 1.0, dtype=w_p.dtype.element_ty)
        w_second = w_first
    return w_first, w_second, b_cos, b_sin


@triton.jit
def _norm_rotate(b_first, b_second, w_first, w_second, b_cos, b_sin, eps, HALF, NORM: tl.constexpr):
    """Both halves [HEADS, BLOCK] of heads, normed (NORM) and rotated, in fp32; rounded where the reference rounds."""
    dtype = b_first.dtype
    if NORM:
        wide_first, wide_second = b_first.to(tl.float32), b_second.to(tl.float32)
        square = tl.sum(wide_first * wide_first + wide_second * wide_second, axis=1)
        scale = tl.rsqrt(square / (2 * HALF) + eps)[:, None]
        b_first = (wide_first * scale).to(dtype) * w_first
        b_second = (wide_second * scale).to(dtype) * w_second
    wide_first, wide_second = b_first.to(dtype).to(tl.float32), b_second.to(dtype).to(tl.float32)
    return wide_first * b_cos - wide_second * b_sin, wide_second * b_cos + wide_first * b_sin


@triton.jit
def _store(p_out, b_first, b_second, HALF, HEADS: tl.constexpr, BLOCK: tl.constexpr):
    o_h = tl.arange(0, BLOCK)
    p_heads = p_out + tl.arange(0, HEADS)[:, None] * 2 * HALF + o_h[None, :]
    mask = (o_h < HALF)[None, :]
    tl.store(p_heads, b_first.to(p_out.dtype.element_ty), mask=mask)
    tl.store(p_heads + HALF, b_second.to(p_out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["S"])
def _rope_write_kernel(
    part_p, bias_p, qw_p, kw_p, rope_p, lengths_p, counts_p, pages_p, cache_p, q_p,
    S, N, G, HALF, positions, width, slots, eps,
    PARTS: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr, PAGE: tl.constexpr,
    BIAS: tl.constexpr, NORM: tl.constexpr, COUNTED: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    i_m, i_h = tl.program_id(0).to(tl.int64), tl.program_id(1) * HEADS
    i_b = i_m // S
    H = 2 * HALF
    if PDL and EARLY:
        tl.extra.cuda.gdc_launch_dependents()  # attention, which may load the context meanwhile
    # none of this comes from the kernel before this one
    position = tl.load(lengths_p + i_b).to(tl.int64) + i_m % S
    page = tl.load(pages_p + i_b * width + position // PAGE).to(tl.int64)
    if COUNTED:
        page = tl.where(i_m % S < tl.load(counts_p + i_b), page, 0)  # padding goes to the null block
    slot = page * PAGE + position % PAGE
    p_w = qw_p
    if i_h >= N:
        p_w = kw_p
    w_first, w_second, b_cos, b_sin = _load_constants(p_w, rope_p, positions, position, HALF, BLOCK, NORM)
    if PDL:
        tl.extra.cuda.gdc_wait()
        if not EARLY:
            tl.extra.cuda.gdc_launch_dependents()
    columns = (N + 2 * G) * H
    p_in = part_p + i_m * columns + i_h * H
    b_first = tl.zeros([HEADS, BLOCK], dtype=tl.float32)
    b_second = tl.zeros([HEADS, BLOCK], dtype=tl.float32)
    for _ in tl.static_range(PARTS):  # in order: the result may not depend on scheduling
        part_first, part_second = _load(p_in, HALF, HEADS, BLOCK)
        b_first += part_first.to(tl.float32)
        b_second += part_second.to(tl.float32)
        p_in += tl.num_programs(0).to(tl.int64) * columns
    if BIAS:
        bias_first, bias_second = _load(bias_p + i_h * H, HALF, HEADS, BLOCK)
        b_first += bias_first.to(tl.float32)
        b_second += bias_second.to(tl.float32)
    b_first, b_second = b_first.to(cache_p.dtype.element_ty), b_second.to(cache_p.dtype.element_ty)
    if i_h < N + G:
        r_first, r_second = _norm_rotate(b_first, b_second, w_first, w_second, b_cos, b_sin, eps, HALF, NORM)
        if i_h < N:
            _store(q_p + (i_m * N + i_h) * H, r_first, r_second, HALF, HEADS, BLOCK)
        else:
            _store(cache_p + (slot * G + i_h - N) * H, r_first, r_second, HALF, HEADS, BLOCK)
    else:
        _store(cache_p + ((slots + slot) * G + i_h - N - G) * H, b_first, b_second, HALF, HEADS, BLOCK)


@triton.jit(do_not_specialize=["S", "LAYERS"])
def _context_write_kernel(
    kv_p, kw_p, rope_p, lengths_p, counts_p, pages_p, cache_p,
    S, LAYERS, G, HALF, positions, width, slots, eps,
    HEADS: tl.constexpr, BLOCK: tl.constexpr, PAGE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    i_m, i_h = tl.program_id(0).to(tl.int64), tl.program_id(1) * HEADS  # i_h = (layer * 2 + key or value) * G + head
    i_b = i_m // S
    H = 2 * HALF
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if i_m % S >= tl.load(counts_p + i_b):
        return
    position = tl.load(lengths_p + i_b).to(tl.int64) + i_m % S
    slot = tl.load(pages_p + i_b * width + position // PAGE).to(tl.int64) * PAGE + position % PAGE
    i_l, kind = i_h // (2 * G), (i_h // G) % 2
    p_in = kv_p + (i_m * 2 * LAYERS * G + i_h) * H
    p_out = cache_p + (((i_l * 2 + kind).to(tl.int64) * slots + slot) * G + i_h % G) * H
    b_first, b_second = _load(p_in, HALF, HEADS, BLOCK)
    if kind == 0:
        w_first, w_second, b_cos, b_sin = _load_constants(
            kw_p + i_l * H, rope_p, positions, position, HALF, BLOCK, True
        )
        k_first, k_second = _norm_rotate(b_first, b_second, w_first, w_second, b_cos, b_sin, eps, HALF, True)
        _store(p_out, k_first, k_second, HALF, HEADS, BLOCK)
    else:
        _store(p_out, b_first, b_second, HALF, HEADS, BLOCK)


def _heads_at_once(most: int, *counts: int) -> int:
    """The largest power of two, at most `most`, that divides all of them: no program then sees two kinds of heads."""
    common = math.gcd(1 << (most.bit_length() - 1), *counts)
    return common & -common


def rope_write(
    partial_sums: Tensor,
    bias: Tensor | None,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    rope: Tensor,
    lengths: Tensor,
    page_table: Tensor,
    cache: Tensor,
    page_size: int,
    counts: Tensor | None = None,
) -> Tensor:
    """Queries [M, N, H] of the sum of partial_sums [P, M, (N + 2 G) H] and bias; keys and values go to the cache.

    On a GPU `lengths`, `counts` and `page_table` are read while the launch before still runs.
    """
    _, slots, groups, width = cache.shape
    parts, m, columns = partial_sums.shape
    heads = columns // width
    q = torch.empty(m, heads - 2 * groups, width, dtype=cache.dtype, device=cache.device)
    norm = q_weight is not None
    at_once = _heads_at_once(max(1, 8 // parts), heads, groups)  # as much to load a program, whatever the parts
    early = keys_are_split(m, len(lengths))  # else a plain step of 16 takes 1.5 % longer (results/step_early_h200.json)
    _rope_write_kernel[(m, heads // at_once)](
        partial_sums, partial_sums if bias is None else bias, q_weight if norm else q, k_weight if norm else q,
        rope, lengths, lengths if counts is None else counts, page_table, cache, q,
        m // len(lengths), heads - 2 * groups, groups, width // 2, rope.shape[1], page_table.stride(0), slots, eps,
        PARTS=parts, HEADS=at_once, BLOCK=next_power_of_two(width // 2), PAGE=page_size,
        BIAS=bias is not None, NORM=norm, COUNTED=counts is not None, EARLY=early, num_warps=1, **pdl(cache),
    )  # fmt: skip
    return q


def context_write(
    kv: Tensor,
    k_weights: Tensor,
    eps: float,
    rope: Tensor,
    lengths: Tensor,
    counts: Tensor,
    page_table: Tensor,
    cache: Tensor,
    page_size: int,
) -> None:
    """Draft layers' keys and values of kv [M, L 2 G H] into cache [L, 2, slots, G, H], rows k < counts[b] only."""
    layers, _, slots, groups, width = cache.shape
    at_once = _heads_at_once(8, groups)
    _context_write_kernel[(len(kv), 2 * layers * groups // at_once)](
        kv, k_weights, rope, lengths, counts, page_table, cache,
        len(kv) // len(lengths), layers, groups, width // 2, rope.shape[1], page_table.stride(0), slots, eps,
        HEADS=at_once, BLOCK=next_power_of_two(width // 2), PAGE=page_size, num_warps=1, **pdl(kv),
    )  # fmt: skip
