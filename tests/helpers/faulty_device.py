"""A device that is a table, fails now and then, and computes NaN."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from table_device import SIZE, TableDevice

from dflash_toolkit.runtime.prefill_job import PrefillJob
from dflash_toolkit.runtime.request import Request, StepShape

IN_PREFILL, IN_DECODE, NAN = 97, 98, 99  # tokens that make a prefill raise, a step, and that are NaN
CALM = 60  # calls after a fault by chance that go well: it strikes once


class FaultyDevice(TableDevice):
    """Raises for some tokens, and now and then by chance, before or after the work; computes NaN likewise."""

    def __init__(self, depth: int, dice: random.Random) -> None:
        super().__init__(depth, dice)
        self.faults, self._calm = 0, CALM
        self.nan: set[tuple[int, int]] = set()  # slots
        self.struck: set[Request] = set()  # by a NaN of chance
        self.step_s = 0.05  # shorter than a slice of a prompt

    def slices(self) -> int:
        return self._dice.choice([1, 1, 2, 9])

    def _strike(self, name: str, run: Any, *always: bool) -> Any:
        self._calm -= 1
        by_chance = self._calm < 0 and self._dice.random() < 0.05
        if not by_chance and not any(always):
            return run()
        self._calm = CALM * (5 if self.recurrent else 1)  # recurrent requests start again
        self.faults += by_chance
        if self._dice.random() < 0.5:
            run()
        raise RuntimeError(f"{name} {'by chance' if by_chance else 'always'}")

    def _write(self, pages: Sequence[int], position: int, token: int) -> None:
        super()._write(pages, position, token)
        slot = pages[position // SIZE], position % SIZE
        (self.nan.add if token == NAN else self.nan.discard)(slot)

    def _finite(self, pages: Sequence[int], length: int) -> bool:
        return not any((pages[p // SIZE], p % SIZE) in self.nan for p in range(length))

    def prefill(self, job: PrefillJob) -> Any:
        return self._strike("prefill", lambda: super(FaultyDevice, self).prefill(job), IN_PREFILL in job.ids)

    def prefill_batch(self, chunks: Sequence[PrefillJob]) -> None:
        always = any(IN_PREFILL in chunk.ids for chunk in chunks)
        self._strike("prefill_batch", lambda: super(FaultyDevice, self).prefill_batch(chunks), always)

    def copy_states(self, *slots: int) -> None:
        self._strike("copy_states", lambda: super(FaultyDevice, self).copy_states(*slots))

    def add(self, row: int, request: Request, place: int = 0) -> Any:
        found = self._strike("add", lambda: super(FaultyDevice, self).add(row, request, place))
        if found and not self._finite(request.pages, len(request.prompt_ids)):
            return [replace(found[0], finite=False, poisons=True)]
        return found

    def decode(self, requests: Sequence[Request], shape: StepShape) -> Any:
        def run() -> Any:
            found = super(FaultyDevice, self).decode(requests, shape)
            for i, request in enumerate(requests):
                row = self.rows[i]
                if request not in self.struck and self._dice.random() < 0.005:
                    self.struck.add(request)
                    self.nan.add((row.pages[(row.length - 1) // SIZE], (row.length - 1) % SIZE))
                if not self._finite(row.pages, row.length):
                    found[i] = replace(found[i], finite=False, poisons=True)
            return found

        return self._strike("decode", run, any(IN_DECODE in request.prompt_ids for request in requests))

    def read(self, pending: Any) -> Any:
        return self._strike("read", lambda: pending)

    def move(self, *rows: int) -> None:
        self._strike("move", lambda: super(FaultyDevice, self).move(*rows))

    def remove(self, row: int) -> None:
        self._strike("remove", lambda: super(FaultyDevice, self).remove(row))

    def set_pages(self, row: int, pages: Sequence[int]) -> None:
        self._strike("set_pages", lambda: super(FaultyDevice, self).set_pages(row, pages))

    def clean(self, pages: Sequence[int]) -> None:
        super().clean(pages)
        self.nan = {slot for slot in self.nan if slot[0] not in pages}
