"""Defines attention over the paged cache: of blocks, of draft trees and of chains."""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from .paged import PagedKV
from .tree import TreeRows


def slots_of(positions: Tensor, page_table: Tensor, page_size: int) -> Tensor:
    """Cache slots [B, S] of positions [B, S]: `page_table[b, position // page_size]` is the page that holds it."""
    return page_table.gather(1, (positions // page_size).long()).long() * page_size + positions % page_size


def block_attention(q: Tensor, kv: PagedKV, *, causal: bool, counts: Tensor | None = None) -> Tensor:
    """Attention of a block over its request's pages, the block's own keys included.

    Args:
        q: [M, N, H]; row b * S + k is slot k of request b, at position lengths[b] + k.
        causal: slot k sees the positions up to its own (verify); else the whole block (draft).
        counts: int32 [B]; rows k >= counts[b] are padding; no row sees their keys. None: there are none.

    Returns:
        [M, N * H] in q's dtype.
    """
    cache, lengths, block = kv.cache, kv.lengths, len(q) // len(kv.lengths)
    reach = int(lengths.max()) + block
    keys = torch.arange(reach, device=q.device).expand(len(lengths), -1)  # [B, T]
    end = lengths + (block if counts is None else counts)
    inside = keys < end[:, None]  # pages are written up to here; after that they may hold anything, even NaN
    slots = slots_of(torch.where(inside, keys, 0), kv.table, kv.size)
    k, v = (cache[i][slots].masked_fill(~inside[..., None, None], 0.0).transpose(1, 2) for i in (0, 1))  # [B, G, T, H]
    distance = (lengths[:, None] + torch.arange(block, device=q.device))[:, :, None] - keys[:, None]  # [B, S, T]
    visible = inside[:, None] & (distance >= 0) if causal else inside[:, None].expand_as(distance)
    if kv.window:
        visible = visible & (distance.abs() < kv.window)
    out = F.scaled_dot_product_attention(
        q.unflatten(0, (-1, block)).transpose(1, 2), k, v, attn_mask=visible[:, None], enable_gqa=True
    )
    return out.transpose(1, 2).flatten(2).flatten(0, 1)


def tree_attention(q: Tensor, kv: PagedKV, rows: TreeRows, paths: Tensor) -> Tensor:
    """Attention of the rows of trees: each sees its request's context, the nodes on the path to it, and itself.

    A row's result is that of `block_attention` for the same token after the same tokens.

    Args:
        q: [M, N, H].
        paths: int32 [B, N + 1, K + 1], see `Trees`.

    Returns:
        [M, N * H] in q's dtype; padding is zero.
    """
    out = q.new_zeros(len(q), q.shape[1] * q.shape[2])
    for row, (b, depth) in enumerate(zip(rows.requests.tolist(), rows.depths.tolist(), strict=True)):
        if b < 0:
            continue
        length, place = int(kv.lengths[b]), row - int(rows.starts[b])
        at = torch.cat([torch.arange(length, device=q.device), length + paths[b, place, : depth + 1]])
        slots = kv.table[b, at // kv.size].long() * kv.size + at % kv.size
        order = torch.arange(len(slots), device=q.device)[None]
        path = replace(kv, cache=kv.cache[:, slots], lengths=kv.lengths[b : b + 1] + depth, table=order, size=1)
        out[row] = block_attention(q[row : row + 1], path, causal=True)
    return out


def chain_attention(q: Tensor, kv: PagedKV, rows: TreeRows, longest: int) -> Tensor:
    """`tree_attention` of trees in which no node has a sibling: a request's rows are a block of their own number.

    Args:
        longest: rows that a request has at most.
    """
    paths = torch.arange(longest, device=q.device).expand(len(kv.lengths), longest, longest)
    return tree_attention(q, kv, rows, paths)
