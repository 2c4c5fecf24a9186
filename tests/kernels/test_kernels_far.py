"""Splits of many requests with long contexts: in Triton (fp32) and on Hopper (bf16), on a GPU or interpreted."""

from dataclasses import replace

import pytest
import torch
from gluon_mistakes import interpret_attention
from kernel_forests import plant
from kernel_inputs import DEVICE, assert_as_exact_as_torch, integers, randn
from kernel_pages import _interpretable as _interpretable
from kernel_pages import attend, check_attention, make_pages

from dflash_toolkit.kernels import launch

CONTEXTS = (0, 5, 130, 200, 700, 383, 384, 385, 127, 128)  # those from 129 on have two splits of 256 keys, or more


@pytest.fixture(params=["triton", "hopper"])
def dtype(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, _interpretable: None) -> torch.dtype:
    monkeypatch.setattr(launch, "FAR", 256)
    if request.param == "hopper" and DEVICE == "cpu":
        interpret_attention(monkeypatch)
    return torch.bfloat16 if request.param == "hopper" else torch.float32


@pytest.mark.parametrize("fp8", [False, True], ids=["16 bits", "fp8"])
@pytest.mark.parametrize(("causal", "window"), [(True, 0), (False, 50)])
def test_far_splits_are_as_exact_as_torch_and_batch_invariant(
    causal: bool, window: int, fp8: bool, dtype: torch.dtype
) -> None:
    pages = make_pages(CONTEXTS, 3, 64, 2, 64, dtype)
    pages = pages.in_fp8() if fp8 else pages.scored("sinks" if window else "", 4)
    q = randn(3 * len(CONTEXTS), 4, 64, dtype=dtype)
    found = attend(q, pages, causal=causal, window=window, far=256)
    check_attention(q, pages, found, causal=causal, window=window)
    for request in range(len(CONTEXTS)):
        own = slice(3 * request, 3 * request + 3)
        assert torch.equal(attend(q[own], pages.one(request), causal=causal, window=window, far=256), found[own])


def test_far_splits_do_not_reach_padding(dtype: torch.dtype) -> None:
    counts = [1 + b % 3 for b in range(len(CONTEXTS))]
    pages, q = make_pages(CONTEXTS, 3, 64, 2, 64, dtype), randn(3 * len(CONTEXTS), 4, 64, dtype=dtype)
    whole = attend(q, pages, causal=True, far=256).unflatten(0, (-1, 3))
    found = attend(q, pages, causal=True, far=256, counts=integers(counts)).unflatten(0, (-1, 3))
    assert all(torch.equal(found[b, :count], whole[b, :count]) for b, count in enumerate(counts))


@pytest.mark.parametrize("fp8", [False, True], ids=["16 bits", "fp8"])
@pytest.mark.parametrize("children", [3, 1])
def test_trees_and_chains_of_many_requests_have_far_splits(children: int, fp8: bool, dtype: torch.dtype) -> None:
    forest = plant((*CONTEXTS, 250, 509), 5, 8, 90, 64, 1, 2, 64, dtype, children)
    pages, window = (forest.pages.in_fp8(), 0) if fp8 else (forest.pages.scored("sinks", 2), 100)
    forest = replace(forest, pages=pages)
    found = forest.attend(window)
    assert_as_exact_as_torch(found, forest.defined(dtype, window), forest.defined(torch.float64, window))
    assert not found[int(forest.rows.starts[-1]) :].any()
    assert children > 1 or torch.equal(forest.attend_chains(window), found)


def test_splits_follow_the_page_table_and_the_number_of_requests() -> None:
    assert [launch.far_keys(9, reach, 128) for reach in (2048, 4096, 2048 * launch.MOST_FAR)] == [0, 2048, 2048]
    assert launch.far_keys(9, 2048 * launch.MOST_FAR + 64, 64) == 4096
    requests = (launch.MOST_SPLIT, launch.MOST_SPLIT + 1, launch.FAR_REQUESTS, launch.FAR_REQUESTS + 1)
    assert [launch.far_keys(each, 8192, 128) for each in requests] == [0, 2048, 2048, 0]
    assert launch.far_keys(9, 8192, 256) == 0
