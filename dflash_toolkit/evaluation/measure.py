"""Decode prompts with a drafter and without one, and count what was accepted.

Everything here is batch 1, on one of the two runtimes of `runtimes.py`. A figure with nothing to count is NaN; the
report writes null.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..decode import Generation, SamplingParams, generate
from ..drafter import Drafter
from ..target import Target
from .runtimes import Runtime


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A prompt as the target reads it."""

    id: str
    token_ids: list[int]


@dataclass(frozen=True, slots=True)
class Difference:
    """Where a drafted answer leaves the plain one.

    At temperature 0 a small gap is a near tie that rounding decided; a large one is a defect.
    """

    position: int  # 0-based, in the answer
    plain_token: int
    drafted_token: int
    gap: float  # p(plain) - p(drafted) after the common prefix: the target's softmax in fp32, unfiltered


@dataclass(frozen=True, slots=True)
class Measurement:
    """One prompt, decoded with the drafter and, with a baseline, without."""

    id: str
    prompt_tokens: int
    drafted: Generation
    plain: Generation | None
    difference: Difference | None  # None without a baseline, and where the answers are equal


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
        return _ratio(self.tokens - self.answers, self.decode_s)

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
        taus = [g.acceptance_length for g in generations if g.steps]
        return cls(
            answers=len(generations),
            tokens=sum(len(g.tokens) for g in generations),
            steps=sum(lengths),
            tau_pooled=_ratio(sum(n * count for n, count in enumerate(lengths, 1)), sum(lengths)),
            tau_mean=_ratio(sum(taus), len(taus)),
            accepted_per_position=tuple(map(_ratio, accepted[1:], judged[1:])),
            accepted_given_previous=tuple(map(_ratio, accepted[1:], reached[1:])),
            accepted_lengths=tuple(lengths),
            prefill_s=sum(g.prefill_s for g in generations),
            decode_s=sum(g.decode_s for g in generations),
        )


def _ratio(part: float, whole: float) -> float:
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


def measure(
    runtime: Runtime,
    prompt: EncodedPrompt,
    params: SamplingParams,
    *,
    baseline: bool,
    on_step: Callable[[Generation], None] | None = None,
) -> Measurement:
    """Decode one prompt with the drafter and, with `baseline`, without, one after the other.

    Args:
        on_step: called with the growing drafted answer.

    Raises:
        UserError: a prompt that is empty or leaves no room for an answer.
    """
    drafted = runtime.decode(prompt.token_ids, params, draft=True, on_step=on_step)
    plain = runtime.decode(prompt.token_ids, params, draft=False) if baseline else None
    difference = _difference(runtime, prompt.token_ids, plain.tokens, drafted.tokens) if plain else None
    return Measurement(prompt.id, len(prompt.token_ids), drafted, plain, difference)


def _difference(runtime: Runtime, prompt_ids: list[int], plain: list[int], drafted: list[int]) -> Difference | None:
    # an answer ends by a rule on its own tokens, so neither of two different ones is a prefix of the other
    for position, (a, b) in enumerate(zip(plain, drafted, strict=False)):
        if a != b:
            return Difference(position, a, b, runtime.gap(prompt_ids + plain[:position], a, b))
    return None


def held_out_acceptance(
    target: Target, drafter: Drafter, prompts: list[list[int]], params: SamplingParams | None = None
) -> Acceptance:
    """Decode token-id prompts by `decode.py` with the drafter and count; for modules that are in memory anyway.

    Raises:
        UserError: a prompt that does not fit.
    """
    answers = [generate(target, drafter, prompt, params) for prompt in prompts]
    return Acceptance.of(answers, drafter.config.block_size)
