"""Prints the end of `dflash-eval`: tables, the verdict, the report's path and the next command."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from ..protocols import caveats, published_table
from .results import Report
from .table import COLOURS, say, show_table
from .tables import prompt_length_table, summary_table
from .verdict import verdict

DETAILS = ("Tokens", "Steps", "τ mean")  # columns that only the report shows


def show_report(report: Report, output: Path, protocol: str | None = None, serve: Sequence[str] = ()) -> None:
    """Prints a report that was written to `output`.

    Args:
        protocol: the published measurement to compare with.
        serve: the command that serves this pair, or the target alone.
    """
    for section in report.sections:
        show_table(summary_table(section, section.name).without(*DETAILS))
        if by_length := prompt_length_table(section):
            show_table(by_length.without(*DETAILS))
    if protocol is not None:
        show_table(published_table(report, protocol))
        for caveat in caveats(report, protocol):
            say(caveat)
        say("")
    found = verdict(report)
    say(found.headline, f"bold {COLOURS[found.outcome]}")
    for question, answer in found.points:
        say(f"{question} {answer}")
    for warning in report.warnings:
        say(f"warning: {warning}", "yellow")
    say(f"\nReport: {output / 'report.html'}")
    if serve:
        say(f"Next:   {shlex.join(serve)}")
