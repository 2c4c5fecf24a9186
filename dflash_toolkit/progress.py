"""One progress bar for every long stage: done/total, rate in the stage's own unit, time left."""

import os
import time

import rich.console
from rich.progress import BarColumn, MofNCompleteColumn, Task, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

PLAIN_EVERY_S = 10.0  # how often a stage speaks up where no bar can be drawn


class Progress:
    """A context manager around one bar on stderr; in a log file, a plain line every few seconds instead.

    Args:
        total: None is not known.
        beside: a bar that goes on meanwhile; this one stands under it, and goes when it is done.
    """

    def __init__(self, stage: str, total: int | None, unit: str = "it", beside: "Progress | None" = None) -> None:
        self._unit = unit
        self._units = 0.0
        self._beside = beside
        self._shown = os.environ.get("RANK", "0") == "0"  # of several processes, the first speaks for all
        self._spoke = time.monotonic()
        if beside is not None:
            self._console: rich.console.Console = beside._console
            self._bar: RichProgress = beside._bar
            self._task = self._bar.add_task(stage, total=total, rate="", note="")
            return
        self._console = rich.console.Console(stderr=True)
        self._bar = RichProgress(
            TextColumn("{task.description:<10}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
            TextColumn("left"),
            TextColumn("{task.fields[note]}"),
            console=self._console,
            disable=not self._shown,
        )
        self._task = self._bar.add_task(stage, total=total, rate="", note="")

    def __enter__(self) -> "Progress":
        if self._beside is None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._beside is None:
            self._bar.stop()
        else:
            self._bar.remove_task(self._task)

    @property
    def _now(self) -> Task:
        return next(task for task in self._bar.tasks if task.id == self._task)

    def reach(self, done: float, units: float) -> None:
        """Move to `done` of the total, by work of so many `units`."""
        self.advance(done - self._now.completed, units)

    def advance(self, done: float = 1, units: float | None = None, note: str | None = None) -> None:
        """Move by `done`; `units` is how much work that was in the bar's unit (default: `done`)."""
        self._units += done if units is None else units
        task = self._now
        rate = f"{self._units / task.elapsed:.1f} {self._unit}/s" if task.elapsed else ""
        if note is not None:
            self._bar.update(self._task, note=note)
        self._bar.update(self._task, advance=done, rate=rate)
        if not self._console.is_terminal and time.monotonic() - self._spoke > PLAIN_EVERY_S and not task.finished:
            self._spoke = time.monotonic()
            total = "?" if task.total is None else f"{task.total:.0f}"
            left = "?" if task.time_remaining is None else f"{task.time_remaining:.0f} s"
            self.print(f"{task.description} {task.completed:.0f}/{total} {rate} {left} left {task.fields['note']}")

    def grow(self, more: float) -> None:
        """There is more to do than was known."""
        total = next(task.total for task in self._bar.tasks if task.id == self._task)
        self._bar.update(self._task, total=None if total is None else total + more)

    def print(self, message: str) -> None:
        """A line above the bar."""
        if not self._shown:
            return
        self._bar.console.print(message, markup=False, highlight=False, soft_wrap=True)
