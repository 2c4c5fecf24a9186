"""Where prompts come from: local files of every usual kind, and Hugging Face datasets, which are streamed.

All but JSON arrays are streamed by `datasets`. Of JSON lines it reads the lines and `json` what is in them: its own
reader of JSON wants one schema for all rows of a file, which chats with tools or parts of content do not have.
"""

import glob
import gzip
import hashlib
import json
import lzma
import tempfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from .config import UserError
from .conversations import Conversation, conversation

UNREADABLE = (OSError, UnicodeDecodeError, lzma.LZMAError, zlib.error, EOFError)  # what reading `open_text` may raise

LINES = (".jsonl", ".ndjson", ".txt")
FILES = (*LINES, ".json", ".parquet")
PACKED = (".gz", ".xz")


@dataclass(frozen=True, slots=True)
class Malformed:
    """A row that is no conversation, and why."""

    where: str
    reason: str


@dataclass(frozen=True, slots=True)
class Source:
    """One source of prompts: `FILE`, or `DATASET[:SUBSET]` on the hub or in a local directory."""

    name: str

    @property
    def is_file(self) -> bool:
        path = Path(self.name)
        return path.is_file() or (kind_of(path) in FILES and not path.is_dir())

    def digest(self, split: str) -> str:
        """What tells this source from another: a file's contents, a dataset's name and split. Raises UserError."""
        return file_hash([self.name]) if self.is_file else f"{self.name}/{split}"

    def read(self, split: str = "train", shuffle: int = 0, seed: int = 0) -> Iterator[Conversation | Malformed]:
        """Every row in its order; rows of a dataset that is not a file in an order drawn from `seed`.

        Args:
            split: of a dataset.
            shuffle: rows of a dataset that are held to draw the next from; 0 keeps the order.

        Raises:
            UserError: no such file or dataset, or it cannot be read.
        """
        rows: Iterator[tuple[str, Any]]
        path = Path(self.name)
        if not self.is_file:
            rows = _streamed(self.name, split, shuffle, seed)
        elif kind_of(path) == ".parquet":
            rows = _file(path, "parquet", "row")
        elif kind_of(path) == ".json":
            rows = _array(path)
        else:
            rows = _lines(path)
        empty = True
        for where, row in rows:
            empty = False
            if isinstance(row, Malformed):
                yield row
                continue
            try:
                yield conversation(row, where)
            except ValueError as error:
                yield Malformed(where, str(error))
        if empty:
            raise UserError(f"{self.name}: holds no prompts")


def kind_of(path: Path) -> str:
    """The ending that says what a file holds, whether it is packed or not."""
    return Path(path.stem).suffix if path.suffix in PACKED else path.suffix


def _unreadable(name: str, error: Exception) -> UserError:
    reason = getattr(error, "strerror", None) or " ".join(str(error).split()) or type(error).__name__
    return UserError(f"{name}: cannot be read ({reason})")


def _lines(path: Path) -> Iterator[tuple[str, Any]]:
    """One row a line: JSON, or in a .txt the prompt itself."""
    for number, (where, row) in enumerate(_file(path, "text", "line")):
        line = row["text"] if number else row["text"].removeprefix("\ufeff")  # some editors write a byte order mark
        if not line.strip():
            continue
        if kind_of(path) == ".txt":
            yield where, line
            continue
        try:
            yield where, json.loads(line)
        except (ValueError, RecursionError) as error:
            yield where, Malformed(where, f"not valid JSON ({error})")


def _array(path: Path) -> Iterator[tuple[str, Any]]:
    """A JSON array of rows, or an object that holds one under its only list; a file of JSON lines is read as such."""
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
        yield f"{path.name}, row {number}", row


def _file(path: Path, kind: str, unit: str) -> Iterator[tuple[str, Any]]:
    """Rows of a file as `datasets` reads its `kind`, one after the other, packed or not."""
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    # a link, for a name may be a pattern, a host or a chain of file systems to `datasets`; beside it the cache that it
    # makes without need
    with tempfile.TemporaryDirectory() as folder:
        link = Path(folder) / f"rows{path.suffix if path.suffix in PACKED else ''}"
        link.symlink_to(path.absolute())
        name = glob.escape(str(link))
        rows = load_rows(str(path), kind, data_files=name, split="train", streaming=True, cache_dir=folder)
        yield from _numbered(f"{path.name}, {unit} ", rows, str(path))


def _streamed(name: str, split: str, shuffle: int, seed: int) -> Iterator[tuple[str, Any]]:
    dataset, _, subset = name.partition(":")
    rows = load_rows(name, dataset, subset or None, split=split, streaming=True)
    if shuffle:
        rows = rows.shuffle(seed=seed, buffer_size=shuffle)
    yield from _numbered(f"{name}/", rows, name)


def _numbered(start: str, rows: Any, name: str) -> Iterator[tuple[str, Any]]:
    iterator = iter(rows)
    number = 0
    while True:
        number += 1
        try:
            row = next(iterator)
        except StopIteration:
            return
        except Exception as error:  # the network, or a broken file
            raise _unreadable(name, error) from error
        yield f"{start}{number}", row


def load_rows(name: str, *args: Any, **options: Any) -> Any:
    """`datasets.load_dataset(*args, **options)`; errors speak of `name`. Raises UserError."""
    local = "data_files" in options
    try:
        import datasets
    except ImportError as error:
        way_out = "" if local else ", or give --data FILE"
        raise UserError(f"reading {name} needs datasets: pip install 'dflash-toolkit[train]'{way_out}") from error
    if local:
        datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False  # else the network is told of every file that is opened
    try:
        load: Callable[..., Any] = datasets.load_dataset
        return load(*args, **options)
    except Exception as error:  # the hub client raises a dozen kinds
        if local:
            raise _unreadable(name, error) from error
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(f"dataset {name} cannot be loaded ({reason}); without a network give --data FILE") from error


# ---- files ----------------------------------------------------------------------------------------------------------


def open_text(path: Path) -> TextIO:
    """A text file, plain, .gz or .xz."""
    openers: dict[str, Any] = {".gz": gzip.open, ".xz": lzma.open}
    return openers.get(path.suffix, open)(path, "rt", encoding="utf-8-sig")  # some editors write a byte order mark


def file_hash(paths: tuple[str, ...] | list[str]) -> str:
    """sha256 over the contents of files, in order. Raises UserError."""
    digest = hashlib.sha256()
    for path in paths:
        for chunk in _chunks(Path(path)):
            digest.update(chunk)
    return digest.hexdigest()


def _chunks(path: Path) -> Iterator[bytes]:
    try:
        with open(path, "rb") as handle:
            while chunk := handle.read(1 << 20):
                yield chunk
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error
