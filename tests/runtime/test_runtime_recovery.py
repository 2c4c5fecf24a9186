"""A failed device call does not change the answers of other requests. The device is a table."""

import contextlib
from typing import Any

import pytest
from table_device import BLOCK, SIZE, TableDevice, drain, failing, request_of, scheduled, truth

from dflash_toolkit.generation import Step
from dflash_toolkit.runtime.pages import PagePool
from dflash_toolkit.runtime.prefill_job import PrefillLimits, ScoredTokens
from dflash_toolkit.runtime.recovery import MAX_CONSECUTIVE_FAULTS
from dflash_toolkit.runtime.request import Request


class DeviceGone(Exception):
    """The device has failed for good."""


def gone() -> None:
    raise DeviceGone


def errors_of(log: pytest.LogCaptureFixture) -> list[str]:
    """Returns the logged exceptions."""
    return [str(record.exc_info[1]) for record in log.records if record.exc_info]


def answered(*requests: Request) -> bool:
    return all(r.error is None and r.tokens == truth(r.prompt_ids, r.limit) for r in requests)


@pytest.mark.parametrize("block", [1, BLOCK])
@pytest.mark.parametrize("depth", [1, 2])
def test_results_after_an_unreadable_step_are_not_used(depth: int, block: int, caplog: Any) -> None:
    device, requests = TableDevice(depth), [request_of([10 + i] * 3, 60) for i in range(3)]
    scheduler = scheduled(device, *requests, block=block)
    while not all(len(request.tokens) > 2 for request in requests):
        scheduler.advance()
    failing(device, failures := ["read", "read"])  # also when it is tried again
    while not scheduler.idle:
        scheduler.advance()
        in_flight = [{r for r, _ in launch.requests} for launch in scheduler.table.launches if launch.block]
        for request in scheduler.running:
            assert len(request.blocks_in_flight) == sum(request in each for each in in_flight)
    assert not failures and answered(*requests) and set(errors_of(caplog)) == {"read fails once"}


def test_an_unreadable_first_token_ends_its_request_alone(caplog: Any) -> None:
    device, before, after = TableDevice(1), request_of([1] * 3, 20), request_of([2] * 3, 20)
    scheduler, real = scheduled(device, before), device.read
    while len(before.tokens) < 3:
        scheduler.advance()

    def read(pending: Any) -> Any:
        if scheduler.table.launches[0].block == 0:
            raise RuntimeError("no first token")
        return real(pending)

    device.read = read  # type: ignore[method-assign]
    scheduler.add(after)
    drain(scheduler)
    assert str(after.error) == "no first token" and after.tokens == [] and answered(before)
    assert {*errors_of(caplog)} == {"no first token"}


def test_requests_that_end_in_a_failed_step_are_released() -> None:
    device, requests = TableDevice(1), [request_of([10 + i] * 3, limit) for i, limit in enumerate((6, 6, 12))]
    scheduler = scheduled(device, *requests)
    while not all(len(request.tokens) > 2 for request in requests):
        scheduler.advance()
    failing(device, failures := ["remove"])
    drain(scheduler)
    pool = scheduler.table.pool
    assert not failures and answered(*requests) and pool.available == pool.capacity and pool.free_slots == 8


def test_a_request_that_fails_alone_is_logged(caplog: Any) -> None:
    device, requests = TableDevice(1), [request_of([10 + i] * 3, 12) for i in range(2)]
    scheduler = scheduled(device, *requests)
    while not all(len(request.tokens) > 2 for request in requests):
        scheduler.advance()
    failing(device, failures := ["decode", "decode"])
    drain(scheduler)
    assert not failures and str(requests[0].error) == "decode fails once" and answered(requests[1])
    assert errors_of(caplog) == ["decode fails once"] * 2


def test_lost_device_raises_after_the_last_reports() -> None:
    device, reported = TableDevice(1), dict[Request, list[int]]()
    requests = [request_of([10 + i] * 3, limit) for i, limit in enumerate((4, 12))]

    def report(request: Request, step: Step | None) -> None:
        reported.setdefault(request, []).extend(request.tokens if step is None else step.tokens)

    scheduler = scheduled(device, *requests, report=report)
    while len(requests[0].tokens) < 2:
        scheduler.advance()
    failing(device, ["remove"])
    device.check = gone  # type: ignore[method-assign]
    with pytest.raises(DeviceGone):
        drain(scheduler)
    assert requests[0].finished and [reported[request] for request in requests] == [r.tokens for r in requests]


