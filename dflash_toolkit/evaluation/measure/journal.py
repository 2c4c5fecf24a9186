"""Keeps the measurements of an unfinished run, one JSON line each, so that the run can be resumed.

A line has a digest of everything that its numbers depend on; any run with the same digest can use it. A torn line and
all lines after it are dropped.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ...decode import Generation, Step
from ...files import append_lines, cut_journal, unwritable
from .measurement import Difference, Measurement


class Journal:
    """Finished measurements by digest, on disk and in `done`. The file is open only while a line is written."""

    def __init__(self, path: Path, threads: int) -> None:
        """Opens or creates the journal at `path`; new lines note `threads`. Raises UserError."""
        self._path, self._threads = path, threads
        self.done: dict[str, Measurement] = {}
        self.points: dict[str, dict[str, Any]] = {}  # sweeps, tests, and answers of concurrent requests
        self.threads: dict[str, int] = {}  # number of threads of each line
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            old = path.read_bytes() if path.exists() else b""
        except OSError as error:
            raise unwritable(path, error) from error
        cut_journal(path, self._read(old))

    def _read(self, content: bytes) -> int:
        """Fills `done` and returns the number of bytes of the intact lines at the start."""
        kept = 0
        for line in content.splitlines(keepends=True):
            if not line.endswith(b"\n"):
                break
            try:
                row = json.loads(line)
                if "point" in row:
                    self.points[row["key"]] = dict(row["point"])
                else:
                    self.done[row["key"]] = _measurement(row["measurement"])
                self.threads[row["key"]] = int(row["threads"])
            except (ValueError, KeyError, TypeError):
                break
            kept += len(line)
        return kept

    def append(self, key: str, measurement: Measurement) -> None:
        """Records a finished measurement. Raises UserError if the disk is full."""
        append_lines(self._path, [{"key": key, "threads": self._threads, "measurement": asdict(measurement)}])
        self.done[key], self.threads[key] = measurement, self._threads

    def append_point(self, key: str, point: dict[str, Any]) -> None:
        """Records a point. Raises UserError if the disk is full."""
        append_lines(self._path, [{"key": key, "threads": self._threads, "point": point}])
        self.points[key], self.threads[key] = point, self._threads


def _measurement(row: dict[str, Any]) -> Measurement:
    plain, difference = row["plain"], row["difference"]
    changed = {
        "drafted": generation_of(row["drafted"]),
        "plain": None if plain is None else generation_of(plain),
        "difference": None if difference is None else Difference(**difference),
        **{name: tuple(row[name]) for name in ("token_texts", "step_s", "plain_step_s")},
        "offered_texts": tuple((token, text) for token, text in row.get("offered_texts", ())),
    }
    return Measurement(**row | changed)


def generation_of(row: dict[str, Any]) -> Generation:
    """Parses an answer written by `asdict`."""
    steps = [
        Step(
            step["drafted"],
            step["accepted"],
            tuple(step["tokens"]),
            tuple(tuple((token, p) for token, p in place) for place in step.get("offered", ())),
        )
        for step in row["steps"]
    ]
    return Generation(**{**row, "steps": steps})
