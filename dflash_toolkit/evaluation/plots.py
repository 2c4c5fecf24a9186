"""The report's kinds of plot as inline SVG: no scripts, no fonts, nothing fetched.

Colours come from the page's style sheet through classes (`c0`..`c7` for prompt sets, `pooled` for all), so
one picture serves light and dark. Every mark carries a <title>: a tooltip, and a name for screen readers.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from .tables import percent

WIDTH, HEIGHT = 560, 290
LEFT, RIGHT, TOP, BOTTOM = 48, 14, 14, 42  # margins around the plotting area
COLOURS = 8
LONGEST_NAME = 18  # characters beside a bar


@dataclass(frozen=True, slots=True)
class Series:
    """One named row of figures and the class that colours it."""

    name: str
    colour: str
    values: tuple[float, ...]  # NaN is left out


def curves(title: str, series: Sequence[Series], x_name: str) -> str:
    """Shares (0 to 1) over slots 1..n, one line per series; a share that is NaN leaves a gap in the line."""
    count = max(len(s.values) for s in series)
    body = _axes(1.0, count, x_name)
    for s in series:
        path, dots, pen = "", [], "M"
        for i, value in enumerate(s.values):
            if math.isnan(value):
                pen = "M"
                continue
            x, y = _x(i, count), _y(value, 1.0)
            path += f"{pen}{x:.1f} {y:.1f} "
            pen = "L"
            dots.append(
                _mark(
                    "circle",
                    f"dot {s.colour}",
                    f"{s.name}, slot {i + 1}: {percent(value)}",
                    cx=x,
                    cy=y,
                    r=3.2,
                )
            )
        body += [f'<path class="line {s.colour}" d="{path.strip()}"/>', *dots]
    return _svg(title, HEIGHT, body)


def histogram(title: str, counts: Sequence[int], mean: float, colour: str) -> str:
    """Share of steps by committed tokens 1..S, with the mean (tau) as a dashed line."""
    total = max(1, sum(counts))
    # the next round share whose quarters are whole percents: four grid lines with short labels
    top = min(1.0, max(0.08, math.ceil(max(counts) / total * 25) / 25))
    body = _axes(top, len(counts), "tokens committed by a step")
    column = (WIDTH - LEFT - RIGHT) / len(counts)
    for i, count in enumerate(counts):
        y = _y(count / total, top)
        name = f"{i + 1} tokens: {count:,} steps, {percent(count / total)}"
        x, width = _x(i, len(counts)) - 0.38 * column, 0.76 * column
        body.append(_mark("rect", f"bar {colour}", name, x=x, y=y, width=width, height=_y(0, top) - y))
    if not math.isnan(mean):
        x = LEFT + (mean - 0.5) * column
        body.append(_mark("line", "mean", f"mean {mean:.2f}", x1=x, x2=x, y1=TOP, y2=HEIGHT - BOTTOM))
        side, anchor = (6, "start") if x < WIDTH - 90 else (-6, "end")
        body.append(_text(x + side, TOP + 11, f"τ {mean:.2f}", "value", anchor))
    return _svg(title, HEIGHT, body)


def bars(title: str, series: Sequence[Series], form: Callable[[float], str], at_one: str) -> str:
    """One horizontal bar per series (its first value, written by `form`) and a line at 1, named `at_one`."""
    row, left, right = 34, 140, 64
    height = row * len(series) + 34
    lengths = [0.0 if math.isnan(s.values[0]) else s.values[0] for s in series]
    scale = (WIDTH - left - right) / max(1.0, *lengths)
    body = []
    for i, (s, length) in enumerate(zip(series, lengths, strict=True)):
        y, label, end = 8 + i * row, form(s.values[0]), length * scale
        name = s.name if len(s.name) <= LONGEST_NAME else s.name[: LONGEST_NAME - 1] + "…"
        body += [
            _text(left - 10, y + 16, name, "label", "end"),
            _mark("rect", f"bar {s.colour}", f"{s.name}: {label}", x=left, y=y, width=end, height=row - 11),
            _text(left + end + 8, y + 16, label, "value", "start"),
        ]
    one = left + scale
    body.append(_mark("line", "mean", at_one, x1=one, x2=one, y1=2, y2=height - 26))
    body.append(_text(min(one, WIDTH - right), height - 9, at_one, "tick"))
    return _svg(title, height, body)


def differences(title: str, rows: Sequence[tuple[str, str, str, float, Sequence[float] | None]]) -> str:
    """A point with its interval for each difference, around a line at zero.

    Args:
        rows: name, what it is of, its colour, difference, and low and high of its interval.
    """
    row, left, right = 34, 140, 64
    height = row * len(rows) + 34
    far = max(abs(end) for *_, value, within in rows for end in (value, *(within or ()))) or 1.0
    centre, scale = (left + WIDTH - right) / 2, (WIDTH - right - left) / 2 / far
    body = [_mark("line", "mean", "no difference", x1=centre, x2=centre, y1=2, y2=height - 26)]
    for i, (name, what, colour, value, within) in enumerate(rows):
        y, label = 18.0 + i * row, f"{value:+.2f}"
        said = f"{name}, {what}: {label}" + (f", 95 % interval {within[0]:+.2f} to {within[1]:+.2f}" if within else "")
        if within:
            low, high = (centre + end * scale for end in within)
            body.append(_mark("line", f"line {colour}", x1=low, x2=high, y1=y, y2=y))
        shown = name if len(name) <= LONGEST_NAME else name[: LONGEST_NAME - 1] + "…"
        body += [
            _mark("circle", f"dot {colour}", said, cx=centre + value * scale, cy=y, r=4.5),
            _text(left - 10, y + 4, shown, "label", "end"),
            _text(WIDTH - right + 8, y + 4, label, "value", "start"),
        ]
    body.append(_text(centre, height - 9, "0: no difference", "tick"))
    return _svg(title, height, body)


def _svg(title: str, height: int, body: Sequence[str]) -> str:
    parts = "\n".join(body)
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}">\n{parts}\n</svg>'


def _axes(top: float, columns: int, x_name: str) -> list[str]:
    """Grid lines at the quarters of `top` (a share), numbered columns, and what they count."""
    body = []
    for quarter in range(5):
        share = top * quarter / 4
        y = _y(share, top)
        body.append(_mark("line", "grid" if quarter else "axis", x1=LEFT, x2=WIDTH - RIGHT, y1=y, y2=y))
        body.append(_text(LEFT - 8, y + 4, percent(share, 0), "tick", "end"))
    for i in range(columns):
        body.append(_text(_x(i, columns), HEIGHT - BOTTOM + 17, str(i + 1), "tick"))
    body.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, x_name, "label"))
    return body


def _x(index: int, count: int) -> float:
    """Centre of column `index` of `count`."""
    return LEFT + (index + 0.5) * (WIDTH - LEFT - RIGHT) / count


def _y(value: float, top: float) -> float:
    return HEIGHT - BOTTOM - value / top * (HEIGHT - TOP - BOTTOM)


def _mark(tag: str, kind: str, title: str = "", **attributes: float) -> str:
    numbers = " ".join(f'{name}="{value:.1f}"' for name, value in attributes.items())
    inside = f"<title>{escape(title)}</title>" if title else ""
    return f'<{tag} class="{kind}" {numbers}>{inside}</{tag}>'


def _text(x: float, y: float, content: str, kind: str, anchor: str = "middle") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(content)}</text>'
