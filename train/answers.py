"""Answers in the target's own words: rows in a JSONL file that survives any kill.

A row of `dflash-train` is `{"index", "prompt_tokens", "tokens"}`: token ids of prompt and answer, as the chat template
and the target made them. Nothing is re-tokenised later. `dflash-data` writes more beside these; see `data_cli.py`.
"""

import json
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from dflash_toolkit.config import UserError
from dflash_toolkit.decode import SamplingParams
from dflash_toolkit.progress import Progress

from .backends import Answer, Backend, Chat
from .config import AnswerKnobs

Span = tuple[int, int]  # start and end of an answer in its row
Tokens = list[int] | npt.NDArray[np.int32]  # a list while it is written, a view of a `Corpus` while it is trained on


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """One training text."""

    index: int  # of its prompt in the data
    prompt_tokens: int  # the first so many tokens are the prompt; the rest is supervised unless there are spans
    tokens: Tokens
    spans: tuple[Span, ...] = ()  # the answers of a conversation of several turns

    def __eq__(self, other: object) -> bool:
        """By what it says, whatever holds its tokens."""
        if not isinstance(other, Row):
            return NotImplemented
        mine, theirs = ((row.index, row.prompt_tokens, row.supervised) for row in (self, other))
        return mine == theirs and np.array_equal(self.tokens, other.tokens)

    @property
    def supervised(self) -> tuple[Span, ...]:
        """Every [start, end) that the target wrote."""
        return self.spans or ((self.prompt_tokens, len(self.tokens)),)

    @property
    def answer_tokens(self) -> int:
        return sum(end - start for start, end in self.supervised)

    @property
    def has_anchor(self) -> bool:
        """Whether there are two supervised tokens in a row."""
        return any(end - start >= 2 for start, end in self.supervised)

    def cut(self, length: int) -> "Row":
        """At most so many tokens of it."""
        if len(self.tokens) <= length:
            return self
        spans = tuple((start, min(end, length)) for start, end in self.spans if start < length)
        # without a span left nothing may count as supervised
        prompt = min(self.prompt_tokens, length) if spans or not self.spans else length
        return replace(self, prompt_tokens=prompt, tokens=self.tokens[:length], spans=spans)


@dataclass(frozen=True, slots=True)
class Question:
    """A rendered prompt waiting for its answer."""

    index: int
    tokens: list[int]


class Dialogue(Protocol):
    """What is to be answered, in one turn or in several."""

    @property
    def question(self) -> tuple[list[int], SamplingParams] | None:
        """The prompt to answer next and how; None when all is said."""

    @property
    def chat(self) -> Chat | None:
        """What that prompt was rendered from, if it is known."""

    def hear(self, answer: Answer) -> None:
        """The answer to the question."""


D = TypeVar("D", bound=Dialogue)


def converse(backend: Backend, dialogues: Iterable[D]) -> Iterator[D]:
    """Every dialogue once it is over, in the order in which they end; no more are begun than the backend has use for.

    Raises:
        UserError: whatever the backend raises.
    """
    waiting = iter(dialogues)
    asked: dict[int, D] = {}
    key = 0
    exhausted = False
    while True:
        while not exhausted and len(asked) < backend.width:
            dialogue = next(waiting, None)
            if dialogue is None:
                exhausted = True
            elif dialogue.question is None:
                yield dialogue
            else:
                key += 1
                asked[key] = dialogue
                backend.ask(key, *dialogue.question, dialogue.chat)
        if not asked:
            return
        answer = backend.wait()
        dialogue = asked[answer.key]
        dialogue.hear(answer)
        if dialogue.question is None:
            del asked[answer.key]
            yield dialogue
        else:
            backend.ask(answer.key, *dialogue.question, dialogue.chat)


def seed_of(seed: int, index: int, sample: int = 0) -> int:
    """The seed of one answer, in 0..2^31 - 1: it does not depend on what else is answered."""
    return zlib.crc32(f"{seed}/{index}/{sample}".encode()) >> 1


# ---- dflash-train: one answer to every question --------------------------------------------------------------


def read_rows(path: Path, vocab_size: int | None = None) -> list[Row]:
    """The complete rows of an answers file; a line torn by a kill is cut off the file.

    Raises:
        UserError: it cannot be read, or holds something else, such as tokens beyond `vocab_size`.
    """
    if not path.exists():
        return []
    try:
        data = path.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            with open(path, "r+b") as handle:
                handle.truncate(whole)
        rows = [Row(**json.loads(line)) for line in data[:whole].splitlines()]
        if not all(type(token) is int for row in rows for token in (row.index, row.prompt_tokens, *row.tokens)):
            raise TypeError("tokens are not whole numbers")
        for row in rows:
            if row.spans or row.index < 0 or not 0 < row.prompt_tokens <= len(row.tokens):
                raise ValueError(f"the row of prompt {row.index} is no prompt with its answer")
            if min(row.tokens) < 0 or (vocab_size and max(row.tokens) >= vocab_size):
                raise ValueError(f"the row of prompt {row.index} holds a token outside the target's vocabulary")
        return rows
    except (OSError, TypeError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: damaged ({error}); remove it to have its prompts answered again") from error


class _Single:
    """A question, answered once."""

    chat = None

    def __init__(self, index: int, tokens: list[int], params: SamplingParams) -> None:
        self.row = Row(index, len(tokens), tokens)
        self.question: tuple[list[int], SamplingParams] | None = (tokens, params)

    def hear(self, answer: Answer) -> None:
        self.row = replace(self.row, tokens=self.row.tokens + answer.tokens)
        self.question = None


def regenerate(
    open_backend: Callable[[], Backend], questions: list[Question], path: Path, knobs: AnswerKnobs, max_length: int
) -> None:
    """Answer every question that `path` does not hold yet, appending each answer when it is finished.

    Args:
        open_backend: called if there is anything left to answer.
        max_length: prompt and answer together; longer answers are cut.

    Raises:
        UserError: the disk is full, or a prompt leaves no room for an answer.
    """
    for question in questions:
        if max_length - len(question.tokens) < 2:
            raise UserError(
                f"prompt {question.index} has {len(question.tokens)} tokens, prompts.max_length is {max_length}: "
                f"no room for an answer"
            )
    done = {row.index for row in read_rows(path)}
    todo = [q for q in questions if q.index not in done]
    if todo:
        params = knobs.params

        def begin(q: Question) -> _Single:
            room = min(knobs.max_new_tokens, max_length - len(q.tokens))
            return _Single(q.index, q.tokens, replace(params, seed=seed_of(0, q.index), max_new_tokens=room))

        backend = open_backend()
        try:
            with Progress("answers", len(questions), unit="tok") as progress:
                progress.advance(len(done), units=0)
                for single in converse(backend, map(begin, todo)):
                    row = single.row
                    append(path, [{"index": row.index, "prompt_tokens": row.prompt_tokens, "tokens": row.tokens}])
                    progress.advance(1, units=row.answer_tokens)
        finally:
            backend.close()


def append(path: Path, rows: list[dict[str, Any]]) -> None:
    """Add rows to a JSONL file in one write. Raises UserError."""
    try:
        with open(path, "a", encoding="utf-8") as handle:  # closing flushes, and may fail like a write
            handle.write("".join(json.dumps(row) + "\n" for row in rows))
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror}); free some space and run again") from error
