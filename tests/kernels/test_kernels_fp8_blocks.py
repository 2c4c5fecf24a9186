"""GEMMs with weights in fp8 blocks, on the interpreter where there is no GPU."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from kernel_inputs import fp8_kinds
from kernel_inputs import fp8_type as fp8_type
from other_gpus import use_gpu
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from dflash_toolkit.kernels import features, gpu, reference
from dflash_toolkit.kernels.formats import (
    BLOCK,
    FP8_BLOCK,
    FP8_CHANNEL,
    FP8_MAX,
    BlockScaledFp8,
    Operand,
    QuantizedRows,
    quantize_groups,
)
from dflash_toolkit.kernels.launch import padded
from dflash_toolkit.kernels.triton import fp8_blocks
from dflash_toolkit.kernels.triton.tile import LEAST_STAGES, ROOM_BYTES

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] * (DEVICE == "cuda")  # `make test-gpu` runs them there
DTYPE = torch.bfloat16  # dtype of the rows, which the kernels quantize
ROUNDING = 2.0**-4  # half the distance of adjacent values in e4m3, of the smaller one


def rows_of(kind: str, m: int, k: int) -> Tensor:
    """Rows with groups of very different sizes, one of them all zero."""
    x = torch.randn(m, k) * torch.logspace(-3, 2, m * k // BLOCK).view(m, -1).repeat_interleave(BLOCK, 1)
    x[0, :BLOCK] = 0
    if kind == "in the format":  # as bf16 has it exactly: the scale a power of two
        data, scale = quantize_groups(x)
        x = data.float() * torch.exp2(scale.log2().round()).repeat_interleave(BLOCK, 1)
        x.unflatten(1, (-1, BLOCK))[1:, :, 7] = FP8_MAX * torch.exp2(scale.log2().round())[1:]
    return x.to(DTYPE).to(DEVICE)


def weight_of(n: int, k: int) -> BlockScaledFp8:
    """Blocks of very different sizes."""
    blocks = torch.logspace(-1, 1, n * k // BLOCK**2).view(-1, k // BLOCK).repeat_interleave(BLOCK, 0)
    return BlockScaledFp8.of((torch.randn(n, k) * blocks.repeat_interleave(BLOCK, 1) / k**0.5).to(DEVICE))


def exact(x: Tensor, weight: BlockScaledFp8) -> tuple[Tensor, Tensor]:
    """Returns the product of the quantized values, and the sum of its terms' absolute values, in float64."""
    data, scale = quantize_groups(x)
    rows = data.double() * scale.double().repeat_interleave(BLOCK, 1)
    matrix = weight.data.double() * weight.row_scales().double().repeat_interleave(BLOCK, 1)
    return rows @ matrix.T, rows.abs() @ matrix.abs().T


def test_block_scaled_weight_is_close_and_splits_into_views() -> None:
    matrix = torch.randn(512, 384) * torch.logspace(-3, 3, 512)[:, None]
    weight = BlockScaledFp8.of(matrix)
    assert (weight.scale.shape, len(weight), weight.nbytes) == ((4, 3), 512, 512 * 384 + 4 * 12)
    largest = matrix.abs().unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK)).amax((1, 3))
    largest = largest.repeat_interleave(BLOCK, 0)  # for every row
    error = (weight.dense(torch.float32) - matrix).abs()
    smallest = (largest / FP8_MAX * 2.0**-10).repeat_interleave(BLOCK, 1)
    assert (error <= ROUNDING * matrix.abs() + smallest).all()
    torch.testing.assert_close(weight.row_scales(), largest / FP8_MAX)
    parts = weight.split([128, 384])
    assert torch.equal(torch.cat([part.dense(torch.float32) for part in parts]), weight.dense(torch.float32))
    for part in parts:
        assert part.data.untyped_storage().data_ptr() == weight.data.untyped_storage().data_ptr()


@fp8_kinds
@pytest.mark.parametrize(("m", "k"), [(1, 128), (3, 1152), (130, 256)])
def test_rows_are_quantized_by_groups_as_defined(m: int, k: int, kind: str) -> None:
    x = rows_of(kind, m, k)
    data, scale = fp8_blocks.quantize_groups(x)
    expected = quantize_groups(x)
    assert torch.equal(data.float(), expected[0].float()) and torch.equal(scale, expected[1])
    assert (data.float().abs().unflatten(1, (-1, BLOCK)).amax(2)[1:] == FP8_MAX).all() and not data[
        0, :BLOCK
    ].float().any()


