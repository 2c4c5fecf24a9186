"""Draft trees in the engine: answers equal those of the target, and steps equal those of `decode.py`."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import make_dflash2, make_drafter
from engines import SAMPLINGS, check, context_of, knowing, make_engine, pair, prompts_of, same
from grammars import CASES
from planted_trees import plain, planting, watch
from torch import Tensor

from dflash_toolkit import SamplingParams, decode, generate
from dflash_toolkit.draft_tree import DraftTree
from dflash_toolkit.generation import Step
from dflash_toolkit.kernels import reference
from dflash_toolkit.kernels.ops import Reference
from dflash_toolkit.kernels.reference import slots_of
from dflash_toolkit.kernels.tree import MOST_NODES
from dflash_toolkit.options import MOST_TREE_NODES
from dflash_toolkit.runtime import engine as engine_module
from dflash_toolkit.runtime.prefill_job import PrefillJob
from dflash_toolkit.runtime.request import StepShape
from dflash_toolkit.runtime.step_times import full_batch, launcher
from dflash_toolkit.runtime.trees import chooser
from dflash_toolkit.runtime.trees.budget import BudgetChooser, row_buckets, tree_shapes
from dflash_toolkit.runtime.trees.feedback import CalibrationFeed
from dflash_toolkit.runtime.trees.result import TreeStepResult

GREEDY = SamplingParams(max_tokens=18, ignore_eos=True)


def walked(steps: Sequence[Any]) -> bool:
    """Returns whether nodes of every depth were accepted."""
    accepted = [step.accepted for step in steps]
    return 0 in accepted and max(accepted) >= 3


def check_offered(steps: Sequence[Step], expected: Sequence[Step]) -> None:
    """Both report the same trees; every accepted token was offered."""
    for step, alone in zip(steps, expected, strict=True):
        assert [[token for token, _ in place] for place in step.offered] == [
            [token for token, _ in place] for place in alone.offered
        ]
        for place, other in zip(step.offered, alone.offered, strict=True):
            shares = [p for _, p in place]
            assert shares == pytest.approx([p for _, p in other], abs=2e-4)
            assert shares == sorted(shares, reverse=True) and sum(shares) < 1.001
        found = [token in dict(place) for token, place in zip(step.tokens, step.offered, strict=False)]
        assert found == [True] * step.accepted + [False] * (len(found) - step.accepted)


@pytest.mark.parametrize(
    ("kind", "nodes"), [("llama", 1), ("llama", 40), ("qwen2", 6), ("qwen3", 6), ("qwen3_moe", 40)]
)
def test_ragged_batches_take_the_steps_of_generate(kind: str, nodes: int) -> None:
    target, drafter = pair(kind)
    engine, prompts = make_engine(target, drafter, draft_tree=nodes, report_offered=True), prompts_of(1, 5, 17, 33)
    params = [SamplingParams(max_tokens=n) for n in (24, 16, 9, 20)]
    with planting(engine, plain(target, prompts, params)):
        answers = engine.generate(prompts, params)
        for prompt, each, got in zip(prompts, params, answers, strict=True):
            expected = generate(target, drafter, prompt, each, draft_tree=nodes)
            assert same(got, expected)
            check_offered(got.steps, expected.steps)
    assert nodes < 40 or walked([step for got in answers for step in got.steps])
    engine.pool.check()
    assert engine.pool.available == engine.pool.capacity


@pytest.mark.parametrize(
    ("make", "changes"),
    [(make_drafter, {}), (make_drafter, {"num_speculative_tokens": 3}), (make_dflash2, {}),
     (make_dflash2, {"draft_tree_width": 1})],
)  # fmt: skip
def test_the_drafters_own_trees_are_those_of_generate(
    make: Any, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CalibrationFeed, "FIRST", 10**9)  # generate fits none
    target, _ = pair()
    drafter = make(target)
    engine = make_engine(target, drafter, draft_tree=20, **changes)
    slots = engine.runner.max_block - 1
    drafter.config = drafter.config.with_block_size(slots + 1)
    expected, alone, grow = dict[Any, Any](), decode.propose_tree, reference.grow_trees
    found, prompts, prompt = dict[Any, Any](), prompts_of(3, 20, 9), list[int]()

    def by_generate(*args: Any, **more: Any) -> DraftTree:
        tree = alone(*args, **more)
        expected[tuple(prompt), args[4]] = tree.tokens.tolist(), tree.parents.tolist(), tree.depths.tolist()
        return tree

    def by_engine(*args: Any) -> Any:
        trees = grow(*args)
        for row, request in enumerate(engine.scheduler.running):
            nodes = int((trees.depths[row] > 0).sum())
            each = (trees.tokens, trees.parents, trees.depths)
            place = tuple(request.prompt_ids), int(engine.runner.state.lengths[row])
            found[place] = tuple(part[row, :nodes].tolist() for part in each)
        return trees

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode, "propose_tree", by_generate)
        patch.setattr(Reference, "grow_trees", staticmethod(by_engine))
        params = SamplingParams(max_tokens=14)
        answers = engine.generate(prompts, params)
        for each, got in zip(prompts, answers, strict=True):
            prompt[:] = each
            assert same(got, generate(target, drafter, each, params, "greedy", 20, engine.options.draft_tree_width))
    assert len(expected) > 10 and {place: found[place] for place in expected} == expected


@pytest.mark.parametrize(
    ("params", "width"),
    [*((params, 8) for params in SAMPLINGS), (SAMPLINGS[2], 1)],
    ids=["filters", "hot", "penalties", "bias", "logprobs", "least", "penalties in chains"],
)
@pytest.mark.sampled
def test_sampled_answers_are_those_without_a_drafter(params: SamplingParams, width: int) -> None:
    """Penalties count the nodes on the path, and log-probabilities are those of its rows."""
    target, drafter = pair()
    engine, prompts = make_engine(target, drafter, draft_tree=24, draft_tree_width=width), prompts_of(4, 19, 7)
    each = [SamplingParams(max_tokens=30), params, replace(SAMPLINGS[1], seed=9)]
    shapes = list[StepShape]()
    watch(engine, engine.scheduler.choose_shape, shapes)
    expected = [generate(target, None, prompt, one) for prompt, one in zip(prompts, each, strict=True)]
    with planting(engine, {tuple(p): got.tokens for p, got in zip(prompts, expected, strict=True)}):
        answers = engine.generate(prompts, each)
    assert all(shape.rows for shape in shapes)
    assert width == 1 or walked([step for got in answers for step in got.steps])
    for got, alone in zip(answers, expected, strict=True):
        assert got.tokens == alone.tokens and len(got.logprobs) == len(alone.logprobs)
        assert [t.chosen for t in got.logprobs] == pytest.approx([t.chosen for t in alone.logprobs], abs=1e-4)
        assert [[i for i, _ in t.best] for t in got.logprobs] == [[i for i, _ in t.best] for t in alone.logprobs]


def test_few_rows_verify_the_likeliest_nodes() -> None:
    target, drafter = pair()
    prompts, params = prompts_of(4, 19, 7), [GREEDY] * 3
    texts, taken = plain(target, prompts, params), []
    for rows in (4, 9, 40, 200):
        engine, results = make_engine(target, drafter, draft_tree=30), list[TreeStepResult]()
        engine.scheduler.choose_shape = lambda requests, rows=rows: StepShape(8, rows)
        engine.runner.observe = lambda requests, each, results=results: results.append(each)
        with planting(engine, texts):
            answers = engine.generate(prompts, params)
        assert [got.tokens for got in answers] == list(texts.values())
        steps = [step for got in answers for step in got.steps]
        assert all(step.accepted <= step.drafted <= 7 for step in steps)
        assert sum(int(each.outcomes.accepted.sum()) for each in results) >= sum(step.accepted for step in steps)
        for each in results:
            assert len(each.outcomes.slots) <= rows - each.promise.requests
            ((chain, *trees),) = each.promise.accepted
            assert len(trees) == len(row_buckets(each.promise.batch)) and sorted(trees) == trees and chain <= trees[-1]
        taken.append(len(steps))
    assert sorted(taken, reverse=True) == taken and taken[-1] < taken[0] / 1.5


def test_reported_nodes_are_those_that_were_accepted() -> None:
    """For one request: nodes of the path are accepted, siblings are not, and children of siblings do not count."""
    target, drafter = pair()
    (prompt,) = prompts_of(9)
    engine, results = make_engine(target, drafter, draft_tree=30, max_num_seqs=1), list[TreeStepResult]()
    engine.runner.observe = lambda requests, each: results.append(each)
    with planting(engine, plain(target, [prompt], [GREEDY])):
        (got,) = engine.generate([prompt], GREEDY)
    assert len(results) >= len(got.steps) and walked(got.steps)
    for each, step in zip(results, got.steps, strict=False):
        judged = each.outcomes
        if step is not got.steps[-1]:
            assert sorted(judged.slots[judged.accepted].tolist()) == list(range(1, step.accepted + 1))
            assert judged.accepted_nodes.tolist() == [step.accepted]
        assert judged.slots.max(initial=0) <= step.accepted + 1 and np.isfinite(judged.odds).all()


def test_pages_after_trees_equal_those_of_a_prefill() -> None:
    """The target's keys and values of accepted nodes are at their positions, and no others are."""
    target, drafter = pair()
    prompts = prompts_of(4, 19)
    engine = make_engine(target, drafter, draft_tree=30, prefix_cache=True)
    kept: list[tuple[list[int], Tensor, Tensor]] = []
    publish, stack = engine.pool.publish, engine.runner.verifier.stack

    def held(runner: Any, pages: Sequence[int], tokens: int) -> Tensor:
        table = torch.tensor([*pages])[None]
        return runner.verifier.stack.cache[:, :, slots_of(torch.arange(tokens)[None], table, runner.page_size)[0]]

    def publishing(ids: Sequence[int], pages: Sequence[int], salt: str) -> None:
        context = context_of(engine.runner, pages, len(ids))
        kept.append((list(ids), held(engine.runner, pages, len(ids)).clone(), context.clone()))
        publish(ids, pages, salt)

    engine.pool.publish = publishing  # type: ignore[method-assign]
    with planting(engine, plain(target, prompts, [GREEDY] * 2)):
        engine.generate(prompts, GREEDY)
    assert len(kept) == 4 and stack.cache.isfinite().all()
    for ids, found, context in kept:
        fresh = make_engine(target, drafter)
        fresh.runner.start_prefill([PrefillJob(ids, 0, pages := range(1, 2 + len(ids) // 4))]).run()
        torch.testing.assert_close(found, held(fresh.runner, pages, len(ids)), rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(context, context_of(fresh.runner, pages, len(ids)), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("room", [1, 2, 8, 9])
def test_an_answer_ends_exactly_at_the_context_limit(room: int) -> None:
    models, params, prompts = pair(limit=64), SamplingParams(ignore_eos=True), prompts_of(64 - room)
    engine = make_engine(*models, max_num_seqs=2, draft_tree=63)
    with planting(engine, plain(models[0], prompts, [params])):
        (got,) = engine.generate(prompts, params)
        assert same(got, generate(*models, prompts[0], params, draft_tree=63)) and len(got.tokens) == room


def test_a_request_without_drafts_has_one_row_next_to_trees() -> None:
    target, drafter = pair()
    engine, prompts = make_engine(target, drafter, draft_tree=24), prompts_of(4, 19, 7)
    each = [GREEDY, replace(GREEDY, drafting=False), replace(GREEDY, temperature=0.9, seed=3)]
    texts = plain(target, prompts, each)
    with planting(engine, texts):
        answers = engine.generate(prompts, each)
    assert [got.tokens for got in answers] == list(texts.values())
    assert all(step.drafted == 0 for step in answers[1].steps) and len(answers[1].steps) == 17
    assert all(max(step.accepted for step in got.steps) >= 3 for got in answers[::2])


def test_batches_with_a_grammar_use_blocks() -> None:
    engine, shapes = make_engine(*pair(), draft_tree=20), list[StepShape]()
    watch(engine, engine.scheduler.choose_shape, shapes)
    for params, over_trees in ((SamplingParams(grammar=CASES["regex"][0]), False), (GREEDY, True)):
        shapes.clear()
        check_params = [replace(params, max_tokens=6), SamplingParams(max_tokens=6, ignore_eos=True)]
        prompts = prompts_of(4, 9)
        texts = plain(pair()[0], prompts, check_params)
        assert [got.tokens for got in engine.generate(prompts, check_params)] == list(texts.values())
        assert all((shape.rows > 0) == over_trees for shape in shapes)


def test_the_budget_follows_the_drafts_and_the_answers_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Good drafts get rows; if all fail, the batch is decoded plainly except for retries."""
    target, drafter = pair()
    prompts, params = prompts_of(4, 19), SamplingParams(max_tokens=90, ignore_eos=True)
    texts = plain(target, prompts, [params] * 2)
    times = {(b, s): 1.0 + 0.01 * s for b in (1, 2, 3) for s in (1, 2, 4, 8)}
    trees = {key: 1.0 + key[1] / 60 for key in tree_shapes((1, 2, 3), (1, 2, 4, 8))}
    monkeypatch.setattr(engine_module, "cached_times", lambda *args: times | trees)
    for right in (True, False):
        engine, shapes = make_engine(target, drafter, draft_tree=12, num_speculative_tokens=None), list[StepShape]()
        watch(engine, engine.scheduler.choose_shape, shapes)
        with planting(engine, texts if right else {prompt: [0] * 400 for prompt in texts}):
            answers = engine.generate(prompts, params)
        assert [got.tokens for got in answers] == list(texts.values())
        over_trees = [shape.rows > 0 for shape in shapes]
        assert over_trees[0], "what is not known is tried"
        if right:
            assert engine.runner.trees.calibration.bias[0] != 0.0, "it was fitted to what was accepted"
            assert sum(over_trees) > 0.8 * len(shapes) and max(shape.rows for shape in shapes) >= 32
        else:
            assert sum(over_trees[20:]) < 0.3 * len(shapes[20:])


def test_blocks_between_trees_follow_the_acceptance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if the drafter gives its accepted drafts low probabilities and trees are slow."""
    target, drafter = pair()
    prompts, params = prompts_of(4, 19), SamplingParams(max_tokens=90, ignore_eos=True)
    texts = plain(target, prompts, [params] * 2)
    times = {(b, s): 1.0 + 0.1 * s for b in (1, 2, 3) for s in (1, 2, 4, 8)}
    trees = dict.fromkeys(tree_shapes((1, 2, 3), (1, 2, 4, 8)), 9.0)
    monkeypatch.setattr(engine_module, "cached_times", lambda *args: times | trees)
    engine, shapes = make_engine(target, drafter, draft_tree=12, num_speculative_tokens=None), list[StepShape]()
    watch(engine, engine.scheduler.choose_shape, shapes)
    knowing(engine, {prompt: list(text) for prompt, text in texts.items()}, lambda position: False)
    monkeypatch.setattr(CalibrationFeed, "observe", lambda self, step: None)
    assert [got.tokens for got in engine.generate(prompts, params)] == list(texts.values())
    blocks = [shape.block for shape in shapes[3:] if not shape.rows]
    assert len(blocks) > 5 and set(blocks) == {8}, shapes


def test_a_request_with_failing_drafts_gets_few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if the drafter gives them high probabilities; other requests keep their trees."""
    target, drafter = pair()
    prompts, params = prompts_of(4, 19, 7, 12), SamplingParams(max_tokens=90, ignore_eos=True)
    texts = plain(target, prompts, [params] * 4)
    times: dict[tuple[int, ...], float] = {(b, s): 1.0 + 0.01 * b * s for b in (1, 2, 4) for s in (1, 2, 4, 8)}
    trees = {key: 1.0 + key[1] / 100 for key in tree_shapes((1, 2, 4), (1, 2, 4, 8))}
    monkeypatch.setattr(engine_module, "cached_times", lambda *args: times | trees)
    engine = make_engine(target, drafter, draft_tree=12, num_speculative_tokens=None, max_num_seqs=4)
    wrong = tuple(prompts[0])
    with planting(engine, {prompt: [0] * 400 if prompt == wrong else text for prompt, text in texts.items()}):
        answers = engine.generate(prompts, params)
    assert [got.tokens for got in answers] == list(texts.values())
    failing, *others = ([step.drafted for step in got.steps[4:]] for got in answers)
    assert sum(failing[:20]) < 30 and all(sum(each) > 2 * len(each) for each in others)


def test_a_request_without_drafts_starts_no_probe(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[int, int, bool]] = []

    class Noting(BudgetChooser):
        def __call__(
            self, requests: int, untried: int = 0, awaited: bool = False, chains: bool = True, tokens: int = 0
        ) -> StepShape:
            asked.append((requests, untried, chains))
            return super().__call__(requests, untried, awaited, chains, tokens)

    times: dict[tuple[int, ...], float] = {(b, s): 1.0 for b in (1, 2, 3) for s in (1, 2, 4, 8)}
    monkeypatch.setattr(engine_module, "cached_times", lambda *args: times | dict.fromkeys(
        tree_shapes((1, 2, 3), (1, 2, 4, 8)), 1.1))  # fmt: skip
    monkeypatch.setattr(chooser, "BudgetChooser", Noting)
    engine = make_engine(*pair(), draft_tree=12, num_speculative_tokens=None)
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    cold = engine.runner.trees.calibration
    engine.generate(prompts_of(4, 19), [params, replace(params, drafting=False)])
    both = [(untried, chains) for requests, untried, chains in asked if requests == 2]
    assert len(both) > 20 and not any(chains for _, chains in both)
    assert asked[0][1] == 1 and not any(untried for untried, _ in both[8:]), "one was tried, the other is not to be"
    engine.generate(prompts_of(4), params)
    assert asked[-1][2] and engine.runner.trees.calibration != cold
    engine.reset_acceptance()
    assert engine.runner.trees.calibration == cold, "the drafter's own"


def test_timed_steps_verify_whole_trees_and_leave_no_trace() -> None:
    engine = make_engine(*pair(), draft_tree=6)
    runner, shape = engine.runner, StepShape(8, 21)
    before = [field.clone() for field in (*runner.advanced(), runner.state.active, runner.state.sampler.ends_at)]
    with torch.inference_mode(), full_batch(runner):
        results = launcher(runner, 3, shape)()
    found = TreeStepResult.parse(results, 3, 3, shape, runner.trees.calibration, [0.0] * 3)
    assert all(depth > 0 for _, depth, *_ in found.answers) and (found.outcomes.promised > 0).all()
    after = [*runner.advanced(), runner.state.active, runner.state.sampler.ends_at]
    assert all(map(torch.equal, before, after))
    assert not runner.state.active.any() and not runner.state.lengths.any()


def test_options_that_exclude_trees_are_refused() -> None:
    target, drafter = pair()
    assert MOST_TREE_NODES + 1 == MOST_NODES
    with pytest.raises(ValueError, match=r"draft_tree is 64; .*63"):
        make_engine(target, drafter, draft_tree=64)
    engine = make_engine(target, None, draft_tree=8)
    check(engine, (target, None), prompts_of(4), SamplingParams(max_tokens=4))
