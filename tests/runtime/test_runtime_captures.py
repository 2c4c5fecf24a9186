"""When graphs of steps are captured. The GPU is a table of costs."""

from typing import Any

import pytest
import torch

from dflash_toolkit.runtime import graphs as module
from dflash_toolkit.runtime.graphs import CAPTURE_SHARE, StepGraphs

CAPTURE_S, STEP_S = 0.05, 0.01


class Clock:
    """Steps and captures take their time; `captures` has the times at which captures began."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.captures, self.eager = 100.0, list[float](), 0
        monkeypatch.setattr(module.time, "perf_counter", lambda: self.now)
        self.graphs = StepGraphs(self._capture, torch.device("cuda"), [], torch.zeros(2, 1))  # type: ignore[arg-type]

    def _capture(self, run: Any) -> tuple[Any, None]:
        self.captures.append(self.now)
        self.now += CAPTURE_S
        return self, None

    def replay(self) -> None:
        self.now += STEP_S

    def step(self, part: int) -> None:
        self.graphs.run(part, self._run)

    def _run(self, part: int) -> None:
        self.eager += 1
        self.now += STEP_S


def test_captures_take_a_small_share_of_the_time_of_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    clock.graphs.started = True
    while clock.now < 200:
        clock.step(len(clock.captures))  # each time a part that has no graph
    gaps = [later - earlier for earlier, later in zip(clock.captures, clock.captures[1:], strict=False)]
    assert min(gaps) >= CAPTURE_S / CAPTURE_SHARE > 2 and len(clock.captures) > 100 / (CAPTURE_S / CAPTURE_SHARE) - 2
    assert clock.eager == clock.graphs.missed - len(clock.captures) > 1000


def test_parts_are_captured_at_once_before_the_start_is_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    for _ in range(2):
        for part in range(9):
            clock.step(part)
    assert len(clock.captures) == clock.graphs.missed == 9 and not clock.eager


def test_captured_parts_run_without_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    clock.graphs.started = True
    for _ in range(5):
        clock.step(0)
    assert len(clock.captures) == clock.graphs.missed == 1 and not clock.eager