def test_a_device_that_never_answers_is_given_up() -> None:
    """The limit counts consecutive faults without a result."""
    device = TableDevice(1)
    scheduler = scheduled(device)
    device.read = lambda pending: gone()  # type: ignore[method-assign]
    for i in range(MAX_CONSECUTIVE_FAULTS):
        scheduler.add(request := request_of([i], 5))
        drain(scheduler)
        assert isinstance(request.error, DeviceGone)
    scheduler.add(request_of([99], 5))
    with pytest.raises(DeviceGone):
        drain(scheduler)
    assert MAX_CONSECUTIVE_FAULTS == 8


def test_an_abandoned_scheduler_holds_no_request() -> None:
    """The failed device is not used."""
    device, running, started = TableDevice(1), request_of([1] * 3, 9), request_of([2] * 40, 9)
    scheduler = scheduled(device, running, max_num_seqs=2, max_num_batched_tokens=8)
    while not running.tokens:
        scheduler.advance()
    scheduler.add(started)
    scheduler.advance()
    scheduler.add(waiting := request_of([3] * 9, 9))
    assert scheduler.prefilling == [started] and waiting in scheduler.waiting and device.rows.keys() == {0}
    device.calls.clear()
    scheduler.abandon()
    assert scheduler.idle and running.row is None and not device.calls
    scheduler.remove_rows()
    assert not device.rows


def test_a_cancelled_row_that_cannot_be_removed_costs_nothing(caplog: Any) -> None:
    device, requests = TableDevice(1), [request_of([10 + i] * 3, 12) for i in range(3)]
    scheduler = scheduled(device, *requests)
    while not all(len(request.tokens) > 2 for request in requests):
        scheduler.advance()
    failing(device, failures := ["remove"])
    scheduler.cancel(requests[0])
    drain(scheduler)
    assert not failures and answered(*requests[1:]) and errors_of(caplog) == ["remove fails once"]


def test_the_first_error_of_a_report_is_raised_once() -> None:
    def report(request: Request, step: Step | None) -> None:
        if len(request.tokens) == 2:
            raise RuntimeError(f"report {request.prompt_ids[0]}")

    requests = [request_of([i] * 3, 9) for i in range(2)]
    scheduler, raised = scheduled(TableDevice(0), *requests, report=report), list[str]()
    while not scheduler.idle:
        try:
            scheduler.advance()
        except RuntimeError as error:
            raised.append(str(error))
    assert raised == ["report 0"] and answered(*requests)


def test_freed_pages_are_cleaned_after_errors_alone() -> None:
    device, requests, cleaned = TableDevice(1), [request_of([i] * 9, 3) for i in range(2)], list[bool]()
    device.clean = lambda pages: cleaned.append(requests[1].finished)  # type: ignore[method-assign]
    scheduler = scheduled(device, *requests)
    failing(device, ["prefill", "prefill"])
    drain(scheduler)
    assert requests[0].error and answered(requests[1]) and cleaned == [False]


def test_as_many_results_are_in_flight_as_the_device_has_room_for() -> None:
    scheduler = scheduled(TableDevice(2), request := request_of([1] * 3, 30))
    scheduler.advance()
    assert len(scheduler.table.launches) == 2 and not request.tokens


# ---- prompts -------------------------------------------------------------------------------------------


def batched(device: TableDevice, *requests: Request, **options: Any) -> Any:
    """Returns a scheduler that prefills these requests in one pass, as nine others decode."""
    device.prefill_limits = PrefillLimits(4, (4, 8), 16)
    others = [request_of([50 + i] * 9, 40) for i in range(9)]
    scheduler = scheduled(device, *others, **{"max_num_seqs": 29, "pool": 2000} | options)
    while len(scheduler.running) < 9:
        scheduler.advance()
    for request in requests:
        scheduler.add(request)
    return scheduler


