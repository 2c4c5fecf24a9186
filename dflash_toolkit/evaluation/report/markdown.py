"""Renders a report as Markdown, for pull requests and model cards."""

import re

from .results import Report
from .tables import (
    DEFINITIONS,
    Table,
    category_table,
    differences_table,
    latency_table,
    lengths_table,
    prompt_length_table,
    recall_table,
    setup_table,
    slot_tables,
    summary_table,
    sweep_tables,
    ways_table,
)
from .verdict import verdict


def render_markdown(report: Report) -> str:
    """Renders the whole report, with the verdict first."""
    section, found = report.sections[0], verdict(report)
    tables = [
        summary_table(report),
        category_table(section),
        prompt_length_table(section),
        ways_table(report),
        *sweep_tables(report.sweeps),
        *slot_tables(report),
        recall_table(report),
        lengths_table(report),
        latency_table(section),
        differences_table(report),
    ]
    parts = [
        "# DFlash acceptance report",
        f"{escape(report.pair)}, blocks of {report.block_size} tokens, "
        f"{escape(report.machine)}, {report.environment.date}",
        f"**{escape(found.headline)}**",
        *(f"**{asked}** {escape(said)}" for asked, said in found.points),
        *(f"**Mind:** {escape(warning)}" for warning in report.warnings),
        *(f"## {escape(table.caption)}\n\n{render_table(table)}" for table in tables if table),
        "## What the figures mean",
        *(f"**{term}.** {meaning}" for term, meaning in DEFINITIONS),
        f"## {setup_table(report).caption}\n\n{render_table(setup_table(report))}",
    ]
    return "\n\n".join(parts) + "\n"


def render_table(table: Table) -> str:
    """Renders a table with figures aligned right."""
    rule = " | ".join(["---", *["--:" if table.numeric else "---"] * (len(table.header) - 1)])
    lines = [" | ".join(map(escape, row)) for row in (table.header, *table.rows)]
    return "\n".join(f"| {line} |" for line in (lines[0], rule, *lines[1:]))


def escape(text: str) -> str:
    """Escapes text for one line of Markdown, also in a table."""
    return re.sub(r"([\\`*_\[\]<>|&])", r"\\\1", " ".join(text.split()))
