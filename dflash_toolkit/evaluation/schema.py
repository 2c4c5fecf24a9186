"""The form of `report.json`: its version, its JSON Schema, and what reads it; that of `compare.json`. Without torch."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..config import UserError, list_options

SCHEMA_VERSION = 2


def report_schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of `report.json`."""
    return json.loads(Path(__file__).with_name("report.schema.json").read_text(encoding="utf-8"))


def compare_schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of `compare.json`."""
    return json.loads(Path(__file__).with_name("compare.schema.json").read_text(encoding="utf-8"))


def read_report(path: Path) -> dict[str, Any]:
    """A report of `dflash-eval`, or the one in a folder. Raises UserError: it is none, or one of another version."""
    path = path / "report.json" if path.is_dir() else path
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: no report of dflash-eval ({error})") from error
    version = report.get("schema_version", report.get("schema")) if isinstance(report, dict) else None
    if version is None:
        raise UserError(f"{path}: no report of dflash-eval: it has no schema_version")
    if version != SCHEMA_VERSION:
        raise UserError(f"{path}: schema_version is {version}, this reads {SCHEMA_VERSION}; measure again")
    if missing := [key for key in report_schema()["required"] if key not in report]:
        raise UserError(f"{path}: no whole report of dflash-eval: it has no {', '.join(missing)}; measure again")
    return report


def split_places(words: Sequence[str], options: type) -> tuple[list[Path], list[str]]:
    """The files that a command line begins with, and its `options` behind them."""
    keys = {key for key, _ in list_options(options)}
    count = next((i for i, word in enumerate(words) if word[:1] == "-" or word.partition("=")[0] in keys), len(words))
    return [Path(word) for word in words[:count]], list(words[count:])
