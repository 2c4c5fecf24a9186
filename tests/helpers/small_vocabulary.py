"""Reference answers: greedy ones of Hugging Face, and exact distributions of targets with a small vocabulary."""

import math
from collections.abc import Callable

import pytest
import torch
from conftest import EOS, PAD, make_dflash2, make_drafter
from transformers import AutoModelForCausalLM, LlamaConfig

from dflash_toolkit import Drafter, Target
from dflash_toolkit.generation import Generation
from dflash_toolkit.kernels.reference import filtered_probabilities


def hf_greedy(target: Target, prompt: list[int], count: int, eos: tuple[int, ...] = (EOS,)) -> list[int]:
    """Returns the answer of Hugging Face's own loop, one token a step."""
    ids = torch.tensor([prompt])
    out = target.model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count,
        eos_token_id=list(eos) or None, pad_token_id=PAD,
    )  # fmt: skip
    return out[0, len(prompt) :].tolist()


def small_vocabulary_pair(size: int, make: Callable[..., Drafter] = make_drafter) -> tuple[Target, Drafter]:
    """Returns a pair with so few tokens that all answers can be enumerated."""
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=size, hidden_size=16, intermediate_size=16, num_hidden_layers=3, num_attention_heads=2,
        max_position_embeddings=16, bos_token_id=None, eos_token_id=0, initializer_range=0.2,
    )  # fmt: skip
    target = Target(AutoModelForCausalLM.from_config(config, dtype=torch.float32))
    shape = {"hidden_size": 16, "intermediate_size": 16, "vocab_size": size, "mask_token_id": size - 1}
    return target, make(target, taps=1, layers=1, block_size=3, **shape)


def chi_square_limit(degrees: int) -> float:
    """About the 0.9999 quantile (Wilson and Hilferty 1931), which exact draws exceed once in ten thousand."""
    spread = 2 / (9 * degrees)
    return degrees * (1 - spread + 3.72 * math.sqrt(spread)) ** 3


def chi_square(counts: torch.Tensor, probabilities: torch.Tensor) -> tuple[float, float]:
    """Pearson's statistic and its limit; cells expected fewer than five times are counted as one."""
    assert counts[probabilities == 0].sum() == 0, "a token of probability zero was drawn"
    expected = probabilities.double() * counts.sum()
    small = expected < 5
    observed = torch.cat([counts[~small], counts[small].sum()[None]]).double()
    expected = torch.cat([expected[~small], expected[small].sum()[None]])
    observed, expected = observed[expected > 0], expected[expected > 0]
    return float(((observed - expected) ** 2 / expected).sum()), chi_square_limit(len(expected) - 1)


SMALL_PROMPT = [1, 5, 2]


SMALL_SAMPLINGS = [
    pytest.param({"temperature": 1.0}, id="plain"),
    pytest.param({"temperature": 0.7, "top_p": 0.85, "top_k": 6}, id="filtered"),
]


def exact_answers(target: Target, **filters: float) -> torch.Tensor:
    """Returns p(a, b, c) of the first three tokens after SMALL_PROMPT, by enumeration: fp64 [V, V, V]."""
    size = target.config.vocab_size
    singles, pairs = [[a] for a in range(size)], [[a, b] for a in range(size) for b in range(size)]

    def distribution(prefixes: list[list[int]]) -> torch.Tensor:
        logits = target.forward(torch.tensor([SMALL_PROMPT + p for p in prefixes]), logits="last").logits
        return filtered_probabilities(logits[:, 0], **filters).double()

    first, second, third = (distribution(prefixes) for prefixes in ([[]], singles, pairs))
    return first.view(size, 1, 1) * second.view(size, size, 1) * third.view(size, size, size)


def likely_draft(joint: torch.Tensor) -> Callable[[int], int]:
    """By position, likely values of the second and third token: some are accepted and some rejected."""
    likely = {1: int(joint.sum((0, 2)).argmax()), 2: int(joint.sum((0, 1)).topk(2).indices[1])}
    return lambda position: likely.get(position - len(SMALL_PROMPT), 0)


def check_answers(answers: list[Generation], joint: torch.Tensor, wrong: torch.Tensor) -> None:
    """The first three tokens of all answers follow `joint`, and not the distribution `wrong`."""
    accepted, drafted = (sum(getattr(s, f) for a in answers for s in a.steps) for f in ("accepted", "drafted"))
    assert 0.1 * drafted < accepted < 0.9 * drafted, "both branches of the rule must have run"
    counts = torch.zeros(joint.shape, dtype=torch.long)
    for answer in answers:
        counts[tuple(answer.tokens[:3])] += 1
    for axes in ((1, 2), (0, 2), (0, 1), (2,), (0,)):  # each token alone, and neighbouring pairs
        statistic, limit = chi_square(counts.sum(axes).flatten(), joint.sum(axes).flatten())
        assert statistic < limit
    statistic, limit = chi_square(counts.sum((1, 2)), wrong.sum((1, 2)))
    assert statistic > limit, "the statistic must detect another temperature"


def dflash2_of_few(target: Target, **shape: object) -> Drafter:
    """A drafter that drafts from half of a small vocabulary; each draft depends on the one before it."""
    return make_dflash2(target, selector_top_k=4, **shape)
