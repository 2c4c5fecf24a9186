"""Chooses and computes the chunks of prompts of a turn, in the order of the queue, alone or several in one pass.

A turn may take longer than the time between two steps. It is a generator: it yields where a step may run, and continues
in a later turn of the engine. In between, requests may lose their pages; a pass then writes to the null block.
"""

import logging
import math
from collections.abc import Generator, Iterable, Sequence
from typing import TypeVar

from .device import PrefillPass
from .exact import EXACT_BATCH
from .prefill_job import PrefillJob, ScoredTokens
from .request import Request
from .request_table import RequestTable, name_of

Result = TypeVar("Result")
MAX_PASSES = 16  # per turn, so that many short chunks do not delay the batch's next step
Turn = Generator[bool, None, Result]  # yields True where a step may run
log = logging.getLogger(__name__)


def chunk_size(max_num_batched_tokens: int) -> int:
    """Returns the tokens of a chunk: two chunks can share a turn."""
    return max(max_num_batched_tokens // 2, 1)


class Prompts:
    """Computes the prompts of admitted requests, chunk by chunk.

    If a prompt fails twice, its request ends with the error.

    Args:
        max_tokens: maximum prompt tokens of a turn.
    """

    def __init__(self, table: RequestTable, max_tokens: int, prefix_cache: bool) -> None:
        self._table, self._device, self._states = table, table.device, table.states
        self._max_tokens, self._chunk, self._prefix_cache = max_tokens, chunk_size(max_tokens), prefix_cache
        self._guaranteed_starts = False  # whether the guaranteed request may take the next free row
        self._batch: list[Request] = []  # requests with chunks that are prefilled in one pass
        self._turn: Turn[None] | None = None  # if it is not complete
        self._seconds = math.inf  # left until the next step
        self._ran = False  # whether anything was launched since the last step
        self._pass: PrefillPass | None = None  # in flight
        self._in_pass: list[tuple[Request, int] | None] = []  # with the epoch at its start; None: has lost its pages

    def run(self, seconds: float = math.inf) -> None:
        """Continues the turn, or begins one, and launches up to `seconds` of work."""
        self._seconds, self._ran = seconds, False
        turn, self._turn = self._turn or self._chunks(), None
        if next(turn, False):
            self._turn = turn

    def release(self) -> None:
        """Stops writing for requests that have lost their pages. Must be called before the pass continues."""
        for index, held in enumerate(self._in_pass):
            if held is not None and not _holds(*held):
                self._in_pass[index] = None
                if self._pass is not None and any(self._in_pass):
                    self._pass.drop(index)
        if not any(self._in_pass):
            self._pass = None  # frees its memory

    def abandon(self) -> None:
        """Discards the turn without using the device, which has failed."""
        self._turn, self._pass, self._in_pass = None, None, []

    def _chunks(self) -> Turn[None]:
        """Computes chunks, up to the maximum tokens of a turn. A short pass counts as a sixteenth of them.

        The guaranteed request always advances. Other requests advance before and after it, in the order of the queue,
        if their chunks fit.
        """
        table, queue, left = self._table, self._table.queue, self._max_tokens
        self._batch = []  # after a fault, its requests are back in the queue
        if not queue.started and not (queue and table.free_rows):
            return
        queue.begin_turn()
        guaranteed = table.blocking or queue.guaranteed(table.free_rows > 0)
        while left > 0:
            if guaranteed is not None and guaranteed not in queue:  # cancelled since
                guaranteed = None
            request = queue.next(table.free_rows > 0) or guaranteed
            if guaranteed is not None and request is not guaranteed and self._last_row_is_for(guaranteed, request):
                request = guaranteed
            if request is None and self._batch:
                yield from self._prefill_batch()  # some may have more chunks
                continue
            if request is None:
                break
            reserved = 0 if guaranteed is None or request is guaranteed else self._cost(self._next_chunk(guaranteed))
            advances = self._cost(self._next_chunk(request)) <= left - reserved
            if advances and request not in queue.started:
                if any(self._shares_prefix(request, other) for other in self._batch):
                    yield from self._prefill_batch()  # so that it finds their pages
                    continue
                advances = table.admit(request) and (
                    (not self._batch and not self._may_be_batched(request)) or self._copied_states(request)
                )
                self._guaranteed_starts = self._guaranteed_starts if not advances else request is not guaranteed
            if request is guaranteed:
                guaranteed = None
                if advances:
                    queue.use_guarantee(request)
            if advances and self._may_be_batched(request):
                left -= yield from self._add_to_batch(request)
            elif advances:
                yield from self._prefill_batch()
                left -= self._cost((yield from self._prefill_twice(request)))
            elif request in queue:  # otherwise it has failed
                queue.skip(request)
            while table.launches and not self._device.depth:  # with depth 0, first tokens are also read at once
                table.read()
        yield from self._prefill_batch()

    def _last_row_is_for(self, guaranteed: Request, other: Request | None) -> bool:
        """Returns whether `guaranteed` starts with the last free row, instead of another request."""
        started = self._table.queue.started
        both_wait = other not in started and guaranteed not in started
        return self._table.free_rows == 1 and both_wait and self._guaranteed_starts

    def _next_chunk(self, request: Request) -> int:
        """Returns the maximum tokens of its next chunk; it may still find a prefix."""
        end = next((tokens for tokens in request.keep_states_at if tokens > request.prefilled), request.length)
        return min(end - request.prefilled, self._chunk)

    def _cost(self, tokens: int) -> int:
        """Returns the tokens of a turn that a pass uses up."""
        return max(tokens, self._max_tokens // MAX_PASSES, 1)

    def _run(self, requests: Sequence[Request], jobs: Sequence[PrefillJob]) -> Turn[PrefillPass | None]:
        """Runs a pass of jobs. Returns it, or None if all of its requests have lost their pages."""
        self._pass = self._device.start_prefill(jobs)
        self._in_pass = [(request, request.epoch) for request in requests]
        try:
            while self._pass is not None and not self._pass.done:
                if self._seconds <= 0:
                    yield True
                    self.release()
                    continue
                used = self._pass.run(self._seconds, least=0 if self._ran else 1)
                self._ran = True
                self._seconds = self._seconds - used if self._pass.done else 0.0
            return self._pass
        finally:
            self._pass, self._in_pass = None, []

    # ---- one chunk -------------------------------------------------------------------------------------

    def _prefill_twice(self, request: Request) -> Turn[int]:
        """Computes the next chunk and returns its tokens. Retries once; a second failure ends the request."""
        for last in (False, True):
            if request not in self._table.queue.started:  # another pass was in flight, and it was cancelled
                break
            try:
                if last:
                    self._states.rebuild(request, request.prefilled, self._chunk)
                return (yield from self._prefill(request))
            except Exception as error:
                self._clean_up(request, error)
                if last:
                    self._table.fail(request, error)
        return 0

    def _prefill(self, request: Request) -> Turn[int]:
        """Computes the next chunk of a prompt and returns its tokens.

        A prompt is always cut at the same positions, as matrix products of other sizes would round differently and its
        answer would depend on other requests. It is also cut where its states are kept.
        """
        ids = request.known_ids
        self._states.begin(request)
        chunk = ids[request.prefilled : request.prefilled + self._next_chunk(request)]
        if chunk:
            start = request.prefilled
            following = ids[start + 1 : start + 1 + len(chunk)] if request.scores_prompt else ()
            scores = ScoredTokens(following, request.params.prompt_logprobs or 0) if following else None
            job = PrefillJob(chunk, start, request.pages, request.state, scores)
            computed = yield from self._run([request], [job])
            if computed is None:
                return len(chunk)
            if computed.scores is not None:
                request.scored.append(computed.scores)
            self._table.queue.charge(request, prompt=len(chunk))
        self._advance(request, len(chunk))
        return len(chunk)

    def _advance(self, request: Request, tokens: int, place: int = 0) -> None:
        """Records that more tokens of a prompt are in its pages. After the last chunk, the answer begins."""
        ids = request.known_ids
        request.prefilled += tokens
        if tokens:
            self._states.reached(request, ids, tokens)
        if request.prefilled == len(ids):
            self._table.begin_answer(request, ids, place)

    def _clean_up(self, request: Request, error: Exception) -> None:
        """Logs the failure of a prompt. Raises the device's error if the device has failed for good."""
        log.error("the prompt of request %s failed", name_of(request), exc_info=error)
        self._device.check()
        self._device.remove(len(self._table.running))  # the row that it may have got

    # ---- several chunks in one pass --------------------------------------------------------------------

    def _may_be_batched(self, request: Request) -> bool:
        """Returns whether its next chunk may be prefilled in one pass with others.

        Only short chunks are batched, so that the pass takes hardly longer. The sums depend on the number of rows, so
        this happens only for batches above EXACT_BATCH.
        """
        table = self._table
        requests = min(len(table.running) + len(table.queue.started) + len(table.queue), table.max_num_seqs)
        tokens = self._next_chunk(request)
        alone = request.prefilled_alone or request.scores_prompt or not tokens
        return requests > EXACT_BATCH and not alone and self._device.prefill_limits.fits([tokens])

    def _add_to_batch(self, request: Request) -> Turn[int]:
        """Adds the next chunk to the pass of this turn; returns the tokens of the turn that it uses up."""
        chunks = [self._next_chunk(each) for each in (*self._batch, request)]
        if not self._device.prefill_limits.fits(chunks):
            yield from self._prefill_batch()
            if request not in self._table.queue.started:  # cancelled since
                return 0
        self._batch.append(request)
        self._table.queue.charge(request, prompt=chunks[-1])
        self._table.queue.skip(request)  # until it is computed
        return chunks[-1] if len(self._batch) > 1 else self._cost(chunks[-1])

    def _shares_prefix(self, request: Request, other: Request) -> bool:
        """Returns whether the other request's pages will hold a prefix of this request."""
        ids, other_ids, start = request.prompt_ids, other.prompt_ids, other.prefilled
        end = start + self._table.pool.page_size
        if not self._prefix_cache or request.cache_salt != other.cache_salt:
            return False
        return len(other_ids) >= end and ids[start:end] == other_ids[start:end] and ids[:start] == other_ids[:start]

    def _prefill_batch(self) -> Turn[None]:
        """Prefills the batch in one pass. If that fails, its requests restart and are prefilled one at a time."""
        table = self._table
        batch, self._batch = [request for request in self._batch if request in table.queue.started], []
        if not batch:
            return
        jobs = []
        for request in batch:
            start = request.prefilled
            ids = request.known_ids[start : start + self._next_chunk(request)]
            jobs.append(PrefillJob(ids, start, request.pages, request.state))
        held = [(request, request.epoch) for request in batch]
        left = list(zip(held, jobs, strict=True))
        try:
            yield from self._run(batch, jobs)
            for place, (request, job) in enumerate(zip(batch, jobs, strict=True)):
                if not _holds(*held[place]):
                    continue
                try:
                    self._advance(request, len(job.ids), place)
                    left.remove((held[place], job))
                except Exception as error:
                    self._clean_up(request, error)
        except Exception as error:
            log.error("the prefill of %d requests in one batch failed", len(batch), exc_info=error)
            for (request, epoch), job in left:
                if _holds(request, epoch):
                    table.queue.charge(request, prompt=-len(job.ids))
            try:
                self._device.check()
            finally:
                self._restart(held for held, _ in left)
        else:
            self._restart(held for held, _ in left)
        for request in batch:
            if request in table.queue.started:
                table.queue.unskip(request)

    def _restart(self, failed: Iterable[tuple[Request, int]]) -> None:
        """Prefills the requests that failed one at a time from their beginning, as their states may be anything."""
        for request, epoch in failed:
            if _holds(request, epoch):
                request.prefilled_alone = True
                self._table.preempt(request)

    def _copied_states(self, request: Request) -> bool:
        """Copies the request's initial states before other requests of this turn overwrite them.

        Returns False on failure.
        """
        try:
            self._states.begin(request)
        except Exception as error:
            log.error("states of request %s were not copied", name_of(request), exc_info=error)
            self._device.check()
            if request.prefilled_alone:
                self._table.fail(request, error)
            else:
                request.prefilled_alone = True
                self._table.preempt(request)
            return False
        return True


def _holds(request: Request, epoch: int) -> bool:
    """Returns whether a request still has the pages that it had in this epoch."""
    return request.epoch == epoch
