"""Saves a run: training waits for a copy of the resume point, which is then written in the background."""

import functools
import math
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

from ..distributed.parallel import Processes
from ..distributed.zero import Learner
from ..optim.schedule import Part
from .definition import Run
from .measure import discard, kept_steps
from .resume_point import ResumePoint, TrainState, Writer, host_copy, save_state


class Saving:
    """Writes `work`/state.pt. Every process calls every method.

    A single process handles Ctrl-C until `close`: it sets `stops`, and the step is saved.

    Raises:
        UserError: the disk is full; raised by the next `__call__` or `wait`.
    """

    def __init__(self, run: Run, processes: Processes, say: Callable[[str], None] = print) -> None:
        self._run, self._processes, self._writer, self._say = run, processes, Writer(), say
        self._saved = time.perf_counter()
        self.stops = False  # after this step
        self._handler: Any = None
        if processes.world == 1 and threading.current_thread() is threading.main_thread():
            self._handler = signal.signal(signal.SIGINT, self._interrupt)

    def _interrupt(self, *_: object) -> None:
        """Handles Ctrl-C: the first one ends the run after the step, with a resume point; a second one, at once."""
        if self.stops:
            minutes = math.ceil((time.perf_counter() - self._saved) / 60)
            raise KeyboardInterrupt(
                f"interrupted; run the same command again to resume; up to {minutes} min of steps are repeated"
            )
        self.stops = True
        self._say("stopping after this step, with a resume point; press Ctrl-C again to stop at once")

    @property
    def overdue(self) -> bool:
        """Whether the last resume point is `run.save_minutes` old and written."""
        return time.perf_counter() - self._saved >= 60 * self._run.config.run.save_minutes and not self._writer.busy

    @property
    def failed(self) -> bool:
        """Whether a resume point could not be written; `wait` raises the error."""
        return self._writer.failed

    def due(self, state: TrainState, overdue: bool) -> bool:
        """Whether to save this step."""
        every = self._run.config.run.save_every
        return self.stops or state.done >= 1 or (state.step % every == 0 if every else overdue)

    def __call__(
        self, learner: Learner, state: TrainState, seconds: float, history: list[Part], others: dict[str, Any]
    ) -> None:
        """Saves a `ResumePoint`: the learner's state, the run's place, and the fields in `others`."""
        self._saved = time.perf_counter()
        self.wait()  # keeps a single copy in memory, and reports a full disk to all processes
        weights, moments, average = learner.snapshot()
        if self._processes.main:
            weights, moments, average = host_copy((weights, moments, average), self._run.target.device)
            point = ResumePoint(
                step=state.step,
                fingerprint=self._run.fingerprint,
                drafter=weights,
                optimizer=moments,
                elapsed_s=seconds,
                micro=state.micro,
                average=average,
                rate=state.rate,
                history=history,
                **others,
            )
            self._writer.begin(functools.partial(self._write, point))

    def _write(self, point: ResumePoint) -> None:
        work = self._run.work
        save_state(point, work / "state.pt")
        for step in kept_steps(work):
            if point.best and step < point.best["step"]:  # no resume point needs it
                discard(work, step)

    def wait(self) -> None:
        """Waits until nothing is being written."""
        self._processes.rank_zero(self._writer.wait)

    def close(self) -> None:
        """Waits until nothing is being written, on this process alone; ignores errors."""
        self._writer.close()
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)
