"""Sources of prompts: local files of every usual kind, and Hugging Face datasets, which are streamed.

JSON lines and text are read line by line and need no optional package; a JSON array is read whole. Parquet and datasets
are streamed by `datasets`.
"""

import glob
import gzip
import hashlib
import itertools
import json
import lzma
import os
import re
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from ..config import UserError
from ..fingerprint import files_digest
from ..network import unreachable
from .conversations import BY_NAME, FORM_CHOICES, FORMS, Conversation, conversation, likely_form

UNREADABLE = (OSError, UnicodeDecodeError, lzma.LZMAError, zlib.error, EOFError)  # errors of reading `open_text`
LINES = (".jsonl", ".ndjson", ".txt")
FILES = (*LINES, ".json", ".parquet")
PACKED = (".gz", ".xz")

_printed: set[tuple[str, str]] = set()  # notices about sources that were printed, each once


@dataclass(frozen=True, slots=True)
class Malformed:
    """A row that is not a conversation, and the reason."""

    where: str
    reason: str


@dataclass(frozen=True, slots=True)
class Found:
    """One row as it is in its source."""

    number: int  # the line or row, from 1
    unit: str  # line or row
    value: Any  # or a `Malformed`, with an empty `where`


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
    def is_file(self) -> bool:
        path = Path(self.place)
        if os.path.isdir(path):
            return False
        named = kind_of(path) in FILES or path.is_absolute() or self.place.startswith(".") or self.place.count("/") > 1
        return named or os.path.isfile(path)

    @property
    def short(self) -> str:
        """A short name for messages."""
        return self.label or (Path(self.place).name if self.is_file else self.place)

    def contents(self, split: str = "train") -> str:
        """Returns the sha256 of a file, or a dataset's name and split. Raises UserError."""
        return files_digest([self.place]) if self.is_file else f"{self.place}/{split}"

    def digest(self, split: str = "train") -> str:
        """Returns a digest of the prompts of this source: contents, range and form. Raises UserError."""
        plain = self.contents(split)
        part = f"[{self.start}:{'' if self.stop is None else self.stop}]" if self.start or self.stop else ""
        if not part and self.applied is None:
            return plain
        return hashlib.sha256(f"{plain}{part} {self.applied or ''}".encode()).hexdigest()

    def read(self, split: str = "train", shuffle: int = 0, seed: int = 0) -> Iterator[Conversation | Malformed]:
        """Yields every row in its order; rows of a dataset that is not a file in a random order by `seed`.

        Args:
            split: of a dataset.
            shuffle: rows of a dataset to buffer for shuffling; 0 keeps the order, and so does a range.

        Raises:
            UserError: no such file, dataset or rows, or it cannot be read.
        """
        for found in self.rows(split, shuffle, seed):
            where = self.where(found)
            if isinstance(found.value, Malformed):
                yield Malformed(where, found.value.reason)
                continue
            try:
                yield conversation(found.value, where, self.applied)
            except ValueError as error:
                yield Malformed(where, str(error))

    def rows(self, split: str = "train", shuffle: int = 0, seed: int = 0) -> Iterator[Found]:
        """Yields rows as they are in the source, for `read`; prints the applied template once on stderr."""
        rows: Iterator[Found]
        path = Path(self.place)
        if not self.is_file:
            rows = _streamed(self.place, split, 0 if self.start or self.stop else shuffle, seed)
        elif not os.path.exists(path):
            raise UserError(f"{path}: no such file")
        elif kind_of(path) == ".parquet":
            rows = _parquet(path)
        elif kind_of(path) == ".json":
            rows = _array(path)
        else:
            rows = _lines(path)
        empty = True
        for found in itertools.islice(rows, self.start, self.stop):
            if empty:
                self._print_form(found.value)
            empty = False
            yield found
        if empty:
            where = f"no such rows; the range begins with row {self.start}" if self.start else "holds no prompts"
            raise UserError(f"{self.place}: {where}")

    def where(self, found: Found) -> str:
        """Returns the name of a row for messages."""
        if not self.is_file:
            return f"{self.place}/{found.number}"
        return f"{Path(self.place).name}, {found.unit} {found.number}"

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
        line = f"{self.short}: {text}"
        if (self.place, line) not in _printed and os.environ.get("RANK", "0") == "0":  # only one process prints
            _printed.add((self.place, line))
            print(line, file=sys.stderr)


def kind_of(path: Path) -> str:
    """Returns the suffix for a file's format, without one for compression."""
    return Path(path.stem).suffix if path.suffix in PACKED else path.suffix


