"""Merges the results of a head's tiles: argmax, top logits and log-sum-exp."""

# mypy: disable-error-code="no-untyped-def"
import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import next_power_of_two, pdl


@triton.jit
def ordered(b_x):
    """Maps floats to int32 in the same order, with one zero. Inverts the bits of negative values except the sign."""
    b_x = b_x.to(tl.float32)
    b_bits = tl.where(b_x == 0, 0.0, b_x).to(tl.int32, bitcast=True)
    return tl.where(b_bits < 0, b_bits ^ 0x7FFFFFFF, b_bits)


@triton.jit
def key_of(b_order, o_n):
    """Returns int64 keys that sort by value; among equal values the lower column has the larger key."""
    return (b_order.to(tl.int64) << 32) | (0x7FFFFFFF - o_n).to(tl.int64)


@triton.jit
def tile_key(b_order, first, o_n, BLOCK_N: tl.constexpr, WIDE: tl.constexpr):
    """Returns the key of column `first` + o_n, in the tile of BLOCK_N columns from `first` on.

    WIDE: `key_of`; else a 16-bit value and o_n share one int32, as a 16-bit float in 32 bits ends in zeros.
    """
    if WIDE:
        return key_of(b_order, first + o_n)
    else:  # the compiler requires returns of one type
        return (b_order & -BLOCK_N) | (BLOCK_N - 1 - o_n)


@triton.jit
def scale_logits(b_x, multiplier, cap, CAPPED: tl.constexpr):
    """Scales a head's products to logits, in fp32, see `LogitScale`."""
    b_x = b_x.to(tl.float32) * multiplier
    if CAPPED:
        b_x = cap * (2.0 / (1.0 + tl.exp(-2.0 * (b_x / cap))) - 1.0)
    return b_x


@triton.jit(do_not_specialize=["M", "tiles"])
def _reduce_kernel(best_p, index_p, out_p, M, tiles, BLOCK: tl.constexpr, PDL: tl.constexpr):
    i_m = tl.program_id(0)
    o_t = tl.arange(0, BLOCK)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    b_best = tl.load(best_p + o_t * M + i_m, mask=o_t < tiles, other=-float("inf"))
    b_index = tl.load(index_p + o_t * M + i_m, mask=o_t < tiles, other=2**31 - 1)
    top = tl.max(b_best, axis=0)
    # padding rows may hold NaN and have no largest value; their result must still be a valid column
    found = tl.min(tl.where(b_best == top, b_index, 2**31 - 1), axis=0)
    tl.store(out_p + i_m, tl.where(found == 2**31 - 1, 0, found).to(tl.int64))


def reduce_argmax(best: Tensor, index: Tensor) -> Tensor:
    """Returns the column int64 [M] of the largest of best [tiles, M], the lowest of tied ones."""
    tiles, m = best.shape
    out = torch.empty(m, dtype=torch.int64, device=best.device)
    _reduce_kernel[(m,)](best, index, out, m, tiles, BLOCK=next_power_of_two(tiles), **pdl(best))
    return out


@triton.jit
def _spread(b_key, o_t, BLOCK_N: tl.constexpr, WIDE: tl.constexpr):
    """Converts keys of tiles o_t to keys of all columns; a 16-bit value has its column in the low bits."""
    if WIDE:
        return b_key
    b_order = tl.where(b_key < 0, b_key | (BLOCK_N - 1), b_key & -BLOCK_N)  # ones in a negative one's order
    b_spread = key_of(b_order, (o_t + 1) * BLOCK_N - 1 - (b_key & (BLOCK_N - 1)))
    return tl.where(b_key == -(2**31), -(2**63), b_spread)


