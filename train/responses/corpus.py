"""The token ids of a run in one memory-mapped file; rows are views of it, without Python integers.

A folder holds `tokens.i32` (all rows, concatenated), `rows.npy` (`COLUMNS` for each row), `spans.npy` ([start, end) of
every response in its row) and `meta.json`. It is written under a temporary name and then renamed, so an existing folder
is complete.
"""

import os
import shutil
from array import array
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from dflash_toolkit.config import UserError
from dflash_toolkit.files import read_json, unwritable, write_json

from .rows import Row

Integers = npt.NDArray[np.int64]
COLUMNS = ("start", "length", "prompt_tokens", "first_span", "spans")  # a row's places in tokens.i32 and spans.npy
VERSION = 1
PARTIAL = ".partial"


class Corpus(Sequence[Row]):
    """Rows over a memory map, created on access; `index` is their place.

    Properties of all rows (`lengths`, `response_lengths`) and selections work on arrays with one number per row.

    Args:
        tokens: [N] int32, of all rows.
        table: [rows, COLUMNS] int64.
        spans: [M, 2] int32.
        meta: JSON values that were stored with them.
    """

    def __init__(
        self, tokens: npt.NDArray[np.int32], table: Integers, spans: npt.NDArray[np.int32], meta: dict[str, Any]
    ) -> None:
        self._tokens, self._table, self._spans, self.meta = tokens, table, spans, meta

    @classmethod
    def open(cls, folder: Path) -> "Corpus":
        """Maps the folder of a `CorpusWriter`. Raises UserError for a damaged folder."""
        try:
            meta = read_json(folder / "meta.json")
            table, spans = (np.load(folder / name) for name in ("rows.npy", "spans.npy"))
            # private, since torch refuses read-only arrays; writes are never saved
            tokens = np.asarray(np.memmap(folder / "tokens.i32", dtype=np.int32, mode="c"))
            if meta["version"] != VERSION or len(tokens) != meta["tokens"] or table.shape[1] != len(COLUMNS):
                raise ValueError("its files do not match")
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise UserError(f"{folder}: damaged ({error}); remove it to build it again") from error
        return cls(tokens, table, spans, meta)

    @classmethod
    def of_rows(cls, rows: Sequence[Row]) -> "Corpus":
        """Makes a corpus in memory."""
        tokens = np.concatenate([np.asarray(row.tokens, np.int32) for row in rows] or [np.zeros(0, np.int32)])
        table = np.zeros((len(rows), len(COLUMNS)), np.int64)
        table[:, 1] = [len(row.tokens) for row in rows]
        table[:, 2] = [row.prompt_tokens for row in rows]
        table[:, 4] = [len(row.supervised) for row in rows]
        table[:, 0], table[:, 3] = _starts(table[:, 1]), _starts(table[:, 4])
        spans = np.asarray([span for row in rows for span in row.supervised], np.int32).reshape(-1, 2)
        return cls(tokens, table, spans, {})

    def __len__(self) -> int:
        return len(self._table)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        place = range(len(self))[index]
        start, length, prompt_tokens, first, count = self._table[place].tolist()
        spans = self._spans[first : first + count].tolist()
        kept = tuple((begin, min(end, length)) for begin, end in spans if begin < length)
        # without spans, no token may count as supervised
        return Row(place, min(prompt_tokens, length) if kept else length, self._tokens[start : start + length], kept)

    @property
    def lengths(self) -> Integers:
        """Tokens of every row."""
        return self._table[:, 1]

    @property
    def prompt_lengths(self) -> Integers:
        """Tokens of every row's prompt."""
        return np.minimum(self._table[:, 2], self.lengths)

    @property
    def response_lengths(self) -> Integers:
        """Supervised tokens of every row."""
        return self._over_spans(np.add)

    @property
    def response_tokens(self) -> int:
        """Supervised tokens of all rows."""
        return int(self.response_lengths.sum())

    @property
    def responses(self) -> int:
        """Number of responses in all rows."""
        return int(np.count_nonzero(self._widths()))

    def cut(self, length: int) -> "Corpus":
        """Returns the corpus with every row cut to at most `length` tokens."""
        table = self._table.copy()
        np.minimum(table[:, 1], length, out=table[:, 1])
        return Corpus(self._tokens, table, self._spans, self.meta)

    def take(self, rows: npt.ArrayLike) -> "Corpus":
        """Returns these rows in this order, by index or mask; renumbered."""
        return Corpus(self._tokens, self._table[np.asarray(rows)], self._spans, self.meta)

    def with_anchors(self) -> "Corpus":
        """Returns the rows with at least one anchor: two consecutive supervised tokens."""
        return self.take(self._over_spans(np.maximum) >= 2)

    def _over_spans(self, join: np.ufunc) -> Integers:
        """Reduces the lengths of each row's responses with `join`."""
        if not len(self):
            return np.zeros(0, np.int64)
        return np.asarray(join.reduceat(self._widths(), _starts(self._table[:, 4])))

    def _widths(self) -> Integers:
        """Tokens of every response, row by row."""
        first, counts = self._table[:, 3], self._table[:, 4]
        places = np.repeat(first - _starts(counts), counts) + np.arange(int(counts.sum()))
        spans = self._spans[places].astype(np.int64)
        return np.maximum(np.minimum(spans[:, 1], np.repeat(self.lengths, counts)) - spans[:, 0], 0)