def _unreadable(name: str, error: Exception) -> UserError:
    reason = getattr(error, "strerror", None) or " ".join(str(error).split()) or type(error).__name__
    return UserError(f"{name}: cannot be read ({reason})")


def _lines(path: Path) -> Iterator[Found]:
    """One row a line: JSON, or in a .txt the prompt itself."""
    try:
        with open_text(path) as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                if kind_of(path) == ".txt":
                    yield Found(number, "line", line.rstrip("\n"))
                    continue
                try:
                    yield Found(number, "line", json.loads(line))
                except (ValueError, RecursionError) as error:
                    yield Found(number, "line", Malformed("", f"not valid JSON ({error})"))
    except UNREADABLE as error:
        raise _unreadable(str(path), error) from error


def _array(path: Path) -> Iterator[Found]:
    """Yields rows of a JSON array, or of an object with one list; a file of JSON lines is read as such."""
    try:
        with open_text(path) as handle:
            values = json.load(handle)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":  # a second value: JSON lines under another name
            yield from _lines(path)
            return
        raise UserError(f"{path}: not valid JSON ({error})") from error
    except UNREADABLE as error:
        raise _unreadable(str(path), error) from error
    except (ValueError, RecursionError) as error:  # an endless number, or lists in lists
        raise UserError(f"{path}: not valid JSON ({error})") from error
    if isinstance(values, dict):
        lists = [value for value in values.values() if isinstance(value, list)]
        try:
            conversation(values, "")  # the file's only row
            lists = [[values]]
        except ValueError:
            pass
        if len(lists) != 1:
            raise UserError(f"{path}: expected an array of rows, got an object")
        values = lists[0]
    if not isinstance(values, list):
        raise UserError(f"{path}: expected an array of rows, got {type(values).__name__}")
    for number, row in enumerate(values, 1):
        yield Found(number, "row", row)


def _parquet(path: Path) -> Iterator[Found]:
    """Rows of a Parquet file as `datasets` streams them."""
    # a link, since `datasets` may read a name as a pattern, a host or a chain of file systems; next to it is the cache
    # that `datasets` makes without need
    with tempfile.TemporaryDirectory() as folder:
        link = Path(folder) / "rows.parquet"
        link.symlink_to(path.absolute())
        name = glob.escape(str(link))
        rows = load_rows(str(path), "parquet", data_files=name, split="train", streaming=True, cache_dir=folder)
        yield from _numbered(rows, str(path))


def _streamed(name: str, split: str, shuffle: int, seed: int) -> Iterator[Found]:
    dataset, _, subset = name.partition(":")
    rows = load_rows(name, dataset, subset or None, split=split, streaming=True)
    if shuffle:
        rows = rows.shuffle(seed=seed, buffer_size=shuffle)
    yield from _numbered(rows, name)


def _numbered(rows: Any, name: str) -> Iterator[Found]:
    iterator = iter(rows)
    number = 0
    while True:
        number += 1
        try:
            row = next(iterator)
        except StopIteration:
            return
        except Exception as error:  # the network, or a broken file
            if unreachable(error):
                raise UserError(
                    f"{name}: row {number} cannot be fetched, the hub cannot be reached any more"
                ) from error
            raise _unreadable(name, error) from error
        yield Found(number, "row", row)


def load_rows(name: str, *args: Any, **options: Any) -> Any:
    """Calls `datasets.load_dataset(*args, **options)`; errors name `name`. Raises UserError."""
    local = "data_files" in options
    try:
        import datasets
    except ImportError as error:
        way_out = "" if local else ", or give a file"
        raise UserError(f"reading {name} needs datasets: pip install 'dflash-toolkit[train]'{way_out}") from error
    if local:
        datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False  # else each opened file is reported to the network
    try:
        load: Callable[..., Any] = datasets.load_dataset
        return load(*args, **options)
    except Exception as error:  # the hub client raises a dozen kinds
        if local:
            raise _unreadable(name, error) from error
        if unreachable(error):
            raise UserError(
                f"dataset {name} cannot be loaded without a network, and the hub cannot be reached; give a file"
            ) from error
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(f"dataset {name} cannot be loaded ({reason}); without a network give a file") from error


# ---- files ----------------------------------------------------------------------------------------------------------


def open_text(path: Path) -> TextIO:
    """A text file, plain, .gz or .xz."""
    openers: dict[str, Any] = {".gz": gzip.open, ".xz": lzma.open}
    return openers.get(path.suffix, open)(path, "rt", encoding="utf-8-sig")  # some editors write a byte order mark
