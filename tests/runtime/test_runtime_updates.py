"""New weights in a running engine: drafters change the speed only, targets empty the prefix cache."""

import copy
import random
from dataclasses import replace

import pytest
import torch
from architectures import ARCHITECTURES
from conftest import make_dflash2, make_drafter, make_target
from engines import alone, check, check_drafts, make_engine, pair, prompts_of, same
from torch import Tensor

from dflash_toolkit import Drafter, SamplingParams, Target, UserError
from dflash_toolkit.generation import Step
from dflash_toolkit.kernels.formats import RowScaledFp8
from dflash_toolkit.runtime import Engine, weights
from dflash_toolkit.runtime.engine import EngineStats
from dflash_toolkit.runtime.pages import PagePool
from dflash_toolkit.runtime.request import Request
from dflash_toolkit.runtime.weight_updates import update_drafter
from dflash_toolkit.runtime.weights import DrafterWeights

PARAMS = SamplingParams(max_tokens=20)


def drafters(count: int, target: Target) -> list[Drafter]:
    """Returns drafters of one shape with different weights."""
    found = [make_drafter(target) for _ in range(count)]
    for seed, drafter in enumerate(found):
        drafter.init_weights(torch.Generator().manual_seed(seed), std=0.1)
    return found


def tensors_of(engine: Engine) -> list[Tensor]:
    drafter = engine.runner.drafter
    assert drafter is not None
    return [view.clone() for view in (*drafter.parameter_views().values(), drafter.context_kv, drafter.k_norms)]


@pytest.mark.parametrize(("kind", "nodes"), [("llama", 12), ("qwen3_5", 0)])
def test_swaps_of_drafters_change_no_greedy_answer(kind: str, nodes: int) -> None:
    """Requests come and go, share prefixes and are preempted while drafting stops and the drafter is replaced."""
    dice, (target, _) = random.Random(nodes), pair(kind)
    versions = drafters(4, target)
    engine = make_engine(target, versions[0], draft_tree=nodes, kv_cache_tokens=240, keep_taps=True)
    stems = prompts_of(9, 14)
    wanted = [(dice.choice(stems) + prompts_of(dice.randint(1, 6), seed=i)[0]) for i in range(8)]
    left, running = [dice.choice(wanted) for _ in range(60)], []
    swaps = 0
    while left or not engine.scheduler.idle:
        if left and dice.random() < 0.4:
            running.append(engine.submit(left.pop(), PARAMS))
        if dice.random() < 0.3:
            engine.load_drafter(dice.choice(versions))
            swaps += 1
        if dice.random() < 0.1:
            engine.stop_drafting()
        engine.step()
    assert swaps > 30 and engine.drafter_version == swaps and len(running) == 60
    assert engine.stats.cached_prompt_tokens > 0 and engine.stats.accepted >= 0
    engine.pool.check()
    for request in running:
        assert request.tokens == alone(target, None, request.prompt_ids, PARAMS).tokens


def test_a_swapped_drafter_drafts_as_in_a_new_engine() -> None:
    target, _ = pair()
    old, new = drafters(2, target)
    engine = make_engine(target, old)
    prompts = prompts_of(5, 18, 33)
    check(engine, (target, old), prompts, PARAMS)
    engine.load_drafter(new)
    check_drafts(engine, (target, new), prompts_of(6, 19, seed=4), PARAMS)


@pytest.mark.parametrize("make", [make_drafter, make_dflash2])
def test_layers_in_fp8_are_quantized_again(make: type[Drafter], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "WIDE_IN_FP8", 0)
    target = make_target()
    old, new = make(target), make(target)
    generator = torch.Generator().manual_seed(8)
    for parameter in new.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    engine = make_engine(target, old, draft_dtype="fp8")
    fresh = make_engine(target, new, draft_dtype="fp8")
    places = [tensor.data_ptr() for tensor in _flat(engine.runner.drafter)]
    assert engine.runner.drafter is not None and engine.runner.drafter.layers[0].in_fp8
    engine.load_drafter(new)
    mine, theirs = _flat(engine.runner.drafter), _flat(fresh.runner.drafter)
    assert [tensor.data_ptr() for tensor in mine] == places, "captured steps read these places"
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(mine, theirs, strict=True))
    prompts = prompts_of(5, 18)
    pairs = zip(engine.generate(prompts, PARAMS), fresh.generate(prompts, PARAMS), strict=True)
    assert all(same(got, expected) for got, expected in pairs)


