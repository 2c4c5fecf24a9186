"""The tree of the likeliest paths, and the visibility of its nodes."""

import heapq

import pytest
import torch
from torch import Tensor

from dflash_toolkit.draft_tree import best_first


def one_by_one(candidates: Tensor, log_probs: Tensor, nodes: int, width: int) -> list[tuple[int, int, int]]:
    """(token, parent's row, depth) of the same tree, grown node by node from a heap."""
    found: list[tuple[int, int, int]] = []

    def push(parent: int, depth: int, rank: int, path: Tensor) -> None:
        if depth < len(candidates):
            values, ranks = log_probs[depth, rank].sort(descending=True, stable=True)
            for order in range(min(width, len(ranks))):
                total = path + values[order]
                heapq.heappush(heap, (-float(total), depth + 1, parent, order, int(ranks[order]), total))

    heap: list[tuple[float, int, int, int, int, Tensor]] = []
    push(0, 0, 0, torch.tensor(0.0))
    while heap and len(found) < nodes:
        _, depth, parent, _, rank, total = heapq.heappop(heap)
        found.append((int(candidates[depth - 1, rank]), parent, depth))
        push(len(found), depth, rank, total)
    return found


def lattice(slots: int, count: int, ties: bool) -> tuple[Tensor, Tensor]:
    candidates = torch.stack([torch.randperm(50)[:count] for _ in range(slots)])
    values = torch.randn(slots, count, count)
    return candidates, (-values.abs() * 2).round() / 4 if ties else (2 * values).log_softmax(-1)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(("nodes", "width"), [(1, 3), (5, 1), (12, 2), (30, 4), (1000, 3)])
def test_a_tree_is_that_of_growing_the_likeliest_node_first(nodes: int, width: int, ties: bool) -> None:
    for slots in (1, 2, 4, 5):
        candidates, log_probs = lattice(slots, 4, ties)
        tree = best_first(candidates, log_probs, nodes, width)
        found = list(zip(tree.tokens.tolist(), tree.parents.tolist(), tree.depths.tolist(), strict=True))
        assert found == one_by_one(candidates, log_probs, nodes, width)
        assert len(found) == min(nodes, sum(width**depth for depth in range(1, slots + 1)))
        assert (tree.log_probs.diff() <= 0).all()


def test_the_first_nodes_of_a_tree_are_the_smaller_tree() -> None:
    candidates, log_probs = lattice(4, 4, ties=True)
    large, small = (best_first(candidates, log_probs, nodes) for nodes in (40, 13))
    for name in ("tokens", "parents", "depths", "log_probs"):
        assert torch.equal(getattr(large, name)[:13], getattr(small, name))


def test_a_row_sees_itself_and_its_ancestors() -> None:
    tree = best_first(*lattice(5, 4, ties=False), nodes=30)
    for row in range(31):
        path, at = {row}, row
        while at:
            at = int(tree.parents[at - 1])
            path.add(at)
        assert set(tree.visible[row].nonzero()[:, 0].tolist()) == path
        assert len(path) == 1 + (int(tree.depths[row - 1]) if row else 0)


def test_a_child_is_found_by_its_token_and_siblings_differ() -> None:
    tree = best_first(*lattice(4, 3, ties=False), nodes=30)
    for row, (token, parent) in enumerate(zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True), 1):
        assert tree.child(parent, token) == row
        assert tree.child(parent, 50) is None
