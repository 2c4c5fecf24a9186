"""An engine with a KV cache in fp8: drafts, batches, prefixes and preemption change no answer."""

import math
from typing import Any

import pytest
import torch
from engines import alone, knowing, make_engine, pair, prompts_of
from planted_trees import planting

from dflash_toolkit import SamplingParams, UserError
from dflash_toolkit.kernels.paged import FP8
from dflash_toolkit.runtime import Engine, EngineOptions
from dflash_toolkit.runtime.plan import Planner

GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)


def fp8_engine(*models: Any, **options: Any) -> Engine:
    engine = make_engine(*models, kv_cache_dtype="fp8", **options)
    runner = engine.runner
    stacks = [runner.verifier.stack, *([runner.proposer.stack] if runner.proposer else [])]
    assert all(stack.cache.dtype == FP8 for stack in stacks)
    return engine


def plain_answers(target: Any, prompts: list[list[int]]) -> dict[tuple[int, ...], list[int]]:
    """Returns the answers of engines without a drafter, each with one request."""
    return {tuple(each): fp8_engine(target, None).generate([each], GREEDY)[0].tokens for each in prompts}


@pytest.mark.parametrize("nodes", [0, 20], ids=["blocks", "trees"])
@pytest.mark.parametrize("kind", ["llama", "qwen3_next"])
def test_drafts_change_no_answer(kind: str, nodes: int) -> None:
    target, drafter = pair(kind)
    prompts = prompts_of(1, 5, 17, 33)
    expected = plain_answers(target, prompts)
    engine = fp8_engine(target, drafter, draft_tree=nodes)
    if nodes:
        with planting(engine, expected):
            answers = engine.generate(prompts, GREEDY)
    else:
        knowing(engine, expected, lambda position: position % 5 == 0)
        answers = engine.generate(prompts, GREEDY)
    assert [got.tokens for got in answers] == list(expected.values())
    assert sum(step.accepted for got in answers for step in got.steps) > 20


def test_the_cache_changes_what_the_target_answers() -> None:
    target, _ = pair()
    prompts = prompts_of(*[40] * 6)
    expected = plain_answers(target, prompts)
    assert any(alone(target, None, prompt, GREEDY).tokens != expected[tuple(prompt)] for prompt in prompts)


def test_preempted_requests_lose_no_token() -> None:
    target, drafter = pair()
    prompts = prompts_of(30, 25, 40, 12, 33)
    expected = plain_answers(target, prompts)
    engine = fp8_engine(target, drafter, kv_cache_tokens=140)
    answers = engine.generate(prompts, GREEDY)
    assert engine.stats.preemptions > 0
    assert [got.tokens for got in answers] == list(expected.values())


def test_a_found_prefix_changes_no_answer() -> None:
    target, drafter = pair()
    (prompt,) = prompts_of(22)
    engine = fp8_engine(target, drafter)
    first = engine.submit(prompt, GREEDY)
    while engine.step():
        pass
    turn = prompt + first.tokens + [7, 8, 9]
    second = engine.submit(turn, GREEDY)
    while engine.step():
        pass
    assert second.cached_tokens >= 40
    assert second.tokens == plain_answers(target, [turn])[tuple(turn)]


def test_poisoned_pages_are_cleaned_with_their_scales() -> None:
    runner = fp8_engine(*pair()).runner
    stack = runner.verifier.stack
    for cached in stack.cached:
        cached.copy_(torch.full_like(cached, math.nan, dtype=torch.float32))
    runner.clean([2, 5])
    for cached in stack.cached:
        pages = cached.float().unflatten(2, (-1, runner.page_size))
        assert (pages[:, :, [2, 5]] == 0).all() and pages[:, :, [1, 3, 4, 6]].isnan().all()


def test_the_plan_counts_the_bytes_of_the_cache() -> None:
    target, drafter = pair()
    engine = fp8_engine(target, drafter)
    spec, config = engine.runner.target.spec, drafter.config
    options = engine.options
    plan = Planner(spec, config, torch.float32, fused=False).plan(options)
    stacks = [engine.runner.verifier.stack, engine.runner.proposer.stack]
    held = sum(cached.nbytes for stack in stacks for cached in stack.cached)
    assert plan.token == held / stacks[0].cache.shape[2]
    full = Planner(spec, config, torch.float32, fused=False).plan(make_engine(target, drafter).options)
    assert plan.token < full.token / 2 and plan.tables == full.tables


def test_a_format_other_than_the_models_is_refused() -> None:
    with pytest.raises(ValueError, match="kv_cache_dtype is 'int8'; it must be one of auto, bfloat16, fp8, fp8_e4m3"):
        EngineOptions(kv_cache_dtype="int8")
    with pytest.raises(UserError, match="kv_cache_dtype is bfloat16, but the model computes in float32"):
        make_engine(*pair(), kv_cache_dtype="bfloat16")
    assert make_engine(*pair(), kv_cache_dtype="fp8_e4m3").options.fp8_cache
