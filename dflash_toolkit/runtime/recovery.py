"""Recovers from a failed step: retries its requests one at a time, and ends one that fails again with the error."""

import logging

from .request import Request
from .request_table import RequestTable, name_of

log = logging.getLogger(__name__)
MAX_CONSECUTIVE_FAULTS = 8  # faults without a result in between; one more ends all requests


class Recovery:
    """Finds the request that made a step fail.

    Args:
        chunk: tokens of a prompt's chunk, for rebuilding recurrent states.
    """

    def __init__(self, table: RequestTable, chunk: int) -> None:
        self._table, self._device, self._chunk = table, table.device, chunk

    def recover(self, error: Exception) -> None:
        """Continues without the request that made a step fail.

        Raises:
            Exception: the error, if the device has failed for good or there were too many faults.
        """
        log.error("a step failed; its requests are computed one by one", exc_info=error)
        table = self._table
        table.flush_reports()
        self._device.check()
        table.faults += 1
        if table.faults > MAX_CONSECUTIVE_FAULTS:
            raise error
        for request in table.running:
            table.states.drop_snapshot(request)
        self._read_launches()
        running, table.running = table.running, []
        table.clear_rows()
        for request in running:
            request.row = None
            request.epoch += 1
            request.blocks_in_flight.clear()
        sound = [request for request in running if self._succeeds_alone(request)]
        for request in sound:
            if request not in table.queue:
                continue
            if table.states.recurrent:  # its states are those after the step it made alone, or within that step
                table.preempt(request)
                continue
            request.row = len(table.running)
            table.running.append(request)
            self._device.add(request.row, request)
        table.flush_reports()

    def _read_launches(self) -> None:
        """Reads the results in flight. After a step that cannot be read, the results of later steps are unknown."""
        table, lost = self._table, False
        while table.launches:
            launch = table.launches[0]
            if not (lost and launch.block):
                try:
                    table.read()
                    continue
                except Exception as error:
                    log.error("a result could not be read", exc_info=error)
                    lost = lost or launch.block > 0
                    request, epoch = launch.requests[0]
                    if launch.block == 0 and request.epoch == epoch:
                        table.fail(request, error)
            if table.launches and table.launches[0] is launch:
                table.launches.popleft()

    def _succeeds_alone(self, request: Request) -> bool:
        """Runs a step of one request, which ends if the step fails. Returns whether it continues in the batch."""
        table = self._table
        if request not in table.queue:  # a report of another result has cancelled it
            return False
        if request.finished or request.cancelled:
            table.release(request)
            return False
        if not request.tokens:
            table.preempt(request)
            return False
        try:
            self._step_alone(request)
        except Exception as error:
            log.error("request %s failed alone", name_of(request), exc_info=error)
            self._device.check()
            table.launches.clear()
            if request in table.queue:
                table.fail(request, error)
            else:  # it has ended, and only its row is left
                self._device.remove(0)
        sound = request.row is not None
        if sound:
            self._device.remove(0)
            request.row = None
        table.running = []
        return sound

    def _step_alone(self, request: Request) -> None:
        table = self._table
        request.row, table.running = 0, [request]
        table.states.rebuild(request, request.length, self._chunk)
        self._device.add(0, request)
        table.launch(table.shape)
        while table.launches:
            table.read()
