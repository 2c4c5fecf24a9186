"""A request that makes steps fail, or computes NaN, ends alone; the answers of the others do not change."""

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import make_drafter, make_target
from engines import alone, around_prefills, make_engine, prompts_of
from torch import Tensor

from dflash_toolkit import Drafter, SamplingParams, Target
from dflash_toolkit.runtime import Engine, Request
from dflash_toolkit.runtime.prefill_job import PrefillJob
from dflash_toolkit.runtime.proposer import Draft
from dflash_toolkit.runtime.request import Committed, NotFiniteError

BAD = 298  # a token that no sound prompt holds, nor the drafter as its mask
LONG = SamplingParams(max_tokens=12, ignore_eos=True)
WAYS = [
    LONG,
    SamplingParams(max_tokens=10, temperature=0.9, seed=3, ignore_eos=True),
    SamplingParams(max_tokens=10, repetition_penalty=1.3, logprobs=2, ignore_eos=True),
]


@pytest.fixture(scope="module")
def models() -> tuple[Target, Drafter]:
    """Returns a target with an untied head, so that a NaN embedding does not affect every logit."""
    target = make_target("qwen2", tied=False, limit=512)
    return target, make_drafter(target)


def run(engine: Engine, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> list[Request]:
    requests = [engine.submit(prompt, each) for prompt, each in zip(prompts, params, strict=True)]
    while engine.step():
        pass
    engine.pool.check()
    assert engine.pool.available == engine.pool.capacity and not engine.runner.state.active.any()
    return requests


def mixed() -> tuple[list[list[int]], list[SamplingParams], list[int]]:
    """Prompts with a prefix in common, two of which hold the bad token, and the numbers of those two."""
    prefix, *tails = prompts_of(24, 5, 9, 1, 14, 3)
    prompts = [prefix + tail for tail in tails]
    for bad in (1, 3):
        prompts[bad].insert(20 + bad, BAD)
    return prompts, [WAYS[i % 3] for i in range(5)], [1, 3]


def check(models: tuple[Target, Drafter], requests: Sequence[Request], bad: Sequence[int]) -> None:
    for i, request in enumerate(requests):
        if i not in bad:
            assert request.error is None
            assert request.tokens == alone(*models, request.prompt_ids, request.params).tokens


@pytest.mark.parametrize("place", ["prefill", "add", "decode"])
def test_a_request_that_makes_the_device_raise_ends_alone(
    models: tuple[Target, Drafter], place: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine(*models, max_num_seqs=4)
    runner = engine.runner
    real = getattr(runner, place, None)

    def raising(first: Any, *rest: Any) -> Any:
        found = real(first, *rest)  # side effects before the exception must not matter
        asked = first if place == "decode" else rest
        if any(BAD in request.prompt_ids for request in asked if isinstance(request, Request)):
            raise RuntimeError("a kernel's own")
        return found

    @contextlib.contextmanager
    def raises(jobs: Sequence[PrefillJob]) -> Iterator[None]:
        yield
        if broken and any(BAD in job.ids for job in jobs):
            raise RuntimeError("a kernel's own")

    broken = True
    if place == "prefill":
        around_prefills(runner, raises)
    else:
        setattr(runner, place, raising)
    prompts, params, bad = mixed()
    requests = run(engine, prompts, params)
    check(models, requests, bad)
    assert [str(requests[i].error) for i in bad] == ["a kernel's own"] * 2
    assert "a kernel's own" in caplog.text and "Traceback" in caplog.text
    setattr(runner, place, real)
    broken = False
    (again,) = run(engine, [prompts[1]], [LONG])
    check(models, [again], [])
    assert again.cached_tokens <= 20, "what it had written is not for others"
    with pytest.raises(RuntimeError, match="its own"):
        runner.check = lambda: (_ for _ in ()).throw(RuntimeError("its own"))
        setattr(runner, place, raising)
        broken = True
        run(engine, [[BAD, *prompts[1]]], [LONG])


@pytest.mark.parametrize("place", ["prefill", "add", "decode", "read", "set_pages", "move", "remove"])
def test_a_transient_fault_ends_no_request(models: tuple[Target, Drafter], place: str) -> None:
    engine = make_engine(*models, max_num_seqs=4)
    calls = 0

    def count() -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise RuntimeError("once")

    @contextlib.contextmanager
    def raises(jobs: Sequence[PrefillJob]) -> Iterator[None]:
        count()
        yield

    if place == "prefill":
        around_prefills(engine.runner, raises)
    else:
        real = getattr(engine.runner, place)
        setattr(engine.runner, place, lambda *args: (count(), real(*args))[1])
    requests = run(engine, prompts_of(30, 12, 9, 20, 5), [WAYS[i % 3] for i in range(5)])
    check(models, requests, [])
    assert calls >= 3


def test_requests_continue_alone_after_a_fault_of_the_batch(models: tuple[Target, Drafter]) -> None:
    engine = make_engine(*models)
    real = engine.runner.decode

    def raising(requests: Sequence[Request], block: int) -> Any:
        if len(requests) > 1:
            raise RuntimeError("too many")
        return real(requests, block)

    engine.runner.decode = raising  # type: ignore[method-assign]
    check(models, run(engine, prompts_of(9, 12, 5), [LONG] * 3), [])


def test_a_request_with_nan_ends_alone_and_leaves_no_nan(
    models: tuple[Target, Drafter], caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine(*models, max_num_seqs=4)
    prompts, params, bad = mixed()
    engine.runner.target.embedding[BAD] = math.nan
    requests = run(engine, prompts * 2, params * 2)
    check(models, requests, [*bad, *(5 + i for i in bad)])
    for i in (*bad, *(5 + i for i in bad)):
        assert isinstance(requests[i].error, NotFiniteError) and not requests[i].tokens
    assert "NaN or infinity" in caplog.text
    for stack in (engine.runner.verifier.stack, engine.runner.proposer.stack):
        assert stack.cache[:, :, engine.runner.page_size :].isfinite().all(), "pages are clean for the next request"
    check(models, run(engine, prompts[::2], params[::2]), [])
    engine.runner.target.embedding[BAD] = 0.0


def test_transient_nan_ends_no_request(models: tuple[Target, Drafter]) -> None:
    """The NaN is in the keys and values of one row, some of which other requests share."""
    engine = make_engine(*models)
    prefix, *tails = prompts_of(12, 5, 9, 4)
    requests = [engine.submit(prefix + tail, each) for tail, each in zip(tails, WAYS, strict=True)]
    for _ in range(9):
        engine.step()
    engine.runner.verifier.stack.cache[0, 1, engine.runner.page_size * requests[0].pages[1]] = math.inf
    while engine.step():
        pass
    check(models, requests, [])
    assert engine.stats.preemptions and engine.pool.available == engine.pool.capacity
    assert engine.runner.verifier.stack.cache.isfinite().all()


@pytest.mark.parametrize("nodes", [0, 6])
def test_a_draft_that_is_nan_changes_no_answer(models: tuple[Target, Drafter], nodes: int) -> None:
    """It makes its whole block NaN, so nothing is accepted, and a step without drafts follows. Other nodes of a tree
    may stay finite, but the pages do not."""
    engine = make_engine(*models, draft_tree=nodes)
    engine.runner.target.embedding[BAD] = math.nan
    drafts = 0

    def propose(last: Tensor, rows: Any, block: int) -> Draft:
        nonlocal drafts
        drafts += 1
        return Draft(last.new_full((len(last), block - 1), BAD))

    real = engine.runner.proposer.children

    def children(*args: Any) -> Any:
        nonlocal drafts
        drafts += 1
        values, ranks, candidates = real(*args)
        return values, ranks, torch.where(ranks[:, :, 0, :1] == torch.arange(candidates.shape[2]), BAD, candidates)

    engine.runner.proposer.propose = propose  # type: ignore[method-assign]
    engine.runner.proposer.children = children  # type: ignore[method-assign]
    check(models, run(engine, prompts_of(9, 15), [replace(LONG, max_tokens=5)] * 2), [])
    for stack in (engine.runner.verifier.stack, engine.runner.proposer.stack):
        assert stack.cache[:, :, engine.runner.page_size :].isfinite().all()
    engine.runner.target.embedding[BAD] = 0.0
    assert drafts > 1


def test_nan_in_a_rejected_draft_is_cleaned_away(models: tuple[Target, Drafter]) -> None:
    """The NaN is after the answer, where a kernel may multiply it by zero."""
    engine = make_engine(*models)
    real, cache, poisoned = engine.runner.read, engine.runner.verifier.stack.cache, []

    def read(pending: Any) -> list[Committed]:
        found = real(pending)
        for row, request in enumerate(engine.scheduler.running):
            if len(request.tokens) == 7 and request.pages[-1] not in poisoned:
                poisoned.append(request.pages[-1])
                cache[:, :, engine.runner.page_size * request.pages[-1] + 3] = math.nan
                found[row] = replace(found[row], poisons=True)
        return found

    engine.runner.read = read  # type: ignore[method-assign]
    check(models, run(engine, prompts_of(9, 15), [LONG] * 2), [])
    assert poisoned and cache.isfinite().all() and not engine.stats.preemptions
