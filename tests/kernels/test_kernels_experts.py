"""The kernels of a mixture of experts against their definitions, on the interpreter where there is no GPU."""

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from kernel_inputs import DEVICE, DTYPES, assert_as_exact_as_torch, in_turn, randn
from kernel_inputs import fp8_type as fp8_type
from kernel_pages import _interpretable as _interpretable
from torch import Tensor

from dflash_toolkit.kernels import reference
from dflash_toolkit.kernels.clamped import ClampedExperts
from dflash_toolkit.kernels.formats import BlockScaledFp8, Mxfp4Weight, Operand, QuantizedRows, Weight
from dflash_toolkit.kernels.hopper import experts as hopper
from dflash_toolkit.kernels.routing import SigmoidRouting
from dflash_toolkit.kernels.triton import experts as kernels
from dflash_toolkit.kernels.triton import fp8_blocks
from dflash_toolkit.kernels.triton.norm import add_rms_norm

pytestmark = [pytest.mark.gpu] * (DEVICE == "cuda")  # `make test-gpu` runs them there
ROWS = (1, 3, 17, 65, 130)  # a program by pair and by expert, one more row than are padded to 16, gathered, rounded
SHAPES = [(8, 2, 48, 24), (5, 3, 40, 136), (3, 3, 130, 16)]  # E, k, D, I
ON_GPU = [(128, 8, 2048, 768), (257, 9, 2048, 512)] if DEVICE == "cuda" else []  # Qwen3-30B-A3B, Qwen3.6-35B-A3B


def routed(m: int, experts: int, top: int, dtype: torch.dtype, shared: bool = False) -> tuple[Tensor, Tensor]:
    """Returns weights and experts [M, top] like a router; with `shared`, every row has the last expert."""
    logits = randn(1, m, experts)
    return reference.top_experts(logits, dtype, top - shared, normalized=True, shared=shared)


