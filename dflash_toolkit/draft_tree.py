"""Draft trees: several continuations of one anchor, verified in one pass of the target."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .generation import Offered

WIDTH = 8  # maximum children of a node; further ones are hardly ever accepted


@dataclass(frozen=True, slots=True)
class DraftTree:
    """The N nodes after an anchor, most probable path first, so that the first n nodes are the tree of n nodes.

    Rows: 0 is the anchor and row i + 1 node i. A parent comes before its children.
    """

    tokens: Tensor  # int64 [N]
    parents: Tensor  # int64 [N], rows
    depths: Tensor  # int64 [N], >= 1: positions from the anchor to the node
    log_probs: Tensor  # fp32 [N], of the path from the anchor

    @property
    def visible(self) -> Tensor:
        """Returns which rows a row sees: itself and its ancestors, bool [N + 1, N + 1]."""
        visible = torch.eye(len(self.tokens) + 1, dtype=torch.bool, device=self.tokens.device)
        for row, parent in enumerate(self.parents.tolist(), 1):
            visible[row] |= visible[parent]
        return visible

    def offered(self, path: Sequence[int]) -> Offered:
        """Returns the tree's candidates along a path, see `offered_along`."""
        columns = [0, *self.tokens.tolist()], [0, *self.parents.tolist()], [0.0, *self.log_probs.tolist()]
        return offered_along(path, *columns)

    def child(self, row: int, token: int) -> int | None:
        """Returns the row of the child of `row` that is `token`; siblings are different tokens."""
        found = ((self.parents == row) & (self.tokens == token)).nonzero()
        return int(found[0, 0]) + 1 if len(found) else None


def offered_along(
    path: Sequence[int], tokens: Sequence[int], parents: Sequence[int], log_probs: Sequence[float]
) -> Offered:
    """Returns for each row of a path its children, in order, with their probability after it, to four digits; empty for
    an anchor alone.

    Args:
        path: rows from the anchor, row 0, on.
        tokens, parents, log_probs: of all rows, including the anchor; log-probabilities are of paths.
    """
    if len(tokens) == 1:
        return ()
    found: dict[int, list[tuple[int, float]]] = {row: [] for row in path}
    for row in range(1, len(tokens)):
        if (parent := parents[row]) in found:
            found[parent].append((tokens[row], round(math.exp(log_probs[row] - log_probs[parent]), 4)))
    return tuple(map(tuple, found.values()))


def best_first(candidates: Tensor, log_probs: Tensor, nodes: int, width: int = WIDTH) -> DraftTree:
    """Returns the tree of the `nodes` most probable paths, or of all if there are fewer.

    The children of a node are the `width` most probable candidates of the next slot after it; ties go to the first
    candidate. Ties between paths go to the shorter path, then to the one with the earlier parent, then to the more
    probable child. A tree of width one is a chain.

    Args:
        candidates: token ids of each slot, int64 [K, C].
        log_probs: fp32 [K, C, C], <= 0: [k, b, c] is candidate c of slot k after candidate b of slot k - 1. Slot 0
            follows the anchor, by its row 0.
    """
    device = candidates.device
    # level by level: all ancestors of a node are at least as probable, so no level needs more than `nodes` of them
    rank, above, start = torch.zeros(1, dtype=torch.int64, device=device), log_probs.new_zeros(1), -1
    levels: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
    for slot, (tokens, following) in enumerate(zip(candidates, log_probs, strict=True)):
        values, ranks = (part[:, :width] for part in following[rank].sort(dim=-1, descending=True, stable=True))
        paths = (above[:, None] + values).flatten()
        best = paths.sort(descending=True, stable=True).indices[:nodes]
        parents = best // values.shape[1] + start  # places in the concatenated levels; -1 is the anchor
        start += len(rank)
        rank, above = ranks.flatten()[best], paths[best]
        levels.append((tokens[rank], parents, torch.full_like(best, slot + 1), above))
    tokens, parents, depths, paths = map(torch.cat, zip(*levels, strict=True))
    order = paths.sort(descending=True, stable=True).indices[:nodes]
    rows = torch.zeros(len(paths) + 1, dtype=torch.int64, device=device)  # by place; the last is the anchor's, -1
    rows[order] = torch.arange(1, len(order) + 1, device=device)
    return DraftTree(tokens[order], rows[parents[order]], depths[order], paths[order])
