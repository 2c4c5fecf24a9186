"""Maps requests to rows, pages and states, and tracks steps in flight. Handles tokens and pages, not tensors.

The device is asynchronous: a step is launched before the results of the previous one are read, so a request may run one
step past its end. The tokens of that step are dropped when they are read.
"""

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..generation import Step
from .device import Device
from .pages import PagePool
from .recurrent import RecurrentStates
from .request import Committed, NotFiniteError, Request, StepShape
from .wait_queue import WaitQueue

log = logging.getLogger(__name__)
MAX_OVERTAKEN = 16  # requests that may overtake one that finds too few pages, before all wait for it


def name_of(request: Request) -> str:
    """Returns the name of a request in logs."""
    return request.name or "without a name"


@dataclass(slots=True)
class Launch:
    """A step or a first token in flight."""

    pending: Any
    requests: list[tuple[Request, int]]  # with the epoch at launch
    block: int  # 0: a prefill's first token


class RequestTable:
    """Holds every unfinished request.

    Args:
        max_num_seqs: rows of the batch.
        max_places: maximum tokens after a request's length that a step writes. A tree has more nodes than the step
            commits.
        report: called for every request with new tokens or an error, with its step (None: the prefill, or an error).
        on_finish: called for every request that has finished without an error, before it gives its pages back.

    Attributes:
        running: requests that decode, by row.
        shape: shape of the newest step.
        faults: number of faults since a result was read.
        report_error: the first exception that `report` raised, if any.
    """

    def __init__(
        self,
        device: Device,
        pool: PagePool,
        states: RecurrentStates,
        *,
        max_num_seqs: int,
        max_places: int,
        prefix_cache: bool,
        report: Callable[[Request, Step | None], None],
        on_finish: Callable[[Request], None] = lambda request: None,
    ) -> None:
        self.queue = WaitQueue()
        self.running: list[Request] = []
        self.launches: deque[Launch] = deque()
        self.shape = StepShape(1)
        self.preemptions = self.faults = 0
        self.report_error: Exception | None = None
        self.device, self.pool, self.states = device, pool, states
        self.max_num_seqs, self._max_places, self._prefix_cache = max_num_seqs, max_places, prefix_cache
        self.report, self._on_finish = report, on_finish
        self._pending_reports: deque[tuple[Request, Step | None]] = deque()
        self._waiting_for_pages: list[Request] = []  # requests that were next and found too few pages

    @property
    def idle(self) -> bool:
        return not (self.queue or self.queue.started or self.running or self.launches)

    @property
    def free_rows(self) -> int:
        return self.max_num_seqs - len(self.running) - len(self.queue.started)

    def clear(self) -> None:
        """Discards all requests without using the device, which has failed."""
        for request in (*self.queue, *self.queue.started, *self.running):
            request.row = None
        self.queue = WaitQueue()
        self.running.clear()
        self.launches.clear()
        self._pending_reports.clear()
        self._waiting_for_pages.clear()

    # ---- admission -------------------------------------------------------------------------------------

    @property
    def blocking(self) -> Request | None:
        """The request that was overtaken so often, for lack of pages, that others must wait for it."""
        found = (r for r in self._waiting_for_pages if self.queue.entry(r).overtaken >= MAX_OVERTAKEN)
        return next(found, None)

    def admit(self, request: Request) -> bool:
        """Gives a waiting request its pages, if there are enough for its prompt and a step.

        At most MAX_OVERTAKEN other requests may overtake one that finds too few pages. More urgent ones always may.
        """
        if not self.free_rows:
            return False
        entry, first = self.queue.entry(request), self.blocking
        if first not in (None, request) and first.priority <= request.priority:
            return False
        if entry.failed_at == self.pool.changes:  # nothing has changed since; do not look up a long prefix again
            return False
        ids = request.known_ids
        # without a token yet, the last one of the prompt must be computed for its logits
        limit = len(ids) if request.tokens else len(ids) - 1
        hit, slot, parting = self.states.find_prefix(request, ids, limit)
        new = self.pool.allocate(self.pool.pages_for(len(ids) + self._max_places) - len(hit))
        if new is None:
            self.pool.unmatch(hit)
            entry.failed_at = self.pool.changes
            if request not in self._waiting_for_pages:
                self._waiting_for_pages.append(request)
            return False
        if request in self._waiting_for_pages:
            self._waiting_for_pages.remove(request)
        for other in map(self.queue.entry, self._waiting_for_pages):
            other.overtaken += other.order < entry.order
        entry.overtaken = 0
        self.queue.start(request)
        request.pages, request.prefilled = hit + new, len(hit) * self.pool.page_size
        self.states.assign(request, slot, parting, limit)
        if not request.epoch:  # after a preemption, the prefix may be its own
            request.cached_tokens = request.prefilled
        return True

    def begin_answer(self, request: Request, ids: list[int], place: int) -> None:
        """Moves a prefilled request to the batch; `ids` are in its pages, see `Device.add` for `place`."""
        pending = self.device.add(len(self.running), request, place)
        if self._prefix_cache:
            self.pool.publish(ids, request.pages, request.cache_salt)
        self.queue.remove(request)
        request.row = len(self.running)
        self.running.append(request)
        if pending is not None:
            self.launches.append(Launch(pending, [(request, request.epoch)], 0))

    # ---- launch ----------------------------------------------------------------------------------------

    def launch(self, shape: StepShape) -> bool:
        """Launches a step of the running requests; returns False if none of them found enough pages."""
        self.shape = shape
        for request in list(self.running):
            if request.row is not None:  # it was not preempted for an earlier one
                self._reserve(request, self._max_places if shape.rows else shape.block)
        if not self.running:
            return False
        self.states.snapshot(self.running)  # before the next step changes the states that are read last
        pending = self.device.decode(self.running, shape)
        self.launches.append(Launch(pending, [(r, r.epoch) for r in self.running], shape.block))
        for request in self.running:
            request.blocks_in_flight.append(shape.block)
        self.states.snapshot(self.running)
        return True

    def _reserve(self, request: Request, places: int) -> None:
        """Reserves the pages of one more step. If there are too few, preempts the newest request, perhaps this one."""
        missing = self.pool.pages_for(request.reach + places) - len(request.pages)
        while missing > 0:
            # some in advance, so that the page table does not change every step
            ahead = min(missing + 3, self.device.pages_per_request - len(request.pages))
            new = self.pool.allocate(ahead) or self.pool.allocate(missing)
            if new is not None:
                request.pages += new
                assert request.row is not None
                self.device.set_pages(request.row, request.pages)
                return
            holders = [*self.running, *self.queue.started]
            victim = max(holders, key=lambda holder: (holder.priority, self.queue.entry(holder).order))
            self.preempt(victim)
            if victim is request:
                return

    def preempt(self, request: Request) -> None:
        """Frees a request's pages and queues it again; it continues after its known tokens when there is room."""
        try:
            self.release(request)
        finally:
            self.queue.add(request)
            self.preemptions += 1

    # ---- read ------------------------------------------------------------------------------------------

    def read(self) -> bool:
        """Reads the oldest result; returns whether any request got tokens or ended."""
        self.flush_reports()  # reports of a read that failed: a report must describe the newest step
        if not self.launches:  # a report has cancelled requests, and the cancellation failed
            return False
        found = self.device.read(self.launches[0].pending)
        launch = self.launches.popleft()
        leaving, got = [], False
        for (request, epoch), committed in zip(launch.requests, found, strict=True):
            if request.epoch != epoch or request.finished:
                continue  # cancelled, preempted or finished since
            request.poisoned |= committed.poisons
            if committed.finite:
                request.retried = False
                step = self._commit(request, launch.block, committed)
                if launch.block:
                    self.states.keep_snapshot(request)
                self.queue.charge(request, answer=len(committed.tokens))
            else:
                step = None
                request.epoch += 1  # later results are void
                request.error = NotFiniteError() if request.retried else None
                log.error("NaN or infinity was computed for request %s", name_of(request))
            got = True
            if request.finished or not committed.finite:
                leaving.append(request)
            if committed.finite or request.error:
                self._pending_reports.append((request, step))
        # from the last row down: the row that moves up belongs to a request that stays
        for request in sorted(leaving, key=lambda request: request.row or 0, reverse=True):
            if request.finished:
                if request.error is None:
                    self._on_finish(request)
                self.release(request)
            else:
                request.retried = True
                self.preempt(request)
        self.flush_reports()
        self.faults = 0
        return got

    def flush_reports(self) -> None:
        """Reports new tokens and errors. Keeps the exception of a report until the turn is complete."""
        while self._pending_reports:
            request, step = self._pending_reports.popleft()
            try:
                if not request.cancelled:
                    self.report(request, step)
            except Exception as error:
                self.report_error = self.report_error or error

    def _commit(self, request: Request, block: int, committed: Committed) -> Step | None:
        try:
            if block == 0:
                request.add_first(committed)
                return None
            request.blocks_in_flight.pop(0)
            return request.add_step(block, committed)
        except Exception as error:
            log.error("the answer of request %s cannot continue", name_of(request), exc_info=error)
            request.error, request.poisoned = error, True
            return None

    # ---- release ---------------------------------------------------------------------------------------

    def release(self, request: Request) -> None:
        """Frees a request's row, pages and states, and its queue entry if it has ended. Voids its steps in flight."""
        written = request.length if request.row is not None else request.prefilled
        ended = request.finished or request.cancelled
        self.queue.remove(request, ended=ended)
        if ended and request in self._waiting_for_pages:
            self._waiting_for_pages.remove(request)
        poisoned, row, pages = request.poisoned, request.row, request.pages
        self.states.release(request)
        request.pages, request.prefilled, request.row, request.poisoned = [], 0, None, False
        request.scored = []
        request.blocks_in_flight.clear()
        request.epoch += 1
        if poisoned:
            self.pool.drop_states(request.prompt_ids + request.tokens, request.cache_salt)
            self.pool.discard(pages)
        elif self._prefix_cache and pages:
            self.pool.publish((request.prompt_ids + request.tokens)[:written], pages, request.cache_salt)
        free = self.pool.release(pages)
        # the device comes last: if it raises, everything before is done
        if row is not None:
            moved = self.running.pop()
            if moved is not request:
                self.running[row], moved.row = moved, row
                self.device.move(len(self.running), row)
            self.device.remove(len(self.running))
        if poisoned and free:
            self.device.clean(free)

    def fail(self, request: Request, error: Exception) -> None:
        """Ends a request with an error; other requests must not use its pages."""
        request.error, request.poisoned = error, True
        self._pending_reports.append((request, None))
        self.release(request)
        self.flush_reports()

    def clear_rows(self) -> None:
        """Frees all rows on the device, also after a failure: a row writes to pages that other requests may hold."""
        for row in range(self.max_num_seqs):
            self.device.remove(row)
