"""Shows one progress bar for every long stage: done/total, rate in the stage's own unit, remaining time."""

import datetime
import os
import sys
import time

import rich.console
from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn, Task, TextColumn
from rich.progress import Progress as RichProgress
from rich.text import Text

PLAIN_EVERY_S = 10.0  # between two lines of a stage where no bar can be drawn


def remaining(task: Task) -> str:
    """Returns the remaining time, as `0:34:19 left`; empty if it is unknown."""
    seconds = task.time_remaining
    return "" if seconds is None or task.finished else f"{datetime.timedelta(seconds=round(seconds))} left"


class Remaining(ProgressColumn):
    """The same in a bar."""

    max_refresh = 0.5

    def render(self, task: Task) -> Text:
        return Text(remaining(task), style="progress.remaining")


class Progress:
    """A context manager around one bar on stderr; in a log file, it prints a plain line every few seconds instead.

    Args:
        total: None if it is unknown.
        under: a bar that continues meanwhile; this one is drawn below it, and removed when it is done.
    """

    def __init__(self, stage: str, total: int | None, unit: str = "it", under: "Progress | None" = None) -> None:
        self._unit = unit
        self._units = 0.0
        self._under = under
        self._shown = os.environ.get("RANK", "0") == "0"  # only the first process draws
        self._spoke = time.monotonic()
        if under is not None:
            self._console: rich.console.Console = under._console
            self._bar: RichProgress = under._bar
            self._task = self._bar.add_task(stage, total=total, rate="", note="")
            return
        self._console = rich.console.Console(stderr=True)
        self._bar = RichProgress(
            TextColumn("{task.description:<10}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            Remaining(),
            TextColumn("{task.fields[note]}"),
            console=self._console,
            disable=not self._shown,
        )
        self._task = self._bar.add_task(stage, total=total, rate="", note="")

    def __enter__(self) -> "Progress":
        if self._under is None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._under is None:
            self._bar.stop()
        else:
            self._bar.remove_task(self._task)

    @property
    def _now(self) -> Task:
        return next(task for task in self._bar.tasks if task.id == self._task)

    def reach(self, done: float, units: float) -> None:
        """Moves to `done` of the total, after `units` units of work."""
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
            reached = f"{task.completed:.0f}" + ("" if task.total is None else f"/{task.total:.0f}")
            parts = (task.description, reached, rate, remaining(task), task.fields["note"])
            self.print(" ".join(part for part in parts if part))

    def grow(self, more: float) -> None:
        """Raises the total."""
        total = next(task.total for task in self._bar.tasks if task.id == self._task)
        self._bar.update(self._task, total=None if total is None else total + more)

    def print(self, message: str) -> None:
        """Prints a line above the bar."""
        if not self._shown:
            return
        self._bar.console.print(message, markup=False, highlight=False, soft_wrap=True)


def disable_library_bars() -> None:
    """Turns off the bars of transformers, which would be drawn between ours; in a log file, also those of downloads."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    if not sys.stderr.isatty():
        import huggingface_hub.utils

        huggingface_hub.utils.disable_progress_bars()
