"""The drafter at work: the drafts of a step, and the context that the next ones are made from."""

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.mix import LogitScale
from ..kernels.ops import Ops
from ..kernels.weight import Weight
from .stack import Rows, Stack
from .weights import DrafterWeights, SelectorWeights


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens for the target to verify behind the last committed one."""

    tokens: Tensor  # int64 [B, N]
    parents: Tensor | None = None  # int64 [B, N], of a tree; None: each token follows the one before it
    q: Tensor | None = None  # [B, N, V], what they were sampled from; None: they are the most probable ones


class Head(Protocol):
    """Which tokens a drafter makes of its blocks."""

    def draft(self, hidden: Tensor, last: Tensor, block: int) -> Draft:
        """`block` - 1 tokens behind `last` [B] of normed hidden states [B * block, D]; slot 0 predicts nothing."""
        ...


@dataclass(frozen=True, slots=True)
class ArgmaxHead:
    """Every slot's most probable token."""

    weight: Weight  # [V, D]
    ops: Ops

    def draft(self, hidden: Tensor, last: Tensor, block: int) -> Draft:
        return Draft(self.ops.linear_argmax(hidden, self.weight).view(-1, block)[:, 1:])


@dataclass(frozen=True, slots=True)
class SelectorHead:
    """Of every slot's best tokens the one that goes best with the one chosen before it (DFlash 2)."""

    weight: Weight  # [V, D]
    pairs: SelectorWeights
    count: int  # C, tokens of a slot that are scored
    scale: LogitScale
    ops: Ops

    def draft(self, hidden: Tensor, last: Tensor, block: int) -> Draft:
        state = self.ops.linear(hidden, self.pairs.projection)  # [B * block, r]
        unary, candidates = self.ops.linear_top(hidden, self.weight, self.count)  # [B * block, C]
        self.scale.apply_(unary)  # keeps their order
        state, unary, candidates = (part.view(len(last), block, -1)[:, 1:] for part in (state, unary, candidates))
        return Draft(self.ops.walk(state, unary, candidates, self.pairs.predecessors, self.pairs.successors, last))


def head_of(weights: DrafterWeights, target_head: Tensor, ops: Ops) -> Head:
    """How a drafter chooses; without a head of its own it takes the target's [V, D]."""
    config, weight = weights.config, target_head if weights.head is None else weights.head
    if weights.selector is None:
        return ArgmaxHead(weight, ops)
    scale = LogitScale(config.output_multiplier, config.final_logit_softcapping)
    return SelectorHead(weight, weights.selector, config.selector_top_k, scale, ops)


class Proposer:
    """Drafts a block in one non-causal pass over the context and the block.

    Args:
        embedding: [V, D], the target's.
    """

    def __init__(self, weights: DrafterWeights, stack: Stack, embedding: Tensor, head: Head) -> None:
        self.weights, self.stack, self._embedding, self._head = weights, stack, embedding, head

    def propose(self, last: Tensor, rows: Rows, block: int) -> Draft:
        """`block` - 1 tokens behind `last` [B]."""
        masks = last.new_full((len(last), block - 1), self.weights.config.mask_token_id)
        ids = torch.cat([last[:, None], masks], dim=1)
        embedded, scale = F.embedding(ids.flatten(), self._embedding), self.weights.config.input_embedding_scale
        hidden = self.stack.forward(embedded if scale == 1.0 else embedded * scale, rows)
        return self._head.draft(hidden, last, block)

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
