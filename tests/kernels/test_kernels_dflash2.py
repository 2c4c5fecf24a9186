"""The kernels of DFlash 2 against float64 and their definitions, on the interpreter where there is no GPU."""

import math
from typing import Any
from unittest.mock import patch

import pytest
import torch
from kernel_inputs import DEVICE, assert_as_exact_as_torch, guarded, in_turn, operands
from kernel_inputs import fp8_type as fp8_type
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dflash_toolkit.kernels import convolve as training
from dflash_toolkit.kernels import gpu, reference
from dflash_toolkit.kernels.features import features_of
from dflash_toolkit.kernels.formats import RowScaledFp8
from dflash_toolkit.kernels.loss_terms import PLAIN, LogitScale
from dflash_toolkit.kernels.triton import convolution, linear, norm, row_top
from dflash_toolkit.kernels.triton.walk import sampled_walk, walk

EPS = 1e-6

# ---- the convolution ---------------------------------------------------------------------------------
# blocks, rows of a block, channels, channels of a group, taps
SHAPES = [(3, 5, 40, 8, 2), (1, 7, 36, 3, 3), (2, 2, 1040, 16, 1), (3, 16, 64, 16, 2), (9, 1, 24, 1, 2)]
LARGE = [(90, 16, 896, 16, 2), (8, 16, 4096, 16, 2), (5, 8, 5120, 16, 2)] if DEVICE == "cuda" else []


