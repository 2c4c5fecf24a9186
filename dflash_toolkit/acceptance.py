"""Counts how many drafted tokens the target accepted, over finished answers.

A figure without anything to count is NaN; reports write null.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .generation import Generation

PROMPT_TOKENS = (512, 2048, 8192, 32768)  # longest prompts of the groups


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Pooled counts and times of some answers decoded with blocks of S tokens. S = 1 is plain decoding.

    The first token of an answer comes from the prefill and belongs to no step.
    """

    answers: int
    tokens: int  # generated, including first and stop tokens
    steps: int
    tau_pooled: float  # tokens committed by steps / steps, including the bonus token
    tau_mean: float  # mean tau of the answers with at least one step
    accepted_per_position: tuple[float, ...]  # [S - 1] share of steps that accepted at least k drafts, by slot k
    accepted_given_previous: tuple[float, ...]  # [S - 1] the same, among steps that accepted at least k - 1
    accepted_lengths: tuple[int, ...]  # [S] number of steps that committed 1..S tokens
    prefill_s: float
    decode_s: float

    @property
    def seconds(self) -> float:
        return self.prefill_s + self.decode_s

    @property
    def tokens_per_second(self) -> float:
        """Tokens committed by steps per second of those steps, without the prefill and its token."""
        return ratio(self.tokens - self.answers, self.decode_s)

    @classmethod
    def of(cls, generations: Sequence[Generation], block_size: int) -> "Acceptance":
        """Counts finished answers decoded with blocks of `block_size` = S tokens.

        A step counts for slot k if it could have accepted that slot, see `verdicts`.
        """
        judged, reached, accepted = ([0] * block_size for _ in range(3))  # by slot; slot 0 is the anchor
        lengths = [0] * block_size
        for generation in generations:
            for step in generation.steps:
                lengths[len(step.tokens) - 1] += 1
            for verdict in verdicts(generation):
                for slot in range(1, verdict.slots + 1):
                    judged[slot] += 1
                    reached[slot] += verdict.accepted >= slot - 1
                    accepted[slot] += verdict.accepted >= slot
        taus = [tau for g in generations if (tau := g.acceptance_length) is not None]
        return cls(
            answers=len(generations),
            tokens=sum(len(g.tokens) for g in generations),
            steps=sum(lengths),
            tau_pooled=ratio(sum(n * count for n, count in enumerate(lengths, 1)), sum(lengths)),
            tau_mean=ratio(sum(taus), len(taus)),
            accepted_per_position=tuple(map(ratio, accepted[1:], judged[1:])),
            accepted_given_previous=tuple(map(ratio, accepted[1:], reached[1:])),
            accepted_lengths=tuple(lengths),
            prefill_s=sum(g.prefill_s for g in generations),
            decode_s=sum(g.decode_s for g in generations),
        )


def prompt_length_group(tokens: int) -> str:
    """Returns the group of a prompt's length in reports and metrics, e.g. 513-2048."""
    number = bisect_left(PROMPT_TOKENS, tokens)
    least = PROMPT_TOKENS[number - 1] + 1 if number else 1
    return f"{least}-{PROMPT_TOKENS[number]}" if number < len(PROMPT_TOKENS) else f"{least}-"


def ratio(part: float, whole: float) -> float:
    """Returns part / whole, or NaN if whole is 0."""
    return part / whole if whole else math.nan


class Verdict(NamedTuple):
    """One step: the target judged slots 1..`slots` and accepted the first `accepted` of them."""

    slots: int
    accepted: int


def verdicts(generation: Generation) -> list[Verdict]:
    """Returns the judged slots of every step of a finished answer.

    A slot is judged if it was drafted (blocks are cut near the token limit) and its position is part of the answer. If
    a step ends the answer with a stop token, slots after that token are not judged, whether the token was drafted (its
    slot is accepted) or not (its slot is rejected).
    """
    found = [Verdict(step.drafted, step.accepted) for step in generation.steps]
    if found and generation.finish_reason == "stop":
        last = generation.steps[-1]
        found[-1] = Verdict(min(last.drafted, len(last.tokens)), last.accepted)
    return found
