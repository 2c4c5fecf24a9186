"""Draft trees after the contexts of a paged cache."""

import math
from dataclasses import dataclass, replace

import torch
from kernel_inputs import DEVICE, integers, randn
from kernel_pages import Pages, attend, make_pages
from torch import Tensor

from dflash_toolkit.kernels import gpu
from dflash_toolkit.kernels import reference as definition
from dflash_toolkit.kernels.tree import TreeRows, Trees


def random_trees(batch: int, slots: int, nodes: int, width: int = 3, limits: object = None) -> Trees:
    """Grown from random candidates."""
    candidates = torch.stack([torch.randperm(90)[:8] for _ in range(batch * slots)]).view(batch, slots, 8).to(DEVICE)
    values = randn(batch, slots, 8).log_softmax(-1).sort(dim=-1, descending=True).values[:, :, None, :width]
    ranks = torch.stack([torch.randperm(8)[:width] for _ in range(batch * slots)]).int().view(values.shape).to(DEVICE)
    depth = integers([slots] * batch if limits is None else limits)
    return definition.grow_trees(values.contiguous(), ranks, candidates, depth, nodes)


def rows_of(trees: Trees, pages: Pages, rows: int) -> TreeRows:
    last = torch.arange(len(pages.lengths), device=DEVICE) + 100
    return definition.cut_trees(trees, last, pages.lengths, pages.table, pages.size, rows)


@dataclass
class Forest:
    """Trees after the contexts of `pages`; places without keys and values hold NaN."""

    pages: Pages
    trees: Trees
    rows: TreeRows
    q: Tensor  # [M, N, H]

    def attend(self, window: int = 0) -> Tensor:
        return gpu.tree_attention(self.q, self.pages.kv(window), self.rows, self.trees.paths)

    def attend_chains(self, window: int = 0) -> Tensor:
        """Returns the attention of trees in which no node has a sibling."""
        return gpu.chain_attention(self.q, self.pages.kv(window), self.rows, min(self.trees.paths.shape[1:]))

    def defined(self, dtype: torch.dtype, window: int = 0) -> Tensor:
        kv = self.pages.kv(window, dtype)
        return definition.tree_attention(self.q.to(dtype), kv, self.rows, self.trees.paths)

    def plain(self, row: int, window: int = 0) -> Tensor:
        """Returns the attention of a row's token in a plain step, after its path at consecutive positions."""
        pages, request, depth = self.pages, int(self.rows.requests[row]), int(self.rows.depths[row])
        one = pages.one(request)
        places = self.trees.paths[request, row - int(self.rows.starts[request]), : depth + 1].long()
        slots, moved = one.slots(self.trees.paths.shape[1])[0], one.one(0, depth).clone()
        for kept, found in zip(moved.stored, pages.stored, strict=True):
            kept[:, slots] = math.nan
            kept[:, slots[: depth + 1]] = found[:, slots[places]]
        return attend(self.q[row : row + 1], moved, causal=True, window=window, whole=len(pages.lengths) > 8)[0]


def plant(
    contexts: tuple[int, ...], slots: int, nodes: int, rows: int, size: int, groups: int, group: int, width: int,
    dtype: torch.dtype, children: int = 3, scores: str = "",
) -> Forest:  # fmt: skip
    pages = make_pages(contexts, nodes + 1, size, groups, width, dtype)
    trees = random_trees(len(contexts), slots, nodes, children)
    tree_rows = rows_of(trees, pages, rows)
    written = torch.full_like(pages.cache, math.nan)
    for b, context in enumerate(contexts):
        count = context + int(tree_rows.starts[b + 1] - tree_rows.starts[b])
        kept = replace(pages.one(b), lengths=integers([0])).slots(count)[0]
        written[:, kept] = pages.cache[:, kept]
    pages = replace(pages, cache=written).scored(scores, groups * group)
    return Forest(pages, trees, tree_rows, randn(rows, groups * group, width, dtype=dtype))


def without_others(forest: Forest, request: int) -> Forest:
    """Returns the forest with NaN in the slots of all other requests."""
    q, cache = (torch.full_like(each, math.nan) for each in (forest.q, forest.pages.cache))
    mine = forest.rows.requests == request
    slots = forest.pages.one(request).table[0, :, None] * forest.pages.size
    slots = (slots + torch.arange(forest.pages.size, device=DEVICE)).flatten()
    q[mine], cache[:, slots] = forest.q[mine], forest.pages.cache[:, slots]
    return replace(forest, q=q, pages=replace(forest.pages, cache=cache))
