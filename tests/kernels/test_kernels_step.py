"""The step's Triton kernels against their definitions, on the GPU or, where there is none, in Triton's interpreter."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from dflash_toolkit.kernels import reference
from dflash_toolkit.kernels.hopper import attention as attention_hopper
from dflash_toolkit.kernels.triton import accept, attention, norm

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# the interpreter's tl.dot knows no bf16
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else [])]


def in_turn(cases: Sequence[tuple[object, ...]]) -> list[tuple[object, ...]]:
    """Every case with every dtype on a GPU; in the interpreter, which is slow, with one of them in turn."""
    if DEVICE == "cuda":
        return [(*case, dtype) for case in cases for dtype in DTYPES]
    return [(*case, DTYPES[i % len(DTYPES)]) for i, case in enumerate(cases)]


EPS = 1e-6


@pytest.fixture(autouse=True)
def _short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Splits of 32 tokens up to 128, then of 64: the interpreter is slow, and no rule depends on their sizes."""
    if DEVICE == "cpu":
        for name, tokens in (("SHORT", 32), ("SHORT_SPLITS", 4), ("LONG", 64)):
            monkeypatch.setattr(attention, name, type(getattr(attention, name))(tokens))
        monkeypatch.setattr(attention, "CUTS", ((32, 3),))


