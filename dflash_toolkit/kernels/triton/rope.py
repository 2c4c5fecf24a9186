"""Per-head norm, RoPE and the write into the pages, in Triton.

Handles a block's queries, keys and values (it also adds up their split-K partial sums) and the context keys and values
of every draft layer at once. One program handles a few heads of one row.
"""

# mypy: disable-error-code="no-untyped-def"
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import keys_are_split, next_power_of_two, pdl
from .fp8 import to_bits
from .pdl import start_next, wait_for_previous

# The pairs of a head: numbers of its two halves; of the two halves of the part that turns; adjacent numbers
HALVES, PARTIAL, INTERLEAVED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def _pairs(HALF, TURNS, BLOCK: tl.constexpr, PAIRS: tl.constexpr):
    """Returns the places of both numbers of a head's pairs, [BLOCK] each; the first TURNS pairs turn."""
    o_first = tl.arange(0, BLOCK)
    o_second = o_first + HALF
    if PAIRS == 2:  # as numbers: Triton's key of a kernel misses constants that only inner functions read
        o_first *= 2
        o_second = o_first + 1
    if PAIRS == 1:
        o_second = o_first + tl.where(o_first < TURNS, TURNS, HALF)
        o_first += tl.where(o_first < TURNS, 0, TURNS)
    return o_first, o_second


@triton.jit
def _load(p_in, HALF, TURNS, stride, HEADS: tl.constexpr, BLOCK: tl.constexpr, PAIRS: tl.constexpr):
    """Loads both sides [HEADS, BLOCK] of the pairs of heads."""
    o_first, o_second = _pairs(HALF, TURNS, BLOCK, PAIRS)
    p_heads = p_in + tl.arange(0, HEADS)[:, None] * stride
    mask = (tl.arange(0, BLOCK) < HALF)[None, :]
    b_first = tl.load(p_heads + o_first[None, :], mask=mask, other=0.0)
    return b_first, tl.load(p_heads + o_second[None, :], mask=mask, other=0.0)


@triton.jit
def _load_constants(
    w_p, rope_p, positions, position, HALF, TURNS, BLOCK: tl.constexpr, PAIRS: tl.constexpr, NORM: tl.constexpr
):
    """Returns, for a position, both sides of the norm's weight (1 without NORM), cosines and sines; all [1, BLOCK]."""
    o_h = tl.arange(0, BLOCK)[None, :]
    mask = o_h < HALF
    turns = o_h < TURNS  # the others do not change
    b_cos = tl.load(rope_p + position * TURNS + o_h, mask=turns, other=1.0)
    b_sin = tl.load(rope_p + (positions + position) * TURNS + o_h, mask=turns, other=0.0)
    if NORM:
        o_first, o_second = _pairs(HALF, TURNS, BLOCK, PAIRS)
        w_first = tl.load(w_p + o_first[None, :], mask=mask, other=0.0)
        w_second = tl.load(w_p + o_second[None, :], mask=mask, other=0.0)
    else:
        w_first = tl.full([1, BLOCK], 1.0, dtype=w_p.dtype.element_ty)
        w_second = w_first
    return w_first, w_second, b_cos, b_sin


@triton.jit
def _norm_rotate(b_first, b_second, w_first, w_second, b_cos, b_sin, eps, HALF, NORM: tl.constexpr):
    """Norms (NORM) and rotates both sides [HEADS, BLOCK] of heads in fp32; rounds where the reference rounds."""
    dtype = b_first.dtype
    if NORM:
        wide_first, wide_second = b_first.to(tl.float32), b_second.to(tl.float32)
        square = tl.sum(wide_first * wide_first + wide_second * wide_second, axis=1)
        scale = tl.rsqrt(square / (2 * HALF) + eps)[:, None]
        b_first = (wide_first * scale).to(w_first.dtype) * w_first
        b_second = (wide_second * scale).to(w_first.dtype) * w_second
    wide_first, wide_second = b_first.to(dtype).to(tl.float32), b_second.to(dtype).to(tl.float32)
    return wide_first * b_cos - wide_second * b_sin, wide_second * b_cos + wide_first * b_sin


