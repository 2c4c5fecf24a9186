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
    """Limits of a pass with several chunks: each is padded to one of the sizes, or all are packed without padding."""

    most: int = 1  # maximum number of padded chunks
    sizes: tuple[int, ...] = ()  # padded tokens of a chunk
    rows: int = 0  # tokens of all padded chunks together, padding included
    packed: int = 0  # tokens of all packed chunks together; 0: chunks are not packed

    def padded(self, chunks: Sequence[int]) -> int | None:
        """Returns the size that chunks of these numbers of tokens are padded to in one pass, or None if it is full."""
        size = next((size for size in self.sizes if size >= max(chunks)), None)
        return size if size is not None and len(chunks) <= self.most and len(chunks) * size <= self.rows else None

    def fits(self, chunks: Sequence[int]) -> bool:
        """Returns whether chunks of these numbers of tokens fit into one pass."""
        return sum(chunks) <= self.packed or self.padded(chunks) is not None
