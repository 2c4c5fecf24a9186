"""The skinny GEMMs against float64 and their definitions, on the interpreter where there is no GPU."""

import itertools
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from kernel_inputs import guarded, in_turn, operands
from torch import Tensor

from dflash_toolkit.kernels import reference
from dflash_toolkit.kernels.triton import linear as kernels

ROWS = (1, 3, 16, 17, 33, 128, 129)  # every padding, its edges, and the way out to torch
KINDS = ("linear", "split_k", "swiglu", "argmax")
# Qwen3-8B and -4B, Qwen2.5-0.5B, and shapes that no model has
SHAPES = [
    (6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288), (151936, 4096), (4096, 20480), (2560, 9728),
    (896, 896), (9728, 896), (896, 4864), (151936, 896), (64, 4224), (72, 1100), (200, 300), (10, 24), (10, 8),
]  # fmt: skip


def each(shapes: Sequence[object], *more: Sequence[object]) -> list[tuple[object, ...]]:
    """Every shape with every number of rows and dtype; in the interpreter with one of the dtypes in turn."""
    return in_turn([*itertools.product(*more, shapes, ROWS)])


def terms_of(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The linear map in float64, and the sums of its terms' absolute values, the bias twice."""
    x, weight, bias = (None if t is None else t.double() for t in (x, weight, bias))
    return F.linear(x, weight, bias), F.linear(x.abs(), weight.abs(), None if bias is None else 2 * bias.abs())


def assert_as_good_as_torch(found: Tensor, torchs: Tensor, exact: Tensor, terms: Tensor) -> None:
    """At most twice torch's worst error in the same dtype, the last rounding, and sums of `terms` in another order.

    Args:
        exact: the result in float64; terms: the sum of its terms' absolute values, in float64.
    """
    worst = (torchs.double() - exact).abs().max()
    band = torch.finfo(torchs.dtype).eps * exact.abs() + 4 * torch.finfo(torch.float32).eps * terms
    excess = (found.double() - exact).abs() - (2 * worst + band)
    assert found.shape == exact.shape
    assert bool((excess <= 0).all()), f"{excess.max().item():.2e} above the bound"  # NaN fails too


@pytest.mark.parametrize(("biased", "shape", "m", "dtype"), each([(200, 300), (128, 256), (10, 24), (64, 129)], (0, 1)))
def test_linear_is_as_good_as_torch_s(biased: bool, shape: tuple[int, int], m: int, dtype: torch.dtype) -> None:
    x, weight, bias = operands(m, *shape, dtype)
    inputs = (x, weight, bias if biased else None)
    found = kernels.linear(*inputs)
    assert found.dtype == dtype
    assert_as_good_as_torch(found, reference.linear(*inputs), *terms_of(*inputs))


@pytest.mark.parametrize(("shape", "m", "dtype"), each([(72, 1100), (64, 1024), (10, 24), (130, 300)]))
def test_split_k_sums_add_up_to_the_linear_map(shape: tuple[int, int], m: int, dtype: torch.dtype) -> None:
    inputs = operands(m, *shape, dtype)
    found = kernels.linear_split_k(*inputs)
    assert m > 128 or (len(found), found.dtype) == (1 + (shape[1] > 1000), torch.float32)
    assert_as_good_as_torch(found.double().sum(0), reference.linear(*inputs), *terms_of(*inputs))


@pytest.mark.parametrize(("n", "k", "dtype"), [(72, 1100, torch.float32), (64, 4224, torch.float16)])
def test_split_k_sums_cover_whole_blocks_and_the_first_has_the_bias(n: int, k: int, dtype: torch.dtype) -> None:
    x, weight, bias = operands(3, n, k, dtype)
    tile = kernels._tile("split_k", x, weight)
    span = -(-k // (tile.splits * tile.block_k)) * tile.block_k
    found = kernels.linear_split_k(x, weight, bias)
    assert len(found) == tile.splits and (k == 1100 or tile.block_k < 128 or (tile.splits - 1) * span >= k), (
        "33 blocks in 8 splits of 5"
    )
    for i, part in enumerate(found):
        columns = slice(i * span, (i + 1) * span)
        expected, _ = terms_of(x[:, columns], weight[:, columns], bias if i == 0 else None)
        torch.testing.assert_close(part.double(), expected, rtol=1e-5, atol=1e-5)
        assert expected.any() or not part.any()


@pytest.mark.parametrize(("shape", "m", "dtype"), each([(200, 300), (128, 256), (10, 24), (66, 129)]))
def test_linear_swiglu_is_as_good_as_torch_s(shape: tuple[int, int], m: int, dtype: torch.dtype) -> None:
    x, weight, _ = operands(m, *shape, dtype)
    (gate, up), (gate_terms, up_terms) = ((t[:, 0::2], t[:, 1::2]) for t in terms_of(x, weight))
    # both activations have slopes of at most 1.13 and magnitudes of at most their argument's; sums in another order may
    # round a gate to the other side
    spread = 1.13 * gate_terms * up.abs() + gate.abs() * up_terms
    spread += 1.13 * (gate * up).abs() * torch.finfo(dtype).eps / (4 * torch.finfo(torch.float32).eps)
    for activation, exact in (("silu", F.silu(gate)), ("gelu_tanh", F.gelu(gate, approximate="tanh"))):
        found = kernels.linear_swiglu(x, weight, activation)
        assert found.dtype == dtype
        assert_as_good_as_torch(found, reference.linear_swiglu(x, weight, activation), exact * up, spread)


@pytest.mark.parametrize(("shape", "m", "dtype"), each([(300, 300), (256, 128), (10, 24), (1, 16)]))
def test_linear_argmax_takes_a_largest_column(shape: tuple[int, int], m: int, dtype: torch.dtype) -> None:
    x, weight, _ = operands(m, *shape, dtype)
    found = kernels.linear_argmax(x, weight)
    assert (found.dtype, found.shape) == (torch.int64, (m,))
    logits, _ = terms_of(x, weight)
    slack = 2 * torch.finfo(dtype).eps * logits.abs().max() + 2 * (reference.linear(x, weight) - logits).abs().max()
    assert bool((logits.amax(-1) - logits.gather(1, found[:, None])[:, 0] <= slack).all())


@pytest.mark.parametrize(("sign", "m", "dtype"), each([1, -1]))  # a padded column's zero may not win
def test_linear_argmax_takes_the_lowest_of_tied_columns(sign: int, m: int, dtype: torch.dtype) -> None:
    # small integers: the logits are exact, so that many columns tie, within a tile and across tiles
    x = guarded(torch.randint(1, 3, (m, 40)).to(dtype))
    weight = guarded(sign * torch.randint(1, 3, (30, 40)).to(dtype).repeat(11, 1))  # 330 rows, no multiple of a tile
    logits = x.double() @ weight.double().T
    lowest = [row.index(max(row)) for row in logits.tolist()]
    assert kernels.linear_argmax(x, weight).tolist() == lowest


def test_linear_argmax_ties_are_those_of_logits_in_the_models_dtype() -> None:
    # 2048 + 1 is no fp16 number: as a stored logit it ties with 2048, and the lower column wins
    x = guarded(torch.ones(2, 32, dtype=torch.float16))
    weight = guarded(torch.zeros(200, 32, dtype=torch.float16))
    weight[20, :2] = 1024
    weight[150, :3] = torch.tensor([1024, 1024, 1])
    assert kernels.linear_argmax(x, weight).tolist() == reference.linear_argmax(x, weight).tolist() == [20, 20]


@pytest.mark.parametrize("kind", KINDS)
def test_row_result_does_not_depend_on_batch_size(kind: str) -> None:
    """Bitwise. Within 128 columns sums are exact, between them they round: only the order of blocks can show."""
    n, k, block = 136, 1280, 128
    scale = 2.0 ** torch.tensor([0, 14, 3, 17, 9, 1, 12, 6, 16, 4]).repeat_interleave(block)
    x = guarded(torch.randint(-8, 9, (128, k)).float())
    weight = guarded(torch.randint(-8, 9, (n, k)) * scale)
    if kind == "swiglu":
        weight *= 2.0**-24  # an exact factor that keeps silu away from its flat ends
    function: Callable[[Tensor, Tensor], Tensor] = getattr(kernels, kind if kind == "linear" else f"linear_{kind}")
    dim = 1 if kind == "split_k" else 0
    whole = function(x, weight)
    if kind == "linear":  # the data can distinguish orders at all
        assert not torch.equal(whole, F.linear(x.double(), weight.double()).float())
    for rows in (1, 16, 17, 33, 64, 65):
        assert torch.equal(function(x[:rows], weight), whole.narrow(dim, 0, rows)), rows
    for i in (5, 77, 127):
        assert torch.equal(function(x[i : i + 1], weight), whole.narrow(dim, i, 1)), i


@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fp32", [False, True], ids=["bf16", "fp32"])
@pytest.mark.parametrize("shared", [227 << 10, 163 << 10, 99 << 10], ids=["H200", "A100", "RTX 4090"])
def test_tiles_fit_and_sum_order_is_independent_of_row_count(
    kind: str, n: int, k: int, fp32: bool, shared: int
) -> None:
    tiles = {rows: kernels.tile_for(kind, n, k, rows, fp32=fp32, shared=shared) for rows in range(1, 129)}
    assert len({tile.block_k for tile in tiles.values()}) == 1
    assert {tile.splits for tile in tiles.values()} == {kernels.tile_for(kind, n, k, 1, fp32=fp32).splits}
    for rows, tile in tiles.items():
        padded = max(16, 1 << (rows - 1).bit_length())
        # 64 rows for each warp group: all tiles then use wgmma, which sums in one order
        assert tile.block_n >= 64 and tile.warps % 4 == 0 and tile.block_n >= 16 * tile.warps
        assert tile.block_k >= 16 and tile.block_k.bit_count() == tile.block_n.bit_count() == 1
        assert tile.stages * (tile.block_n + padded) * tile.block_k * (4 if fp32 else 2) <= shared
        assert tile.splits == 1 or kind == "split_k"
        assert 1 <= tile.splits <= max(1, k // tile.block_k)
