"""How long a run is, by minutes, steps or epochs, and how much of that is done."""

import contextlib
import math
import sys
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from dflash_toolkit.config import UserError, to_mapping

from ..config import OptimOptions
from ..optim.schedule import Joint, PackedSchedule, Schedule, joined_factor, learning_rate_factor
from .state import ResumePoint, TrainState

TIMED_STEPS = 3  # whose pace tells what the run costs
PARTS = 1_000_000  # of a run by the clock


def plan_of(optim: dict[str, Any]) -> dict[str, float]:
    """The one option, of a mapping of `OptimOptions`, that says when a run ends."""
    return next(({name: optim[name]} for name in ("minutes", "steps") if optim[name]), {"epochs": optim["epochs"]})


class Budget:
    """Steps, epochs or minutes of a run: one `done` between 0 and 1, and the learning rate that goes by it.

    Args:
        group: micro batches of a step.
        point: where the run goes on from; with another budget than this, the rate is led over to the new one's.
        output: directory of the run, for the message.

    Attributes:
        steps: of the run; 0 where it ends by the clock.
        seconds: of the run; 0 where it does not end by the clock.
        end: micro batches of the schedule that count.

    Raises:
        UserError: the run has done more than this.
    """

    def __init__(
        self,
        optim: OptimOptions,
        schedule: Schedule | PackedSchedule,
        group: int,
        point: ResumePoint | None,
        output: Path,
    ) -> None:
        self._optim, self._schedule, self._group = optim, schedule, group
        self._plan = plan_of(to_mapping(optim))
        step, micro = (point.step, point.micro) if point else (0, 0)
        self.seconds = 60 * optim.minutes
        self.steps, self.end = 0, sys.maxsize
        if optim.steps and not optim.minutes:
            self.steps, self.end = optim.steps, micro + (optim.steps - step) * group
        elif not optim.minutes:
            self.steps, self.end = step + math.ceil((schedule.total - micro) / group), schedule.total
        self._joint = Joint(**point.joint) if point and point.joint else None
        if point and point.plan != self._plan:
            self._joint = Joint(point.step, point.micro, point.elapsed_s, point.rate)
            epochs = schedule.epoch(micro)
            spent = {"minutes": round(point.elapsed_s / 60, 2), "steps": step, "epochs": round(epochs, 2)}
            ((name, asked),) = self._plan.items()
            if asked < (epochs if name == "epochs" else spent[name]):
                raise UserError(
                    f"optim.{name}={asked:g}: the run in {output} has done {spent[name]:g} {name}; give more, or "
                    f"another --output"
                )

    def done(self, step: int, seconds: float) -> float:
        """Share of the run that is done, between 0 and 1."""
        return min(1.0, seconds / self.seconds) if self.seconds else step / self.steps

    def rate(self, state: TrainState) -> float:
        """Share of the peak learning rate that the next step has."""
        optim = self._optim
        done, total = self._place(state.step, state.micro, state.done)
        if self._joint is None:
            return learning_rate_factor(done, total, optim.warmup, optim.final_decay)
        joint = self._joint
        since, _ = self._place(joint.step, joint.micro, self.done(joint.step, joint.seconds))
        return joined_factor(done, total, optim.warmup, optim.final_decay, since, joint.rate)

    def _place(self, step: int, micro: int, done: float) -> tuple[int, int]:
        if self.seconds:
            return round(PARTS * done), PARTS
        if self._optim.steps:
            return step, self.steps
        # by the data: steps before a resumption may have been of another size
        return micro // self._group, math.ceil(self._schedule.total / self._group)

    def steps_left(self, step: int, seconds: float, pace: float) -> int:
        """Steps to come, of `pace` seconds each."""
        return math.ceil((self.seconds - seconds) / pace) if self.seconds else self.steps - step

    def too_short(self, steps: int) -> list[str]:
        """What is to be said of a run of so many steps, if anything."""
        least = math.ceil(1 / self._optim.warmup) if self._optim.warmup else 1
        if steps >= least:
            return []
        return [
            f"{steps} steps are too few to learn: optim.warmup={self._optim.warmup:g} of them is less than a step; "
            f"train for longer (from {least} steps on it is one)"
        ]

    def said(self, step: int, seconds: float) -> str:
        """Where a run goes on, for people."""
        if self.seconds:
            return f"step {step}, {seconds / 60:.3g} of {self._optim.minutes:g} minutes"
        return f"step {step} of {self.steps}"

    def to_state(self) -> dict[str, Any]:
        """Fields of a `ResumePoint`."""
        joint = self._joint
        return {"plan": self._plan, "joint": joint and {name: getattr(joint, name) for name in joint.__slots__}}


class TrainingClock:
    """Seconds of training alone: neither of compiling, nor of what happens while it is paused.

    The first steps of a process compile. How long they would have taken without is not known before the steps behind
    them were timed, so until then no time passes, and then they are counted at that pace.

    A GPU's time is meant, and a step is on its way before it is done. So the device is waited for around the steps that
    are timed and before a pause, and where a run ends by the clock each step waits for the one before it.

    Args:
        seconds: of the run so far.
        settling: steps that compile.
        bounded: keep no more than a step on its way.
    """

    def __init__(self, device: torch.device, seconds: float, settling: int, bounded: bool) -> None:
        self.seconds = seconds
        self.pace: float | None = None  # seconds a step, once timed
        self._device, self._settling, self._bounded = device, settling, bounded
        self._first: list[float] = []
        self._ahead: deque[torch.cuda.Event] = deque()
        self._since = time.perf_counter()

    def start(self) -> None:
        """Training begins now."""
        self._since = time.perf_counter()

    def tick(self) -> None:
        """A step is behind."""
        timing = self.pace is None
        if timing:
            self._wait()
        elif self._bounded and self._device.type == "cuda":
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self._device))
            self._ahead.append(event)
            if len(self._ahead) > 1:
                self._ahead.popleft().synchronize()
        now = time.perf_counter()
        took, self._since = now - self._since, now
        if timing:
            self._first.append(took)
            timed = self._first[self._settling :]
            if len(timed) == 1:  # the pace at which those before are counted
                self.seconds += sum(min(first, took) for first in self._first)
            elif timed:
                self.seconds += took
            if len(timed) == TIMED_STEPS:
                self.pace = sum(timed) / TIMED_STEPS
        else:
            self.seconds += took

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Time in here is no training."""
        self._wait()
        began = time.perf_counter()
        yield
        self._since += time.perf_counter() - began

    def _wait(self) -> None:
        self._ahead.clear()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
