"""A report as one self-contained HTML page: tiles, plots, tables. No scripts, nothing fetched."""

import math
from collections.abc import Iterable
from pathlib import Path

import jinja2

from .plots import COLOURS, Series, bars, curves, histogram
from .report import Report
from .tables import (
    DEFINITIONS,
    differences_table,
    identical,
    lengths_table,
    number,
    setup_table,
    slot_tables,
    summary_table,
    times,
)

Chart = tuple[str, str]  # its title, and SVG


def render_page(report: Report) -> str:
    """The whole page; every text that comes from a user is escaped."""
    return template("page.html.jinja").render(
        report=report,
        setting=_setting(report),
        tiles=_tiles(report),
        series=_series(((name, ()) for name, _ in report.labelled), report),
        results=summary_table(report),
        set_charts=_set_charts(report),
        slots=slot_tables(report),
        slot_charts=_slot_charts(report),
        lengths=lengths_table(report),
        length_charts=_length_charts(report),
        differences=differences_table(report),
        definitions=DEFINITIONS,
        setup=setup_table(report),
    )


def template(name: str) -> jinja2.Template:
    """A page of this folder, which escapes what it is given."""
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    ).get_template(name)


def _setting(report: Report) -> str:
    environment, arguments = report.environment, report.arguments
    temperature = arguments["temperature"]
    drafts = "sampled drafts, " if temperature and arguments["draft_sample_method"] == "probabilistic" else ""
    sampling = f"{drafts}temperature {temperature:g}, seed {arguments['seed']}" if temperature else "greedy"
    return (
        f"{environment.device_name}, {environment.dtype}, one request at a time, {sampling}, at most "
        f"{arguments['max_tokens']} tokens an answer, {environment.date[:16].replace('T', ' ')} UTC"
    )


def _tiles(report: Report) -> list[tuple[str, str, str]]:
    """Name, value and note of each."""
    drafted, plain = report.overall.drafted, report.overall.plain
    possible = f"tokens per verify step, of {report.block_size} possible"
    tiles = [
        ("Acceptance length τ", number(drafted.tau_pooled), possible),
        ("Tokens per second", number(drafted.tokens_per_second, 1), "with the drafter, prefill left out"),
    ]
    if not plain:
        return [*tiles, ("Requests", f"{drafted.answers:,}", f"{drafted.tokens:,} tokens; no plain baseline")]
    over = f"over {number(plain.tokens_per_second, 1)} tokens/s plain"
    return [
        *tiles,
        ("Speed-up", times(report.overall.speedup), over),
        ("Identical to plain", identical(report.overall), "answers, token for token"),
    ]


def _series(rows: Iterable[tuple[str, tuple[float, ...]]], report: Report) -> list[Series]:
    """One series a row, the last being all sets pooled if there are several."""
    named = [Series(name, f"c{i % COLOURS}", values) for i, (name, values) in enumerate(rows)]
    return [*named[:-1], Series(named[-1].name, "pooled", named[-1].values)] if len(report.sets) > 1 else named


def _set_charts(report: Report) -> list[Chart]:
    title = "Acceptance length τ, pooled"
    taus = _series(((name, (s.drafted.tau_pooled,)) for name, s in report.labelled), report)
    charts = [(title, bars(title, taus, number, "1: no draft accepted"))]
    if report.overall.plain:
        title = "Speed-up over plain decoding"
        ratios = _series(((name, (s.speedup or math.nan,)) for name, s in report.labelled), report)
        charts.append((title, bars(title, ratios, times, "1x: as fast")))
    return charts


def _slot_charts(report: Report) -> list[Chart]:
    kinds = {
        "At least k drafts accepted": [(n, s.drafted.accepted_per_position) for n, s in report.labelled],
        "Slot k accepted, given slot k-1": [(n, s.drafted.accepted_given_previous) for n, s in report.labelled],
    }
    return [(title, curves(f"{title}, by slot", _series(rows, report), "slot k")) for title, rows in kinds.items()]


def _length_charts(report: Report) -> list[Chart]:
    series = _series(((name, ()) for name, _ in report.labelled), report)
    charts = []
    for s, (_, summary) in zip(series, report.labelled, strict=True):
        title, drafted = f"Share of steps by tokens committed, {s.name}", summary.drafted
        charts.append((s.name, histogram(title, drafted.accepted_lengths, drafted.tau_pooled, s.colour)))
    return charts
