"""Chooses the first tokens of requests from the last states of their prompts."""

import logging
from dataclasses import dataclass

import torch
from torch import Tensor

from ...grammar import masks_of
from ..graphs import to_device, upload
from ..proposer import Draft
from ..request import Request
from ..sampler import Mode
from .context import StepContext
from .results import PendingResult

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Group:
    """Greedy requests; their tokens are chosen together."""

    rows: list[int | None]  # None: it has left the batch
    states: list[Tensor]  # [1, D] each
    result: PendingResult | None = None


@dataclass(frozen=True, slots=True)
class GreedyToken:
    """The first token of a greedy request, which may not be chosen yet."""

    group: _Group
    index: int


class FirstTokens:
    """Chooses first tokens: those of greedy requests together, as reading the head for one takes as long as for many.

    They are chosen before the next step, or when the first of them is read.
    """

    def __init__(self, context: StepContext) -> None:
        self._context = context
        self._numbers = torch.arange(len(context.modes), device=context.device)
        self._group = _Group([], [])

    def add(self, row: int, request: Request, last: Tensor) -> PendingResult | GreedyToken:
        """Returns the first token of a request, which is in the batch; `last` [1, D] is its prompt's last state."""
        if self._context.modes[row] is not Mode.GREEDY or request.scores_prompt:
            return self._chosen(row, request, last)
        group = self._group
        group.rows.append(row)
        group.states.append(last.clone())  # the next prompt overwrites it
        return GreedyToken(group, len(group.rows) - 1)

    def move(self, source: int, target: int | None) -> None:
        """Writes the token of a row to another row, or to none."""
        self._group.rows = [target if row == source else row for row in self._group.rows]

    @torch.inference_mode()
    def choose(self) -> None:
        """Chooses the tokens of all greedy requests that wait for it. If that fails, they still wait."""
        group = self._group
        kept = [row for row in group.rows if row is not None]
        if kept:
            context, hidden = self._context, torch.cat(group.states)
            choice = context.state.sampler.greedy(hidden, context.target.head)
            places = [i for i, row in enumerate(group.rows) if row is not None]
            rows, at = (to_device(each, torch.int64, context.device) for each in (kept, places))
            context.state.last_token[rows] = choice[at]
            group.result = self._send(choice, hidden)
        self._group = _Group([], [])

    @torch.inference_mode()
    def result(self, token: GreedyToken) -> PendingResult:
        """Returns the pending result of a request. Results are read in order."""
        group, index = token.group, token.index
        if group is self._group:
            try:
                self.choose()
            except Exception:
                log.exception("the first tokens of %d requests are chosen one by one", len(group.rows))
        if (found := group.result) is None:
            hidden = group.states[index]
            return self._send(self._context.state.sampler.greedy(hidden, self._context.target.head), hidden)
        buffer = found.buffer if index + 1 == len(group.rows) else None
        return PendingResult(found.tokens[index : index + 1], None, {}, found.done, buffer)

    def _send(self, choice: Tensor, hidden: Tensor) -> PendingResult:
        tokens = self._context.mark_finite(choice[:, None], hidden[:, None])
        return self._context.results.send(torch.cat([torch.ones_like(tokens), tokens], dim=1), None, {})

    def _chosen(self, row: int, request: Request, last: Tensor) -> PendingResult:
        context, state, sampler = self._context, self._context.state, self._context.state.sampler
        rows, mode = slice(row, row + 1), context.modes[row]
        before = state.lengths[rows] - 1  # the token follows the last one of the prompt
        no_draft = Draft(state.last_token.new_empty(1, 0))
        masks = None
        if request.matcher:
            allowed, at = masks_of([request.matcher], [[]], context.words)
            masks = upload(allowed, context.device), upload(at, context.device)
        choice, logprobs = sampler.choose(last, context.target.head, self._numbers[rows], no_draft, before, mode, masks)
        state.last_token[rows] = choice[0]
        counts = torch.ones_like(before)
        if mode.full:
            sampler.count(rows, choice, counts)
        tokens = torch.cat([counts[:, None], context.mark_finite(choice, last[None])], dim=1)
        top = request.params.logprobs
        wanted = {} if top is None else {0: (0, top)}
        scored = request.scored if request.scores_prompt else None
        return context.results.send(tokens, logprobs if wanted else None, wanted, scored=scored)
