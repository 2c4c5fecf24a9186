"""The taps of served tokens: those of a forward pass of the target, whatever was batched, drafted, shared or moved."""

import copy
import random
from typing import Any

import pytest
import torch
from engines import alone, make_engine, pair, prompts_of
from recurrent_engines import pair as recurrent_pair
from torch import Tensor

from dflash_toolkit import Drafter, SamplingParams, Target, UserError, generate
from dflash_toolkit.generation import Generation

PARAMS = SamplingParams(max_tokens=20, return_taps=True)


def expected(models: tuple[Target, Drafter], tokens: list[int]) -> Tensor:
    target, drafter = models
    out = target.forward(torch.tensor([tokens[:-1]]), taps=drafter.config.target_layer_ids)
    assert out.features is not None
    return out.features[0]


def check(models: tuple[Target, Drafter], prompt: list[int], got: Generation) -> None:
    whole = expected(models, prompt + got.tokens)
    assert got.taps.shape == whole.shape
    torch.testing.assert_close(got.taps, whole, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("nodes", [0, 12])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.sampled
def test_taps_equal_those_of_one_forward_pass(seed: int, nodes: int) -> None:
    """Requests share prefixes, are preempted, and end at limits and stop tokens."""
    dice, models = random.Random(seed), pair()
    engine = make_engine(*models, draft_tree=nodes, kv_cache_tokens=88, keep_taps=True, max_num_batched_tokens=7)
    stems = prompts_of(9, 14)
    asked = []
    for i in range(14):
        prompt = dice.choice(stems) + prompts_of(dice.randint(1, 6), seed=i)[0]
        stops = tuple(range(dice.randint(0, 12), 256, 13)) if dice.random() < 0.5 else ()
        params = SamplingParams(
            max_tokens=dice.randint(1, 24), stop_token_ids=stops, return_taps=True,
            temperature=dice.choice([0.0, 1.0]), seed=i,
        )  # fmt: skip
        asked.append(engine.submit(prompt, params))
        if dice.random() < 0.5:
            engine.step()
    while engine.step():
        pass
    assert engine.stats.cached_prompt_tokens > 0 and engine.scheduler.preemptions > 0
    for request in asked:
        check(models, request.prompt_ids, request.generation)


def test_the_reference_returns_the_same_taps() -> None:
    models, prompt = pair(), prompts_of(11)[0]
    check(models, prompt, generate(*models, prompt, PARAMS))
    stopped = SamplingParams(max_tokens=20, return_taps=True, stop_token_ids=tuple(range(0, 256, 3)))
    check(models, prompt, generate(*models, prompt, stopped))


def test_taps_of_a_recurrent_target_equal_those_of_one_pass() -> None:
    models, prompts = recurrent_pair(), prompts_of(9, 23)
    engine = make_engine(*models, keep_taps=True)
    exact = copy.deepcopy(models)
    exact[0].model.double()
    for prompt, got in zip(prompts, engine.generate(prompts, PARAMS), strict=True):
        one_pass, reference = (expected(each, prompt + got.tokens) for each in (models, exact))
        assert got.taps is not None and got.taps.shape == reference.shape
        assert (got.taps - reference).abs().max() <= 3 * (one_pass - reference).abs().max()


def test_taps_are_returned_only_on_request() -> None:
    models, prompts = pair(), prompts_of(9)
    engine = make_engine(*models, keep_taps=True)
    (got,) = engine.generate(prompts, SamplingParams(max_tokens=20))
    assert got.taps is None and got.tokens == alone(*models, prompts[0], SamplingParams(max_tokens=20)).tokens


@pytest.mark.parametrize("options", [{}, {"drafter": None, "keep_taps": True}])
def test_taps_need_a_drafter_and_a_place(options: dict[str, Any]) -> None:
    target, drafter = pair()
    engine = make_engine(target, options.pop("drafter", drafter), **options)
    with pytest.raises(UserError, match=r"return_taps needs a drafter and an engine with EngineOptions\(keep_taps"):
        engine.submit(prompts_of(9)[0], PARAMS)
    with pytest.raises(UserError, match="return_taps needs a drafter, which names the layers"):
        generate(target, None, prompts_of(9)[0], PARAMS)
