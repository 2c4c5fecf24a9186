"""Files that no reader ever meets half of, journals of JSON lines, and outputs that one run writes at a time."""

import contextlib
import fcntl
import json
import math
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from .config import UserError


def write_text(path: Path, text: str) -> None:
    """Write to a temporary name, then rename. Raises UserError when it cannot be written; an older file stays."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise unwritable(path, error) from error


def write_json(path: Path, values: dict[str, Any]) -> None:
    """As `write_text` does."""
    write_text(path, json.dumps(values, indent=2) + "\n")


def append_lines(path: Path, rows: Iterable[Any]) -> None:
    """Add rows to a journal of JSON lines in one write: a kill tears the last line at most. Raises UserError."""
    try:
        with open(path, "a", encoding="utf-8") as file:  # closing flushes, and may fail like a write
            file.write("".join(json.dumps(row) + "\n" for row in rows))
    except OSError as error:
        raise unwritable(path, error) from error


def cut_journal(path: Path, size: int) -> None:
    """Drop what stands behind so many bytes: what a kill has torn. Raises UserError."""
    try:
        if path.exists() and path.stat().st_size > size:
            os.truncate(path, size)
    except OSError as error:
        raise unwritable(path, error) from error


def unwritable(path: Path, error: OSError) -> UserError:
    """What to raise where a file cannot be written."""
    return UserError(f"{path}: cannot be written ({error.strerror}); free some space and run again")


def read_json(path: Path) -> Any:
    """What `write_json` left. Raises UserError for a file that cannot be read or is no JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read ({error}); remove it, or choose another --output") from error


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """One run at a time has a directory, or a file, which is made if it is missing; two would mix what they write.

    The lock goes with the process, however it ends. File systems without locks do without.

    Raises:
        UserError: another run has it, or it cannot be opened.
    """
    try:
        handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_WRONLY | os.O_CREAT, 0o666)
    except OSError as error:
        raise UserError(f"output {path}: cannot be written ({error.strerror})") from error
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(f"{path} is being written by another run; choose another --output") from error
        except OSError:
            pass  # a file system without locks
        yield
    finally:
        os.close(handle)


def finite(value: Any) -> Any:
    """The same JSON values with null for what is no finite number, as strict JSON has none."""
    if isinstance(value, dict):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
