"""Chooses the target's token for every row of a step, greedily or as each request's parameters require.

The state is on the device.
"""

from collections.abc import Collection
from enum import IntEnum

import torch
import torch.nn.functional as F
from torch import Tensor

from ..generation import TokenLogprobs
from ..kernels.loss_terms import PLAIN, LogitScale
from ..kernels.ops import Ops
from ..kernels.reference import ACCEPTANCE_STREAM, DRAFT_STREAM, penalized, position_uniform
from ..sampling import MAX_LOGPROBS, SamplingParams, int64_seed
from .proposer import Draft

EDITED_ROWS = 16  # rows with edited logits in memory at a time: about 50 bytes each; they do not depend on one another
NOT_FIRST, NOT_EARLY = 1, 2  # a token that may not begin an answer; a stop token that needs `min_tokens` before it


class Mode(IntEnum):
    """How a request chooses tokens from the head's output. Each mode has graphs of its own."""

    GREEDY = 0  # the head's argmax, no logits in memory
    SAMPLED = 1  # temperature and filters
    FULL = 2  # also penalties, bias or log-probabilities
    MASKED = 3  # as SAMPLED, under a grammar
    MASKED_FULL = 4

    @property
    def full(self) -> bool:
        return self in (Mode.FULL, Mode.MASKED_FULL)

    @property
    def masked(self) -> bool:
        return self >= Mode.MASKED


def logprob_columns(vocab_size: int) -> int:
    """Returns how many values `Sampler.choose` returns for a token: its log-probability and the most probable ones."""
    return 1 + 2 * min(MAX_LOGPROBS, vocab_size)


def mode_of(params: SamplingParams) -> Mode:
    if params.edits_logits or params.logprobs is not None:
        return Mode.MASKED_FULL if params.grammar else Mode.FULL
    if params.grammar:
        return Mode.MASKED
    return Mode.SAMPLED if params.temperature > 0 else Mode.GREEDY


