"""Sorts the rows of a mixture of experts by expert, for GEMMs that load tiles of adjacent rows."""

# mypy: disable-error-code="no-untyped-def"
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import next_power_of_two, pdl
from ..triton.pdl import start_next, wait_for_previous

CHUNK = 512  # pairs of a row and an expert that a program compares with its own at a time
COUNTED = 2048  # pairs that it counts at a time
AT_ONCE = 8  # pairs whose rows a program copies


class SortedRows(NamedTuple):
    """Pairs of a row and a rank, sorted by expert, then by row; the tiles of each expert, one after the other."""

    data: Tensor  # fp8 [P, K], P = M * top
    scale: Tensor  # fp32 [P, K / 128]
    pairs: Tensor  # int32 [P]: row * top + rank
    tiles: Tensor  # int32 [most tiles, 3]: expert, first pair, number of pairs
    total: Tensor  # int32 [1]: number of tiles


@triton.jit
def _list_tiles(expert_p, tile_p, total_p, P, E, T: tl.constexpr, COUNTED: tl.constexpr, SIDE: tl.constexpr):
    """Stores the tiles of all experts and their number."""
    o_e, o_l = tl.arange(0, SIDE), tl.arange(0, COUNTED)
    b_rows = tl.zeros([SIDE], dtype=tl.int32)
    for start in range(0, P, COUNTED):
        b_rows += tl.histogram(tl.load(expert_p + start + o_l, mask=start + o_l < P, other=E), SIDE)
    b_rows = tl.where(o_e < E, b_rows, 0)
    b_tiles = (b_rows + T - 1) // T
    b_first, b_tile = tl.cumsum(b_rows) - b_rows, tl.cumsum(b_tiles) - b_tiles
    tl.store(total_p, tl.sum(b_tiles))
    for at in range(0, tl.max(b_rows), T):
        p_tile, has_more = tile_p + 3 * (b_tile + at // T), at < b_rows
        tl.store(p_tile, o_e, mask=has_more)
        tl.store(p_tile + 1, b_first + at, mask=has_more)
        tl.store(p_tile + 2, tl.minimum(b_rows - at, T), mask=has_more)


@triton.jit(do_not_specialize=["P", "SCALE_M", "SCALE_G"])
def _sort_rows_kernel(
    x_p, x_scale_p, expert_p, pair_p, data_p, scale_p, tile_p, total_p, P, E, SCALE_M, SCALE_G,
    K: tl.constexpr, GROUPS: tl.constexpr, TOP: tl.constexpr, T: tl.constexpr, AT_ONCE: tl.constexpr,
    CHUNK: tl.constexpr, COUNTED: tl.constexpr, SIDE: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_G: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program 0 lists the tiles. The others copy the rows of AT_ONCE pairs each to their sorted places.

    The place of a pair is the number of pairs that come before it, by expert and then by row.
    """
    i_copy = tl.program_id(0) - 1
    wait_for_previous(PDL)
    start_next(PDL)
    if i_copy < 0:
        _list_tiles(expert_p, tile_p, total_p, P, E, T, COUNTED, SIDE)
    else:
        o_p, o_x, o_g = i_copy * AT_ONCE + tl.arange(0, AT_ONCE), tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_G)
        o_c, exists = tl.arange(0, CHUNK), o_p < P
        b_row = o_p // TOP
        m_x = exists[:, None] & (o_x < K)[None, :]
        m_g = exists[:, None] & (o_g < GROUPS)[None, :]
        b_own = tl.load(expert_p + o_p, mask=exists, other=0) * P + o_p
        b_x = tl.load(x_p + b_row[:, None].to(tl.int64) * K + o_x[None, :], mask=m_x, other=0)
        b_scale = tl.load(x_scale_p + b_row[:, None] * SCALE_M + o_g[None, :] * SCALE_G, mask=m_g, other=0.0)
        b_before = tl.zeros([AT_ONCE, CHUNK], dtype=tl.int32)
        for start in range(0, P, CHUNK):
            b_each = tl.load(expert_p + start + o_c, mask=start + o_c < P, other=E) * P + start + o_c
            b_before -= (b_each[None, :] - b_own[:, None]) >> 31  # -1 if it comes before
        b_place = tl.sum(b_before, axis=1)
        tl.store(pair_p + b_place, o_p, mask=exists)
        tl.store(data_p + b_place[:, None].to(tl.int64) * K + o_x[None, :], b_x, mask=m_x)
        tl.store(scale_p + b_place[:, None] * GROUPS + o_g[None, :], b_scale, mask=m_g)


def sort_rows(data: Tensor, scale: Tensor, experts: Tensor, count: int, tile: int) -> SortedRows:
    """Sorts rows quantized by groups of 128 columns, fp8 [M, K], by their experts, int32 [M, top].

    Args:
        count: of all experts.
        tile: largest number of rows in a tile.
    """
    (rows, top), (k, groups) = experts.shape, (data.shape[1], scale.shape[1])
    most = min(rows * top, count + rows * top // tile)
    found = SortedRows(
        data.new_empty(rows * top, k), scale.new_empty(rows * top, groups), experts.new_empty(rows * top),
        experts.new_empty(most, 3), experts.new_empty(1),
    )  # fmt: skip
    bytes_of, bytes_to = data.view(torch.uint8), found.data.view(torch.uint8)
    _sort_rows_kernel[(1 + -(-rows * top // AT_ONCE),)](
        bytes_of, scale, experts, found.pairs, bytes_to, found.scale, found.tiles, found.total,
        rows * top, count, *scale.stride(),
        K=k, GROUPS=groups, TOP=top, T=tile, AT_ONCE=AT_ONCE, CHUNK=CHUNK, COUNTED=COUNTED,
        SIDE=next_power_of_two(count + 1), BLOCK_K=next_power_of_two(k), BLOCK_G=next_power_of_two(groups), **pdl(data),
    )  # fmt: skip
    return found
