"""Shows a comparison of runs in the terminal, as Markdown, and as one self-contained page."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..compare import LEAST_PAIRS
from .files import readable, write_together
from .markdown import escape, render_table
from .page import Chart, template
from .plots import Series, bars, colour_of, curves, differences, swatch
from .table import COLOURS, MISSING, Table, between, number, percent, say, show_table, times
from .verdict import SIGNS, Outcome

SURE = 0.05  # a smaller p-value counts as a difference
# a verdict uses the first compared figure: its name, and words for more and less of it
VERDICT = {
    "speedup": ("Speed-up", "is faster than", "is slower than"),
    "tokens_per_second": ("Tokens a second", "is faster than", "is slower than"),
    "tau_pooled": ("Tokens a step", "accepts more than", "accepts less than"),
}
NAMES = {"tau_pooled": "τ pooled", "tau_mean": "τ mean", "tokens_per_second": "Tokens/s", "speedup": "Speed-up"}
METHOD = (
    "All figures use the requests that every run has: same set, id and text. 95 % intervals in brackets come from a "
    "bootstrap over requests. A difference is the run's figure minus that of the first run; its interval resamples "
    "pairs of the same request. p comes from a two-sided permutation test that swaps the runs within pairs: the share "
    "of swaps with a difference at least as large. It holds for such requests on this machine and load; one in twenty "
    "sets without a difference has p below 0.05 by chance. Speeds of two runs also depend on other programs on the "
    "machine; a speed-up is relative to plain decoding in the same run."
)

FORMS: dict[str, Callable[[float | None], str]] = {
    "tau_pooled": number,
    "tau_mean": number,
    "tokens_per_second": lambda value: number(value, 1),
    "speedup": times,
}


def show_comparison(comparison: dict[str, Any], output: Path | None) -> None:
    """Prints verdicts and tables."""
    for section in comparison["sections"]:
        name = section["name"]
        for table in (results_table(section), differences_table(section)):
            show_table(replace(table, caption=f"{table.caption} ({name})"))
    for found in verdicts(comparison):
        say(found.headline, f"bold {COLOURS[found.outcome]}")
        for what, change in found.points:
            say(f"{what}: {change}")
    for warning in comparison["warnings"]:
        say(f"warning: {warning}", "yellow")
    if output is not None:
        say(f"\nComparison: {output / 'compare.html'}")


def write_comparison(comparison: dict[str, Any], output: Path) -> None:
    """Writes `compare.json`, `compare.md` and `compare.html` to the directory `output`. Raises UserError."""
    contents = {
        "compare.json": readable(comparison) + "\n",
        "compare.md": render_markdown(comparison) + "\n",
        "compare.html": render_page(comparison),
    }
    write_together(contents, output)


def render_markdown(comparison: dict[str, Any]) -> str:
    """Renders the verdicts, then the tables of every section."""
    parts = ["# DFlash runs compared"]
    for found in verdicts(comparison):
        parts += [f"**{escape(found.headline)}**", *(f"{what}: {escape(change)}" for what, change in found.points)]
    parts += [f"**Mind:** {escape(warning)}" for warning in comparison["warnings"]]
    for section in comparison["sections"]:
        tables = [results_table(section), differences_table(section), slots_table(section)]
        parts += [f"## {escape(section['name'])}", *(f"### {t.caption}\n\n{render_table(t)}" for t in tables)]
    runs = runs_table(comparison)
    return "\n\n".join([*parts, f"## {runs.caption}\n\n{render_table(runs)}", "## Method", METHOD])


def render_page(comparison: dict[str, Any]) -> str:
    """Renders the whole page; text from users is escaped."""
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
        marks=[(run["name"], swatch(colour_of(place))) for place, run in enumerate(comparison["runs"])],
        verdicts=verdicts(comparison),
        signs=SIGNS,
        warnings=comparison["warnings"],
        sections=sections,
        runs=runs_table(comparison),
        method=METHOD,
    )


# ---- verdicts -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RunVerdict:
    """The verdict on one run against the first, in one section."""

    outcome: Outcome
    headline: str
    points: tuple[tuple[str, str], ...]  # figure and difference


def verdicts(comparison: dict[str, Any]) -> list[RunVerdict]:
    """Judges every run after the first, in every section."""
    found = []
    for section in comparison["sections"]:
        overall = section["overall"]
        first, *others = overall["runs"]
        where = f"{section['name']}, {overall['requests']} requests"
        found += [_judged(first, run, where, overall["requests"] < LEAST_PAIRS) for run in others]
    return found


def _judged(first: dict[str, Any], run: dict[str, Any], where: str, few: bool) -> RunVerdict:
    """Judges by speed if it can be compared, else by acceptance length."""
    compared = run["difference"]
    measured = [key for key in VERDICT if compared[key] and compared[key]["value"] is not None]
    if measured == ["speedup", "tokens_per_second", "tau_pooled"]:
        measured.remove("tokens_per_second")  # the speed-up includes it and cancels noise of the machine
    points = [(VERDICT[key][0], _change(first, run, key)) for key in measured]
    if not measured:
        return RunVerdict("unknown", f"{run['name']} and {first['name']}: nothing to compare ({where}).", ())
    value, chance = compared[measured[0]]["value"], compared[measured[0]]["p_value"]
    sure = chance is not None and chance < SURE
    better, worse = VERDICT[measured[0]][1:]
    outcome: Outcome = "unknown" if few else "unsure" if not sure else "good" if value > 0 else "bad"
    said = {
        "good": f"{run['name']} {better} {first['name']}",
        "bad": f"{run['name']} {worse} {first['name']}",
        "unsure": f"No clear difference between {run['name']} and {first['name']}",
        "unknown": f"Too few requests to compare {run['name']} with {first['name']}; measure {LEAST_PAIRS} or more",
    }[outcome]
    return RunVerdict(outcome, f"{said} ({where}).", tuple(points))


def _change(first: dict[str, Any], run: dict[str, Any], key: str) -> str:
    """Writes a figure of both runs and their difference."""
    form, difference = FORMS[key], run["difference"][key]
    value, within, chance = difference["value"], difference["ci95"], difference["p_value"]
    digits = 1 if key == "tokens_per_second" else 2
    said = [f"{form(run[key])} against {form(first[key])}: {value:+.{digits}f}"]
    said[0] += f" ({100 * value / first[key]:+.1f} %)" if first[key] else ""
    said += [f"95 % interval {within[0]:+.{digits}f} to {within[1]:+.{digits}f}"] if within else []
    return ", ".join([*said, *([chance_of(chance)] if chance is not None else [])])


def chance_of(p_value: float) -> str:
    """Writes a p-value."""
    return "p < 0.001" if p_value < 0.001 else f"p = {p_value:.3f}"


# ---- tables -------------------------------------------------------------------------------------------------------


def _scopes(section: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields each set with its name and, if there are several, all of them pooled."""
    yield from section["sets"].items()
    if len(section["sets"]) > 1:
        yield "all sets", section["overall"]


