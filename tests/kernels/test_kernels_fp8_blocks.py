"""GEMMs with weights in fp8 blocks, on the interpreter where there is no GPU."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")

from test_kernels_fp8 import KINDS

from dflash_toolkit.kernels import gpu, reference
from dflash_toolkit.kernels.triton import fp8_blocks
from dflash_toolkit.kernels.weight import BLOCK, FP8_MAX, BlockScaledFp8, quantize_groups

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16  # of rows, which the kernels quantize
ROUNDING = 2.0**-4  # half the distance of neighbours in e4m3, of the smaller one


def rows_of(kind: str, m: int, k: int) -> Tensor:
    """Rows whose groups are of very different sizes, one of them all zero."""
    x = torch.randn(m, k) * torch.logspace(-3, 2, m * k // BLOCK).view(m, -1).repeat_interleave(BLOCK, 1)
    x[0, :BLOCK] = 0
    if kind == "in the format":  # as bf16 has it exactly: the scale a power of two
        data, scale = quantize_groups(x)
        x = data.float() * torch.exp2(scale.log2().round()).repeat_interleave(BLOCK, 1)
        x.unflatten(1, (-1, BLOCK))[1:, :, 7] = FP8_MAX * torch.exp2(scale.log2().round())[1:]
    return x.to(DTYPE).to(DEVICE)


def weight_of(n: int, k: int, ways: int = 1) -> BlockScaledFp8:
    """Blocks of very different sizes."""
    blocks = torch.logspace(-1, 1, n * k // BLOCK**2).view(-1, k // BLOCK).repeat_interleave(BLOCK, 0)
    return BlockScaledFp8.of((torch.randn(n, k) * blocks.repeat_interleave(BLOCK, 1) / k**0.5).to(DEVICE), ways)


def exact(x: Tensor, weight: BlockScaledFp8) -> tuple[Tensor, Tensor]:
    """The product of what is quantized, and the sum of its terms' absolute values, in float64."""
    data, scale = quantize_groups(x)
    rows = data.double() * scale.double().repeat_interleave(BLOCK, 1)
    matrix = weight.data.double() * weight.row_scales().double().repeat_interleave(BLOCK, 1)
    return rows @ matrix.T, rows.abs() @ matrix.abs().T


@pytest.mark.parametrize("ways", [1, 2])
def test_a_block_scaled_weight_is_nearly_the_matrix_and_its_parts_are_views(ways: int) -> None:
    matrix = torch.randn(512, 384) * torch.logspace(-3, 3, 512)[:, None]
    weight = BlockScaledFp8.of(matrix, ways)
    assert (weight.scale.shape, len(weight), weight.nbytes) == ((4, 3), 512, 512 * 384 + 4 * 12)
    largest = torch.stack([matrix[i::ways].abs().unflatten(0, (-1, BLOCK)).amax(1) for i in range(ways)], 1)
    largest = (
        largest.repeat_interleave(BLOCK, 0).flatten(0, 1).unflatten(1, (-1, BLOCK)).amax(2)
    )  # of every row's blocks
    error = (weight.dense(torch.float32) - matrix).abs()
    smallest = (largest / FP8_MAX * 2.0**-10).repeat_interleave(BLOCK, 1)
    assert (error <= ROUNDING * matrix.abs() + smallest).all()
    torch.testing.assert_close(weight.row_scales(), largest / FP8_MAX)
    for i in range(ways):
        part = weight.way(i)
        assert torch.equal(part.dense(torch.float32), weight.dense(torch.float32)[i::ways])
        assert part.data.untyped_storage().data_ptr() == weight.data.untyped_storage().data_ptr()
    first, rest = BlockScaledFp8.of(matrix).split([128, 384])
    assert torch.equal(
        torch.cat([first.dense(torch.float32), rest.dense(torch.float32)]),
        BlockScaledFp8.of(matrix).dense(torch.float32),
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("m", "k"), [(1, 128), (3, 1152), (130, 256)])
def test_rows_are_quantized_by_groups_as_defined(m: int, k: int, kind: str) -> None:
    x = rows_of(kind, m, k)
    data, scale = fp8_blocks.quantize_groups(x)
    expected = quantize_groups(x)
    assert torch.equal(data.float(), expected[0].float()) and torch.equal(scale, expected[1])
    assert (data.float().abs().unflatten(1, (-1, BLOCK)).amax(2)[1:] == FP8_MAX).all() and not data[
        0, :BLOCK
    ].float().any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("m", "n", "k"), [(1, 128, 128), (3, 128, 1024), (16, 256, 384), (33, 128, 256), (129, 128, 128), (257, 128, 128)]
)
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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 256, 256), (17, 512, 128), (40, 256, 128), (130, 256, 128)])
def test_gates_and_ups_in_turn_have_scales_in_turn(m: int, n: int, k: int, kind: str) -> None:
    x, weight = rows_of(kind, m, k), weight_of(n, k, ways=2)
    (gate, terms), (up, more) = (exact(x, weight.way(i)) for i in (0, 1))
    # silu has slope at most 1.1 and magnitude at most its argument's
    spread = 1.1 * terms * up.abs() + gate.abs() * more
    for operations in (gpu, reference):
        found = operations.linear_swiglu(x, weight).double()
        close = (found - F.silu(gate) * up).abs() <= 2.0**-5 * gate.abs() * up.abs() + 2.0**-11 * spread
        assert close.all()


