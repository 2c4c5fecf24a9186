"""Results of decoding, shared by the reference decoder, the engine, reports and the server. Imports no torch."""

from array import array
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Literal

from .config import UserError

FinishReason = Literal["stop", "length"]
Offered = tuple[tuple[tuple[int, float], ...], ...]  # see `Step.offered`


@dataclass(frozen=True, slots=True)
class Step:
    """One verification: `drafted` tokens proposed, `accepted` of them kept, `tokens` committed (bonus included).

    Attributes:
        offered: for each of the tokens, the candidates of a draft tree at its place and their probabilities, likeliest
            first. Empty for a block, or if not requested.
    """

    drafted: int
    accepted: int
    tokens: tuple[int, ...]
    offered: Offered = field(default=(), compare=False)  # the probabilities depend on what decodes


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural log-probabilities at one position, of the target's own distribution at temperature 1, unfiltered."""

    chosen: float
    best: tuple[tuple[int, float], ...]  # (token, log-probability), most probable first


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of a prompt's tokens after its first one, which has none.

    Packed: there may be thousands, and the decoding thread has no time to unpack them.
    """

    best: int  # most probable tokens at each position
    packed: bytes  # float64 [tokens - 1, 2 + 2 * best], see `kernels.reference.scored_tokens`

    def __len__(self) -> int:
        return len(self.packed) // (16 + 16 * self.best)

    def __iter__(self) -> Iterator[tuple[TokenLogprobs, int]]:
        """Yields the log-probabilities of each token, and its rank: 1 is the most probable of the vocabulary."""
        values, best = array("d", self.packed), self.best
        for at in range(0, len(values), 2 + 2 * best):
            ids = values[at + 2 : at + 2 + best]
            logprobs = values[at + 2 + best : at + 2 + 2 * best]
            yield TokenLogprobs(values[at], tuple(zip(map(int, ids), logprobs, strict=True))), int(values[at + 1])


@dataclass(slots=True)
class Generation:
    """A finished answer, or a growing one from `stream`.

    Attributes:
        tokens: the answer's, including the stop token.
        steps: one `Step` for each verification. The first token comes from the prefill and belongs to no step.
        finish_reason: stop or length; None while the answer grows.
        prefill_s: seconds until the first token.
        decode_s: seconds after it.
        logprobs: one entry for each token, if requested.
        prompt_logprobs: for the prompt's tokens, if requested.
        taps: outputs of the layers that the drafter taps, of prompt and answer without its last token, if requested: a
            tensor [n - 1, K*D] on the host. From a GPU it is complete when the GPU has done its current work.
    """

    tokens: list[int] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    prefill_s: float = 0.0
    decode_s: float = 0.0
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: PromptLogprobs | None = None
    taps: Any = field(default=None, compare=False, repr=False)

    @property
    def acceptance_length(self) -> float | None:
        """tau: committed tokens per verify step, bonus included; None before the first step."""
        return sum(len(s.tokens) for s in self.steps) / len(self.steps) if self.steps else None


class PromptError(UserError):
    """A prompt that cannot be decoded.

    Attributes:
        code: "context_length_exceeded" if OpenAI's API has that name for it, else None.
    """

    def __init__(self, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.code = code


def check_prompt(ids: Sequence[int], limit: int, rows: int, *, answered: bool = True) -> None:
    """Checks that a prompt can be decoded.

    Args:
        limit: tokens of prompt and answer together.
        rows: of the target's embedding.
        answered: False if only the prompt's log-probabilities are requested.

    Raises:
        PromptError: no token, no room for an answer, or an id outside the embedding.
    """
    if not ids:
        raise PromptError("the prompt is empty; give at least one token")
    if len(ids) + answered > limit:
        raise PromptError(
            f"the prompt has {len(ids)} tokens; the context limit is {limit}"
            f"{' and an answer needs at least one' if answered else ''}",
            "context_length_exceeded",
        )
    if not 0 <= min(ids) <= max(ids) < rows:
        wrong = next(i for i in ids if not 0 <= i < rows)
        raise PromptError(f"the prompt holds token {wrong}; the target's embedding has rows 0..{rows - 1}")


def commit(generation: Generation, tokens: list[int], stop_ids: Set[int], limit: int) -> list[int]:
    """Appends tokens up to the first stop token, sets the finish reason, and returns what was appended.

    A limit of 0 appends nothing: the answer is finished before it begins.
    """
    tokens = tokens if limit else []
    for i, token in enumerate(tokens):
        if token in stop_ids:
            tokens = tokens[: i + 1]
            generation.finish_reason = "stop"
            break
    generation.tokens += tokens
    if generation.finish_reason is None and len(generation.tokens) >= limit:
        generation.finish_reason = "length"
    return tokens
