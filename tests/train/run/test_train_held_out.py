"""Held-out prompts on the engine, in the trainer: the reference's numbers, the target's own memory, new weights."""

import math
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import answers_of, make_dflash2, make_drafter, make_target
from programs import Program, altered, says, write
from response_files import eight_responses as answers
from training_runs import lines_without_speed

from dflash_toolkit import Drafter, SamplingParams, Target, UserError, decode, generate, load_drafter
from dflash_toolkit.calibration import Calibration
from dflash_toolkit.confidence import LIKELY, JudgedNode, calibrate, judged_nodes
from dflash_toolkit.fingerprint import template_digest
from dflash_toolkit.models.spec import ModelSpec
from dflash_toolkit.models.target_files import load_tokenizer
from dflash_toolkit.runtime import Engine, EngineOptions, load_engine
from dflash_toolkit.runtime.load import Parts
from dflash_toolkit.runtime.weights import TargetWeights
from dflash_toolkit.train.config import TrainConfig
from dflash_toolkit.train.features.gpu_memory import MemoryUse
from dflash_toolkit.train.run import held_out
from dflash_toolkit.train.run.held_out import Evaluation, HeldOut, HeldOutPrompt, draw, split
from dflash_toolkit.train.training_options import RunOptions

PROMPTS = [HeldOutPrompt(list(s), "file") for s in (b"Why is the sky blue?", b"Count", b"What is two and two?" * 2)]


def options(runtime: str, tokens: int = 8) -> RunOptions:
    return RunOptions(evaluate_runtime=runtime, evaluate_tokens=tokens)


def random_drafter(target: Target, seed: int) -> Drafter:
    drafter = make_drafter(target, block_size=4)
    drafter.init_weights(torch.Generator().manual_seed(seed), std=0.3)
    return drafter


def test_a_run_measures_the_same_on_either_runtime(dflash_train: Program, tmp_path: Path) -> None:
    often = ("optim.steps=24", "run.evaluate_every=8", "optim.learning_rate=3e-2", "run.evaluate_tokens=16")
    for name in ("engine", "reference"):
        dflash_train(*often, f"run.evaluate_runtime={name}", output=name)
    ours, definition = (lines_without_speed(tmp_path / name / "work/metrics.jsonl") for name in ("engine", "reference"))
    measured, defined = (
        [line["acceptance_length"] for line in run if "acceptance_length" in line] for run in (ours, definition)
    )
    assert len(measured) == 3 and max(measured) > min(measured), "there is something to measure"
    assert measured == defined
    calibrations = [load_drafter(str(tmp_path / name)).config.calibration for name in ("engine", "reference")]
    assert calibrations[0] != Calibration.cold(len(calibrations[0].bias)), "measured, and exported"
    assert calibrations[0].bias == pytest.approx(calibrations[1].bias, abs=0.05)
    a, b = (load_drafter(str(tmp_path / name)).parameters() for name in ("engine", "reference"))
    assert all(torch.allclose(x, y, atol=1e-3) for x, y in zip(a, b, strict=True)), "trained on the same features"


def test_held_out_batches_and_context_limits_keep_results() -> None:
    target = make_target("qwen3", tied=False, limit=60)
    prompts = [HeldOutPrompt(list(range(20 + i, 24 + 4 * i)), "ab"[i % 2]) for i in range(11)]
    drafter = random_drafter(target, 1)
    few = replace(options("engine", 8), evaluate_prompts=1, final_tokens=16)
    a, b = (
        HeldOut(target, drafter.config, prompts, replace(few, evaluate_runtime=name)).final(drafter, 7)
        for name in ("engine", "reference")
    )
    assert a == b and a.prompts == 10 and sum(a.steps) > 0 and (a.step, a.max_tokens) == (7, 16)
    some = HeldOut(target, drafter.config, prompts, replace(few, evaluate_prompts=4))
    curve, end = some(drafter, step=7), some.final(drafter, 7)
    assert curve.sources == ("a", "b", "a", "b") and curve.max_tokens == 8 and max(curve.tokens) <= 8
    assert end.prompts == 7 and set(zip(end.tokens, end.steps, strict=True)) <= set(zip(a.tokens, a.steps, strict=True))
    assert max(end.tokens) > 8, "at full length"


def test_prompts_of_a_run_and_of_its_end_are_disjoint() -> None:
    prompts = [HeldOutPrompt([i], name) for name, count in (("a", 30), ("b", 2), ("c", 30)) for i in range(count)]
    for count, followed in ((16, 16), (40, 31)):
        during, unseen = split(prompts, count)
        assert len(during) == followed and draw([*during, *unseen], 99) == draw(prompts, 99)
    assert {p.source for p in split(prompts, 3)[0]} == {"a", "b", "c"} == {p.source for p in split(prompts, 3)[1]}
    assert split(prompts[:1], 16) == (prompts[:1], prompts[:1]), "a single prompt is all there is"


