"""No order of events loses a page or a token. The device is a table."""

import contextlib
import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from faulty_device import IN_DECODE, IN_PREFILL, NAN, FaultyDevice
from hypothesis import given, settings
from hypothesis import strategies as st
from table_device import (
    BLOCK,
    PLACES,
    SHAPES,
    SIZE,
    TREES,
    TableDevice,
    TablePass,
    drain,
    failing,
    request_of,
    scheduled,
    truth,
)

from dflash_toolkit.generation import Step
from dflash_toolkit.runtime import prompts as module
from dflash_toolkit.runtime.pages import PagePool
from dflash_toolkit.runtime.prefill_job import PrefillJob, PrefillLimits
from dflash_toolkit.runtime.request import NotFiniteError, Request
from dflash_toolkit.runtime.scheduler import Scheduler
from dflash_toolkit.runtime.wait_queue import WaitQueue


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.integers(1, 16), st.booleans())
def test_chunks_of_a_prompt_do_not_depend_on_other_requests(lengths: list[int], chunk: int, prefix_cache: bool) -> None:
    """Products of other sizes round differently: an answer would depend on other requests."""

    def cuts(prompts: list[list[int]]) -> list[tuple[int, int, int]]:
        device = TableDevice()
        requests = [request_of(prompt, 2) for prompt in prompts]
        drain(scheduled(device, *requests, block=BLOCK, max_num_batched_tokens=chunk, prefix_cache=prefix_cache))
        return sorted(device.called("prefill"))

    prompts = [[1000 * i + k for k in range(n)] for i, n in enumerate(lengths)]  # nothing in common
    cut = max(chunk // 2, 1)
    each = [[(p[start], start, len(p[start:][:cut])) for start in range(0, len(p), cut)] for p in prompts]
    assert [cuts([prompt]) for prompt in prompts] == each and cuts(prompts) == [cut for cuts in each for cut in cuts]


@pytest.mark.slow
@pytest.mark.parametrize("recurrent", [False, True])
@pytest.mark.parametrize("depth", [0, 1, 2])
@settings(max_examples=8, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 5), st.integers(30, 90))
@pytest.mark.sampled
def test_random_events_lose_no_page_no_token_and_no_state(
    depth: int, recurrent: bool, seed: int, max_num_seqs: int, pages: int
) -> None:
    check_events(depth, recurrent, seed, max_num_seqs, pages)


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("recurrent", [False, True])
@pytest.mark.slow
def test_random_events_preempt_cancel_share_and_fail(
    recurrent: bool, batched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes, drops, real, drop = list[int](), list[int](), TableDevice.prefill_batch, TablePass.drop

    def counted(device: TableDevice, chunks: Sequence[PrefillJob]) -> None:
        passes.append(len(chunks))
        real(device, chunks)

    monkeypatch.setattr(TableDevice, "prefill_batch", counted)
    monkeypatch.setattr(TablePass, "drop", lambda work, index: (drops.append(index), drop(work, index)))
    if batched:
        monkeypatch.setattr(module, "EXACT_BATCH", 0)
        monkeypatch.setattr(TableDevice, "prefill_limits", PrefillLimits(3, (1, 2, 3), 6, packed=7))
    counts = [check_events(1, recurrent, seed, 5, 30) for seed in range(12 if batched else 4)]
    assert all(sum(kind) > 0 for kind in zip(*counts, strict=True)), counts
    assert len(passes) > 100 and len(drops) > 5 if batched else not passes + drops


def check_events(depth: int, recurrent: bool, seed: int, max_num_seqs: int, pages: int) -> tuple[int, ...]:
    """Runs 300 random events, and more from reports. Returns counts: preempted, cancelled, and finished
    requests with a cached prefix; faults, NaN by chance, and requests that ended with each kind of error."""
    dice = random.Random(seed)
    slots = range(1 + max_num_seqs, 1 + max_num_seqs + dice.choice([1, 3, 9]))
    pool = PagePool(pages, SIZE, slots)
    done: list[Request] = []
    reported: dict[Request, list[int]] = {}

    def report(request: Request, step: Step | None) -> None:
        if request.error is None:
            reported.setdefault(request, []).extend(request.tokens if step is None else step.tokens)
            assert reported[request] == request.tokens, "reported once, as it comes"
        if request.finished:
            done.append(request)
        if dice.random() < 0.05:
            give_up()
        if len(alive) < 80 and dice.random() < 0.05:
            ask()

    def ask() -> None:
        begun = shared[: dice.randrange(1, 40)]
        answered = [request for request in done if request.error is None]
        if answered and dice.random() < 0.3:  # the next turn of a conversation, perhaps without the end of its answer
            last = dice.choice(answered)
            begun = (last.prompt_ids + last.tokens)[: len(last.prompt_ids) + dice.randrange(30)]
        prompt = begun + [dice.randrange(97) for _ in range(dice.randrange(3))]
        if dice.random() < 0.15:
            prompt.insert(dice.randrange(len(prompt)), dice.choice([IN_PREFILL, IN_DECODE, NAN]))
        count = dice.randrange(2, 30)
        request = request_of(prompt, count)
        request.params = replace(request.params, prompt_logprobs=dice.choice([None, 0]))
        request.key, request.group, request.priority = (dice.choice(n) for n in (("", "a"), ("", "b"), (0, 0, 1)))
        request.cache_salt = dice.choice(("", "", "", "a"))
        if pool.pages_for(len(prompt) + count + depth * BLOCK + max(places, BLOCK)) <= pool.capacity:
            scheduler.add(request)
            alive.append(request)

    def give_up() -> None:
        nonlocal cancelled
        request = dice.choice(alive)
        cancelled += not request.finished and not request.cancelled
        scheduler.cancel(request)

    device = FaultyDevice(depth, dice)
    device.recurrent = recurrent
    places = 0 if recurrent else dice.choice([0, PLACES])
    shapes = SHAPES + TREES if places else SHAPES
    scheduler = scheduled(
        device,
        pool=pool,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=7,
        max_places=places,
        prefix_cache=dice.random() < 0.8,
        recurrent=recurrent,
        report=report,
    )
    scheduler.choose_shape = lambda requests: dice.choice(shapes)
    check_salts(scheduler, pool)
    shared = [dice.randrange(97) for _ in range(40)]
    alive: list[Request] = []
    cancelled = 0
    for event in range(300):
        action = dice.random()
        if action < 0.25 and event < 250:
            ask()
        elif action < 0.3 and alive:
            give_up()
        else:
            scheduler.advance()
        pool.check()
    drain(scheduler)
    pool.check()
    assert pool.available == pool.capacity
    assert sorted([*pool._free_states, *pool._states]) == list(range(1, slots.stop)) and not device.mistakes
    assert not scheduler.waiting._keys and not any(request in scheduler.waiting for request in alive), (
        "the line is empty"
    )
    assert len(done) == len(set(done)) == len(alive) - cancelled
    failed = [0, 0, 0]
    for request in done:
        if wrong := {*request.prompt_ids} & {IN_PREFILL, IN_DECODE, NAN}:
            failed[wrong.pop() - IN_PREFILL] += 1
            assert isinstance(request.error, NotFiniteError) if NAN in request.prompt_ids else request.error
            continue
        assert request.error is None
        assert request.tokens == truth(request.prompt_ids, request.limit)
        assert sum(len(step.tokens) for step in request.generation.steps) == request.limit - 1
        scored = None if request.params.prompt_logprobs is None else list(enumerate(request.prompt_ids))[1:]
        assert request.generation.prompt_logprobs == scored
    cached = sum(request.cached_tokens > 0 for request in done)
    return scheduler.preemptions, cancelled, cached, device.faults, len(device.struck), *failed


def check_salts(scheduler: Scheduler, pool: PagePool) -> None:
    """Checks that requests with different salts never hold the same page, until it is allocated again."""
    salts: dict[int, str] = {}
    allocate, assign, release = pool.allocate, scheduler.table.states.assign, scheduler.table.release

    def check(request: Request) -> None:
        assert all(salts.setdefault(page, request.cache_salt) == request.cache_salt for page in request.pages)

    def allocating(count: int) -> list[int] | None:
        pages = allocate(count)
        for page in pages or ():
            salts.pop(page, None)
        return pages

    def assigning(request: Request, *more: int) -> None:
        check(request)
        assign(request, *more)

    def releasing(request: Request) -> None:
        check(request)
        release(request)

    pool.allocate = allocating  # type: ignore[method-assign]
    scheduler.table.states.assign = assigning  # type: ignore[method-assign]
    scheduler.table.release = releasing  # type: ignore[method-assign]


PREFILL_LIMITS = PrefillLimits(4, (4, 8), 16)


def in_one_pass(*requests: Request, running: int = 9, device: TableDevice | None = None, **options: Any) -> TableDevice:
    """Returns the calls of a device that prefills these requests while others decode."""
    device = device or TableDevice()
    device.prefill_limits = PREFILL_LIMITS
    others = [request_of([50 + i] * 9, 40) for i in range(running)]
    scheduler = scheduled(device, *others, **{"max_num_seqs": running + 20, "pool": 2000} | options)
    while len(scheduler.running) < running:
        scheduler.advance()
    device.calls.clear()
    for request in requests:
        scheduler.add(request)
    scheduler.advance()
    drain(scheduler)
    for request in requests:
        assert request.tokens == truth(request.prompt_ids, request.limit)
    return device


def test_short_prompts_of_large_batches_share_a_pass() -> None:
    def short(*lengths: int) -> list[Request]:
        return [request_of([10 * i + k for k in range(n)], 3) for i, n in enumerate(lengths)]

    assert in_one_pass(*short(3, 4, 2)).called("prefill_batch") == [(2, 3, 4)], "the shortest comes first"
    assert in_one_pass(*short(3, 4, 2)).called("prefill") == []
    assert in_one_pass(*short(3, 4, 2, 1, 3)).called("prefill_batch") == [(1, 2, 3, 3)], "four at most"
    assert in_one_pass(*short(3, 7, 2)).called("prefill_batch") == [(2, 3)], "padded rows count: 3 of 8 are too many"
    assert in_one_pass(*short(3, 30, 2)).called("prefill_batch") == [(2, 3)], "what is long is computed alone"
    few = in_one_pass(*short(3, 4, 2), running=5)
    assert few.called("prefill_batch") == [] and len(few.called("prefill")) == 3, "bits of lone answers"
    scored = short(3, 4)
    scored[0].params = replace(scored[0].params, prompt_logprobs=0)
    assert in_one_pass(*scored).called("prefill_batch") == []


def test_prompts_of_up_to_eight_requests_are_never_batched() -> None:
    """The documents promise equal bits for up to eight requests; batched prefills round differently."""

    def prompts() -> list[Request]:
        return [request_of([10 * i + k for k in range(3)], 3) for i in range(2)]

    assert in_one_pass(*prompts(), running=6).called("prefill_batch") == []
    assert in_one_pass(*prompts(), running=7).called("prefill_batch") == [(3, 3)]


def test_a_common_prefix_is_computed_once() -> None:
    common = [request_of([1, 2, 3, 4, 5, 6 + i], 3) for i in range(3)]
    different = [request_of([1 + i, 2, 3, 4, 5, 6], 3) for i in range(2)]
    assert in_one_pass(*common, prefix_cache=True).called("prefill_batch") == [(2, 2)], (
        "the two requests that found the prefix"
    )
    assert [request.cached_tokens for request in common] == [0, 4, 4]
    assert in_one_pass(*different, prefix_cache=True).called("prefill_batch") == [(6, 6)]
    whole, more = request_of([1, 2, 3, 4], 3), request_of([1, 2, 3, 4, 5], 3)
    assert in_one_pass(whole, more, prefix_cache=True).called("prefill_batch") == [] and more.cached_tokens == 4
    salted = [request_of([1, 2, 3, 4, 5, 6], 3) for _ in range(2)]
    salted[1].cache_salt = "a"
    assert in_one_pass(*salted, prefix_cache=True).called("prefill_batch") == [(6, 6)]


def test_requests_of_a_failed_pass_are_prefilled_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other requests do not change, and no key is charged for it."""
    failed, charged, real = list[int](), list[int](), WaitQueue.charge

    def fails(device: TableDevice, chunks: Sequence[PrefillJob]) -> None:
        failed.append(len(chunks))
        raise RuntimeError("a pass of its own")

    def charge(line: WaitQueue, request: Request, prompt: int = 0, answer: int = 0) -> None:
        charged.append(prompt)
        real(line, request, prompt, answer)

    monkeypatch.setattr(TableDevice, "prefill_batch", fails)
    monkeypatch.setattr(WaitQueue, "charge", charge)
    requests = [request_of([i] * 3, 3) for i in range(3)]
    device = in_one_pass(*requests)
    assert failed == [3] and len(device.called("prefill")) == 3
    assert sum(charged) == 9 * 9 + 3 * 3, "decoding requests, and each of the three once"
    assert {requests for requests, *_ in device.called("decode")} <= {9, 12}, "no step without the others"


def test_the_rest_of_a_batched_prompt_runs_in_the_same_turn() -> None:
    device = TableDevice()
    device.recurrent = True
    requests = [request_of([10 * i + k for k in range(6)], 3) for i in range(3)]
    in_one_pass(*requests, device=device, pool=PagePool(2000, SIZE, range(40, 80)), prefix_cache=True, recurrent=True)
    chunks = device.called("prefill_batch")
    assert chunks == [(4, 4, 4), (2, 2, 2)], "cut where its states are kept"
    first = [call[0] for call in device.calls].index("decode")
    assert sum(sum(call[1:]) for call in device.calls[:first] if call[0] == "prefill_batch") == 18
    assert not device.mistakes


def test_a_request_cancelled_by_a_first_token_gets_no_row() -> None:
    """If the scheduler waits for results, they arrive while prompts are still chosen."""
    device, waiting = TableDevice(0), [request_of([20 + i] * 3, 9) for i in range(12)]
    device.prefill_limits = PREFILL_LIMITS

    def report(request: Request, step: Step | None) -> None:
        for other in waiting[3:]:
            scheduler.cancel(other)

    scheduler = scheduled(device, max_num_seqs=12, pool=2000, report=report)
    for request in waiting:
        scheduler.add(request)
    drain(scheduler)
    assert [request.tokens for request in waiting] == [truth(r.prompt_ids, 9) for r in waiting[:3]] + 9 * [[]]
    assert device.called("prefill_batch") == [(3, 3, 3, 3)] and device.called("prefill") == []
    assert scheduler.preemptions == 0


def test_a_first_token_may_cancel_the_guaranteed_request(caplog: pytest.LogCaptureFixture) -> None:
    device, begun = TableDevice(0), request_of([1] * 9, 30)
    due, short = request_of([2] * 30, 9), request_of([3] * 3, 9)
    begun.key = due.key = "theirs"
    scheduler = scheduled(
        device, begun, report=lambda request, step: scheduler.cancel(due) if request is short else None
    )
    scheduler.advance()
    for request in (due, short):
        scheduler.add(request)
    drain(scheduler)
    assert due.cancelled and due.tokens == [] and (2, 0, 30) not in device.called("prefill")
    assert short.tokens == truth(short.prompt_ids, 9) and not caplog.records


def test_reports_of_a_failed_read_come_before_the_next_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two requests end in consecutive steps and cannot be removed; each step is still reported to the third."""
    device, failures, reported = TableDevice(1), [True, True], list[int]()
    requests = [request_of([10 + i], limit) for i, limit in enumerate((3, 4, 9))]
    real = device.remove

    def remove(row: int) -> None:
        if failures:
            failures.pop()
            raise RuntimeError("no row is removed")
        real(row)

    def report(request: Request, step: Step | None) -> None:
        if request is requests[2]:
            reported.extend(request.tokens if step is None else step.tokens)
            assert reported == request.tokens

    monkeypatch.setattr(device, "remove", remove)
    drain(scheduled(device, *requests, report=report))
    assert not failures and [request.tokens for request in requests] == [truth(r.prompt_ids, r.limit) for r in requests]


def test_an_end_is_reported_if_its_row_cannot_be_removed() -> None:
    """For a single request with its last step in flight when the next one fails."""
    device, failures, reported = TableDevice(1), ["decode", "remove"], list[int]()
    request = request_of([1, 2, 3], 6)

    def report(_: Request, step: Step | None) -> None:
        reported.extend(step.tokens if step else request.tokens)

    scheduler = scheduled(device, request, block=BLOCK, report=report)
    while not scheduler.table.launches:
        scheduler.advance()
    failing(device, failures)
    drain(scheduler)
    assert not failures and reported == request.tokens == truth(request.prompt_ids, 6)


@pytest.mark.parametrize(("reported", "cancelled"), [*itertools.permutations(range(3), 2)])
def test_a_request_cancelled_during_recovery_is_released(reported: int, cancelled: int) -> None:
    device, failures = TableDevice(1), ["decode"]
    requests = [request_of([10 + i] * 3, 12) for i in range(3)]

    def report(request: Request, step: Step | None) -> None:
        if not failures and len(scheduler.running) == 1 and request is requests[reported]:
            scheduler.cancel(requests[cancelled])

    scheduler = scheduled(device, *requests, report=report)
    while not all(len(request.tokens) > 2 for request in requests):
        scheduler.advance()
    failing(device, failures)
    drain(scheduler)
    assert [r.tokens == truth(r.prompt_ids, 12) for r in requests] == [i != cancelled for i in range(3)]
    assert scheduler.table.pool.available == scheduler.table.pool.capacity and not any(r.error for r in requests)


def test_a_row_that_cannot_be_removed_fails_no_ended_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends in the step that it runs alone."""
    device, failures, reported = TableDevice(1), ["decode"], list[int]()
    requests = [request_of([10 + i] * 3, limit) for i, limit in enumerate((5, 12, 12))]
    real = device.remove

    def remove(row: int) -> None:
        if not failures and requests[0].finished:
            failures.append("removed")
            raise RuntimeError("a row stays")
        real(row)

    def report(request: Request, step: Step | None) -> None:
        if request is requests[0]:
            reported.extend(step.tokens if step else request.tokens)

    scheduler = scheduled(device, *requests, report=report)
    while len(requests[0].tokens) < 3:
        scheduler.advance()
    failing(device, failures)
    monkeypatch.setattr(device, "remove", remove)
    drain(scheduler)
    assert failures == ["removed"] and reported == requests[0].tokens
    assert [r.tokens for r in requests] == [truth(r.prompt_ids, r.limit) for r in requests]
    assert scheduler.table.pool.available == scheduler.table.pool.capacity and not any(r.error for r in requests)


def test_a_failed_copy_of_states_ends_one_request() -> None:
    """The request was computed alone, because a pass with it had failed."""
    device, pool = TableDevice(1), PagePool(2000, SIZE, range(40, 80))
    device.recurrent, device.prefill_limits = True, PREFILL_LIMITS
    first = request_of([1, 2, 3, 4, 5], 3)
    others = [request_of([50 + i] * 9, 40) for i in range(9)]
    scheduler = scheduled(
        device, first, *others, pool=pool, max_num_seqs=29, prefix_cache=True, recurrent=True, max_num_batched_tokens=64
    )
    while not (first.finished and len(scheduler.running) == 9):
        scheduler.advance()
    again, other = request_of([1, 2, 3, 4, 5, 6, 7], 3), request_of([30, 31], 3)
    again.prefilled_alone = True
    failing(device, failures := ["copy_states"])
    for request in (other, again):
        scheduler.add(request)
    drain(scheduler)
    assert not failures and again.error and scheduler.preemptions == 0
    assert all(request.tokens == truth(request.prompt_ids, request.limit) for request in (first, other, *others))


def test_states_with_a_failed_copy_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    device, pool = TableDevice(0), PagePool(200, SIZE, [9])
    device.recurrent, real, copies = True, device.copy_states, list[tuple[int, ...]]()

    def copy_states(*slots: int) -> None:
        copies.append(slots)
        if len(copies) in (1, 3):  # the copies that keep states, and that continue from them
            raise RuntimeError("a copy's own")
        real(*slots)

    monkeypatch.setattr(device, "copy_states", copy_states)
    requests = [request_of(list(range(9)), 7) for _ in range(3)]
    scheduler = scheduled(device, pool=pool, prefix_cache=True, recurrent=True)
    for request in requests:
        scheduler.add(request)
        drain(scheduler)
    assert copies == [(1, 2), (1, 2), (2, 1)]
    assert device.called("prefill")[:3] == [(0, 0, 8), (0, 0, 8), (8, 8, 1)], "computed again after the failed copy"
    assert [request.cached_tokens for request in requests] == [0, 0, 8] and not device.mistakes
    assert {tuple(request.tokens) for request in requests} == {tuple(truth(list(range(9)), 7))}


def test_states_of_a_poisoned_request_are_dropped() -> None:
    """Also those that it kept for a prefix after another request had computed its pages."""
    device, pool, ids = TableDevice(0), PagePool(40, SIZE, [9]), list(range(9))
    device.recurrent = True
    scheduler = scheduled(device, request := request_of(ids, 5), pool=pool, prefix_cache=True, recurrent=True)
    table, pages = scheduler.table, pool.allocate(2)
    assert table.admit(request) and pages
    pool.publish(ids[:8], pages)
    device.states[request.state] = ids[:8]
    table.states.keep(request, ids[:8])
    hit, slot, _ = pool.match_state(ids, 8)
    assert slot == 2
    pool.unmatch(hit)
    table.fail(request, RuntimeError("a step's own"))
    assert pool.match_state(ids, 8)[1] == 0


def test_without_a_prefix_cache_no_page_is_published() -> None:
    pool = PagePool(40, SIZE)
    drain(scheduled(TableDevice(), request_of(list(range(9)), 20), pool=pool))
    assert pool.match(list(range(9)), 8) == []


def test_a_value_that_is_not_finite_is_computed_again_once(caplog: pytest.LogCaptureFixture) -> None:
    request = request_of([1, NAN], 5)
    request.name = "mine"
    drain(scheduled(FaultyDevice(0, random.Random(0)), request))
    assert isinstance(request.error, NotFiniteError) and not request.tokens
    logged = [record.getMessage() for record in caplog.records]
    assert logged.count("NaN or infinity was computed for request mine") == 2


def test_a_grammar_that_raises_ends_its_request(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def accept(self, tokens: Sequence[int]) -> int:
            raise RuntimeError("a grammar's own")

    broken, other = request_of([1, 2], 5), request_of([3, 4], 5)
    broken.name, broken.matcher = "mine", Broken()  # type: ignore[assignment]
    scheduler = scheduled(TableDevice(1), broken, other)
    drain(scheduler)
    assert str(broken.error) == "a grammar's own" and other.tokens == truth([3, 4], 5)
    assert scheduler.table.pool.available == scheduler.table.pool.capacity
    assert "the answer of request mine cannot continue" in caplog.text


def test_a_finished_answer_does_not_wait_for_the_next_prompt() -> None:
    reported: list[tuple[int, bool]] = []
    short, long = request_of([1, 2, 3], 1), request_of(list(range(90)) * 4, 4)

    def report(request: Request, step: object) -> None:
        reported.append((len(device.called("prefill")), request is short))

    device = TableDevice()
    drain(scheduled(device, short, long, block=BLOCK, max_num_batched_tokens=8, report=report))
    assert reported[0][1] and reported[0][0] <= 2 and reported[1][0] > 40


def test_prompts_fill_a_chunk_to_its_last_token() -> None:
    requests = [request_of([i], 9) for i in range(4)]
    scheduled(TableDevice(), *requests, max_num_batched_tokens=4).advance()
    assert [request.prefilled for request in requests] == [1] * 4


def test_a_turn_has_a_limit_of_passes_for_short_prompts() -> None:
    """Their rows are free again at once, as each answer has one token."""
    device, passes = TableDevice(depth=0), module.MAX_PASSES
    scheduler = scheduled(device, request_of([5, 6], 9), max_num_batched_tokens=256)
    scheduler.advance()
    device.calls.clear()
    for i in range(3 * passes):
        scheduler.add(request_of([i], 1))
    for _ in range(4):
        scheduler.advance()
    names = [name for name, *_ in device.calls if name in ("prefill", "decode")]
    assert names == (["prefill"] * passes + ["decode"]) * 3 + ["decode"]


def test_the_guaranteed_request_has_a_pass_of_a_full_turn() -> None:
    device = TableDevice(depth=0)
    scheduler = scheduled(device, max_num_batched_tokens=256)
    large = request_of(list(range(9)), 1)
    scheduler.add(large)
    for i in range(3 * module.MAX_PASSES):
        scheduler.add(request_of([20 + i], 1))
    scheduler.advance()
    assert large.finished and len(device.called("prefill")) == module.MAX_PASSES


@pytest.mark.parametrize(("limit", "steps"), [(1, 0), (2, 1), (5, 4)])
def test_no_step_is_launched_for_requests_that_surely_end(limit: int, steps: int) -> None:
    device = TableDevice(2)
    drain(scheduled(device, *(request_of([i, 1], limit) for i in range(2))))
    assert device.called("decode") == [(2,)] * steps


def test_a_turn_that_launches_no_step_reads_one_result() -> None:
    """The device still computes the next one; meanwhile the engine can add requests."""
    request, tokens = request_of([1, 2], 6), list[int]()
    scheduler = scheduled(TableDevice(2), request)
    while not scheduler.idle:
        scheduler.advance()
        tokens.append(len(request.tokens))
    assert tokens == [0, 1, 2, 3, 4, 5, 6]


def test_the_page_table_changes_once_in_four_pages() -> None:
    device = TableDevice(0)
    drain(scheduled(device, request_of([1, 2], 60)))
    assert device.called("set_pages") == [(7,), (11,), (15,), (19,)], "a page and three in advance, each time"


def test_a_row_is_moved_only_for_a_request_that_stays() -> None:
    """Copies of a row's state are a dozen launches: many rows that end together would make the next step wait."""
    device, requests = TableDevice(), [request_of([i, 1], limit) for i, limit in enumerate((9, 9, 30, 9, 9, 9))]
    drain(scheduled(device, *requests, max_num_seqs=6, prefix_cache=True))
    assert device.called("move") == [(2, 1), (1, 0)], "only the request that stays moves"
    assert all(request.tokens == truth(request.prompt_ids, request.limit) for request in requests)


def test_the_first_page_of_a_prefix_is_evicted_last() -> None:
    pool = PagePool(5, SIZE)
    tokens, pages = list(range(16)), pool.allocate(4)
    pool.publish(tokens, pages)
    pool.release(pages)
    assert pool.allocate(2) is not None
    assert pool.match(tokens, 16) == pages[:2]
    pool.check()


def test_an_evicted_parent_does_not_come_back_through_its_page() -> None:
    pool = PagePool(3, SIZE)
    first = pool.allocate(2)
    pool.publish([1, 1, 1, 1, 2, 2, 2, 2], first)
    pool.release(first[:1])  # the child is still held
    assert pool.allocate(1) == first[:1]
    pool.publish([3, 3, 3, 3], first[:1])
    assert pool.match([3, 3, 3, 3, 2, 2, 2, 2], 8) == first[:1], "the child belongs to the page of ones"


def test_states_live_as_long_as_pages_and_the_oldest_is_replaced() -> None:
    pool = PagePool(5, SIZE, [8, 9])
    tokens, pages = list(range(16)), pool.allocate(4)

    def keep(count: int) -> int:
        node, slot = pool.node_without_state(tokens[:count], pages), pool.take_slot()
        assert node is not None
        pool.keep_state(node, slot)
        return slot

    first, second = keep(8), keep(16)
    assert {first, second} == {8, 9} and pool.node_without_state(tokens, pages) is None, "it is kept already"
    assert pool.match_state(tokens, 15) == (pages[:2], first, 12), "the next page parts from another"
    assert keep(12) == second, "the unused one"
    assert pool.match_state(tokens, 16) == (pages[:3], second, 0), "it is the last page"
    pool.check()
    for each in (pages, pages[:2], pages[:3]):
        pool.release(each)
    pool.allocate(2)  # takes the last pages
    assert pool.match_state(tokens, 16) == (pages[:2], first, 0)
    pool.drop_states(tokens)
    assert pool.match_state(tokens, 16) == ([], 0, 0)
    pool.check()


def test_more_pages_than_there_are_change_nothing() -> None:
    pool = PagePool(4, SIZE)
    assert pool.allocate(4) is None and pool.available == 3
    with pytest.raises(ValueError, match="num_pages is 1"):
        PagePool(1, SIZE)
    assert PagePool(2, SIZE).capacity == 1


def test_released_pages_are_free_unless_they_are_known() -> None:
    pool = PagePool(4, SIZE)
    pages = pool.allocate(3)
    assert pages is not None
    pool.publish(range(SIZE), pages)
    assert pool.match(range(SIZE), SIZE) == pages[:1]
    assert pool.release(pages) == [pages[2], pages[1]], "the first is held by another request"
    assert pool.release(pages[:1]) == [] and pool.available == 3


def test_the_newest_request_is_preempted(monkeypatch: pytest.MonkeyPatch) -> None:
    *early, last = (request_of([i] * 8, limit) for i, limit in enumerate((20, 220, 220)))
    scheduler, preempted = scheduled(TableDevice(0), *early, pool=61, max_num_seqs=3, max_block=1), list[Request]()
    real = scheduler.table.preempt
    monkeypatch.setattr(scheduler.table, "preempt", lambda request: (preempted.append(request), real(request)))
    for _ in range(10):
        scheduler.advance()
    scheduler.add(last)
    drain(scheduler)
    assert preempted and all(request is last for request in preempted), "it took the first one's row"


def test_a_request_that_was_never_queued_can_be_cancelled() -> None:
    scheduler, request = scheduled(TableDevice(0), pool=9), request_of([1] * 8, 4)
    scheduler.cancel(request)
    assert request.cancelled and scheduler.idle


def test_a_report_that_raises_costs_the_others_nothing() -> None:
    def raises(request: Request, step: object) -> None:
        if len(request.tokens) > 2:
            raise RuntimeError("the caller's own")

    def report(request: Request, step: object) -> None:
        if request.on_progress:
            request.on_progress(request, step)

    found = []
    for on_progress in (None, raises):
        requests = [request_of([5] * 8, 8, on_progress), request_of([5] * 8, 8)]
        scheduler = scheduled(TableDevice(0), *requests, pool=9, max_num_seqs=3, max_block=1, report=report)
        for _ in range(200):
            with contextlib.suppress(RuntimeError):
                scheduler.advance()
        assert scheduler.idle
        found.append([request.tokens for request in requests])
    assert found[0] == found[1]
