"""Defines attention over the paged cache: of blocks, of draft trees and of chains."""

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor

from ..paged import PagedKV
from ..tree import TreeRows


def slots_of(positions: Tensor, page_table: Tensor, page_size: int) -> Tensor:
    """Cache slots [B, S] of positions [B, S]: `page_table[b, position // page_size]` is the page that holds it."""
    return page_table.gather(1, (positions // page_size).long()).long() * page_size + positions % page_size


def _attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, kv: PagedKV) -> Tensor:
    """Returns the attention of queries [..., N, S, H] over keys and values [..., G, T, H], with a mask [..., S, T]."""
    if not kv.soft_cap and kv.sinks is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=True, scale=kv.score_factor)
    k, v = (part.repeat_interleave(q.shape[-3] // k.shape[-3], dim=-3) for part in (k, v))
    scores = (q @ k.transpose(-1, -2)).to(torch.promote_types(q.dtype, torch.float32)) * kv.score_factor
    if kv.soft_cap:
        scores = kv.soft_cap * (scores / kv.soft_cap).tanh()
    scores = scores.masked_fill(~visible, -torch.inf)
    if kv.sinks is not None:
        sinks = kv.sinks.to(scores.dtype)[:, None, None].expand_as(scores[..., :1])
        scores = torch.cat([scores, sinks], dim=-1)
    return scores.softmax(-1)[..., : k.shape[-2]].to(v.dtype) @ v


def block_attention(q: Tensor, kv: PagedKV, *, causal: bool, counts: Tensor | None = None) -> Tensor:
    """Attention of a block over its request's pages, the block's own keys included.

    Args:
        q: [M, N, H]; row b * S + k is slot k of request b, at position lengths[b] + k.
        causal: slot k sees the positions up to its own (verify); else the whole block (draft).
        counts: int32 [B]; rows k >= counts[b] are padding; no row sees their keys. None: there are none.

    Returns:
        [M, N * H] in q's dtype.
    """
    lengths, block = kv.lengths, len(q) // len(kv.lengths)
    reach = int(lengths.max()) + block
    keys = torch.arange(reach, device=q.device).expand(len(lengths), -1)  # [B, T]
    end = lengths + (block if counts is None else counts)
    inside = keys < end[:, None]  # pages are written up to here; after that they may hold anything, even NaN
    slots = slots_of(torch.where(inside, keys, 0), kv.table, kv.size)
    k, v = kv.read(slots).masked_fill(~inside[..., None, None], 0.0).transpose(2, 3)  # [B, G, T, H]
    positions = (lengths[:, None] + torch.arange(block, device=q.device)).minimum(end[:, None] - 1)
    distance = positions[:, :, None] - keys[:, None]  # [B, S, T]; padding sees what the last token sees
    visible = inside[:, None] & (distance >= 0) if causal else inside[:, None].expand_as(distance)
    if kv.window:
        visible = visible & kv.in_window(distance, positions[..., None])
    out = _attend(q.unflatten(0, (-1, block)).transpose(1, 2), k, v, visible[:, None], kv)
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
    for b, (start, end) in enumerate(itertools.pairwise(rows.starts.tolist())):
        length, places, depths = int(kv.lengths[b]), end - start, rows.depths[start:end, None]
        keys = torch.arange(length + places, device=q.device)  # the context, then the places of the tree
        k, v = kv.read(slots_of(keys[None], kv.table[b : b + 1], kv.size)[0]).transpose(1, 2)  # [G, T, H]
        above = paths[b, :places].where(torch.arange(paths.shape[2], device=q.device) <= depths, 0).long()
        visible = torch.ones(places, length + places, dtype=torch.bool, device=q.device)
        visible[:, length:] = torch.zeros_like(visible[:, length:]).scatter_(1, above, True)
        if kv.window:
            positions = torch.cat([keys[:length], length + depths[:, 0]])
            visible &= kv.in_window(length + depths - positions, length + depths)
        attended = _attend(q[start:end].transpose(0, 1), k, v, visible, kv)
        out[start:end] = attended.transpose(0, 1).flatten(1)
    return out


def chain_attention(q: Tensor, kv: PagedKV, rows: TreeRows, longest: int) -> Tensor:
    """`tree_attention` of trees in which no node has a sibling: a request's rows are a block of their own number.

    Args:
        longest: rows that a request has at most.
    """
    paths = torch.arange(longest, device=q.device).expand(len(kv.lengths), longest, longest)
    return tree_attention(q, kv, rows, paths)
