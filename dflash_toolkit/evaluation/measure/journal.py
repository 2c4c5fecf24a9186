"""The measurements of an unfinished run, one JSON line each, so that a killed run continues where it was.

A line has a digest of everything that its numbers depend on, and is of use to every run that wants the same. A line
that a kill left torn is dropped, together with whatever stands behind it.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ...decode import Generation, Step
from ...files import append_lines, cut_journal, unwritable
from .measurement import Difference, Measurement


class Journal:
    """What is done, on disk and in `done`, by digest. The file is open only while a line is written."""

    def __init__(self, path: Path, threads: int) -> None:
        """Continue the journal at `path`, or start it, with so many threads. Raises UserError: it cannot be written."""
        self._path, self._threads = path, threads
        self.done: dict[str, Measurement] = {}
        self.points: dict[str, dict[str, Any]] = {}  # of sweeps and tests, as reports have them; answers among others
        self.threads: dict[str, int] = {}  # that measured it
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            old = path.read_bytes() if path.exists() else b""
        except OSError as error:
            raise unwritable(path, error) from error
        cut_journal(path, self._read(old))

    def _read(self, content: bytes) -> int:
        """Fill `done` and return how many leading bytes are whole lines."""
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
        """Record a finished measurement. Raises UserError if the disk is full."""
        append_lines(self._path, [{"key": key, "threads": self._threads, "measurement": asdict(measurement)}])
        self.done[key], self.threads[key] = measurement, self._threads

    def append_point(self, key: str, point: dict[str, Any]) -> None:
        """Record a point of a sweep, or a test. Raises UserError if the disk is full."""
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
    """An answer as `asdict` makes JSON of it."""
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
