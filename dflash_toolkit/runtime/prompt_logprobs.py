"""Log-probabilities of a prompt's tokens, from the states of its prefill; for few rows at a time."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..generation import PromptLogprobs
from ..kernels.formats import Weight
from ..kernels.ops import Ops
from ..kernels.reference import scored_tokens

ROWS = 128  # rows with logits in memory at a time; the head's sums of a row do not depend on the others


def score(hidden: Tensor, head: Weight, tokens: Tensor, best: int, ops: Ops) -> Tensor:
    """Scores the tokens int64 [M] after normed states [M, D], see `scored_tokens`."""
    pieces = zip(hidden.split(ROWS), tokens.split(ROWS), strict=True)
    return torch.cat([scored_tokens(ops.linear(states, head), following, best) for states, following in pieces])


def packed(scored: Sequence[Tensor]) -> PromptLogprobs:
    """Packs the scores of all chunks of a prompt, which are on the host."""
    best = scored[0].shape[1] // 2 - 1 if scored else 0
    return PromptLogprobs(best, b"".join(rows.numpy().tobytes() for rows in scored))
