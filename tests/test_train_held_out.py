"""Held-out prompts on the engine, in the trainer: the reference's numbers, the target's own memory, new weights."""

import itertools
from pathlib import Path

import pytest
import torch
from conftest import make_drafter, make_target
from test_train_loop import argv, lines_without_speed

from dflash_toolkit import Drafter, SamplingParams, Target, UserError, generate, load_drafter
from dflash_toolkit.runtime import Engine
from dflash_toolkit.runtime.model import ModelSpec, TargetWeights
from train.cli import main
from train.config import RunKnobs
from train.held_out import HeldOut

PROMPTS = [list(b"Why is the sky blue?"), list(b"Count"), list(b"What is two and two?" * 2)]


def knobs(runtime: str, tokens: int = 8) -> RunKnobs:
    return RunKnobs(evaluate_runtime=runtime, evaluate_tokens=tokens)


def random_drafter(target: Target, seed: int) -> Drafter:
    drafter = make_drafter(target, block_size=4)
    drafter.init_weights(torch.Generator().manual_seed(seed), std=0.3)
    return drafter


def test_a_run_measures_the_same_on_either_runtime(target_dir: Path, data: Path, tmp_path: Path) -> None:
    often = ("run.evaluate_every=8", "optim.learning_rate=3e-2", "run.evaluate_tokens=16")
    for name in ("engine", "reference"):
        assert main(argv(target_dir, data, tmp_path / name, *often, f"run.evaluate_runtime={name}")) == 0
    ours, definition = (lines_without_speed(tmp_path / name / "work/metrics.jsonl") for name in ("engine", "reference"))
    measured = [line["acceptance_length"] for line in ours if "acceptance_length" in line]
    assert len(measured) == 3 and max(measured) > min(measured), "there is something to measure"
    assert measured == [line["acceptance_length"] for line in definition if "acceptance_length" in line]
    a, b = (load_drafter(str(tmp_path / name)).parameters() for name in ("engine", "reference"))
    assert all(torch.allclose(x, y, atol=1e-3) for x, y in zip(a, b, strict=True)), "trained on the same features"


def test_more_prompts_than_go_together_and_answers_cut_by_the_context() -> None:
    target = make_target("qwen3", tied=False, limit=60)
    prompts = [list(range(20 + i, 24 + 4 * i)) for i in range(11)]
    drafter = random_drafter(target, 1)
    a, b = (HeldOut(target, drafter.config, prompts, knobs(name, 8))(drafter) for name in ("engine", "reference"))
    assert (a.answers, a.tokens, a.steps, a.tau_pooled) == (11, b.tokens, b.steps, b.tau_pooled)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_the_engine_and_the_target_read_the_same_memory(kind: str) -> None:
    target, other = make_target(kind), make_target(kind)
    weights = TargetWeights.shared_with(target.model, ModelSpec.of_target(target.config))
    held = {view.untyped_storage().data_ptr() for view in weights.places().values()}
    for name, parameter in target.model.named_parameters():
        assert parameter.untyped_storage().data_ptr() in held, name
    for a, b in zip(target.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(a, b)
    ids = torch.tensor(PROMPTS[:1])
    outs = [t.forward(ids, taps=(1, 3), logits="all") for t in (target, other)]
    assert torch.allclose(outs[0].features, outs[1].features, rtol=1e-5, atol=1e-5)
    short = SamplingParams(max_new_tokens=8)
    assert generate(target, None, PROMPTS[0], short).tokens == generate(other, None, PROMPTS[0], short).tokens


def test_new_weights_are_taken_in_place() -> None:
    target = make_target()
    first, second = random_drafter(target, 1), random_drafter(target, 2)
    held = HeldOut(target, first.config, PROMPTS, knobs("engine"))
    assert held._engine is not None and held._engine.runner.drafter is not None
    weights = held._engine.runner.drafter
    before = [t.data_ptr() for t in (*weights.places().values(), weights.context_kv, weights.k_norms)]
    held(first), held(second)
    after = [t.data_ptr() for t in (*weights.places().values(), weights.context_kv, weights.k_norms)]
    assert before == after, "a captured step reads these addresses"
    fresh = Engine.of_modules(make_target(), second).runner.drafter
    assert fresh is not None
    rounded = [view.bfloat16().float() for view in (*fresh.places().values(), fresh.context_kv, fresh.k_norms)]
    now = (*weights.places().values(), weights.context_kv, weights.k_norms)
    assert all(itertools.starmap(torch.equal, zip(rounded, now, strict=True)))
    with pytest.raises(ValueError, match="no prefix cache"):
        Engine.of_modules(make_target(), first).load_drafter(second)


def test_what_the_engine_does_not_compute_is_said_when_it_is_asked_for() -> None:
    target = make_target(mlp_bias=True)
    drafter = random_drafter(target, 1)
    with pytest.raises(UserError, match="mlp_bias is not supported by the runtime"):
        HeldOut(target, drafter.config, PROMPTS, knobs("engine"))
    assert HeldOut(target, drafter.config, PROMPTS, knobs("auto"))(drafter).answers == 3, "on a CPU, the reference"