class Sampler:
    """Sampling parameters and token counts of `rows` requests.

    A request's choice at a position depends on its own logits, parameters and tokens, and its random number on (seed,
    position). So its answer depends neither on the batch nor on the block length.
    """

    def __init__(self, rows: int, vocab_size: int, device: torch.device, ops: Ops, scale: LogitScale = PLAIN) -> None:
        def new(dtype: torch.dtype) -> Tensor:
            return torch.zeros(rows, dtype=dtype, device=device)

        self._ops, self._rows, self._vocab, self._device, self._scale = ops, rows, vocab_size, device, scale
        self.temperature, self.top_p, self.min_p = new(torch.float32), new(torch.float32), new(torch.float32)
        self.top_k, self.seed = new(torch.int64).fill_(1), new(torch.int64)  # rows without a request are also computed
        self.penalties = torch.zeros(rows, 3, dtype=torch.float32, device=device)  # repetition, presence, frequency
        self.starts_at = new(torch.int64)  # the first position of the answer
        self.stops_from = new(torch.int64)  # the first position at which a stop token is allowed
        self.ends_at = new(torch.int64)  # the last position of the answer, which no draft reaches
        self.full = new(torch.bool)  # whether the request's mode is full
        self._fields = [self.temperature, self.top_p, self.min_p, self.top_k, self.seed, self.penalties]
        self._fields += [self.starts_at, self.stops_from, self.ends_at, self.full]
        self.counts = torch.zeros(rows, vocab_size, dtype=torch.int32, device=device)  # tokens of the answer
        self.prompt = torch.zeros(rows, vocab_size, dtype=torch.bool, device=device)  # whether the prompt has a token
        self.bias = torch.zeros(rows, vocab_size, dtype=torch.float32, device=device)
        self.late = torch.zeros(rows, vocab_size, dtype=torch.uint8, device=device)  # NOT_FIRST | NOT_EARLY
        self._tables = [self.counts, self.prompt, self.bias, self.late]
        self._written = False  # whether the tables were ever used; most servers never need them

    def set(
        self,
        row: int,
        params: SamplingParams,
        prompt: list[int],
        answer: list[int],
        stop_ids: Collection[int] = (),
        limit: int | None = None,
    ) -> None:
        """Assigns a row to a request. Its answer ends with one of `stop_ids` or at `limit` tokens."""
        self.temperature[row] = params.temperature
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        self.top_k[row] = min(params.top_k, self._vocab) or self._vocab
        self.seed[row] = int64_seed(params.seed)
        self.penalties[row, 0] = params.repetition_penalty
        self.penalties[row, 1] = params.presence_penalty
        self.penalties[row, 2] = params.frequency_penalty
        self.starts_at[row] = len(prompt)
        self.stops_from[row] = len(prompt) + params.min_tokens
        self.ends_at[row] = len(prompt) + (params.max_tokens if limit is None else limit) - 1
        full = mode_of(params).full
        self.full[row] = full
        self._written |= full
        if not self._written:
            return
        for table in self._tables:
            table[row].zero_()
        if params.edits_logits:
            self.prompt[row, self._on_device(prompt)] = True
            ids = self._on_device(answer)
            self.counts[row].scatter_add_(0, ids, torch.ones_like(ids, dtype=torch.int32))
            if params.logit_bias:
                tokens, values = zip(*params.logit_bias, strict=True)
                self.bias[row].scatter_add_(0, self._on_device(list(tokens)), self._on_device(list(values)).float())
            for flag, late in ((NOT_FIRST, params.begin_suppress_tokens), (NOT_EARLY, stop_ids)):
                listed = [token for token in late if 0 <= token < self._vocab]
                if listed and (flag == NOT_FIRST or params.min_tokens):
                    self.late[row, self._on_device(listed)] |= flag

    def move(self, source: int, target: int) -> None:
        for field in self._fields + (self._tables if self._written else []):
            field[target].copy_(field[source])

    def greedy(self, hidden: Tensor, head: Tensor) -> Tensor:
        """Returns the most probable token of every state [M, D], int64 [M]; a scale does not change it."""
        return self._ops.linear_argmax(hidden, head)

    def _logits(self, hidden: Tensor, head: Tensor) -> Tensor:
        logits = self._ops.linear(hidden, head)
        self._scale.apply_(logits)
        return logits

    def choose(
        self,
        hidden: Tensor,
        head: Tensor,
        rows: Tensor,
        draft: Draft,
        lengths: Tensor,
        mode: Mode,
        masks: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the target's tokens int64 [B, S] and, in full modes, their log-probabilities.

        Args:
            hidden: normed hidden states [B * S, D].
            rows: int64 [B], the rows of the requests.
            draft: S - 1 tokens per row.
            lengths: int32 [B], position of each block's first slot.
            masks: in masked modes, int32 [N, words] and [B * S], see `mask_logits_`.

        Returns:
            The second is fp64 [B, S, 1 + 2 * MAX_LOGPROBS]: the choice's log-probability, the ids of the most probable
            tokens, and their log-probabilities.
        """
        batch, block = len(lengths), draft.tokens.shape[1] + 1
        if mode == Mode.GREEDY:
            return self.greedy(hidden, head).view(batch, block), None
        raw = self._logits(hidden, head)
        if not mode.full:
            return self._choose(raw, rows, draft, lengths, mode, masks)
        some, found = max(1, EDITED_ROWS // block), []
        for first in range(0, batch, some):
            part, at = slice(first, first + some), slice(first * block, (first + some) * block)
            theirs = None if masks is None else (masks[0], masks[1][at])
            found.append(self._choose(raw[at], rows[part], _part_of(draft, part), lengths[part], mode, theirs))
        choices, logprobs = zip(*found, strict=True)
        return torch.cat(choices), torch.cat(logprobs)

    def _choose(
        self, raw: Tensor, rows: Tensor, draft: Draft, lengths: Tensor, mode: Mode, masks: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor | None]:
        """Does the same as `choose` with logits [B * S, V]; changes them if there are masks."""
        batch, block = len(lengths), draft.tokens.shape[1] + 1
        positions = lengths[:, None] + 1 + torch.arange(block, device=lengths.device)
        logits = self._edited(raw, rows, self._counts_in(draft), positions) if mode.full else raw
        if masks is not None:
            self._ops.mask_logits_(logits, *masks)  # in place: `raw` is not needed any more

        def by_row(field: Tensor) -> Tensor:
            return field[rows].repeat_interleave(block, output_size=batch * block)

        numbers = by_row(self.seed), positions.flatten().long()
        fields = (self.temperature, self.top_p, self.top_k, self.min_p)
        temperature, top_p, top_k, min_p = map(by_row, fields)
        how = temperature, top_p, top_k, min_p, position_uniform(*numbers)
        if draft.q is None:
            choice = self._ops.sample(logits, *how)
        else:
            tokens, candidates, q = self._judged(draft, positions < self.ends_at[rows][:, None])
            acceptance = position_uniform(*numbers, ACCEPTANCE_STREAM)
            choice = self._ops.rejection_sample(logits, *how, tokens, candidates, q, acceptance)
        return choice.view(batch, block), self.logprobs(raw, choice, batch) if mode.full else None

    def choose_each(self, hidden: Tensor, head: Tensor, requests: Tensor, positions: Tensor) -> Tensor:
        """Returns the tokens int64 [M] after states [M, D], at positions int32 [M] of requests int64 [M].

        All requests are greedy or sampled; no logits are edited.
        """
        nothing = Draft(requests.new_empty(len(requests), 0))
        sampled, _ = self.choose(hidden, head, requests, nothing, positions, Mode.SAMPLED)
        return torch.where(self.temperature[requests] > 0, sampled[:, 0], self.greedy(hidden, head))

    def choose_edited(
        self, hidden: Tensor, head: Tensor, requests: Tensor, positions: Tensor, path: Tensor, inside: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Does the same as `choose_each` with requests in the full mode; also returns the unedited logits [M, V].

        Args:
            path: int64 [M, K], drafted tokens on the path to each row, where `inside`, bool [M, K].
        """
        raw, sampled = self._logits(hidden, head), list[Tensor]()
        at = positions.long()[:, None] + 1
        how = (
            *(field[requests] for field in (self.temperature, self.top_p, self.top_k, self.min_p)),
            position_uniform(self.seed[requests], at[:, 0]),
        )
        for part in (slice(first, first + EDITED_ROWS) for first in range(0, len(raw), EDITED_ROWS)):
            drafted = torch.zeros(raw[part].shape, dtype=torch.int32, device=raw.device)
            drafted.scatter_add_(1, path[part], inside[part].to(torch.int32))
            logits = self._edited(raw[part], requests[part], drafted[:, None], at[part])
            sampled.append(self._ops.sample(logits, *(each[part] for each in how)))
        edits = self.full[requests] | (self.temperature[requests] > 0)
        return torch.where(edits, torch.cat(sampled), self.greedy(hidden, head)), raw

    def draft_uniform(self, lengths: Tensor, slots: int) -> Tensor:
        """Returns the random numbers fp64 [B, slots] for drafts of the first rows, after lengths [B]."""
        positions = lengths[:, None] + 1 + torch.arange(slots, device=lengths.device)
        return position_uniform(self.seed[: len(lengths), None].expand_as(positions), positions.long(), DRAFT_STREAM)

    @staticmethod
    def _judged(draft: Draft, inside: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns tokens [B * S] and their draft distributions; -1 after a block, and where not `inside` [B, S]."""
        assert draft.candidates is not None and draft.q is not None
        tokens = torch.where(inside, F.pad(draft.tokens, (0, 1)), -1)
        candidates, q = (F.pad(part, (0, 0, 0, 1)).flatten(0, 1) for part in (draft.candidates, draft.q))
        return tokens.flatten(), candidates, q

    def count(self, rows: slice, tokens: Tensor, counts: Tensor) -> None:
        """Counts committed tokens: the first `counts` [B] of tokens [B, S]. Only full modes use the counts."""
        taken = torch.arange(tokens.shape[1], device=tokens.device) < counts[:, None]
        self.counts[rows].scatter_add_(1, tokens, taken.to(torch.int32))

    def _counts_in(self, draft: Draft) -> Tensor:
        """Returns how often each token was drafted before each slot, int32 [B, S, V]: slot k follows drafts 1..k."""
        batch, slots = draft.tokens.shape
        found = torch.zeros(batch, slots + 1, self._vocab, dtype=torch.int32, device=draft.tokens.device)
        if slots:
            found[:, 1:].scatter_(2, draft.tokens[..., None], 1)
        return found.cumsum(1, dtype=torch.int32)

    def _edited(self, logits: Tensor, rows: Tensor, drafted: Tensor, positions: Tensor) -> Tensor:
        """Returns edited logits [B * S, V] at positions [B, S]; `drafted` [B, S, V] counts the drafts before them."""
        batch, block = positions.shape
        counts = self.counts[rows][:, None] + drafted
        penalties = self.penalties[rows][:, None, None]  # [B, 1, 1, 3]
        edited = penalized(
            logits.view(batch, block, -1),
            self.prompt[rows][:, None] | (counts > 0),
            counts,
            self.bias[rows][:, None],
            *penalties.unbind(-1),
        )
        first = (positions == self.starts_at[rows][:, None]) * NOT_FIRST
        early = (positions < self.stops_from[rows][:, None]) * NOT_EARLY
        edited.masked_fill_(((first + early)[..., None] & self.late[rows][:, None]) > 0, -torch.inf)
        return edited.flatten(0, 1)

    def logprobs(self, logits: Tensor, choice: Tensor, batch: int) -> Tensor:
        """Returns log-probabilities of choices [B * S] with logits [B * S, V]: fp64 [B, S, ...], see `choose`."""
        found = []
        for part, chosen in zip(logits.split(EDITED_ROWS), choice.split(EDITED_ROWS), strict=True):
            logprobs = part.float().log_softmax(-1)
            values, ids = logprobs.topk(min(MAX_LOGPROBS, self._vocab))
            own = logprobs.gather(1, chosen[:, None])
            found.append(torch.cat([own.double(), ids.double(), values.double()], dim=1))
        return torch.cat(found).unflatten(0, (batch, -1))

    def _on_device(self, values: list[int] | list[float]) -> Tensor:
        host = torch.tensor(values)
        return host.pin_memory().to(self._device, non_blocking=True) if self._device.type == "cuda" else host


def _part_of(draft: Draft, rows: slice) -> Draft:
    """Returns the chains of some rows of a draft."""
    candidates, q = (None if each is None else each[rows] for each in (draft.candidates, draft.q))
    return Draft(draft.tokens[rows], candidates=candidates, q=q)


def unpack_logprobs(packed: Tensor, best: int) -> list[TokenLogprobs]:
    """Unpacks rows [n, 1 + 2 * width] of `Sampler.choose`, cut to the `best` tokens that a request asks for."""
    width = (packed.shape[1] - 1) // 2
    return [
        TokenLogprobs(row[0], tuple(zip(map(int, row[1 : 1 + best]), row[1 + width : 1 + width + best], strict=True)))
        for row in packed.tolist()
    ]