def simulated(rng: np.random.Generator, runs: int, evaluations: int, prompts: int, better: float = 0.0) -> float:
    """Returns how often an earlier checkpoint is exported.

    Every prompt has its own difficulty, and every checkpoint's steps for it have independent noise of 12 %.

    Args:
        evaluations: before the end.
        better: by what share of the acceptance length the first checkpoint is better than all others.
    """
    followed = len(split([HeldOutPrompt([i], "a") for i in range(prompts)], RunOptions().evaluate_prompts)[0])
    tau = rng.uniform(2, 6, (runs, 1, prompts)) * (1 + 0.12 * rng.standard_normal((runs, evaluations + 1, prompts)))
    tau[:, 0] *= 1 + better
    lengths = rng.integers(200, 2000, (runs, 1, prompts))
    steps = np.ceil(lengths / tau.clip(1))
    curve = np.broadcast_to(lengths, steps.shape)[..., :followed].sum(-1) / steps[..., :followed].sum(-1)
    exported = 0
    for run, best in enumerate(curve.argmax(1)):
        if curve[run, best] > curve[run, -1]:
            counts = lengths[run, 0, followed:].tolist()
            earlier, last = (evaluation(*zip(counts, steps[run, at, followed:].astype(int).tolist(), strict=True))
                             for at in (best, -1))  # fmt: skip
            exported += earlier.clearly_better_than(last)
    return exported / runs


@pytest.mark.parametrize("prompts", [4, 16, 64])
@pytest.mark.parametrize("evaluations", [1, 5, 30, 100])
def test_equal_checkpoints_are_seldom_called_better(evaluations: int, prompts: int) -> None:
    rng = np.random.default_rng(evaluations * 100 + prompts)
    assert simulated(rng, 600, evaluations, prompts) <= 0.05


def test_a_better_checkpoint_is_found() -> None:
    assert simulated(np.random.default_rng(0), 200, 30, 64, better=0.15) > 0.9


