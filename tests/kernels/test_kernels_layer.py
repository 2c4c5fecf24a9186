"""A decoder layer in one launch: against float64, against a launch for every GEMM, batch-invariant; and the head, which
streams in the same way.

The kernel itself runs on a GPU here, and interpreted in test_kernels_gluon.py; that it compiles is in
test_kernels_compile.py.
"""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_layers import EPS, assert_close, double, in_fp8, matrices
from torch import Tensor
from transformers import LlamaConfig

from dflash_toolkit.kernels import gpu, reference
from dflash_toolkit.kernels.formats import cast_fp8
from dflash_toolkit.kernels.hopper import layer, pipeline
from dflash_toolkit.kernels.hopper.head import launch_head
from dflash_toolkit.kernels.ops import Ops
from dflash_toolkit.kernels.triton import linear
from dflash_toolkit.models.spec import ModelSpec
from dflash_toolkit.runtime.stack import Stack
from dflash_toolkit.runtime.weights import AttentionWeights, LayerWeights, MlpWeights

# D, attention width, FFN, qkv of Qwen3-8B, Qwen2.5-0.5B, and of nothing
SHAPES = [(4096, 4096, 12288, 6144), (896, 896, 4864, 1152), (512, 512, 1408, 768), (128, 256, 128, 64)]
ROWS = (1, 3, 16, 17, 40, 64, 100, 128)


