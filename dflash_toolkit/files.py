"""JSON files that no reader ever meets half of."""

import json
import math
from pathlib import Path
from typing import Any

from .config import UserError


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Write to a temporary name, then rename. Raises UserError when it cannot be written; an older file stays."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise UserError(f"{path}: cannot be written ({error.strerror}); free some space and run again") from error


def finite(value: Any) -> Any:
    """The same JSON values with null for what is no finite number, as strict JSON has none."""
    if isinstance(value, dict):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
