"""The Hopper attention kernels on a GPU: against float64, and batch-invariant, bit for bit.

Interpreted they run in test_kernels_gluon_*.py; test_kernels_compile.py compiles them. In every cache, values that
no request can reach are NaN.
"""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from kernel_inputs import integers, randn
from kernel_pages import Pages, attend, check_attention, check_invariant, check_padding, check_slots, make_pages
from torch import Tensor

from dflash_toolkit.kernels import flash, gpu
from dflash_toolkit.kernels.features import features_of
from dflash_toolkit.kernels.hopper import attention as attention_hopper
from dflash_toolkit.kernels.hopper import prefill
from dflash_toolkit.kernels.paged import PagedKV

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
CONTEXTS = (700, 0, 5, 5200, 63, 64, 128, 1)
HEADS = [(8, 4, 128, 64), (2, 7, 64, 64), (2, 7, 128, 128), (1, 1, 64, 256)]  # KV heads, group, width, page


def ragged(batch: int) -> tuple[int, ...]:
    return tuple(CONTEXTS[i % len(CONTEXTS)] + i // len(CONTEXTS) for i in range(batch))


def asked(pages: Pages, rows: int, group: int) -> Tensor:
    """Queries, of a kind that the kernel takes."""
    q = randn(rows, pages.cache.shape[2] * group, pages.cache.shape[3], dtype=BF16)
    assert attention_hopper.fits(q, pages.kv()) == features_of(q.device).hopper
    return q


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "free"])
@pytest.mark.parametrize("window", [0, 100, -96])
@pytest.mark.parametrize("block", [1, 2, 4, 8, 16, 40])
@pytest.mark.parametrize(("groups", "group", "width", "size"), HEADS)
def test_paged_attention_is_as_exact_as_torch(
    groups: int, group: int, width: int, size: int, block: int, window: int, causal: bool
) -> None:
    how: dict[str, Any] = {"causal": causal, "window": window}
    for batch in (1, 3, 9, 16):
        pages = make_pages(ragged(batch), block, size, groups, width, BF16)
        pages = pages.scored("sinks" if window else "", groups * group)
        q = asked(pages, batch * block, group)
        split, whole = (attend(q, pages, whole=whole, **how) for whole in (False, True))
        check_attention(q, pages, split, **how)
        check_attention(q, pages, whole, **how)
        assert torch.equal(attend(q, pages, pairs=True, **how), split)


@pytest.mark.parametrize("context", [0, 60, 64, 120, 186, 700, 2040])  # the last: before the first long split
@pytest.mark.parametrize(("window", "whole"), [(0, False), (0, True), (50, False), (50, True), (-64, False)])
@pytest.mark.parametrize(("groups", "group", "width", "size"), HEADS)
def test_causal_slots_have_the_bits_of_plain_steps(
    groups: int, group: int, width: int, size: int, window: int, whole: bool, context: int
) -> None:
    pages = make_pages((context,), 16, size, groups, width, BF16).scored("sinks" if window else "", groups * group)
    q = asked(pages, 16, group)
    in_block = check_slots(q, pages, range(16), window=window, whole=whole)
    for end in range(1, 17):
        shorter = attend(q[:end], pages, causal=True, window=window, whole=whole)
        assert torch.equal(shorter, in_block[:end])


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "free"])
@pytest.mark.parametrize("whole", [False, True], ids=["split", "whole"])
@pytest.mark.parametrize(("groups", "group", "width", "size"), HEADS)
def test_paged_attention_is_batch_invariant(
    groups: int, group: int, width: int, size: int, whole: bool, causal: bool
) -> None:
    pages = make_pages(CONTEXTS, 8, size, groups, width, BF16)
    q = asked(pages, len(CONTEXTS) * 8, group)
    together = check_invariant(q, pages, CONTEXTS, 8, causal=causal, whole=whole)
    assert whole or torch.equal(attend(q, pages, causal=causal, pairs=True).unflatten(0, (-1, 8)), together)


@pytest.mark.hopper
@pytest.mark.parametrize("window", [0, 100, -96])
@pytest.mark.parametrize("block", [1, 8, 40])
@pytest.mark.parametrize(("groups", "group", "width", "size"), HEADS)
def test_fp8_caches_have_the_bits_of_their_values_in_bf16(
    groups: int, group: int, width: int, size: int, block: int, window: int
) -> None:
    pages = make_pages(CONTEXTS, block, size, groups, width, BF16)
    pages = replace(
        pages, cache=pages.cache * torch.logspace(-3, 3, pages.cache.shape[1])[:, None, None].to(pages.cache)
    )
    pages = pages.in_fp8()
    q = asked(pages, len(CONTEXTS) * block, group)
    for causal, whole, pairs in ((True, False, False), (False, False, True), (True, True, False)):
        how: dict[str, Any] = {"causal": causal, "window": window, "whole": whole, "pairs": pairs}
        found = attend(q, pages, **how)
        assert found.isfinite().all() and torch.equal(found, attend(q, pages.read(), **how))