@pytest.mark.parametrize("kind", ["dflash", "dflash2"])
def test_a_calibration_is_fitted_to_the_nodes_that_decoding_judges(
    target: Target, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = make_dflash2(target, block_size=4) if kind == "dflash2" else random_drafter(target, 1)
    trees, proposed = list[tuple[int, Any]](), decode.propose_tree

    def propose(*given: Any, **named: Any) -> Any:
        given = (*given[:5], 40)  # nodes enough for all that are likely
        trees.append((given[4], proposed(*given)))
        return trees[-1][1]

    monkeypatch.setattr(decode, "propose_tree", propose)
    prompts = [prompt.tokens for prompt in PROMPTS]
    answers = [(p, generate(target, drafter, p, SamplingParams(max_tokens=12), draft_tree=40)) for p in prompts]
    expected, seen = list[tuple[float, int, bool]](), iter(trees)
    for prompt, answer in answers:
        tokens, at = prompt + answer.tokens, len(prompt)
        for step in answer.steps:
            if step.drafted:
                position, tree = next(seen)
                assert position == at
                row, depth = 0, 0
                while row is not None and at + depth + 1 < len(tokens):
                    above = float(tree.log_probs[row - 1]) if row else 0.0
                    taken = tree.child(row, tokens[at + depth + 1])
                    for node in (tree.parents == row).nonzero().flatten().tolist():
                        log_prob = float(tree.log_probs[node]) - above
                        if log_prob > math.log(LIKELY):
                            expected.append((log_prob, depth + 1, node + 1 == taken))
                    row, depth = taken, depth + 1
            at += len(step.tokens)
    with torch.inference_mode():
        found = [pair for each in answers for pair in judged_nodes(target, drafter, *each, every=1)]
    near = {(round(p, 3), slot, hit) for p, slot, hit, _ in found}
    assert len(expected) > 20 and {(round(p, 3), slot, hit) for p, slot, hit in expected} <= near
    fitted = calibrate(target, drafter, answers)
    assert fitted and fitted != Calibration.cold(3)
    assert calibrate(target, drafter, [(p, replace(a, steps=[])) for p, a in answers]) is None
    wrong = [JudgedNode(math.log(share), 1, share < 0.5, share > 0.5) for share in (0.9, 0.1)] * 50
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dflash_toolkit.confidence.judged_nodes", lambda *_: iter(wrong))
        assert calibrate(target, drafter, answers) is None, "no configuration may hold it"


def test_without_selector_measures_each_slots_best_token(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter, drafted = make_dflash2(target, block_size=4), list[list[int]]()
    propose = decode.propose
    monkeypatch.setattr(decode, "propose", lambda *given: (drafted.append(propose(*given)), drafted[-1])[1])

    def drafts(of: Drafter, selector: bool) -> list[list[int]]:
        drafted.clear()
        decoded = HeldOut(target, of.config, PROMPTS, options("reference"))
        assert (decoded.final(of, 3) if selector else decoded.without_selector(of, 3)).step == 3
        return list(drafted)

    alone = drafts(drafter, selector=False)
    assert alone == drafts(drafter.without_selector(), selector=True)
    assert alone != drafts(drafter, selector=True), "a selector that changes nothing shows nothing"


def test_every_file_has_its_turn_among_the_prompts_that_are_measured() -> None:
    prompts = [HeldOutPrompt([i], name) for name, count in (("a", 30), ("b", 2), ("c", 30)) for i in range(count)]
    drawn = draw(prompts, 9)
    assert [(p.source, p.tokens[0]) for p in drawn] == [
        ("a", 0), ("b", 0), ("c", 0), ("a", 1), ("b", 1), ("c", 1), ("a", 2), ("c", 2), ("a", 3)
    ]  # fmt: skip
    assert draw(prompts, 1000) == sorted(draw(prompts, 1000), key=lambda p: p.tokens) and draw([], 3) == []


def evaluation(*counts: tuple[int, int], sources: str = "") -> Evaluation:
    tokens, steps = zip(*counts, strict=True)
    return Evaluation(0, tuple(sources or "a" * len(counts)), tokens, steps)


def test_the_standard_error_of_tau_is_that_of_a_ratio() -> None:
    tokens = [30, 42, 25, 37, 51]
    even = evaluation(*((n, 10) for n in tokens))  # as many steps each: the error of a mean
    assert even.tau == 3.7 and even.standard_error == pytest.approx(statistics.stdev(tokens) / 10 / 5**0.5)
    odd = evaluation((30, 10), (80, 20), (7, 7), (44, 11), (90, 40), (5, 2))
    counts = list(zip(odd.tokens, odd.steps, strict=True))
    taus = [evaluation(*counts[:i], *counts[i + 1 :]).tau for i in range(6)]
    jackknife = (5 / 6 * sum((tau - sum(taus) / 6) ** 2 for tau in taus)) ** 0.5
    assert odd.standard_error == pytest.approx(jackknife, rel=0.4), "another estimate of the same"
    assert evaluation((30, 10), (5, 10), (9, 3), sources="aba").by_source() == {"a": 3.0, "b": 0.5}
    assert Evaluation.of_state(odd.to_state()) == odd


def test_clearly_better_uses_the_paired_error() -> None:
    hard = [(2000, 1000), (6000, 1000), (3500, 1000), (9000, 1000)]
    base = evaluation(*hard)
    a_little = evaluation(*((n + more, s) for (n, s), more in zip(hard, (500, 600, 500, 600), strict=True)))
    assert a_little.tau - base.tau < a_little.standard_error, "far within the errors of both"
    assert a_little.clearly_better_than(base) and not base.clearly_better_than(a_little), "on every prompt alike"
    lucky = evaluation(*((n + more, s) for (n, s), more in zip(hard, (6000, -900, -900, -900), strict=True)))
    assert lucky.tau > a_little.tau and not lucky.clearly_better_than(base)
    for spread, clear in (
        (0.52, True),
        (0.56, False),
    ):  # four differences of 1 +- spread, whose error is spread / 3**0.5
        apart = evaluation(*((50_000 + int(10_000 * (1 + spread * side)), 10_000) for side in (1, -1, 1, -1)))
        assert apart.clearly_better_than(evaluation(*[(50_000, 10_000)] * 4)) == clear, "3.18 errors"
    assert not base.clearly_better_than(base)
    one = evaluation((99, 10))
    assert math.isnan(one.standard_error) and not one.clearly_better_than(evaluation((10, 10))), "it has no error"
    nothing = evaluation((0, 0), (0, 0))
    assert math.isnan(nothing.values()["acceptance_length"]) and not nothing.clearly_better_than(nothing)
    assert str(nothing) == "nan" and str(evaluation((30, 10), (40, 10), sources="ab")).endswith(" (a 3.00, b 4.00)")


def test_prompts_that_agree_have_no_error_of_zero() -> None:
    none, few = evaluation(*[(60, 60)] * 4), evaluation(*[(63, 60)] * 4)
    assert none.standard_error == pytest.approx(2 / 240) and few.standard_error == pytest.approx(4 / 240)
    assert not few.clearly_better_than(none), "12 of 240 drafts against none of 240, with 4 prompts"
    assert evaluation(*[(6600, 6000)] * 4).clearly_better_than(evaluation(*[(6000, 6000)] * 4))


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "qwen3_moe"])
def test_the_engine_and_the_target_read_the_same_memory(kind: str) -> None:
    target, other = make_target(kind), make_target(kind)
    weights = TargetWeights.shared_with(target.model, ModelSpec.of_target(target.config))
    held = {view.untyped_storage().data_ptr() for view in weights.parameter_views().values()}
    for name, parameter in target.model.named_parameters():
        assert parameter.untyped_storage().data_ptr() in held, name
    for a, b in zip(target.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(a, b)
    ids = torch.tensor([PROMPTS[0].tokens])
    outs = [t.forward(ids, taps=(1, 3), logits="all") for t in (target, other)]
    assert torch.allclose(outs[0].features, outs[1].features, rtol=1e-5, atol=1e-5)
    answers = [generate(t, None, PROMPTS[0].tokens, SamplingParams(max_tokens=8)).tokens for t in (target, other)]
    assert answers[0] == answers[1]


def test_new_weights_are_taken_in_place() -> None:
    target = make_target()
    first, second = random_drafter(target, 1), random_drafter(target, 2)
    held = HeldOut(target, first.config, PROMPTS, options("engine"))
    assert held._engine is not None and held._engine.runner.drafter is not None

    def tensors(weights: Any) -> list[torch.Tensor]:
        return [*weights.parameter_views().values(), weights.context_kv, weights.k_norms]

    weights = held._engine.runner.drafter
    before = [t.data_ptr() for t in tensors(weights)]
    held(first), held(second)
    assert before == [t.data_ptr() for t in tensors(weights)], "a captured step reads these addresses"
    fresh = load_engine(make_target(), second)[0].runner.drafter
    assert all(torch.equal(a.bfloat16().float(), b) for a, b in zip(tensors(fresh), tensors(weights), strict=True))


def test_the_engine_gives_way_to_a_step_that_needs_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    target = make_target()
    drafters = [random_drafter(target, seed) for seed in (1, 2)]
    resident = HeldOut(target, drafters[0].config, PROMPTS, options("engine"))
    found = [resident(drafter) for drafter in drafters]
    free = iter((1000, 900))
    monkeypatch.setattr(held_out, "memory_use", lambda device: MemoryUse(2000, next(free), 0, 0))
    between = HeldOut(make_target(), drafters[0].config, PROMPTS, options("engine"), reserve=901)
    assert between._engine is None and between.engine_bytes == 100
    assert [between(drafter) for drafter in drafters] == found and between._engine is None
    free = iter((1000, 900))
    assert HeldOut(make_target(), drafters[0].config, PROMPTS, options("engine"), reserve=900)._engine


def test_fewer_prompts_are_decoded_together_if_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    target, tried, real = make_target(), list[int](), Parts.engine

    def engine(self: Parts, options: EngineOptions) -> Engine:
        tried.append(options.max_num_seqs)
        if options.max_num_seqs > 2:
            raise UserError("GPU memory is 1 GiB short")
        return real(self, options)

    drafter = random_drafter(target, 1)
    usual = HeldOut(make_target(), drafter.config, PROMPTS * 2, options("engine"))(drafter)
    monkeypatch.setattr(Parts, "engine", engine)
    few = HeldOut(target, drafter.config, PROMPTS * 2, options("engine"))
    assert tried == [6, 4, 2] and few(drafter) == usual


def test_evaluate_runtime_engine_refuses_unsupported_targets() -> None:
    target = make_target(mlp_bias=True)
    drafter = random_drafter(target, 1)
    with pytest.raises(UserError, match="mlp_bias True is not served by this engine"):
        HeldOut(target, drafter.config, PROMPTS, options("engine"))
    assert HeldOut(target, drafter.config, PROMPTS, options("auto"))(drafter).prompts == 1, "on a CPU, the reference"


@pytest.mark.parametrize(("option", "ending"), [(None, "off"), (True, "on")])
def test_held_out_prompts_use_the_recorded_thinking_mode(
    option: bool | None, ending: str, target_dir: Path, tmp_path: Path
) -> None:
    tokenizer = load_tokenizer(str(target_dir))
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content }}{% endfor %}"
        "{% if enable_thinking is not defined %}unset{% elif enable_thinking %}on{% else %}off{% endif %}"
    )
    mine = str(altered(target_dir, tmp_path / "mine", tokenizer))
    sampler, template = {"temperature": 0.0, "thinking": False}, template_digest(load_tokenizer(mine))
    path = answers(tmp_path / "a.jsonl", target=mine, sampler=sampler, template_hash=template)
    prompts = write(tmp_path / "h.jsonl", says("ask"))
    config = TrainConfig(target=mine, response_files=(str(path),), held_out=(str(prompts),))
    if option is not None:
        object.__setattr__(config.responses, "thinking", option)
    _, held = answers_of(config, tokenizer, tmp_path / "w")
    assert [tokenizer.decode(ids) for ids in held] == [f"ask{ending}"]