@fp8_kinds
@pytest.mark.parametrize(("m", "n", "k"), [(1, 128, 128), (3, 128, 1024), (33, 256, 384), (129, 128, 128)])
@pytest.mark.sampled
def test_gemms_in_blocks_are_the_sums_of_scaled_blocks(m: int, n: int, k: int, kind: str) -> None:
    x, weight = rows_of(kind, m, k), weight_of(n, k)
    bias = torch.randn(n, device=DEVICE).to(DTYPE)
    expected, terms = exact(x, weight)
    # in bf16, which the interpreter cuts to; matrix instructions cut a sum in fp8 to 13 bits every 32 columns
    bound = 2.0**-7 * expected.abs() + BLOCK // 32 * 2.0**-13 * terms
    for given, added in ((None, 0.0), (bias, bias.double())):
        allowed = bound + (0 if given is None else 2.0**-7 * (expected.abs() + given.double().abs()))
        for operations in (gpu, reference):
            found = operations.linear(x, weight, given)
            assert found.dtype == DTYPE
            assert ((found.double() - expected - added).abs() <= allowed).all()
        sums = gpu.linear_split_k(x, weight, given)
        assert ((sums.double().sum(0) - expected - added).abs() <= allowed).all()
        assert m > 128 or (sums.dtype == torch.float32 and len(sums) == (2 if k == 1024 else 1))