def test_tokens_do_not_attend_to_padding() -> None:
    check_padding(128, BF16)


@pytest.mark.hopper
@pytest.mark.parametrize(("groups", "group", "width", "size"), HEADS)
def test_prefill_is_as_exact_as_torch_with_and_without_padding(groups: int, group: int, width: int, size: int) -> None:
    for contexts, rows in (((0,), 700), ((1000,), 600), ((37, 260, 0), 130)):
        pages = make_pages(contexts, rows, size, groups, width, BF16)
        q = asked(pages, len(contexts) * rows, group)
        found = prefill.launch(q, pages.kv())
        check_attention(q, pages, found, causal=True)
        counts = [rows - 7 * b for b in range(len(contexts))]
        padded = prefill.launch(q, pages.kv(), integers(counts))
        for b, count in enumerate(counts):
            own = slice(b * rows, b * rows + count)
            assert torch.equal(padded[own], found[own])


@pytest.mark.hopper
@pytest.mark.parametrize(("groups", "group", "width", "size"), HEADS)
def test_prefill_bits_do_not_depend_on_cuts_or_packing(groups: int, group: int, width: int, size: int) -> None:
    total = 2000
    pages = make_pages((0,), total, size, groups, width, BF16)
    q = asked(pages, total, group)
    whole = prefill.launch(q, pages.kv())
    for cuts in ((0, 513, 1100, total), (0, 1024, total), (0, 1, 64, total)):
        parts = [prefill.launch(q[a:b].contiguous(), pages.one(0, a).kv()) for a, b in itertools.pairwise(cuts)]
        assert torch.equal(torch.cat(parts), whole)
        kv, chunks = pages.kv(), len(cuts) - 1
        packed = PagedKV(kv.cache, integers(cuts[:-1]), kv.table.expand(chunks, -1).contiguous(), kv.size)
        assert torch.equal(prefill.launch(q, packed, starts=integers(cuts)), whole)
    assert all(torch.equal(prefill.launch(q, pages.kv()), whole) for _ in range(20))


@pytest.mark.hopper
def test_chunks_that_fill_the_gpu_use_the_prefill_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    launched, launch = list[int](), prefill.launch
    monkeypatch.setattr(flash, "installed", lambda _: None)

    def counted(q: Tensor, *args: Any, **named: Any) -> Tensor:
        launched.append(len(q))
        return launch(q, *args, **named)

    monkeypatch.setattr(prefill, "launch", counted)
    monkeypatch.setattr(prefill, "multiprocessors", lambda _: 132)
    for rows in (64, 65, 256, 512, 513, 2000):
        pages = make_pages((100,), rows, 64, 8, 128, BF16)
        q = asked(pages, rows, 4)
        check_attention(q, pages, gpu.block_attention(q, pages.kv(), causal=True), causal=True)
    assert launched == [512, 2000]


@pytest.mark.parametrize("batch", [8, 9], ids=["split", "whole"])
def test_a_captured_graph_follows_the_lengths(batch: int) -> None:
    pages = make_pages((300,) * batch, 8, 64, 8, 128, BF16)
    q = asked(pages, batch * 4, 4)

    def step() -> Tensor:
        return gpu.block_attention(q, pages.kv(), causal=True)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for length in (0, 61, 129, 304):
        pages.lengths.fill_(length)
        graph.replay()
        assert torch.equal(captured, step())


def test_attention_is_deterministic_under_load(monkeypatch: pytest.MonkeyPatch) -> None:
    batch, block, context, size = 64, 4, 700, 64
    used = -(-(context + block) // size)
    table = torch.randperm(batch * used, device="cuda", dtype=torch.int32).view(batch, used)
    lengths = torch.full((batch,), context, dtype=torch.int32, device="cuda")
    caches = [torch.randn(2, batch * used * size, 8, 128, device="cuda", dtype=BF16) for _ in range(8)]
    q = torch.randn(batch * block, 32, 128, device="cuda", dtype=BF16)

    def outputs() -> Tensor:
        return torch.stack([gpu.block_attention(q, PagedKV(c, lengths, table, size), causal=False) for c in caches])

    runs = [outputs() for _ in range(5)]
    monkeypatch.setattr(attention_hopper, "fits", lambda *_: False)
    torch.testing.assert_close(runs[0], outputs(), rtol=0.0, atol=0.01)  # outputs are about 0.06
    assert all(torch.equal(runs[0], run) for run in runs)
