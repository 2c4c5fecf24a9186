"""Tests the calls of FlashAttention-3 and -4 and, where they are installed, their results."""

import itertools
import os
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from kernel_inputs import assert_as_exact_as_torch, randn
from kernel_pages import make_pages
from other_gpus import use_gpu
from torch import Tensor

from dflash_toolkit.kernels import flash, gpu, reference
from dflash_toolkit.kernels.paged import PagedKV
from dflash_toolkit.models import packed

SIZE = 64  # page size
BF16 = torch.bfloat16


def by_its_documentation(
    q: Tensor, keys: Tensor, values: Tensor, *, cache_seqlens: Tensor, page_table: Tensor, causal: bool, num_splits: int
) -> Tensor:
    """FlashAttention-3: q [B, S, N, H] over pages [pages, size, G, H]; query i sees cache_seqlens - S + i + 1 keys."""
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
    for function in (flash.load, flash.installed):
        function.cache_clear()
    yield
    for function in (flash.load, flash.installed):
        function.cache_clear()


@pytest.fixture
def version(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> flash.Flash:
    """Returns the installed version of this module, which all calls use."""
    found = flash.load(request.param)
    if found is None:
        pytest.skip(f"{request.param} is not installed")
    monkeypatch.setattr(flash, "installed", lambda _: found)
    return found


@pytest.mark.parametrize("context", [0, 100, 128])
def test_flash_attention_3_call_equals_the_reference(context: int, monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("flash_attn_interface")
    module.flash_attn_with_kvcache = by_its_documentation  # type: ignore[attr-defined]
    module.flash_attn_varlen_func = None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn_interface", module)
    version = flash._version_3()
    monkeypatch.setattr(flash, "installed", lambda _: version)
    pages = make_pages((context,), 40, SIZE, 2, 16, torch.float32)
    q = randn(40, 6, 16)
    found = flash.launch(q, pages.kv())
    expected = reference.block_attention(q, pages.kv(), causal=True)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("capability", "there", "expected"),
    [
        ((9, 0), ("flash_attn_interface", "flash_attn.cute"), "flash_attn_interface"),
        ((9, 0), ("flash_attn.cute",), "flash_attn.cute"),
        ((10, 0), ("flash_attn_interface", "flash_attn.cute"), "flash_attn.cute"),
        ((10, 0), ("flash_attn_interface",), None),
        ((8, 0), ("flash_attn_interface", "flash_attn.cute"), None),
    ],
)
def test_a_device_has_the_fastest_that_is_installed_and_runs_there(
    capability: tuple[int, int], there: tuple[str, ...], expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_gpu(monkeypatch, capability)
    monkeypatch.setattr(flash, "load", lambda module: module if module in there else None)
    assert flash.installed.__wrapped__(torch.device("cuda")) == expected
    assert flash.installed.__wrapped__(torch.device("cpu")) is None


COMPILE = """
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from dflash_toolkit.kernels import flash

version = flash.load("flash_attn.cute")
with FakeTensorMode():
    def empty(*shape, dtype=torch.bfloat16):
        return torch.empty(shape, dtype=dtype, device="cuda")

    ends = empty(4, dtype=torch.int32)
    for groups, heads, width in ((8, 32, 128), (2, 14, 64)):
        q, kv = empty(600, heads, width), empty(600, groups, width)
        pages, length = empty(40, 64, groups, width), empty(1, dtype=torch.int32)
        outputs = [version.paged(q, pages, pages, length, empty(1, 12, dtype=torch.int32))]
        outputs += [version.packed(q, kv, kv, ends, 300, 0.125, before) for before in (None, 100)]
        assert all(found.shape == q.shape and found.dtype == q.dtype for found in outputs)
"""


@pytest.mark.slow
def test_flash_attention_4_compiles_our_calls_for_hopper() -> None:
    """Compiles with the real package on a machine without a GPU."""
    pytest.importorskip("flash_attn.cute", exc_type=ImportError)
    target = {"FLASH_ATTENTION_ARCH": "sm_90", "CUTE_DSL_ARCH": "sm_90a", "FLASH_ATTENTION_NUM_SMS": "132"}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=os.environ | target, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_unloadable_flash_attention_is_reported_once_and_skipped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "flash_attn_interface.py").write_text("raise ImportError('undefined symbol: _ZN3c10')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "flash_attn_interface", raising=False)
    with pytest.warns(UserWarning, match="cannot be loaded .*undefined symbol"):
        assert flash.load("flash_attn_interface") is None
    assert flash.load("flash_attn_interface") is None  # a second warning would be an error


def test_without_flash_attention_packages_none_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("flash_attn_interface", "flash_attn", "flash_attn.cute"):
        monkeypatch.setitem(sys.modules, name, None)
    assert [flash.load(module) for module in flash.VERSIONS] == [None, None]
    q, kv = torch.zeros(600, 4, 64, dtype=BF16), torch.zeros(600, 2, 64, dtype=BF16)
    assert not flash.fits(q, PagedKV(q, torch.zeros(1), q, SIZE), causal=True)
    assert flash.packed(q, kv, kv, torch.tensor([0, 600], dtype=torch.int32), 600, None, None) is None


@pytest.mark.gpu
@pytest.mark.parametrize("version", flash.VERSIONS, indirect=True)
@pytest.mark.parametrize(("groups", "group", "width"), [(8, 4, 128), (2, 7, 64)])
def test_long_chunk_is_exact_and_independent_of_its_cuts(
    groups: int, group: int, width: int, version: flash.Flash
) -> None:
    total = 3000
    pages = make_pages((0,), total, SIZE, groups, width, BF16)
    pages.cache.nan_to_num_(0.0)  # it multiplies the values after the last key by zero
    q = randn(total, groups * group, width, dtype=BF16)

    def chunk(first: int, end: int) -> Tensor:
        kv = pages.one(0, first).kv()
        assert flash.fits(q[first:end], kv, causal=True)
        return gpu.block_attention(q[first:end], kv, causal=True)

    whole = chunk(0, total)
    exact, torchs = (reference.block_attention(q.to(t), pages.kv(dtype=t), causal=True) for t in (torch.float64, BF16))
    assert_as_exact_as_torch(whole, torchs, exact)
    for cuts in ((0, 513, 1100, 3000), (0, 1024, 2048, 3000), (0, 2000, 3000)):
        parts = [chunk(a, b) for a, b in itertools.pairwise(cuts)]
        assert torch.equal(torch.cat(parts), whole)


@pytest.mark.gpu
@pytest.mark.parametrize("version", flash.VERSIONS, indirect=True)
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize(("groups", "heads", "width"), [(8, 32, 128), (2, 14, 64)])
def test_packed_documents_are_as_exact_as_torch_s(
    groups: int, heads: int, width: int, window: int | None, version: flash.Flash
) -> None:
    lengths = (1, 700, 65, 128, 300)
    ends = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device="cuda")
    q, k, v = (randn(sum(lengths), n, width, dtype=BF16) for n in (heads, groups, groups))
    found = packed.flash(q, k, v, ends, max(lengths), 0.1, window)
    torchs = packed.one_by_one(q, k, v, ends, 0.1, window)
    exact = packed.one_by_one(q.double(), k.double(), v.double(), ends, 0.1, window)
    assert_as_exact_as_torch(found, torchs, exact)
