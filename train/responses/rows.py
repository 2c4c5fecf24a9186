"""Rows to train on, and the answers that they are made of: a JSONL file that survives any kill.

Token ids are of prompt and answer, as the chat template and the target made them. Nothing is re-tokenised later.
`file.py` says what is in the file.
"""

import json
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from dflash_toolkit.config import UserError
from dflash_toolkit.sampling import SamplingParams

from .backends import Answer, Backend, Chat

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


def append(path: Path, rows: list[dict[str, Any]]) -> None:
    """Add rows to a JSONL file in one write. Raises UserError."""
    try:
        with open(path, "a", encoding="utf-8") as handle:  # closing flushes, and may fail like a write
            handle.write("".join(json.dumps(row) + "\n" for row in rows))
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror}); free some space and run again") from error
