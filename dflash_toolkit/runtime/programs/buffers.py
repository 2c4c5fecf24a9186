"""Buffers between the parts of a step, for a batch of requests that choose tokens in different ways.

The target's states of all rows are computed first. Then each mode chooses tokens for its own rows, and finally all rows
commit. A request pays only for its own mode, and its bits do not depend on the modes of other requests. The host
computes which tokens a grammar allows after each drafted token while the target reads the drafts. A batch of greedy
requests does not use these buffers.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..graphs import to_device
from ..proposer import Draft
from ..sampler import Mode, logprob_columns
from ..stack import Rows


@dataclass(frozen=True, slots=True)
class ReadBlock:
    """A block of every row, after the target has read it."""

    rows: Rows
    draft: Tensor  # int64 [B, S - 1]
    hidden: Tensor  # [B, S, D], normed
    features: Tensor | None  # [B * S, K * D], input of the drafter's context


class StepBuffers:
    """Buffers at fixed addresses, which captured parts read and write.

    Args:
        rows, block: the largest batch and block.
        width, features: values of a hidden state, and of a token's features.
        vocab: tokens in the vocabulary.
        candidates: tokens that each draft is sampled from; 0: drafts are not sampled.
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
        self._rows = {mode: new(rows) for mode in Mode}  # rows of each mode, padded with the first of them
        self._rows_on_device: dict[Mode, list[int]] = {}
        self._masks: tuple[Tensor, Tensor] | None = None  # grammar masks, allocated for the first grammar

    def put_draft(self, draft: Draft) -> None:
        batch, slots = draft.tokens.shape
        self._draft[:batch, :slots].copy_(draft.tokens)
        if self._sampled_from is not None and draft.candidates is not None and draft.q is not None:
            for buffer, part in zip(self._sampled_from, (draft.candidates, draft.q), strict=True):
                buffer[:batch, :slots].copy_(part)

    def draft(self, batch: int, size: int) -> Tensor:
        """Returns the drafted tokens, int64 [B, S - 1]."""
        return self._draft[:batch, : size - 1].contiguous()

    def put_block(self, block: ReadBlock) -> None:
        batch, size = block.hidden.shape[:2]
        self._hidden[:batch, :size].copy_(block.hidden)
        self._lengths[:batch].copy_(block.rows.lengths)
        if self._features is not None and block.features is not None:
            self._features[: batch * size].copy_(block.features)

    def block(self, page_table: Tensor, page_size: int, size: int) -> tuple[ReadBlock, Tensor]:
        """Returns the block of the first rows, before their lengths advance, and the choices int64 [B, S]."""
        batch = len(page_table)
        rows = Rows(self._lengths[:batch], page_table, page_size)
        features = None if self._features is None else self._features[: batch * size]
        draft, choice = self.draft(batch, size), self._choice[:batch, :size]
        return ReadBlock(rows, draft, self._hidden[:batch, :size], features), choice.contiguous()

    def select(self, mode: Mode, rows: list[int], count: int) -> None:
        """Sets the rows of a mode; the first one is repeated until there are `count`."""
        padded = rows + rows[:1] * (count - len(rows))
        if self._rows_on_device.get(mode) != padded:
            self._rows[mode][:count].copy_(to_device(padded, torch.int64, self._hidden.device))
            self._rows_on_device[mode] = padded

    def masks(self, count: int, size: int, words: int) -> tuple[Tensor, Tensor]:
        """Returns buffers for the tokens that the rows of a masked mode may choose, see `mask_logits_`."""
        if self._masks is None:
            new = torch.zeros(self._draft.numel(), words + 1, dtype=torch.int32, device=self._draft.device)
            self._masks = new[:, :words].contiguous(), new[:, words].contiguous()
        masks, at = self._masks
        return masks, at[: count * size]

    def of_mode(self, mode: Mode, count: int, size: int) -> tuple[Tensor, Tensor, Draft, Tensor]:
        """Returns the rows [F] of a mode, their states [F * S, D], drafts of S - 1 tokens and lengths [F]."""
        rows = self._rows[mode][:count]
        hidden = self._hidden[:, :size].index_select(0, rows)
        draft = Draft(self._draft[:, : size - 1].index_select(0, rows))
        if self._sampled_from is not None and size > 1:
            candidates, q = (part[:, : size - 1].index_select(0, rows) for part in self._sampled_from)
            draft = Draft(draft.tokens, candidates=candidates, q=q)
        return rows, hidden.flatten(0, 1), draft, self._lengths.index_select(0, rows)

    def put_choice(self, rows: Tensor, choice: Tensor) -> None:
        """Stores the choices int64 [F, S] of rows [F]; a repeated row has equal choices."""
        self._choice[:, : choice.shape[1]].index_copy_(0, rows, choice)

    def put_logprobs(self, mode: Mode, logprobs: Tensor) -> Tensor:
        """Copies log-probabilities [F, S, ...] to a buffer of their own and returns it.

        Graphs share their memory, and the next graph runs before the host has copied these values.
        """
        return self.logprobs(mode, *logprobs.shape[:2]).copy_(logprobs)

    def logprobs(self, mode: Mode, count: int, size: int) -> Tensor:
        """Returns the newest log-probabilities, fp64 [F, S, ...]."""
        return self._logprobs[mode][:count, :size]
