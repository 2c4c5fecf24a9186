"""Writes the three files of a report atomically."""

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...config import UserError
from .markdown import render_markdown
from .page import render_page
from .results import Report


def write_report(report: Report, output: Path) -> None:
    """Writes `report.json`, `report.md` and `report.html` to the directory `output`, replacing earlier ones.

    All three are complete under temporary names before the first is renamed.

    Raises:
        UserError: the disk is full or `output` cannot be written; incomplete files are removed.
    """
    contents = {
        "report.json": readable(report.to_json()) + "\n",
        "report.md": render_markdown(report),
        "report.html": render_page(report),
    }
    write_together(contents, output)


def write_together(contents: Mapping[str, str], output: Path) -> None:
    """Writes all files or none to the directory `output`, by their names. Raises UserError."""
    staged = {output / name: output / f".{name}.partial" for name in contents}
    try:
        output.mkdir(parents=True, exist_ok=True)
        for stage, content in zip(staged.values(), contents.values(), strict=True):
            stage.write_text(content, encoding="utf-8", errors="replace")
        for path, stage in staged.items():
            stage.replace(path)
    except OSError as error:
        for stage in staged.values():
            with contextlib.suppress(OSError):
                stage.unlink()
        raise UserError(f"{output}: cannot write the report ({error.strerror}); run the same command again") from error


def readable(value: Any, indent: str = "") -> str:
    """Formats JSON with one key per line; lists of numbers and strings stay on one line."""
    inner = indent + "  "
    if isinstance(value, dict) and value:
        items = [f"{json.dumps(key)}: {readable(item, inner)}" for key, item in value.items()]
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        items = [readable(item, inner) for item in value]
    else:
        return json.dumps(value, allow_nan=False)
    lines = f",\n{inner}".join(items)
    return f"{{\n{inner}{lines}\n{indent}}}" if isinstance(value, dict) else f"[\n{inner}{lines}\n{indent}]"
