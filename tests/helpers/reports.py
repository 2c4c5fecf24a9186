"""Prompt files, and reports of dflash-eval read back."""

import json
from pathlib import Path
from typing import Any

import pytest
from schemas import validate

from dflash_toolkit.evaluation.report.schema import read_report, report_schema

REPORT_FILES = {"report.json", "report.md", "report.html"}
TIMED = ("seconds", "seconds_per_step", "per_second", "per_second_ci95", "speedup", "speedup_ci95")
TIMED += ("date", "warnings", "recommendation")


def write_prompts(path: Path, *texts: str) -> Path:
    rows = [json.dumps({"id": f"q{i}", "prompt": text}) for i, text in enumerate(texts)]
    path.write_text("\n".join(rows) + "\n")
    return path


def load(output: Path) -> dict[str, Any]:
    """Returns the validated report in a folder, with the first section's `overall` and `sets` at the top."""
    text = (output / "report.json").read_text()
    report = json.loads(text, parse_constant=lambda constant: pytest.fail(f"{constant} is not JSON"))
    validate(report, report_schema)
    assert read_report(output / "report.json") == report
    section = report["sections"][0]
    return report | {"overall": section["overall"], "sets": section["sets"]}


def untimed(value: Any) -> Any:
    """Returns a report without the values that differ between equal runs."""
    if isinstance(value, dict):
        return {key: untimed(v) for key, v in value.items() if not key.endswith(TIMED)}
    return [untimed(v) for v in value] if isinstance(value, list) else value
