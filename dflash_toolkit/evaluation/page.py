"""A report as one self-contained HTML page: tiles, plots, tables. No scripts, nothing fetched."""

import math
from collections.abc import Iterable
from html import escape

from .plots import COLOURS, Series, bars, curves, histogram
from .report import Report
from .style import CSS
from .tables import (
    DEFINITIONS,
    Table,
    differences_table,
    identical,
    lengths_table,
    number,
    setup_table,
    slot_tables,
    summary_table,
    times,
)


def render_page(report: Report) -> str:
    """The whole page; every text that comes from a user is escaped."""
    sections = [
        _title(report),
        _tiles(report),
        _section("Results", _set_plots(report), _card(_table(summary_table(report)))),
        _section("Acceptance by slot", _slot_plots(report), _card(*map(_table, slot_tables(report)))),
        _section("Tokens committed per step", _length_plots(report), _card(_table(lengths_table(report)))),
    ]
    if differences := differences_table(report):
        sections.append(_section("Answers that differ from plain decoding", _card(_table(differences))))
    sections += [
        _section("What the figures mean", _definitions()),
        _section("How this was measured", _card(_table(setup_table(report)))),
    ]
    body = "\n".join(sections)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>DFlash acceptance: {escape(report.pair)}</title>
<style>{CSS}</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""


def _title(report: Report) -> str:
    environment, arguments = report.environment, report.arguments
    temperature = arguments["temperature"]
    sampling = f"temperature {temperature:g}, seed {arguments['seed']}" if temperature else "greedy"
    setting = (
        f"{environment.device_name}, {environment.dtype}, one request at a time, {sampling}, at most "
        f"{arguments['max_tokens']} tokens an answer, {environment.date[:16].replace('T', ' ')} UTC"
    )
    return f'<h1>DFlash acceptance report</h1>\n<p>{escape(report.pair)}</p>\n<p class="soft">{escape(setting)}</p>'


def _tiles(report: Report) -> str:
    drafted, plain = report.overall.drafted, report.overall.plain
    tiles = [
        (
            "Acceptance length τ",
            number(drafted.tau_pooled),
            f"tokens per verify step, of {report.block_size} possible",
        ),
        ("Tokens per second", number(drafted.tokens_per_second, 1), "with the drafter, prefill left out"),
    ]
    if plain:
        tiles += [
            (
                "Speed-up",
                times(report.overall.speedup),
                f"over {number(plain.tokens_per_second, 1)} tokens/s plain",
            ),
            ("Identical to plain", identical(report.overall), "answers, token for token"),
        ]
    else:
        tiles.append(("Requests", f"{drafted.answers:,}", f"{drafted.tokens:,} tokens; no plain baseline"))
    cells = (f'<div class="card tile"><span>{a}</span><b>{b}</b><span>{c}</span></div>' for a, b, c in tiles)
    return f'<div class="tiles">{"".join(cells)}</div>'


def _series(rows: Iterable[tuple[str, tuple[float, ...]]], pooled: bool) -> list[Series]:
    """One series a row, the last being all sets pooled if `pooled`."""
    named = [Series(name, f"c{i % COLOURS}", values) for i, (name, values) in enumerate(rows)]
    return [*named[:-1], Series(named[-1].name, "pooled", named[-1].values)] if pooled else named


def _set_plots(report: Report) -> str:
    pooled = len(report.sets) > 1
    title = "Acceptance length τ, pooled"
    taus = _series(((name, (s.drafted.tau_pooled,)) for name, s in report.labelled), pooled)
    cards = [_card(f"<h3>{title}</h3>", _figure(bars(title, taus, number, "1: no draft accepted")))]
    if report.overall.plain:
        title = "Speed-up over plain decoding"
        ratios = _series(((name, (s.speedup or math.nan,)) for name, s in report.labelled), pooled)
        cards.append(_card(f"<h3>{title}</h3>", _figure(bars(title, ratios, times, "1x: as fast"))))
    return f'<div class="charts">{"".join(cards)}</div>'


def _slot_plots(report: Report) -> str:
    pooled = len(report.sets) > 1
    kinds = [
        ("At least k drafts accepted", [(n, s.drafted.accepted_per_position) for n, s in report.labelled]),
        (
            "Slot k accepted, given slot k-1",
            [(n, s.drafted.accepted_given_previous) for n, s in report.labelled],
        ),
    ]
    cards = [
        _card(f"<h3>{title}</h3>", _figure(curves(f"{title}, by slot", _series(rows, pooled), "slot k")))
        for title, rows in kinds
    ]
    entries = (f'<li class="{s.colour}">{escape(s.name)}</li>' for s in _series(kinds[0][1], pooled))
    return f'<ul class="legend">{"".join(entries)}</ul>\n<div class="charts">{"".join(cards)}</div>'


def _length_plots(report: Report) -> str:
    series = _series(((name, ()) for name, _ in report.labelled), len(report.sets) > 1)
    cards = [
        _card(
            f"<h3>{escape(s.name)}</h3>",
            _figure(
                histogram(
                    f"Share of steps by tokens committed, {s.name}",
                    summary.drafted.accepted_lengths,
                    summary.drafted.tau_pooled,
                    s.colour,
                )
            ),
        )
        for s, (_, summary) in zip(series, report.labelled, strict=True)
    ]
    return f'<div class="charts">{"".join(cards)}</div>'


def _definitions() -> str:
    entries = "\n".join(f"<dt>{escape(term)}</dt>\n<dd>{escape(meaning)}</dd>" for term, meaning in DEFINITIONS)
    return f"<dl>\n{entries}\n</dl>"


def _section(heading: str, *parts: str) -> str:
    return f"<section>\n<h2>{heading}</h2>\n" + "\n".join(parts) + "\n</section>"


def _card(*parts: str) -> str:
    return f'<div class="card">{"".join(parts)}</div>'


def _figure(svg: str) -> str:
    return f'<figure class="scroll">{svg}</figure>'


def _table(table: Table) -> str:
    kind = "figures" if table.numeric else "words"
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in table.header)
    rows = "\n".join(
        f'<tr><th scope="row">{escape(name)}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in cells)}</tr>'
        for name, *cells in table.rows
    )
    return (
        f'<div class="scroll"><table class="{kind}"><caption>{escape(table.caption)}</caption>\n'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody></table></div>"
    )
