"""A table of text cells, formats of its figures, and its output to a terminal. Imports no torch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table as Grid
from rich.text import Text

MISSING = "-"  # not measured
COLOURS = {"good": "green", "bad": "red", "unsure": "yellow", "unknown": "default"}  # by a verdict's outcome


@dataclass(frozen=True, slots=True)
class Table:
    """Plain text cells, escaped by the renderer. The first column names the row."""

    caption: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numeric: bool = True  # the other columns are aligned right

    def without(self, *names: str) -> "Table":
        """Returns the table without the columns of these names."""
        kept = [i for i, name in enumerate(self.header) if name not in names]
        header, *rows = (tuple(cells[i] for i in kept) for cells in (self.header, *self.rows))
        return Table(self.caption, header, tuple(rows), self.numeric)


def number(value: float | None, digits: int = 2) -> str:
    """Formats a figure, or a dash if it was not measured."""
    return MISSING if value is None or not math.isfinite(value) else f"{value:,.{digits}f}"


def percent(value: float | None, digits: int = 1) -> str:
    """Formats a share."""
    return MISSING if value is None or not math.isfinite(value) else f"{100 * value:.{digits}f} %"


def times(value: float | None) -> str:
    """Formats a ratio."""
    return MISSING if value is None or not math.isfinite(value) else f"{value:.2f}x"


def between(figure: str, within: Sequence[float] | None) -> str:
    """Adds an interval to a figure."""
    return figure if within is None else f"{figure} [{within[0]:.2f}, {within[1]:.2f}]"


# ---- terminals ------------------------------------------------------------------------------------------------------


def show_table(table: Table, colours: Sequence[str] = ()) -> None:
    """Prints a table. In a file or a pipe rows stay whole; in a terminal cells that are too wide are folded.

    Args:
        colours: one style per row (default: none).
    """
    console = Console()
    grid = Grid(box=box.SIMPLE_HEAD, pad_edge=False)
    if table.caption:
        say(table.caption, "bold")
    for place, name in enumerate(table.header):
        grid.add_column(Text(name), justify="right" if place and table.numeric else "left", overflow="fold")
    for place, row in enumerate(table.rows):  # Text, as a name may look like markup
        grid.add_row(*map(Text, row), style=colours[place] if colours else None)
    needed = Measurement.get(console, console.options.update(width=10_000), grid).maximum
    if console.is_terminal:
        console.print(grid)
    else:
        print("\n".join(line.rstrip() for line in _lines(grid, needed)))


def _lines(grid: Grid, width: int) -> list[str]:
    plain = Console(width=width, color_system=None)
    with plain.capture() as captured:
        plain.print(grid)
    return captured.get().splitlines()


def say(text: str, style: str = "") -> None:
    """Prints a sentence without wrapping, coloured in a terminal."""
    Console(highlight=False).print(Text(text, style), soft_wrap=True)
