"""Decode prompts with a drafter and without one, and count what was accepted.

Everything here is batch 1, on one of the two runtimes of `decoders.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass

from ..acceptance import Acceptance
from ..decode import generate
from ..generation import Generation
from ..models.dflash.network import Drafter
from ..models.target import Target
from ..sampling import SamplingParams
from .decoders import Pair


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
    difference: Difference | None  # None without a baseline, and where the answers are equal or need not be


def measure(
    pair: Pair,
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
    drafted = pair.decode(prompt.token_ids, params, draft=True, on_step=on_step)
    plain = pair.decode(prompt.token_ids, params, draft=False) if baseline else None
    difference = None
    if plain and pair.repeats_plain(params):
        difference = _difference(pair, prompt.token_ids, plain.tokens, drafted.tokens)
    return Measurement(prompt.id, len(prompt.token_ids), drafted, plain, difference)


def _difference(pair: Pair, prompt_ids: list[int], plain: list[int], drafted: list[int]) -> Difference | None:
    # an answer ends by a rule on its own tokens, so neither of two different ones is a prefix of the other
    for position, (a, b) in enumerate(zip(plain, drafted, strict=False)):
        if a != b:
            return Difference(position, a, b, pair.gap(prompt_ids + plain[:position], a, b))
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
