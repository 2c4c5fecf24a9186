"""DSpine's kernels against float64 and their definitions, on the interpreter where there is no GPU."""

import pytest
import torch
from kernel_inputs import DEVICE, EPS, assert_as_exact_as_torch, guarded, in_turn
from torch import Tensor

from dflash_toolkit.kernels import reference
from dflash_toolkit.kernels.triton import slots, walk

# requests, block, candidates, channels, size of a message
SHAPES = [(2, 5, 16, 96, 24), (1, 8, 3, 40, 33), (3, 2, 16, 130, 64)]
LARGE = [(8, 16, 16, 896, 512), (1, 16, 16, 4096, 512), (5, 7, 16, 5120, 512)] if DEVICE == "cuda" else []
CASES = in_turn([(shape,) for shape in [*SHAPES, *LARGE]])
Shape = tuple[int, int, int, int, int]


def rows(*shape: int, dtype: torch.dtype) -> Tensor:
    return guarded(torch.randn(shape).to(dtype))


def double(*tensors: Tensor) -> list[Tensor]:
    return [tensor.double() for tensor in tensors]


@pytest.mark.parametrize(("shape", "dtype"), CASES)
def test_messages_come_from_the_slot_before_in_the_block(shape: Shape, dtype: torch.dtype) -> None:
    batch, block, _, _, m = shape
    projected, anchors, bias = (rows(*s, dtype=dtype) for s in ((batch * block, 3 * m), (batch, 2 * m), (m,)))
    found = slots.slot_messages(projected, anchors, bias, block)
    exact = torch.zeros(batch * block, m, dtype=torch.float64, device=DEVICE)
    p, a, b = double(projected, anchors, bias)
    for row in range(batch * block):
        if row % block:
            gate, message = (a[row // block] if row % block == 1 else p[row - 1, m:]).chunk(2)
            exact[row] = torch.sigmoid(p[row, :m] + gate + b) * message
    assert_as_exact_as_torch(found, reference.slot_messages(projected, anchors, bias, block), exact)
    assert torch.equal(slots.slot_messages(projected[-block:], anchors[-1:], bias, block), found[-block:])


@pytest.mark.parametrize(("shape", "dtype"), CASES)
def test_every_pair_gets_the_message_of_its_token(shape: Shape, dtype: torch.dtype) -> None:
    batch, block, count, _, m = shape
    pairs = batch * (block - 1) * count
    projected, before, bias = (rows(*s, dtype=dtype) for s in ((batch * block, 3 * m), (pairs, 2 * m), (m,)))
    found = slots.pair_messages(projected, before, bias, block)
    p, q, b = double(projected, before, bias)
    receivers = p.view(batch, block, -1)[:, 1:, :m].reshape(-1, m).repeat_interleave(count, 0)
    exact = torch.sigmoid(receivers + q[:, :m] + b) * q[:, m:]
    assert_as_exact_as_torch(found, reference.pair_messages(projected, before, bias, block), exact)


@pytest.mark.parametrize(("shape", "dtype"), CASES)
def test_injections_are_scaled_by_the_rows_length_and_normed(shape: Shape, dtype: torch.dtype) -> None:
    batch, block, _, d, _ = shape
    x, weight = rows(batch * block, d, dtype=dtype), rows(d, dtype=dtype)
    sums = guarded(torch.randn(3, batch * block, d) / 2)
    found = slots.inject_rms_norm(x, sums, weight, EPS)
    torchs = reference.inject_rms_norm(x, sums, weight, EPS)
    (wide,) = double(x)
    total = wide + wide.norm(dim=1, keepdim=True) / d**0.5 * sums.double().sum(0)
    normed = total * torch.rsqrt(total.pow(2).mean(1, keepdim=True) + EPS) * weight.double()
    for ours, theirs, exact in zip(found, torchs, (total, normed), strict=True):
        assert_as_exact_as_torch(ours, theirs, exact)


@pytest.mark.parametrize(("shape", "dtype"), CASES)
def test_pair_scores_are_products_of_refined_rows(shape: Shape, dtype: torch.dtype) -> None:
    batch, block, count, d, _ = shape
    k = block - 1
    x, weight = rows(batch * block, d, dtype=dtype), rows(d, dtype=dtype)
    written, head = rows(batch * k * count, d, dtype=dtype), rows(200, d, dtype=dtype) / d**0.5
    candidates = torch.randint(200, (batch, k, count), device=DEVICE)
    arguments = x, written, weight, EPS, head, candidates, block
    found = slots.pair_scores(*arguments)
    h, added, w, rows_of = double(x, written, weight, head)
    h = h.view(batch, block, 1, d)[:, 1:]
    refined = h + h.norm(dim=-1, keepdim=True) / d**0.5 * added.view(batch, k, count, d)
    refined = refined * torch.rsqrt(refined.pow(2).mean(-1, keepdim=True) + EPS) * w
    exact = rows_of[candidates] @ refined.mT
    # rows are rounded before they are multiplied, and sums are long
    slack = max(4, d**0.5) * torch.finfo(dtype).eps * exact.abs().max().item()
    assert_as_exact_as_torch(found, reference.pair_scores(*arguments), exact, slack)
    alone = x[-block:], written[-k * count :], weight, EPS, head, candidates[-1:], block
    assert torch.equal(slots.pair_scores(*alone), found[-1:])


@pytest.mark.parametrize(("shape", "dtype"), in_turn([((70, 50, 90),), ((200, 130, 64),), ((1, 3, 5),)]))
def test_products_of_many_rows_do_not_depend_on_their_number(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    m, n, k = shape
    x, weight = rows(m, k, dtype=dtype), rows(n, k, dtype=dtype) / k**0.5
    found = slots.linear_many_rows(x, weight)
    assert_as_exact_as_torch(found, reference.linear_many_rows(x, weight), x.double() @ weight.double().T)
    assert torch.equal(slots.linear_many_rows(x[: m // 2 + 1], weight), found[: m // 2 + 1])


@pytest.mark.parametrize(("batch", "k", "count"), [(3, 7, 16), (1, 15, 5), (2, 1, 1)])
def test_walks_over_pairs_are_those_of_the_definition(batch: int, k: int, count: int) -> None:
    scores = guarded(torch.randn(batch, k, count, count).mul(3).round())  # with equal scores
    scores[0, 0, :, 0] = float("nan") if batch > 2 else 1.0
    candidates = torch.randint(1000, (batch, k, count), device=DEVICE)
    found = walk.walk_pairs(scores, candidates)
    assert torch.equal(found, reference.walk_pairs(scores.nan_to_num(-1e9), candidates))
    place = torch.zeros(batch, dtype=torch.int64, device=DEVICE)
    for slot in range(k):
        place = scores[torch.arange(batch), slot, :, place].nan_to_num(-1e9).argmax(1)
        assert torch.equal(found[:, slot], candidates[torch.arange(batch), slot, place])
    temperature = torch.tensor([0.0, 0.7, 1.3][:batch], device=DEVICE)
    uniform = torch.rand(batch, k, dtype=torch.float64, device=DEVICE)
    tokens, q = walk.sampled_walk_pairs(scores, candidates, temperature, uniform)
    theirs, mass = reference.sampled_walk_pairs(scores.nan_to_num(-1e9), candidates, temperature, uniform)
    sure = slice(1 if batch > 2 else 0, None)  # a row without a request may hold NaN; its tokens are candidates too
    assert torch.equal(tokens[sure], theirs[sure])
    torch.testing.assert_close(q[sure], mass[sure], rtol=1e-5, atol=1e-6)
    assert (tokens[..., None] == candidates).any(-1).all() and (found[..., None] == candidates).any(-1).all()