@triton.jit(do_not_specialize=["M", "tiles"])
def _merge_top_kernel(
    keys_p, counts_p, values_p, ids_p, M, tiles,
    BLOCK: tl.constexpr, BLOCK_N: tl.constexpr, COUNT: tl.constexpr, SLOTS: tl.constexpr, WIDE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Merges tiles: the COUNT largest keys of a row are in the COUNT tiles with the largest first keys."""
    i_m = tl.program_id(0)
    o_t, o_c = tl.arange(0, BLOCK), tl.arange(0, SLOTS)
    lowest = tl.full([], -(2**63), dtype=tl.int64)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    b_first = tl.load(keys_p + o_t.to(tl.int64) * COUNT * M + i_m, mask=o_t < tiles, other=0)
    b_first = tl.where(o_t < tiles, _spread(b_first, o_t, BLOCK_N, WIDE), lowest)
    b_tile = tl.full([SLOTS], -1, dtype=tl.int32)
    for i in range(COUNT):
        top = tl.max(b_first, axis=0)
        tile = ((0x7FFFFFFF - (top & 0x7FFFFFFF)) // BLOCK_N).to(tl.int32)
        b_tile = tl.where((o_c == i) & (top != lowest), tile, b_tile)
        b_first = tl.where(b_first == top, lowest, b_first)
    b_count = tl.load(counts_p + b_tile, mask=b_tile >= 0, other=0)
    there = o_c[None, :] < b_count[:, None]
    p_key = keys_p + (b_tile.to(tl.int64)[:, None] * COUNT + o_c[None, :]) * M + i_m
    b_key = tl.load(p_key, mask=there, other=0)
    b_key = tl.where(there, _spread(b_key, b_tile[:, None], BLOCK_N, WIDE), lowest)
    b_found = tl.full([SLOTS], -(2**63), dtype=tl.int64)
    for i in range(COUNT):
        top = tl.max(tl.max(b_key, axis=1), axis=0)
        b_found = tl.where(o_c == i, top, b_found)
        b_key = tl.where(b_key == top, lowest, b_key)
    b_order = (b_found >> 32).to(tl.int32)
    b_value = tl.where(b_order < 0, b_order ^ 0x7FFFFFFF, b_order).to(tl.float32, bitcast=True)
    tl.store(values_p + i_m * COUNT + o_c, b_value, mask=o_c < COUNT)
    tl.store(ids_p + i_m * COUNT + o_c, 0x7FFFFFFF - (b_found & 0x7FFFFFFF), mask=o_c < COUNT)


def merge_top(keys: Tensor, counts: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """Returns values fp32 and columns int64 [M, count] of keys [tiles, count, M], for tiles of `columns` columns.

    Tile t has counts[t] keys, int32 [tiles].
    """
    tiles, count, m = keys.shape
    values = torch.empty(m, count, dtype=torch.float32, device=keys.device)
    ids = torch.empty(m, count, dtype=torch.int64, device=keys.device)
    _merge_top_kernel[(m,)](
        keys, counts, values, ids, m, tiles,
        BLOCK=next_power_of_two(tiles), BLOCK_N=columns, COUNT=count, SLOTS=next_power_of_two(count),
        WIDE=keys.dtype == torch.int64, num_warps=8, **pdl(keys),
    )  # fmt: skip
    return values, ids


@triton.jit(do_not_specialize=["M", "tiles"])
def _merge_lse_kernel(tops_p, sums_p, out_p, M, tiles, BLOCK: tl.constexpr, PDL: tl.constexpr):
    i_m = tl.program_id(0)
    o_t = tl.arange(0, BLOCK)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    b_top = tl.load(tops_p + o_t * M + i_m, mask=o_t < tiles, other=-float("inf"))
    b_sum = tl.load(sums_p + o_t * M + i_m, mask=o_t < tiles, other=0.0)
    top = tl.max(b_top, axis=0)
    base = tl.where(top == -float("inf"), 0.0, top)
    tl.store(out_p + i_m, base + tl.log(tl.sum(b_sum * tl.exp(b_top - base), axis=0)))


def merge_lse(tops: Tensor, sums: Tensor) -> Tensor:
    """Returns the log-sum-exp fp32 [M] of tiles' largest values and sums relative to them, both [tiles, M]."""
    tiles, m = tops.shape
    out = torch.empty(m, dtype=torch.float32, device=tops.device)
    _merge_lse_kernel[(m,)](tops, sums, out, m, tiles, BLOCK=next_power_of_two(tiles), num_warps=4, **pdl(tops))
    return out
