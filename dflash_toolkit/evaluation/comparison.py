"""A comparison of runs for people: Markdown, and one self-contained page."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import compress
from pathlib import Path
from typing import Any

from .files import readable, write_together
from .markdown import escape, render_table
from .page import Chart, template
from .plots import COLOURS, Series, bars, curves, differences, swatch
from .table import MISSING, Table, between, number, percent, times

SURE = 0.05  # a p-value below it is called a difference
NAMES = {"tau_pooled": "τ pooled", "tau_mean": "τ mean", "tokens_per_second": "Tokens/s", "speedup": "Speed-up"}
METHOD = (
    "All figures are of the requests that every run has: same set, id and text. In brackets are 95 % intervals by a "
    "bootstrap over requests. A difference is the run's figure less that of the first run; its interval draws pairs of "
    "the same request. p is that of a two-sided permutation test, which swaps the runs within pairs: the share of "
    "swaps that part them at least as far. It says how sure the difference is for such requests, not on another "
    "machine or load; of twenty sets without a difference one has p below 0.05 by chance. Speeds of two runs also "
    "differ by what else the machine did; a speed-up is over plain decoding of the same run."
)


def write_comparison(comparison: dict[str, Any], output: Path) -> None:
    """Write `compare.json`, `compare.md` and `compare.html` to the directory `output`. Raises UserError."""
    contents = {
        "compare.json": readable(comparison) + "\n",
        "compare.md": render_markdown(comparison) + "\n",
        "compare.html": render_page(comparison),
    }
    write_together(contents, output)


def render_markdown(comparison: dict[str, Any]) -> str:
    """What was found, then the tables of every way of decoding."""
    parts = ["# DFlash runs compared", *map(escape, verdicts(comparison))]
    parts += [f"**Mind:** {escape(warning)}" for warning in comparison["warnings"]]
    for section in comparison["sections"]:
        tables = [results_table(section), differences_table(section), slots_table(section)]
        parts += [f"## {escape(section['name'])}", *(f"### {t.caption}\n\n{render_table(t)}" for t in tables)]
    runs = runs_table(comparison)
    return "\n\n".join([*parts, f"## {runs.caption}\n\n{render_table(runs)}", "## Method", METHOD])


def render_page(comparison: dict[str, Any]) -> str:
    """The whole page; every text that comes from a user is escaped."""
    sections = [
        (
            section["name"],
            [results_table(section), differences_table(section)],
            _charts(section),
            slots_table(section),
        )
        for section in comparison["sections"]
    ]
    return template("compare.html.jinja").render(
        names=[run["name"] for run in comparison["runs"]],
        marks=[(run["name"], swatch(f"c{place % COLOURS}")) for place, run in enumerate(comparison["runs"])],
        verdicts=verdicts(comparison),
        warnings=comparison["warnings"],
        sections=sections,
        runs=runs_table(comparison),
        method=METHOD,
    )


# ---- words --------------------------------------------------------------------------------------------------------


def verdicts(comparison: dict[str, Any]) -> list[str]:
    """A sentence for every way of decoding and every run behind the first."""
    found = []
    for section in comparison["sections"]:
        overall = section["overall"]
        first, *others = overall["runs"]
        for run in others:
            parts = [_verdict(run["difference"]["tau_pooled"], number, "tokens a step")]
            faster = run["difference"]["speedup"], run["difference"]["tokens_per_second"]
            for difference, form, what in zip(faster, (times, _whole), ("speed-up", "tokens a second"), strict=True):
                if difference and difference["value"] is not None:
                    parts.append(_verdict(difference, form, what))
                    break
            words = f"{run['name']} against {first['name']} ({section['name']}, {overall['requests']} requests)"
            found.append(f"{words}: {'; '.join(parts)}.")
    return found


def _verdict(difference: dict[str, Any], form: Callable[[float], str], what: str) -> str:
    value, within, chance = difference["value"], difference["ci95"], difference["p_value"]
    if value is None:
        return f"no {what} to compare"
    sure = "" if chance is not None and chance < SURE else "; that may be chance"
    digits = 0 if form is _whole else 2
    interval = f"95 % interval {within[0]:+.{digits}f} to {within[1]:+.{digits}f}, " if within else ""
    return f"{'-' if value < 0 else '+'}{form(abs(value))} {what} ({interval}{chance_of(chance)}{sure})"


def _whole(value: float) -> str:
    return number(value, 0)


def chance_of(p_value: float | None) -> str:
    """A p-value for people."""
    if p_value is None:
        return f"p {MISSING}"
    return "p < 0.001" if p_value < 0.001 else f"p = {p_value:.3f}"


# ---- tables -------------------------------------------------------------------------------------------------------


def _scopes(section: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each set with its name and, where there are several, all of them pooled."""
    yield from section["sets"].items()
    if len(section["sets"]) > 1:
        yield "all sets", section["overall"]


