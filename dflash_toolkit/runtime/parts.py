"""A step in parts, for a batch whose requests choose in different ways: what one part leaves for the next.

A request pays for its own way to choose, and its bits do not depend on how the others do: the target's states of all
rows are computed first, then each mode chooses for its own rows, then all rows commit. What a grammar allows behind
each drafted token the host finds out while the target reads the drafts. Of a batch that is all greedy nothing of this
runs.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from .capture import to_device
from .proposer import Draft
from .sampler import Mode, logprob_columns
from .stack import Rows


class Part(NamedTuple):
    """What one graph holds: a whole step, greedy or over trees, or a part of one.

    The mode is of the rows that choose, and over trees the largest of any request.
    """

    kind: Literal["step", "propose", "read", "choose", "end", "tree"]
    rows: int
    block: int
    mode: Mode = Mode.GREEDY
    nodes: int = 0  # of trees: rows of all requests together, anchors included


@dataclass(frozen=True, slots=True)
class Block:
    """A block of every row, read by the target."""

    rows: Rows
    draft: Tensor  # int64 [B, S - 1]
    hidden: Tensor  # [B, S, D], normed
    features: Tensor | None  # [B * S, K * D], what the drafter's context is made of


class Between:
    """Buffers at fixed places, which captured parts read and write.

    Args:
        rows, block: the largest batch and block.
        width, features: values of a hidden state, and of what the taps make of a token.
        vocab: tokens that log-probabilities are of.
        candidates: tokens that each draft is sampled from; 0: none is sampled.
    """

    def __init__(
        self,
        rows: int,
        block: int,
        width: int,
        features: int,
        vocab: int,
        dtype: torch.dtype,
        device: torch.device,
        candidates: int = 0,
    ) -> None:
        def new(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self._hidden = new(rows, block, width, dtype=dtype)
        self._features = new(rows * block, features, dtype=dtype) if features else None
        self._lengths = new(rows, dtype=torch.int32)
        self._draft, self._choice = new(rows, block), new(rows, block)
        shape = (rows, block, candidates)
        self._sampled_from = (new(*shape), new(*shape, dtype=torch.float32)) if candidates else None
        columns = logprob_columns(vocab)
        self._logprobs = {mode: new(rows, block, columns, dtype=torch.float64) for mode in Mode if mode.full}
        self._rows = {mode: new(rows) for mode in Mode}  # which choose so, filled up with the first of them
        self._known: dict[Mode, list[int]] = {}
        self._masks: tuple[Tensor, Tensor] | None = None  # of grammars, made when there is one

    def propose(self, draft: Draft) -> None:
        batch, slots = draft.tokens.shape
        self._draft[:batch, :slots].copy_(draft.tokens)
        if self._sampled_from is not None and draft.candidates is not None and draft.q is not None:
            for place, part in zip(self._sampled_from, (draft.candidates, draft.q), strict=True):
                place[:batch, :slots].copy_(part)

    def proposed(self, batch: int, size: int) -> Tensor:
        """int64 [B, S - 1]."""
        return self._draft[:batch, : size - 1].contiguous()

    def put(self, block: Block) -> None:
        batch, size = block.hidden.shape[:2]
        self._hidden[:batch, :size].copy_(block.hidden)
        self._lengths[:batch].copy_(block.rows.lengths)
        if self._features is not None and block.features is not None:
            self._features[: batch * size].copy_(block.features)

    def get(self, page_table: Tensor, page_size: int, size: int) -> tuple[Block, Tensor]:
        """The block of the first rows, whose lengths have not advanced, and the choices int64 [B, S]."""
        batch = len(page_table)
        rows = Rows(self._lengths[:batch], page_table, page_size)
        features = None if self._features is None else self._features[: batch * size]
        draft, choice = self.proposed(batch, size), self._choice[:batch, :size]
        return Block(rows, draft, self._hidden[:batch, :size], features), choice.contiguous()

    def name(self, mode: Mode, rows: list[int], count: int) -> None:
        """These rows choose in that mode; `count` are computed, the first of them again for want of others."""
        padded = rows + rows[:1] * (count - len(rows))
        if self._known.get(mode) != padded:
            self._rows[mode][:count].copy_(to_device(padded, torch.int64, self._hidden.device))
            self._known[mode] = padded

    def masks(self, count: int, size: int, words: int) -> tuple[Tensor, Tensor]:
        """What the next rows of a masked mode may choose, see `mask_logits_`, in buffers for the largest batch."""
        if self._masks is None:
            new = torch.zeros(self._draft.numel(), words + 1, dtype=torch.int32, device=self._draft.device)
            self._masks = new[:, :words].contiguous(), new[:, words].contiguous()
        masks, at = self._masks
        return masks, at[: count * size]

    def of(self, mode: Mode, count: int, size: int) -> tuple[Tensor, Tensor, Draft, Tensor]:
        """Of the rows of a mode: their numbers [F], states [F * S, D], drafts of S - 1 tokens and lengths [F]."""
        rows = self._rows[mode][:count]
        hidden = self._hidden[:, :size].index_select(0, rows)
        draft = Draft(self._draft[:, : size - 1].index_select(0, rows))
        if self._sampled_from is not None and size > 1:
            candidates, q = (part[:, : size - 1].index_select(0, rows) for part in self._sampled_from)
            draft = Draft(draft.tokens, candidates=candidates, q=q)
        return rows, hidden.flatten(0, 1), draft, self._lengths.index_select(0, rows)

    def chosen(self, rows: Tensor, choice: Tensor) -> None:
        """What those rows [F] choose, int64 [F, S]; of a row that stands there twice it is the same."""
        self._choice[:, : choice.shape[1]].index_copy_(0, rows, choice)

    def told(self, mode: Mode, logprobs: Tensor) -> Tensor:
        """Log-probabilities [F, S, ...] at a place of their own: graphs share their memory, and the next one runs
        before they are on their way to the host."""
        return self.kept(mode, *logprobs.shape[:2]).copy_(logprobs)

    def kept(self, mode: Mode, count: int, size: int) -> Tensor:
        """The log-probabilities fp64 [F, S, ...] that were told last."""
        return self._logprobs[mode][:count, :size]
