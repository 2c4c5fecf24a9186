"""Defines the rotation of queries and keys, and writes keys and values to the paged cache."""

import torch
from torch import Tensor

from ..paged import store_heads
from .attention import slots_of
from .norm import rms_norm


def rotate(x: Tensor, rope: Tensor, positions: Tensor, interleaved: bool = False) -> Tensor:
    """Applies RoPE to the first R of x [M, heads, H]; rope [2, positions, R / 2] has cosines and sines.

    A pair is one number of each half of the R (as in GPT-NeoX), or with `interleaved` two adjacent ones.
    """
    cos, sin = rope[0, positions, None], rope[1, positions, None]  # [M, 1, R / 2]
    half = cos.shape[-1]
    if interleaved:
        (first, second), rest = x[..., : 2 * half].float().unflatten(-1, (-1, 2)).unbind(-1), x[..., 2 * half :]
        turned = torch.stack([first * cos - second * sin, second * cos + first * sin], dim=-1).flatten(-2)
        return torch.cat([turned.to(x.dtype), rest], dim=-1)
    first, second, rest = x.float().split([half, half, x.shape[-1] - 2 * half], dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1).to(x.dtype)


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
    """Adds up qkv, norms and rotates queries and keys, and writes keys and values to the pages of their positions.

    Args:
        partial_sums: qkv, [P, M, (N + 2 * G) * H], heads of q, then k, then v; their sum is rounded to the
            dtype of the cache, or of the scales if the cache is in fp8.
        bias: [(N + 2 * G) * H], added before that; None adds nothing.
        q_weight, k_weight: [H] per-head RMSNorm weights; None if the architecture has none.
        rope: fp32 [2, positions, R / 2], cosines and sines for the first R numbers of a head; [3, ...] with equal
            factors of the queries of each position.
        lengths: int32 [B]; row b * S + k is at position lengths[b] + k.
        page_table: int32 [B, pages of a request].
        cache: [2, slots, G, H], keys and values of one layer, written in place.
        counts: int32 [B]; rows k >= counts[b] are padding and write to the null block, page 0. None: no padding.
        at: int32 [M], the slots of the rows if they are not those of their positions; the page table is not read.
        interleaved: pairs that turn are adjacent numbers, see `rotate`.
        normed_values: each head of v is also normed, without weights.
        gated: each head of q is followed by its gate, [P, M, (2 * N + 2 * G) * H]; see `gate_heads`.
        scales: [2, G, slots] of an fp8 cache, written in place.
        queries_only: partial_sums and bias have no keys and values, and the cache is not written.

    Returns:
        Queries [M, N, H] in that dtype.
    """
    groups, width = cache.shape[2:]
    groups *= not queries_only
    total = partial_sums.float().sum(0)
    qkv = (total if bias is None else total + bias.float()).to(cache.dtype if scales is None else scales.dtype)
    block = len(qkv) // len(lengths)
    positions = lengths[:, None] + torch.arange(block, device=lengths.device)
    q, k, v = qkv.unflatten(1, (-1, width)).split([qkv.shape[1] // width - 2 * groups, groups, groups], dim=1)
    q = q[:, ::2] if gated else q
    q = rms_norm(q, q_weight, eps) if q_weight is not None else q
    q_rotated = rotate(q, rope, positions.flatten(), interleaved)
    if len(rope) == 3:
        q_rotated = (q_rotated * rope[2, positions.flatten(), :1, None]).to(q.dtype)
    if queries_only:
        return q_rotated
    k = rms_norm(k, k_weight, eps) if k_weight is not None else k
    v = rms_norm(v, torch.ones_like(v[0, 0], dtype=torch.float32), eps) if normed_values else v
    if at is None:
        slots = slots_of(positions, page_table, page_size)
        if counts is not None:
            slots = torch.where(positions < (lengths + counts)[:, None], slots, positions % page_size)
        at = slots.flatten()
    slots = at.long()
    for side, heads in enumerate((rotate(k, rope, positions.flatten(), interleaved), v)):
        store_heads(cache[side], None if scales is None else scales[side], slots, heads)
    return q_rotated


def gate_heads(x: Tensor, partial_sums: Tensor, head_dim: int) -> Tensor:
    """Multiplies attention x [M, N * H] with the sigmoid of the gates in the partial sums of `rope_write`."""
    columns = 2 * x.shape[1]
    gates = partial_sums[..., :columns].float().sum(0).to(x.dtype).unflatten(1, (-1, 2, head_dim))[:, :, 1]
    return x * gates.flatten(1).sigmoid()


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
    """Norms, rotates and writes every draft layer's context keys and values of each request's first counts[b] rows.

    Args:
        kv: [M, L * 2 * G * H]: for each layer its keys, then its values.
        k_weights: [L, H].
        lengths, counts: int32 [B]; row b * S + k is position lengths[b] + k and is written if k < counts[b].
        cache: [L, 2, slots, G, H], written in place.
        scales: [L, 2, G, slots] of an fp8 cache, written in place.
    """
    layers, _, _, groups, width = cache.shape
    block = len(kv) // len(lengths)
    steps = torch.arange(block, device=lengths.device)
    positions = lengths[:, None] + steps
    rows = (steps < counts[:, None]).flatten().nonzero()[:, 0]
    slots = slots_of(positions, page_table, page_size).flatten()[rows]
    heads = kv[rows].unflatten(1, (layers, 2, groups, width))
    for layer in range(layers):
        k = rms_norm(heads[:, layer, 0], k_weights[layer], eps)
        for side, head in enumerate((rotate(k, rope, positions.flatten()[rows]), heads[:, layer, 1])):
            store_heads(cache[layer, side], None if scales is None else scales[layer, side], slots, head)