def results_table(section: dict[str, Any]) -> Table:
    """Returns the figures of every run."""
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
    """Returns the difference of every run from the first."""
    rows = []
    for name, scope in _scopes(section):
        for run in scope["runs"][1:]:
            base = scope["runs"][0]
            figures = (_difference(run["difference"][key], key, base[key]) for key in NAMES)
            rows.append((f"{name}: {run['name']}", *figures))
    first = section["overall"]["runs"][0]["name"]
    few = any(scope["requests"] < LEAST_PAIRS for _, scope in _scopes(section))
    note = f"; intervals and p-values need {LEAST_PAIRS} requests or more" if few else ""
    return _without_empty(Table(f"Difference from {first}{note}", ("Run", *NAMES.values()), tuple(rows)))


def _without_empty(table: Table) -> Table:
    """Drops columns without figures."""
    return table.without(*(name for i, name in enumerate(table.header) if all(r[i] == MISSING for r in table.rows)))


def _difference(difference: dict[str, Any] | None, key: str, base: float | None) -> str:
    """Writes a difference; for tokens per second also in per cent of the first run."""
    if difference is None or difference["value"] is None:
        return MISSING
    digits, within = 1 if key == "tokens_per_second" else 2, difference["ci95"]
    share = f" ({100 * difference['value'] / base:+.1f} %)" if key == "tokens_per_second" and base else ""
    interval = f" [{within[0]:+.{digits}f}, {within[1]:+.{digits}f}]" if within else ""
    chance = f", {chance_of(difference['p_value'])}" if difference["p_value"] is not None else ""
    return f"{difference['value']:+.{digits}f}{share}{interval}{chance}"


def slots_table(section: dict[str, Any]) -> Table:
    """Returns acceptance by slot of every run, with differences in points where the interval excludes zero."""
    slots = len(section["overall"]["runs"][0]["accepted_per_position"])
    nothing = {"value": [None] * slots, "ci95": [None] * slots}
    rows = []
    for name, scope in _scopes(section):
        for run in scope["runs"]:
            shares = run["accepted_per_position"]
            apart = run["difference"]["accepted_per_position"] if "difference" in run else nothing
            rows.append((f"{name}: {run['name']}", *map(_slot, shares, apart["value"], apart["ci95"])))
    first = section["overall"]["runs"][0]["name"]
    caption = "Share of steps that accept at least k drafts, by slot k"
    if section["overall"]["requests"] >= LEAST_PAIRS:
        caption += f"; in brackets percentage points more than {first}, where the interval excludes 0"
    return Table(caption, ("Run", *(str(slot) for slot in range(1, slots + 1))), tuple(rows))


def _slot(share: float | None, apart: float | None, within: list[float] | None) -> str:
    sure = apart is not None and within is not None and not within[0] <= 0 <= within[1]
    return percent(share, 0) + (f" ({100 * (apart or 0):+.0f})" if sure else "")


def runs_table(comparison: dict[str, Any]) -> Table:
    """Describes the runs, one per column."""
    runs = comparison["runs"]
    keys = [key for key in runs[0] if key != "name"]
    rows = tuple((key, *(MISSING if run[key] is None else str(run[key]) for run in runs)) for key in keys)
    return Table("Runs", ("Name", *(run["name"] for run in runs)), rows, numeric=False)


# ---- plots --------------------------------------------------------------------------------------------------------


def _charts(section: dict[str, Any]) -> list[Chart]:
    runs = section["overall"]["runs"]
    colours = [colour_of(place) for place in range(len(runs))]
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
