"""Runs the engine's requests in turns: chunks of prompts, one decoding step for the whole batch, and results.

One `advance` computes prompts up to a number of tokens and a time (`prompts.py`, in the order of `wait_queue.py`),
launches one step, and reads results that are old enough (`request_table.py`). `recovery.py` handles a step that fails.
This module does not handle tensors.
"""

import math
from collections.abc import Callable, Sequence

from ..generation import Step
from .device import Device as Device
from .pages import PagePool
from .prompts import Prompts, chunk_size
from .recovery import Recovery
from .recurrent import RecurrentStates
from .request import Request, StepShape
from .request_table import RequestTable
from .wait_queue import WaitQueue

SHARE = 0.7  # share of a step that one prompt takes between two steps
LONGEST_S = 0.2  # most time that several prompts take between two steps, unless a step takes longer


class Scheduler:
    """Holds every unfinished request.

    Args:
        choose_shape: picks the shape of a batch's next step.
        max_num_seqs: rows of the batch.
        max_num_batched_tokens: maximum prompt tokens of a pass and between two steps, in chunks of `chunk_size`.
        max_block: the longest block that `choose_shape` returns.
        max_places: maximum tokens after a request's length that a step writes; 0: the size of its block.
        recurrent: requests have states in addition to pages, and continue from states that the pool keeps.
        report: called for every request with new tokens or an error, with its step (None: the prefill, or an error).
        on_finish: see `RequestTable`.
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
        prefix_cache: bool,
        recurrent: bool = False,
        report: Callable[[Request, Step | None], None] = lambda request, step: None,
        on_finish: Callable[[Request], None] = lambda request: None,
    ) -> None:
        self.choose_shape, self._device = choose_shape, device
        states = RecurrentStates(device, pool, max_num_seqs, recurrent=recurrent, prefix_cache=prefix_cache)
        self.table = RequestTable(
            device,
            pool,
            states,
            max_num_seqs=max_num_seqs,
            max_places=max(max_block, max_places),
            prefix_cache=prefix_cache,
            report=report,
            on_finish=on_finish,
        )
        self._prompts = Prompts(self.table, max_num_batched_tokens, prefix_cache)
        self._prompts_together = 0  # most prompts that waited at the same time, since none waited
        self._recovery = Recovery(self.table, chunk_size(max_num_batched_tokens))

    @property
    def idle(self) -> bool:
        return self.table.idle

    @property
    def waiting(self) -> WaitQueue:
        return self.table.queue

    @property
    def prefilling(self) -> list[Request]:
        """Requests with partly computed prompts; they hold pages."""
        return self.table.queue.started

    @property
    def running(self) -> list[Request]:
        """Requests that decode, by row."""
        return self.table.running

    @property
    def preemptions(self) -> int:
        return self.table.preemptions

    def add(self, request: Request) -> None:
        """Queues a request."""
        self.table.queue.add(request)

    def cancel(self, request: Request) -> None:
        """Discards a request; its row and pages are free at once."""
        if request.cancelled or request.finished:
            return
        request.cancelled = True
        if request not in self.table.queue:  # it was never queued
            return
        try:
            self.table.release(request)
            self._prompts.release()
        except Exception as error:
            self._recovery.recover(error)

    def abandon(self) -> None:
        """Discards all requests without using the device, which has failed."""
        self.table.clear()
        self._prompts.abandon()

    def remove_rows(self) -> None:
        """Frees all rows on the device, also after a failure: a row writes to pages that other requests may hold."""
        self.table.clear_rows()

    def advance(self) -> None:
        """Runs one turn. Raises the error of a device that has failed for good, and the exception of a report."""
        try:
            self._run_turn()
        except Exception as error:
            self._recovery.recover(error)
        if (raised := self.table.report_error) is not None:
            self.table.report_error = None
            raise raised

    def _run_turn(self) -> None:
        table = self.table
        self._prompts.run(self._prompt_seconds())
        # the tokens that a grammar allows depend on the committed ones
        depth = 0 if any(request.matcher for request in table.running) else self._device.depth
        while table.launches and not depth:  # a turn that waits for steps also waits for first tokens
            table.read()
        decoding = False
        if not all(request.surely_ends for request in table.running):
            decoding = table.launch(self.choose_shape(table.running))
        else:
            table.states.snapshot(table.running)
        # results are read late, but not later than the next result of requests that wait for nothing else
        while table.launches and (len(table.launches) > depth or not decoding):
            decoding |= table.read()

    def _prompt_seconds(self) -> float:
        """Returns the time that prompts may take until the next step.

        Less than a step for one prompt, so that the time between two tokens of the requests that decode is at most
        about twice as long as without it. More for several prompts, also for the last of them, as requests that were
        sent together should decode together; up to LONGEST_S.
        """
        table, share = self.table, SHARE * self._device.step_s
        prompts = len(table.queue.started) + min(len(table.queue), table.free_rows)
        self._prompts_together = max(self._prompts_together, prompts) if prompts else 0
        if not share or all(request.surely_ends for request in table.running):
            return math.inf
        return max(share, min(share * self._prompts_together**2, LONGEST_S))
