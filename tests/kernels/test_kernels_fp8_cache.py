"""Writes to an fp8 cache, and attention over it, on the GPU or in Triton's interpreter.

A head that is read has the bits of `quantized_heads`, and attention those of a cache that holds the read values.
"""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from kernel_forests import plant
from kernel_inputs import DEVICE, DTYPES, EPS, assert_as_exact_as_torch, in_turn, integers, make_rope, randn
from kernel_pages import _interpretable as _interpretable
from kernel_pages import attend, check_attention, check_invariant, check_slots, make_pages
from torch import Tensor

from dflash_toolkit.kernels import features, gpu, reference
from dflash_toolkit.kernels.hopper import attention as hopper_attention
from dflash_toolkit.kernels.paged import FP8, dequantized_heads, quantized_heads
from dflash_toolkit.kernels.triton import rope, tree_accept


def empty_cache(*shape: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns a cache [..., slots, G, H] and scales [..., G, slots] of NaN."""
    *more, slots, groups, _width = shape
    scales = torch.full((*more, groups, slots), math.nan, dtype=dtype, device=DEVICE)
    return torch.full(shape, math.nan, device=DEVICE).to(FP8), scales


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_scales_are_the_least_powers_of_two_that_fit(dtype: torch.dtype) -> None:
    heads = torch.randn(500, 64) * torch.logspace(-4, 3, 500)[:, None]
    heads[:6, 0] = torch.tensor([448.0, 448 / 1024, 450.0, 14.0, 0.0, 64.0])
    heads[:6, 1:] = 0
    heads = heads.to(dtype)
    values, scales = quantized_heads(heads)
    largest = heads.float().abs().amax(1)
    assert torch.equal(torch.frexp(scales.float())[0], torch.full((500,), 0.5))
    assert (largest <= 448 * scales.float()).all()
    assert ((largest > 224 * scales.float()) | (scales == 2.0**-24)).all()
    assert scales[:4].tolist() == [1.0, 2.0**-10, 2.0, 2.0**-5]
    found = dequantized_heads(values, scales).float()
    off = (found - heads.float()).abs()
    assert (off <= torch.maximum(heads.float().abs() / 16, scales.float()[:, None] / 1024)).all()
    assert torch.equal(found[:2, 0], heads[:2, 0].float())


@pytest.mark.filterwarnings("ignore:invalid value")  # in the interpreter
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_heads_that_are_not_finite_are_read_as_nan(bad: float) -> None:
    cache, scales = empty_cache(2, 4, 2, 8, dtype=torch.float32)
    partials = torch.ones(1, 1, 48, device=DEVICE)
    partials[..., 20] = partials[..., 44] = bad  # the first head of the keys, and the second of the values
    rope.rope_write(
        partials, None, None, None, EPS, make_rope(1, 8), integers([0]), integers([[0]]), cache, 4, scales=scales
    )
    assert scales[:, :, 0].isnan().tolist() == [[True, False], [False, True]]


WRITES = [  # S, query heads of a group, KV heads, head width, contexts, page size
    (3, 3, 2, 40, (1, 63, 130), 4),
    (4, 2, 4, 64, (130,), 16),
    (5, 1, 1, 128, (63, 0), 64),
]


@pytest.mark.parametrize(("case", "dtype"), in_turn([(case,) for case in WRITES]), ids=str)
def test_kernels_write_the_values_of_quantized_heads(case: Any, dtype: torch.dtype) -> None:
    block, group, groups, width, contexts, size = case
    heads, rows = group * groups, len(contexts) * block
    pages, table = make_pages(contexts, block, size, groups, width, dtype), make_rope(max(contexts) + block, width)
    where, slots = (pages.lengths, pages.table), pages.slots(block).flatten()
    norms = randn(2, width, dtype=dtype)
    partials = randn(3, rows, (heads + 2 * groups) * width)
    partials[:, 0, heads * width :] *= 1e-7  # below the least scale
    plain, (cache, scales) = pages.cache.clone(), empty_cache(*pages.cache.shape, dtype=dtype)
    given = (partials, None, *norms, EPS, table, *where)
    q = rope.rope_write(*given, plain, size)
    assert torch.equal(rope.rope_write(*given, cache, size, scales=scales), q)
    check_written(plain, cache, scales, slots)

    layers, counts = 2, integers([block, 0, 1][: len(contexts)])
    plain, (cache, scales) = randn(layers, *plain.shape, dtype=dtype), empty_cache(layers, *plain.shape, dtype=dtype)
    kv = randn(rows, layers * 2 * groups * width, dtype=dtype)
    given = (kv, randn(layers, width, dtype=dtype), EPS, table, pages.lengths, counts, pages.table)
    rope.context_write(*given, plain, size)
    rope.context_write(*given, cache, size, scales)
    check_written(plain, cache, scales, slots[(torch.arange(block, device=DEVICE) < counts[:, None]).flatten()])


def check_written(plain: Tensor, cache: Tensor, scales: Tensor, slots: Tensor) -> None:
    """Checks that the slots hold the heads of another cache, quantized, and that no other slot was written."""
    values, expected = quantized_heads(plain.movedim(-3, 0)[slots])
    assert torch.equal(scales.mT.movedim(-2, 0)[slots], expected)
    assert torch.equal(cache.float().movedim(-3, 0)[slots], values.float())  # which takes -0 as 0
    rest = torch.ones(cache.shape[-3], dtype=torch.bool, device=DEVICE)
    rest[slots] = False
    assert scales[..., rest].isnan().all() and cache.float().movedim(-3, 0)[rest].isnan().all()


@pytest.mark.parametrize("write", [rope.rope_write, reference.rope_write])
def test_padding_is_written_to_the_null_block(write: Any) -> None:
    cache, scales = empty_cache(2, 12, 1, 8, dtype=torch.float32)
    given = (randn(1, 4, 24), None, None, None, EPS, make_rope(4, 8), integers([0]), integers([[1]]))
    write(*given, cache, 4, integers([2]), scales=scales)
    assert scales[:, 0].isfinite().nonzero()[:, 1].tolist() == [2, 3, 4, 5] * 2


SHAPES = [  # S, heads of a group, head width, contexts, page size, window
    (2, 4, 128, (140,), 16, 0),
    (3, 3, 40, (1, 63), 128, 0),
    (5, 7, 8, (63, 0), 64, 5),
    (8, 3, 128, (60,), 16, 50),
]


def same_bits(found: Tensor, expected: Tensor) -> bool:
    """On a GPU, other kernels and other layouts of the same kernel sum in another order."""
    return DEVICE == "cuda" or torch.equal(found, expected)


@pytest.mark.parametrize(("shape", "dtype"), in_turn([(shape,) for shape in SHAPES]), ids=str)
def test_attention_equals_that_over_the_values_that_are_read(shape: Any, dtype: torch.dtype) -> None:
    block, group, width, contexts, size, window = shape
    pages = make_pages(contexts, block, size, 2, width, dtype).in_fp8()
    q = randn(len(contexts) * block, 2 * group, width, dtype=dtype)
    for causal, whole in ((True, False), (False, True)):
        how = {"causal": causal, "window": window}
        found = check_invariant(q, pages, contexts, block, whole=whole, **how).flatten(0, 1)
        assert same_bits(found, attend(q, pages.read(), whole=whole, **how))
        check_attention(q, pages, found, **how)
    check_slots(q[:block], pages.one(0), range(0, block, 3), window=window)


@pytest.mark.parametrize("width", [40, 64])
def test_pages_are_read_into_a_cache_of_their_own(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pages = make_pages((70, 5), 30, 16, 2, width, DTYPES[-1]).in_fp8().one(0)
    alone = gpu.read_pages(pages.kv())
    slots = torch.arange(100, device=DEVICE)
    own = reference.slots_of(slots[None], pages.table, 16)[0]
    assert torch.equal(alone.read(slots), pages.kv().read(own))
    monkeypatch.setattr(gpu, "CHUNK", 30)
    q = randn(30, 4, width, dtype=DTYPES[-1])
    found = gpu.block_attention(q, pages.kv(), causal=True)
    check_attention(q, pages, found, causal=True)
    monkeypatch.setattr(gpu, "read_pages", lambda kv: alone)
    empty = replace(pages.kv(), cache=torch.zeros_like(pages.cache))
    assert torch.equal(found, gpu.block_attention(q, empty, causal=True)), "long chunks read pages first"


def test_hopper_kernels_read_fp8_caches_except_in_prefills(monkeypatch: pytest.MonkeyPatch) -> None:
    pages, q = make_pages((5,), 2, 64, 2, 64, torch.bfloat16), randn(2, 2, 64, dtype=torch.bfloat16)
    monkeypatch.setitem(features._features, q.device, features.KNOWN["sm_90"])
    found = [(hopper_attention.fits(q, each.kv()), each.kv().plain) for each in (pages, pages.in_fp8())]
    assert found == [(True, True), (True, False)]


@pytest.mark.parametrize("children", [3, 1])
@pytest.mark.parametrize("contexts", [(130, 7), (40,) * 9], ids=["few", "many"])
def test_trees_read_what_blocks_read(contexts: tuple[int, ...], children: int) -> None:
    """Each row has the bits of its token in a plain step; chains are trees without siblings."""
    forest = plant(contexts, 4, 6, 7 * len(contexts) + 2, 16, 2, 3, 40, DTYPES[-1], children)
    forest = replace(forest, pages=forest.pages.in_fp8())
    read = replace(forest, pages=forest.pages.read())
    found = forest.attend(20)
    assert found.isfinite().all() and same_bits(found, read.attend(20))
    for row in range(0, int(forest.rows.starts[-1]) if len(contexts) <= 8 else 0, 3):
        assert torch.equal(found[row], forest.plain(row, 20))
    assert_as_exact_as_torch(found, forest.defined(DTYPES[-1], 20), forest.defined(torch.float64, 20))
    if children == 1:
        assert same_bits(forest.attend_chains(), read.attend_chains())
        assert len(contexts) > 8 or torch.equal(forest.attend_chains(), forest.attend())


def test_accepted_rows_move_with_their_scales() -> None:
    forest = plant((10, 3), 4, 6, 14, 16, 2, 1, 20, torch.float32)
    pages = forest.pages.in_fp8()
    assert pages.scales is not None
    cache, scales = pages.cache.repeat(2, 1, 1, 1, 1), pages.scales.repeat(2, 1, 1, 1)
    path, counts = forest.trees.paths[:, 4].long(), integers([3, 1])
    path = path + forest.rows.starts[:2, None]
    expected = cache.clone(), scales.clone()
    for each, kept in zip((cache, scales.mT), (expected[0], expected[1].mT), strict=True):
        arguments = (forest.rows, path, counts, pages.lengths, pages.table, pages.size)
        tree_accept.move_rows_(each, *arguments)
        reference.move_rows_(kept, *arguments)
    assert torch.equal(cache.view(torch.uint8), expected[0].view(torch.uint8))
    torch.testing.assert_close(scales, expected[1], rtol=0, atol=0, equal_nan=True)
    moved = pages.one(0).slots(3)[0]
    assert torch.equal(scales[0].mT[:, moved], pages.scales.mT[:, forest.rows.slots[path[0, :3]].long()])
