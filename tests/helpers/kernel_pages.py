"""Requests in a paged cache, and checks of attention over them."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import triton.language as tl
from kernel_inputs import DEVICE, assert_as_exact_as_torch, integers, randn
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle, _convert_float

from dflash_toolkit.kernels import reference
from dflash_toolkit.kernels.hopper import attention as attention_hopper
from dflash_toolkit.kernels.paged import PagedKV, dequantized_heads, quantized_heads
from dflash_toolkit.kernels.triton import attention


@pytest.fixture(autouse=True)
def _interpretable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU, uses short splits, as the interpreter is slow and no rule depends on their sizes, and sums
    products column by column of K, as numpy's products depend on a row's place in a tile."""
    if DEVICE == "cuda":
        return
    for name, tokens in (("SHORT", 32), ("SHORT_SPLITS", 4), ("LONG", 64)):  # splits of 32 tokens up to 128, then of 64
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


@dataclass
class Pages:
    """Requests of `contexts` tokens and a block of S after each; all other slots hold NaN."""

    lengths: Tensor  # int32 [B]
    table: Tensor  # int32 [B, pages]
    cache: Tensor  # [2, slots, G, H]
    size: int
    scales: Tensor | None = None  # [2, G, slots] of a cache in fp8
    scores: dict[str, Any] = field(default_factory=dict)  # fields of `PagedKV` about scores

    @property
    def stored(self) -> list[Tensor]:
        """Keys and values, and their scales if there are any, [2, slots, G, ...]."""
        return [self.cache] if self.scales is None else [self.cache, self.scales.mT]

    def clone(self) -> "Pages":
        return replace(self, cache=self.cache.clone(), scales=None if self.scales is None else self.scales.clone())

    def slots(self, block: int) -> Tensor:
        """Slots [B, S] of the block."""
        positions = self.lengths[:, None] + torch.arange(block, device=DEVICE)
        return reference.slots_of(positions, self.table, self.size)

    def kv(self, window: int = 0, dtype: torch.dtype | None = None) -> PagedKV:
        if dtype is None or self.scales is None:
            cache = self.cache.to(dtype or self.cache.dtype)
            return PagedKV(cache, self.lengths, self.table, self.size, window, self.scales, **self.scores)
        return self.read().kv(window, dtype)

    def in_fp8(self) -> "Pages":
        """The same pages, quantized."""
        values, scales = quantized_heads(self.cache)
        return replace(self, cache=values, scales=scales.mT.contiguous())

    def read(self) -> "Pages":
        """Pages with the values that are read from these, in the dtype of the model."""
        assert self.scales is not None
        return replace(self, cache=dequantized_heads(self.cache, self.scales.mT), scales=None)

    def scored(self, kind: str, heads: int) -> "Pages":
        """The same pages with sinks of so many heads ("sinks"), with a cap and a factor ("cap"), or plain ("")."""
        kinds: dict[str, dict[str, Any]] = {"": {}, "cap": {"soft_cap": 2.0, "factor": 0.3}}
        if kind == "sinks":
            kinds[kind] = {"sinks": 3 * randn(heads, dtype=self.cache.dtype)}
        return replace(self, scores=kinds[kind])

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


def attend(q: Tensor, pages: Pages, *, causal: bool, window: int = 0, counts: Any = None, **passes: int) -> Tensor:
    """`passes`: `whole` for one pass over the keys, `pairs` for two splits a program, `far` for keys of all splits."""
    kv, ways = pages.kv(window), {"whole": False, "pairs": False, "far": 0} | passes
    hopper = attention_hopper.launch if attention_hopper.fits(q, kv) else None
    return attention._attention(q, kv, causal, *ways.values(), counts, hopper)


def defined(q: Tensor, pages: Pages, *, causal: bool, window: int = 0) -> Tensor:
    return reference.block_attention(q, pages.kv(window, q.dtype), causal=causal)


def check_attention(q: Tensor, pages: Pages, found: Tensor, *, causal: bool, window: int = 0) -> None:
    exact = defined(q.double(), pages, causal=causal, window=window)
    assert_as_exact_as_torch(found, defined(q, pages, causal=causal, window=window), exact)


def check_slots(q: Tensor, pages: Pages, slots: Iterable[int], **how: Any) -> Tensor:
    """Checks that a slot of a causal block has the bits of the plain step at its position."""
    in_block = attend(q, pages, causal=True, **how)
    for k in slots:
        assert torch.equal(attend(q[k : k + 1], pages.one(0, k), causal=True, **how)[0], in_block[k])
    return in_block


def check_invariant(q: Tensor, pages: Pages, contexts: Sequence[int], block: int, **how: Any) -> Tensor:
    """Checks that a request has the same bits alone and in a batch; the page table's width only bounds the grid."""
    together = attend(q, pages, **how).unflatten(0, (-1, block))
    for request, (mine, context) in enumerate(zip(q.unflatten(0, (-1, block)), contexts, strict=True)):
        alone = pages.one(request)
        narrow = replace(alone, table=alone.table[:, : -(-(context + block) // pages.size)].contiguous())
        for each in (alone, narrow):
            assert torch.equal(attend(mine, each, **how), together[request])
    return together


def check_padding(width: int, dtype: torch.dtype) -> None:
    """After the tokens of a padded block there is NaN, which none of them sees: each has the bits it has unpadded."""
    for context, count in ((0, 1), (5, 12), (130, 3)):
        pages, q = make_pages((context,), count, 64, 1, width, dtype), randn(40, 3, width, dtype=dtype)
        padded = {"causal": True, "counts": integers([count])}
        for whole in (True, False):
            found = attend(q, pages, whole=whole, **padded)
            assert found.isfinite().all()
            assert torch.equal(found[:count], attend(q[:count], pages, causal=True, whole=whole))
        defined = reference.block_attention(q, pages.kv(), **padded)
        torch.testing.assert_close(found, defined, rtol=1e-2, atol=1e-2)
