"""Plots of reports as inline SVG, without scripts, fonts or external files.

Colours come from the page's style sheet through classes (`c0`..`c7` for prompt sets, `pooled` for all), so a plot works
in light and dark mode. Series also differ in the shape of their marks. Whiskers are 95 % intervals. Every mark has a
<title> for tooltips and screen readers.
"""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

from ..stats.bootstrap import Interval
from .table import percent
from .verdict import judge

WIDTH, HEIGHT = 440, 260
LEFT, RIGHT, TOP, BOTTOM = 44, 10, 24, 42  # margins around the plotting area
ROW, BAR = 42, 13  # height of a bar with its name, and of the bar
LONGEST_NAME = 36  # characters, next to a figure
COLOURS = 8
# centred at the origin; series differ in shape, and the second half of the colours is filled
SHAPES = (
    "M-3.4 0a3.4 3.4 0 1 0 6.8 0a3.4 3.4 0 1 0 -6.8 0z",
    "M-3 -3h6v6h-6z",
    "M0 -4L3.9 3H-3.9z",
    "M0 -4.4L4.4 0L0 4.4L-4.4 0z",
)

Form = Callable[[float], str]  # formats a figure


@dataclass(frozen=True, slots=True)
class Series:
    """A named row of figures and the class of its colour."""

    name: str
    colour: str
    values: tuple[float, ...]  # NaN is not drawn
    intervals: tuple[Interval | None, ...] = ()  # one per value, or empty

    def points(self) -> Iterator[tuple[int, float, Interval | None]]:
        """Yields index, value and interval of finite values."""
        for i, value in enumerate(self.values):
            if math.isfinite(value):
                yield i, value, self.intervals[i] if self.intervals else None


