"""Renders a report as one self-contained HTML page, without scripts or external files."""

import functools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path

import jinja2

from ..stats.bootstrap import Interval
from .answers import SIBLINGS, worst_and_best
from .plots import Series, bars, colour_of, curves, histogram, swatch
from .results import Report, Summary
from .tables import (
    DEFINITIONS,
    SWEPT,
    category_table,
    differences_table,
    identical,
    latency_table,
    lengths_table,
    number,
    prompt_length_table,
    recall_table,
    setup_table,
    slot_tables,
    summary_table,
    sweep_tables,
    times,
    ways_table,
)
from .verdict import SIGNS, Outcome, judge_summary, verdict

Chart = tuple[str, str]  # title, SVG
FEW = 6  # maximum number of prompt sets with curves of their own
COUNTED = 50  # minimum number of steps of a drawn share


@dataclass(frozen=True, slots=True)
class Tile:
    """A main figure."""

    name: str
    value: str
    note: str
    outcome: Outcome | None = None  # None if it is neither good nor bad

    @property
    def sign(self) -> str:
        return SIGNS[self.outcome] if self.outcome else ""


def render_page(report: Report) -> str:
    """Renders the whole page; text from users is escaped."""
    section = report.sections[0]
    results = [summary_table(report), category_table(section), prompt_length_table(section), ways_table(report)]
    worst, best = worst_and_best(report)
    return template("page.html.jinja").render(
        report=report,
        setting=_setting(report),
        verdict=verdict(report),
        signs=SIGNS,
        tiles=_tiles(report),
        marks=[(s.name, swatch(s.colour)) for s in _few(report, _series(report, lambda summary: ()))],
        results=[found for found in results if found],
        set_charts=_set_charts(report),
        sweep_tables=sweep_tables(report.sweeps),
        sweep_charts=list(_sweep_charts(report)),
        slots=[table for table in (*slot_tables(report), recall_table(report)) if table],
        slot_charts=_slot_charts(report),
        counted=COUNTED,
        lengths=lengths_table(report),
        length_charts=_length_charts(report),
        latency=latency_table(section),
        differences=differences_table(report),
        worst=worst,
        best=best,
        offered=_offered(report),
        siblings=SIBLINGS,
        definitions=DEFINITIONS,
        setup=setup_table(report),
    )


@functools.cache  # compiling is slower than rendering
def template(name: str) -> jinja2.Template:
    """Loads a template of this folder, with escaping."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"code": code, "figure": figure}
    return environment.get_template(name)


def code(text: str) -> str:
    """Marks text between backticks as code and escapes the rest."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


def figure(cell: str) -> str:
    """Allows line breaks in a cell only after an interval and before a bracket."""
    return cell.replace(" ", "\u00a0").replace("],\u00a0", "], ").replace("\u00a0(", " (")


def _offered(report: Report) -> str:
    """Describes the shown probabilities; empty without draft trees."""
    if not any(m.offered_texts for found in report.sets.values() for m in found.measurements):
        return ""
    runtime = report.arguments.get("runtime")
    return "calibrated on accepted tokens" if runtime == "engine" else "as the drafter computes it"


def _setting(report: Report) -> str:
    environment, arguments = report.environment, report.arguments
    ways = "; ".join(section.name for section in report.sections)
    sampled = any(section.temperature for section in report.sections)
    drafts = "sampled drafts, " if sampled and arguments["draft_sample_method"] == "probabilistic" else ""
    seed = f", seed {arguments['seed']}" if sampled else ""
    return (
        f"{report.machine}, {report.load}, {drafts}{ways}{seed}, at most "
        f"{arguments['max_tokens']} tokens an answer, {environment.date[:16].replace('T', ' ')} UTC"
    )


def _tiles(report: Report) -> list[Tile]:
    summary, found = report.overall, verdict(report)
    drafted, plain, within = summary.drafted, summary.plain, summary.intervals
    tau = f"{_between(within['tau_pooled'])}tokens per verify step, of {report.block_size} possible"
    tiles = [
        Tile("Acceptance length τ", number(drafted.tau_pooled), tau),
        Tile("Tokens per second", number(drafted.tokens_per_second, 1), "with the drafter, prefill left out"),
    ]
    if not plain:
        return [*tiles, Tile("Requests", f"{drafted.answers:,}", f"{drafted.tokens:,} tokens; no plain baseline")]
    over = f"{_between(within['speedup'])}over {number(plain.tokens_per_second, 1)} tokens/s plain"
    return [
        Tile("Speed-up", times(summary.speedup), over, judge_summary(summary)),
        *tiles,
        Tile("Identical to plain", identical(summary), "answers, token for token", found.exactness),
    ]


