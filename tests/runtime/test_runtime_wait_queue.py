"""The order of prompts: every request starts in the end, and small prompts do not wait for large ones."""

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from table_device import BLOCK, SIZE, TableDevice, drain, request_of, scheduled

from dflash_toolkit.runtime.pages import PagePool
from dflash_toolkit.runtime.request import Request
from dflash_toolkit.runtime.request_table import MAX_OVERTAKEN
from dflash_toolkit.runtime.scheduler import Scheduler
from dflash_toolkit.runtime.wait_queue import HEAP_SLACK, WaitQueue

TURN, CUT = 16, 8


def asked(tokens: int, limit: int = 1, **fields: Any) -> Request:
    request = request_of([random.randrange(97) for _ in range(tokens)], limit)
    for name, value in fields.items():
        setattr(request, name, value)
    return request


def in_order_of_first_tokens(scheduler: Scheduler) -> list[Request]:
    """Requests as they get their first tokens, in a list that grows."""
    order: list[Request] = []
    scheduler.table.report = lambda request, step: order.append(request) if step is None else None
    return order


def roomy(*requests: Request, **options: Any) -> tuple[TableDevice, Scheduler, list[Request]]:
    """Returns a scheduler with rows and pages for all requests."""
    device = TableDevice(0)
    defaults = {"pool": 4000, "max_num_seqs": 200, "max_num_batched_tokens": TURN}
    scheduler = scheduled(device, *requests, **(defaults | options))
    return device, scheduler, in_order_of_first_tokens(scheduler)


def computed(device: TableDevice) -> int:
    return sum(tokens for _, _, tokens in device.called("prefill"))


@pytest.mark.parametrize(("prompt", "first"), [(7, "prompt"), (9, "answer")])
def test_an_answer_token_costs_two_prompt_tokens(prompt: int, first: str) -> None:
    queue, requests = WaitQueue(), {key: asked(3, key=key) for key in ("prompt", "answer")}
    for request in requests.values():
        queue.add(request)
    queue.charge(requests["prompt"], prompt=prompt)
    queue.charge(requests["answer"], answer=4)
    assert queue.next(may_start=True) is requests[first]


def test_a_new_key_starts_at_the_least_of_the_others() -> None:
    queue, (first, second, third) = WaitQueue(), (asked(3, key=key) for key in "abc")
    queue.add(first)
    assert queue.entry(first).key.given == 0, "there are no others"
    queue.charge(first, prompt=7)
    queue.add(second)
    queue.charge(second, prompt=2)
    queue.add(third)
    assert [queue.entry(each).key.given for each in (first, second, third)] == [7, 9, 7]
    another = asked(3, key="a")
    queue.charge(second, prompt=20)
    queue.charge(third, prompt=20)
    queue.add(another)
    assert queue.entry(another).key.given == 7, "a key whose requests wait keeps what it has"


def test_a_preempted_request_is_as_long_as_its_prompt_and_answer() -> None:
    queue, (preempted, other) = WaitQueue(), (asked(3, key="a"), asked(6, key="a"))
    preempted.tokens.extend([1] * 4)
    for request in (preempted, other):
        queue.add(request)
    assert (queue.entry(preempted).size, queue.entry(other).size) == (7, 6)
    assert queue.next(may_start=True) is other


def test_of_equal_keys_the_one_with_the_oldest_request_is_guaranteed() -> None:
    queue, (ended, oldest, newest) = WaitQueue(), (asked(3, key=key) for key in ("a", "b", "a"))
    for request in (ended, oldest, newest):
        queue.add(request)
    queue.remove(ended, ended=True)
    assert queue.guaranteed(may_start=True) is oldest, "although the other key came first"


def test_stale_entries_of_the_heaps_are_bounded() -> None:
    queue, waiting = WaitQueue(), asked(3)
    queue.add(waiting)
    key = queue.entry(waiting).key
    for count in range(1, 400):
        request = asked(1)
        queue.add(request)
        assert (key.waiting, len(queue)) == (2, 2)
        queue.start(request)
        queue.remove(request, ended=True)
        assert (key.waiting, len(queue)) == (1, 1)
        assert count >= 60 or len(key.by_age) == len(key.by_size) == count + 1, "they are not rebuilt at every removal"
        assert max(len(key.by_age), len(key.by_size)) <= 2 * 2 + HEAP_SLACK
    assert queue.next(may_start=True) is waiting


