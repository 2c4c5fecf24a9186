"""Who runs next: admission, chunked prefill, the batch, pages, preemption. Knows tokens and pages, not tensors.

One `advance` computes chunks of prompts up to a number of tokens, in the order of the line (`line.py`), launches one
decoding step for the whole batch, and reads results that are old enough. The device runs behind: a step is launched
before the results of the one before it are read, so a request may run a step past its end; what that step commits is
dropped when it is read.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..generation import Step
from .line import Line
from .pages import PagePool
from .request import Committed, Request


class Device(Protocol):
    """What the scheduler needs of the machine that computes; `runner.py` has the real one."""

    depth: int  # steps that may be in flight when a result is read
    pages_per_request: int  # at most, overshoot included

    def prefill(
        self, ids: Sequence[int], start: int, pages: Sequence[int], following: Sequence[int] = (), best: int = 0
    ) -> Any | None:
        """Write keys and values of `ids`, which stand at `start`..., into `pages` of their request.

        Args:
            following: tokens behind the first of `ids`, the second..., whose log-probabilities are returned, pending;
                `add` finds them in the request.
            best: most probable tokens beside each of them.
        """

    def add(self, row: int, request: Request) -> Any | None:
        """Put a prefilled request into the batch; returns the pending first token if it has none yet."""

    def move(self, source: int, target: int) -> None:
        """Row `source` becomes row `target`, whose request is gone."""

    def remove(self, row: int) -> None:
        """The row stands for no request any more."""

    def set_pages(self, row: int, pages: Sequence[int]) -> None:
        """The pages of a request in the batch have changed."""

    def decode(self, requests: Sequence[Request], block: int) -> Any:
        """Launch one step of rows 0..len(requests) - 1; returns its pending result."""

    def read(self, pending: Any) -> list[Committed]:
        """Wait for a result: what every row it was launched for got."""


OVERTAKEN = 16  # younger requests that may start before one that found no pages; then it is waited for


def cut_of(turn: int) -> int:
    """Tokens of a chunk of a prompt, where a turn has so many: two can share it."""
    return max(turn // 2, 1)


@dataclass(slots=True)
class _Launch:
    pending: Any
    requests: list[tuple[Request, int]]  # with the epoch at launch
    block: int  # 0: a prefill's first token


class Scheduler:
    """Holds every request that is not finished.

    Args:
        choose_block: picks the block length for a batch.
        max_num_seqs: rows of the batch.
        max_num_batched_tokens: tokens of prompts that one `advance` computes at most, in chunks as `cut_of` has them.
        max_block: the longest block that `choose_block` returns.
        report: told of every request that got something, with the step it came from (None: the prefill).
    """

    def __init__(
        self,
        device: Device,
        pool: PagePool,
        choose_block: Callable[[Sequence[Request]], int],
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_block: int,
        prefix_cache: bool = True,
        report: Callable[[Request, Step | None], None] = lambda request, step: None,
    ) -> None:
        self.waiting = Line()
        self.running: list[Request] = []  # by row
        self.preemptions = 0
        self._device, self._pool, self.choose_block = device, pool, choose_block
        self._max_num_seqs, self._turn, self._max_block = max_num_seqs, max_num_batched_tokens, max_block
        self._cut = cut_of(max_num_batched_tokens)
        self._due_starts = False  # whether the next to start, where one can, is who is due
        self._without_pages: list[Request] = []  # that wait though they were next
        self._prefix_cache, self._report = prefix_cache, report
        self._launches: deque[_Launch] = deque()

    @property
    def idle(self) -> bool:
        return not (self.waiting or self.prefilling or self.running or self._launches)

    @property
    def prefilling(self) -> list[Request]:
        """Those whose prompts are computed in part; they hold pages."""
        return self.waiting.started

    def add(self, request: Request) -> None:
        """Queue a request, see `line.py` for when it is served."""
        self.waiting.add(request)

    def cancel(self, request: Request) -> None:
        """Discard a request; its row and pages are free at once."""
        if request.cancelled or request.finished:
            return
        request.cancelled = True
        if request.place is not None:  # else it was never queued
            self._drop(request)
            self._end(request)

    def abandon(self) -> None:
        """Discard everything without a word to the device, which is broken."""
        for request in (*self.waiting, *self.prefilling, *self.running):
            request.place = request.row = None
        self.waiting = Line()
        self.running.clear()
        self._launches.clear()
        self._without_pages.clear()

    def advance(self) -> None:
        """One turn of the loop."""
        self._compute_prompts()
        # what a grammar allows next depends on what was committed
        depth = 0 if any(request.matcher for request in self.running) else self._device.depth
        while self._launches and not depth:  # where a step is waited for, first tokens do not wait for it
            self._read(self._launches.popleft())
        decoding = self._decode()
        # results are read late, but not later than the next result of those who wait for nothing else
        while self._launches and (len(self._launches) > depth or not decoding):
            decoding |= self._read(self._launches.popleft())

    # ---- prompts ---------------------------------------------------------------------------------------

    def _compute_prompts(self) -> None:
        """Chunks of prompts, up to the tokens of a turn.

        Whoever is due goes on in any case; the others before and behind it as the line has them, where they fit.
        """
        line, left = self.waiting, self._turn
        if not line.started and not (line and self._rows_left):
            return
        line.begin()
        due = self._held_up or line.due(self._rows_left > 0)
        while left > 0:
            request = line.next(self._rows_left > 0) or due
            if due is not None and request is not due and self._last_row_is_for(due, request):
                request = due
            if request is None:
                break
            reserved = 0 if due is None or request is due else self._next_chunk(due)
            goes = self._next_chunk(request) <= left - reserved
            if goes and request not in line.started:
                goes = self._admit(request)
                self._due_starts = self._due_starts if not goes else request is not due
            if request is due:
                due = None
                if goes:
                    line.went(request)
            if goes:
                left -= max(self._prefill(request), 1)
            else:
                line.pass_over(request)

    def _last_row_is_for(self, due: Request, other: Request | None) -> bool:
        """Whether `due` starts with the last row that is free, instead of another."""
        both_wait = other not in self.waiting.started and due not in self.waiting.started
        return self._rows_left == 1 and both_wait and self._due_starts

    @property
    def _held_up(self) -> Request | None:
        """Who found no pages for so long that others find none before it."""
        return next((r for r in self._without_pages if self.waiting.place(r).overtaken >= OVERTAKEN), None)

    @property
    def _rows_left(self) -> int:
        return self._max_num_seqs - len(self.running) - len(self.waiting.started)

    def _next_chunk(self, request: Request) -> int:
        """Tokens that it computes next, at most: a prefix may be found yet."""
        return min(request.length - request.prefilled, self._cut)

    def _prefill(self, request: Request) -> int:
        """Compute the next chunk of a prompt; how many tokens it had.

        A prompt is cut every so many tokens from where it begins, whatever else is computed in this turn: GEMMs of
        other sizes would round otherwise, and its answer depend on its neighbours.
        """
        ids = request.known_ids
        chunk = ids[request.prefilled : request.prefilled + self._cut]
        if chunk:
            start = request.prefilled
            following = ids[start + 1 : start + 1 + len(chunk)] if request.scores_prompt else ()
            best = request.params.prompt_logprobs or 0
            scored = self._device.prefill(chunk, start, request.pages, following, best)
            if scored is not None:
                request.scored.append(scored)
            request.prefilled += len(chunk)
            self.waiting.charge(request, prompt=len(chunk))
        if request.prefilled == len(ids):
            self._begin_answer(request, ids)
        return len(chunk)

    def _begin_answer(self, request: Request, ids: list[int]) -> None:
        if self._prefix_cache:
            self._pool.publish(ids, request.pages)
        self.waiting.leave(request)
        request.row = len(self.running)
        self.running.append(request)
        pending = self._device.add(request.row, request)
        if pending is not None:
            self._launches.append(_Launch(pending, [(request, request.epoch)], 0))
        while self._launches and not self._device.depth:  # where a step is waited for, first tokens wait for nobody
            self._read(self._launches.popleft())

    def _admit(self, request: Request) -> bool:
        """Give a waiting request its pages, if there are enough for its prompt and a step.

        One that finds too few lets others start before it, but not more than OVERTAKEN; whoever is urgent, always.
        """
        if not self._rows_left:
            return False
        place, first = self.waiting.place(request), self._held_up
        if first not in (None, request) and first.priority <= request.priority:
            return False
        if place.looked == self._pool.changes:  # a long prefix is not looked up again for nothing
            return False
        ids = request.known_ids
        # without a token yet, the last one of the prompt must be computed for its logits
        limit = len(ids) if request.tokens else len(ids) - 1
        hit = self._pool.match(ids, limit) if self._prefix_cache and not request.scores_prompt else []
        new = self._pool.allocate(self._pool.pages_for(len(ids) + self._max_block) - len(hit))
        if new is None:
            self._pool.unmatch(hit)
            place.looked = self._pool.changes
            if request not in self._without_pages:
                self._without_pages.append(request)
            return False
        if request in self._without_pages:
            self._without_pages.remove(request)
        for other in map(self.waiting.place, self._without_pages):
            other.overtaken += other.order < place.order
        place.overtaken = 0
        self.waiting.start(request)
        request.pages = hit + new
        request.prefilled = len(hit) * self._pool.page_size
        if not request.epoch:  # later, what it finds may be its own
            request.cached_tokens = request.prefilled
        return True

    # ---- decode ----------------------------------------------------------------------------------------

    def _decode(self) -> bool:
        if all(request.surely_ends for request in self.running):
            return False
        block = self.choose_block(self.running)
        for request in list(self.running):
            if request.row is not None:  # it did not give way to one of those before
                self._reserve(request, block)
        if not self.running:
            return False
        pending = self._device.decode(self.running, block)
        self._launches.append(_Launch(pending, [(r, r.epoch) for r in self.running], block))
        for request in self.running:
            request.blocks_in_flight.append(block)
        return True

    def _reserve(self, request: Request, block: int) -> None:
        """Pages for one more step of a running request; for want of them whoever came last gives way, maybe itself."""
        missing = self._pool.pages_for(request.reach + block) - len(request.pages)
        while missing > 0:
            # some in advance, so that the page table does not change every step
            ahead = min(missing + 3, self._device.pages_per_request - len(request.pages))
            new = self._pool.allocate(ahead) or self._pool.allocate(missing)
            if new is not None:
                request.pages += new
                assert request.row is not None
                self._device.set_pages(request.row, request.pages)
                return
            holders = [*self.running, *self.prefilling]
            victim = max(holders, key=lambda holder: (holder.priority, self.waiting.place(holder).order))
            self._preempt(victim)
            if victim is request:
                return

    def _preempt(self, request: Request) -> None:
        """Take a request's pages; it is computed again, from the tokens known so far, when there is room."""
        self._drop(request)
        self.waiting.add(request)
        self.preemptions += 1

    # ---- results ---------------------------------------------------------------------------------------

    def _read(self, launch: _Launch) -> bool:
        """Whether any request got something."""
        results = []
        ended = []
        for (request, epoch), committed in zip(launch.requests, self._device.read(launch.pending), strict=True):
            if request.epoch != epoch:
                continue  # finished, cancelled or preempted since
            step = None
            if launch.block == 0:
                request.add_first(committed)
            else:
                request.blocks_in_flight.pop(0)
                step = request.add_step(launch.block, committed)
            self.waiting.charge(request, answer=len(committed.tokens))
            if request.finished:
                ended.append(request)
            results.append((request, step))
        self._drop(*ended)
        for request in ended:
            self._end(request)
        for request, step in results:  # a report may raise, and then nothing may be half read
            self._report(request, step)
        return bool(results)

    def _drop(self, *requests: Request) -> None:
        """Take rows and pages; what is in flight for them is void."""
        # from the last row down: the row that moves up is of a request that stays
        for request in sorted(requests, key=lambda request: request.row or 0, reverse=True):
            self._take(request)

    def _end(self, request: Request) -> None:
        self.waiting.leave(request, ended=True)
        if request in self._without_pages:
            self._without_pages.remove(request)

    def _take(self, request: Request) -> None:
        written = request.length if request.row is not None else request.prefilled
        self.waiting.leave(request)
        if request.row is not None:
            last = len(self.running) - 1
            if request.row != last:
                moved = self.running[last]
                self._device.move(last, request.row)
                self.running[request.row], moved.row = moved, request.row
            self.running.pop()
            self._device.remove(last)
        if self._prefix_cache and request.pages:
            self._pool.publish((request.prompt_ids + request.tokens)[:written], request.pages)
        self._pool.release(request.pages)
        request.pages, request.prefilled, request.row = [], 0, None
        request.scored = []
        request.blocks_in_flight.clear()
        request.epoch += 1