def _flat(drafter: DrafterWeights | None) -> list[Tensor]:
    """Returns the tensors of a drafter with layers in fp8."""
    assert drafter is not None and isinstance(drafter.head, RowScaledFp8)
    found = [*drafter.own_views().values(), drafter.context_kv, drafter.k_norms, drafter.head.data, drafter.head.scale]
    for layer in drafter.layers:
        matrices = [layer.mixer.qkv, layer.mixer.o, layer.ffn.gate_up, layer.ffn.down]  # type: ignore[union-attr]
        matrices += [each.projection for each in (layer.mixer_conv, layer.ffn_conv) if each is not None]
        found += [layer.input_norm, layer.post_norm]
        found += [part for matrix in matrices for part in weights.parts(matrix) if part is not None]
    return found


def _lacks(tensors: dict[str, Tensor]) -> None:
    del tensors["layers.1.mlp.down_proj.weight"]


def _wide(tensors: dict[str, Tensor]) -> None:
    tensors["norm.weight"] = torch.zeros(33)


def _unknown(tensors: dict[str, Tensor]) -> None:
    tensors["layers.7.mlp.down_proj.weight"] = torch.zeros(3)


def _nan(tensors: dict[str, Tensor]) -> None:
    tensors["norm.weight"] = torch.full((32,), torch.nan)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (_lacks, r"1 tensors are missing from its weights, first 'layers\.1\.mlp\.down_proj"),
        (_wide, r"'norm\.weight' has shape \(33,\), not \(32,\)"),
        (_unknown, r"unknown tensor 'layers\.7"),
        (_nan, r"'norm\.weight' holds a value that is not finite"),
    ],
)
def test_a_drafter_that_does_not_fit_changes_nothing(spoil: object, words: str) -> None:
    target, _ = pair()
    old, new = drafters(2, target)
    engine = make_engine(target, old)
    before, tensors = tensors_of(engine), dict(new.state_dict())
    spoil(tensors)  # type: ignore[operator]
    with pytest.raises(UserError, match=words):
        engine.update_drafter(tensors)
    assert all(map(torch.equal, before, tensors_of(engine))) and engine.drafter_version == 0


def test_a_drafter_of_another_kind_is_refused() -> None:
    target, drafter = pair()
    with pytest.raises(UserError, match=r"the drafter's target_layer_ids is \(0, 2\), but the engine's is"):
        make_engine(target, make_drafter(target, taps=2)).load_drafter(
            Drafter(replace(make_drafter(target, taps=2).config, target_layer_ids=(0, 2)))
        )
    with pytest.raises(UserError, match="the engine has no drafter; start it with one"):
        make_engine(target, None).load_drafter(drafter)


# ---- targets ---------------------------------------------------------------------------------------------------


def two_targets(kind: str = "llama", tied: bool = True) -> tuple[Target, Target]:
    """Returns two targets of one shape."""
    both = [ARCHITECTURES[kind].target() if kind in ARCHITECTURES else make_target(kind, tied=tied) for _ in range(2)]
    first, second = both
    generator = torch.Generator().manual_seed(8)
    for parameter in second.model.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    return first, second


