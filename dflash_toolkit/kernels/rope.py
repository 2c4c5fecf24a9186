"""Per-head norm, RoPE and the write into the pages, in Triton: for a block's queries, keys and values, and for the
context keys and values of every draft layer at once. One program handles one head of one row."""

# mypy: disable-error-code="no-untyped-def"
import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import next_power_of_two, pdl


@triton.jit
def _norm_rotate(p_in, w_p, rope_p, positions, position, eps, HALF, BLOCK: tl.constexpr, NORM: tl.constexpr):
    """The two halves of a head, normed (NORM) and rotated, in fp32; rounded where the reference rounds."""
    o_h = tl.arange(0, BLOCK)
    mask = o_h < HALF
    b_first = tl.load(p_in + o_h, mask=mask, other=0.0)
    b_second = tl.load(p_in + HALF + o_h, mask=mask, other=0.0)
    dtype = b_first.dtype
    if NORM:
        wide_first, wide_second = b_first.to(tl.float32), b_second.to(tl.float32)
        square = tl.sum(wide_first * wide_first + wide_second * wide_second, axis=0)
        scale = tl.rsqrt(square / (2 * HALF) + eps)
        b_first = (wide_first * scale).to(dtype) * tl.load(w_p + o_h, mask=mask, other=0.0)
        b_second = (wide_second * scale).to(dtype) * tl.load(w_p + HALF + o_h, mask=mask, other=0.0)
    b_cos = tl.load(rope_p + position * HALF + o_h, mask=mask, other=0.0)
    b_sin = tl.load(rope_p + (positions + position) * HALF + o_h, mask=mask, other=0.0)
    wide_first, wide_second = b_first.to(dtype).to(tl.float32), b_second.to(dtype).to(tl.float32)
    return wide_first * b_cos - wide_second * b_sin, wide_second * b_cos + wide_first * b_sin


@triton.jit
def _rope_write_kernel(
    qkv_p, qw_p, kw_p, rope_p, lengths_p, pages_p, cache_p, q_p,
    S, N, G, HALF, positions, width, slots, eps,
    BLOCK: tl.constexpr, PAGE: tl.constexpr, NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    i_m, i_h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i_b = i_m // S
    o_h = tl.arange(0, BLOCK)
    mask = o_h < HALF
    H = 2 * HALF
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    position = tl.load(lengths_p + i_b).to(tl.int64) + i_m % S
    p_in = qkv_p + (i_m * (N + 2 * G) + i_h) * H
    if i_h < N:
        b_first, b_second = _norm_rotate(p_in, qw_p, rope_p, positions, position, eps, HALF, BLOCK, NORM)
        p_out = q_p + (i_m * N + i_h) * H
        tl.store(p_out + o_h, b_first.to(q_p.dtype.element_ty), mask=mask)
        tl.store(p_out + HALF + o_h, b_second.to(q_p.dtype.element_ty), mask=mask)
    else:
        page = tl.load(pages_p + i_b * width + position // PAGE).to(tl.int64)
        slot = page * PAGE + position % PAGE
        if i_h < N + G:
            b_first, b_second = _norm_rotate(p_in, kw_p, rope_p, positions, position, eps, HALF, BLOCK, NORM)
            p_out = cache_p + (slot * G + i_h - N) * H
        else:
            b_first = tl.load(p_in + o_h, mask=mask, other=0.0).to(tl.float32)
            b_second = tl.load(p_in + HALF + o_h, mask=mask, other=0.0).to(tl.float32)
            p_out = cache_p + ((slots + slot) * G + i_h - N - G) * H
        tl.store(p_out + o_h, b_first.to(cache_p.dtype.element_ty), mask=mask)
        tl.store(p_out + HALF + o_h, b_second.to(cache_p.dtype.element_ty), mask=mask)


@triton.jit
def _context_write_kernel(
    kv_p, kw_p, rope_p, lengths_p, counts_p, pages_p, cache_p,
    S, LAYERS, G, HALF, positions, width, slots, eps,
    BLOCK: tl.constexpr, PAGE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    i_m, i_h = tl.program_id(0).to(tl.int64), tl.program_id(1)  # i_h = (layer * 2 + key or value) * G + head
    i_b = i_m // S
    o_h = tl.arange(0, BLOCK)
    mask = o_h < HALF
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
    if kind == 0:
        b_first, b_second = _norm_rotate(p_in, kw_p + i_l * H, rope_p, positions, position, eps, HALF, BLOCK, True)
    else:
        b_first = tl.load(p_in + o_h, mask=mask, other=0.0).to(tl.float32)
        b_second = tl.load(p_in + HALF + o_h, mask=mask, other=0.0).to(tl.float32)
    tl.store(p_out + o_h, b_first.to(cache_p.dtype.element_ty), mask=mask)
    tl.store(p_out + HALF + o_h, b_second.to(cache_p.dtype.element_ty), mask=mask)


def rope_write(
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    rope: Tensor,
    lengths: Tensor,
    page_table: Tensor,
    cache: Tensor,
    page_size: int,
) -> Tensor:
    """Queries [M, N, H] of qkv [M, (N + 2 G) H], normed and rotated; keys and values go to cache [2, slots, G, H]."""
    _, slots, groups, width = cache.shape
    m, heads = len(qkv), qkv.shape[1] // width
    q = torch.empty(m, heads - 2 * groups, width, dtype=qkv.dtype, device=qkv.device)
    norm = q_weight is not None
    _rope_write_kernel[(m, heads)](
        qkv, q_weight if norm else qkv, k_weight if norm else qkv, rope, lengths, page_table, cache, q,
        m // len(lengths), heads - 2 * groups, groups, width // 2, rope.shape[1], page_table.stride(0), slots, eps,
        BLOCK=next_power_of_two(width // 2), PAGE=page_size, NORM=norm, num_warps=1, **pdl(qkv),
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
    _context_write_kernel[(len(kv), 2 * layers * groups)](
        kv, k_weights, rope, lengths, counts, page_table, cache,
        len(kv) // len(lengths), layers, groups, width // 2, rope.shape[1], page_table.stride(0), slots, eps,
        BLOCK=next_power_of_two(width // 2), PAGE=page_size, num_warps=1, **pdl(kv),
    )  # fmt: skip