class CorpusWriter:
    """Writes the folder of a corpus; an earlier one stays until the new one is complete.

    Use it in a `with`: leaving it without `commit` removes what was written.

    Raises:
        UserError: the disk is full.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._partial = folder, folder.with_name(folder.name + PARTIAL)
        self._table, self._spans = array("q"), array("i")
        self._tokens = 0

    def __enter__(self) -> "CorpusWriter":
        try:
            shutil.rmtree(self._partial, ignore_errors=True)  # left by a killed run
            self._partial.mkdir(parents=True)
            self._file = open(self._partial / "tokens.i32", "wb", buffering=1 << 22)
        except OSError as error:
            raise self._failed(error) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._file.close()
        except OSError as mistake:
            if not error:
                raise self._failed(mistake) from mistake
        finally:
            shutil.rmtree(self._partial, ignore_errors=True)

    def __len__(self) -> int:
        return len(self._table) // len(COLUMNS)

    def add(self, row: Row) -> None:
        """Appends a row."""
        tokens, spans = np.ascontiguousarray(row.tokens, np.int32), row.supervised
        self._table.extend((self._tokens, len(tokens), row.prompt_tokens, len(self._spans) // 2, len(spans)))
        for span in spans:
            self._spans.extend(span)
        self._tokens += len(tokens)
        try:
            self._file.write(tokens.data)
        except OSError as error:
            raise self._failed(error) from error

    def prompt(self, place: int) -> list[int]:
        """Returns the prompt of a row that was added."""
        start, length, prompt_tokens = self._table[len(COLUMNS) * place : len(COLUMNS) * place + 3]
        try:
            self._file.flush()
            found = np.fromfile(self._partial / "tokens.i32", np.int32, min(length, prompt_tokens), offset=4 * start)
        except OSError as error:
            raise self._failed(error) from error
        return found.tolist()

    def commit(self, meta: dict[str, Any], keep: npt.ArrayLike | None = None) -> None:
        """Moves the corpus to its final place, with `meta`.

        Args:
            keep: indices of the rows to keep, in order (default: all).
        """
        table = np.frombuffer(self._table, np.int64).reshape(-1, len(COLUMNS))
        try:
            self._file.close()
            np.save(self._partial / "rows.npy", table if keep is None else table[np.asarray(keep, np.int64)])
            np.save(self._partial / "spans.npy", np.frombuffer(self._spans, np.int32).reshape(-1, 2))
            write_json(self._partial / "meta.json", {"version": VERSION, "tokens": self._tokens} | meta)
            shutil.rmtree(self._folder, ignore_errors=True)
            os.rename(self._partial, self._folder)
        except OSError as error:
            raise self._failed(error) from error

    def _failed(self, error: OSError) -> UserError:
        return unwritable(self._folder, error)


def lengths_of(rows: Sequence[Row]) -> Integers:
    """Returns the tokens of every row; does not create the rows of a `Corpus`."""
    return rows.lengths if isinstance(rows, Corpus) else np.asarray([len(row.tokens) for row in rows], np.int64)


def _starts(lengths: Integers) -> Integers:
    """Returns where each begins when they are concatenated."""
    return np.cumsum(lengths) - lengths
