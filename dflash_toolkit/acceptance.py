"""What the target accepted of a drafter, counted over finished answers.

A figure with nothing to count is NaN; reports write null.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .generation import Generation


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Pooled counts and times of some answers decoded with blocks of S tokens. S = 1 is plain decoding.

    The first token of an answer comes from the prefill and belongs to no step.
    """

    answers: int
    tokens: int  # generated: first and stop tokens included
    steps: int
    tau_pooled: float  # tokens committed by steps / steps, the bonus token included
    tau_mean: float  # mean of the answers' own tau, over the answers with at least one step
    accepted_per_position: tuple[float, ...]  # [S - 1] slot k: share of steps that accepted at least k drafts
    accepted_given_previous: tuple[float, ...]  # [S - 1] the same among those that accepted at least k - 1
    accepted_lengths: tuple[int, ...]  # [S] number of steps that committed 1..S tokens
    prefill_s: float
    decode_s: float

    @property
    def seconds(self) -> float:
        return self.prefill_s + self.decode_s

    @property
    def tokens_per_second(self) -> float:
        """Tokens committed by steps per second of those steps; the prefill and its token are left out."""
        return ratio(self.tokens - self.answers, self.decode_s)

    @classmethod
    def of(cls, generations: Sequence[Generation], block_size: int) -> "Acceptance":
        """Count finished answers decoded with blocks of `block_size` = S tokens.

        Which steps count for slot k: those that could have accepted it, see `verdicts`.
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


def ratio(part: float, whole: float) -> float:
    """A share; NaN where there is nothing to count."""
    return part / whole if whole else math.nan


class Verdict(NamedTuple):
    """What one step says of the drafter: slots 1..`slots` were judged, the first `accepted` of them taken."""

    slots: int
    accepted: int


def verdicts(generation: Generation) -> list[Verdict]:
    """The judged slots of every step of a finished answer.

    A slot is judged if it was drafted (near the token limit blocks are cut to what still fits) and if its
    position is part of the answer: in the step that ends the answer with a stop token, slots behind that
    token are not judged, whether it was drafted (its slot is accepted) or not (its slot is rejected).
    """
    found = [Verdict(step.drafted, step.accepted) for step in generation.steps]
    if found and generation.finish_reason == "stop":
        last = generation.steps[-1]
        found[-1] = Verdict(min(last.drafted, len(last.tokens)), last.accepted)
    return found
