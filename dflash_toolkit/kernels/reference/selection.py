"""Defines the walk of a selector along a block: each token depends on the one before."""

import torch
from torch import Tensor

from .sampling import draw


def walk(
    state: Tensor, unary: Tensor, candidates: Tensor, predecessors: Tensor, successors: Tensor, anchors: Tensor
) -> Tensor:
    """Returns tokens int64 [B, K] of K slots, chosen one after the other by their score after the previous token.

    A candidate b after token a scores unary(b) + <P[a] * state, Q[b]>, in fp32; among equal scores the first wins.

    Args:
        state: [B, K, r]; may, like `unary` and `candidates`, have the slots of longer blocks.
        unary: fp32 [B, K, C], the logits of the candidates.
        candidates: int64 [B, K, C], tokens.
        predecessors, successors: [V, r], P and Q.
        anchors: int64 [B], the tokens before the first slot.
    """
    return sampled_walk(
        state,
        unary,
        candidates,
        predecessors,
        successors,
        anchors,
        torch.zeros(len(anchors), device=unary.device),
        torch.zeros(candidates.shape[:2], dtype=torch.float64, device=unary.device),
    )[0]


def sampled_walk(
    state: Tensor,
    unary: Tensor,
    candidates: Tensor,
    predecessors: Tensor,
    successors: Tensor,
    anchors: Tensor,
    temperature: Tensor,
    uniform: Tensor,
) -> tuple[Tensor, Tensor]:
    """Does the same as `walk`, but samples each token from the softmax of its slot's scores, see `draw`.

    Args:
        temperature: fp32 [B]; 0 chooses the best.
        uniform: fp64 [B, K].

    Returns:
        Tokens int64 [B, K], and their distributions, fp32 [B, K, C].
    """
    chosen, mass, last = [], [], anchors
    for k in range(candidates.shape[1]):
        query = predecessors[last].float() * state[:, k].float()  # [B, r]
        scores = unary[:, k] + (successors[candidates[:, k]].float() * query[:, None]).sum(-1)
        place, q = draw(scores, temperature, uniform[:, k])
        last = candidates[:, k].gather(1, place[:, None])[:, 0]
        chosen.append(last)
        mass.append(q)
    return torch.stack(chosen, dim=1), torch.stack(mass, dim=1)


def walk_pairs(scores: Tensor, candidates: Tensor) -> Tensor:
    """Returns tokens int64 [B, K], each the best candidate after the token chosen before it.

    Args:
        scores: from `pair_scores`, fp32 [B, K, C, C].
        candidates: int64 [B, K, C].
    """
    none = torch.zeros(len(scores), device=scores.device)
    return sampled_walk_pairs(scores, candidates, none, torch.zeros_like(candidates[..., 0], dtype=torch.float64))[0]


def sampled_walk_pairs(
    scores: Tensor, candidates: Tensor, temperature: Tensor, uniform: Tensor
) -> tuple[Tensor, Tensor]:
    """Does the same as `walk_pairs`, but samples each token from the softmax of its slot's scores, see `draw`.

    Args:
        temperature: fp32 [B]; 0 chooses the best.
        uniform: fp64 [B, K].

    Returns:
        Tokens int64 [B, K], and their distributions, fp32 [B, K, C].
    """
    place, chosen, mass = torch.zeros_like(candidates[:, 0, 0]), list[Tensor](), list[Tensor]()
    for k in range(candidates.shape[1]):
        own = scores[:, k].gather(2, place[:, None, None].expand(-1, scores.shape[2], 1))[..., 0]
        place, q = draw(own, temperature, uniform[:, k])
        chosen.append(candidates[:, k].gather(1, place[:, None])[:, 0])
        mass.append(q)
    return torch.stack(chosen, dim=1), torch.stack(mass, dim=1)
