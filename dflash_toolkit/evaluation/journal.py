"""The measurements of an unfinished run, one JSON line each, so that a killed run continues where it was.

The first line is the fingerprint of everything the numbers depend on; a journal with another one is started
afresh. A line that a kill left torn is dropped, together with whatever stands behind it.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..decode import Generation, Step
from ..files import append_lines, cut_journal, unwritable
from .measure import Difference, Measurement

Key = tuple[str, int]  # name of the prompt set, index of the prompt in it


class Journal:
    """What is done, on disk and in `done`. The file is open only while a line is written."""

    def __init__(self, path: Path, fingerprint: str) -> None:
        """Continue the journal at `path`, or start it afresh. Raises UserError if it cannot be written."""
        self._path = path
        self.done: dict[Key, Measurement] = {}
        header = {"fingerprint": fingerprint}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            old = path.read_bytes() if path.exists() else b""
        except OSError as error:
            raise unwritable(path, error) from error
        kept = self._read(old, json.dumps(header).encode() + b"\n")
        if kept == 0 and old.count(b"\n") > 1:
            print(f"{path} is of a run that differs; its measurements are made again", file=sys.stderr)
        cut_journal(path, kept)
        if kept == 0:
            append_lines(path, [header])

    def _read(self, content: bytes, header: bytes) -> int:
        """Fill `done` and return how many leading bytes are whole lines of this very run."""
        if not content.startswith(header):
            return 0
        kept = 0
        for line in content.splitlines(keepends=True):
            if not line.endswith(b"\n"):
                break
            if kept:
                try:
                    row = json.loads(line)
                    self.done[row["set"], row["index"]] = _measurement(row["measurement"])
                except (ValueError, KeyError, TypeError):
                    break
            kept += len(line)
        return kept

    def append(self, key: Key, measurement: Measurement) -> None:
        """Record a finished measurement. Raises UserError if the disk is full."""
        append_lines(self._path, [{"set": key[0], "index": key[1], "measurement": asdict(measurement)}])
        self.done[key] = measurement


def _measurement(row: dict[str, Any]) -> Measurement:
    plain, difference = row["plain"], row["difference"]
    return Measurement(
        row["id"],
        row["prompt_tokens"],
        _generation(row["drafted"]),
        None if plain is None else _generation(plain),
        None if difference is None else Difference(**difference),
        row["category"],
        row["prompt_text"],
        tuple(row["token_texts"]),
    )


def _generation(row: dict[str, Any]) -> Generation:
    steps = [Step(step["drafted"], step["accepted"], tuple(step["tokens"])) for step in row["steps"]]
    return Generation(**{**row, "steps": steps})
