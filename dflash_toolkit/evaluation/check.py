"""dflash-eval check: checks a report against limits, for continuous integration. Imports no torch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ..command_line import parse_cli, run_command
from ..config import UserError, option
from .report.schema import read_report, split_places
from .report.table import Table, say, show_table

PROG = "dflash-eval check REPORT"
DESCRIPTION = """\
Checks a report of dflash-eval (report.json, or its directory) against limits. A limit is VALUE, for all prompt sets
pooled, or SET=VALUE. Prints each limit with what was measured.

Exit code: 0 all limits hold, 1 a limit is missed, 2 the command cannot be run as given."""
EXAMPLE = "dflash-eval check report --min-tau 4 gsm8k=5 --min-speedup 1.5"


class Limit(NamedTuple):
    """A limit on a figure of a prompt set."""

    figure: str  # key of FIGURES
    set: str | None  # None: all of them
    value: float


class Figure(NamedTuple):
    """A figure that can be limited."""

    key: str  # in report.json
    name: str
    least: bool  # the limit is the least it may be, else the most


FIGURES = {
    "min_tau": Figure("tau_pooled", "acceptance length", True),
    "max_regret": Figure("max_regret_nats", "regret in nats", False),
    "min_speedup": Figure("speedup", "speed-up", True),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckConfig:
    """The options of `dflash-eval check`."""

    min_tau: tuple[str, ...] = option(
        (),
        "minimum acceptance length, pooled over steps (default: no limit)",
        named=True,
        repeatable=True,
        common=True,
        metavar="LIMIT",
    )
    max_regret: tuple[str, ...] = option(
        (),
        "maximum regret in nats of the first token in which a greedy response differs from plain decoding (default: no "
        "limit)",
        named=True,
        repeatable=True,
        common=True,
        metavar="LIMIT",
    )
    min_speedup: tuple[str, ...] = option(
        (),
        "minimum speed-up over plain decoding (default: no limit)",
        named=True,
        repeatable=True,
        common=True,
        metavar="LIMIT",
    )
    section: str | None = option(None, "section of the report to check (default: its first)", common=True)

    def __post_init__(self) -> None:
        if not self.limits:
            flags = ", ".join(f"--{name.replace('_', '-')}" for name in FIGURES)
            raise ValueError(f"there is no limit to check; give at least one of {flags}")

    @property
    def limits(self) -> list[Limit]:
        """Raises ValueError for an item that is not a limit."""
        return [_limit(figure, item) for figure in FIGURES for item in getattr(self, figure)]


def _limit(figure: str, item: str) -> Limit:
    name, equals, text = item.rpartition("=")
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or (equals and not name):
        raise ValueError(f"{figure}: {item!r} is not a limit; give a number, or SET=NUMBER")
    return Limit(figure, name or None, value)


def main(argv: Sequence[str]) -> int:
    """Runs the command on the words after `check`; returns its exit code."""
    return run_command(lambda: _run(*parse(argv)))


def parse(argv: Sequence[str]) -> tuple[Path, CheckConfig]:
    """Raises UserError if the command line is not one report and limits."""
    places, rest = split_places(argv, CheckConfig)
    config = parse_cli(CheckConfig, rest, PROG, DESCRIPTION, EXAMPLE)
    if len(places) != 1:
        raise UserError(f"expected one report before the options, got {len(places)}: {PROG} --min-tau 5")
    return places[0], config


def _run(place: Path, config: CheckConfig) -> int:
    results = checked(read_report(place), config, str(place))
    rows = tuple((r.set, r.name, r.measured, r.wanted, "holds" if r.holds else "missed") for r in results)
    header = ("Set", "Figure", "Measured", "Limit", "Result")
    show_table(Table("", header, rows, numeric=False), ["" if r.holds else "red" for r in results])
    held = sum(result.holds for result in results)
    say(
        f"{place}: {held} of {len(results)} limits hold ({results[0].section})",
        "green" if held == len(results) else "red",
    )
    return int(held < len(results))


class Checked(NamedTuple):
    """A limit, what was measured, and whether the limit holds."""

    set: str
    name: str
    measured: str
    wanted: str
    section: str
    holds: bool


def checked(report: dict[str, Any], config: CheckConfig, place: str) -> list[Checked]:
    """Checks every limit.

    Args:
        place: of the report, for messages.

    Raises:
        UserError: a section or set that is not there, or a figure that was not measured.
    """
    section = named_section(report, config.section, place)
    results = []
    for limit in config.limits:
        figure = FIGURES[limit.figure]
        value = _value(report, section, limit, place)
        within = _summary(section, limit.set, place).get(f"{figure.key}_ci95")
        measured = f"{value:.3f}" + (f" [{within[0]:.3f}, {within[1]:.3f}]" if within and None not in within else "")
        wanted = f"at {'least' if figure.least else 'most'} {limit.value:g}"
        holds = value >= limit.value if figure.least else value <= limit.value  # False of NaN
        results.append(Checked(limit.set or "all sets", figure.name, measured, wanted, section["name"], holds))
    return results


def named_section(report: dict[str, Any], name: str | None, place: str) -> dict[str, Any]:
    """Returns the section of this name, or the first without a name. Raises UserError if it is missing."""
    by_name = {section["name"]: section for section in report["sections"]}
    if name is None:
        return report["sections"][0]
    if name not in by_name:
        raise UserError(f"{place} has no section {name!r}; it has {', '.join(map(repr, by_name))}")
    return by_name[name]


def _summary(section: dict[str, Any], name: str | None, place: str) -> dict[str, Any]:
    if name is None:
        return section["overall"]
    if name not in section["sets"]:
        raise UserError(f"{place} has no set {name!r}; it has {', '.join(map(repr, section['sets']))}")
    return section["sets"][name]


def _value(report: dict[str, Any], section: dict[str, Any], limit: Limit, place: str) -> float:
    summary, figure = _summary(section, limit.set, place), FIGURES[limit.figure]
    where = f"{place} has no {figure.name} of {limit.set or 'its sets'}"
    if limit.figure != "min_tau" and not report["arguments"].get("baseline", True):
        if report["environment"]["device"] == "endpoint":
            raise UserError(f"{where}: the target was not decoded without a drafter; measure with --plain-endpoint")
        raise UserError(f"{where}: it was measured by --no-baseline; measure with --baseline")
    if limit.figure == "max_regret":
        if summary["identical_to_plain"] is None:
            raise UserError(f"{where}: drafts were sampled; measure with --temperature 0")
        sets = [section["sets"][limit.set]] if limit.set else section["sets"].values()
        regrets = [difference["regret_nats"] for found in sets for difference in found["differences"]]
        if None in regrets and section["temperature"]:
            raise UserError(f"{where}: tokens were sampled; measure with --temperature 0")
        return math.nan if None in regrets else max(regrets, default=0.0)  # null in greedy answers: logits are NaN
    if summary[figure.key] is None:
        raise UserError(f"{where}: no answer took a step; measure with more --max-tokens")
    return summary[figure.key]
