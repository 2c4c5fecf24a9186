"""Results of checks, and how they are shown and written."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..files import finite

Severity = Literal["ok", "warning", "fault"]
COLOURS = {"ok": "green", "warning": "yellow", "fault": "bold red"}


@dataclass(frozen=True, slots=True)
class Finding:
    """One verdict, in plain words."""

    check: str
    severity: Severity
    measured: str
    remedy: str = ""  # the action to take; empty if there is none
    figures: dict[str, Any] = field(default_factory=dict)  # JSON values for `measured`


def has_fault(findings: Sequence[Finding]) -> bool:
    """Whether any finding is a fault."""
    return any(finding.severity == "fault" for finding in findings)


def show(findings: Sequence[Finding], console: Console | None = None) -> None:
    """Prints the table, and then every remedy in full."""
    console = console or Console()
    table = Table(show_lines=False)
    for heading in ("check", "verdict", "measured"):
        table.add_column(heading, overflow="fold")
    for finding in findings:
        table.add_row(
            Text(finding.check), Text(finding.severity, COLOURS[finding.severity]), Text(finding.measured)
        )  # no markup: a list of layer ids would pass for a style
    console.print(table)
    for severity in ("fault", "warning"):
        for finding in findings:
            if finding.severity == severity and finding.remedy:
                console.print(Text(f"{finding.check}: ", COLOURS[severity]) + Text(finding.remedy), soft_wrap=True)
    counts = {s: sum(f.severity == s for f in findings) for s in ("fault", "warning")}
    if any(counts.values()):
        console.print(", ".join(f"{n} {s}{'s' * (n != 1)}" for s, n in counts.items() if n), highlight=False)
    else:
        console.print("nothing is wrong with this drafter", highlight=False)


def to_json(findings: Sequence[Finding], arguments: dict[str, Any]) -> dict[str, Any]:
    """Returns all findings as JSON values; figures that could not be measured are null."""
    values = {
        "schema": 1,
        "fault": has_fault(findings),
        "arguments": arguments,
        "findings": [asdict(finding) for finding in findings],
    }
    return finite(values)