@pytest.mark.parametrize("draft_dtype", ["full", "fp8"])
@pytest.mark.parametrize(("kind", "tied"), [("llama", True), ("qwen3", False), ("qwen3_moe", False)])
@pytest.mark.sampled
def test_an_updated_target_answers_as_a_new_engine(kind: str, tied: bool, draft_dtype: str) -> None:
    old, new = two_targets(kind, tied)
    drafter, prompts = make_drafter(old), prompts_of(9, 17)
    engine = make_engine(old, drafter, draft_dtype=draft_dtype)
    fresh = make_engine(new, drafter, draft_dtype=draft_dtype)
    before = engine.generate(prompts, PARAMS)
    assert engine.generate(prompts, PARAMS)[0].tokens == before[0].tokens and engine.stats.cached_prompt_tokens > 0
    engine.update_target(dict(new.model.state_dict()))
    cached = engine.stats.cached_prompt_tokens
    after = engine.generate(prompts, PARAMS)
    assert engine.stats.cached_prompt_tokens == cached, "the prefix cache held keys of the old target"
    assert all(map(same, after, fresh.generate(prompts, PARAMS)))
    assert [a.tokens for a in after] != [b.tokens for b in before]
    assert (engine.target_version, engine.drafter_version) == (1, 0)


def test_a_part_of_a_target_can_be_updated() -> None:
    old, new = two_targets()
    engine, prompts = make_engine(old, None), prompts_of(9)
    mixed = copy.deepcopy(old.model)
    names = ["model.layers.2.self_attn.k_proj.weight", "model.layers.4.mlp.up_proj.weight"]
    tensors = {name: new.model.state_dict()[name] for name in names}
    mixed.load_state_dict(tensors, strict=False)
    engine.update_target(tensors)
    expected = make_engine(Target(mixed, old.tokenizer, "mixed"), None).generate(prompts, PARAMS)
    assert engine.generate(prompts, PARAMS)[0].tokens == expected[0].tokens


def test_a_target_is_not_updated_under_unfinished_requests() -> None:
    old, new = two_targets()
    engine = make_engine(old, None)
    request = engine.submit(prompts_of(9)[0], PARAMS)
    engine.step()
    with pytest.raises(UserError, match="requests are unfinished, and their answers would mix two versions"):
        engine.update_target(dict(new.model.state_dict()))
    while engine.step():
        pass
    assert request.tokens == alone(old, None, request.prompt_ids, PARAMS).tokens and engine.target_version == 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model.norm.weight": torch.zeros(3)}, r"'model\.norm\.weight' has shape \(3,\), not \(32,\)"),
        ({"model.layers.9.mlp.up_proj.weight": torch.zeros(1)}, r"unknown tensor 'model\.layers\.9"),
        ({"lm_head.weight": torch.zeros(256, 32)}, "must equal 'model.embed_tokens.weight'"),
    ],
)
def test_a_target_that_does_not_fit_changes_nothing(change: dict[str, Tensor], words: str) -> None:
    old, new = two_targets()
    engine, prompts = make_engine(old, None), prompts_of(9)
    with pytest.raises(UserError, match=words):
        engine.update_target(dict(new.model.state_dict()) | change)
    assert engine.generate(prompts, PARAMS)[0].tokens == alone(old, None, prompts[0], PARAMS).tokens


@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_next", "Gemma 2", "Qwen2-MoE"])
def test_updated_targets_of_other_forms_answer_as_new_engines(kind: str) -> None:
    """Kept states are forgotten, norms stored minus one and rows sorted by head are converted, in whole or in part."""
    old, new = two_targets(kind, tied=False)
    drafter, prompts = make_drafter(old), prompts_of(33, 40)
    engine = make_engine(old, drafter, max_num_seqs=2)
    before = engine.generate(prompts, PARAMS)
    state = new.model.state_dict()
    for part in ([name for name in state if "layers.1." not in name], list(state)):
        engine.update_target({name: state[name] for name in part})
        mixed = copy.deepcopy(old.model)
        mixed.load_state_dict({name: state[name] for name in part}, strict=False)
        fresh = make_engine(Target(mixed, old.tokenizer, "mixed"), drafter, max_num_seqs=2)
        cached = engine.stats.cached_prompt_tokens
        after = engine.generate(prompts, PARAMS)
        assert all(map(same, after, fresh.generate(prompts, PARAMS))) and engine.stats.cached_prompt_tokens == cached
    assert [a.tokens for a in after] != [b.tokens for b in before]


