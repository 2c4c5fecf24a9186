"""The drafter's context, written step by step, equals that of a prefill of the same tokens."""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from conftest import LONG_RUN
from engines import context_of, make_engine, pair, prompts_of
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_toolkit import SamplingParams
from dflash_toolkit.runtime import Engine
from dflash_toolkit.runtime.prefill_job import PrefillJob
from dflash_toolkit.runtime.proposer import Draft
from dflash_toolkit.runtime.request import StepShape

PAGE = 4


def written_at_once(ids: Sequence[int]) -> torch.Tensor:
    engine = make_engine(*pair(), page_size=PAGE)
    pages = range(1, 2 + len(ids) // PAGE)
    engine.runner.start_prefill([PrefillJob(ids, 0, pages)]).run()
    return context_of(engine.runner, pages, len(ids))


def watched(engine: Engine, shapes: Sequence[StepShape]) -> list[int]:
    """Steps of these shapes, again and again; how many tokens were compared, of each row at every draft and of
    all pages that others may find."""
    compared: list[int] = []
    runner, publish = engine.runner, engine.pool.publish
    propose, children = runner.proposer.propose, runner.proposer.children
    turns = itertools.cycle(shapes)

    def compare(ids: Sequence[int], pages: Sequence[int]) -> None:
        torch.testing.assert_close(context_of(runner, pages, len(ids)), written_at_once(ids), rtol=1e-3, atol=1e-4)
        compared.append(len(ids))

    def proposing(last: torch.Tensor, rows: Any, block: int) -> Draft:
        for request in engine.scheduler.running:
            compare(request.known_ids, request.pages)
        return propose(last, rows, block)

    def growing(*args: Any) -> Any:
        for request in engine.scheduler.running:
            compare(request.known_ids, request.pages)
        return children(*args)

    def publishing(ids: Sequence[int], pages: Sequence[int], salt: str) -> None:
        compare(ids, pages)
        publish(ids, pages, salt)

    runner.proposer.propose = proposing  # type: ignore[method-assign]
    runner.proposer.children = growing  # type: ignore[method-assign]
    engine.pool.publish = publishing  # type: ignore[method-assign]
    engine.scheduler.choose_shape = lambda requests: next(turns)
    return compared


@settings(max_examples=20 if LONG_RUN else 4, deadline=None)
@given(
    shapes=st.lists(
        st.sampled_from([*map(StepShape, (1, 1, 1, 2, 8)), StepShape(8, 36), StepShape(3, 9)]), min_size=1, max_size=30
    ),
    prompts=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 30)), min_size=1, max_size=4),
    cancelled=st.sets(st.integers(0, 3)),
    pages=st.sampled_from([30, 300]),
)
@pytest.mark.slow
def test_draft_context_is_written_before_it_is_read(
    shapes: list[StepShape], prompts: list[tuple[int, int]], cancelled: set[int], pages: int
) -> None:
    """Blocks and trees in any order, rows that are added, moved and removed, cancelled and preempted requests."""
    engine = make_engine(*pair(), page_size=PAGE, kv_cache_tokens=PAGE * pages, max_model_len=80, draft_tree=11)
    compared = watched(engine, shapes)
    params = [SamplingParams(max_tokens=count, ignore_eos=True) for _, count in prompts]
    requests = [*map(engine.submit, prompts_of(*(length for length, _ in prompts)), params)]
    for turn in range(1000):
        if not engine.step():
            break
        if turn % 7 == 6 and cancelled:
            engine.cancel(requests[cancelled.pop() % len(requests)])
    assert engine.scheduler.idle and compared
    engine.pool.check()


def test_an_engine_without_drafts_keeps_no_features() -> None:
    target, drafter = pair()
    engine, plain = make_engine(target, drafter, num_speculative_tokens=0), make_engine(target, None)
    assert engine.runner.verifier.forward(torch.tensor([1]), engine.runner.state.rows(1))[1] is None, "no features"
    params = SamplingParams(max_tokens=20)
    answers = [[g.tokens for g in each.generate(prompts_of(4, 19), params)] for each in (engine, plain)]
    assert answers[0] == answers[1]


def test_acceptance_is_reset_only_between_requests() -> None:
    engine = make_engine(*pair(), num_speculative_tokens=None)
    engine.generate(prompts_of(5), SamplingParams(max_tokens=60, ignore_eos=True))
    learnt = engine.request([1]).acceptance.rate
    engine.reset_acceptance()
    assert learnt < engine.request([1]).acceptance.rate == pytest.approx(0.7)
    engine.submit([1, 2])
    with pytest.raises(ValueError, match="idle"):
        engine.reset_acceptance()


@pytest.mark.gpu
def test_captured_steps_write_the_same_cache_as_a_prefill() -> None:
    """Compares every answer's pages with a prefill of the same tokens, by the distance of vectors, as they are bf16."""
    import gpu_engines as gpu

    target, drafter = gpu.pair()
    engine = gpu.make_engine(target, drafter, prefix_cache=True, max_num_seqs=8)
    shapes = itertools.cycle(map(StepShape, [*[1] * 20, 4, *[1] * 5, 16, 16]))
    engine.scheduler.choose_shape = lambda requests: next(shapes)
    found: list[tuple[list[int], torch.Tensor]] = []
    publish = engine.pool.publish

    def publishing(ids: Sequence[int], pages: Sequence[int], salt: str) -> None:
        found.append((list(ids), context_of(engine.runner, pages, len(ids)).clone()))
        publish(ids, pages, salt)

    engine.pool.publish = publishing  # type: ignore[method-assign]
    params = [SamplingParams(max_tokens=11 + 9 * i, ignore_eos=True) for i in range(20)]
    engine.generate(gpu.prompts_of(20), params)
    assert len(found) == 40, "every prompt and every answer"
    fresh = gpu.make_engine(target, drafter)
    for ids, context in found:
        pages = range(1, 2 + len(ids) // fresh.runner.page_size)
        fresh.runner.prefills.unpadded(PrefillJob(ids, 0, pages)).run()
        expected = context_of(fresh.runner, pages, len(ids)).float()
        distance = (context.float() - expected).norm(dim=-1) / expected.norm(dim=-1)
        assert distance.max() < 0.1, f"{len(ids)} tokens: {distance.max():.3f}"
