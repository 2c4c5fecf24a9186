"""The budget of a run, in minutes, steps or epochs, and the share of it that is done."""

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

from ..optim.schedule import Joint, PackedSchedule, Schedule, joined_factor, learning_rate_factor
from ..training_options import OptimOptions
from .resume_point import ResumePoint, TrainState

TIMED_STEPS = 3  # steps to measure the pace
PARTS = 1_000_000  # resolution of the learning rate's schedule in a run by the clock


def plan_of(optim: dict[str, Any]) -> dict[str, float]:
    """Returns the option that ends a run, from a mapping of `OptimOptions`."""
    return next(({name: optim[name]} for name in ("minutes", "steps") if optim[name]), {"epochs": optim["epochs"]})


class Budget:
    """Steps, epochs or minutes of a run; gives the share that is `done`, between 0 and 1, and the learning rate.

    Args:
        group: micro batches of a step.
        point: the resume point; if its budget differs, the rate moves from the old schedule to the new one.
        output: directory of the run, for the error.

    Attributes:
        steps: steps of the run; 0 if it ends by the clock.
        seconds: seconds of the run; 0 if it does not end by the clock.
        end: micro batches of the schedule that count.

    Raises:
        UserError: the run is already longer than this budget.
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
                    f"optim.{name} is {asked:g}, but the run in {output} has done {spent[name]:g} {name}; raise it, or "
                    f"give another --output"
                )

    def done(self, step: int, seconds: float) -> float:
        """Returns the share of the run that is done, between 0 and 1."""
        return min(1.0, seconds / self.seconds) if self.seconds else step / self.steps

    def rate(self, state: TrainState) -> float:
        """Returns the next step's share of the peak learning rate."""
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
        # by the data: steps before a resumption may have had another size
        return micro // self._group, math.ceil(self._schedule.total / self._group)

    def steps_left(self, step: int, seconds: float, pace: float) -> int:
        """Returns the number of steps left, at `pace` seconds per step."""
        return math.ceil((self.seconds - seconds) / pace) if self.seconds else self.steps - step

    def too_short(self, steps: int) -> list[str]:
        """Returns warnings for a run of `steps` steps."""
        least = math.ceil(1 / self._optim.warmup) if self._optim.warmup else 1
        if steps >= least:
            return []
        return [
            f"{steps} steps are too few to learn: the warm-up is less than one (optim.warmup={self._optim.warmup:g}); "
            f"train for at least {least}"
        ]

    def place(self, step: int, seconds: float) -> str:
        """Returns the place where a run resumes, in words."""
        if self.seconds:
            return f"step {step}, {seconds / 60:.3g} of {self._optim.minutes:g} minutes"
        return f"step {step} of {self.steps}"

    def to_state(self) -> dict[str, Any]:
        """Returns the budget's fields of a `ResumePoint`."""
        joint = self._joint
        return {"plan": self._plan, "joint": joint and {name: getattr(joint, name) for name in joint.__slots__}}


class TrainingClock:
    """Counts seconds of training, without compilation and without pauses.

    The first steps of a process compile. Their time without compilation is unknown until later steps are timed, so no
    time is counted until then; afterwards they are counted at the measured pace.

    GPU steps run asynchronously. The clock therefore waits for the device around the timed steps and before a pause. In
    a run that ends by the clock, each step waits for the previous one.

    Args:
        seconds: of the run so far.
        settling: number of steps that compile.
        bounded: allow at most one step in flight.
    """

    def __init__(self, device: torch.device, seconds: float, settling: int, bounded: bool) -> None:
        self.seconds = seconds
        self.pace: float | None = None  # seconds per step, once timed
        self._device, self._settling, self._bounded = device, settling, bounded
        self._first: list[float] = []
        self._ahead: deque[torch.cuda.Event] = deque()
        self._since = time.perf_counter()

    def start(self) -> None:
        """Starts the clock."""
        self._since = time.perf_counter()

    def tick(self) -> None:
        """Counts a step."""
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
            if len(timed) == 1:  # the pace at which the compiling steps are counted
                self.seconds += sum(min(first, took) for first in self._first)
            elif timed:
                self.seconds += took
            if len(timed) == TIMED_STEPS:
                self.pace = sum(timed) / TIMED_STEPS
        else:
            self.seconds += took

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Excludes the time inside."""
        self._wait()
        began = time.perf_counter()
        yield
        self._since += time.perf_counter() - began

    def _wait(self) -> None:
        self._ahead.clear()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