def test_a_cleared_pool_finds_no_prefix_and_loses_no_page() -> None:
    pool = PagePool(9, 2)
    held, cached = pool.allocate(3), pool.allocate(2)
    assert held is not None and cached is not None
    pool.publish([1, 2, 3, 4, 5, 6], held)
    pool.publish([7, 8, 9, 10], cached)
    pool.release(cached)
    pool.clear()
    pool.check()
    assert pool.match([1, 2, 3, 4], 4) == pool.match([7, 8, 9, 10], 4) == [] and pool.available == 5
    pool.release(held)
    pool.check()
    assert pool.available == 8


def test_weights_update_without_an_engine() -> None:
    target, _ = pair()
    old, new = drafters(2, target)
    mine, theirs = DrafterWeights.of_module(old), DrafterWeights.of_module(new)
    update_drafter(mine, new.state_dict())
    assert torch.equal(mine.context_kv, theirs.context_kv) and torch.equal(mine.k_norms, theirs.k_norms)


def test_a_swap_forgets_the_acceptance_of_the_old_drafter() -> None:
    target, _ = pair()
    old, new = drafters(2, target)
    engine = make_engine(target, old, draft_tree=12, num_speculative_tokens=None)
    engine.generate(prompts_of(9, 17), PARAMS)
    trees, choose = engine.runner.trees, engine.scheduler.choose_shape
    assert trees is not None and engine._expected.known
    fitted = replace(trees.calibration, slope=2.0)
    trees.calibrate(fitted)
    engine.load_drafter(new)
    assert not engine._expected.known and trees.calibration != fitted and engine.scheduler.choose_shape is not choose
    steps = engine.stats.by_version[0][0]
    engine.generate(prompts_of(9), PARAMS)
    assert engine.stats.by_version[0][0] == steps and engine.stats.by_version[1][0] > 0


def test_steps_are_counted_for_the_first_and_the_newest_versions() -> None:
    stats = EngineStats()
    for version in range(20):
        stats.add_step(Step(3, 1, (1, 2)), version)
    assert list(stats.by_version) == [0, *range(13, 20)] and stats.by_version[19] == (1, 2)


# ---- without drafts --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "qwen3_5"])
def test_an_engine_decodes_plainly_until_its_drafter_is_updated(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that run or are half prefilled then have the context that they would always have had."""
    target, _ = pair(kind)
    old, new = drafters(2, target)
    options = {"keep_taps": True, "max_num_batched_tokens": 16, "page_size": 4, "num_speculative_tokens": 3}
    engine, expected = make_engine(target, old, **options), make_engine(target, new, **options)
    engine.stop_drafting()
    assert engine.runner.proposer is not None and expected.runner.proposer is not None
    with monkeypatch.context() as patched:
        patched.setattr(engine.runner.proposer, "_forward", None)
        patched.setattr(engine.runner.proposer, "_write", None)
        prompts = prompts_of(5, 18, 33)
        short, long = ([e.submit(p, PARAMS) for e in (engine, expected)] for p in prompts[::2])
        while not long[0].prefilled:
            engine.step()
    assert set(engine.stats.draft_lengths) <= {0} and not long[0].tokens
    engine.load_drafter(new)
    for each, request in ((engine, long[0]), (expected, long[1])):
        while len(request.tokens) < 4:
            each.step()
    for got, wanted in (short, long):
        count = min(got.length, wanted.length)
        torch.testing.assert_close(context_of(engine, got, count), context_of(expected, wanted, count))
    for each in (engine, expected):
        while each.step():
            pass
    assert engine.stats.drafted > 0 and engine.drafter_version == 1
    engine.pool.check()
    for got, wanted in (short, long):
        assert got.tokens == wanted.tokens == alone(target, None, got.prompt_ids, PARAMS).tokens


def context_of(engine: Engine, request: Request, count: int) -> Tensor:
    """Returns the drafter's keys and values of the first `count` tokens of a request."""
    assert engine.runner.proposer is not None
    (cached,) = engine.runner.proposer.stack.cached
    return cached.unflatten(2, (-1, 4))[:, :, request.pages].flatten(2, 3)[:, :, :count]