@pytest.mark.parametrize(
    ("kind", "n", "k"), [("linear", 128, 256), ("linear_split_k", 128, 1024), ("linear_swiglu", 256, 256)]
)
def test_rows_beside_change_nothing_of_a_product_in_blocks(kind: str, n: int, k: int) -> None:
    """Bitwise, also where rows are quantized in the loop and in a launch of their own, and across tiles of rows."""
    data = torch.randint(-4, 5, (140, k)).float()  # so that 128 columns have an exact sum, but no two of them
    data.unflatten(1, (-1, BLOCK))[:, :, 3] = FP8_MAX / 64
    x = (data * 2.0 ** torch.randint(-9, 9, (140, k // BLOCK)).repeat_interleave(BLOCK, 1)).to(DTYPE).to(DEVICE)
    weight = BlockScaledFp8.of(torch.randint(-8, 9, (n, k), device=DEVICE).float(), 1 + (kind == "linear_swiglu"))
    weight.scale.mul_(2.0 ** torch.randint(-9, 9, weight.scale.shape, device=DEVICE))
    function: Callable[[Tensor, Tensor | BlockScaledFp8], Tensor] = getattr(gpu, kind)
    most = 128 if kind == "linear_split_k" else 140  # more rows have their splits added up
    dim = 1 if kind == "linear_split_k" else 0
    whole = function(x[:most], weight)
    for rows in (1, 17, 33, 64):
        assert torch.equal(function(x[:rows], weight), whole.narrow(dim, 0, rows)), rows
    assert torch.equal(function(x[most - 1 : most], weight), whole.narrow(dim, most - 1, 1))


def test_what_multiplies_blocks_is_no_part_of_the_layer_kernel() -> None:
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


@pytest.mark.parametrize("m", [1, 33, 130])
def test_blocks_may_be_whole_rows(m: int) -> None:
    n, k = 256, 256
    x = torch.randint(-8, 9, (m, k)).float()
    x[:, 5] = 7 * 2.0**6  # the format's largest: what is quantized stays what it is
    x = (x * 2.0 ** torch.randint(-9, 9, (m, 1))).to(DTYPE).to(DEVICE)
    matrix = torch.randn(n, k, device=DEVICE) * torch.logspace(-2, 2, n, device=DEVICE)[:, None]
    weight = BlockScaledFp8.of(matrix, ways=2, by_rows=True)
    assert (weight.scale.shape, len(weight.split([128, 128])), weight.way(1).scale.shape) == ((n, 1), 2, (n // 2, 1))
    assert torch.equal(weight.way(1).dense(torch.float32), weight.dense(torch.float32)[1::2])
    assert ((weight.dense(torch.float32) - matrix).abs().amax(1) <= 16 * weight.scale[:, 0] * 1.001).all()
    expected = x.double() @ weight.dense(torch.float64).T
    bound = 2.0**-7 * expected.abs() + 2.0**-11 * x.double().abs() @ weight.dense(torch.float64).abs().T
    for operations in (gpu, reference):
        assert ((operations.linear(x, weight).double() - expected).abs() <= bound).all()
        assert ((operations.linear_split_k(x, weight).double().sum(0) - expected).abs() <= bound).all()
        gate, up = expected[:, 0::2], expected[:, 1::2]
        error = (operations.linear_swiglu(x, weight).double() - F.silu(gate) * up).abs()
        assert (error <= 2.0**-5 * gate.abs() * up.abs() + 1e-3).all()
    assert torch.equal(gpu.linear(x[:1], weight)[0], gpu.linear(x, weight)[0])
