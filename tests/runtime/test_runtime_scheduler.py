"""Whatever comes in whatever order, no page and no token is lost. The device here is a table."""

import contextlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_toolkit import SamplingParams
from dflash_toolkit.runtime.pages import PagePool
from dflash_toolkit.runtime.request import Committed, Request
from dflash_toolkit.runtime.scheduler import Scheduler

SIZE, BLOCK = 4, 8


def next_token(text: Sequence[int]) -> int:
    """The answer goes on in a way that depends on every token before it."""
    return (sum((i + 1) * t for i, t in enumerate(text)) * 31 + len(text)) % 97


def truth(prompt: list[int], count: int) -> list[int]:
    text = list(prompt)
    for _ in range(count):
        text.append(next_token(text))
    return text[len(prompt) :]


@dataclass
class Row:
    pages: list[int]
    length: int  # tokens with keys and values
    last: int


class TableDevice:
    """Remembers the token that each slot of each page belongs to, and answers from what it can read there.

    A page that is handed out too early, twice, or not at all shows as a wrong answer.
    """

    pages_per_request = 1000

    def __init__(self, depth: int, dice: random.Random) -> None:
        self.depth, self._dice = depth, dice
        self.slots: dict[tuple[int, int], int] = {}
        self.rows: dict[int, Row] = {}
        self._prefilled: list[int] = []

    def _write(self, pages: Sequence[int], position: int, token: int) -> None:
        assert pages[position // SIZE] != 0
        self.slots[pages[position // SIZE], position % SIZE] = token

    def _text(self, pages: Sequence[int], length: int) -> list[int]:
        return [self.slots[pages[p // SIZE], p % SIZE] for p in range(length)]

    def prefill(self, ids: Sequence[int], start: int, pages: Sequence[int]) -> None:
        for i, token in enumerate(ids):
            self._write(pages, start + i, token)
        self._prefilled = self._text(pages, start + len(ids))

    def add(self, row: int, request: Request) -> Any:
        assert row not in self.rows
        length = len(request.known_ids)
        self.rows[row] = Row(list(request.pages), length, request.tokens[-1] if request.tokens else -1)
        if request.tokens:
            return None
        assert self._text(request.pages, length) == request.prompt_ids
        self.rows[row].last = next_token(self._prefilled)
        return [Committed([self.rows[row].last])]

    def move(self, source: int, target: int) -> None:
        self.rows[target] = self.rows.pop(source)

    def remove(self, row: int) -> None:
        self.rows.pop(row, None)

    def set_pages(self, row: int, pages: Sequence[int]) -> None:
        self.rows[row].pages = list(pages)

    def decode(self, requests: Sequence[Request], block: int) -> Any:
        assert sorted(self.rows) == list(range(len(requests)))
        found = []
        for i in range(len(requests)):
            row = self.rows[i]
            for k in range(block):  # what is rejected is written too
                self._write(row.pages, row.length + k, -1 - k)
            tokens = []
            for _ in range(self._dice.randint(1, block)):
                self._write(row.pages, row.length, row.last)
                row.length += 1
                row.last = next_token(self._text(row.pages, row.length))
                tokens.append(row.last)
            found.append(Committed(tokens))
        return found

    def read(self, pending: Any) -> Any:
        return pending


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.integers(1, 16), st.booleans())
def test_where_a_prompt_is_cut_does_not_depend_on_its_neighbours(
    lengths: list[int], chunk: int, prefix_cache: bool
) -> None:
    """Products of other sizes round otherwise: an answer would depend on who else was there."""

    class Cuts(TableDevice):
        def prefill(self, ids: Sequence[int], start: int, pages: Sequence[int]) -> None:
            self.found.setdefault(ids[0] // 1000, []).append((start, len(ids)))
            super().prefill(ids, start, pages)

    def cuts(prompts: list[list[int]]) -> dict[int, list[tuple[int, int]]]:
        device = Cuts(1, random.Random(0))
        device.found = {}
        pool = PagePool(200, SIZE)
        scheduler = Scheduler(
            device, pool, lambda requests: BLOCK, max_batch=8, prefill_chunk=chunk, max_block=BLOCK,
            prefix_cache=prefix_cache,
        )  # fmt: skip
        for prompt in prompts:
            scheduler.add(Request(prompt, SamplingParams(max_new_tokens=2), frozenset(), 2))
        while not scheduler.idle:
            scheduler.advance()
        return device.found

    prompts = [[1000 * i + k for k in range(n)] for i, n in enumerate(lengths)]  # nothing in common
    together = cuts(prompts)
    for i, prompt in enumerate(prompts):
        expected = [(start, min(chunk, len(prompt) - start)) for start in range(0, len(prompt), chunk)]
        assert together[i] == cuts([prompt])[i] == expected


@pytest.mark.parametrize("depth", [0, 1, 2])
@settings(max_examples=12, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 5), st.integers(30, 90))
def test_ten_thousand_random_events_lose_no_page_and_no_token(
    depth: int, seed: int, max_batch: int, pages: int
) -> None:
    check_events(depth, seed, max_batch, pages)


def test_such_events_preempt_and_cancel_and_find_prefixes() -> None:
    counts = [check_events(1, seed, 5, 30) for seed in range(4)]
    assert all(sum(kind) > 0 for kind in zip(*counts, strict=True)), counts


def check_events(depth: int, seed: int, max_batch: int, pages: int) -> tuple[int, int, int]:
    """300 random events; how many preempted, cancelled, and finished requests with a cached prefix there were."""
    dice = random.Random(seed)
    pool = PagePool(pages, SIZE)
    done: list[Request] = []
    scheduler = Scheduler(
        TableDevice(depth, dice),
        pool,
        lambda requests: dice.choice([1, 2, BLOCK]),
        max_batch=max_batch,
        prefill_chunk=7,
        max_block=BLOCK,
        prefix_cache=dice.random() < 0.8,
        report=lambda request, step: done.append(request) if request.finished else None,
    )
    shared = [dice.randrange(97) for _ in range(40)]
    alive: list[Request] = []
    cancelled = 0
    for event in range(300):
        action = dice.random()
        if action < 0.25 and event < 250:
            prompt = shared[: dice.randrange(1, 40)] + [dice.randrange(97) for _ in range(dice.randrange(3))]
            count = dice.randrange(1, 30)
            request = Request(prompt, SamplingParams(max_new_tokens=count), frozenset(), count)
            if pool.pages_for(scheduler.tokens_needed(request)) <= pool.capacity:
                scheduler.add(request)
                alive.append(request)
        elif action < 0.3 and alive:
            request = dice.choice(alive)
            cancelled += not request.finished and not request.cancelled
            scheduler.cancel(request)
        else:
            scheduler.advance()
        pool.check()
    while not scheduler.idle:
        scheduler.advance()
    pool.check()
    assert pool.available == pool.capacity
    assert len(done) == len(alive) - cancelled
    for request in done:
        assert request.tokens == truth(request.prompt_ids, request.limit)
        assert sum(len(step.tokens) for step in request.generation.steps) == request.limit - 1
    return scheduler.preemptions, cancelled, sum(request.cached_tokens > 0 for request in done)


def test_a_finished_answer_does_not_wait_for_the_prompt_behind_it() -> None:
    told: list[tuple[int, bool]] = []
    scheduler = Scheduler(
        TableDevice(1, random.Random(0)), PagePool(200, SIZE), lambda requests: BLOCK, max_batch=2, prefill_chunk=8,
        max_block=BLOCK, prefix_cache=False, report=lambda request, step: told.append((turn, request is short)),
    )  # fmt: skip
    short = Request([1, 2, 3], SamplingParams(max_new_tokens=1), frozenset(), 1)
    long = Request(list(range(90)) * 4, SamplingParams(max_new_tokens=4), frozenset(), 4)
    scheduler.add(short)
    scheduler.add(long)
    turn = 0
    while not scheduler.idle:
        turn += 1
        scheduler.advance()
    assert told[0] == (1, True) and told[1][0] > 40


def turns(requests: list[Request], device: TableDevice, *, block: int = 1, chunk: int = 64) -> Scheduler:
    scheduler = Scheduler(
        device, PagePool(200, SIZE), lambda running: block, max_batch=8, prefill_chunk=chunk, max_block=BLOCK,
        prefix_cache=False,
    )  # fmt: skip
    for request in requests:
        scheduler.add(request)
    return scheduler


def test_prompts_fill_a_chunk_to_its_last_token() -> None:
    requests = [Request([i], SamplingParams(), frozenset(), 9) for i in range(4)]
    scheduler = turns(requests, TableDevice(1, random.Random(0)), chunk=4)
    scheduler.advance()
    assert [request.prefilled for request in requests] == [1] * 4


@pytest.mark.parametrize(("limit", "steps"), [(1, 0), (2, 1), (5, 4)])
def test_no_step_is_launched_for_who_surely_ends_without_it(limit: int, steps: int) -> None:
    launched = []

    class Counts(TableDevice):
        def decode(self, requests: Sequence[Request], block: int) -> Any:
            launched.append(len(requests))
            return super().decode(requests, block)

    scheduler = turns(
        [Request([i, 1], SamplingParams(), frozenset(), limit) for i in range(2)], Counts(2, random.Random(0))
    )
    while not scheduler.idle:
        scheduler.advance()
    assert launched == [2] * steps


def test_the_page_table_changes_once_in_four_pages() -> None:
    changed = []

    class Counts(TableDevice):
        def set_pages(self, row: int, pages: Sequence[int]) -> None:
            changed.append(len(pages))
            super().set_pages(row, pages)

    scheduler = turns([Request([1, 2], SamplingParams(), frozenset(), 60)], Counts(0, random.Random(0)))
    while not scheduler.idle:
        scheduler.advance()
    assert changed == [7, 11, 15, 19], "a page and three in advance, each time"


def test_a_row_is_moved_only_for_a_request_that_stays() -> None:
    """Copies of a row's state are a dozen launches: many rows that end together would make the next step wait."""
    moved = []

    class Moves(TableDevice):
        def move(self, source: int, target: int) -> None:
            moved.append((source, target))
            super().move(source, target)

    device = Moves(1, random.Random(0))
    scheduler = Scheduler(
        device, PagePool(200, SIZE), lambda running: 1, max_batch=6, prefill_chunk=64, max_block=BLOCK,
        prefix_cache=True, report=lambda request, step: None,
    )  # fmt: skip
    requests = [
        Request([i, 1], SamplingParams(max_new_tokens=limit), frozenset(), limit)
        for i, limit in enumerate((9, 9, 30, 9, 9, 9))
    ]
    for request in requests:
        scheduler.add(request)
    while not scheduler.idle:
        scheduler.advance()
    assert moved == [(2, 1), (1, 0)], "the one that stays, and nobody who ends"
    assert all(request.tokens == truth(request.prompt_ids, request.limit) for request in requests)


def test_the_first_page_of_a_prefix_is_evicted_last() -> None:
    pool = PagePool(5, SIZE)
    tokens = list(range(16))
    pages = pool.allocate(4)
    assert pages is not None
    pool.publish(tokens, pages)
    pool.release(pages)
    assert pool.allocate(2) is not None
    assert pool.match(tokens, 16) == pages[:2]
    pool.check()


def test_an_evicted_parent_does_not_come_back_through_its_page() -> None:
    pool = PagePool(3, SIZE)
    first = pool.allocate(2)
    assert first is not None
    pool.publish([1, 1, 1, 1, 2, 2, 2, 2], first)
    pool.release(first[:1])  # the child is still held
    (again,) = pool.allocate(1) or [None]
    assert again == first[0]
    pool.publish([3, 3, 3, 3], [again])
    assert pool.match([3, 3, 3, 3, 2, 2, 2, 2], 8) == [again], "the child belongs behind the ones"


def test_more_pages_than_there_are_change_nothing() -> None:
    pool = PagePool(4, SIZE)
    assert pool.allocate(4) is None and pool.available == 3
    with pytest.raises(ValueError, match="num_pages is 1"):
        PagePool(1, SIZE)


def test_who_came_last_gives_way_whatever_row_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    preempted: list[str] = []
    pool = PagePool(61, SIZE)
    scheduler = Scheduler(
        TableDevice(0, random.Random(0)), pool, lambda requests: 1,
        max_batch=3, prefill_chunk=64, max_block=1, prefix_cache=False,
    )  # fmt: skip
    real, names = scheduler._preempt, {}

    def watched(request: Request) -> None:
        preempted.append(names[request])
        real(request)

    monkeypatch.setattr(scheduler, "_preempt", watched)

    def add(name: str, tokens: int, limit: int) -> None:
        request = Request([ord(name)] * tokens, SamplingParams(), frozenset(), limit)
        names[request] = name
        scheduler.add(request)

    add("a", 8, 20)
    add("b", 8, 220)
    for _ in range(10):
        scheduler.advance()
    add("c", 8, 220)
    for _ in range(2000):
        scheduler.advance()
    assert scheduler.idle and preempted and set(preempted) == {"c"}, "c took a's row when a had ended"


def test_a_request_that_was_never_queued_can_be_cancelled() -> None:
    scheduler = Scheduler(
        TableDevice(0, random.Random(0)), PagePool(9, SIZE), lambda requests: 1,
        max_batch=3, prefill_chunk=64, max_block=1, prefix_cache=True,
    )  # fmt: skip
    request = Request([1] * 8, SamplingParams(), frozenset(), 4)
    scheduler.cancel(request)
    assert request.cancelled and scheduler.idle


def test_a_report_that_raises_costs_the_others_nothing() -> None:
    def raises(request: Request, step: object) -> None:
        if len(request.tokens) > 2:
            raise RuntimeError("the caller's own")

    found = []
    for report in (None, raises):
        scheduler = Scheduler(
            TableDevice(0, random.Random(0)), PagePool(9, SIZE), lambda requests: 1,
            max_batch=3, prefill_chunk=64, max_block=1, prefix_cache=False,
            report=lambda request, step: request.on_progress and request.on_progress(request, step),
        )  # fmt: skip
        requests = [Request([5] * 8, SamplingParams(), frozenset(), 8, on_progress) for on_progress in (report, None)]
        for request in requests:
            scheduler.add(request)
        for _ in range(200):
            with contextlib.suppress(RuntimeError):
                scheduler.advance()
        assert scheduler.idle
        found.append([request.tokens for request in requests])
    assert found[0] == found[1]
