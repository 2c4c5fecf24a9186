"""Whether sampled answers are distributed as those without the drafter: a two-sample test by permutation."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ...sampling import SamplingParams
from .decoders import Pair
from .measurement import EncodedPrompt

TOKENS = 8  # of an answer: the first comes from the prefill, and what is far behind it tells little
PERMUTATIONS = 999
SUSPICIOUS = 0.01

Answers = Sequence[Sequence[Sequence[int]]]  # of every prompt so many, each some tokens


def distribution_test(
    pair: Pair, prompts: Sequence[EncodedPrompt], params: SamplingParams, samples: int
) -> dict[str, Any]:
    """Begin to answer every prompt `samples` times with the drafter and as often without, all by seeds of their own.

    Raises:
        UserError: a prompt that does not fit.
    """
    first = params.seed or 0

    def answers(draft: bool, seed: int, prompt: EncodedPrompt) -> list[list[int]]:
        short = [replace(params, max_tokens=min(TOKENS, params.max_tokens), seed=seed + i) for i in range(samples)]
        return [pair.decode(prompt.token_ids, each, draft=draft).tokens for each in short]

    drafted = [answers(True, first, prompt) for prompt in prompts]
    plain = [answers(False, first + samples, prompt) for prompt in prompts]
    statistic, p_value = two_samples(drafted, plain)
    return {
        "temperature": params.temperature,
        "prompts": len(prompts),
        "samples": samples,
        "tokens": TOKENS,
        "permutations": PERMUTATIONS,
        "statistic": statistic,
        "p_value": p_value,
    }


def two_samples(drafted: Answers, plain: Answers) -> tuple[float, float]:
    """Pearson's chi-squared of tokens and pairs of tokens by place and prompt, and its p-value.

    Which answers of a prompt are the drafted ones is permuted, so that the p-value is exact however few there are.
    """
    rng, statistics = np.random.default_rng(0), np.zeros(1 + PERMUTATIONS)
    for one, other in zip(drafted, plain, strict=True):
        seen = _seen([*one, *other])  # [answers, what may be seen]
        is_drafted = np.arange(len(seen)) < len(one)
        permuted = rng.permuted(np.tile(is_drafted, (PERMUTATIONS, 1)), axis=1)
        labels = np.vstack([is_drafted, permuted]).astype(np.float64)
        share, total = len(one) / len(seen), seen.sum(0)
        expected = share * total
        statistics += ((labels @ seen - expected) ** 2 / (expected * (1 - share))).sum(1)
    extreme = int((statistics[1:] >= statistics[0] * (1 - 1e-12)).sum())
    return float(statistics[0]), (1 + extreme) / (1 + PERMUTATIONS)


def _seen(answers: Sequence[Sequence[int]]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Whether an answer has this token, or this one behind that one, at this place; one that has ended has -1 there."""
    longest = max(map(len, answers))
    tokens = np.array([[*answer, *[-1] * (longest - len(answer))] for answer in answers])
    pairs = [np.unique(tokens[:, place : place + 2], axis=0, return_inverse=True)[1] for place in range(longest - 1)]
    columns = [*tokens.T, *(pair.reshape(-1) for pair in pairs)]
    return np.concatenate([column[:, None] == np.unique(column) for column in columns], axis=1).astype(np.float64)
