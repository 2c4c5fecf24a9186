"""Log-probabilities of a prompt's tokens, from the states of its prefill; for few rows at a time."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..generation import PromptLogprobs
from ..kernels.formats import Weight
from ..kernels.loss_terms import LogitScale
from ..kernels.ops import Ops
from ..kernels.reference import scored_tokens

ROWS = 128  # rows with logits in memory at a time; the head's sums of a row do not depend on the others
SCORED_ROWS = 16  # rows that are scored at a time, which takes 8 bytes for a logit


def score(hidden: Tensor, head: Weight, tokens: Tensor, best: int, ops: Ops, scale: LogitScale) -> Tensor:
    """Scores the tokens int64 [M] after normed states [M, D], see `scored_tokens`."""
    found = []
    for states, following in zip(hidden.split(ROWS), tokens.split(ROWS), strict=True):
        logits = ops.linear(states, head)
        scale.apply_(logits)
        rows = zip(logits.split(SCORED_ROWS), following.split(SCORED_ROWS), strict=True)
        found += [scored_tokens(each, tokens, best) for each, tokens in rows]
    return torch.cat(found)


def packed(scored: Sequence[Tensor]) -> PromptLogprobs:
    """Packs the scores of all chunks of a prompt, which are on the host."""
    best = scored[0].shape[1] // 2 - 1 if scored else 0
    return PromptLogprobs(best, b"".join(rows.numpy().tobytes() for rows in scored))
