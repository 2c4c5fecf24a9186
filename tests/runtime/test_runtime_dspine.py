"""DSpine in the engine: pairs of tokens in parts, trees, the bits of a block in any batch, fp8."""

import pytest
import torch
from conftest import make_dspine
from engines import check_drafts, make_engine, pair, prompts_of, same
from torch import Tensor

from dflash_toolkit import SamplingParams, generate
from dflash_toolkit.models.dspine import proposer
from dflash_toolkit.runtime import weights
from dflash_toolkit.runtime.stack import Rows

PARAMS = [SamplingParams(max_tokens=n) for n in (14, 1, 9, 20)]


def test_pairs_of_many_requests_are_scored_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proposer, "PAIR_ROWS", 2 * 7 * 16)
    target, _ = pair()
    drafter = make_dspine(target)
    check_drafts(make_engine(target, drafter), (target, drafter), prompts_of(1, 5, 17, 33), *PARAMS)


def test_trees_and_sampled_drafts_are_those_of_decoding() -> None:
    target, _ = pair()
    drafter, prompts, params = make_dspine(target), prompts_of(4, 19), SamplingParams(max_tokens=12)
    engine = make_engine(target, drafter, draft_tree=20)
    for prompt, got in zip(prompts, engine.generate(prompts, [params] * 2), strict=True):
        assert same(got, generate(target, drafter, prompt, params, draft_tree=20))
    params = SamplingParams(max_tokens=12, temperature=1.2, seed=3)
    sampled = make_engine(target, drafter, draft_sample_method="probabilistic")
    for prompt, got in zip(prompts, sampled.generate(prompts, [params] * 2), strict=True):
        assert same(got, generate(target, drafter, prompt, params, "probabilistic"))


def test_other_requests_of_a_batch_change_no_bit_of_a_block() -> None:
    target, _ = pair()
    runner = make_engine(target, make_dspine(target)).runner
    stack, block = runner.proposer.stack, 8
    stack.cache.normal_()
    pages = torch.arange(1, 9, dtype=torch.int32).view(2, 4)
    x = torch.randn(2 * block, 32)
    other = torch.cat([torch.randn(block, 32), x[block:]])

    def second(x: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
        rows = Rows(torch.tensor([3, 5], dtype=torch.int32), pages, runner.page_size, last=last)
        hidden = stack.forward(x, rows)
        return hidden[block:], runner.proposer._head.draft(hidden, last, block).tokens[1]

    with torch.inference_mode():
        found = zip(second(x, torch.tensor([7, 9])), second(other, torch.tensor([8, 9])), strict=True)
        assert all(torch.equal(one, two) for one, two in found)


def test_fp8_drafts_are_close_and_change_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "WIDE_IN_FP8", 0)
    target, _ = pair()
    drafter = make_dspine(target)
    full, narrow = (make_engine(target, drafter, draft_dtype=kind) for kind in ("full", "fp8"))
    pages = torch.arange(1, 5, dtype=torch.int32)[None]
    rows = Rows(torch.tensor([0], dtype=torch.int32), pages, 4, last=torch.tensor([5]))
    x = torch.randn(8, 32)
    with torch.inference_mode():
        exact, found = (engine.runner.proposer.stack.forward(x, rows) for engine in (full, narrow))
    assert 0.001 < float((found - exact).norm() / exact.norm()) < 0.2
    prompts, params = prompts_of(5, 18), SamplingParams(max_tokens=20)
    expected = make_engine(target, None).generate(prompts, params)
    assert [got.tokens for got in narrow.generate(prompts, params)] == [got.tokens for got in expected]
