"""Logits of a few tokens of every row, with a gradient."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

ROWS = 1024  # rows of states at a time: the head's rows of their candidates are copied


def candidate_logits(hidden: Tensor, head: Tensor, candidates: Tensor) -> Tensor:
    """Returns <hidden[..., :], head[candidates[..., c]]>, fp32 [..., C], of hidden [..., D] and head [V, D].

    The products are of rows in the head's dtype; the gradient reaches the hidden states only.
    """
    rows = hidden.expand(*candidates.shape[:-1], -1).reshape(-1, hidden.shape[-1])
    found = _CandidateLogits.apply(rows, head, candidates.reshape(-1, candidates.shape[-1]))
    return found.view(candidates.shape)


class _CandidateLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, candidates: Tensor) -> Tensor:
        ctx.save_for_backward(head, candidates)
        ctx.dtype = hidden.dtype
        parts = zip(hidden.split(ROWS), candidates.split(ROWS), strict=True)
        found = [F.embedding(own, head) @ rows.to(head.dtype)[:, :, None] for rows, own in parts]
        return torch.cat(found)[:, :, 0].float()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        head, candidates = ctx.saved_tensors
        # the weighted sum of the candidates' rows of the head, without copying the rows
        found = F.embedding_bag(candidates, head, mode="sum", per_sample_weights=gradient.to(head.dtype))
        return found.to(ctx.dtype), None, None