def test_a_row_that_failed_to_start_is_free_again(caplog: Any) -> None:
    """The prompt was computed in a pass with others."""
    device, requests = TableDevice(1), [request_of([10 * i + k for k in range(3)], 3) for i in range(3)]
    scheduler, real, raised = batched(device, *requests), device.add, list[Request]()

    def add(row: int, request: Request, place: int = 0) -> Any:
        found = real(row, request, place)
        if request is requests[1] and not raised:
            raised.append(request)
            raise RuntimeError("after its work")
        return found

    device.add = add  # type: ignore[method-assign]
    drain(scheduler)
    assert raised and answered(*requests) and errors_of(caplog) == ["after its work"]


@pytest.mark.parametrize("alive", [True, False])
def test_a_failed_pass_checks_the_device(alive: bool, caplog: Any) -> None:
    device, requests = TableDevice(1), [request_of([10 * i + k for k in range(3)], 3) for i in range(3)]
    scheduler = batched(device, *requests)
    failing(device, ["prefill_batch"])
    if not alive:
        device.check = gone  # type: ignore[method-assign]
    with contextlib.nullcontext() if alive else pytest.raises(DeviceGone):
        drain(scheduler)
    assert errors_of(caplog)[0] == "prefill_batch fails once" and answered(*requests) == alive


def test_a_failed_prompt_is_logged_and_computed_again(caplog: Any) -> None:
    device, request = TableDevice(1), request_of([1, 2, 3], 4)
    failing(device, failures := ["prefill"])
    drain(scheduled(device, request))
    assert not failures and answered(request) and errors_of(caplog) == ["prefill fails once"]


def test_scheduler_turn_stays_within_its_token_budget() -> None:
    device = TableDevice(1)
    scheduler = scheduled(device, request_of([1] * 9, 2), request_of([2] * 9, 2), max_num_batched_tokens=16)
    scheduler.advance()
    assert device.called("prefill") == [(1, 0, 8), (1, 8, 1)], "seven tokens are left, and the next chunk has eight"


def test_the_last_row_goes_to_the_oldest_every_second_time() -> None:
    ended: list[int] = []
    long, *short = (request_of([i] * n, 1) for i, n in enumerate((40, 3, 3, 3, 3)))
    scheduler = scheduled(
        TableDevice(0), long, *short, max_num_seqs=1, report=lambda request, step: ended.append(request.prompt_ids[0])
    )
    drain(scheduler)
    assert ended == [1, 0, 2, 3, 4]


def test_scored_prompt_generates_the_requested_token_count(monkeypatch: pytest.MonkeyPatch) -> None:
    device, asked, request = TableDevice(1), list[ScoredTokens | None](), request_of([1, 2, 3], 2)
    real = device.prefill
    monkeypatch.setattr(device, "prefill", lambda job: asked.append(job.scores) or real(job))
    request.params = type(request.params)(max_tokens=2, prompt_logprobs=0)
    drain(scheduled(device, request))
    assert asked == [ScoredTokens([2, 3], 0)]


@pytest.mark.parametrize(
    ("recurrent", "scored", "cached"), [(False, False, True), (True, True, True), (True, False, False)]
)
def test_recurrent_states_are_copied_only_if_shared(recurrent: bool, scored: bool, cached: bool) -> None:
    """States after whole pages of a prompt are still copied, for the next request."""
    device, pool = TableDevice(0), PagePool(200, SIZE, range(40, 44))
    device.recurrent = recurrent
    scheduler = scheduled(device, pool=pool, prefix_cache=cached, recurrent=recurrent)
    for _ in range(2):
        request = request_of(list(range(11)), 3)
        if scored:
            request.params = type(request.params)(max_tokens=3, prompt_logprobs=0)
        scheduler.add(request)
        drain(scheduler)
    assert len(device.called("copy_states")) == (recurrent and cached) and not device.mistakes
    starts = [start for _, start, _ in device.called("prefill")]
    assert starts == {(False, False): [0, 8], (True, True): [0, 8, 0, 8], (True, False): [0, 0]}[recurrent, scored]
