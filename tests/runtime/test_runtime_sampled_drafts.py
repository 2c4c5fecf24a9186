"""Drafts sampled at the requests' temperatures: answers equal those of `decode.py`, in any batch."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import make_dflash2
from engines import SAMPLINGS, make_engine, pair, prompts_of, same
from small_vocabulary import SMALL_PROMPT, check_answers, dflash2_of_few, exact_answers, small_vocabulary_pair
from torch import Tensor

from dflash_toolkit import Drafter, SamplingParams, Target, generate
from dflash_toolkit.kernels.reference import filtered_probabilities
from dflash_toolkit.runtime import Engine, EngineOptions
from dflash_toolkit.runtime.proposer import Draft
from dflash_toolkit.runtime.stack import Rows
from dflash_toolkit.sampling import Grammar

PROBABILISTIC = "probabilistic"
PARAMS = [
    *SAMPLINGS,
    SamplingParams(max_tokens=24),
    SamplingParams(max_tokens=9, temperature=1.0, grammar=Grammar("regex", "[ab]{3,40}"), seed=2),
]


def models(kind: str) -> tuple[Target, Drafter]:
    target, plain = pair()
    if kind == "plain":
        return target, plain
    changes: dict[str, Any] = {} if kind == "selector" else {"selector_rank": 0, "selector_top_k": 0}
    return target, make_dflash2(target, output_multiplier=0.4, **changes)


def engine_of(target: Target, drafter: Drafter, **options: Any) -> Engine:
    return make_engine(target, drafter, draft_sample_method=PROBABILISTIC, **options)


@pytest.mark.parametrize("kind", ["plain", "convolution", "selector"])
def test_mixed_batches_equal_generate(kind: str) -> None:
    target, drafter = models(kind)
    engine = engine_of(target, drafter)
    prompts = prompts_of(*range(3, 3 + 4 * len(PARAMS), 4))
    accepted = 0
    for prompt, params, got in zip(prompts, PARAMS, engine.generate(prompts, PARAMS), strict=True):
        expected = generate(target, drafter, prompt, params, PROBABILISTIC)
        assert same(got, expected)
        accepted += sum(step.accepted for step in got.steps)
    assert accepted > 0
    hot = replace(PARAMS[1], max_tokens=20)
    assert (
        generate(target, drafter, prompts[0], hot, PROBABILISTIC).tokens
        != generate(target, None, prompts[0], hot).tokens
    )


def test_answers_are_equal_up_to_the_end_of_the_context() -> None:
    target, _ = pair(limit=60)
    drafter = make_dflash2(target)
    prompts, params = (
        prompts_of(50, 20, 41),
        [SamplingParams(temperature=1.0, seed=s, ignore_eos=True) for s in (1, 2, 3)],
    )
    together = engine_of(target, drafter).generate(prompts, params)
    for prompt, one, got in zip(prompts, params, together, strict=True):
        alone = engine_of(target, drafter, max_num_seqs=1).generate([prompt], one)[0]
        assert same(got, alone) and same(got, generate(target, drafter, prompt, one, PROBABILISTIC))
        assert len(prompt) + len(got.tokens) == 60


@pytest.mark.slow
def test_sampled_drafts_keep_the_targets_distribution() -> None:
    target, drafter = small_vocabulary_pair(8, dflash2_of_few)
    options = {"num_speculative_tokens": 2, "page_size": 2, "max_num_seqs": 32, "kv_cache_tokens": 400}
    engine = engine_of(target, drafter, **options)
    params = [SamplingParams(max_tokens=4, seed=seed, ignore_eos=True, temperature=1.0) for seed in range(5000, 5500)]
    answers = engine.generate([SMALL_PROMPT] * len(params), params)
    check_answers(answers, exact_answers(target, temperature=1.0), exact_answers(target, temperature=2.0))


@pytest.mark.parametrize("filters", [{}, {"top_k": 5, "top_p": 0.8, "min_p": 0.1}], ids=["plain", "filtered"])
def test_drafts_from_the_targets_distribution_are_all_accepted(
    filters: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without q, or with that of another slot or row, less than about half would be accepted."""
    target, drafter = small_vocabulary_pair(8)
    options = {"num_speculative_tokens": 2, "page_size": 2, "max_num_seqs": 4, "kv_cache_tokens": 400}
    engine = engine_of(target, drafter, **options)
    sampling = {"temperature": 1.3} | filters

    def of_the_target(last: Tensor, rows: Rows, temperature: Tensor, uniform: Tensor) -> Draft:
        drafts = []
        for request in engine.scheduler.running:
            tokens, mass = list(request.tokens), []
            for _ in range(2):
                ids = torch.tensor([request.prompt_ids + tokens])
                mass.append(filtered_probabilities(target.forward(ids, logits="last").logits[0], **sampling))
                tokens.append(int(mass[-1].multinomial(1)))
            drafts.append((torch.tensor(tokens[-2:]), torch.cat(mass)))
        tokens_of_all, q = map(torch.stack, zip(*drafts, strict=True))
        return Draft(tokens_of_all, candidates=torch.arange(8).expand_as(q), q=q)

    monkeypatch.setattr(engine.runner.proposer, "sample", of_the_target)
    params = [SamplingParams(max_tokens=11, seed=seed, ignore_eos=True, **sampling) for seed in range(4)]
    for answer in engine.generate([SMALL_PROMPT, [2], [3, 3], SMALL_PROMPT], params):
        assert [(step.drafted, step.accepted) for step in answer.steps] == [(2, 2)] * 3 + [(0, 0)]


def test_sampled_drafts_of_others_change_no_greedy_answer() -> None:
    target, drafter = models("selector")
    prompts, params = prompts_of(7, 9), [SamplingParams(max_tokens=20), SamplingParams(max_tokens=20, temperature=1.0)]
    sampled, greedy = engine_of(target, drafter), make_engine(target, drafter)
    found = [engine.generate(prompts, params) for engine in (sampled, greedy)]
    assert same(found[0][0], found[1][0]) and found[0][1].steps != found[1][1].steps


def test_a_way_to_sample_drafts_that_is_not_known_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'gumbel'; .*greedy, probabilistic"):
        EngineOptions(draft_sample_method="gumbel")
