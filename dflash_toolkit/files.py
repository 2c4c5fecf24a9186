"""Atomic writes of files, journals of JSON lines, and a lock for outputs that only one run may write."""

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
    """Writes to a temporary name, then renames. Raises UserError if it cannot be written; an older file stays."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise unwritable(path, error) from error


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Writes JSON as `write_text` does."""
    write_text(path, json.dumps(values, indent=2) + "\n")


def append_lines(path: Path, rows: Iterable[Any]) -> None:
    """Adds rows to a journal of JSON lines in one write: a kill tears the last line at most. Raises UserError."""
    try:
        with open(path, "a", encoding="utf-8") as file:  # closing flushes, and may fail like a write
            file.write("".join(json.dumps(row) + "\n" for row in rows))
    except OSError as error:
        raise unwritable(path, error) from error


def cut_journal(path: Path, size: int) -> None:
    """Cuts a journal to `size` bytes: removes a line that a kill has torn. Raises UserError."""
    try:
        if path.exists() and path.stat().st_size > size:
            os.truncate(path, size)
    except OSError as error:
        raise unwritable(path, error) from error


def unwritable(path: Path, error: OSError) -> UserError:
    """Returns the error for a file that cannot be written."""
    return UserError(f"{path}: cannot be written ({error.strerror}); free some space and run again")


def read_json(path: Path) -> Any:
    """Reads a JSON file. Raises UserError if it cannot be read or is not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read ({error}); remove it, or choose another --output") from error


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Locks a directory, or a file, which is made if it is missing, so that two runs do not mix their output.

    The lock ends with the process. File systems without locks are used without one.

    Raises:
        UserError: another run holds the lock, or it cannot be opened.
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
    """Returns the same JSON values with null for numbers that are not finite, which strict JSON cannot hold."""
    if isinstance(value, dict):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
