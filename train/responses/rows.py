"""Training rows: token ids of prompt and response, from the chat template and the target."""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

Span = tuple[int, int]  # start and end of a response in its row
Tokens = list[int] | npt.NDArray[np.int32]  # a list while it is written, a view of a `Corpus` in training


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """A training text."""

    index: int  # place of its prompt in the data
    prompt_tokens: int  # length of the prompt; all later tokens are supervised unless there are spans
    tokens: Tokens
    spans: tuple[Span, ...] = ()  # the responses of a conversation of several turns

    def __eq__(self, other: object) -> bool:
        """Compares contents, whatever type holds the tokens."""
        if not isinstance(other, Row):
            return NotImplemented
        mine, theirs = ((row.index, row.prompt_tokens, row.supervised) for row in (self, other))
        return mine == theirs and np.array_equal(self.tokens, other.tokens)

    @property
    def supervised(self) -> tuple[Span, ...]:
        """Every [start, end) written by the target."""
        return self.spans or ((self.prompt_tokens, len(self.tokens)),)

    @property
    def response_tokens(self) -> int:
        return sum(end - start for start, end in self.supervised)

    @property
    def has_anchor(self) -> bool:
        """Whether there are two consecutive supervised tokens."""
        return any(end - start >= 2 for start, end in self.supervised)

    def cut(self, length: int) -> "Row":
        """Returns the row cut to at most `length` tokens."""
        if len(self.tokens) <= length:
            return self
        spans = tuple((start, min(end, length)) for start, end in self.spans if start < length)
        # without spans, no token may count as supervised
        prompt = min(self.prompt_tokens, length) if spans or not self.spans else length
        return replace(self, prompt_tokens=prompt, tokens=self.tokens[:length], spans=spans)
