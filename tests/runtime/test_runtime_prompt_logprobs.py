"""Log-probabilities of prompts equal the target's own at every position, in any batch."""

import copy
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from engines import make_engine, pair, prompts_of

from dflash_toolkit import SamplingParams, generate
from dflash_toolkit.generation import Generation, PromptError, PromptLogprobs

ASKED = SamplingParams(max_tokens=4, prompt_logprobs=3)


@cache
def exact_model() -> Any:
    """The target in float64, by Hugging Face."""
    return copy.deepcopy(pair()[0].model).double()


def check(found: PromptLogprobs | None, prompt: list[int], best: int) -> None:
    """Compares them with one pass of Hugging Face's model."""
    with torch.inference_mode():
        rows = exact_model()(torch.tensor([prompt])).logits[0].log_softmax(-1)
    assert found is not None and len(found) == len(prompt) - 1
    for (got, rank), row, token in zip(found, rows[:-1], prompt[1:], strict=True):
        assert got.chosen == pytest.approx(float(row[token]), abs=1e-4)
        assert [value for _, value in got.best] == pytest.approx(row.topk(best).values.tolist(), abs=1e-4)
        assert [value for _, value in got.best] == pytest.approx([float(row[i]) for i, _ in got.best], abs=1e-4)
        assert int((row > row[token] + 1e-4).sum()) < rank <= int((row >= row[token] - 1e-4).sum())


# chunks of 8 tokens, and of 300, of which 128 are scored at a time
@pytest.mark.parametrize(("turn", "lengths"), [(16, (1, 2, 7, 8, 9, 17, 40)), (600, (129, 301))])
@pytest.mark.parametrize("best", [0, 1, 20])
def test_prompt_logprobs_are_the_log_softmax_of_hugging_face(turn: int, lengths: tuple[int, ...], best: int) -> None:
    target, drafter = pair()
    engine = make_engine(target, drafter, max_num_batched_tokens=turn)
    params = SamplingParams(max_tokens=5, prompt_logprobs=best)
    prompts = prompts_of(*lengths)
    for prompt, got in zip(prompts, engine.generate(prompts, params), strict=True):
        check(got.prompt_logprobs, prompt, best)
        defined = generate(target, drafter, prompt, params)
        assert got.tokens == defined.tokens
        check(defined.prompt_logprobs, prompt, best)


def test_a_prompt_without_an_answer_may_fill_the_context() -> None:
    target, drafter = pair()
    engine, params = make_engine(target, drafter, max_model_len=target.context_limit), replace(ASKED, max_tokens=0)
    (prompt,) = prompts_of(target.context_limit)
    for found in (engine.generate([prompt], params)[0], generate(target, drafter, prompt, replace(params, logprobs=1))):
        check(found.prompt_logprobs, prompt, 3)
        assert (found.tokens, found.logprobs, found.steps, found.finish_reason) == ([], [], [], "length")
    engine.pool.check()
    for asked, ids in ((params, [*prompt, 1]), (replace(params, max_tokens=1), prompt)):
        for decode in (engine.request, lambda *given: generate(target, drafter, *given)):
            with pytest.raises(PromptError, match="the context limit is 512"):
                decode(ids, asked)
    with pytest.raises(ValueError, match="max_tokens is 0; it must be >= 1"):
        SamplingParams(max_tokens=0)


def test_scores_change_no_bit_of_other_requests() -> None:
    others = [SamplingParams(max_tokens=12, logprobs=2, temperature=1.0, seed=3), SamplingParams(max_tokens=9)]

    def batched_with(scored: SamplingParams) -> list[Generation]:
        engine = make_engine(*pair(), prefix_cache=False)
        return engine.generate(prompts_of(30, 21, 9, 44), [others[0], scored, others[1], scored])

    for got, expected in zip(batched_with(ASKED), batched_with(replace(ASKED, prompt_logprobs=None)), strict=True):
        assert (got.tokens, got.logprobs) == (expected.tokens, expected.logprobs)


def test_scored_prompts_ignore_cached_pages_and_publish_their_own() -> None:
    engine = make_engine(*pair())
    (prompt,) = prompts_of(33)
    plain = SamplingParams(max_tokens=4)
    first, second = engine.generate([prompt], ASKED)[0], engine.generate([prompt], ASKED)[0]
    assert first.prompt_logprobs == second.prompt_logprobs and engine.stats.cached_prompt_tokens == 0
    check(second.prompt_logprobs, prompt, 3)
    engine.generate([prompt], plain)
    assert engine.stats.cached_prompt_tokens == 32
    assert engine.generate([prompt], plain)[0].prompt_logprobs is None


def test_a_preempted_request_has_each_score_once() -> None:
    target, drafter = pair()
    prompts = prompts_of(30, 40, 35, 25)
    params = SamplingParams(max_tokens=40, prompt_logprobs=2)
    engine = make_engine(target, drafter, kv_cache_tokens=100)
    got = engine.generate(prompts, params)
    assert engine.stats.preemptions > 0
    for prompt, one in zip(prompts, got, strict=True):
        check(one.prompt_logprobs, prompt, 2)
        assert one.tokens == generate(target, drafter, prompt, params).tokens


@pytest.mark.parametrize("best", [-1, 21])
def test_prompt_logprobs_above_the_maximum_is_refused(best: int) -> None:
    with pytest.raises(ValueError, match=rf"prompt_logprobs is {best}; .*0..20"):
        SamplingParams(prompt_logprobs=best)
