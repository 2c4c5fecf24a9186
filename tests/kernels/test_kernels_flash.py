"""Long chunks of a prompt through FlashAttention-3: what it is asked for and, where it is installed, what it says."""

import sys
import types
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import itertools

from test_kernels_step import assert_as_exact_as_torch, make_pages, randn

from dflash_toolkit.kernels import flash, fused, reference

SIZE = 64  # of a page


def by_its_documentation(
    q: Tensor, keys: Tensor, values: Tensor, *, cache_seqlens: Tensor, page_table: Tensor, causal: bool, num_splits: int
) -> Tensor:
    """q [B, S, N, H] over pages [pages, size, G, H]: query i sees cache_seqlens - S + i + 1 keys."""
    assert causal and num_splits == 1, "one sum, whatever the chunk"
    assert cache_seqlens.dtype == page_table.dtype == torch.int32 and len(q) == len(cache_seqlens) == len(page_table)
    found = []
    for one, length, pages in zip(q, cache_seqlens.tolist(), page_table.long(), strict=True):
        k, v = (
            cache[pages].flatten(0, 1)[:length].repeat_interleave(q.shape[2] // cache.shape[2], 1)
            for cache in (keys, values)
        )
        scores = torch.einsum("snh,tnh->nst", one, k) / q.shape[3] ** 0.5
        late = torch.arange(length)[None] > length - len(one) + torch.arange(len(one))[:, None]
        found.append(torch.einsum("nst,tnh->snh", scores.masked_fill(late, -torch.inf).softmax(-1), v))
    return torch.stack(found)


@pytest.fixture(autouse=True)
def _look_anew() -> Iterator[None]:
    flash.with_pages.cache_clear()
    yield
    flash.with_pages.cache_clear()


@pytest.mark.parametrize("context", [0, 100, 128])
def test_it_is_asked_for_the_reference(context: int, monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("flash_attn_interface")
    module.__spec__ = types.SimpleNamespace()  # type: ignore[assignment]
    module.flash_attn_with_kvcache = by_its_documentation  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn_interface", module)
    pages = make_pages((context,), 40, SIZE, 2, 16, torch.float32)
    q = randn(40, 6, 16)
    found = flash.launch(q, pages.cache, pages.lengths, pages.table, SIZE)
    expected = reference.block_attention(q, pages.cache, pages.lengths, pages.table, SIZE, causal=True)
    torch.testing.assert_close(found, expected)


def test_a_build_that_cannot_be_loaded_is_named_once_and_done_without(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    (tmp_path / "flash_attn_interface.py").write_text("raise ImportError('undefined symbol: _ZN3c10')\n")  # type: ignore[operator]
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "flash_attn_interface", raising=False)
    with pytest.warns(UserWarning, match="cannot be loaded .*undefined symbol"):
        assert flash.with_pages() is None
    assert flash.with_pages() is None  # a second warning would be an error


def test_without_it_nothing_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
    assert flash.with_pages() is None
    assert not flash.fits(torch.zeros(600, 4, 64, dtype=torch.bfloat16), torch.zeros(1), causal=True, window=0)


@pytest.mark.gpu
@pytest.mark.parametrize(("groups", "group", "width"), [(8, 4, 128), (2, 7, 64)])
def test_a_long_chunk_is_as_exact_as_torch_s_and_the_same_however_it_is_cut(
    groups: int, group: int, width: int
) -> None:
    if flash.with_pages() is None:
        pytest.skip("FlashAttention-3 is not installed")
    total, bf16 = 3000, torch.bfloat16
    pages = make_pages((0,), total, SIZE, groups, width, bf16)
    pages.cache.nan_to_num_(0.0)  # it multiplies what is behind the last key by zero
    q = randn(total, groups * group, width, dtype=bf16)

    def chunk(first: int, end: int) -> Tensor:
        lengths = torch.tensor([first], dtype=torch.int32, device="cuda")
        assert flash.fits(q[first:end], lengths, causal=True, window=0)
        return fused.block_attention(q[first:end], pages.cache, lengths, pages.table, SIZE, causal=True)

    whole = chunk(0, total)
    exact, torchs = (
        reference.block_attention(q.to(t), pages.cache.to(t), pages.lengths, pages.table, SIZE, causal=True)
        for t in (torch.float64, bf16)
    )
    assert_as_exact_as_torch(whole, torchs, exact)
    for cuts in ((0, 513, 1100, 3000), (0, 1024, 2048, 3000), (0, 2000, 3000)):
        parts = [chunk(a, b) for a, b in itertools.pairwise(cuts)]
        assert torch.equal(torch.cat(parts), whole)
