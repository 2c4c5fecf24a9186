"""The step's Triton kernels against their definitions, on the GPU or, where there is none, in Triton's interpreter."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle, _convert_float

from dflash_toolkit.kernels import reference
from dflash_toolkit.kernels.hopper import attention as attention_hopper
from dflash_toolkit.kernels.triton import accept, attention, norm

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# the interpreter's tl.dot knows no bf16
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else [])]


def in_turn(cases: Sequence[tuple[object, ...]], values: Sequence[object] = DTYPES) -> list[tuple[object, ...]]:
    """Every case with every dtype (or other value) on a GPU; in the interpreter, which is slow, with one in turn."""
    if DEVICE == "cuda":
        return [(*case, value) for case in cases for value in values]
    return [(*case, values[i % len(values)]) for i, case in enumerate(cases)]


EPS = 1e-6


@pytest.fixture(autouse=True)
def _interpretable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU: short splits, as the interpreter is slow and no rule depends on their sizes; and products column
    by column of K, as those of numpy depend on where in a tile a row stands."""
    if DEVICE == "cuda":
        return
    for name, tokens in (("SHORT", 32), ("SHORT_SPLITS", 4), ("LONG", 64)):  # of 32 tokens up to 128, then of 64
        monkeypatch.setattr(attention, name, type(getattr(attention, name))(tokens))
    monkeypatch.setattr(attention, "CUTS", ((32, 3),))

    def wide(x: TensorHandle) -> Any:
        fp8 = x.dtype.scalar.primitive_bitwidth == 8
        return _convert_float(x.data, x.dtype.scalar, tl.float16, None).view("float16") if fp8 else x.data

    def dot(self: object, a: TensorHandle, b: TensorHandle, d: TensorHandle, *_: object) -> TensorHandle:
        total = d.data.copy()
        left, right = (wide(x).astype(total.dtype) for x in (a, b))
        for k in range(left.shape[1]):
            total += left[:, k, None] * right[None, k]
        return TensorHandle(total, d.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", dot)


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def integers(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def assert_as_exact_as_torch(ours: Tensor, torchs: Tensor, exact: Tensor, slack: float = 0.0) -> None:
    """At most twice the error of the same computation in torch, two roundings of the largest element, and `slack`."""
    assert ours.dtype == torchs.dtype and ours.shape == torchs.shape == exact.shape
    assert ours.isfinite().all()
    ours_off, torchs_off = ((x.double() - exact).abs().max().item() for x in (ours, torchs))
    assert ours_off <= 2 * torchs_off + 2 * torch.finfo(ours.dtype).eps * exact.abs().max().item() + slack


@dataclass
class Pages:
    """Requests of `contexts` tokens and a block of S behind each; what is in no page of theirs is NaN."""

    lengths: Tensor  # int32 [B]
    table: Tensor  # int32 [B, pages]
    cache: Tensor  # [2, slots, G, H]
    size: int

    def slots(self, block: int) -> Tensor:
        """Slots [B, S] of the block."""
        positions = self.lengths[:, None] + torch.arange(block, device=DEVICE)
        return reference.slots_of(positions, self.table, self.size)

    def one(self, request: int, advance: int = 0) -> "Pages":
        """The batch of one request, `advance` tokens later."""
        at = slice(request, request + 1)
        return replace(self, lengths=self.lengths[at] + advance, table=self.table[at])


def make_pages(
    contexts: tuple[int, ...], block: int, size: int, groups: int, width: int, dtype: torch.dtype = torch.float32
) -> Pages:
    batch, per_request = len(contexts), -(-(max(contexts) + block) // size) + 2
    pages = torch.randperm(batch * per_request + 3, device=DEVICE)
    table = pages[: batch * per_request].view(batch, per_request).int()
    cache = torch.full((2, len(pages) * size, groups, width), math.nan, dtype=dtype, device=DEVICE)
    for request, context in enumerate(contexts):
        positions = torch.arange(context + block, device=DEVICE)[None]
        slots = reference.slots_of(positions, table[request : request + 1], size)[0]
        cache[:, slots] = randn(2, context + block, groups, width, dtype=dtype)
    return Pages(integers(contexts), table, cache, size)


# ---- attention -------------------------------------------------------------------------------------


def attend(q: Tensor, pages: Pages, *, causal: bool, window: int = 0, counts: Any = None, **passes: bool) -> Tensor:
    """`passes`: `whole` for one pass over the keys, `pairs` for two splits a program."""
    hopper = attention_hopper.launch if attention_hopper.fits(q, pages.cache, pages.size) else None
    where, ways = (pages.cache, pages.lengths, pages.table, pages.size), {"whole": False, "pairs": False} | passes
    return attention._attention(q, *where, causal, window, *ways.values(), counts, hopper)


def defined(q: Tensor, cache: Tensor, pages: Pages, *, causal: bool, window: int = 0) -> Tensor:
    return reference.block_attention(q, cache, pages.lengths, pages.table, pages.size, causal=causal, window=window)


def check_attention(q: Tensor, pages: Pages, found: Tensor, *, causal: bool, window: int = 0) -> None:
    exact = defined(q.double(), pages.cache.double(), pages, causal=causal, window=window)
    assert_as_exact_as_torch(found, defined(q, pages.cache, pages, causal=causal, window=window), exact)


def check_slots(q: Tensor, pages: Pages, slots: Iterable[int], **how: Any) -> Tensor:
    """A slot of a causal block is the plain step at its position, bit for bit."""
    in_block = attend(q, pages, causal=True, **how)
    for k in slots:
        assert torch.equal(attend(q[k : k + 1], pages.one(0, k), causal=True, **how)[0], in_block[k])
    return in_block


def check_invariant(q: Tensor, pages: Pages, contexts: Sequence[int], block: int, **how: Any) -> Tensor:
    """A request is the same alone and in a batch, bit for bit; the page table's width only bounds the grid."""
    together = attend(q, pages, **how).unflatten(0, (-1, block))
    for request, (mine, context) in enumerate(zip(q.unflatten(0, (-1, block)), contexts, strict=True)):
        alone = pages.one(request)
        narrow = replace(alone, table=alone.table[:, : -(-(context + block) // pages.size)].contiguous())
        for each in (alone, narrow):
            assert torch.equal(attend(mine, each, **how), together[request])
    return together


def check_padding(width: int, dtype: torch.dtype) -> None:
    """Behind the tokens of a padded block there is NaN, which none of them sees: each has the bits it has unpadded."""
    for context, count in ((0, 1), (5, 12), (130, 3)):
        pages, q = make_pages((context,), count, 64, 1, width, dtype), randn(40, 3, width, dtype=dtype)
        padded = {"causal": True, "counts": integers([count])}
        for whole in (True, False):
            found = attend(q, pages, whole=whole, **padded)
            assert found.isfinite().all()
            assert torch.equal(found[:count], attend(q[:count], pages, causal=True, whole=whole))
        defined = reference.block_attention(q, pages.cache, pages.lengths, pages.table, pages.size, **padded)
        torch.testing.assert_close(found, defined, rtol=1e-2, atol=1e-2)


def test_tokens_see_nothing_of_the_padding_behind_them() -> None:
    check_padding(40, DTYPES[-1])


SHAPES = [  # S, heads of a group, head width, contexts, page size, window
    (1, 1, 8, (0,), 16, 0),
    (1, 4, 128, (260,), 16, 0),
    (8, 4, 64, (130,), 16, 0),
    (3, 3, 40, (1, 63, 130), 128, 0),
    (3, 1, 40, (260,), 64, 200),
    (1, 7, 64, (63, 0, 130), 16, 50),
    (5, 7, 8, (63, 0, 1), 64, 5),
    (16, 3, 128, (120,), 16, 130),  # the block lies across the first long split's start
    (16, 7, 128, (130,), 64, 0),  # two tiles of rows
    (16, 4, 64, (0, 260), 16, 0),
]
Shape = tuple[int, int, int, tuple[int, ...], int, int]


BLOCKS = [(causal, dtype) for causal in (True, False) for dtype in DTYPES]  # each in turn meets a window


@pytest.mark.parametrize(("shape", "way"), in_turn([(shape,) for shape in SHAPES], BLOCKS), ids=str)
def test_attention_is_as_exact_as_torch_in_one_pass_and_in_two(shape: Shape, way: tuple[bool, torch.dtype]) -> None:
    (block, group, width, contexts, size, window), (causal, dtype) = shape, way
    pages = make_pages(contexts, block, size, 2, width, dtype)
    q = randn(len(contexts) * block, 2 * group, width, dtype=dtype)
    for whole in (False, True):
        found = attend(q, pages, causal=causal, window=window, whole=whole)
        check_attention(q, pages, found, causal=causal, window=window)


WAYS = [(1, 16, "split"), (8, 2, "split"), (8, 2, "in pairs"), (9, 1, "whole"), (9, 2, "whole"), (1, 65, "whole")]


@pytest.mark.parametrize(("batch", "block", "way"), WAYS)
def test_the_order_of_sums_depends_on_the_batch_not_on_the_block_length(
    batch: int, block: int, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ways: list[str] = []
    real = attention._attention

    def attend(*args: Any) -> Tensor:
        whole, pairs = args[7:9]
        ways.append("whole" if whole else "in pairs" if pairs else "split")  # `whole` before all
        return real(*args)

    monkeypatch.setattr(attention, "_attention", attend)
    monkeypatch.setattr(attention, "multiprocessors", lambda _: 8 if way == "in pairs" else 132)
    pages = make_pages((5,) * batch, block, 16, 2, 16)
    q = randn(batch * block, 2 * 3, 16)
    found = attention.block_attention(q, pages.cache, pages.lengths, pages.table, pages.size, causal=True)
    check_attention(q, pages, found, causal=True)
    assert ways == [way]


CROSSINGS = [  # S, group, context, window, whole: blocks that cross a tile, a split, the first long split
    (8, 4, 60, 0, False),
    (8, 4, 124, 50, False),
    (8, 4, 124, 0, True),
    (16, 7, 120, 0, False),
    (3, 1, 0, 0, False),
]


@pytest.mark.parametrize(("crossing", "dtype"), in_turn([(crossing,) for crossing in CROSSINGS]), ids=str)
def test_a_slot_of_a_causal_block_is_the_plain_step_at_its_position_bit_for_bit(
    crossing: tuple[int, int, int, int, bool], dtype: torch.dtype
) -> None:
    block, group, context, window, whole = crossing
    pages = make_pages((context,), block, 16, 1, 64, dtype)
    q, slots = randn(block, group, 64, dtype=dtype), range(0, block, 3 if block < 16 else 7)
    in_block = check_slots(q, pages, slots, window=window, whole=whole)
    for k in slots:  # nor does it see what the other slots ask or what stands behind it
        others = torch.arange(block, device=DEVICE) != k
        changed = replace(pages, cache=pages.cache.clone())
        changed.cache[:, pages.slots(block)[0, k + 1 :]] = randn(2, block - k - 1, 1, 64, dtype=dtype)
        asked = torch.where(others[:, None, None], randn(*q.shape, dtype=dtype), q)
        assert torch.equal(attend(asked, changed, causal=True, window=window, whole=whole)[k], in_block[k])


@pytest.mark.parametrize(("causal", "dtype"), in_turn([(True,), (False,)]), ids=str)
def test_attention_is_batch_invariant_bit_for_bit(causal: bool, dtype: torch.dtype) -> None:
    contexts = (63, 0, 200)
    q, pages = randn(3 * 3, 2 * 3, 64, dtype=dtype), make_pages(contexts, 3, 16, 2, 64, dtype)
    check_invariant(q, pages, contexts, 3, causal=causal)


def test_slots_of_a_free_block_do_not_feel_each_others_queries() -> None:
    pages = make_pages((130,), 8, 16, 1, 64)
    q, other = randn(8, 4, 64), randn(8, 4, 64)
    asked = torch.where(torch.arange(8, device=DEVICE)[:, None, None] == 5, q, other)
    assert torch.equal(attend(asked, pages, causal=False)[5], attend(q, pages, causal=False)[5])


def test_splits_cover_every_position_once() -> None:
    short, count, long = (getattr(attention, name).value for name in ("SHORT", "SHORT_SPLITS", "LONG"))
    ends = [short * i for i in range(count + 1)] + [short * count + long * i for i in range(1, 4)]
    for reach in range(1, ends[-1] + 1):
        assert attention.splits_of(reach) == sum(end < reach for end in ends)


# ---- norm ------------------------------------------------------------------------------------------


def exact_norm(x: Tensor, weight: Tensor) -> Tensor:
    x = x.double()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weight.double()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("wide", [True, False], ids=["fp32-parts", "own-parts"])
@pytest.mark.parametrize("parts", [0, 1, 2, 5])
@pytest.mark.parametrize(("rows", "width"), [(1, 8), (3, 40), (5, 1000), (2, 4096)])
def test_the_norm_is_that_of_the_rounded_sum_and_batch_invariant(
    rows: int, width: int, parts: int, wide: bool, dtype: torch.dtype
) -> None:
    x, weight = randn(rows, width, dtype=dtype), randn(width, dtype=dtype)
    partials = randn(parts, rows, width, dtype=torch.float32 if wide else dtype) if parts else None
    taps, before = torch.full((rows, 3, width), 7.0, dtype=dtype, device=DEVICE), x.clone()
    total, normed = norm.add_rms_norm(x, partials, weight, EPS, taps.flatten(1)[:, width : 2 * width])
    expected_total, expected = reference.add_rms_norm(x, partials, weight, EPS)
    assert torch.equal(x, before) and (total is x) == (partials is None)
    exact = x.double() if partials is None else x.double() + partials.double().sum(0)
    assert_as_exact_as_torch(total, expected_total, exact)
    assert_as_exact_as_torch(normed, reference.add_rms_norm(total, None, weight, EPS)[1], exact_norm(total, weight))
    assert_as_exact_as_torch(normed, expected, exact_norm(exact, weight))
    assert torch.equal(taps[:, 1], total) and (taps[:, ::2] == 7).all()
    alone = norm.add_rms_norm(x[-1:], None if partials is None else partials[:, -1:].contiguous(), weight, EPS)
    assert torch.equal(alone[0], total[-1:]) and torch.equal(alone[1], normed[-1:])


@pytest.mark.parametrize(("parts", "total"), [((1e8, -1e8, 1.0), 1), ((1.0, -1e8, 1e8), 0)])
def test_parts_are_added_in_their_order(parts: tuple[float, ...], total: int) -> None:
    x, weight = torch.zeros(1, 8, device=DEVICE), torch.ones(8, device=DEVICE)
    partials = torch.tensor(parts, device=DEVICE)[:, None, None].expand(3, 1, 8).contiguous()
    assert (norm.add_rms_norm(x, partials, weight, EPS)[0] == total).all()


# ---- acceptance ------------------------------------------------------------------------------------


@pytest.mark.parametrize("forced", [False, True], ids=["matched", "forced"])
@pytest.mark.parametrize("block", [1, 2, 3, 8, 16, 64])
@pytest.mark.parametrize("batch", [1, 3, 20])
def test_accepted_tokens_and_lengths_are_those_of_the_definition(batch: int, block: int, forced: bool) -> None:
    choice, drafts = torch.randint(1 << 40, (2, batch, block), device=DEVICE)
    draft = drafts[:, 1:]  # as the runtime has it: rows are not contiguous
    for request in range(batch):  # every length of prefix, and matches behind a mismatch
        agree = (request * 7 + block - 1) % block
        choice[request, : block - 1] = draft[request]
        if agree < block - 1:
            choice[request, agree] += 1
    numbers = torch.arange(batch, device=DEVICE)
    exactly = torch.randint(block, (batch,), device=DEVICE, dtype=torch.int32) if forced else None
    found, expected = [], []
    for ops, results in ((accept, found), (reference, expected)):
        lengths, last = (numbers * 100).int(), numbers - 50
        results += [*ops.accept(draft, choice, numbers % 4 != 1, lengths, last, exactly), lengths, last]
    for ours, wanted in zip(found, expected, strict=True):
        assert ours.dtype == wanted.dtype and torch.equal(ours, wanted)
    # sampling counts tokens by scattering all of them, so those behind the committed ones are token ids too
    assert (found[1] >= 0).all()