def colour_of(place: int) -> str:
    """Returns the class of the series at this place."""
    return f"c{place % COLOURS}"


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Returns at most `most` round tick values that enclose `low` and `high`."""
    high = high if high > low else low + 1.0
    power = 10.0 ** (math.floor(math.log10(high - low)) - 1)
    for factor in (1, 2, 2.5, 5, 10, 20, 25, 50, 100):
        step = factor * power
        first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
        if last - first < most:
            break
    return [round(i * step, 12) for i in range(first, last + 1)]


def curves(
    title: str,
    series: Sequence[Series],
    x_name: str,
    *,
    labels: Sequence[str] = (),
    form: Form = lambda share: percent(share, 0),
    top: float | None = 1.0,
    at_one: str = "",
) -> str:
    """Draws figures over columns, one line per series; NaN leaves a gap.

    Args:
        labels: of the columns (default: 1, 2, ...).
        top: end of the axis; None: chosen from the figures.
        at_one: label of a line at 1; empty: no line.
    """
    labels = labels or [str(i + 1) for i in range(max(len(s.values) for s in series))]
    ends = [end for s in series for _, value, within in s.points() for end in (value, *(within or ()))]
    scale = ticks(0.0, top or max([*ends, 1.0 if at_one else 0.0]))
    body = _axes(scale, labels, x_name, form)
    if at_one:
        y = _y(1.0, scale[-1])
        body.append(_mark("line", "mean", at_one, x1=LEFT, x2=WIDTH - RIGHT, y1=y, y2=y))
    column = (WIDTH - LEFT - RIGHT) / len(labels)
    for place, s in enumerate(series):
        # offset, or whiskers of a column would overlap
        aside = (place - (len(series) - 1) / 2) * min(5.0, 0.6 * column / len(series))
        found = [(i, _x(i, len(labels)) + aside, value, within) for i, value, within in s.points()]
        path = "".join(
            f"{'L' if at and found[at - 1][0] == i - 1 else 'M'}{x:.1f} {_y(value, scale[-1]):.1f} "
            for at, (i, x, value, _) in enumerate(found)
        )
        body.append(f'<path class="line {s.colour}" d="{path.strip()}"/>')
        for i, x, value, within in found:
            said = f"{s.name}, {x_name} {labels[i]}: {form(value)}{_within(within, form)}"
            if within:
                low, high = (_y(min(end, scale[-1]), scale[-1]) for end in within)
                body.append(_mark("line", f"whisker {s.colour}", x1=x, x2=x, y1=low, y2=high))
            body.append(_dot(s.colour, x, _y(value, scale[-1]), said))
    return _svg(title, HEIGHT, body)


def histogram(title: str, counts: Sequence[int], mean: float, colour: str) -> str:
    """Draws the share of steps by committed tokens 1..S, with the mean (tau) as a dashed line."""
    total = max(1, sum(counts))
    scale = ticks(0.0, max(*counts, 1) / total)
    body = _axes(scale, [str(i + 1) for i in range(len(counts))], "tokens committed by a step", _share)
    column = (WIDTH - LEFT - RIGHT) / len(counts)
    for i, count in enumerate(counts):
        y = _y(count / total, scale[-1])
        name = f"{i + 1} tokens: {count:,} steps, {percent(count / total)}"
        x, width = _x(i, len(counts)) - 0.38 * column, 0.76 * column
        body.append(_mark("rect", f"bar {colour}", name, x=x, y=y, width=width, height=_y(0, 1) - y))
    if math.isfinite(mean):
        x = LEFT + (mean - 0.5) * column
        body.append(_mark("line", "mean", f"mean {mean:.2f}", x1=x, x2=x, y1=TOP - 6, y2=HEIGHT - BOTTOM))
        # above the plotting area, clear of the bars
        body.append(_text(min(max(x, LEFT + 18), WIDTH - RIGHT - 18), TOP - 11, f"τ {mean:.2f}", "value"))
    return _svg(title, HEIGHT, body)


def bars(title: str, series: Sequence[Series], form: Form, at_one: str, losses: bool = False) -> str:
    """Draws one horizontal bar per series: its first value, formatted by `form`, with its interval.

    Args:
        at_one: label of a line at 1.
        losses: values are speed-ups; the bar of a loss is hatched and labelled.
    """
    ends = [end for s in series for _, value, within in s.points() for end in (value, *(within or ()))]
    scale = ticks(0.0, max(1.0, *ends, 0.0))
    body, height = _rows(scale, len(series), form, 1.0, at_one)
    if losses:
        body.insert(0, HATCH)
    for i, s in enumerate(series):
        y = i * ROW
        body.append(_text(0, y + 14, _cut(s.name), "label", "start"))
        for _, value, within in s.points():
            outcome = judge(value, within) if losses else "good"
            lost = outcome == "bad"
            said = f"{form(value)}{_within(within, form)}"
            word = {"bad": "▼ slower ", "unsure": "not sure "}.get(outcome, "") + form(value)
            body.append(_text(WIDTH, y + 14, word, f"value{' lost' if lost else ''}", "end"))
            end = _along(min(value, scale[-1]), scale)
            size = {"x": 0.0, "y": y + 20, "width": end, "height": BAR}
            body.append(_mark("rect", f"bar {s.colour}{' lost' if lost else ''}", f"{s.name}: {said}", **size))
            body += _whisker(within, scale, y + 20 + BAR / 2, "text")
    return _svg(title, height, body)


def differences(title: str, rows: Sequence[tuple[str, str, str, float, Sequence[float] | None]]) -> str:
    """Draws a point with its interval for each difference, around a line at zero.

    Args:
        rows: name, run, colour, difference, and low and high end of its interval.
    """
    ends = [end for *_, value, within in rows for end in (value, *(within or ()))]
    scale = ticks(min(0.0, *ends, 0.0), max(0.0, *ends, 0.0))
    body, height = _rows(scale, len(rows), lambda value: f"{value:+g}" if value else "0", 0.0, "no difference")
    form = ("{:+,.0f}" if max(-scale[0], scale[-1]) >= 100 else "{:+.2f}").format
    for i, (name, what, colour, value, within) in enumerate(rows):
        y, interval = i * ROW, (within[0], within[1]) if within else None
        said = f"{name}, {what}: {form(value)}{_within(interval, form)}"
        body.append(_text(0, y + 14, _cut(f"{name}: {what}"), "label", "start"))
        body.append(_text(WIDTH, y + 14, form(value), "value", "end"))
        body += _whisker(interval, scale, y + 20 + BAR / 2, colour)
        body.append(_dot(colour, _along(value, scale), y + 20 + BAR / 2, said))
    return _svg(title, height, body)


def swatch(colour: str) -> str:
    """Draws a series' mark on its line, for a legend."""
    line = f'<path class="line {colour}" d="M0 6H24"/>'
    return f'<svg class="swatch" viewBox="0 0 24 12" aria-hidden="true">{line}{_dot(colour, 12, 6)}</svg>'


# ---- parts --------------------------------------------------------------------------------------------------------

