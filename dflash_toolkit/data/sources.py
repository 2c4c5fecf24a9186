"""Sources of conversations: local files, folders and patterns of them, and Hugging Face datasets."""

import fnmatch
import hashlib
import itertools
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..config import UserError
from ..fingerprint import files_digest
from .conversations import BY_NAME, FORM_CHOICES, FORMS, Conversation, conversation, likely_form
from .file_formats import UNREADABLE as UNREADABLE
from .file_formats import Found, file_rows, kind_of, local_files, open_text, streamed
from .file_formats import Malformed as Malformed
from .file_formats import load_rows as load_rows
from .messages import Message
from .rows import WRAPPERS, batch_answer

_printed: set[tuple[str, str]] = set()  # notices about sources that were printed, each once


class Batches:
    """Answers of the batch output files among some files, for the questions of the input files, by `custom_id`."""

    def __init__(self, files: Sequence[Path] = ()) -> None:
        self.answers: dict[str, Message] = {}
        self.asked: set[str] = set()
        for path in files if len(files) > 1 else ():
            if path.is_file() and kind_of(path) in (".jsonl", ".ndjson"):
                self._read(path)

    @classmethod
    def of(cls, names: Sequence[str]) -> "Batches":
        """Returns the batches of all sources of a command."""
        return cls([path for name in names for path in Source(name).files or ()])

    def _read(self, path: Path) -> None:
        try:
            with open_text(path) as lines:
                for line in lines:
                    row = json.loads(line) if line.strip() else None
                    if not isinstance(row, dict) or not isinstance(row.get("custom_id"), str):
                        return  # no batch file
                    if answer := batch_answer(row):
                        self.answers |= {answer[0]: answer[1]} if answer[1] else {}
                    elif any(name in row for name in WRAPPERS):
                        self.asked.add(row["custom_id"])
        except (*UNREADABLE, ValueError, RecursionError):
            return  # reading the rows reports it

    def joined(self, row: Any) -> Any:
        """Returns a question with its answer; None for an answer to a question of another file; else the row."""
        name = row.get("custom_id") if isinstance(row, dict) else None
        if not isinstance(name, str) or name not in self.asked:
            return row
        if batch_answer(row):
            return None
        return row | {"response": self.answers[name]} if name in self.answers else row


class Unread:
    """Counts the rows of a source, and how many of them have each column or key that was not read."""

    def __init__(self) -> None:
        self.rows = 0
        self._found: Counter[str] = Counter()

    def add(self, keys: set[str]) -> None:
        self.rows += 1
        self._found.update(keys)

    def __str__(self) -> str:
        """Returns the columns and keys, those of as many rows together; empty if there are none."""
        by_count: dict[int, list[str]] = {}
        for key, count in self._found.items():
            by_count.setdefault(count, []).append(key)
        return ", ".join(
            f"{', '.join(sorted(keys))} ({'all rows' if count == self.rows else f'{count} of {self.rows} rows'})"
            for count, keys in sorted(by_count.items(), reverse=True)
        )


