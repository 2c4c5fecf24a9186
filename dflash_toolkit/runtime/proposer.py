"""The drafter at work: the drafts of a step, and the context that the next ones are made from."""

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.mix import LogitScale
from ..kernels.ops import Ops
from ..kernels.reference import draw
from ..kernels.weight import Weight
from .stack import Rows, Stack
from .weights import DrafterWeights, SelectorWeights


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens for the target to verify behind the last committed one."""

    tokens: Tensor  # int64 [B, N]
    parents: Tensor | None = None  # int64 [B, N], of a tree; None: each token follows the one before it
    candidates: Tensor | None = None  # int64 [B, N, C], the tokens that q is of
    q: Tensor | None = None  # fp32 [B, N, C], what each was sampled from; None: they are the most probable ones


class Head(Protocol):
    """Which tokens a drafter makes of its blocks."""

    def draft(self, hidden: Tensor, last: Tensor, block: int) -> Draft:
        """`block` - 1 tokens behind `last` [B] of normed hidden states [B * block, D]; slot 0 predicts nothing."""
        ...

    def sample(self, hidden: Tensor, last: Tensor, temperature: Tensor, uniform: Tensor) -> Draft:
        """The same sampled at temperatures fp32 [B], of which 0 drafts the best, by numbers fp64 [B, block - 1]."""
        ...

    def children(
        self, hidden: Tensor, last: Tensor, block: int, calibration: Tensor, width: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What trees are grown of: values and ranks as of `Ops.draft_children`, and candidates [B, block - 1, C]."""
        ...


@dataclass(frozen=True, slots=True)
class ArgmaxHead:
    """Every slot's most probable token, or one of the `count` most probable ones."""

    weight: Weight  # [V, D]
    count: int  # C
    scale: LogitScale
    ops: Ops

    def draft(self, hidden: Tensor, last: Tensor, block: int) -> Draft:
        return Draft(self.ops.linear_argmax(hidden, self.weight).view(-1, block)[:, 1:])

    def sample(self, hidden: Tensor, last: Tensor, temperature: Tensor, uniform: Tensor) -> Draft:
        slots = uniform.shape[1]
        unary, candidates = self.ops.linear_top(hidden, self.weight, self.count)  # [B * block, C]
        self.scale.apply_(unary)
        unary, candidates = (part.view(len(last), slots + 1, -1)[:, 1:] for part in (unary, candidates))
        each = temperature.repeat_interleave(slots, output_size=uniform.numel())
        places, q = draw(unary.flatten(0, 1), each, uniform.flatten())
        tokens = candidates.gather(2, places.view(*uniform.shape, 1))[..., 0]
        return Draft(tokens, candidates=candidates, q=q.view_as(candidates))

    def children(
        self, hidden: Tensor, last: Tensor, block: int, calibration: Tensor, width: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        found = self.ops.linear_top_lse(hidden, self.weight, self.count, self.scale)
        unary, candidates, lse = (part.unflatten(0, (-1, block))[:, 1:] for part in found)
        return *self.ops.draft_children(unary, lse, candidates, calibration, width), candidates


@dataclass(frozen=True, slots=True)
class SelectorHead:
    """Of every slot's best tokens the one that goes best with the one chosen before it (DFlash 2)."""

    weight: Weight  # [V, D]
    pairs: SelectorWeights
    count: int  # C, tokens of a slot that are scored
    scale: LogitScale
    ops: Ops

    def draft(self, hidden: Tensor, last: Tensor, block: int) -> Draft:
        state, unary, candidates = self._slots(hidden, block)
        return Draft(self.ops.walk(state, unary, candidates, self.pairs.predecessors, self.pairs.successors, last))

    def sample(self, hidden: Tensor, last: Tensor, temperature: Tensor, uniform: Tensor) -> Draft:
        state, unary, candidates = self._slots(hidden, uniform.shape[1] + 1)
        pairs = self.pairs.predecessors, self.pairs.successors
        tokens, q = self.ops.sampled_walk(state, unary, candidates, *pairs, last, temperature, uniform)
        return Draft(tokens, candidates=candidates, q=q)

    def children(
        self, hidden: Tensor, last: Tensor, block: int, calibration: Tensor, width: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        state, unary, candidates = self._slots(hidden, block)
        pairs = state, self.pairs.predecessors, self.pairs.successors, last
        return *self.ops.draft_children(unary, unary[..., 0], candidates, calibration, width, pairs), candidates

    def _slots(self, hidden: Tensor, block: int) -> tuple[Tensor, Tensor, Tensor]:
        """States [B, block - 1, r], and logits and tokens [B, block - 1, C] of the best."""
        state = self.ops.linear(hidden, self.pairs.projection)
        unary, candidates = self.ops.linear_top(hidden, self.weight, self.count)
        self.scale.apply_(unary)  # keeps their order
        state, unary, candidates = (part.unflatten(0, (-1, block))[:, 1:] for part in (state, unary, candidates))
        return state, unary, candidates


def head_of(weights: DrafterWeights, target_head: Tensor, ops: Ops) -> Head:
    """How a drafter chooses; without a head of its own it takes the target's [V, D]."""
    config, weight = weights.config, target_head if weights.head is None else weights.head
    scale = LogitScale(config.output_multiplier, config.final_logit_softcapping)
    if weights.selector is None:
        return ArgmaxHead(weight, config.draft_candidates, scale, ops)
    return SelectorHead(weight, weights.selector, config.draft_candidates, scale, ops)


class Proposer:
    """Drafts a block in one non-causal pass over the context and the block.

    Args:
        embedding: [V, D], the target's.
    """

    def __init__(self, weights: DrafterWeights, stack: Stack, embedding: Tensor, head: Head) -> None:
        self.weights, self.stack, self._embedding, self._head = weights, stack, embedding, head

    def propose(self, last: Tensor, rows: Rows, block: int) -> Draft:
        """`block` - 1 tokens behind `last` [B], the most probable ones."""
        return self._head.draft(self._forward(last, rows, block), last, block)

    def sample(self, last: Tensor, rows: Rows, temperature: Tensor, uniform: Tensor) -> Draft:
        """N tokens behind `last` [B], sampled at temperatures fp32 [B] by random numbers fp64 [B, N]."""
        hidden = self._forward(last, rows, uniform.shape[1] + 1)
        return self._head.sample(hidden, last, temperature, uniform)

    def children(
        self, last: Tensor, rows: Rows, block: int, calibration: Tensor, width: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What trees behind `last` [B] are grown of, see `Head.children`.

        Args:
            calibration: fp64 [block], see `Ops.draft_children`.
            width: children of a node at most; 1 makes chains.
        """
        return self._head.children(self._forward(last, rows, block), last, block, calibration, width)

    def _forward(self, last: Tensor, rows: Rows, block: int) -> Tensor:
        """Normed hidden states [B * block, D]."""
        masks = last.new_full((len(last), block - 1), self.weights.config.mask_token_id)
        ids = torch.cat([last[:, None], masks], dim=1)
        embedded, scale = F.embedding(ids.flatten(), self._embedding), self.weights.config.input_embedding_scale
        return self.stack.forward(embedded if scale == 1.0 else embedded * scale, rows)

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
