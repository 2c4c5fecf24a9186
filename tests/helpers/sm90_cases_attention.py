"""Attention on Hopper for Qwen3-8B (heads of 128, groups of 4) and Qwen2.5-0.5B (heads of 64, groups of 7)."""

from collections.abc import Callable

import torch
from torch import Tensor

from dflash_toolkit.kernels.hopper import attention as hopper
from dflash_toolkit.kernels.hopper import tree_attention as hopper_tree
from dflash_toolkit.kernels.paged import PagedKV
from dflash_toolkit.kernels.tree import TreeRows
from dflash_toolkit.kernels.triton.attention import block_attention, chain_attention, masked_attention
from dflash_toolkit.kernels.triton.tree_attention import tree_attention

HEADS = {128: (8, 4), 64: (2, 7)}  # KV heads, and queries of each


def integers(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int32, device="meta")


def operands(head: int, batch: int, rows: int, pages: int, window: int) -> tuple[Tensor, PagedKV]:
    groups, group = HEADS[head]
    cache = torch.empty(2, 64 * 999, groups, head, dtype=torch.bfloat16, device="meta")
    q = torch.empty(rows, groups * group, head, dtype=torch.bfloat16, device="meta")
    return q, PagedKV(cache, integers(batch), integers(batch, pages), 64, window)


def blocks(
    head: int, batch: int, *, slots: int = 16, causal: bool = False, window: int = 0, padded: bool = False
) -> Callable[[], object]:
    q, kv = operands(head, batch, slots * batch, 33, window)
    counts = integers(batch) if padded else None
    return lambda: block_attention(q, kv, causal=causal, counts=counts, hopper=hopper.launch)


def rows_of(batch: int, m: int) -> TreeRows:
    return TreeRows(integers(batch + 1), *(integers(m) for _ in range(6)), integers(m).float(), integers(m).long())


def chains(head: int, batch: int, window: int = 0) -> Callable[[], object]:
    q, kv = operands(head, batch, 10 * batch, 33, window)
    rows = rows_of(batch, len(q))
    return lambda: chain_attention(q, kv, rows, 16, hopper.launch)


def trees(head: int, batch: int, window: int = 0, pages: int = 33) -> Callable[[], object]:
    q, kv = operands(head, batch, 40 * batch, pages, window)
    rows = rows_of(batch, len(q))
    return lambda: tree_attention(q, kv, rows, integers(batch, 41, 16), hopper_tree.launch)


def masked(head: int, batch: int, window: int = 0) -> Callable[[], object]:
    q, kv = operands(head, batch, 40 * batch, 33, window)
    rows = rows_of(batch, len(q))
    return lambda: masked_attention(q, kv, rows, 64, hopper.launch)


CASES = {  # one request splits keys, eight use pairs of splits, more do not split at all
    f"heads of {head}, {batch} requests, {'causal' if causal else 'free'}": blocks(head, batch, causal=causal)
    for head, batch, causal in (
        (64, 1, False), (64, 8, True), (64, 12, False),
        (128, 1, True), (128, 8, False), (128, 8, True), (128, 12, False),
    )
} | {
    "window": blocks(128, 12, causal=True, window=2048),
    "padded": blocks(128, 12, causal=True, padded=True),
    "a chain": chains(128, 1),
    "chains of 8 requests": chains(128, 8),
    "chains of 12 requests": chains(128, 12),
    "chains, a window, heads of 64": chains(64, 12, 2048),
    "trees in one pass": masked(128, 12),
    "trees in one pass, a window": masked(128, 12, 2048),
    "trees in one pass, heads of 64": masked(64, 12),
    "trees of a request": trees(128, 1),
    "trees of 8 requests": trees(128, 8),
    "trees, a window, heads of 64": trees(64, 8, 2048),
    "trees of 6 requests of a page, heads of 64": trees(64, 6, pages=1),
}  # fmt: skip
