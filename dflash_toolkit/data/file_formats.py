"""Rows of files of every usual kind, and of Hugging Face datasets, which are streamed.

JSON lines, text and CSV are read line by line and need no optional package; a JSON array is read whole. Parquet and
datasets are streamed by `datasets`; .zst needs pyarrow, which comes with it.
"""

import bz2
import csv
import glob
import gzip
import io
import itertools
import json
import lzma
import re
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from ..config import UserError
from ..network import unreachable
from .conversations import conversation

UNREADABLE = (OSError, UnicodeDecodeError, lzma.LZMAError, zlib.error, EOFError)  # errors of reading `open_text`
TABLES = {".csv": ",", ".tsv": "\t"}
FILES = (".jsonl", ".ndjson", ".txt", ".json", ".parquet", *TABLES)
PACKED = (".gz", ".xz", ".bz2", ".zst")
SPLITS = re.compile(r"(?<![a-z])(train|training|test|testing|eval|evaluation|dev|valid|validation|val)(?![a-z])")


@dataclass(frozen=True, slots=True)
class Malformed:
    """A row that is not a conversation, and the reason."""

    where: str
    reason: str


@dataclass(frozen=True, slots=True)
class Found:
    """One row of a source."""

    number: int  # the line or row of its file, from 1
    unit: str  # line or row
    value: Any  # the row as stored, or a `Malformed` with an empty `where`
    file: Path | None = None


# ---- files ------------------------------------------------------------------------------------------------------


def kind_of(path: Path) -> str:
    """Returns the suffix for a file's format, without one for compression."""
    return Path(path.stem).suffix if path.suffix in PACKED else path.suffix


def local_files(place: str) -> list[Path] | None:
    """Returns the files of a path, a pattern or a folder, sorted; None for a dataset.

    A folder is a dataset if its card or its file names declare splits.
    """
    path = Path(place)
    if path.is_dir():
        found = [each for each in sorted(path.rglob("*")) if each.is_file() and kind_of(each) in FILES]
        names = [str(each.relative_to(path)) for each in found]
        hidden = [any(part.startswith(".") for part in Path(name).parts) for name in names]
        if (path / "README.md").exists() or any(map(SPLITS.search, map(str.lower, names))):
            return None
        return [each for each, skip in zip(found, hidden, strict=True) if not skip] or None
    if not path.exists() and glob.has_magic(place):
        found = [Path(name) for name in sorted(glob.glob(place, recursive=True)) if Path(name).is_file()]
        if not found:
            raise UserError(f"{place}: no such file, and none matches the pattern")
        return found
    named = kind_of(path) in FILES or path.is_absolute() or place.startswith(".") or place.count("/") > 1
    return [path] if named or path.is_file() else None


def file_rows(path: Path) -> Iterator[Found]:
    """Yields the rows of a file. Raises UserError."""
    if not path.exists():
        raise UserError(f"{path}: no such file")
    kind = kind_of(path)
    read = _table if kind in TABLES else {".parquet": _parquet, ".json": _array}.get(kind, _lines)
    return read(path)


def open_text(path: Path, newline: str | None = None) -> TextIO:
    """Opens a text file, plain or compressed. Raises UserError if a package for it is missing."""
    if path.suffix == ".zst":
        try:
            import pyarrow
        except ImportError as error:
            raise UserError(f"reading {path} needs pyarrow: pip install 'dflash-toolkit[train]'") from error
        stream = pyarrow.input_stream(pyarrow.OSFile(str(path)), compression="zstd")
        return io.TextIOWrapper(stream, encoding="utf-8-sig", newline=newline)
    openers: dict[str, Any] = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}
    # some editors write a byte order mark
    return openers.get(path.suffix, open)(path, "rt", encoding="utf-8-sig", newline=newline)


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
                    yield Found(number, "line", line.rstrip("\n"), path)
                    continue
                try:
                    yield Found(number, "line", json.loads(line), path)
                except (ValueError, RecursionError) as error:
                    yield Found(number, "line", Malformed("", f"not valid JSON ({error})"), path)
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
        except ValueError:  # it is not a row; an array of rows may be inside
            pass
        if len(lists) != 1:
            raise UserError(f"{path}: expected an array of rows, got an object")
        values = lists[0]
    if not isinstance(values, list):
        raise UserError(f"{path}: expected an array of rows, got {type(values).__name__}")
    for number, row in enumerate(values, 1):
        yield Found(number, "row", row, path)


def _table(path: Path) -> Iterator[Found]:
    """Yields the rows of a CSV or TSV file; its first line names the columns. Skips empty cells."""
    csv.field_size_limit(sys.maxsize)
    try:
        with open_text(path, newline="") as handle:
            header = handle.readline()
            semicolons = kind_of(path) == ".csv" and ";" in header and "," not in header
            delimiter = ";" if semicolons else TABLES[kind_of(path)]
            table = csv.reader(itertools.chain([header], handle), delimiter=delimiter)
            columns = next(table, [])
            for number, cells in enumerate(table, 1):
                if len(cells) > len(columns):
                    yield Found(number, "row", Malformed("", "more cells than the header has columns"), path)
                elif cells:
                    yield Found(
                        number, "row", {name: cell for name, cell in zip(columns, cells, strict=False) if cell}, path
                    )
    except (*UNREADABLE, csv.Error) as error:
        raise _unreadable(str(path), error) from error


def _parquet(path: Path) -> Iterator[Found]:
    """Rows of a Parquet file as `datasets` streams them."""
    # a link, since `datasets` may read a name as a pattern, a host or a chain of file systems; next to it is the cache
    # of `datasets`, which it makes without need
    with tempfile.TemporaryDirectory() as folder:
        link = Path(folder) / "rows.parquet"
        link.symlink_to(path.absolute())
        name = glob.escape(str(link))
        rows = load_rows(str(path), "parquet", data_files=name, split="train", streaming=True, cache_dir=folder)
        yield from _numbered(rows, str(path), path)


# ---- datasets ---------------------------------------------------------------------------------------------------


def streamed(name: str, split: str, shuffle: int, seed: int) -> Iterator[Found]:
    dataset, _, subset = name.partition(":")
    rows = load_rows(name, dataset, subset or None, split=split, streaming=True)
    if shuffle:
        rows = rows.shuffle(seed=seed, buffer_size=shuffle)
    yield from _numbered(rows, name)


def _numbered(rows: Any, name: str, path: Path | None = None) -> Iterator[Found]:
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
                raise UserError(f"{name}: row {number} cannot be fetched, the hub can no longer be reached") from error
            raise _unreadable(name, error) from error
        yield Found(number, "row", row, path)


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
