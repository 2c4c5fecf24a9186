"""Prefill jobs: chunks of prompts, and the limits of a batch of them. Without torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class ScoredTokens(NamedTuple):
    """Tokens of a prompt for which log-probabilities are requested."""

    ids: Sequence[int]  # the token after the chunk's first one, after its second one, ...
    top: int  # also the log-probabilities of this many most probable tokens


class PrefillJob(NamedTuple):
    """A chunk of one request's prompt, and where its keys, values and recurrent states are written."""

    ids: Sequence[int]
    start: int  # position of the first token; recurrent states start empty at 0
    pages: Sequence[int]  # pages of the whole request
    state: int = 0  # slot of the request's recurrent states, if the target has any
    scores: ScoredTokens | None = None


@dataclass(frozen=True, slots=True)
class PrefillLimits:
    """Limits of a batch of prefills: each chunk is padded to one of the sizes."""

    most: int = 1  # maximum number of chunks
    sizes: tuple[int, ...] = ()  # padded tokens of a chunk
    rows: int = 0  # tokens of all chunks together, padding included

    def size(self, tokens: int) -> int | None:
        """Returns the padded size of a chunk, or None if it is too long."""
        return next((size for size in self.sizes if size >= tokens), None)

    def fits(self, chunks: Sequence[int]) -> bool:
        """Returns whether chunks of these numbers of tokens fit into one pass."""
        size = self.size(max(chunks))
        return size is not None and len(chunks) <= self.most and len(chunks) * size <= self.rows
