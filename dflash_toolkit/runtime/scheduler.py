"""Who runs next: admission, chunked prefill, the batch, pages, preemption. Knows tokens and pages, not tensors.

One `advance` computes chunks of prompts up to a number of tokens, in the order of the line (`line.py`), launches one
decoding step for the whole batch, and reads results that are old enough. The device runs behind: a step is launched
before the results of the one before it are read, so a request may run a step past its end; what that step commits is
dropped when it is read.

Where a step raises, the requests that it was launched for are given one each: whoever raises again ends with the error,
and the others go on from what was read of them. Prefills are tried twice.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..generation import Step
from .exact import EXACT_BATCH
from .line import Line
from .pages import PagePool
from .prefill_job import PrefillJob, PrefillLimits, ScoredTokens
from .request import Committed, NotFiniteError, Request, StepShape


class Device(Protocol):
    """What the scheduler needs of the machine that computes; `runner.py` has the real one."""

    depth: int  # steps that may be in flight when a result is read
    prefill_limits: PrefillLimits  # of a batch
    pages_per_request: int  # at most, overshoot included

    def prefill(self, job: PrefillJob) -> Any | None:
        """Write keys and values of the chunk into its pages, and update the recurrent states.

        Returns:
            The pending scores that `job.scores` asks for; `add` reads them from the request. None without `scores`.
        """

    def prefill_batch(self, chunks: Sequence[PrefillJob]) -> None:
        """`prefill` of several requests in one pass; `add` finds what they leave by their places here."""

    def copy_states(self, source: int, target: int) -> None:
        """Recurrent states in slot `target` become those in slot `source`."""

    def add(self, row: int, request: Request, place: int = 0) -> Any | None:
        """Put a prefilled request into the batch; returns the pending first token if it has none yet.

        Args:
            place: of its chunk among those that were computed in one pass.
        """

    def move(self, source: int, target: int) -> None:
        """Row `source` becomes row `target`, whose request is gone."""

    def remove(self, row: int) -> None:
        """The row stands for no request any more."""

    def set_pages(self, row: int, pages: Sequence[int]) -> None:
        """The pages of a request in the batch have changed."""

    def clean(self, pages: Sequence[int]) -> None:
        """Leave no NaN in pages that nobody holds."""

    def check(self) -> None:
        """Use the device once. Raises what it raises at every use once it has failed."""

    def decode(self, requests: Sequence[Request], shape: StepShape) -> Any:
        """Launch one step of rows 0..len(requests) - 1; returns its pending result."""

    def read(self, pending: Any) -> list[Committed]:
        """Wait for a result: what every row it was launched for got."""


log = logging.getLogger(__name__)
IN_VAIN = 8  # faults behind one another, with nothing read between them, that are not yet everybody's end
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
        choose_shape: picks the shape of a batch's next step.
        max_num_seqs: rows of the batch.
        max_num_batched_tokens: tokens of prompts that one `advance` computes at most, in chunks as `cut_of` has them.
        max_block: the longest block that `choose_shape` returns.
        max_places: tokens behind a request's length that a step may write at most; 0: as many as its block has. A tree
            has more nodes than it commits.
        recurrent: a request has states beside its pages; another goes on from those that the pool has room for.
        report: told of every request that got something, with the step it came from (None: the prefill).
    """

    def __init__(
        self,
        device: Device,
        pool: PagePool,
        choose_shape: Callable[[Sequence[Request]], StepShape],
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_block: int,
        max_places: int = 0,
        prefix_cache: bool = True,
        recurrent: bool = False,
        report: Callable[[Request, Step | None], None] = lambda request, step: None,
    ) -> None:
        self.waiting = Line()
        self.running: list[Request] = []  # by row
        self.preemptions = 0
        self._device, self._pool, self.choose_shape = device, pool, choose_shape
        self._max_num_seqs, self._turn = max_num_seqs, max_num_batched_tokens
        self._max_places = max(max_block, max_places)
        self._cut = cut_of(max_num_batched_tokens)
        self._due_starts = False  # whether the next to start, where one can, is who is due
        self._without_pages: list[Request] = []  # that wait though they were next
        self._prefix_cache, self._recurrent, self._report = prefix_cache, recurrent, report
        self._free_states = list(range(max_num_seqs, 0, -1))  # slots
        self._batch: list[Request] = []  # whose next chunks are prefilled in one pass
        self._launches: deque[_Launch] = deque()
        self._shape = StepShape(1)  # of the newest step
        self._in_vain = 0  # faults since a result was read
        self._news: deque[tuple[Request, Step | None]] = deque()  # to be reported
        self._raised: Exception | None = None  # by a report

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
        if request.place is None:  # it was never queued
            return
        try:
            self._take(request)
        except Exception as error:
            self._recover(error)

    def abandon(self) -> None:
        """Discard everything without a word to the device, which is broken."""
        for request in (*self.waiting, *self.prefilling, *self.running):
            request.place = request.row = None
        self.waiting = Line()
        self.running.clear()
        self._launches.clear()
        self._news.clear()
        self._without_pages.clear()

    def remove_rows(self) -> None:
        """No row stands for anybody any more, also where that had failed: it would write into pages of others."""
        for row in range(self._max_num_seqs):
            self._device.remove(row)

    def advance(self) -> None:
        """One turn of the loop. Raises what the device raises once it has failed, and what a report raises."""
        try:
            self._advance()
        except Exception as error:
            self._recover(error)
        if (raised := self._raised) is not None:
            self._raised = None
            raise raised

    def _advance(self) -> None:
        self._compute_prompts()
        # what a grammar allows next depends on what was committed
        depth = 0 if any(request.matcher for request in self.running) else self._device.depth
        while self._launches and not depth:  # where a step is waited for, first tokens do not wait for it
            self._read()
        decoding = self._decode()
        # results are read late, but not later than the next result of those who wait for nothing else
        while self._launches and (len(self._launches) > depth or not decoding):
            decoding |= self._read()

    # ---- prompts ---------------------------------------------------------------------------------------

    def _compute_prompts(self) -> None:
        """Chunks of prompts, up to the tokens of a turn.

        Whoever is due goes on in any case; the others before and behind it as the line has them, where they fit.
        """
        line, left = self.waiting, self._turn
        self._batch = []  # whom a fault left there is in line
        if not line.started and not (line and self._rows_left):
            return
        line.begin()
        due = self._held_up or line.due(self._rows_left > 0)
        while left > 0:
            due = due if due is not None and due.place is not None else None  # whoever got a first token may cancel
            request = line.next(self._rows_left > 0) or due
            if due is not None and request is not due and self._last_row_is_for(due, request):
                request = due
            if request is None and self._batch:
                self._prefill_batch()  # some may have more chunks
                continue
            if request is None:
                break
            reserved = 0 if due is None or request is due else self._next_chunk(due)
            goes = self._next_chunk(request) <= left - reserved
            if goes and request not in line.started:
                if any(self._begins_alike(request, other) for other in self._batch):
                    self._prefill_batch()  # it finds their pages
                goes = self._admit(request) and (
                    (not self._batch and not self._may_be_batched(request)) or self._has_states(request)
                )
                self._due_starts = self._due_starts if not goes else request is not due
            if request is due:
                due = None
                if goes:
                    line.went(request)
            if goes and self._may_be_batched(request):
                left -= self._add_to_batch(request)
            elif goes:
                self._prefill_batch()
                left -= max(self._try_prefill(request), 1)
            elif request.place is not None:  # else it has failed
                line.pass_over(request)
            while self._launches and not self._device.depth:  # where a step is waited for, so are first tokens
                self._read()
        self._prefill_batch()

    # ---- batched prefill ---------------------------------------------------------------------------------

    def _may_be_batched(self, request: Request) -> bool:
        """Whether its next chunk may be prefilled beside others': short ones, whose pass is hardly longer for that.

        Sums then depend on the number of rows, so it is done where batches are too large for equal bits anyway.
        """
        crowd = min(len(self.running) + len(self.waiting.started) + len(self.waiting), self._max_num_seqs)
        tokens = self._next_chunk(request)
        alone = request.prefilled_alone or request.scores_prompt or not tokens
        return crowd > EXACT_BATCH and not alone and self._device.prefill_limits.fits([tokens])

    def _add_to_batch(self, request: Request) -> int:
        """Returns the tokens of its chunk, which is prefilled later in this turn."""
        chunks = [self._next_chunk(each) for each in (*self._batch, request)]
        if not self._device.prefill_limits.fits(chunks):
            self._prefill_batch()
        self._batch.append(request)
        self.waiting.charge(request, prompt=chunks[-1])
        self.waiting.pass_over(request)  # until it is computed
        return chunks[-1]

    def _begins_alike(self, request: Request, other: Request) -> bool:
        """Whether the pages that are computed for the other one hold tokens of this one, too."""
        ids, theirs, start = request.prompt_ids, other.prompt_ids, other.prefilled
        end = start + self._pool.page_size
        if not self._prefix_cache or len(theirs) < end or ids[start:end] != theirs[start:end]:
            return False
        return ids[:start] == theirs[:start]

    def _prefill_batch(self) -> None:
        """Prefill the batch in one pass. If that fails, its requests begin anew, and each is prefilled alone."""
        batch, self._batch = [request for request in self._batch if request in self.waiting.started], []
        if not batch:
            return
        left, chunks = list(batch), []
        for request in batch:
            start = request.prefilled
            ids = request.known_ids[start : start + self._next_chunk(request)]
            chunks.append(PrefillJob(ids, start, request.pages, request.state))
        try:
            if len(batch) > 1:
                self._device.prefill_batch(chunks)
            else:
                self._device.prefill(chunks[0])
            for place, (request, chunk) in enumerate(zip(batch, chunks, strict=True)):
                try:
                    self._computed(request, len(chunk.ids), place)
                    left.remove(request)
                except Exception as error:
                    self._prompt_failed(request, error)
        except Exception as error:
            log.error("the prefill of %d requests in one batch failed", len(batch), exc_info=error)
            for request, chunk in zip(batch, chunks, strict=True):
                if request in left:
                    self.waiting.charge(request, prompt=-len(chunk.ids))
            self._device.check()
        finally:  # their states may be anything
            for request in left:
                request.prefilled_alone = True
                self._preempt(request)
        for request in batch:
            if request in self.waiting.started:
                self.waiting.go_on(request)

    def _has_states(self, request: Request) -> bool:
        """Copy what it goes on from before others in the same turn keep theirs there; False where that failed."""
        try:
            self._go_on_from(request)
        except Exception as error:
            log.error("states of request %s were not copied", request.name or "without a name", exc_info=error)
            self._device.check()
            if request.prefilled_alone:
                self._fail(request, error)
            else:
                request.prefilled_alone = True
                self._preempt(request)
            return False
        return True

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
        end = next((tokens for tokens in request.kept_at if tokens > request.prefilled), request.length)
        return min(end - request.prefilled, self._cut)

    def _try_prefill(self, request: Request) -> int:
        """As `_prefill`, twice if need be; whoever raises both times ends."""
        for last in (False, True):
            try:
                if last:
                    self._rebuild(request, request.prefilled)
                return self._prefill(request)
            except Exception as error:
                self._prompt_failed(request, error)
                if last:
                    self._fail(request, error)
        return 0

    def _prompt_failed(self, request: Request, error: Exception) -> None:
        log.error("the prompt of request %s failed", request.name or "without a name", exc_info=error)
        self._device.check()
        self._device.remove(len(self.running))  # it may have got its row

    def _prefill(self, request: Request) -> int:
        """Compute the next chunk of a prompt; how many tokens it had.

        A prompt is cut every so many tokens from where it begins, whatever else is computed in this turn: GEMMs of
        other sizes would round otherwise, and its answer depend on its neighbours, as in batches. It is also cut where
        its states are kept.
        """
        ids = request.known_ids
        self._go_on_from(request)
        chunk = ids[request.prefilled : request.prefilled + self._next_chunk(request)]
        if chunk:
            start = request.prefilled
            following = ids[start + 1 : start + 1 + len(chunk)] if request.scores_prompt else ()
            scores = ScoredTokens(following, request.params.prompt_logprobs or 0) if following else None
            scored = self._device.prefill(PrefillJob(chunk, start, request.pages, request.state, scores))
            if scored is not None:
                request.scored.append(scored)
            self.waiting.charge(request, prompt=len(chunk))
        self._computed(request, len(chunk))
        return len(chunk)

    def _go_on_from(self, request: Request) -> None:
        if request.goes_on_from:
            slot, request.goes_on_from = request.goes_on_from, 0
            self._device.copy_states(slot, request.state)

    def _computed(self, request: Request, tokens: int, place: int = 0) -> None:
        """So many more tokens of a prompt are in its pages; the last chunk begins its answer."""
        ids = request.known_ids
        request.prefilled += tokens
        if tokens and request.prefilled in request.kept_at:
            self._keep_states(request, ids[: request.prefilled])
        if request.prefilled == len(ids):
            self._begin_answer(request, ids, place)

    def _keep_states(self, request: Request, ids: list[int]) -> None:
        slot = self._pool.keep_state(ids, request.pages)
        if slot:
            try:
                self._device.copy_states(request.state, slot)
            except Exception:
                self._pool.drop_state(slot)
                raise

    def _begin_answer(self, request: Request, ids: list[int], place: int) -> None:
        pending = self._device.add(len(self.running), request, place)
        if self._prefix_cache:
            self._pool.publish(ids, request.pages)
        self.waiting.leave(request)
        request.row = len(self.running)
        self.running.append(request)
        if pending is not None:
            self._launches.append(_Launch(pending, [(request, request.epoch)], 0))

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
        hit, slot, parting = self._find_prefix(request, ids, limit)
        new = self._pool.allocate(self._pool.pages_for(len(ids) + self._max_places) - len(hit))
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
        request.pages, request.state = hit + new, self._free_states.pop()
        request.prefilled, request.goes_on_from = len(hit) * self._pool.page_size, slot
        if self._prefix_cache and self._recurrent:
            # others may part from it where it parts from them; and whoever goes on from it has all of its pages
            whole = limit // self._pool.page_size * self._pool.page_size
            request.kept_at = tuple(sorted({parting, whole} - {0}))
        if not request.epoch:  # later, what it finds may be its own
            request.cached_tokens = request.prefilled
        return True

    def _find_prefix(self, request: Request, ids: list[int], limit: int) -> tuple[list[int], int, int]:
        """As `PagePool.match_state`; no slot where there are no states."""
        if not self._prefix_cache or request.scores_prompt:
            return [], 0, 0
        if not self._recurrent:
            return self._pool.match(ids, limit), 0, 0
        return self._pool.match_state(ids, limit)

    # ---- decode ----------------------------------------------------------------------------------------

    def _decode(self) -> bool:
        if all(request.surely_ends for request in self.running):
            return False
        return self._launch(self.choose_shape(self.running))

    def _launch(self, shape: StepShape) -> bool:
        """A step of those who run; False if for want of pages there is none left."""
        self._shape = shape
        for request in list(self.running):
            if request.row is not None:  # it did not give way to one of those before
                self._reserve(request, self._max_places if shape.rows else shape.block)
        if not self.running:
            return False
        pending = self._device.decode(self.running, shape)
        self._launches.append(_Launch(pending, [(r, r.epoch) for r in self.running], shape.block))
        for request in self.running:
            request.blocks_in_flight.append(shape.block)
        return True

    def _reserve(self, request: Request, places: int) -> None:
        """Pages for one more step of a running request; for want of them whoever came last gives way, maybe itself."""
        missing = self._pool.pages_for(request.reach + places) - len(request.pages)
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
        try:
            self._take(request)
        finally:
            self.waiting.add(request)
            self.preemptions += 1

    # ---- results ---------------------------------------------------------------------------------------

    def _read(self) -> bool:
        """Read the oldest result; whether any request got something."""
        self._tell()  # what a read that failed has left: who hears it takes it for the newest
        if not self._launches:  # who heard it has cancelled, and that failed
            return False
        found = self._device.read(self._launches[0].pending)
        launch = self._launches.popleft()
        leaving, got = [], False
        for (request, epoch), committed in zip(launch.requests, found, strict=True):
            if request.epoch != epoch or request.finished:
                continue  # cancelled, preempted or finished since
            request.poisoned |= committed.poisons
            if committed.finite:
                request.again = False
                step = self._add(request, launch.block, committed)
                self.waiting.charge(request, answer=len(committed.tokens))
            else:
                step = None
                request.epoch += 1  # what stands behind that is void
                request.error = NotFiniteError() if request.again else None
                log.error("NaN or infinity was computed for request %s", request.name or "without a name")
            got = True
            if request.finished or not committed.finite:
                leaving.append(request)
            if committed.finite or request.error:
                self._news.append((request, step))
        # from the last row down: the row that moves up is of a request that stays
        for request in sorted(leaving, key=lambda request: request.row or 0, reverse=True):
            if request.finished:
                self._take(request)
            else:
                request.again = True
                self._preempt(request)
        self._tell()
        self._in_vain = 0
        return got

    def _tell(self) -> None:
        """Report what is new. What a report raises is raised at the end of the turn: nothing may be half done."""
        while self._news:
            request, step = self._news.popleft()
            try:
                if not request.cancelled:
                    self._report(request, step)
            except Exception as error:
                self._raised = self._raised or error

    def _add(self, request: Request, block: int, committed: Committed) -> Step | None:
        try:
            if block == 0:
                request.add_first(committed)
                return None
            request.blocks_in_flight.pop(0)
            return request.add_step(block, committed)
        except Exception as error:
            log.error("the answer of request %s cannot go on", request.name or "without a name", exc_info=error)
            request.error, request.poisoned = error, True
            return None

    def _take(self, request: Request) -> None:
        """Take row and pages, and the place in line of one that has ended; what is in flight for it is void."""
        written = request.length if request.row is not None else request.prefilled
        ended = request.finished or request.cancelled
        self.waiting.leave(request, ended=ended)
        if ended and request in self._without_pages:
            self._without_pages.remove(request)
        poisoned, row, pages = request.poisoned, request.row, request.pages
        if request.state:
            self._free_states.append(request.state)
        request.state, request.pages, request.prefilled, request.row, request.poisoned = 0, [], 0, None, False
        request.goes_on_from, request.kept_at = 0, ()
        request.scored = []
        request.blocks_in_flight.clear()
        request.epoch += 1
        if poisoned:
            self._pool.drop_states(request.prompt_ids + request.tokens)
            self._pool.discard(pages)
        elif self._prefix_cache and pages:
            self._pool.publish((request.prompt_ids + request.tokens)[:written], pages)
        free = self._pool.release(pages)
        # the device comes last: where it raises, all is known that was done
        if row is not None:
            moved = self.running.pop()
            if moved is not request:
                self.running[row], moved.row = moved, row
                self._device.move(len(self.running), row)
            self._device.remove(len(self.running))
        if poisoned and free:
            self._device.clean(free)

    # ---- what fails ------------------------------------------------------------------------------------

    def _fail(self, request: Request, error: Exception) -> None:
        """It ends with an error; what it wrote is not for others."""
        request.error, request.poisoned = error, True
        self._news.append((request, None))
        self._take(request)
        self._tell()

    def _recover(self, error: Exception) -> None:
        """Find who made a step fail, and go on without. Raises the error where that has not helped."""
        log.error("a step failed; its requests are computed one by one", exc_info=error)
        self._tell()
        self._device.check()
        self._in_vain += 1
        if self._in_vain > IN_VAIN:
            raise error
        lost = False  # what stands behind a step that cannot be read is not known
        while self._launches:
            launch = self._launches[0]
            if not (lost and launch.block):
                try:
                    self._read()
                    continue
                except Exception as again:
                    log.error("a result could not be read", exc_info=again)
                    lost = lost or launch.block > 0
                    request, epoch = launch.requests[0]
                    if launch.block == 0 and request.epoch == epoch:
                        self._fail(request, again)
            if self._launches and self._launches[0] is launch:
                self._launches.popleft()
        running, self.running = self.running, []
        self.remove_rows()
        for request in running:
            request.row = None
            request.epoch += 1
            request.blocks_in_flight.clear()
        sound = []
        for request in running:
            if request.place is None:  # cancelled by who heard of another's result
                continue
            if request.finished or request.cancelled:
                self._take(request)
                continue
            if not request.tokens:
                self._preempt(request)
                continue
            try:
                self._step_alone(request)
            except Exception as again:
                log.error("request %s failed alone", request.name or "without a name", exc_info=again)
                self._device.check()
                self._launches.clear()
                if request.place is not None:
                    self._fail(request, again)
                else:  # it has ended, but for its row
                    self._device.remove(0)
            if request.row is not None:
                self._device.remove(0)
                request.row = None
                sound.append(request)
            self.running = []
        for request in sound:
            if request.place is None:
                continue
            if self._recurrent:  # its states are behind the step that it made alone, or in it
                self._preempt(request)
                continue
            request.row = len(self.running)
            self.running.append(request)
            self._device.add(request.row, request)
        self._tell()

    def _step_alone(self, request: Request) -> None:
        request.row, self.running = 0, [request]
        self._rebuild(request, request.length)
        self._device.add(0, request)
        self._launch(self._shape)
        while self._launches:
            self._read()

    def _rebuild(self, request: Request, tokens: int) -> None:
        """Bring recurrent states, which a fault may have left anywhere, to where so many tokens leave them."""
        ids = request.known_ids[:tokens] if self._recurrent else []
        for start in range(0, len(ids), self._cut):
            self._device.prefill(PrefillJob(ids[start : start + self._cut], start, request.pages, request.state))