HATCH = (
    '<defs><pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect class="hatch" width="2.5" height="6"/></pattern></defs>'
)


def _svg(title: str, height: float, body: Sequence[str]) -> str:
    parts = "\n".join(body)
    return f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{escape(title)}">\n{parts}\n</svg>'


def _axes(scale: Sequence[float], labels: Sequence[str], x_name: str, form: Form) -> list[str]:
    """Draws grid lines at the ticks, column labels and the name of the x axis."""
    body = []
    for value in scale:
        y = _y(value, scale[-1])
        body.append(_mark("line", "grid" if value else "axis", x1=LEFT, x2=WIDTH - RIGHT, y1=y, y2=y))
        body.append(_text(LEFT - 6, y + 4, _short(form(value)), "tick", "end"))
    every = math.ceil(len(labels) * 8.0 * max(map(len, labels)) / (WIDTH - LEFT - RIGHT))
    for i, label in enumerate(labels):
        if i % every == 0:
            body.append(_text(_x(i, len(labels)), HEIGHT - BOTTOM + 16, label, "tick"))
    body.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 7, x_name, "tick"))
    return body


def _rows(scale: Sequence[float], count: int, form: Form, mark: float, meaning: str) -> tuple[list[str], float]:
    """Returns the grid of `count` rows with a dashed line at `mark`, and the total height."""
    end, body = count * ROW + 2.0, []
    for value in sorted({*scale, mark}):
        x = _along(value, scale)
        kind = "mean" if value == mark else "grid" if value else "axis"
        body += [_mark("line", kind, x1=x, x2=x, y1=row * ROW + 18, y2=row * ROW + 36) for row in range(count)]
        anchor = "start" if x < 12 else "end" if x > WIDTH - 12 else "middle"
        body += [_text(x, end + 12, _short(form(value)), "tick", anchor)] if value in scale else []
    body.append(_text(0, end + 28, f"dashed: {meaning}", "tick", "start"))
    return body, end + 34


def _whisker(within: Interval | None, scale: Sequence[float], y: float, colour: str) -> list[str]:
    if not within:
        return []
    low, high = (_along(min(max(end, scale[0]), scale[-1]), scale) for end in within)
    caps = [_mark("line", f"whisker {colour}", x1=x, x2=x, y1=y - 4, y2=y + 4) for x in (low, high)]
    return [_mark("line", f"whisker {colour}", x1=low, x2=high, y1=y, y2=y), *caps]


def _along(value: float, scale: Sequence[float]) -> float:
    """Returns x of a value on a horizontal axis from the first to the last tick."""
    return 2 + (value - scale[0]) / (scale[-1] - scale[0]) * (WIDTH - 4)


def _x(index: int, count: int) -> float:
    """Returns the centre of column `index` of `count`."""
    return LEFT + (index + 0.5) * (WIDTH - LEFT - RIGHT) / count


def _y(value: float, top: float) -> float:
    return HEIGHT - BOTTOM - value / top * (HEIGHT - TOP - BOTTOM)


def _cut(name: str) -> str:
    return name if len(name) <= LONGEST_NAME else name[: LONGEST_NAME - 1] + "…"


def _short(figure: str) -> str:
    """Removes trailing zeros of a tick: 2x, not 2.00x."""
    return re.sub(r"\.?0+(?=\D*$)", "", figure) if "." in figure else figure


def _share(value: float) -> str:
    return f"{100 * value:g} %"


def _within(within: Interval | None, form: Form) -> str:
    return f", 95 % interval {form(within[0])} to {form(within[1])}" if within else ""


def _dot(colour: str, x: float, y: float, title: str = "") -> str:
    place = int(colour[1:]) if colour[1:].isdigit() else 0
    kind = "dot full" if place >= len(SHAPES) or colour == "pooled" else "dot"
    inside = f"<title>{escape(title)}</title>" if title else ""
    shape = SHAPES[place % len(SHAPES)]
    return f'<path class="{kind} {colour}" transform="translate({x:.1f} {y:.1f})" d="{shape}">{inside}</path>'


def _mark(tag: str, kind: str, title: str = "", **attributes: float) -> str:
    numbers = " ".join(f'{name}="{value:.1f}"' for name, value in attributes.items())
    inside = f"<title>{escape(title)}</title>" if title else ""
    return f'<{tag} class="{kind}" {numbers}>{inside}</{tag}>'


def _text(x: float, y: float, content: str, kind: str, anchor: str = "middle") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(content)}</text>'