@given(n=st.integers(1, 200), k=st.integers(1, 200), programs=st.integers(1, 200))
def test_splits_cover_k_and_leave_at_most_one_tile_a_program(n: int, k: int, programs: int) -> None:
    splits = layer.splits_of(n * pipeline.BLOCK_N, k * 128, 128, programs)
    each = -(-k // splits)
    assert (splits - 1) * each < k, "none without a block"
    assert splits == 1 or n * splits <= programs
    assert each == min(-(-k // s) for s in range(1, 9) if s == 1 or n * s <= programs)


@given(n=st.integers(1, 100), k=st.integers(1, 100), programs=st.integers(1, 140))
def test_even_splits_leave_the_busiest_program_the_fewest_blocks(n: int, k: int, programs: int) -> None:
    def most(splits: int) -> int:
        items = [item % programs for item in range(n * splits)]
        return max(map(items.count, set(items))) * -(-k // splits)

    found = layer.even_splits_of(n * pipeline.BLOCK_N, k * 256, 256, programs)
    assert found == min(range(1, 9), key=lambda s: (most(s), s))
    assert (found - 1) * -(-k // found) < k, "none without a block"


def test_splits_of_qwen3_8b_and_qwen2_0_5b_on_an_h200() -> None:
    assert [layer.splits_of(4096, k, block, 132) for k in (4096, 12288) for block in (128, 256)] == [2, 2, 2, 2]
    assert [layer.even_splits_of(6144, 4096, block, 132) for block in (128, 256)] == [4, 4]
    assert [layer.splits_of(896, k, 128, 132) for k in (896, 4864)] == [7, 8]  # 38 blocks: seven times five, and three
    assert layer.even_splits_of(1152, 896, 128, 132) == 7


@pytest.mark.parametrize("rows", [16, 32, 64, 128])
def test_the_rings_fit_into_shared_memory_and_hold_more_than_one_step(rows: int) -> None:
    slots = pipeline.slots_of(rows)
    assert slots.rows >= 2 and slots.weights > 3  # three tiles may be side by side
    held = slots.weights * pipeline.BLOCK_N + slots.rows * rows
    assert pipeline.SHARED_BYTES * 0.95 <= held * pipeline.BLOCK_BYTES.value <= pipeline.SHARED_BYTES


@given(tiles=st.integers(1, 3000), splits=st.integers(1, 8), programs=st.integers(1, 200))
def test_tiles_side_by_side_take_no_program_longer(tiles: int, splits: int, programs: int) -> None:
    assert pipeline.wide_of(tiles, splits, 16, programs) == 1
    wide = pipeline.wide_of(tiles, splits, 128, programs)
    assert tiles % wide == 0 and 1 <= wide <= 3
    assert wide * -(-tiles * splits // (wide * programs)) == -(-tiles * splits // programs)


@pytest.mark.parametrize("biased", [False, True])
def test_unsupported_shapes_launch_each_operation_separately(biased: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    monkeypatch.setattr(gpu, "fits", lambda *_: False)
    weights = matrices((128, 64, 96, 80), device, torch.float32)
    bias = torch.randn(128, device=device) if biased else None
    x, a = torch.randn(3, 128, device=device), torch.randn(3, 64, device=device)
    tap = torch.full((3, 300), math.nan, device=device)
    config = LlamaConfig(hidden_size=128, num_hidden_layers=2, rms_norm_eps=EPS)
    spec = ModelSpec.of_target(config)

    def run(ops: Ops, dtype: torch.dtype, tap: Tensor | None = None) -> tuple[Any, ...]:
        w = {name: t.to(dtype) for name, t in weights.items()}
        o_bias = None if bias is None else bias.to(dtype)
        mixer = AttentionWeights(w["qkv"], None, None, None, w["o"], o_bias, None)
        layers = [LayerWeights(w["norm"], mixer, w["post_norm"], MlpWeights(w["gate_up"], w["down"]))] * 2
        rope = spec.attention[0].rope
        stack = Stack(spec, layers, w["norm"], {rope: x}, {spec.attention[0].kv_heads: torch.empty(2, 0)}, ops)
        total, normed, begun = stack._finish(0, x.to(dtype), a.to(dtype), None, 1, tap, None)
        assert begun is not None
        return total, normed, begun[0]

    found = run(gpu, torch.float32, tap[:, 100:228])
    assert_close(found, run(reference, torch.float32), run(reference, torch.float64))
    assert torch.equal(tap[:, 100:228], found[0]) and bool(tap[:, :100].isnan().all())


@pytest.mark.gpu
@pytest.mark.hopper
@pytest.mark.parametrize("quantized", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_layer_is_right_to_float64_and_batch_invariant(shape: tuple[int, int, int, int], quantized: bool) -> None:
    full = matrices(shape, "cuda", torch.bfloat16)
    weights = in_fp8(full) if quantized else full
    for rows in ROWS:
        x, a = (torch.randn(rows, width, device="cuda").bfloat16() for width in shape[:2])
        assert pipeline.fits(x, [weights[name] for name in ("o", "gate_up", "down", "qkv")])
        tap = torch.full((rows, 3, shape[0]), math.nan, device="cuda", dtype=torch.bfloat16)
        view = tap.flatten(1)[:, shape[0] : 2 * shape[0]]
        found = gpu.fused_post_attention(x, a, *weights.values(), EPS, view)
        assert torch.equal(tap[:, 1], found[0]) and int(tap.isnan().sum()) == 2 * rows * shape[0]
        assert found[1].dtype == (torch.float8_e4m3fn if quantized else torch.bfloat16)
        last = gpu.fused_post_attention(x, a, *{**weights, "qkv": None}.values(), EPS)
        assert torch.equal(last[0], found[0]) and last[1].dtype == torch.bfloat16 and last[2] is None
        assert torch.equal((cast_fp8(last[1]) if quantized else last[1]).float(), found[1].float())
        torchs = reference.fused_post_attention(x, a, *weights.values(), EPS)
        exact = reference.fused_post_attention(x.double(), a.double(), *double(weights).values(), EPS)
        assert_close((found[0], last[1], found[2]), torchs, exact)
        if quantized:
            sharp = reference.fused_post_attention(x.double(), a.double(), *double(full).values(), EPS)
            for ours, true, there in ((found[0], sharp[0], x), (found[2].sum(0), sharp[2][0], 0)):
                error = (ours.double() - true).norm() / (true - there).norm()
                assert 1e-3 < error < 0.08, "each of three products in a row is off by some 4 %"
        i = rows // 2
        alone = gpu.fused_post_attention(x[i : i + 1], a[i : i + 1], *weights.values(), EPS)
        for one, many in zip(alone, found, strict=True):
            assert torch.equal(one[..., 0, :].float(), many[..., i, :].float())


@pytest.mark.gpu
@pytest.mark.hopper
def test_fused_layer_has_the_bits_of_separate_gemms() -> None:
    """o and down are cut the same way; qkv is cut here as the one launch cuts it."""
    w = matrices(SHAPES[0], "cuda", torch.bfloat16)
    for rows in ROWS:
        x, a = (torch.randn(rows, 4096, device="cuda").bfloat16() for _ in range(2))
        found = gpu.fused_post_attention(x, a, *w.values(), EPS)
        y, h = gpu.add_rms_norm(x, gpu.linear_split_k(a, w["o"]), w["post_norm"], EPS)
        y, h = gpu.add_rms_norm(y, gpu.linear_split_k(gpu.linear_swiglu(h, w["gate_up"]), w["down"]), w["norm"], EPS)
        assert torch.equal(found[0], y) and torch.equal(found[1], h)
        qkv = torch.empty_like(found[2])
        tile = replace(linear.tile_for("split_k", *w["qkv"].shape, rows), splits=len(qkv))
        linear.launch_linear(h, w["qkv"], None, qkv, tile)
        assert qkv.dtype == torch.float32 and torch.equal(found[2], qkv)


@pytest.mark.gpu
@pytest.mark.hopper
@pytest.mark.parametrize(("columns", "k"), [(151_936, 1024), (64, 128), (192, 256), (64 * 401, 896)], ids=str)
def test_streamed_head_equals_tiled_head(columns: int, k: int) -> None:
    weight = torch.randn(columns, k, device="cuda").bfloat16()
    weight[columns // 2] = weight[columns // 3]  # a tie between two columns
    for rows in ROWS:
        x = torch.randn(rows, k, device="cuda").bfloat16()
        x[rows // 2] = 4 * weight[columns // 3]
        found = launch_head(x, weight)
        assert torch.equal(found, linear.linear_argmax(x, weight))
        assert int(found[rows // 2]) == columns // 3
