"""Tests by permutation whether sampled answers have the same distribution with and without the drafter."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ...sampling import SamplingParams
from .measurement import EncodedPrompt
from .pairs import Pair

TOKENS = 8  # per answer: the first comes from the prefill, and tokens far after it add little
PERMUTATIONS = 999
SUSPICIOUS = 0.01

Answers = Sequence[Sequence[Sequence[int]]]  # tokens by prompt and answer


def distribution_test(
    pair: Pair, prompts: Sequence[EncodedPrompt], params: SamplingParams, samples: int
) -> dict[str, Any]:
    """Decodes the start of `samples` answers to every prompt with and without the drafter, each with its own seed.

    Raises:
        UserError: a prompt does not fit.
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
    """Returns Pearson's chi-squared of tokens and token pairs by position and prompt, and its p-value.

    The labels (drafted or plain) of a prompt's answers are permuted, so the p-value is exact for any number of answers.
    """
    rng, statistics = np.random.default_rng(0), np.zeros(1 + PERMUTATIONS)
    for one, other in zip(drafted, plain, strict=True):
        seen = _seen([*one, *other])  # [answers, events]
        is_drafted = np.arange(len(seen)) < len(one)
        permuted = rng.permuted(np.tile(is_drafted, (PERMUTATIONS, 1)), axis=1)
        labels = np.vstack([is_drafted, permuted]).astype(np.float64)
        share, total = len(one) / len(seen), seen.sum(0)
        expected = share * total
        statistics += ((labels @ seen - expected) ** 2 / (expected * (1 - share))).sum(1)
    extreme = int((statistics[1:] >= statistics[0] * (1 - 1e-12)).sum())
    return float(statistics[0]), (1 + extreme) / (1 + PERMUTATIONS)


def _seen(answers: Sequence[Sequence[int]]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Returns whether each answer has a token, or a pair of tokens, at a position; after its end a token is -1."""
    longest = max(map(len, answers))
    tokens = np.array([[*answer, *[-1] * (longest - len(answer))] for answer in answers])
    pairs = [np.unique(tokens[:, place : place + 2], axis=0, return_inverse=True)[1] for place in range(longest - 1)]
    columns = [*tokens.T, *(pair.reshape(-1) for pair in pairs)]
    return np.concatenate([column[:, None] == np.unique(column) for column in columns], axis=1).astype(np.float64)
