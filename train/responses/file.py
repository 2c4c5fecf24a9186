"""The file of `dflash-data` and `dflash-train --responses`: one JSON line per response, only ever appended.

`index` (of the prompt), `sample`, `id`, `messages` with the responses, `tools` if there are any, `tokens` (ids of
prompt and responses), `prompt_tokens` (length of the prompt), `spans` ([start, end) of every response), `part` of
`parts` (more than one if the turns of a conversation do not continue each other token for token), `finish_reason`,
`target`, `target_digest` (of its weights), `vocab_size`, `template_hash` and `sampler`.
"""

import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from dflash_toolkit.config import UserError
from dflash_toolkit.data.prompts import UNREADABLE, open_text
from dflash_toolkit.files import cut_journal

from .conversation import LiveConversation
from .rows import Row

MOST_TOKENS = 2**31 - 1  # largest vocabulary


def lines_of(conversation: LiveConversation, common: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the lines of a finished conversation; none if it was dropped."""
    return [
        {
            "index": conversation.index,
            "sample": conversation.sample,
            "part": number,
            "parts": len(conversation.parts),
            "id": conversation.id,
            "messages": part.messages,
            **({"tools": conversation.tools} if conversation.tools else {}),
            "prompt_tokens": part.row.prompt_tokens,
            "tokens": part.row.tokens,
            "spans": part.row.spans,
            "finish_reason": part.finish_reason,
            **({"left_out": conversation.left_out} if conversation.left_out and not number else {}),
            **common,
        }
        for number, part in enumerate(conversation.parts)
    ]


def resume(path: Path) -> tuple[set[tuple[int, int]], int, int, Counter[str], int]:
    """Returns (index, sample) of complete responses, rows, response tokens, counts of missing turns, and cut rows.

    A row torn by a kill, or a response without its last part, can only be at the end; it is cut off.

    Raises:
        UserError: a line is not one of ours.
    """
    done: set[tuple[int, int]] = set()
    rows = tokens = position = whole = 0
    open_rows = open_tokens = cut = open_cut = 0
    left_out, open_left_out = Counter[str](), Counter[str]()
    for number, line, row in _lines(path):
        if not line.endswith(b"\n"):
            break  # it may be complete, but has no line break
        position += len(line)
        open_rows += 1
        try:
            open_tokens += _row_of(row, 0).response_tokens
            last = row["part"] == row["parts"] - 1
            key = (int(row["index"]), int(row["sample"]))
            open_left_out.update(map(str, row.get("left_out", ())))
            open_cut += row.get("finish_reason") == "length"
        except (LookupError, TypeError, ValueError, OverflowError) as error:
            raise _foreign(path, number, error) from error
        if last:
            done.add(key)
            rows, tokens, whole, cut = rows + open_rows, tokens + open_tokens, position, cut + open_cut
            open_rows = open_tokens = open_cut = 0
            left_out.update(open_left_out)
            open_left_out.clear()
    cut_journal(path, whole)
    return done, rows, tokens, left_out, cut


@dataclass(frozen=True, slots=True)
class Match:
    """Properties that responses must have."""

    target: str  # its name
    digest: str | None  # covers its weights; None if they are not on this machine
    vocab_size: int
    template: str  # hash
    trust: bool = False  # accept any target and template


@dataclass(frozen=True, slots=True)
class Written:
    """A row of a responses file."""

    file: int  # index of its file
    values: dict[str, Any]  # all its fields
    row: Row

    def number(self, key: str, otherwise: int = 0) -> int:
        """Returns `index`, `sample`, `part` or `parts`; files of other programs may lack them."""
        value = self.values.get(key)
        return value if type(value) is int else otherwise


class ResponseReader:
    """Reads responses files row by row.

    Attributes:
        samplers: of all rows so far.
        rows: number of rows read.
    """

    def __init__(self, match: Match) -> None:
        self._match = match
        self._samplers: dict[str, dict[str, Any]] = {}
        self._matched: dict[tuple[str, ...], str | None] = {}  # error of rows with these fields, if any
        self.rows = 0

    @property
    def samplers(self) -> list[dict[str, Any]]:
        return list(self._samplers.values())

    def read(self, paths: Sequence[str | Path]) -> Iterator[Written]:
        """Yields every row of the files, in order, renumbered.

        Raises:
            UserError: a file cannot be read, is not a responses file, or has another target or chat template.
        """
        if twice := next((path for i, path in enumerate(paths) if path in paths[:i]), None):
            raise UserError(f"responses {twice} is given twice; give each file once")
        vocabulary = self._match.vocab_size
        for place, path in enumerate(paths):
            before = self.rows
            for number, _, values in _lines(Path(path)):
                try:
                    row = _row_of(values, self.rows)
                    self._samplers[json.dumps(values["sampler"], sort_keys=True)] = values["sampler"]
                    wrong = self._wrong(values)
                except (LookupError, TypeError, ValueError, OverflowError) as error:
                    raise _foreign(Path(path), number, error) from error
                if wrong:
                    raise UserError(f"{path}, line {number}: {wrong}")
                ids = np.asarray(row.tokens)
                if not 0 <= ids.min() <= ids.max() < vocabulary:
                    raise UserError(
                        f"{path}, line {number}: a token is outside the target's vocabulary of {vocabulary}"
                    )
                self.rows += 1
                yield Written(place, values, row)
            if self.rows == before:
                raise UserError(f"{path}: holds no responses")

    def _wrong(self, values: dict[str, Any]) -> str | None:
        said = [str(values[key]) for key in ("target", "vocab_size", "template_hash")]
        key = (*said, str(values.get("target_digest")))
        if key not in self._matched:
            self._matched[key] = self._compared(*key)
        return self._matched[key]

    def _compared(self, target: str, words: str, template: str, digest: str) -> str | None:
        """Returns the error of rows with this target and template, if any; prints what could not be compared."""
        match, again = self._match, "write them again with dflash-data"
        known = digest != "None" and match.digest is not None
        same_name = _last_name(target) == _last_name(match.target)
        same_words = words == str(match.vocab_size)
        if match.trust:
            if not same_words or template != match.template or (digest != match.digest if known else not same_name):
                print(f"responses of {target} are trusted to be of {match.target} (trust_responses)", file=sys.stderr)
            return None
        if not same_words or not (known or same_name):
            return (
                f"written by {target} with {words} tokens in its vocabulary, and the target is {match.target} with "
                f"{match.vocab_size}; {again}, or give --trust-responses if it is the same target"
            )
        if known and digest != match.digest:
            return (
                f"written by {target} with other weights ({digest[:12]}) than {match.target} has "
                f"({str(match.digest)[:12]}); {again}, or give --trust-responses"
            )
        if template != match.template:
            return f"rendered with another chat template than {match.target} has; {again}, or give --trust-responses"
        if not known:
            print(f"warning: responses of {target} match {match.target} by name; weights are unknown", file=sys.stderr)
        return None


def read_training_rows(paths: Sequence[str], match: Match) -> list[Row]:
    """Returns the rows of responses files, in memory. Raises UserError as `ResponseReader.read` does."""
    return [written.row for written in ResponseReader(match).read(paths)]


def _row_of(row: dict[str, Any], index: int) -> Row:
    if not all(type(token) is int for token in row["tokens"]):
        raise TypeError("tokens must be integers")
    tokens = np.array(row["tokens"])  # of objects beyond 64 bits, which are clipped below
    spans = tuple((int(start), int(end)) for start, end in row["spans"])
    prompt_tokens = int(row["prompt_tokens"])
    ends = [0, *(edge for span in spans for edge in span), len(tokens)]
    if not len(tokens) or not spans or ends != sorted(ends) or prompt_tokens != spans[0][0]:
        raise ValueError("spans, tokens and prompt_tokens do not match")
    if type(row["index"]) is not int:
        raise TypeError("index must be an integer")
    return Row(index, prompt_tokens, np.clip(tokens, -1, MOST_TOKENS).astype(np.int32), spans)


def _parsed(line: bytes) -> Any:
    """Returns the value of a line. msgspec reads it twice as fast as json, but refuses lone surrogates."""
    try:
        return msgspec.json.decode(line)
    except msgspec.DecodeError:
        return json.loads(line)


def _lines(path: Path) -> Iterator[tuple[int, bytes, dict[str, Any]]]:
    """Yields every complete line with its number and value; skips a torn last line."""
    if not path.exists():
        raise UserError(f"{path}: no such file")
    try:
        with open_text(path) as handle:
            for number, line in enumerate(handle.buffer, 1):  # bytes, since `resume` counts every one
                try:
                    row = _parsed(line)
                except (ValueError, RecursionError) as error:
                    if not line.endswith(b"\n"):
                        return  # an object ends with a brace
                    raise _foreign(path, number, error) from error
                if not isinstance(row, dict):
                    raise _foreign(path, number, TypeError("not an object"))
                yield number, line, row
    except UNREADABLE as error:
        raise UserError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from error


def _foreign(path: Path, number: int, error: Exception) -> UserError:
    reason = " ".join(f"{type(error).__name__}: {error}".split())
    return UserError(f"{path}, line {number}: not a row that dflash-data wrote ({reason[:200]})")


def of_another_run(output: Path, difference: str) -> UserError:
    """Returns the error for responses that were written with other settings."""
    return UserError(f"{output} holds responses of another run ({difference}); choose another --output or remove it")


def _last_name(target: str) -> str:
    return target.rstrip("/").split("/")[-1]