@fp8_kinds
@pytest.mark.parametrize(("m", "n", "k"), [(1, 256, 256), (17, 512, 128), (40, 256, 128), (130, 256, 128)])
def test_block_scaled_swiglu_holds_gates_before_ups(m: int, n: int, k: int, kind: str) -> None:
    x, weight = rows_of(kind, m, k), weight_of(n, k)
    (gate, terms), (up, more) = (exact(x, part) for part in weight.split([n // 2, n // 2]))
    # both activations have slopes of at most 1.13 and magnitudes of at most their argument's
    spread = 1.13 * terms * up.abs() + gate.abs() * more
    for operations in (gpu, reference):
        for activation, exact_gate in (("silu", F.silu(gate)), ("gelu_tanh", F.gelu(gate, approximate="tanh"))):
            found = operations.linear_swiglu(x, weight, activation).double()
            close = (found - exact_gate * up).abs() <= 2.0**-5 * gate.abs() * up.abs() + 2.0**-11 * spread
            assert close.all()


@pytest.mark.usefixtures("fp8_type")
@pytest.mark.parametrize(
    ("kind", "n", "k"), [("linear", 128, 256), ("linear_split_k", 128, 1024), ("linear_swiglu", 256, 256)]
)
@pytest.mark.sampled
def test_block_scaled_gemm_is_batch_invariant(kind: str, n: int, k: int) -> None:
    """Compares bits, also between rows quantized in the loop and in a separate launch, and across tiles of rows."""
    data = torch.randint(-4, 5, (140, k)).float()  # so that 128 columns have an exact sum, but no two of them
    data.unflatten(1, (-1, BLOCK))[:, :, 3] = FP8_MAX / 64
    x = (data * 2.0 ** torch.randint(-9, 9, (140, k // BLOCK)).repeat_interleave(BLOCK, 1)).to(DTYPE).to(DEVICE)
    weight = BlockScaledFp8.of(torch.randint(-8, 9, (n, k), device=DEVICE).float())
    weight.scale.mul_(2.0 ** torch.randint(-9, 9, weight.scale.shape, device=DEVICE))
    function: Callable[[Tensor, Tensor | BlockScaledFp8], Tensor] = getattr(gpu, kind)
    most = 128 if kind == "linear_split_k" else 140  # more rows have their splits added up
    dim = 1 if kind == "linear_split_k" else 0
    whole = function(x[:most], weight)
    for rows in (1, 17, 33, 64):
        assert torch.equal(function(x[:rows], weight), whole.narrow(dim, 0, rows)), rows
    assert torch.equal(function(x[most - 1 : most], weight), whole.narrow(dim, most - 1, 1))


@pytest.mark.usefixtures("fp8_type")
@pytest.mark.parametrize(("m", "k"), [(1, 128), (3, 384), (130, 256), (131, 512)])
@pytest.mark.sampled
def test_norms_quantize_for_the_next_gemm(m: int, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A norm quantizes rows bit for bit like the GEMM would; many rows in the order of cuBLAS if it has these GEMMs."""
    card = replace(features.features_of(torch.device(DEVICE)), cublas_fp8_blocks=k == 512)
    monkeypatch.setattr(fp8_blocks, "features_of", lambda _: card)
    dtype = DTYPE if DEVICE == "cuda" else torch.float16  # the interpreter multiplies bf16 wrongly
    x, gate = (torch.randn(m, k, device=DEVICE).to(dtype) for _ in range(2))
    parts, weight = torch.randn(2, m, k, device=DEVICE), torch.randn(k, device=DEVICE).to(dtype)
    x[0, :BLOCK], parts[:, 0, :BLOCK] = 0, 0

    def check(expected: Tensor, found: Operand) -> None:
        assert isinstance(found, QuantizedRows) and torch.equal(found.values, expected)
        data, scale = fp8_blocks.quantize_groups(expected)
        assert torch.equal(found.data[:m].float(), data.float()) and torch.equal(found.scale[:m], scale)
        if m == 131:
            assert found.scale.shape == (132, 4) and found.scale.stride(0) == 1
        else:
            assert found.scale.is_contiguous() and len(found.scale) == m

    for given in (None, parts):
        total, h = gpu.add_rms_norm(x, given, weight, 1e-6)
        same, found = gpu.add_rms_norm_quantized(x, given, weight, 1e-6)
        assert torch.equal(total, same)
        check(h, found)
    gated = x, gate, weight[:BLOCK], 1e-6
    check(gpu.gated_rms_norm(*gated), gpu.gated_rms_norm_quantized(*gated))
    assert isinstance(gpu.gated_rms_norm_quantized(x, gate, weight[: BLOCK // 2], 1e-6), Tensor), "two heads a group"


@pytest.mark.usefixtures("fp8_type")
@pytest.mark.parametrize("m", [1, 17, 131])
@pytest.mark.sampled
def test_quantized_rows_are_multiplied_as_those_that_gemms_quantize(m: int) -> None:
    k = 512 if m > 128 else 1024
    x = rows_of("in the format", m, k)
    rows = QuantizedRows(x, *fp8_blocks.quantize_groups(x))
    if m > 128:  # as norms quantize them
        rows = QuantizedRows(x, *fp8_blocks._quantize(x, *fp8_blocks._empty_cublas_rows(m, k, x.device)))
    blocks, dense = weight_of(256, k), torch.randn(64, k, device=DEVICE).to(DTYPE)
    by_rows = BlockScaledFp8.of(torch.randn(128, k, device=DEVICE), by_rows=True)
    for operations in (gpu, reference):
        for function in (operations.linear, operations.linear_split_k):
            for weight in (blocks, by_rows):
                assert torch.equal(function(rows, weight), function(x, weight))
        assert torch.equal(operations.linear_swiglu(rows, blocks), operations.linear_swiglu(x, blocks))
    if DEVICE == "cuda":  # the interpreter multiplies bf16 wrongly
        assert torch.equal(gpu.linear_split_k(rows, dense), gpu.linear_split_k(x, dense))


def test_block_scaled_weights_are_not_fused_into_the_layer() -> None:
    x = torch.zeros(1, 128, dtype=DTYPE, device=DEVICE)
    assert not gpu.fuses_post_attention(x, [BlockScaledFp8.of(torch.ones(128, 128, device=DEVICE))] * 4)
    head = BlockScaledFp8.of(torch.eye(128, device=DEVICE))
    x[0, 77] = 1
    assert gpu.linear_argmax(x, head).tolist() == reference.linear_argmax(x, head).tolist() == [77]


@pytest.mark.parametrize(
    ("n", "k", "splits"), [(6144, 4096, 4), (4096, 4096, 4), (4096, 12288, 4), (1024, 512, 1), (1024, 4096, 8)]
)
def test_splits_depend_on_the_shape_alone(n: int, k: int, splits: int) -> None:
    assert {fp8_blocks.tile_for(n, k, rows, split=True).splits for rows in range(1, 129)} == {splits}
    assert {fp8_blocks.tile_for(n, k, rows).splits for rows in (1, 128, 129, 4096)} == {1}


@pytest.mark.parametrize(
    ("n", "k", "rows", "stages"),
    [
        (24576, 4096, 1, 4),  # 384 programs, all at once
        (34816, 5120, 1, 3),  # 544, of which four on each of 132 multiprocessors would leave 16
        (51200, 5120, 16, 4),  # 800: four on each leave 272, six 8
        (34816, 5120, 17, 4),  # registers decide
    ],
)
def test_fp8_block_tiles_avoid_a_small_last_wave(n: int, k: int, rows: int, stages: int) -> None:
    assert fp8_blocks.tile_for(n, k, rows).stages == stages


@pytest.mark.parametrize("name", features.KNOWN)
def test_fp8_block_tiles_fit_every_gpu(name: str) -> None:
    card = features.KNOWN[name]
    for n, k in ((1024, 512), (6144, 4096), (4096, 12288), (34816, 5120)):
        for rows in (1, 16, 17, 64, 65, 128, 129, 4096):
            tile, side = fp8_blocks.tile_for(n, k, rows, True, card), fp8_blocks.rows_of_tile(rows, card)
            row_bytes = 4 if rows <= 16 else 1 if card.fp8_products else 2
            taken = tile.stages * BLOCK * (tile.block_n + side * row_bytes)
            assert taken <= card.shared_memory - ROOM_BYTES and tile.stages >= LEAST_STAGES
            assert tile.block_k == BLOCK, "a block of scales"
            measured = fp8_blocks.tile_for(n, k, rows, True)
            assert tile == replace(measured, stages=tile.stages)
            assert side == min(padded(rows), 128) or (name != "sm_90" and side == 64)
            if name == "sm_90" and rows > 16:
                assert tile.stages == 4, "as measured"


@pytest.mark.parametrize("m", [1, 33, 130])
def test_fp8_blocks_may_span_whole_rows(m: int, fp8_type: str) -> None:
    n, k = 256, 256
    x = torch.randint(-8, 9, (m, k)).float()
    x[:, 5] = 7 * 2.0**6  # the format's largest: what is quantized stays what it is
    x = (x * 2.0 ** torch.randint(-9, 9, (m, 1))).to(DTYPE).to(DEVICE)
    matrix = torch.randn(n, k, device=DEVICE) * torch.logspace(-2, 2, n, device=DEVICE)[:, None]
    weight = BlockScaledFp8.of(matrix, by_rows=True)
    _, last = weight.split([128, 128])
    assert (weight.scale.shape, last.scale.shape) == ((n, 1), (128, 1))
    assert torch.equal(last.dense(torch.float32), weight.dense(torch.float32)[128:])
    assert ((weight.dense(torch.float32) - matrix).abs().amax(1) <= 16 * weight.scale[:, 0] * 1.001).all()
    expected = x.double() @ weight.dense(torch.float64).T
    assert gpu.by_cublas(x, weight) == (m > 128 and fp8_type == "fp8")
    bound = 2.0**-7 * expected.abs() + 2.0**-11 * x.double().abs() @ weight.dense(torch.float64).abs().T
    for operations in (gpu, reference):
        assert ((operations.linear(x, weight).double() - expected).abs() <= bound).all()
        assert ((operations.linear_split_k(x, weight).double().sum(0) - expected).abs() <= bound).all()
        (gate, up), (off, more) = expected.chunk(2, 1), bound.chunk(2, 1)
        error = (operations.linear_swiglu(x, weight).double() - F.silu(gate) * up).abs()
        # silu has slope at most 1.1 and magnitude at most its argument's
        spread = 1.1 * off * (up.abs() + more) + gate.abs() * more
        assert (error <= 2.0**-7 * (F.silu(gate) * up).abs() + spread).all()
    if m <= 128:
        assert torch.equal(gpu.linear(x[:1], weight)[0], gpu.linear(x, weight)[0])


@pytest.mark.parametrize("fp8_type", ["fp8"], indirect=True)
@pytest.mark.usefixtures("fp8_type")
@pytest.mark.parametrize("m", [129, 132])
def test_cublas_gets_scales_as_it_reads_them(m: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The arguments pass torch's checks for a GPU and, read as cuBLAS documents, give the product."""
    n, k = 256, 512
    x, weight, bias = rows_of("in the format", m, k), weight_of(n, k), torch.randn(n, device=DEVICE).to(DTYPE)
    recipes = F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128
    real, calls = F.scaled_mm, 0

    def scaled_mm(
        a: Tensor,
        b: Tensor,
        scale_a: Tensor,
        by_a: F.ScalingType,
        scale_b: Tensor,
        by_b: F.ScalingType,
        output_dtype: torch.dtype,
    ) -> Tensor:
        nonlocal calls
        calls += 1
        with FakeTensorMode():
            fakes = [
                torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cuda") for t in (a, b, scale_a, scale_b)
            ]
            checked = real(fakes[0], fakes[1], fakes[2], by_a, fakes[3], by_b, output_dtype=output_dtype)
        rows = len(a)
        assert rows % 4 == 0 and (by_a, by_b) == recipes
        # column by column the scales of rows, and block row by block row those of weights
        of_rows = scale_a.as_strided((rows * k // BLOCK,), (1,)).view(k // BLOCK, rows).T
        of_blocks = scale_b.as_strided((n * k // BLOCK**2,), (1,)).view(n // BLOCK, k // BLOCK)
        left = a.double() * of_rows.double().repeat_interleave(BLOCK, 1)
        right = b.T.double() * of_blocks.double().repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
        return (left @ right.T).to(output_dtype).view(checked.shape)

    monkeypatch.setattr(fp8_blocks.F, "scaled_mm", scaled_mm)
    monkeypatch.setattr(fp8_blocks, "multiplies", lambda x, weight: True)
    product, terms = exact(x, weight)
    bound = 2.0**-7 * product.abs() + 2.0**-20 * terms
    found = gpu.linear(x, weight)
    assert found.shape == (m, n) and ((found.double() - product).abs() <= bound).all()
    added = gpu.linear_split_k(x, weight, bias)
    assert added.shape == (1, m, n) and torch.equal(added[0], found + bias)
    expected = F.silu(found[:, : n // 2]) * found[:, n // 2 :]
    active = gpu.linear_swiglu(x, weight)
    torch.testing.assert_close(active, expected, rtol=2.0**-6, atol=1e-30)
    assert torch.equal(gpu.linear_argmax(x, weight), found.argmax(-1)) and calls == 4
    quantized = gpu.linear_swiglu_quantized(x, weight)
    assert isinstance(quantized, QuantizedRows) and torch.equal(quantized.values, active) and calls == 5
    data, scale = fp8_blocks.quantize_groups(quantized.values)
    assert torch.equal(quantized.data[:m].view(torch.uint8), data.view(torch.uint8))
    assert torch.equal(quantized.scale[:m], scale)
    rows = QuantizedRows(x, *fp8_blocks._quantize(x, *fp8_blocks._empty_cublas_rows(m, k, x.device)))
    copied = QuantizedRows(x, rows.data[:m], rows.scale[:m].contiguous())
    assert torch.equal(gpu.linear(copied, weight), found), "scales in another order"
    gpu.linear(x[:128], weight)
    assert calls == 6, "few rows are multiplied here"
    monkeypatch.setattr(fp8_blocks, "_quantize", None)
    assert torch.equal(gpu.linear(rows, weight), found) and calls == 7, "quantized once"


@pytest.mark.parametrize(
    ("rows", "k", "dtype", "card", "expected"),
    [
        (129, 512, DTYPE, "sm_90", True),
        (128, 512, DTYPE, "sm_90", False),  # batch-invariant
        (129, 640, DTYPE, "sm_90", False),  # scales that cuBLAS wants padded
        (129, 512, torch.float16, "sm_90", False),
        *((129, 512, DTYPE, card, False) for card in ("sm_80", "sm_86", "sm_89", "sm_100", "sm_120")),
    ],
)
def test_cublas_multiplies_many_rows_by_blocks_where_it_can(
    rows: int, k: int, dtype: torch.dtype, card: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_gpu(monkeypatch, features.KNOWN[card].capability)
    with FakeTensorMode():
        x = torch.empty(rows, k, dtype=dtype, device="cuda")
        weight, by_rows = (form.empty(128, k, new=torch.empty) for form in (FP8_BLOCK, FP8_CHANNEL))
        assert gpu.by_cublas(x, weight) == expected
        assert gpu.by_cublas(x, by_rows) == (rows > 128 and dtype == DTYPE and card not in ("sm_80", "sm_86"))
