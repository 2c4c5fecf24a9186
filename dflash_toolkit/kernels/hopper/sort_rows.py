"""Sorts the rows of a mixture of experts by expert, for GEMMs that load tiles of adjacent rows."""

# mypy: disable-error-code="no-untyped-def"
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import next_power_of_two, pdl
from ..triton.pdl import start_next, wait_for_previous

CHUNK = 1024  # pairs of a row and an expert that a program compares at a time


class SortedRows(NamedTuple):
    """Pairs of a row and a rank, sorted by expert, then by row; the tiles of each expert, one after the other."""

    data: Tensor  # fp8 [P, K], P = M * top
    scale: Tensor  # fp32 [P, K / 128]
    pairs: Tensor  # int32 [P]: row * top + rank
    tiles: Tensor  # int32 [most tiles, 3]: expert, first pair, number of pairs
    total: Tensor  # int32 [1]: number of tiles


@triton.jit(do_not_specialize=["M", "SCALE_M", "SCALE_G"])
def _sort_rows_kernel(
    x_p, x_scale_p, expert_p, data_p, scale_p, pair_p, tile_p, count_p, M, E, SCALE_M, SCALE_G,
    K: tl.constexpr, GROUPS: tl.constexpr, TOP: tl.constexpr, T: tl.constexpr, SIDE: tl.constexpr,
    BINS: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_G: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program i copies row i once for every expert, and lists the tiles of expert i."""
    i = tl.program_id(0)
    o_k, o_e, o_c = tl.arange(0, SIDE), tl.arange(0, BINS), tl.arange(0, CHUNK)
    exists = (i < M) & (o_k < TOP)
    wait_for_previous(PDL)
    b_expert = tl.load(expert_p + i * TOP + o_k, mask=exists, other=BINS)
    b_rank = tl.zeros([SIDE], dtype=tl.int32)  # number of earlier rows with this expert
    b_count = tl.zeros([BINS], dtype=tl.int32)
    for start in range(0, M * TOP, CHUNK):
        o_p = start + o_c
        b_each = tl.load(expert_p + o_p, mask=o_p < M * TOP, other=BINS - 1)
        b_same = (b_each[None, :] == b_expert[:, None]) & (o_p < i * TOP)[None, :]
        b_rank += tl.sum(b_same.to(tl.int32), axis=1)
        b_count += tl.histogram(b_each, BINS)
    start_next(PDL)
    b_first = tl.sum(tl.where(o_e[None, :] < b_expert[:, None], b_count[None, :], 0), axis=1)
    b_at = b_first + b_rank
    tl.store(pair_p + b_at, i * TOP + o_k, mask=exists)
    o_x = tl.arange(0, BLOCK_K)
    b_x = tl.load(x_p + i.to(tl.int64) * K + o_x, mask=(o_x < K) & (i < M), other=0)
    p_data = data_p + b_at[:, None].to(tl.int64) * K + o_x[None, :]
    tl.store(p_data, tl.broadcast_to(b_x[None, :], (SIDE, BLOCK_K)), mask=exists[:, None] & (o_x < K)[None, :])
    o_g = tl.arange(0, BLOCK_G)
    b_scale = tl.load(x_scale_p + i * SCALE_M + o_g * SCALE_G, mask=(o_g < GROUPS) & (i < M), other=0.0)
    p_scale = scale_p + b_at[:, None] * GROUPS + o_g[None, :]
    tl.store(
        p_scale, tl.broadcast_to(b_scale[None, :], (SIDE, BLOCK_G)), mask=exists[:, None] & (o_g < GROUPS)[None, :]
    )
    if i < E:
        first = tl.sum(tl.where(o_e < i, b_count, 0), axis=0)
        rows = tl.sum(tl.where(o_e == i, b_count, 0), axis=0)
        tile = tl.sum(tl.where(o_e < i, (b_count + T - 1) // T, 0), axis=0)
        for at in range(0, rows, T):
            p_tile = tile_p + 3 * (tile + at // T)
            tl.store(p_tile, i)
            tl.store(p_tile + 1, first + at)
            tl.store(p_tile + 2, tl.minimum(rows - at, T))
        if i == E - 1:
            tl.store(count_p, tile + (rows + T - 1) // T)


def sort_rows(data: Tensor, scale: Tensor, experts: Tensor, count: int, tile: int) -> SortedRows:
    """Sorts rows quantized by groups of 128 columns, fp8 [M, K], by their experts, int32 [M, top].

    Args:
        count: of all experts.
        tile: largest number of rows in a tile.
    """
    (rows, top), (k, groups) = experts.shape, (data.shape[1], scale.shape[1])
    pairs = rows * top
    found = SortedRows(
        data.new_empty(pairs, k),
        scale.new_empty(pairs, groups),
        experts.new_empty(pairs),
        experts.new_empty(min(pairs, count + pairs // tile), 3),
        experts.new_empty(1),
    )
    bytes_of, bytes_to = data.view(torch.uint8), found.data.view(torch.uint8)
    _sort_rows_kernel[(max(rows, count),)](
        bytes_of, scale, experts, bytes_to, *found[1:], rows, count, *scale.stride(),
        K=k, GROUPS=groups, TOP=top, T=tile, SIDE=next_power_of_two(top), BINS=next_power_of_two(count + 1),
        BLOCK_K=next_power_of_two(k), BLOCK_G=next_power_of_two(groups), CHUNK=CHUNK, **pdl(data),
    )  # fmt: skip
    return found