# ---- prompts of other lengths ------------------------------------------------------------------------------


def test_a_short_prompt_does_not_wait_for_the_long_one_before_it() -> None:
    long, short = asked(1900), asked(1)
    device, scheduler, reported = roomy(long, short)
    scheduler.table.report = lambda request, step: reported.append(request) or computed_then.append(computed(device))
    computed_then: list[int] = []
    scheduler.advance()
    assert reported == [short] and computed_then == [1], "its token is reported before the others are computed"
    late = asked(3)
    scheduler.add(late)
    scheduler.advance()
    assert reported == [short, late] and 0 < long.prefilled <= 2 * TURN


@pytest.mark.parametrize("tokens", [1, CUT, 3 * CUT])
def test_a_long_prompt_advances_in_every_turn(tokens: int) -> None:
    long = asked(10 * CUT)
    _, scheduler, reported = roomy(long)
    for turn in range(10):
        for _ in range(20):
            scheduler.add(asked(tokens))
        scheduler.advance()
        assert long in reported or long.prefilled >= (turn + 1) * CUT
    assert long in reported and len(reported) > 1 - (tokens > CUT), "and others do, too"


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(2, 40))
def test_turns_of_a_prompt_are_bounded_by_its_keys_older_chunks(seed: int, keys: int, turn: int) -> None:
    """With K keys, a request waits at most K * C turns, where C counts its own and its key's older chunks."""
    dice = random.Random(seed)
    _, scheduler, reported = roomy(max_num_batched_tokens=turn)
    cut, ends = max(turn // 2, 1), dict[Request, int]()
    chunks: dict[str, list[tuple[Request, int]]] = {}
    for now in range(60):
        for _ in range(dice.randrange(3) if now < 30 else 0):
            request = asked(dice.choice([1, 2, cut, 5 * cut]), key=str(dice.randrange(keys)))
            mine = chunks.setdefault(request.key, [])
            mine.append((request, -(-len(request.prompt_ids) // cut)))
            ends[request] = now + keys * sum(count for other, count in mine if other not in reported)
            scheduler.add(request)
        scheduler.advance()
        assert all(request in reported for request, end in ends.items() if end <= now)
    drain(scheduler)
    assert set(reported) == set(ends)


def test_computed_tokens_of_a_started_prompt_do_not_count() -> None:
    queue, (started, shorter) = WaitQueue(), (asked(30), asked(20))
    for request in (started, shorter):
        queue.add(request)
    queue.start(started)
    assert queue.next(may_start=True) is shorter
    started.prefilled = 16
    assert queue.next(may_start=True) is started


def test_equal_prompts_are_computed_one_after_the_other() -> None:
    """Taking turns chunk by chunk would make all of them late."""
    requests = [asked(4 * CUT) for _ in range(4)]
    _, scheduler, reported = roomy(*requests)
    scheduler.advance()
    scheduler.advance()
    assert reported == requests[:1]
    drain(scheduler)
    assert reported == requests


# ---- keys, groups, priorities ------------------------------------------------------------------------------


@pytest.mark.parametrize("mine", [{"key": "mine"}, {"group": "mine"}, {}])
def test_a_large_group_does_not_block_the_queue(mine: dict[str, str]) -> None:
    many = [asked(2, 6, group="theirs") for _ in range(1024)]
    _, scheduler, reported = roomy(*many, max_num_seqs=2)
    for _ in range(20):
        scheduler.advance()
    started, one = len(reported), asked(30, 6, **mine)
    scheduler.add(one)
    while one not in reported:
        scheduler.advance()
    assert len(reported) - started <= 4, "it has the second or third row that is free"


def test_keys_get_equal_numbers_of_tokens() -> None:
    one, other = ([asked(n, key=key) for _ in range(60)] for key, n in (("one", 2 * CUT), ("other", 2)))
    _, scheduler, reported = roomy(*one, *other)
    while len([r for r in reported if r.key == "other"]) < 50:
        scheduler.advance()
    theirs = sum(r.prefilled for r in one) + sum(len(r.prompt_ids) for r in reported if r.key == "one")
    assert 0.5 < sum(len(r.prompt_ids) for r in reported if r.key == "other") / theirs < 2


def test_idle_api_key_accumulates_no_credit() -> None:
    _, scheduler, reported = roomy(*(asked(CUT, key="busy") for _ in range(300)), max_num_seqs=1)
    for _ in range(50):
        scheduler.advance()
    before = len(reported)
    for _ in range(20):
        scheduler.add(asked(CUT, key="new"))
    while len(reported) < before + 20:
        scheduler.advance()
    assert 8 <= sum(request.key == "busy" for request in reported[before:]) <= 12, "from now on they share"


def test_lower_priorities_first_then_order_of_arrival() -> None:
    requests = [asked(CUT, priority=priority) for priority in (1, 0, 5, 0, -3, 1)]
    _, scheduler, reported = roomy(*requests, max_num_seqs=1)
    drain(scheduler)
    assert [requests.index(request) for request in reported] == [4, 1, 3, 0, 5, 2]


def test_lowest_priority_request_is_preempted() -> None:
    scheduler = scheduled(TableDevice(0), pool=61, max_num_seqs=3, max_block=1)
    early, late = asked(8, 220, priority=1), asked(8, 220)
    scheduler.add(early)
    scheduler.advance()
    scheduler.add(late)
    while not scheduler.preemptions:
        scheduler.advance()
    assert early.row is None and late.row is not None


# ---- pages -------------------------------------------------------------------------------------------------


def crowded() -> tuple[PagePool, Scheduler, list[Request], Request]:
    """A request that holds a third of the pages, and a later one that needs more than are left."""
    pool = PagePool(61, SIZE)
    scheduler = scheduled(
        TableDevice(0), pool=pool, max_num_seqs=8, max_num_batched_tokens=128, max_block=1, prefix_cache=True
    )
    reported = in_order_of_first_tokens(scheduler)
    holder, large = asked(80, 90), asked(200)
    for request in (holder, large):
        scheduler.add(request)
        scheduler.advance()
    assert reported == [holder] and not large.pages
    return pool, scheduler, reported, large


def test_at_most_16_requests_overtake_one_that_lacks_pages() -> None:
    _, scheduler, reported, large = crowded()
    while not large.pages:
        scheduler.add(asked(3, 3))
        scheduler.advance()
    assert len(reported) - 1 == MAX_OVERTAKEN == 16
    assert scheduler.waiting.entry(large).overtaken == 0, "once preempted, it may be overtaken as often again"
    drain(scheduler)
    assert large in reported


def test_urgent_requests_overtake_without_limit() -> None:
    _, scheduler, reported, large = crowded()
    while large in scheduler.waiting and scheduler.waiting.entry(large).overtaken < MAX_OVERTAKEN:
        scheduler.add(asked(3, 3))
        scheduler.advance()
    urgent, small = asked(3, 3, priority=-1), asked(3, 3)
    for request in (small, urgent):
        scheduler.add(request)
    while not large.pages:
        scheduler.advance()
    assert urgent in reported and small not in reported


def test_a_prefix_is_looked_up_again_only_after_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, scheduler, reported, large = crowded()
    looks, real = list[int](), pool.match
    monkeypatch.setattr(pool, "match", lambda ids, *more: looks.append(len(ids)) or real(ids, *more))
    for _ in range(20):
        scheduler.advance()
    assert not large.pages and not looks, "the request before it decodes, and gives nothing back"
    drain(scheduler)
    assert looks == [len(large.prompt_ids)] and large in reported


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("turns", range(6))
def test_pages_of_a_cancelled_request_are_free_within_a_step(depth: int, turns: int) -> None:
    """Waiting, with its prompt computed in part, with its first token on its way, and decoding."""
    pool = PagePool(100, SIZE)
    scheduler = scheduled(TableDevice(depth), pool=pool, max_num_batched_tokens=TURN, max_num_seqs=2, block=BLOCK)
    request, other = asked(3 * TURN, 99), asked(5, 30)
    scheduler.add(request)
    for _ in range(turns):
        scheduler.advance()
    assert bool(request.pages) == (turns > 0) and (request.row is not None) == (turns > 2)
    scheduler.cancel(request)
    scheduler.add(other)
    scheduler.advance()
    pool.check()
    assert pool.capacity - pool.available == len(other.pages), "no other request holds any"
    drain(scheduler)
    assert pool.available == pool.capacity and len(other.tokens) == 30 and not request.finished
