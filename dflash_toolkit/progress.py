"""One progress bar for every long stage: done/total, rate in the stage's own unit, time left."""

import rich.console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress


class Progress:
    """A context manager around one bar on stderr. `advance` moves it; `note` shows a running figure beside it."""

    def __init__(self, stage: str, total: int, unit: str = "it") -> None:
        self._unit = unit
        self._units = 0.0
        self._bar = RichProgress(
            TextColumn("{task.description:<10}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
            TextColumn("left"),
            TextColumn("{task.fields[note]}"),
            console=rich.console.Console(stderr=True),
        )
        self._task = self._bar.add_task(stage, total=total, rate="", note="")

    def __enter__(self) -> "Progress":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def advance(self, done: int = 1, units: float | None = None, note: str | None = None) -> None:
        """Move by `done`; `units` is how much work that was in the bar's unit (default: `done`)."""
        self._units += done if units is None else units
        elapsed = self._bar.tasks[self._task].elapsed or 0.0
        rate = f"{self._units / elapsed:.1f} {self._unit}/s" if elapsed > 0 else ""
        if note is not None:
            self._bar.update(self._task, note=note)
        self._bar.update(self._task, advance=done, rate=rate)

    def print(self, message: str) -> None:
        """A line above the bar."""
        self._bar.console.print(message, markup=False, highlight=False)
