"""Write a report's three files so that no reader ever meets half of one."""

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
    """Write `report.json`, `report.md` and `report.html` to the directory `output`, replacing earlier ones.

    All three are complete under temporary names before the first takes its place.

    Raises:
        UserError: the disk is full or `output` cannot be written; no half-written file is left behind.
    """
    contents = {
        "report.json": readable(report.to_json()) + "\n",
        "report.md": render_markdown(report),
        "report.html": render_page(report),
    }
    write_together(contents, output)


def write_together(contents: Mapping[str, str], output: Path) -> None:
    """Write files, by their names, to the directory `output`, all or none. Raises UserError."""
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
    """JSON with a key a line, and lists of numbers and strings on one."""
    inner = indent + "  "
    if isinstance(value, dict) and value:
        items = [f"{json.dumps(key)}: {readable(item, inner)}" for key, item in value.items()]
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        items = [readable(item, inner) for item in value]
    else:
        return json.dumps(value, allow_nan=False)
    lines = f",\n{inner}".join(items)
    return f"{{\n{inner}{lines}\n{indent}}}" if isinstance(value, dict) else f"[\n{inner}{lines}\n{indent}]"
