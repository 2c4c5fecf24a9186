"""Sorts the rows of a mixture of experts by expert, for GEMMs that load tiles of adjacent rows."""

# mypy: disable-error-code="no-untyped-def"
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import next_power_of_two, pdl
from ..triton.pdl import start_next, wait_for_previous

CHUNK = 4096  # pairs of a row and an expert that a program compares at a time
AT_ONCE = 8  # rows that a program copies


class SortedRows(NamedTuple):
    """Pairs of a row and a rank, sorted by expert, then by row; the tiles of each expert, one after the other."""

    data: Tensor  # fp8 [P, K], P = M * top
    scale: Tensor  # fp32 [P, K / 128]
    pairs: Tensor  # int32 [P]: row * top + rank
    tiles: Tensor  # int32 [most tiles, 3]: expert, first pair, number of pairs
    total: Tensor  # int32 [1]: number of tiles


@triton.jit(do_not_specialize=["P"])
def _sort_pairs_kernel(expert_p, pair_p, start_p, P, CHUNK: tl.constexpr, PDL: tl.constexpr):
    """Program e lists the pairs of expert e, in order, after those of earlier experts: pair [P], start [E + 1]."""
    i_e = tl.program_id(0)
    o_c = tl.arange(0, CHUNK)
    wait_for_previous(PDL)
    start_next(PDL)
    first = 0
    for start in range(0, P, CHUNK):
        b_each = tl.load(expert_p + start + o_c, mask=start + o_c < P, other=2**30)
        first += tl.sum((b_each < i_e).to(tl.int32))
    tl.store(start_p + i_e, first)
    for start in range(0, P, CHUNK):
        b_mine = (tl.load(expert_p + start + o_c, mask=start + o_c < P, other=-1) == i_e).to(tl.int32)
        tl.store(pair_p + first + tl.cumsum(b_mine, axis=0) - 1, start + o_c, mask=b_mine > 0)
        first += tl.sum(b_mine)


@triton.jit(do_not_specialize=["P", "SCALE_M", "SCALE_G"])
def _copy_rows_kernel(
    x_p, x_scale_p, pair_p, start_p, data_p, scale_p, tile_p, total_p, P, E, SCALE_M, SCALE_G,
    K: tl.constexpr, GROUPS: tl.constexpr, TOP: tl.constexpr, T: tl.constexpr, AT_ONCE: tl.constexpr,
    SIDE: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_G: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program i copies the rows of AT_ONCE sorted pairs, and lists the tiles of expert i."""
    i = tl.program_id(0)
    o_p, o_x, o_g = i * AT_ONCE + tl.arange(0, AT_ONCE), tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_G)
    exists = o_p < P
    wait_for_previous(PDL)
    b_row = tl.load(pair_p + o_p, mask=exists, other=0) // TOP
    m_x = exists[:, None] & (o_x < K)[None, :]
    b_x = tl.load(x_p + b_row[:, None].to(tl.int64) * K + o_x[None, :], mask=m_x, other=0)
    m_g = exists[:, None] & (o_g < GROUPS)[None, :]
    b_scale = tl.load(x_scale_p + b_row[:, None] * SCALE_M + o_g[None, :] * SCALE_G, mask=m_g, other=0.0)
    start_next(PDL)
    tl.store(data_p + o_p[:, None].to(tl.int64) * K + o_x[None, :], b_x, mask=m_x)
    tl.store(scale_p + o_p[:, None] * GROUPS + o_g[None, :], b_scale, mask=m_g)
    if i < E:
        o_e = tl.arange(0, SIDE)
        b_start = tl.load(start_p + o_e, mask=o_e <= E, other=0)
        b_rows = tl.where(o_e < E, tl.load(start_p + o_e + 1, mask=o_e < E, other=0) - b_start, 0)
        b_tiles = (b_rows + T - 1) // T
        tile = tl.sum(tl.where(o_e < i, b_tiles, 0))
        first, rows = tl.sum(tl.where(o_e == i, b_start, 0)), tl.sum(tl.where(o_e == i, b_rows, 0))
        for at in range(0, rows, T):
            p_tile = tile_p + 3 * (tile + at // T)
            tl.store(p_tile, i)
            tl.store(p_tile + 1, first + at)
            tl.store(p_tile + 2, tl.minimum(rows - at, T))
        if i == 0:
            tl.store(total_p, tl.sum(b_tiles))


def sort_rows(data: Tensor, scale: Tensor, experts: Tensor, count: int, tile: int) -> SortedRows:
    """Sorts rows quantized by groups of 128 columns, fp8 [M, K], by their experts, int32 [M, top].

    Args:
        count: of all experts.
        tile: largest number of rows in a tile.
    """
    (rows, top), (k, groups) = experts.shape, (data.shape[1], scale.shape[1])
    pairs, starts = experts.new_empty(rows * top), experts.new_empty(count + 1)
    _sort_pairs_kernel[(count + 1,)](experts, pairs, starts, rows * top, CHUNK=CHUNK, num_warps=8, **pdl(data))
    most = min(rows * top, count + rows * top // tile)
    found = SortedRows(
        data.new_empty(rows * top, k), scale.new_empty(rows * top, groups), pairs, experts.new_empty(most, 3),
        experts.new_empty(1),
    )  # fmt: skip
    bytes_of, bytes_to = data.view(torch.uint8), found.data.view(torch.uint8)
    _copy_rows_kernel[(max(-(-rows * top // AT_ONCE), count),)](
        bytes_of, scale, pairs, starts, bytes_to, found.scale, found.tiles, found.total,
        rows * top, count, *scale.stride(),
        K=k, GROUPS=groups, TOP=top, T=tile, AT_ONCE=AT_ONCE, SIDE=next_power_of_two(count + 1),
        BLOCK_K=next_power_of_two(k), BLOCK_G=next_power_of_two(groups), **pdl(data),
    )  # fmt: skip
    return found
