"""A table of text cells, the form of its figures, and how a terminal shows it. Without torch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table as Grid
from rich.text import Text

MISSING = "-"  # nothing to count
COLOURS = {"good": "green", "bad": "red", "unsure": "yellow", "unknown": "default"}  # by a verdict's outcome


@dataclass(frozen=True, slots=True)
class Table:
    """Plain text cells, which the renderer escapes. The first column names the row."""

    caption: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numeric: bool = True  # the other columns hold figures, set flush right

    def without(self, *names: str) -> "Table":
        """Returns the table without the columns of these names."""
        kept = [i for i, name in enumerate(self.header) if name not in names]
        header, *rows = (tuple(cells[i] for i in kept) for cells in (self.header, *self.rows))
        return Table(self.caption, header, tuple(rows), self.numeric)


def number(value: float | None, digits: int = 2) -> str:
    """Formats a figure; a dash is one that could not be measured."""
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
    """Prints a table. A file or a pipe gets whole rows, a terminal folds cells that are too wide for it.

    Args:
        colours: one style a row (default: none).
    """
    console = Console()
    grid = Grid(box=box.SIMPLE_HEAD, pad_edge=False)
    if table.caption:
        say(table.caption, "bold")
    for place, name in enumerate(table.header):
        grid.add_column(Text(name), justify="right" if place and table.numeric else "left", overflow="fold")
    for place, row in enumerate(table.rows):  # no markup: a name may look like a style
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
    """Prints a sentence in full, coloured where the output is a terminal."""
    Console(highlight=False).print(Text(text, style), soft_wrap=True)