def results_table(section: dict[str, Any]) -> Table:
    """The figures of every run."""
    rows = []
    for name, scope in _scopes(section):
        for run in scope["runs"]:
            row = [f"{name}: {run['name']}", f"{scope['requests']:,}"]
            row += [between(number(run[key]), run[f"{key}_ci95"]) for key in ("tau_pooled", "tau_mean")]
            row += [number(run["tokens_per_second"], 1), between(times(run["speedup"]), run["speedup_ci95"])]
            rows.append((*row, percent(run["identical_to_plain"]), percent(run["same_answers"])))
    header = ("Run", "Requests", *NAMES.values(), "Identical to plain", "Answers as the first run's")
    return _without_empty(Table("Side by side", header, tuple(rows)))


def differences_table(section: dict[str, Any]) -> Table:
    """How every run differs from the first."""
    rows = []
    for name, scope in _scopes(section):
        for run in scope["runs"][1:]:
            figures = (_difference(run["difference"][key], key) for key in NAMES)
            rows.append((f"{name}: {run['name']}", *figures))
    first = section["overall"]["runs"][0]["name"]
    return _without_empty(Table(f"Difference from {first}", ("Run", *NAMES.values()), tuple(rows)))


def _without_empty(table: Table) -> Table:
    """Without the columns that no run has a figure of."""
    kept = [any(row[i] != MISSING for row in table.rows) for i in range(len(table.header))]
    header, *rows = (tuple(compress(cells, kept)) for cells in (table.header, *table.rows))
    return replace(table, header=header, rows=tuple(rows))


def _difference(difference: dict[str, Any] | None, key: str) -> str:
    if difference is None or difference["value"] is None:
        return MISSING
    digits, within = 1 if key == "tokens_per_second" else 2, difference["ci95"]
    interval = f" [{within[0]:+.{digits}f}, {within[1]:+.{digits}f}]" if within else ""
    return f"{difference['value']:+.{digits}f}{interval}, {chance_of(difference['p_value'])}"


def slots_table(section: dict[str, Any]) -> Table:
    """Acceptance by slot of every run, and differences whose interval leaves out zero, in points."""
    slots = len(section["overall"]["runs"][0]["accepted_per_position"])
    nothing = {"value": [None] * slots, "ci95": [None] * slots}
    rows = []
    for name, scope in _scopes(section):
        for run in scope["runs"]:
            shares = run["accepted_per_position"]
            apart = run["difference"]["accepted_per_position"] if "difference" in run else nothing
            rows.append((f"{name}: {run['name']}", *map(_slot, shares, apart["value"], apart["ci95"])))
    first = section["overall"]["runs"][0]["name"]
    caption = (
        f"Share of steps that accept at least k drafts, by slot k; in brackets points more than {first}, where sure"
    )
    return Table(caption, ("Run", *(str(slot) for slot in range(1, slots + 1))), tuple(rows))


def _slot(share: float | None, apart: float | None, within: list[float] | None) -> str:
    sure = apart is not None and within is not None and not within[0] <= 0 <= within[1]
    return percent(share, 0) + (f" ({100 * (apart or 0):+.0f})" if sure else "")


def runs_table(comparison: dict[str, Any]) -> Table:
    """What was compared, a run a column."""
    runs = comparison["runs"]
    keys = [key for key in runs[0] if key != "name"]
    rows = tuple((key, *(MISSING if run[key] is None else str(run[key]) for run in runs)) for key in keys)
    return Table("Runs", ("Name", *(run["name"] for run in runs)), rows, numeric=False)


# ---- plots --------------------------------------------------------------------------------------------------------


def _charts(section: dict[str, Any]) -> list[Chart]:
    runs = section["overall"]["runs"]
    colours = [f"c{place % COLOURS}" for place in range(len(runs))]
    charts, nothing = [], {"value": None}
    speeds = [("speedup", "Speed-up over plain decoding"), ("tokens_per_second", "Tokens per second")]
    faster = [
        (key, title)
        for key, title in speeds
        if any((run["difference"][key] or nothing)["value"] is not None for run in runs[1:])
    ]
    for key, title in (("tau_pooled", "Acceptance length τ"), *faster[:1]):
        title = f"{title}: difference from {runs[0]['name']}"
        marks = [
            (name, run["name"], colour, found["value"], found["ci95"])
            for name, scope in _scopes(section)
            for run, colour in zip(scope["runs"][1:], colours[1:], strict=True)
            if (found := run["difference"][key]) and found["value"] is not None
        ]
        if marks:
            charts.append((title, differences(title, marks)))
    title = "Acceptance length τ, pooled, all sets"
    taus = [
        Series(run["name"], colour, (_nan(run["tau_pooled"]),), (run["tau_pooled_ci95"],))
        for run, colour in zip(runs, colours, strict=True)
    ]
    charts.insert(0, (title, bars(title, taus, number, "no draft accepted")))
    title = "At least k drafts accepted, all sets"
    shares = [
        Series(run["name"], colour, tuple(map(_nan, run["accepted_per_position"])), run["accepted_per_position_ci95"])
        for run, colour in zip(runs, colours, strict=True)
    ]
    charts.append((title, curves(f"{title}, by slot", shares, "slot k")))
    return charts


def _nan(value: float | None) -> float:
    return float("nan") if value is None else value
