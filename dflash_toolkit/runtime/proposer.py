"""The drafter at work: the drafts of a step, and the context that the next ones are made from."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .stack import Rows, Stack
from .weights import DrafterWeights


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens for the target to verify behind the last committed one."""

    tokens: Tensor  # int64 [B, N]
    parents: Tensor | None = None  # int64 [B, N], of a tree; None: each token follows the one before it
    q: Tensor | None = None  # [B, N, V], what they were sampled from; None: they are the most probable ones


class Proposer:
    """Drafts a block in one non-causal pass over the context and the block.

    Args:
        embedding, head: [V, D], the target's; a drafter with a head of its own takes that.
    """

    def __init__(self, weights: DrafterWeights, stack: Stack, embedding: Tensor, head: Tensor) -> None:
        self.weights, self.stack, self._embedding = weights, stack, embedding
        self._head = head if weights.head is None else weights.head

    def propose(self, last: Tensor, rows: Rows, block: int) -> Draft:
        """`block` - 1 tokens behind `last` [B]."""
        masks = last.new_full((len(last), block - 1), self.weights.config.mask_token_id)
        ids = torch.cat([last[:, None], masks], dim=1)
        embedded, scale = F.embedding(ids.flatten(), self._embedding), self.weights.config.input_embedding_scale
        hidden = self.stack.forward(embedded if scale == 1.0 else embedded * scale, rows)
        tokens = self.stack.ops.linear_argmax(hidden, self._head).view(-1, block)
        return Draft(tokens[:, 1:])  # slot 0 predicts nothing

    def write_context(self, features: Tensor, rows: Rows, counts: Tensor) -> None:
        """Keys and values of every draft layer for the first `counts[b]` of each row's tokens.

        Args:
            features: [B * S, K * D], the target's taps; row b * S + k is position `rows.lengths[b]` + k.
            counts: int32 [B].
        """
        weights, stack, ops = self.weights, self.stack, self.stack.ops
        eps = weights.spec.rms_norm_eps
        nothing = torch.zeros(len(features), weights.spec.hidden_size, dtype=features.dtype, device=features.device)
        _, context = ops.add_rms_norm(nothing, ops.linear_split_k(features, weights.fc), weights.hidden_norm, eps)
        kv = ops.linear(context, weights.context_kv, weights.context_bias)
        ops.context_write(
            kv, weights.k_norms, eps, stack.rope, rows.lengths, counts, rows.page_table, stack.cache, rows.page_size
        )
