"""Draft trees of targets with recurrent layers: a node continues from its parent's state, the accepted path stays."""

import random
from dataclasses import replace
from typing import Any

import pytest
from conftest import make_dflash2, make_drafter
from engines import SAMPLINGS, alone, knowing, make_engine, prompts_of, same
from planted_trees import plain, planting, watch
from recurrent_engines import any_shapes, pair

from dflash_toolkit import SamplingParams, generate
from dflash_toolkit.runtime.request import StepShape
from dflash_toolkit.runtime.trees.feedback import CalibrationFeed

GREEDY = SamplingParams(max_tokens=18, ignore_eos=True)
TREES = {"draft_tree": 20, "draft_tree_width": 8}


@pytest.mark.parametrize(("kind", "nodes"), [("qwen3_next", 40), ("qwen3_5", 6), ("qwen3_5_moe", 20)])
def test_ragged_batches_take_the_steps_of_generate(kind: str, nodes: int) -> None:
    target, drafter = pair(kind)
    how = {"draft_tree": nodes, "draft_tree_width": 3}
    engine, prompts = make_engine(target, drafter, **how), prompts_of(1, 5, 17, 33)
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (16, 12, 1, 10)]
    with planting(engine, plain(target, prompts, params)):
        answers = engine.generate(prompts, params)
        for prompt, each, got in zip(prompts, params, answers, strict=True):
            assert same(got, generate(target, drafter, prompt, each, **how))
    steps = [step for got in answers for step in got.steps]
    assert max(step.accepted for step in steps) >= 2
    engine.pool.check()
    assert engine.pool.available == engine.pool.capacity


@pytest.mark.parametrize("width", [1, 3], ids=["chains", "trees"])
@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_5_moe"])
def test_sampled_and_edited_answers_equal_plain_ones(kind: str, width: int) -> None:
    """Penalties count the tokens of a node's path; log-probabilities are those of the accepted rows."""
    target, drafter = pair(kind)
    prompts = prompts_of(1, 5, 17, 33, 8, 2)
    engine = make_engine(target, drafter, draft_tree=20, draft_tree_width=width)
    with planting(engine, plain(target, prompts, SAMPLINGS)):
        answers = engine.generate(prompts, SAMPLINGS)
    for prompt, params, got in zip(prompts, SAMPLINGS, answers, strict=True):
        expected = generate(target, None, prompt, params)
        assert (got.tokens, got.finish_reason) == (expected.tokens, expected.finish_reason)
        if params.logprobs is not None:
            found, exact = ([each.chosen for each in one.logprobs] for one in (got, expected))
            assert found == pytest.approx(exact, abs=1e-4)
            assert [len(each.best) for each in got.logprobs] == [params.logprobs] * len(got.tokens)
    assert max(step.accepted for got in answers for step in got.steps) >= 2


@pytest.mark.parametrize("make", [make_drafter, make_dflash2])
def test_the_drafters_own_trees_are_those_of_generate(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CalibrationFeed, "FIRST", 10**9)  # generate fits none
    target, _ = pair()
    drafter, prompts, params = make(target), prompts_of(3, 20), replace(GREEDY, max_tokens=9)
    engine = make_engine(target, drafter, **TREES)
    for prompt, got in zip(prompts, engine.generate(prompts, params), strict=True):
        assert same(got, generate(target, drafter, prompt, params, "greedy", *TREES.values()))


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_steps_of_any_shape_leave_the_states_of_plain_decoding(temperature: float) -> None:
    """Blocks and plain steps run between trees, and use the states that they leave."""
    target, drafter = pair()
    engine, prompts = make_engine(target, drafter, **TREES), prompts_of(4, 19, 7)
    params = SamplingParams(max_tokens=40, temperature=temperature, seed=5, ignore_eos=True)
    each = [params, replace(GREEDY, max_tokens=40), replace(params, seed=9)]
    shapes = list[StepShape]()
    any_shapes(engine, random.Random(2))
    watch(engine, engine.scheduler.choose_shape, shapes)
    texts = plain(target, prompts, each)
    with planting(engine, texts):
        answers = engine.generate(prompts, each)
    assert [got.tokens for got in answers] == list(texts.values())
    assert {1, 8} <= {shape.block for shape in shapes if not shape.rows} and sum(s.rows > 0 for s in shapes) > 5
    assert sum(len(got.steps) for got in answers) < 3 * 40 / 1.5


@pytest.mark.parametrize("cache_tokens", [130, 1200])
def test_preemptions_and_prefix_hits_change_no_answer(cache_tokens: int) -> None:
    target, drafter = pair()
    engine = make_engine(target, drafter, kv_cache_tokens=cache_tokens, max_model_len=70, **TREES)
    (begun,) = prompts_of(25)
    prompts = [*prompts_of(30, 9), begun, [*begun, 5, 7], [*begun, 5, 9]]
    params = replace(GREEDY, max_tokens=30)
    texts = {tuple(prompt): alone(target, None, prompt, params).tokens for prompt in prompts}
    knowing(engine, texts, lambda position: position % 4 == 0)
    for batch in (prompts[:3], prompts[3:]):
        assert [got.tokens for got in engine.generate(batch, params)] == [texts[tuple(each)] for each in batch]
    assert engine.stats.cached_prompt_tokens > 0
    assert (engine.stats.preemptions > 0) == (cache_tokens == 130)
