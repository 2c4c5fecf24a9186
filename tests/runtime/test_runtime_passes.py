"""Passes of prompts that take several turns. The device is a table."""

import math

import pytest
from table_device import SIZE, TableDevice, drain, request_of, scheduled, truth

from dflash_toolkit.runtime.pages import PagePool
from dflash_toolkit.runtime.prefill_job import PrefillLimits
from dflash_toolkit.runtime.request import Request
from dflash_toolkit.runtime.scheduler import LONGEST_S, SHARE, Scheduler

SLICES = 10


class SlicedDevice(TableDevice):
    """Every pass has SLICES slices, each longer than a step."""

    step_s = 0.01

    def slices(self) -> int:
        return SLICES

    @property
    def seconds(self) -> list[float]:
        """The time that each run of slices was given."""
        return [seconds for (_, seconds) in self.called("slices")]

    def between_steps(self) -> list[int]:
        """Returns the slices before each step that follows a slice."""
        found, count = list[int](), 0
        for name, *rest in self.calls:
            count += rest[0] if name == "slices" else 0
            if name == "decode" and count:
                found.append(count)
                count = 0
        return found


def busy(device: TableDevice, running: int = 1, **options: object) -> Scheduler:
    """Returns a scheduler in which requests decode."""
    others = [request_of([50 + i] * 3, 60) for i in range(running)]
    scheduler = scheduled(device, *others, **({"max_num_seqs": 20, "pool": 2000} | options))
    while len(scheduler.running) < running:
        scheduler.advance()
    device.calls.clear()
    return scheduler


def answered(*requests: Request) -> bool:
    return all(request.tokens == truth(request.prompt_ids, request.limit) for request in requests)


def test_one_prompt_takes_less_time_than_the_steps_between_its_slices() -> None:
    """The time between two tokens is at most twice as long as without it."""
    device = SlicedDevice()
    scheduler, prompt = busy(device), request_of(list(range(20)), 3)
    scheduler.add(prompt)
    drain(scheduler)
    assert device.seconds[0] < device.step_s and len(device.seconds) == SLICES and answered(prompt)
    assert device.between_steps() == [1] * SLICES


@pytest.mark.parametrize(("prompts", "seconds"), [(2, 0.04 * SHARE), (3, 0.09 * SHARE), (6, LONGEST_S)])
def test_waiting_prompts_take_more_time_up_to_a_limit(prompts: int, seconds: float) -> None:
    device = SlicedDevice()
    scheduler = busy(device)
    for i in range(prompts):
        scheduler.add(request_of([i] * 20, 9))
    scheduler.advance()
    assert device.seconds == [pytest.approx(seconds)]


def test_the_last_of_several_prompts_takes_as_much_time_as_they_did() -> None:
    """Requests that were sent together decode together; a later prompt is alone again."""
    device = SlicedDevice()
    scheduler = busy(device)
    for i in range(3):
        scheduler.add(request_of([i] * 20, 9))
    while scheduler.prefilling or scheduler.waiting:
        scheduler.advance()
    assert device.seconds == pytest.approx([0.09 * SHARE] * 3 * SLICES)
    device.calls.clear()
    scheduler.advance()
    scheduler.add(request_of([7] * 20, 9))
    scheduler.advance()
    assert device.seconds == [pytest.approx(0.01 * SHARE)]


def test_the_next_chunk_does_not_start_if_no_time_is_left() -> None:
    """Otherwise its first slice would delay the step."""
    device = SlicedDevice()
    device.step_s = 1.5 / SHARE  # time for one slice of a second, and half of another
    device.slices = lambda: 1  # type: ignore[method-assign]
    scheduler, prompt = busy(device, max_num_batched_tokens=8), request_of(list(range(20)), 3)
    scheduler.add(prompt)
    drain(scheduler)
    assert device.between_steps() == [1] * 5 and answered(prompt)


def test_prompts_take_as_long_as_a_slow_step() -> None:
    device = SlicedDevice()
    device.step_s = 10.0
    scheduler = busy(device)
    for i in range(2):
        scheduler.add(request_of([i] * 20, 9))
    scheduler.advance()
    assert device.seconds[0] == 10.0 * SHARE


def test_a_prompt_is_computed_at_once_if_no_request_decodes() -> None:
    device = SlicedDevice()
    scheduler = scheduled(device, request_of(list(range(20)), 1))
    scheduler.advance()
    assert device.called("slices") == [(SLICES, math.inf)]


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("packed", [0, 64])
def test_pages_of_a_request_cancelled_in_a_pass_can_be_used(packed: int, cached: bool) -> None:
    """The rest of the pass writes to the null block."""
    device, pool = SlicedDevice(), PagePool(100, SIZE)
    device.prefill_limits = PrefillLimits(packed=packed)
    scheduler = busy(device, 9, pool=pool, prefix_cache=cached, max_num_batched_tokens=100)
    cancelled, other = (request_of([i, *range(20)], 5) for i in range(2))
    scheduler.add(cancelled)
    scheduler.add(other)
    scheduler.advance()
    assert cancelled.pages and not cancelled.tokens
    freed = {*cancelled.pages}
    scheduler.cancel(cancelled)
    taken = request_of([7] * 21, 5)
    scheduler.add(taken)
    held = set[int]()
    while not taken.finished:
        scheduler.advance()
        held |= {page for request in (taken, *scheduler.running) for page in request.pages}
    assert freed & held and device.called("drop") == ([(0,)] if packed else [])
    drain(scheduler)
    pool.check()
    assert answered(taken, other) and pool.available == pool.capacity


def test_a_pass_of_cancelled_requests_is_not_continued() -> None:
    device = SlicedDevice()
    scheduler, prompt = busy(device), request_of(list(range(20)), 3)
    scheduler.add(prompt)
    scheduler.advance()
    scheduler.cancel(prompt)
    assert scheduler._prompts._pass is None, "its memory is free"
    drain(scheduler)
    assert len(device.seconds) == 1 and device.called("prefill") == []


def test_an_abandoned_scheduler_has_no_pass() -> None:
    device = SlicedDevice()
    scheduler = busy(device)
    scheduler.add(request_of(list(range(20)), 3))
    scheduler.advance()
    scheduler.abandon()
    device.calls.clear()
    device.rows.clear()
    after = request_of([1, 2], 3)
    scheduler.add(after)
    drain(scheduler)
    assert device.called("prefill") == [(1, 0, 2)] and answered(after)
