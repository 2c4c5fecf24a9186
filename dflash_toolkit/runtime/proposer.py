"""Runs the drafter: proposes drafts, and writes the context that later drafts attend to."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.formats import Weight
from ..kernels.loss_terms import LogitScale
from ..kernels.ops import Ops
from ..models.drafting import Draft as Draft
from ..models.drafting import Head, sampled, slots_of
from .graphs import to_device
from .stack import Rows, Stack
from .tap_cache import PAGES, TapCache
from .weights import DrafterWeights


@dataclass(frozen=True, slots=True)
class ArgmaxHead:
    """Chooses every slot's most probable token, or samples one of the `count` most probable tokens."""

    weight: Weight  # [V, D]
    count: int  # C
    scale: LogitScale
    ops: Ops

    def draft(self, hidden: Tensor, last: Tensor, block: int) -> Draft:
        return Draft(self.ops.linear_argmax(hidden, self.weight).view(-1, block)[:, 1:])

    def sample(self, hidden: Tensor, last: Tensor, temperature: Tensor, uniform: Tensor) -> Draft:
        block = uniform.shape[1] + 1
        unary, candidates = self.ops.linear_top(hidden, self.weight, self.count)  # [B * block, C]
        self.scale.apply_(unary)
        return sampled(slots_of(unary, block), slots_of(candidates, block), temperature, uniform)

    def children(
        self, hidden: Tensor, last: Tensor, block: int, calibration: Tensor, width: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        found = self.ops.linear_top_lse(hidden, self.weight, self.count, self.scale)
        unary, candidates, lse = (slots_of(part, block) for part in found)
        return *self.ops.draft_children(unary, lse, candidates, calibration, width), candidates


def head_of(weights: DrafterWeights, target_head: Tensor, ops: Ops) -> Head:
    """Returns how a drafter chooses tokens; without a head of its own it uses the target's [V, D]."""
    config, weight = weights.config, target_head if weights.head is None else weights.head
    scale = LogitScale(config.output_multiplier, config.final_logit_softcapping)
    if weights.between is not None:
        norm = weights.norm, weights.spec.rms_norm_eps
        return weights.between.head(weight, target_head, *norm, config.draft_candidates, scale, ops)
    if weights.selector is None:
        return ArgmaxHead(weight, config.draft_candidates, scale, ops)
    return weights.selector.head(weight, config.draft_candidates, scale, ops)


class Proposer:
    """Drafts a block in one pass over the context and the block.

    Args:
        embedding: [V, D], the target's.
        taps: keeps the features that `write_context` gets; None keeps none.

    Attributes:
        drafting: whether `write_context` computes keys and values; otherwise it only keeps the features.
    """

    def __init__(
        self, weights: DrafterWeights, stack: Stack, embedding: Tensor, head: Head, taps: TapCache | None = None
    ) -> None:
        self.weights, self.stack, self._embedding, self._head = weights, stack, embedding, head
        self.taps, self.drafting = taps, True

    def propose(self, last: Tensor, rows: Rows, block: int) -> Draft:
        """Returns `block` - 1 tokens after `last` [B], the most probable ones."""
        return self._head.draft(self._forward(last, rows, block), last, block)

    def sample(self, last: Tensor, rows: Rows, temperature: Tensor, uniform: Tensor) -> Draft:
        """Returns N tokens after `last` [B], sampled at temperatures fp32 [B] with random numbers fp64 [B, N]."""
        hidden = self._forward(last, rows, uniform.shape[1] + 1)
        return self._head.sample(hidden, last, temperature, uniform)

    def children(
        self, last: Tensor, rows: Rows, block: int, calibration: Tensor, width: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the candidates of trees after `last` [B], see `Head.children`.

        Args:
            calibration: fp64 [block], see `Ops.draft_children`.
            width: the most children of a node; 1 makes chains.
        """
        return self._head.children(self._forward(last, rows, block), last, block, calibration, width)

    def _forward(self, last: Tensor, rows: Rows, block: int) -> Tensor:
        """Returns the result of `Stack.forward`, [B * block, D]."""
        masks = last.new_full((len(last), block - 1), self.weights.config.mask_token_id)
        ids = torch.cat([last[:, None], masks], dim=1)
        embedded, scale = F.embedding(ids.flatten(), self._embedding), self.weights.config.input_embedding_scale
        if self.weights.between is not None:
            rows = replace(rows, last=last)
        return self.stack.forward(embedded if scale == 1.0 else embedded * scale, rows)

    def write_context(self, features: Tensor, rows: Rows, counts: Tensor) -> None:
        """Writes the keys and values of every draft layer for the first `counts[b]` tokens of each row.

        Args:
            features: [B * S, K * D], the target's taps; row b * S + k is position `rows.lengths[b]` + k.
            counts: int32 [B].
        """
        self._keep(features, rows, counts)
        if self.drafting:
            self._write(self._context_of(features), rows, counts)

    def write_kept_context(self, pages: Sequence[int], count: int) -> None:
        """Writes the context of the first `count` tokens in a request's `pages`, from the features that were kept."""
        assert self.taps is not None
        size, device = self.taps.page_size, self._embedding.device
        table = to_device([*pages, *[0] * (-len(pages) % 16)], torch.int32, device)[None]  # see COLUMNS in prefill.py
        for start in range(0, count, PAGES * size):
            some = pages[start // size : -(-count // size)][:PAGES]
            left = min(count - start, len(some) * size)
            place = to_device([start] * 4 + [left] * 4, torch.int32, device)  # each at 16 bytes, for kernels
            rows = Rows(place[:1], table, size)
            self._write(self._context_of(self.taps.of_pages(some)), rows, place[4:5])

    def write_packed_context(self, features: Tensor, rows: Rows, counts: Tensor, sizes: Sequence[int]) -> None:
        """Writes the context of chunks of `sizes` tokens, which are adjacent in `features`; see `write_context`."""
        kv = self._context_of(features).split(list(sizes)) if self.drafting else [None] * len(sizes)
        places = torch.stack([rows.lengths, counts], dim=1).repeat_interleave(4, dim=1)  # each at 16 bytes, for kernels
        for taps, own_kv, place, table in zip(features.split(list(sizes)), kv, places, rows.page_table, strict=True):
            own, count = replace(rows, lengths=place[:1], page_table=table[None]), place[4:5]
            self._keep(taps, own, count)
            if own_kv is not None:
                self._write(own_kv, own, count)

    def _keep(self, features: Tensor, rows: Rows, counts: Tensor) -> None:
        if self.taps is not None:
            self.taps.write(features, rows.lengths, counts, rows.page_table)

    def _context_of(self, features: Tensor) -> Tensor:
        """Returns the keys and values [M, L 2 G H] of every draft layer, before their norm and rotation."""
        weights, ops = self.weights, self.stack.ops
        eps = weights.spec.rms_norm_eps
        nothing = torch.zeros(len(features), weights.spec.hidden_size, dtype=features.dtype, device=features.device)
        _, context = ops.add_rms_norm(nothing, ops.linear_split_k(features, weights.fc), weights.hidden_norm, eps)
        return ops.linear(context, weights.context_kv, weights.context_bias)

    def _write(self, kv: Tensor, rows: Rows, counts: Tensor) -> None:
        weights, stack = self.weights, self.stack
        (rope,) = stack.ropes.values()
        stack.ops.context_write(
            kv, weights.k_norms, weights.spec.rms_norm_eps, rope, rows.lengths, counts, rows.page_table,
            stack.cache, rows.page_size, stack.scales,
        )  # fmt: skip