@triton.jit
def _store(p_out, b_first, b_second, HALF, TURNS, HEADS: tl.constexpr, BLOCK: tl.constexpr, PAIRS: tl.constexpr):
    o_first, o_second = _pairs(HALF, TURNS, BLOCK, PAIRS)
    p_heads = p_out + tl.arange(0, HEADS)[:, None] * 2 * HALF
    mask = (tl.arange(0, BLOCK) < HALF)[None, :]
    dtype = p_out.dtype.element_ty
    if not dtype.is_uint8():  # bits of fp8
        b_first, b_second = b_first.to(dtype), b_second.to(dtype)
    tl.store(p_heads + o_first[None, :], b_first, mask=mask)
    tl.store(p_heads + o_second[None, :], b_second, mask=mask)


@triton.jit
def _store_to_cache(
    cache_p, scales_p, side, slot, i_g, b_first, b_second, slots, G, HALF, TURNS,
    HEADS: tl.constexpr, BLOCK: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Stores heads from i_g on to a slot of keys or values; as `quantized_heads` if the cache holds bits of fp8."""
    if cache_p.dtype.element_ty.is_uint8():
        dtype = scales_p.dtype.element_ty
        wide_first, wide_second = b_first.to(dtype).to(tl.float32), b_second.to(dtype).to(tl.float32)
        high_first, high_second = tl.max(tl.abs(wide_first), axis=1), tl.max(tl.abs(wide_second), axis=1)
        # a carry into the exponent of the largest value if it is above 1.75 times a power of two
        b_power = (tl.maximum(high_first, high_second).to(tl.int32, bitcast=True) + 0x1FFFFF) & 0x7F800000
        b_power = tl.maximum(b_power - (8 << 23), (127 - 24) << 23)
        b_inverse = ((254 << 23) - b_power).to(tl.float32, bitcast=True)[:, None]
        total = tl.sum(tl.abs(wide_first) + tl.abs(wide_second), axis=1)
        b_scale = tl.where(total < float("inf"), b_power.to(tl.float32, bitcast=True), float("nan"))
        tl.store(scales_p + (side * G + i_g + tl.arange(0, HEADS)) * slots + slot, b_scale.to(dtype))
        b_first, b_second = to_bits(wide_first * b_inverse), to_bits(wide_second * b_inverse)
    p_out = cache_p + ((side * slots + slot) * G + i_g) * 2 * HALF
    _store(p_out, b_first, b_second, HALF, TURNS, HEADS, BLOCK, PAIRS)


@triton.jit(do_not_specialize=["S"])
def _rope_write_kernel(
    part_p, bias_p, qw_p, kw_p, rope_p, lengths_p, counts_p, pages_p, slots_p, cache_p, scales_p, q_p,
    S, N, G, HALF, TURNS, positions, width, slots, eps,
    PARTS: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr, PAGE: tl.constexpr,
    PAIRS: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr, NORM: tl.constexpr, COUNTED: tl.constexpr,
    PLACED: tl.constexpr, EARLY: tl.constexpr, NORM_VALUES: tl.constexpr, FACTORS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    i_m, i_h = tl.program_id(0).to(tl.int64), tl.program_id(1) * HEADS
    i_b = i_m // S
    H = 2 * HALF
    if PDL and EARLY:
        tl.extra.cuda.gdc_launch_dependents()  # lets attention load the context early
    # the previous kernel does not write these
    position = tl.load(lengths_p + i_b).to(tl.int64) + i_m % S
    if PLACED:
        slot = tl.load(slots_p + i_m).to(tl.int64)
    else:
        page = tl.load(pages_p + i_b * width + position // PAGE).to(tl.int64)
        if COUNTED:
            page = tl.where(i_m % S < tl.load(counts_p + i_b), page, 0)  # padding goes to the null block
        slot = page * PAGE + position % PAGE
    p_w = qw_p
    if i_h >= N:
        p_w = kw_p
    w_first, w_second, b_cos, b_sin = _load_constants(p_w, rope_p, positions, position, HALF, TURNS, BLOCK, PAIRS, NORM)
    if PDL:
        tl.extra.cuda.gdc_wait()
        if not EARLY:
            tl.extra.cuda.gdc_launch_dependents()
    columns, i_in, stride = (N + 2 * G) * H, i_h, H
    if GATED:  # a head's gate comes after its queries
        columns += N * H
        i_in += tl.minimum(i_h, N)
        stride = tl.where(i_h < N, 2 * H, H)
    p_in = part_p + i_m * columns + i_in * H
    b_first = tl.zeros([HEADS, BLOCK], dtype=tl.float32)
    b_second = tl.zeros([HEADS, BLOCK], dtype=tl.float32)
    for _ in tl.static_range(PARTS):  # in order, so that the result does not depend on scheduling
        part_first, part_second = _load(p_in, HALF, TURNS, stride, HEADS, BLOCK, PAIRS)
        b_first += part_first.to(tl.float32)
        b_second += part_second.to(tl.float32)
        p_in += tl.num_programs(0).to(tl.int64) * columns
    if BIAS:
        bias_first, bias_second = _load(bias_p + i_in * H, HALF, TURNS, stride, HEADS, BLOCK, PAIRS)
        b_first += bias_first.to(tl.float32)
        b_second += bias_second.to(tl.float32)
    b_first, b_second = b_first.to(q_p.dtype.element_ty), b_second.to(q_p.dtype.element_ty)
    if i_h < N + G:
        r_first, r_second = _norm_rotate(b_first, b_second, w_first, w_second, b_cos, b_sin, eps, HALF, NORM)
        if i_h < N:
            if FACTORS:
                factor = tl.load(rope_p + (2 * positions + position) * TURNS)
                r_first, r_second = r_first * factor, r_second * factor
            _store(q_p + (i_m * N + i_h) * H, r_first, r_second, HALF, TURNS, HEADS, BLOCK, PAIRS)
        else:
            _store_to_cache(
                cache_p, scales_p, 0, slot, i_h - N, r_first, r_second, slots, G, HALF, TURNS, HEADS, BLOCK, PAIRS
            )
    else:
        if NORM_VALUES:
            ones = tl.full([1, BLOCK], 1.0, dtype=tl.float32)
            v_first, v_second = _norm_rotate(b_first, b_second, ones, ones, ones, 0.0 * ones, eps, HALF, True)
            b_first, b_second = v_first.to(b_first.dtype), v_second.to(b_second.dtype)
        _store_to_cache(
            cache_p, scales_p, 1, slot, i_h - N - G, b_first, b_second, slots, G, HALF, TURNS, HEADS, BLOCK, PAIRS
        )


@triton.jit(do_not_specialize=["S", "LAYERS"])
def _context_write_kernel(
    kv_p, kw_p, rope_p, lengths_p, counts_p, pages_p, cache_p, scales_p,
    S, LAYERS, G, HALF, positions, width, slots, eps,
    HEADS: tl.constexpr, BLOCK: tl.constexpr, PAGE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    i_m, i_h = tl.program_id(0).to(tl.int64), tl.program_id(1) * HEADS  # i_h = (layer * 2 + key or value) * G + head
    i_b = i_m // S
    H = 2 * HALF
    wait_for_previous(PDL)
    start_next(PDL)
    if i_m % S >= tl.load(counts_p + i_b):
        return
    position = tl.load(lengths_p + i_b).to(tl.int64) + i_m % S
    slot = tl.load(pages_p + i_b * width + position // PAGE).to(tl.int64) * PAGE + position % PAGE
    i_l, kind = i_h // (2 * G), (i_h // G) % 2
    p_in = kv_p + (i_m * 2 * LAYERS * G + i_h) * H
    side = (i_l * 2 + kind).to(tl.int64)
    b_first, b_second = _load(p_in, HALF, HALF, H, HEADS, BLOCK, HALVES)
    if kind == 0:
        w_first, w_second, b_cos, b_sin = _load_constants(
            kw_p + i_l * H, rope_p, positions, position, HALF, HALF, BLOCK, HALVES, True
        )
        k_first, k_second = _norm_rotate(b_first, b_second, w_first, w_second, b_cos, b_sin, eps, HALF, True)
        b_first, b_second = k_first.to(b_first.dtype), k_second.to(b_second.dtype)
    _store_to_cache(
        cache_p, scales_p, side, slot, i_h % G, b_first, b_second, slots, G, HALF, HALF, HEADS, BLOCK, HALVES
    )


@triton.jit
def _gate_heads_kernel(
    x_p, part_p, out_p, N, H, columns,
    PARTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    i_m, i_n = tl.program_id(0).to(tl.int64), tl.program_id(1)
    o_h = tl.arange(0, BLOCK)
    mask = o_h < H
    wait_for_previous(PDL)
    start_next(PDL)
    p_in = part_p + i_m * columns + (2 * i_n + 1) * H + o_h
    b_gate = tl.zeros([BLOCK], dtype=tl.float32)
    for _ in tl.static_range(PARTS):  # in order, so that the result does not depend on scheduling
        b_gate += tl.load(p_in, mask=mask, other=0.0).to(tl.float32)
        p_in += tl.num_programs(0).to(tl.int64) * columns
    p_x = (i_m * N + i_n) * H + o_h
    b_x = tl.load(x_p + p_x, mask=mask, other=0.0)
    b_gate = b_gate.to(b_x.dtype).to(tl.float32)
    b_gate = (1.0 / (1.0 + tl.exp(-b_gate))).to(b_x.dtype)
    tl.store(out_p + p_x, b_x * b_gate, mask=mask)


def gate_heads(x: Tensor, partial_sums: Tensor, head_dim: int) -> Tensor:
    """Multiplies attention x [M, N H] with the sigmoid of the gates in partial_sums [P, M, (2 N + 2 G) H]."""
    parts, m, columns = partial_sums.shape
    out, heads = torch.empty_like(x), x.shape[1] // head_dim
    _gate_heads_kernel[(m, heads)](
        x, partial_sums, out, heads, head_dim, columns,
        PARTS=parts, BLOCK=next_power_of_two(head_dim), num_warps=1, **pdl(x),
    )  # fmt: skip
    return out


def _heads_at_once(most: int, *counts: int) -> int:
    """Returns the largest power of two up to `most` that divides all counts, so no program has two kinds of heads."""
    common = math.gcd(1 << (most.bit_length() - 1), *counts)
    return common & -common


def _stored(cache: Tensor, scales: Tensor | None) -> tuple[Tensor, Tensor, torch.dtype]:
    """Returns a cache and its scales as kernels write them, fp8 as uint8, and the dtype of the model."""
    return (cache, cache, cache.dtype) if scales is None else (cache.view(torch.uint8), scales, scales.dtype)


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
    *,
    gated: bool = False,
    interleaved: bool = False,
    normed_values: bool = False,
    at: Tensor | None = None,
    scales: Tensor | None = None,
    queries_only: bool = False,
) -> Tensor:
    """Adds partial_sums [P, M, (N + 2 G) H] and bias; returns queries [M, N, H], writes keys and values to the cache.

    With gates after the heads of queries, partial_sums have 2 N instead of N; with `queries_only`, no 2 G.
    On a GPU, `lengths`, `counts`, `page_table` and `at` are read while the previous launch still runs.
    """
    _, slots, groups, width = cache.shape
    groups *= not queries_only
    cache, scales, dtype = _stored(cache, scales)
    parts, m, columns = partial_sums.shape
    heads = columns // width
    if gated:
        heads = heads // 2 + groups
    q = torch.empty(m, heads - 2 * groups, width, dtype=dtype, device=cache.device)
    norm, weight = q_weight is not None, q if q_weight is None else q_weight
    at_once = _heads_at_once(max(1, 8 // parts), heads, groups)  # equal loads per program for any parts
    turns = rope.shape[2]
    pairs = INTERLEAVED if interleaved else PARTIAL if turns < width // 2 else HALVES
    early = keys_are_split(m, len(lengths))  # always early, a step of 16 is 1.5 % slower (results/step_early_h200.json)
    _rope_write_kernel[(m, heads // at_once)](
        partial_sums, partial_sums if bias is None else bias, weight, weight if k_weight is None else k_weight,
        rope, lengths, lengths if counts is None else counts, page_table, lengths if at is None else at,
        cache, scales, q,
        m // len(lengths), heads - 2 * groups, groups, width // 2, turns, rope.shape[1], page_table.stride(0), slots,
        eps,
        PARTS=parts, HEADS=at_once, BLOCK=next_power_of_two(width // 2), PAGE=page_size,
        PAIRS=pairs.value, GATED=gated, BIAS=bias is not None, NORM=norm, COUNTED=counts is not None,
        PLACED=at is not None, EARLY=early, NORM_VALUES=normed_values, FACTORS=len(rope) == 3, num_warps=1, **pdl(q),
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
    scales: Tensor | None = None,
) -> None:
    """Writes draft layers' keys and values of kv [M, L 2 G H], rows k < counts[b], to cache [L, 2, slots, G, H]."""
    layers, _, slots, groups, width = cache.shape
    cache, scales, _ = _stored(cache, scales)
    at_once = _heads_at_once(8, groups)
    _context_write_kernel[(len(kv), 2 * layers * groups // at_once)](
        kv, k_weights, rope, lengths, counts, page_table, cache, scales,
        len(kv) // len(lengths), layers, groups, width // 2, rope.shape[1], page_table.stride(0), slots, eps,
        HEADS=at_once, BLOCK=next_power_of_two(width // 2), PAGE=page_size, num_warps=1, **pdl(kv),
    )  # fmt: skip