@dataclass(frozen=True, slots=True)
class Source:
    """One source of prompts: `[NAME=]FILE` or `[NAME=]DATASET[:SUBSET]`, each optionally with `[START:STOP]`.

    A dataset is one on the hub or a local directory. START:STOP are its rows START..STOP - 1, counted from 0. NAME is
    a benchmark: its form is applied to the rows (`FORMS`); any other name changes nothing. If the whole text is the
    name of a file, it is that file.

    Raises:
        UserError: no such form, or a range without rows.
    """

    given: str
    form: str = BY_NAME  # a benchmark of `FORMS` that overrides NAME, or "none"
    label: str = ""  # NAME, if it is given separately
    place: str = field(init=False, default="")  # FILE or DATASET[:SUBSET]
    start: int = field(init=False, default=0)
    stop: int | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if self.form not in FORM_CHOICES:
            raise UserError(f"form {self.form!r}: no such form; there are {', '.join(FORM_CHOICES)}")
        label, place, start, stop = self.label, self.given, 0, None
        if not os.path.exists(place):
            if not label and (found := re.fullmatch(r"([^=/\\]+)=(.+)", place)):
                label, place = found[1], found[2]
            if not os.path.exists(place) and (found := re.fullmatch(r"(.+?)\[(\d*):(\d*)\]", place)):
                place, start, stop = found[1], int(found[2] or 0), int(found[3]) if found[3] else None
        if stop is not None and stop <= start:
            raise UserError(f"source {self.given!r}: no such rows")
        for key, value in (("label", label), ("place", place), ("start", start), ("stop", stop)):
            object.__setattr__(self, key, value)

    @property
    def applied(self) -> str | None:
        """The benchmark whose form is applied."""
        form = self.label if self.form == BY_NAME else self.form
        return form if form in FORMS else None

    @property
    def files(self) -> list[Path] | None:
        """The local files that hold the rows, sorted; None for a dataset. Raises UserError if no file matches."""
        return local_files(self.place)

    @property
    def is_file(self) -> bool:
        """Whether the rows are in local files, and not in a dataset."""
        return self.files is not None

    @property
    def short(self) -> str:
        """A short name for messages."""
        return self.label or (Path(self.place).name if self.is_file else self.place)

    def includes(self, path: Path) -> bool:
        """Whether a file is, or would be, one of this source."""
        place, path = Path(self.place).resolve(), path.resolve()
        return path == place or place in path.parents or fnmatch.fnmatch(str(path), str(place))

    def contents(self, split: str = "train") -> str:
        """Returns the sha256 of the files, or a dataset's name and split. Raises UserError."""
        files = self.files
        return f"{self.place}/{split}" if files is None else files_digest(list(map(str, files)))

    def digest(self, split: str = "train") -> str:
        """Returns a digest of the prompts of this source: contents, range and form. Raises UserError."""
        plain = self.contents(split)
        part = f"[{self.start}:{'' if self.stop is None else self.stop}]" if self.start or self.stop else ""
        if not part and self.applied is None:
            return plain
        return hashlib.sha256(f"{plain}{part} {self.applied or ''}".encode()).hexdigest()

    def read(
        self, split: str = "train", shuffle: int = 0, seed: int = 0, batches: Batches | None = None
    ) -> Iterator[Conversation | Malformed]:
        """Yields every row in its order; rows of a dataset in a random order by `seed`.

        Prints the applied template, and at the end the columns and keys of messages that were not read.

        Args:
            split: of a dataset.
            shuffle: rows of a dataset to buffer for shuffling; 0 keeps the order, and so does a range.
            batches: of the files of all sources (default: of this one).

        Raises:
            UserError: no such file, dataset or rows, or it cannot be read.
        """
        files, unread, form = self.files, Unread(), self.applied
        file: Path | None = None
        name, refused = self.place, False
        batches = batches or Batches(files or ())
        try:
            for found in self._rows(files, split, shuffle, seed):
                if (row := batches.joined(found.value)) is None:
                    continue
                if found.file != file:
                    file, name = found.file, self._name(found.file)
                try:
                    if isinstance(row, Malformed):
                        raise ValueError(row.reason)
                    keys: set[str] = set()
                    read = conversation(row, f"{name}/{found.number}", form, keys)
                except ValueError as error:
                    where = f"{file}, {found.unit} {found.number}" if file else f"{name}/{found.number}"
                    refused = True  # a reader that stops here reports it
                    yield Malformed(where, str(error))
                    refused = False
                    continue
                unread.add(keys)
                yield read
        except GeneratorExit:
            if not refused:
                self._print_unread(unread)
            raise
        self._print_unread(unread)

    def _rows(self, files: list[Path] | None, split: str, shuffle: int, seed: int) -> Iterator[Found]:
        """Yields rows as they are in the source."""
        rows: Iterator[Found]
        if files is None:
            rows = streamed(self.place, split, 0 if self.start or self.stop else shuffle, seed)
        else:
            rows = itertools.chain.from_iterable(map(file_rows, files))
        empty = True
        for found in itertools.islice(rows, self.start, self.stop):
            if empty:
                self._print_form(found.value)
            empty = False
            yield found
        if empty:
            where = f"no such rows; the range begins with row {self.start}" if self.start else "holds no prompts"
            raise UserError(f"{self.place}: {where}")

    def _name(self, file: Path | None) -> str:
        """Returns what names a row without an id of its own, with its number."""
        if file is None:
            return self.place
        return str(file.relative_to(self.place)) if os.path.isdir(self.place) else file.name

    def _print_form(self, row: Any) -> None:
        """Prints which form is applied, or that none is although one may be expected."""
        begins = next((form for form in FORMS if self.label.lower().startswith(form)), None)
        like = likely_form(row)
        if self.applied:
            text = f"asked in the form of the benchmark {self.applied}"
        elif self.form == BY_NAME and begins:
            text = f"no benchmark form is applied to the name {self.label!r}; {begins}={self.place} applies that one"
        elif self.form == BY_NAME and like:
            ways = " or ".join(
                f"{name}={self.place}" for name in (("gsm8k", "math500") if like == "gsm8k" else (like,))
            )
            text = f"asked as its rows are; {ways} asks as the benchmark does"
        else:
            return
        self._print(text)

    def _print_unread(self, unread: Unread) -> None:
        if text := str(unread):
            self._print(f"not read: {text}")

    def _print(self, text: str) -> None:
        """Prints a notice about this source once, in one process."""
        line = f"{self.short}: {text}"
        if (self.place, line) not in _printed and os.environ.get("RANK", "0") == "0":
            _printed.add((self.place, line))
            print(line, file=sys.stderr)
