"""Chains of each request's own length, for targets with recurrent layers."""

import random
from dataclasses import replace

import pytest
from engines import knowing, make_engine, prompts_of, same
from planted_trees import plain, planting, watch
from recurrent_engines import any_shapes, pair

from dflash_toolkit import SamplingParams, generate
from dflash_toolkit.kernels import reference
from dflash_toolkit.kernels.ops import Reference
from dflash_toolkit.runtime.request import StepShape

GREEDY = SamplingParams(max_tokens=18, ignore_eos=True)
HOT = SamplingParams(max_tokens=18, temperature=0.9, seed=5, ignore_eos=True)


@pytest.mark.parametrize(("kind", "nodes"), [("qwen3_next", 40), ("qwen3_5", 3)])
def test_ragged_batches_take_the_steps_of_generate(kind: str, nodes: int) -> None:
    target, drafter = pair(kind)
    engine, prompts = make_engine(target, drafter, draft_tree=nodes, draft_tree_width=1), prompts_of(1, 5, 17, 33)
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (16, 12, 1, 10)]
    with planting(engine, plain(target, prompts, params)):
        answers = engine.generate(prompts, params)
        for prompt, each, got in zip(prompts, params, answers, strict=True):
            assert same(got, generate(target, drafter, prompt, each, draft_tree=nodes, draft_tree_width=1))
    steps = [step for got in answers for step in got.steps]
    assert max(step.drafted for step in steps) == min(nodes, 7) and max(step.accepted for step in steps) >= 2
    engine.pool.check()
    assert engine.pool.available == engine.pool.capacity


@pytest.mark.parametrize("params", [GREEDY, HOT], ids=["greedy", "sampled"])
def test_chain_length_does_not_change_answers(params: SamplingParams) -> None:
    """Rows go to the likeliest tokens. Blocks and plain steps run between chains and use the states they leave."""
    target, drafter = pair()
    engine, prompts = make_engine(target, drafter, draft_tree=7, draft_tree_width=1), prompts_of(4, 19, 7)
    each = [replace(one, max_tokens=48) for one in (params, GREEDY, replace(params, seed=9))]
    texts, starts, cut = plain(target, prompts, each), list[list[int]](), reference.cut_trees
    knowing(engine, texts, lambda position: position % 5 == 0)
    shapes = list[StepShape]()
    any_shapes(engine, random.Random(2))
    watch(engine, engine.scheduler.choose_shape, shapes)

    def cutting(*args: object) -> object:
        found = cut(*args)
        starts.append(found.starts.diff().tolist())
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Reference, "cut_trees", staticmethod(cutting))
        answers = engine.generate(prompts, each)
    assert [got.tokens for got in answers] == list(texts.values())
    assert {1, 8} <= {shape.block for shape in shapes if not shape.rows} and len(starts) > 5
    assert any(len(set(counts)) == 3 for counts in starts), "of as many lengths as requests"
    assert sum(len(got.steps) for got in answers) < 3 * 48 / 2


def test_recurrent_targets_draft_chains_of_a_block_or_trees() -> None:
    target, drafter = pair()
    engine = make_engine(target, drafter, draft_tree=63, draft_tree_width=1)
    assert (engine.options.draft_tree, engine.options.draft_tree_width) == (7, 1), "no chain is longer than a block"
    assert engine.runner.max_places == 8
    assert make_engine(target, drafter, draft_tree=8).options.draft_tree == 8
    assert make_engine(target, drafter, draft_tree_width=8).runner.trees is None, "without trees it means nothing"