def operands(m: int, shape: tuple[int, int, int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    count, _, d, width = shape
    down = randn(count, d, width) / width**0.5
    return randn(m, d, dtype=dtype), (randn(count, 2 * width, d) / d**0.5).to(dtype), down.to(dtype)


@pytest.mark.parametrize(("shape", "m", "dtype"), in_turn([*itertools.product([*SHAPES, *ON_GPU], ROWS)]))
def test_every_expert_of_a_row_is_as_good_as_torch_s(
    shape: tuple[int, int, int, int], m: int, dtype: torch.dtype
) -> None:
    inputs = operands(m, shape, dtype)
    routing = routed(m, *shape[:2], dtype, shared=shape[0] % 2 == 1)
    for weighted_inputs in (False, True) if shape == SHAPES[0] else (False,):
        how = None, "gelu_tanh" if shape[0] % 2 else "silu", weighted_inputs
        found = kernels.experts_mlp(*inputs, *routing, *how)
        assert found.dtype == (torch.float32 if m <= 128 else dtype) and found.shape == (shape[1], m, shape[2])
        exact = reference.experts_mlp(*(t.double() for t in inputs), *routing, *how)
        # sums in one piece of up to 2,048 terms in fp32 are off by more than torch's, which are made of parts
        slack = 16 * torch.finfo(torch.float32).eps * exact.abs().max().item()
        assert_as_exact_as_torch(found.to(dtype), reference.experts_mlp(*inputs, *routing, *how), exact, slack)


CLAMPED = [(5, 3, 96, 64), (4, 2, 160, 32), *([(32, 4, 2880, 2880)] if DEVICE == "cuda" else [])]  # gpt-oss-20b
KINDS = [(m, shape, mxfp4) for m, shape in itertools.product(ROWS, CLAMPED) for mxfp4 in (False, True)]


@pytest.mark.parametrize(("m", "shape", "mxfp4", "dtype"), in_turn(KINDS))
def test_clamped_experts_with_biases_are_as_good_as_torch_s(
    m: int, shape: tuple[int, int, int, int], mxfp4: bool, dtype: torch.dtype
) -> None:
    count, top, d, width = shape
    x, *matrices = operands(m, shape, dtype)
    weights = [Mxfp4Weight.of(matrix) if mxfp4 else matrix for matrix in matrices]
    clamped = ClampedExperts(*(randn(count, n, dtype=dtype) for n in (2 * width, d)), alpha=1.702, limit=1.5)
    routing = routed(m, count, top, dtype)
    found = kernels.experts_mlp(x, *weights, *routing, clamped)
    exact_biases = replace(clamped, gate_up_bias=clamped.gate_up_bias.double(), down_bias=clamped.down_bias.double())
    values = [weight.dense(torch.float64) if mxfp4 else weight.double() for weight in weights]
    exact = reference.experts_mlp(x.double(), *values, *routing, exact_biases)
    slack = 16 * torch.finfo(torch.float32).eps * exact.abs().max().item()
    expected = reference.experts_mlp(x, *weights, *routing, clamped)
    assert_as_exact_as_torch(found.to(dtype), expected, exact, slack)


def in_fp8(matrices: Tensor, by_rows: bool = False) -> BlockScaledFp8:
    each = [BlockScaledFp8.of(matrix, by_rows) for matrix in matrices]
    return BlockScaledFp8(torch.stack([w.data for w in each]), torch.stack([w.scale for w in each]), by_rows)


@pytest.mark.parametrize("m", [2, 40, 65, 200])  # quantized as they are loaded, before, gathered, in wide tiles
@pytest.mark.parametrize("by_rows", [False, True], ids=["blocks", "rows"])
@pytest.mark.sampled
def test_experts_in_fp8_are_those_of_the_definition(m: int, by_rows: bool, fp8_type: str) -> None:
    x, *weights = operands(m, (3, 2, 256, 128), torch.float32)
    weights[0] *= torch.logspace(-1, 1, 256, device=DEVICE)[:, None]  # rows of very different sizes
    inputs = (x, *(in_fp8(weight, by_rows) for weight in weights), *routed(m, 3, 2, torch.float32))
    found, expected = kernels.experts_mlp(*inputs), reference.experts_mlp(*inputs)
    error = (found.float() - expected).norm() / expected.norm()
    # sums in another order may be quantized to an adjacent value; the interpreter's rounding to fp8 loses carries
    assert error < (0.003 if DEVICE == "cuda" or fp8_type == "uint8" else 0.15)
    if not by_rows:
        rows = QuantizedRows(x, *fp8_blocks.quantize_groups(x))
        assert torch.equal(kernels.experts_mlp(rows, *inputs[1:]), found), "as if it had quantized them itself"
        assert torch.equal(reference.experts_mlp(rows, *inputs[1:]), expected)


@pytest.mark.parametrize("m", [20, 70])
def test_experts_with_no_rows_or_all_rows_are_exact(m: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "LONG", 32)  # an expert of all rows has two programs
    inputs = operands(m, (6, 2, 32, 16), torch.float32)
    experts = torch.tensor([[4, 1]], dtype=torch.int32, device=DEVICE).repeat(m, 1)
    weights = torch.rand(m, 2, device=DEVICE)
    for at in (0, m // 2):  # rows with experts of their own
        experts[at] = torch.tensor([1, 5], device=DEVICE)
    routing = weights, experts
    torch.testing.assert_close(kernels.experts_mlp(*inputs, *routing), reference.experts_mlp(*inputs, *routing))


@pytest.mark.usefixtures("fp8_type")
@pytest.mark.parametrize(
    ("shape", "form"),
    [
        ((6, 2, 40, 24), "dense"),
        ((6, 2, 96, 32), "mxfp4"),
        ((3, 2, 128, 128), "blocks"),
        ((3, 2, 128, 128), "rows"),
        *((shape, "blocks") for shape in ON_GPU),
        *((shape, "mxfp4") for shape in ON_GPU[:1]),
    ],
)
@pytest.mark.sampled
def test_row_bits_do_not_depend_on_batch_size(shape: tuple[int, int, int, int], form: str) -> None:
    """Checks the experts' outputs of a row and their sum: alone, padded and gathered."""
    dtype = DTYPES[-1]
    (x, *matrices), routing = operands(128, shape, dtype), routed(128, *shape[:2], dtype)
    quantize: Callable[[Tensor], Weight] = {
        "dense": lambda matrix: matrix,
        "mxfp4": Mxfp4Weight.of,
        "blocks": in_fp8,
        "rows": functools.partial(in_fp8, by_rows=True),
    }[form]
    weights = [quantize(matrix) for matrix in matrices]
    whole = kernels.experts_mlp(x, *weights, *routing)
    norm = torch.ones(shape[2], device=DEVICE, dtype=dtype)
    total, _ = add_rms_norm(x, whole, norm, 1e-6)
    for rows in (slice(0, 1), slice(5, 22), slice(5, 37), slice(5, 38), slice(63, 128), slice(127, 128)):
        found = kernels.experts_mlp(x[rows], *weights, *(t[rows] for t in routing))
        assert torch.equal(found, whole[:, rows]), rows
        assert torch.equal(add_rms_norm(x[rows], found, norm, 1e-6)[0], total[rows]), rows


@pytest.mark.gpu
@pytest.mark.hopper
@pytest.mark.parametrize("m", [17, 40, 128, 129, 256, 1024, 2048])
@pytest.mark.parametrize("shape", [(257, 9, 2048, 512), (128, 8, 2048, 768), (5, 3, 256, 128)], ids=str)
def test_streamed_experts_have_the_bits_of_gathered_ones(shape: tuple[int, int, int, int], m: int) -> None:
    x, *matrices = operands(m, shape, torch.bfloat16)
    gate_up, down = (in_fp8(matrix) for matrix in matrices)
    weights, chosen = routed(m, *shape[:2], torch.bfloat16, shared=shape[0] == 257)
    assert hopper.experts_fit(x, gate_up, down)
    expected = kernels.experts_mlp(x, gate_up, down, weights, chosen)
    operand: Operand
    for operand in (x, QuantizedRows(x, *fp8_blocks.quantize_groups(x))):
        for cut in (None, hopper.Cut(16, 2), hopper.Cut(64, 3)):
            assert torch.equal(hopper.launch_experts(operand, gate_up, down, weights, chosen, cut), expected), cut


@pytest.mark.gpu
@pytest.mark.hopper
def test_streamed_experts_may_have_all_rows_or_none() -> None:
    x, *matrices = operands(300, (6, 2, 256, 128), torch.bfloat16)
    gate_up, down = (in_fp8(matrix) for matrix in matrices)
    chosen = torch.tensor([[4, 1]], dtype=torch.int32, device=DEVICE).repeat(300, 1)
    chosen[150:] = torch.tensor([1, 5], device=DEVICE)
    weights = torch.rand(300, 2, device=DEVICE)
    expected = kernels.experts_mlp(x, gate_up, down, weights, chosen)
    for _ in range(20):
        assert torch.equal(hopper.launch_experts(x, gate_up, down, weights, chosen), expected)


ROUTERS = [(5, 3, 1), (128, 8, 4), (256, 10, 2), (3, 3, 1)]  # E, k, partial sums


@pytest.mark.parametrize(
    ("shared", "normalized", "router", "groups", "dtype"),
    in_turn([
        *itertools.product((0, 1, 4), (False, True), ROUTERS, [None]),
        *itertools.product((0, 2), (False, True), ROUTERS[1:2], [(1, 1), (4, 2), (8, 1)]),
    ]),
)  # fmt: skip
def test_the_likeliest_experts_are_those_of_the_definition(
    shared: int, normalized: bool, router: tuple[int, int, int], groups: tuple[int, int] | None, dtype: torch.dtype
) -> None:
    (count, top, parts), width = router, router[0] + (shared > 0 and groups is None)
    logits = 3 * randn(parts, 7, width + 5)[:, :, :width]  # columns of a wider product
    sigmoid = SigmoidRouting(0.3 * randn(count) - 1.0, *groups, scale=2.5) if groups else None
    scales = randn(count, dtype=dtype) if normalized and not shared else None
    how = {"normalized": normalized, "shared": shared, "sigmoid": sigmoid, "scales": scales}
    weights, experts = kernels.top_experts(logits, dtype, top, **how)
    expected, chosen = reference.top_experts(logits, dtype, top, **how)
    assert experts.dtype == torch.int32 and torch.equal(experts, chosen)
    torch.testing.assert_close(weights, expected, rtol=4 * torch.finfo(dtype).eps, atol=1e-7)
    assert torch.equal(weights, weights.to(dtype).float()), "rounded"
    assert (experts[:, top:] == count + torch.arange(shared, device=DEVICE)).all()


def test_equal_sigmoids_are_ordered_by_their_logits() -> None:
    logits = torch.tensor([[[20.0, 30.0, 5.0, 25.0], [-110.0, -300.0, -120.0, -105.0]]], device=DEVICE)
    for module in (kernels, reference):
        how = {"normalized": False, "shared": 1, "sigmoid": SigmoidRouting(None)}
        weights, experts = module.top_experts(logits, torch.float32, 2, **how)
        assert experts.tolist() == [[1, 3, 4], [3, 0, 4]]
        assert torch.equal(weights, torch.tensor([[1.0, 1.0, 1.0], [0.0, 0.0, 1.0]], device=DEVICE))


def test_tied_experts_are_chosen_by_lowest_index() -> None:
    logits = torch.zeros(1, 2, 40, device=DEVICE)
    logits[0, 1, [30, 9, 33]] = 1.0
    _, experts = kernels.top_experts(logits, torch.float32, 4, normalized=True, shared=False)
    assert experts.tolist() == [[0, 1, 2, 3], [9, 30, 33, 0]]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_experts_are_valid_and_distinct_for_any_row(value: float) -> None:
    logits = randn(2, 3, 6)
    logits[0, 1, 4] = value
    logits[1, 2] = value
    for module, sigmoid in itertools.product((kernels, reference), (None, SigmoidRouting(randn(6), 3, 2))):
        top = 4 if sigmoid else 5
        weights, experts = module.top_experts(logits, torch.float32, top, normalized=True, shared=0, sigmoid=sigmoid)
        assert all(len({*row} & {*range(6)}) == top for row in experts.tolist())
        assert weights[0].isfinite().all()
        if sigmoid is None:
            assert weights[2].isnan().all() and weights[1].isnan().all() == (value != -math.inf)
