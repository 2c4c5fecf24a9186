"""A scheduler's device that is a table: it remembers which token each slot of each page holds."""

import functools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dflash_toolkit import SamplingParams
from dflash_toolkit.runtime.pages import PagePool
from dflash_toolkit.runtime.prefill_job import PrefillJob, PrefillLimits
from dflash_toolkit.runtime.request import Committed, Request, StepShape
from dflash_toolkit.runtime.scheduler import Scheduler

SIZE, BLOCK, PLACES = 4, 8, 21  # tokens of a page, and that a step commits and writes at most


SHAPES = [StepShape(1), StepShape(2), StepShape(BLOCK)]


TREES = [StepShape(2, 40), StepShape(BLOCK, 64)]


def next_token(text: Sequence[int]) -> int:
    """Returns the next token of an answer, which depends on every token before it."""
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
    state: int


class TableDevice:
    """Remembers the token that each slot of each page belongs to, and answers from what it can read there.

    A page that is handed out too early, twice, or not at all shows as a wrong answer. So does, where it is `recurrent`,
    a state that took in other tokens than its request has. `calls` holds what it was asked
    for: ("prefill", first token, start, tokens), ("slices", number, seconds), ("drop", index),
    ("move", source, target), ("set_pages", pages), ("decode", requests).
    """

    pages_per_request = 1000
    step_s = 0.0
    recurrent = False
    prefill_limits = PrefillLimits()

    def __init__(self, depth: int = 1, dice: random.Random | None = None) -> None:
        self.depth, self._dice = depth, dice or random.Random(0)
        self.slots: dict[tuple[int, int], int] = {}
        self.states: dict[int, list[int]] = {}
        self.newest: dict[int, list[int]] = {}  # rows of each slot's newest block; `states` has the committed ones
        self.mistakes: list[tuple[int, list[int]]] = []  # slots that did not hold the states of a text
        self.rows: dict[int, Row] = {}
        self.calls: list[tuple[Any, ...]] = []
        self._prefilled: list[list[int]] = []

    def slices(self) -> int:
        """Returns the number of slices of the next pass."""
        return 1

    def called(self, name: str) -> list[tuple[Any, ...]]:
        return [call[1:] for call in self.calls if call[0] == name]

    def _write(self, pages: Sequence[int], position: int, token: int) -> None:
        assert pages[position // SIZE] != 0
        self.slots[pages[position // SIZE], position % SIZE] = token

    def _text(self, pages: Sequence[int], length: int) -> list[int]:
        return [self.slots[pages[p // SIZE], p % SIZE] for p in range(length)]

    def _check_state(self, slot: int, text: list[int]) -> None:
        """Also records the mistake: a request that makes the device raise is computed again."""
        if self.recurrent and self.states[slot] != text:
            self.mistakes.append((slot, text))
            raise AssertionError(f"slot {slot} holds {self.states[slot]} and not {text}")

    def start_prefill(self, jobs: Sequence[PrefillJob]) -> "TablePass":
        return TablePass(self, jobs)

    def prefill(self, job: PrefillJob) -> Any:
        ids, start, pages, state, scores = job
        self.calls.append(("prefill", ids[0], start, len(ids)))
        self._fill_state(state, start, ids)
        for i, token in enumerate(ids):
            self._write(pages, start + i, token)
        self._prefilled = [self._text(pages, start + len(ids))]
        return [(start + 1 + i, token) for i, token in enumerate(scores.ids)] if scores else None

    def prefill_batch(self, chunks: Sequence[PrefillJob]) -> None:
        self.calls.append(("prefill_batch", *(len(chunk.ids) for chunk in chunks)))
        prefilled = []
        for ids, start, pages, state, _ in chunks:
            if not pages:  # it was dropped
                prefilled.append([])
                continue
            self._fill_state(state, start, ids)
            for i, token in enumerate(ids):
                self._write(pages, start + i, token)
            prefilled.append(self._text(pages, start + len(ids)))
        self._prefilled = prefilled

    def _fill_state(self, slot: int, start: int, ids: Sequence[int]) -> None:
        self.states[slot] = [*(self.states.get(slot, []) if start else []), *ids]
        self.newest[slot] = []

    def copy_states(self, source: int, target: int, rows: int = 0) -> None:
        self.calls.append(("copy_states", source, target))
        held, rejected = self.states[source], [-1] * (BLOCK + PLACES)
        before = len(held) - len(self.newest.get(source, []))
        self.states[target], self.newest[target] = (held + rejected)[: before + rows], []

    def add(self, row: int, request: Request, place: int = 0) -> Any:
        assert row not in self.rows
        length = len(request.known_ids)
        last = request.tokens[-1] if request.tokens else -1
        self.rows[row] = Row(list(request.pages), length, last, request.state)
        assert request.state
        self._check_state(request.state, request.known_ids)
        if request.tokens:
            return None
        assert self._text(request.pages, length) == request.prompt_ids
        self.rows[row].last = next_token(self._prefilled[place])
        scored = [each for chunk in request.scored for each in chunk] if request.scores_prompt else None
        return [Committed([self.rows[row].last], prompt=scored)]  # type: ignore[arg-type]

    def move(self, source: int, target: int) -> None:
        self.calls.append(("move", source, target))
        self.rows[target] = self.rows.pop(source)

    def remove(self, row: int) -> None:
        self.rows.pop(row, None)

    def set_pages(self, row: int, pages: Sequence[int]) -> None:
        self.calls.append(("set_pages", len(pages)))
        self.rows[row].pages = list(pages)

    def decode(self, requests: Sequence[Request], shape: StepShape) -> Any:
        block = shape.block
        self.calls.append(("decode", len(requests)))
        assert sorted(self.rows) == list(range(len(requests)))
        found = []
        for i in range(len(requests)):
            row = self.rows[i]
            for k in range(PLACES if shape.rows else block):  # rejected tokens are written too
                self._write(row.pages, row.length + k, -1 - k)
            tokens = []
            self.newest[row.state] = []
            for _ in range(self._dice.randint(1, block)):
                self._write(row.pages, row.length, row.last)
                row.length += 1
                if self.recurrent:
                    self.states[row.state].append(row.last)
                    self.newest[row.state].append(row.last)
                    self._check_state(row.state, self._text(row.pages, row.length))
                row.last = next_token(self._text(row.pages, row.length))
                tokens.append(row.last)
            found.append(Committed(tokens))
        return found

    def read(self, pending: Any) -> Any:
        return pending

    def clean(self, pages: Sequence[int]) -> None:
        assert not any({*pages} & {*row.pages} for row in self.rows.values())

    def check(self) -> None:
        pass


class TablePass:
    """Writes its tokens in every slice, so that a page that was handed out during the pass shows.

    A slice takes a second. The last one is the call `prefill` or `prefill_batch`.
    """

    def __init__(self, device: TableDevice, jobs: Sequence[PrefillJob]) -> None:
        self._device, self._jobs = device, list(jobs)
        self._left = device.slices()
        self.done, self.scores = False, None

    def run(self, seconds: float = math.inf, least: int = 1) -> float:
        count = int(max(least, min(self._left, seconds)))
        if not count:
            return 0.0
        self._device.calls.append(("slices", count, seconds))
        for _ in range(count):
            for job in self._jobs:
                for i in range(len(job.ids) if job.pages else 0):
                    self._device._write(job.pages, job.start + i, -1)
        self._left -= count
        if not self._left:
            if len(self._jobs) == 1:
                self.scores = self._device.prefill(self._jobs[0])
            else:
                self._device.prefill_batch(self._jobs)
            self.done = True
        return count

    def drop(self, index: int) -> None:
        self._device.calls.append(("drop", index))
        self._jobs[index] = self._jobs[index]._replace(pages=[])


def request_of(prompt: list[int], limit: int, *report: Any) -> Request:
    return Request(prompt, SamplingParams(max_tokens=limit), frozenset(), limit, *report)


def scheduled(device: TableDevice, *requests: Request, pool: Any = 200, block: int = 1, **options: Any) -> Scheduler:
    """Returns a scheduler with the requests, in blocks of one length."""
    defaults = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_block": BLOCK, "prefix_cache": False}
    pool = PagePool(pool, SIZE) if isinstance(pool, int) else pool
    scheduler = Scheduler(device, pool, lambda running: StepShape(block), **(defaults | options))
    for request in requests:
        scheduler.add(request)
    return scheduler


def drain(scheduler: Scheduler) -> None:
    while not scheduler.idle:
        scheduler.advance()


def failing(device: TableDevice, names: list[str]) -> None:
    """Makes these calls raise, each once and in this order; all others succeed."""

    def calls(name: str, real: Any, *args: Any) -> Any:
        if names and names[0] == name:
            names.pop(0)
            raise RuntimeError(f"{name} fails once")
        return real(*args)

    for name in {*names}:
        setattr(device, name, functools.partial(calls, name, getattr(device, name)))