@pytest.fixture(autouse=True)
def _exact_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products in the interpreter column by column of K: those of numpy depend on where in a tile a row stands."""
    if DEVICE == "cuda":
        return

    def dot(self: object, a: TensorHandle, b: TensorHandle, d: TensorHandle, *_: object) -> TensorHandle:
        total = d.data.copy()
        for k in range(a.data.shape[1]):
            total += a.data[:, k, None].astype(total.dtype) * b.data[None, k].astype(total.dtype)
        return TensorHandle(total, d.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", dot)


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def integers(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def assert_as_exact_as_torch(ours: Tensor, torchs: Tensor, exact: Tensor) -> None:
    """At most twice the error of the same computation in torch, and two roundings of the largest element."""
    assert ours.dtype == torchs.dtype and ours.shape == torchs.shape == exact.shape
    assert ours.isfinite().all()
    ours_off, torchs_off = ((x.double() - exact).abs().max().item() for x in (ours, torchs))
    assert ours_off <= 2 * torchs_off + 2 * torch.finfo(ours.dtype).eps * exact.abs().max().item()


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


def attend(
    q: Tensor,
    pages: Pages,
    *,
    causal: bool,
    window: int = 0,
    whole: bool = False,
    pairs: bool = False,
    counts: Tensor | None = None,
) -> Tensor:
    hopper = attention_hopper.launch if attention_hopper.fits(q, pages.cache, pages.size) else None
    where = (pages.cache, pages.lengths, pages.table, pages.size)
    return attention._attention(q, *where, causal, window, whole, pairs, counts, hopper)


def defined(q: Tensor, cache: Tensor, pages: Pages, *, causal: bool, window: int = 0) -> Tensor:
    return reference.block_attention(q, cache, pages.lengths, pages.table, pages.size, causal=causal, window=window)


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
    (1, 7, 64, (63, 0, 130), 16, 50),
    (3, 3, 40, (1, 63, 130), 128, 0),
    (3, 1, 40, (260,), 64, 200),
    (8, 4, 64, (130,), 16, 0),
    (5, 7, 8, (63, 0, 1), 64, 5),
    (16, 7, 128, (130,), 64, 0),  # two tiles of rows
    (16, 4, 64, (0, 260), 16, 0),
    (16, 3, 128, (120,), 16, 130),  # the block lies across the first long split's start
]


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "free"])
@pytest.mark.parametrize(("block", "group", "width", "contexts", "size", "window", "dtype"), in_turn(SHAPES))
def test_attention_is_as_exact_as_torch_in_one_pass_and_in_two(
    block: int, group: int, width: int, contexts: tuple[int, ...], size: int, window: int,
    causal: bool, dtype: torch.dtype,
) -> None:  # fmt: skip
    pages = make_pages(contexts, block, size, 2, width, dtype)
    q = randn(len(contexts) * block, 2 * group, width, dtype=dtype)
    exact = defined(q.double(), pages.cache.double(), pages, causal=causal, window=window)
    for whole in (False, True):
        found = attend(q, pages, causal=causal, window=window, whole=whole)
        assert_as_exact_as_torch(found, defined(q, pages.cache, pages, causal=causal, window=window), exact)


@pytest.mark.parametrize(
    ("batch", "block", "multiprocessors", "way"),
    [
        (1, 16, 132, "split"), (8, 2, 132, "split"), (8, 2, 8, "in pairs"), (9, 1, 132, "whole"), (9, 2, 132, "whole"),
        (1, 65, 132, "whole"),
    ],
)  # fmt: skip
def test_the_order_of_sums_depends_on_the_batch_not_on_the_block_length(
    batch: int, block: int, multiprocessors: int, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ways: list[str] = []
    real = attention._attention

    def attend(*args: Any) -> Tensor:
        whole, pairs = args[7:9]
        ways.append("whole" if whole else "in pairs" if pairs else "split")  # `whole` before all
        return real(*args)

    monkeypatch.setattr(attention, "_attention", attend)
    monkeypatch.setattr(attention, "multiprocessors", lambda _: multiprocessors)
    pages = make_pages((5,) * batch, block, 16, 2, 16)
    q = randn(batch * block, 2 * 3, 16)
    found = attention.block_attention(q, pages.cache, pages.lengths, pages.table, pages.size, causal=True)
    exact = defined(q.double(), pages.cache.double(), pages, causal=True)
    assert_as_exact_as_torch(found, defined(q, pages.cache, pages, causal=True), exact)
    assert ways == [way]


@pytest.mark.parametrize(
    ("block", "group", "context", "window", "whole", "dtype"),
    in_turn(
        [  # blocks that cross a tile, a split, the first long split
            (8, 4, 60, 0, False),
            (8, 4, 124, 50, False),
            (8, 4, 124, 0, True),
            (16, 7, 120, 0, False),
            (3, 1, 0, 0, False),
        ]
    ),
)
def test_a_slot_of_a_causal_block_is_the_plain_step_at_its_position_bit_for_bit(
    block: int, group: int, context: int, window: int, whole: bool, dtype: torch.dtype
) -> None:
    pages = make_pages((context,), block, 16, 1, 64, dtype)
    q = randn(block, group, 64, dtype=dtype)
    in_block = attend(q, pages, causal=True, window=window, whole=whole)
    for k in range(0, block, 3 if block < 16 else 7):
        here = pages.one(0, k)
        assert torch.equal(attend(q[k : k + 1], here, causal=True, window=window, whole=whole)[0], in_block[k])
        # nor does it see what the other slots ask or what stands behind it
        others = torch.arange(block, device=DEVICE) != k
        changed = replace(pages, cache=pages.cache.clone())
        changed.cache[:, pages.slots(block)[0, k + 1 :]] = randn(2, block - k - 1, 1, 64, dtype=dtype)
        asked = torch.where(others[:, None, None], randn(*q.shape, dtype=dtype), q)
        assert torch.equal(attend(asked, changed, causal=True, window=window, whole=whole)[k], in_block[k])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "free"])
def test_attention_is_batch_invariant_bit_for_bit(causal: bool, dtype: torch.dtype) -> None:
    contexts = (63, 0, 200)
    pages = make_pages(contexts, 3, 16, 2, 64, dtype)
    q = randn(len(contexts), 3, 2 * 3, 64, dtype=dtype)
    together = attend(q.flatten(0, 1), pages, causal=causal).view(len(contexts), 3, -1)
    for request in range(len(contexts)):
        alone = pages.one(request)
        assert torch.equal(attend(q[request], alone, causal=causal), together[request])
        # the page table's width only bounds the grid
        needed = -(-(contexts[request] + 3) // 16)
        narrow = replace(alone, table=alone.table[:, :needed].contiguous())
        assert torch.equal(attend(q[request], narrow, causal=causal), together[request])


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
def test_add_rms_norm(rows: int, width: int, parts: int, wide: bool, dtype: torch.dtype) -> None:
    x, weight = randn(rows, width, dtype=dtype), randn(width, dtype=dtype)
    partials = randn(parts, rows, width, dtype=torch.float32 if wide else dtype) if parts else None
    taps = torch.full((rows, 3 * width), 7.0, dtype=dtype, device=DEVICE)
    before = x.clone()
    total, normed = norm.add_rms_norm(x, partials, weight, EPS, taps[:, width : 2 * width])
    expected_total, expected = reference.add_rms_norm(x, partials, weight, EPS)
    assert torch.equal(x, before) and (total is x) == (partials is None)
    exact = x.double() if partials is None else x.double() + partials.double().sum(0)
    assert_as_exact_as_torch(total, expected_total, exact)
    # the norm is that of the rounded stream
    assert_as_exact_as_torch(normed, reference.add_rms_norm(total, None, weight, EPS)[1], exact_norm(total, weight))
    assert_as_exact_as_torch(normed, expected, exact_norm(exact, weight))
    assert torch.equal(taps[:, width : 2 * width], total)
    assert (taps[:, :width] == 7).all() and (taps[:, 2 * width :] == 7).all()
    alone = norm.add_rms_norm(x[-1:], None if partials is None else partials[:, -1:].contiguous(), weight, EPS)
    assert torch.equal(alone[0], total[-1:]) and torch.equal(alone[1], normed[-1:])


def test_parts_are_added_in_their_order() -> None:
    x, weight = torch.zeros(1, 8, device=DEVICE), torch.ones(8, device=DEVICE)
    partials = torch.tensor([1e8, -1e8, 1.0], device=DEVICE)[:, None, None].expand(3, 1, 8).contiguous()
    assert (norm.add_rms_norm(x, partials, weight, EPS)[0] == 1).all()
    assert (norm.add_rms_norm(x, partials.flip(0).contiguous(), weight, EPS)[0] == 0).all()


# ---- acceptance ------------------------------------------------------------------------------------


@pytest.mark.parametrize("forced", [False, True], ids=["matched", "forced"])
@pytest.mark.parametrize("block", [1, 2, 3, 8, 16, 64])
@pytest.mark.parametrize("batch", [1, 3, 20])
def test_accept(batch: int, block: int, forced: bool) -> None:
    draft_and_more = torch.randint(1 << 40, (batch, block), device=DEVICE)
    draft = draft_and_more[:, 1:]  # as the runtime has it: rows are not contiguous
    choice = torch.randint(1 << 40, (batch, block), device=DEVICE)
    for request in range(batch):  # every length of prefix, and matches behind a mismatch
        agree = (request * 7 + block - 1) % block
        choice[request, : block - 1] = draft[request]
        if agree < block - 1:
            choice[request, agree] += 1
    active = torch.arange(batch, device=DEVICE) % 4 != 1
    exactly = torch.randint(block, (batch,), device=DEVICE, dtype=torch.int32) if forced else None
    states = [
        (torch.arange(batch, device=DEVICE, dtype=torch.int32) * 100, torch.arange(batch, device=DEVICE) - 50)
        for _ in range(2)
    ]
    ours = accept.accept(draft, choice, active, *states[0], exactly)
    expected = reference.accept(draft, choice, active, *states[1], exactly)
    for found, wanted in zip((*ours, *states[0]), (*expected, *states[1]), strict=True):
        assert found.dtype == wanted.dtype and torch.equal(found, wanted)
    # sampling counts tokens by scattering all of them, so those behind the committed ones are token ids too
    assert (ours[1] >= 0).all()