def inputs_of(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """x [M, D] and base between NaN; dynamic as the middle of a wider matrix of NaN."""
    blocks, size, d, group, taps = shape
    width = taps * d // group
    wide = torch.full((blocks * size, width + 6), math.nan, dtype=dtype, device=DEVICE)
    wide[:, 3:-3] = torch.randn(blocks * size, width)
    return guarded(torch.randn(blocks * size, d).to(dtype)), wide[:, 3:-3], guarded(torch.randn(taps, d).to(dtype))


def exact_conv(x: Tensor, dynamic: Tensor, base: Tensor, block: int) -> Tensor:
    """The contract's sum in float64, row by row; differentiable."""
    x, dynamic, base = x.double(), dynamic.double(), base.double()
    taps, d = base.shape
    rows = []
    for t in range(len(x)):
        own = dynamic[t].view(taps, -1)
        kernel = base + own.repeat_interleave(d // own.shape[1], dim=1)
        rows.append(sum(kernel[tau] * x[t - tau] for tau in range(min(taps, t % block + 1))))
    return torch.stack(rows)


@pytest.mark.parametrize(("shape", "dtype"), in_turn([(shape,) for shape in [*SHAPES, *LARGE]]))
def test_the_convolution_stays_inside_its_block(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    inputs, block = inputs_of(shape, dtype), shape[1]
    found = convolution.block_conv(*inputs, block)
    assert_as_exact_as_torch(found, reference.block_conv(*inputs, block), exact_conv(*inputs, block))
    if shape[0] > 1:  # a block alone has the same bits
        x, dynamic, base = inputs
        assert torch.equal(convolution.block_conv(x[block:], dynamic[block:], base, block), found[block:])


@pytest.mark.parametrize(("shape", "dtype"), in_turn([(shape,) for shape in [*SHAPES[:2], *LARGE]]))
def test_convolved_partial_sums_are_added_and_normed(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, dynamic, base = inputs_of(shape, dtype)
    (m, d), block = x.shape, shape[1]
    sums = guarded(torch.randn(3, m, d))
    wide = torch.full((2, m, dynamic.shape[1] + 5), math.nan, device=DEVICE)
    wide[:, :, :-5] = torch.stack([dynamic.float() + 1, torch.full(dynamic.shape, -1.0, device=DEVICE)])
    own, weight = wide[:, :, :-5], guarded(torch.randn(d).to(dtype))
    y = convolution.block_conv(sums, own, base, block)
    assert_as_exact_as_torch(
        y,
        reference.block_conv(sums, own, base, block),
        exact_conv(sums.double().sum(0), own.double().sum(0), base, block),
    )
    tap = torch.full((m, d + 3), math.nan, dtype=dtype, device=DEVICE)
    found = convolution.conv_add_rms_norm(x, sums, own, base, block, weight, EPS, tap[:, :-3])
    total, normed = norm.add_rms_norm(x, y[None], weight, EPS)
    assert torch.equal(found[0], total) and torch.equal(tap[:, :-3], total) and tap[:, -3:].isnan().all()
    torch.testing.assert_close(found[1], normed, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
    alone = convolution.conv_add_rms_norm(
        x[-block:], sums[:, -block:].contiguous(), own[:, -block:], base, block, weight, EPS
    )
    assert all(torch.equal(a, b[-block:]) for a, b in zip(alone, found, strict=True))


@pytest.mark.parametrize(("shape", "dtype"), in_turn([(shape,) for shape in [*SHAPES, *LARGE]]))
def test_gradients_of_the_convolution_are_those_of_its_definition(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    inputs, block = inputs_of(shape, dtype), shape[1]
    d_out = guarded(torch.randn(inputs[0].shape).to(dtype))
    found = convolution.block_conv_backward(d_out, *inputs, block)
    leaves = [t.double().requires_grad_() for t in inputs]
    exact_conv(*leaves, block).backward(d_out.double())
    theirs = [t.detach().clone().requires_grad_() for t in inputs]
    reference.block_conv(*theirs, block).backward(d_out)
    for ours, torchs, exact in zip(found, theirs, leaves, strict=True):
        assert torchs.grad is not None and exact.grad is not None
        assert_as_exact_as_torch(ours, torchs.grad, exact.grad)


def sequences(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """x [2, 12, D], coefficients as the projection leaves them and base, as leaves."""
    parts = torch.randn(2, 12, 48), torch.randn(2, 12, 2, 2, 3), torch.randn(2, 48)
    return [parts[0].to(DEVICE, dtype).requires_grad_(), *(t.to(DEVICE).requires_grad_() for t in parts[1:])]


def test_sequences_of_blocks_are_convolved_as_rows_are() -> None:
    x, dynamic, base = sequences(torch.float16)
    found = training.convolve(x, dynamic[:, :, 1], base, 4)
    assert found.dtype == torch.float16
    with torch.autocast(DEVICE, torch.bfloat16):
        assert training.convolve(x.float(), dynamic[:, :, 1], base, 4).dtype == torch.bfloat16
    rows = x.detach().flatten(0, 1), dynamic.detach()[:, :, 1].flatten(2).flatten(0, 1), base.detach()
    torch.testing.assert_close(found.flatten(0, 1), reference.block_conv(*rows, 4).half(), rtol=1e-3, atol=1e-3)


def test_training_operator_registers_gradient_and_shapes() -> None:
    x, dynamic, base = sequences()
    rows = x.flatten(0, 1), dynamic[:, :, 0].flatten(2).flatten(0, 1), base
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")  # the others compile for seconds
    torch.library.opcheck(training._convolve, (*rows, 4), test_utils=checks)
    torch.library.opcheck(training._convolve_backward, (*(t.detach() for t in (rows[0], *rows)), 4), test_utils=checks)


@pytest.mark.gpu
@pytest.mark.parametrize("recompute", [False, True])
def test_gradients_are_equal_compiled_and_recomputed(recompute: bool) -> None:
    leaves = sequences()

    def layer(x: Tensor, dynamic: Tensor, base: Tensor) -> Tensor:
        y = training.convolve(x * 2, dynamic[:, :, 0], base, 4)
        return training.convolve(y.sin(), dynamic[:, :, 1], base, 4)

    def run(function: Any) -> list[Tensor]:
        out = checkpoint(function, *leaves, use_reentrant=False) if recompute else function(*leaves)
        return [out, *torch.autograd.grad(out.square().sum(), leaves)]

    definition = [t.detach().cpu().requires_grad_() for t in leaves]
    out = layer(*definition)
    expected = [out, *torch.autograd.grad(out.square().sum(), definition)]
    eager = run(layer)
    for found in (eager, run(torch.compile(layer))):
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-4, atol=1e-4)
    assert all(torch.equal(a, b) for a, b in zip(eager, run(layer), strict=True))


@pytest.mark.gpu
def test_the_base_s_gradient_over_many_rows_is_summed_in_one_order() -> None:
    inputs, block = inputs_of((4096, 16, 896, 16, 2), torch.bfloat16), 16
    d_out = torch.randn_like(inputs[0])
    first, *others = (convolution.block_conv_backward(d_out, *inputs, block) for _ in range(3))
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))
    x = inputs[0].double().unflatten(0, (-1, block))
    x[:, -1] = 0
    exact = torch.stack([d_out.double() * inputs[0].double(), d_out.double() * x.roll(1, 1).flatten(0, 1)]).sum(1)
    torch.testing.assert_close(first[2].double(), exact, rtol=2.0**-7, atol=0.1)


# ---- the top logits -----------------------------------------------------------------------------------


def check_top(x: Tensor, weight: Tensor, found: tuple[Tensor, Tensor], count: int) -> None:
    """Checks that columns are distinct, sorted by logit, have their own logits, and that no larger one is missing."""
    values, ids = found
    assert (values.dtype, ids.dtype, values.shape) == (torch.float32, torch.int64, (len(x), count))
    logits = x.double() @ weight.double().T
    worst = (reference.linear(x, weight).double() - logits).abs().max()
    slack = 2 * worst + 2 * torch.finfo(x.dtype).eps * logits.abs().max()
    assert all(len(set(row)) == count for row in ids.tolist())
    assert ((logits.gather(1, ids) - values).abs() <= slack).all()
    assert ((logits.topk(count).values - values).abs() <= slack).all()
    assert (values[:, 1:] <= values[:, :-1]).all()


@pytest.mark.parametrize(
    ("n", "k", "count", "m", "dtype"),
    in_turn([(300, 300, 16, 3), (300, 48, 1, 17), (20, 24, 16, 5), (40, 24, 40, 1), (1100, 16, 5, 20), (16, 16, 16, 2)])
    + [(16384, 512, 16, m, dtype) for m in (1, 16, 128) for dtype in (torch.bfloat16,) if DEVICE == "cuda"],
)
def test_the_top_logits_are_the_largest(n: int, k: int, count: int, m: int, dtype: torch.dtype) -> None:
    x, weight, _ = operands(m, n, k, dtype)
    found = linear.linear_top(x, weight, count)
    check_top(x, weight, found, count)
    assert torch.equal(found[1][:, 0], linear.linear_argmax(x, weight))
    assert all(torch.equal(a, b[-1:]) for a, b in zip(linear.linear_top(x[-1:], weight, count), found, strict=True))


@pytest.mark.parametrize(("sign", "m", "dtype"), in_turn([(1, 3), (-1, 17)]))
def test_tied_logits_are_sorted_by_lowest_column(sign: int, m: int, dtype: torch.dtype) -> None:
    # small integers: the logits are exact, so that many columns tie, within a tile and across tiles
    x = guarded(torch.randint(1, 3, (m, 40)).to(dtype))
    weight = guarded(sign * torch.randint(1, 3, (30, 40)).to(dtype).repeat(11, 1))
    weight[100:103] = 0  # zeros of both signs, which are equal
    weight[101] = -weight[101]
    values, ids = linear.linear_top(x, weight, 32)
    logits = (x.double() @ weight.double().T).tolist()
    assert ids.tolist() == [sorted(range(330), key=lambda n: (-row[n], n))[:32] for row in logits]
    assert values.tolist() == [sorted(row, reverse=True)[:32] for row in logits]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_merged_tiles_never_drop_a_tied_top_column(dtype: torch.dtype) -> None:
    x = guarded(torch.randint(1, 3, (3, 8)).to(dtype))
    weight = guarded(torch.randint(-1, 2, (1100, 8)).to(dtype))  # nine tiles, and ties of the best in all of them
    logits = (x.double() @ weight.double().T).tolist()
    with patch.object(linear, "merge_top", wraps=linear.merge_top) as merge:
        _, ids = linear.linear_top(x, weight, 4)
    assert ids.tolist() == [sorted(range(1100), key=lambda n: (-row[n], n))[:4] for row in logits]
    assert DEVICE == "cuda" or merge.call_args.args[1].min() < 4


def test_ties_of_the_top_are_those_of_logits_in_the_models_dtype() -> None:
    # 2048 + 1 is no fp16 number: as a stored logit it ties with 2048, and the lower column comes first
    x = guarded(torch.ones(2, 32, dtype=torch.float16))
    weight = guarded(torch.zeros(200, 32, dtype=torch.float16))
    weight[20, :2] = 1024
    weight[150, :3] = torch.tensor([1024, 1024, 1])
    for found, expected in zip(linear.linear_top(x, weight, 4), reference.linear_top(x, weight, 4), strict=True):
        assert torch.equal(found, expected)
    assert found.tolist() == [[20, 150, 0, 1]] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_padding_rows_get_valid_columns(dtype: torch.dtype) -> None:
    x, weight, _ = operands(3, 140, 32, dtype)
    expected = linear.linear_top(x, weight, 16)
    x[1] = math.nan
    values, ids = linear.linear_top(x, weight, 16)
    assert ((ids >= 0) & (ids < 140)).all()
    for row in (0, 2):
        assert torch.equal(ids[row], expected[1][row]) and torch.equal(values[row], expected[0][row])


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """For more than 16 rows, parts of 512 columns, in tiles of 256, as the interpreter is slow."""
    monkeypatch.setattr(gpu, "MAX_ROWS", 16)
    for module, name, size in ((row_top, "TILE", 256), (row_top, "TILE_LANES", 64), (gpu, "TOP_COLUMNS", 512)):
        monkeypatch.setattr(module, name, size)


@pytest.mark.parametrize(
    ("m", "n", "count", "dtype"),
    [
        *in_turn([(17, 1100, 16), (20, 1030, 8), (33, 300, 16), (17, 1024, 40)], [torch.bfloat16, torch.float32]),
        *[(19, 1280, 5, torch.float16), (129, 520, 8, torch.bfloat16), (24, 600, 2, torch.float32)],
    ],
)
@pytest.mark.usefixtures("small_parts")
@pytest.mark.sampled
def test_top_of_many_rows_equals_top_of_column_parts(m: int, n: int, count: int, dtype: torch.dtype) -> None:
    # small integers: the logits are exact, so that many columns tie, within a part and across parts
    x = guarded(torch.randint(-2, 3, (m, 40)).to(dtype))
    weight = guarded(torch.randint(-2, 3, (n, 40)).to(dtype))
    weight[n // 2] = 0  # zeros of both signs, which are equal
    weight[n // 2 + 1] = -weight[n // 2]
    exact = (reference.linear_top(x.double(), weight.double(), count), gpu.linear_top(x, weight, count))
    for expected, found in zip(*exact, strict=True):
        assert torch.equal(expected, found)
    x, weight, _ = operands(m, n, 48, dtype)
    check_top(x, weight, gpu.linear_top(x, weight, count), count)


@pytest.mark.usefixtures("small_parts")
def test_ties_of_many_rows_are_those_of_logits_in_the_models_dtype() -> None:
    x = guarded(torch.ones(17, 32, dtype=torch.bfloat16))
    weight = guarded(torch.zeros(600, 32, dtype=torch.bfloat16))
    weight[20, :2] = 128
    weight[550, :3] = torch.tensor([128, 128, 0.5])  # 256.5 is no number of bf16
    assert gpu.linear_top(x, weight, 4)[1].tolist() == [[20, 550, 0, 1]] * 17


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.usefixtures("small_parts")
def test_padding_rows_among_many_get_valid_columns(dtype: torch.dtype) -> None:
    x, weight, _ = operands(18, 700, 32, dtype)
    expected = gpu.linear_top_lse(x, weight, 16, PLAIN)
    x[::2] = math.nan
    found = gpu.linear_top_lse(x, weight, 16, PLAIN)
    assert ((found[1] >= 0) & (found[1] < 700)).all() and found[2][::2].isnan().all()
    assert all(torch.equal(a[1::2], b[1::2]) for a, b in zip(expected, found, strict=True))


@pytest.mark.parametrize("scale", [PLAIN, LogitScale(0.3), LogitScale(1.5, 4.0)], ids=["plain", "scaled", "capped"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.usefixtures("small_parts")
@pytest.mark.sampled
def test_top_of_many_rows_includes_the_log_sum_exp(dtype: torch.dtype, scale: LogitScale) -> None:
    x, weight, _ = operands(19, 1100, 40, dtype)
    x[0] = 0
    found = gpu.linear_top_lse(x, weight, 8, scale)
    top, ids = gpu.linear_top(x, weight, 8)
    scale.apply_(top)
    assert torch.equal(found[0], top) and torch.equal(found[1], ids)
    every = x.double() @ weight.double().T
    scale.apply_(every)
    eps = 4 * torch.finfo(dtype).eps * every.abs().max().item()
    torch.testing.assert_close(found[2].double(), every.logsumexp(-1), rtol=1e-5, atol=eps)
    torch.testing.assert_close(found[2], reference.linear_top_lse(x, weight, 8, scale)[2], rtol=1e-5, atol=eps)


@pytest.mark.usefixtures("small_parts", "fp8_type")
@pytest.mark.parametrize("fp8_type", ["fp8"], indirect=True)
def test_fp8_head_quantizes_many_rows_once() -> None:
    numbers, head = torch.randint(-7, 8, (2, 1104, 96)).float()
    numbers[:, 0], head[:, 1] = 7, 7  # every row is in the format exactly
    x, weight = (numbers[:20] / 64).to(DEVICE, torch.bfloat16), RowScaledFp8.of(head.to(DEVICE) / 64)
    with patch.object(gpu, "quantize_rows", wraps=gpu.quantize_rows) as quantize:
        values, ids, lse = gpu.linear_top_lse(x, weight, 16, PLAIN)
    assert quantize.call_count == features_of(x.device).cublas_fp8_rows
    every = x.double() @ weight.dense(torch.float64).T
    torch.testing.assert_close(values.double(), every.topk(16).values, rtol=2.0**-6, atol=0)
    torch.testing.assert_close(values.double(), every.gather(1, ids), rtol=2.0**-6, atol=0)
    torch.testing.assert_close(lse.double(), every.logsumexp(-1), rtol=1e-3, atol=1e-3)
    exact = gpu.linear_top(x.float(), weight, 16)[0]  # rows in fp32 are not quantized
    torch.testing.assert_close(exact.double(), every.topk(16).values, rtol=1e-5, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("quantized", [False, True], ids=["bf16", "fp8"])
def test_the_top_of_many_rows_is_captured_and_always_the_same(quantized: bool) -> None:
    x, dense = (torch.randn(n, 1024, device=DEVICE, dtype=torch.bfloat16) for n in (256, 151936))
    weight = RowScaledFp8.of(dense) if quantized else dense
    logits = torch.cat([gpu.linear(x, part) for part in weight.split(gpu.TOP_COLUMNS)], 1)
    gpu.linear_top_lse(x, weight, 16, PLAIN)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = gpu.linear_top_lse(x, weight, 16, PLAIN)
    for _ in range(3):
        for part in captured:
            part.fill_(-1)
        graph.replay()
        ordered = logits.float().sort(dim=-1, descending=True, stable=True)
        assert torch.equal(captured[0], ordered.values[:, :16]) and torch.equal(captured[1], ordered.indices[:, :16])
        torch.testing.assert_close(captured[2], logits.float().logsumexp(-1), rtol=1e-5, atol=1e-4)


def test_the_top_of_a_head_in_fp8_has_the_values_of_its_logits() -> None:
    # with 7 as its largest every row is in the format exactly, so that nothing is rounded but the logits
    numbers, head = torch.randint(-7, 8, (2, 300, 96)).float()
    numbers[:, 0], head[:, 1] = 7, 7
    x = (numbers[:20] * 2.0 ** torch.randint(-3, 4, (20, 1))).to(DEVICE, torch.bfloat16)
    weight = RowScaledFp8.of(head.to(DEVICE))
    found = gpu.linear_top(x, weight, 16)
    logits = x.double() @ weight.dense(torch.float64).T
    best = logits.topk(16).values
    assert all(len(set(row)) == 16 for row in found[1].tolist())
    torch.testing.assert_close(found[0].double(), logits.gather(1, found[1]), rtol=2.0**-6, atol=0)
    torch.testing.assert_close(found[0].double(), best, rtol=2.0**-6, atol=0)
    assert all(torch.equal(a, b[3:4]) for a, b in zip(gpu.linear_top(x[3:4], weight, 16), found, strict=True))
    values, _ = gpu.linear_top(x.float(), weight, 16)  # rows in fp32 are not quantized
    torch.testing.assert_close(values.double(), best, rtol=1e-5, atol=0)


# ---- the walk -------------------------------------------------------------------------------------------


def slots_of(batch: int, slots: int, count: int, rank: int, dtype: torch.dtype, vocab: int = 60) -> list[Tensor]:
    """A walk's arguments; slots are those after the first of longer blocks, which are NaN or no token."""
    state = torch.full((batch, slots + 1, rank), math.nan)
    unary = torch.full((batch, slots + 1, count), math.nan)
    candidates = torch.full((batch, slots + 1, count), -1)
    state[:, 1:], unary[:, 1:] = torch.randn(batch, slots, rank), torch.randn(batch, slots, count)
    candidates[:, 1:] = torch.rand(batch, slots, vocab).argsort(-1)[..., :count]
    books = [guarded(torch.randn(vocab, rank).to(dtype)) for _ in range(2)]
    parts = state.to(DEVICE, dtype), unary.to(DEVICE), candidates.to(DEVICE)
    return [*(part[:, 1:] for part in parts), *books, torch.randint(0, vocab, (batch,), device=DEVICE)]


@pytest.mark.parametrize(
    ("batch", "slots", "count", "rank", "dtype"),
    in_turn([(1, 7, 16, 256), (5, 3, 16, 24), (2, 1, 1, 8), (3, 15, 5, 1), (9, 4, 7, 40)]),
)
def test_walk_takes_the_best_candidate_after_the_previous(
    batch: int, slots: int, count: int, rank: int, dtype: torch.dtype
) -> None:
    state, unary, candidates, predecessors, successors, anchors = given = slots_of(batch, slots, count, rank, dtype)
    found = walk(*given)
    assert (found.dtype, found.shape) == (torch.int64, (batch, slots))
    last = anchors
    for k in range(slots):  # each step along the path that was taken, in float64
        query = predecessors[last].double() * state[:, k].double()
        terms = successors[candidates[:, k]].double() * query[:, None]
        scores = unary[:, k].double() + terms.sum(-1)
        slack = 4 * torch.finfo(torch.float32).eps * (unary[:, k].double().abs() + terms.abs().sum(-1)).amax(-1)
        at = (candidates[:, k] == found[:, k, None]).double()
        assert (at.sum(-1) == 1).all()
        assert (scores.amax(-1) - (scores * at).sum(-1) <= slack).all()
        last = found[:, k]
    assert torch.equal(walk(*(part[-1:] for part in given[:3]), *given[3:5], anchors[-1:]), found[-1:])


def test_walk_takes_the_first_of_equal_or_nan_scores() -> None:
    state, unary, candidates, predecessors, successors, anchors = slots_of(3, 4, 6, 8, torch.float32)
    unary[:, :, :2] = -1
    unary[:, :, 2:] = 5
    assert torch.equal(walk(state, unary, candidates, predecessors, 0 * successors, anchors), candidates[:, :, 2])
    unary[1], state[1] = math.nan, math.nan
    found = walk(state, unary, candidates, predecessors, 0 * successors, anchors)
    assert torch.equal(found[1], candidates[1, :, 0])
    assert torch.equal(found[[0, 2]], candidates[[0, 2], :, 2])


@pytest.mark.parametrize(("count", "rank", "dtype"), in_turn([(16, 24), (5, 256), (1, 3)]))
def test_sampled_walk_follows_its_reported_distribution(count: int, rank: int, dtype: torch.dtype) -> None:
    state, unary, candidates, predecessors, successors, anchors = given = slots_of(4, 6, count, rank, dtype)
    successors /= rank**0.5
    temperature = torch.tensor([1.0, 0.3, 0.0, 2.0], device=DEVICE)
    uniform = torch.rand(4, 9, dtype=torch.float64, device=DEVICE)[:, 2:8]
    tokens, q = sampled_walk(*given, temperature, uniform)
    last = anchors
    for k in range(6):  # each step along the path that was taken
        terms = successors[candidates[:, k]].double() * (predecessors[last].double() * state[:, k].double())[:, None]
        scores = unary[:, k].double() + terms.sum(-1)
        exact = (scores / temperature[:, None]).softmax(-1)
        exact[2] = torch.zeros_like(exact[2]).scatter(0, scores[2].argmax(-1), 1.0)
        torch.testing.assert_close(q[:, k].double(), exact, rtol=1e-4, atol=1e-6)
        place = reference.choose(q[:, k], uniform[:, k])
        last = candidates[:, k].gather(1, place[:, None])[:, 0]
        assert torch.equal(tokens[:, k], last)
    assert torch.equal(tokens[2], walk(*given)[2])
    unary[1] = math.nan  # padding
    others, _ = sampled_walk(*given, temperature, uniform)
    assert torch.equal(others[2:], tokens[2:]) and (others[1, :, None] == candidates[1]).any(-1).all()