def _between(within: Interval | None) -> str:
    return f"{within[0]:.2f} to {within[1]:.2f} (95 %); " if within else ""


# ---- plots --------------------------------------------------------------------------------------------------------


def _series(report: Report, values: Callable[[Summary], Sequence[float | None]], figure: str = "") -> list[Series]:
    """Returns one series per set, then all sets pooled if there are several, with the intervals of `figure`."""
    found = []
    for i, (name, summary) in enumerate(report.labelled):
        colour = colour_of(i) if i < len(report.sets) else "pooled"
        within = summary.intervals[figure] if figure else None
        # one interval is a pair of numbers, several are a tuple of pairs
        intervals = tuple(within) if within and not isinstance(within[0], float) else (within,) if within else ()
        found.append(Series(name, colour, _numbers(values(summary)), intervals))
    return found


def _few(report: Report, series: Sequence[Series]) -> list[Series]:
    """Selects the series to show: of many sets only the lowest tau, the highest tau and all pooled."""
    if len(report.sets) <= FEW:
        return list(series)
    taus = [s.summary.drafted.tau_pooled for s in report.sets.values()]
    order = sorted(range(len(taus)), key=lambda i: (math.isfinite(taus[i]), taus[i]))
    return [replace(series[i], colour=colour) for i, colour in ((order[0], "c1"), (order[-1], "c0"), (-1, "pooled"))]


def _numbers(values: Sequence[float | None]) -> tuple[float, ...]:
    return tuple(float("nan") if value is None else value for value in values)


def _set_charts(report: Report) -> list[Chart]:
    charts = []
    if report.overall.plain:
        title = "Speed-up over plain decoding"
        ratios = _series(report, lambda summary: (summary.speedup,), "speedup")
        charts.append((title, bars(title, ratios, times, "as fast as plain decoding", losses=True)))
    title = "Acceptance length τ, pooled"
    taus = _series(report, lambda summary: (summary.drafted.tau_pooled,), "tau_pooled")
    return [*charts, (title, bars(title, taus, number, "no draft accepted"))]


def _sweep_charts(report: Report) -> Iterator[Chart]:
    for name, points in report.sweeps.items():
        if name not in SWEPT:
            continue
        key, what = SWEPT[name]
        labels = [f"{point[key]:,}" for point in points]
        for figure, title in (("speedup", "Speed-up"), ("tau_pooled", "Acceptance length τ")):
            if name == "concurrency" and figure == "tau_pooled":  # does not depend on the load
                continue
            values = _numbers([point[figure] for point in points])
            series = Series(title, "c0", values, tuple(point.get(f"{figure}_ci95") for point in points))
            if any(map(math.isfinite, values)):
                form, at_one = (times, "as fast as plain decoding") if figure == "speedup" else (number, "")
                title = f"{title} by {what[0].lower()}{what[1:]}"
                yield title, curves(title, [series], what, labels=labels, form=form, top=None, at_one=at_one)


def _slot_charts(report: Report) -> list[Chart]:
    kept = _series(report, lambda summary: summary.drafted.accepted_per_position, "accepted_per_position")
    given = _series(report, _of_enough_steps, "accepted_given_previous")
    charts = (("At least k drafts accepted", kept), ("Slot k accepted, given slot k-1", given))
    found = [(title, curves(f"{title}, by slot", _few(report, series), "slot k")) for title, series in charts]
    if report.recall:
        best = report.recall["recall_at_k"].items()
        series = [Series(f"{k} best", f"c{i}", _numbers(shares)) for i, (k, shares) in enumerate(best)]
        # the legend of the page lists sets
        title = f"Target's token among the drafter's {', '.join(k for k, _ in best)} best (○, □, △)"
        found.append((title, curves(title, series, "slot k")))
    return found


def _of_enough_steps(summary: Summary) -> list[float | None]:
    """Returns shares given the slot before, for slots reached by at least COUNTED steps."""
    lengths = summary.drafted.accepted_lengths
    shares = enumerate(summary.drafted.accepted_given_previous)
    return [share if sum(lengths[slot:]) >= COUNTED else None for slot, share in shares]


def _length_charts(report: Report) -> list[Chart]:
    summaries, charts = dict(report.labelled), []
    for s in _few(report, _series(report, lambda summary: ())):
        title, drafted = f"Share of steps by tokens committed, {s.name}", summaries[s.name].drafted
        charts.append((s.name, histogram(title, drafted.accepted_lengths, drafted.tau_pooled, s.colour)))
    return charts
