"""The step's Triton kernels against their definitions, on the GPU or, where there is none, in Triton's interpreter."""

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from kernel_inputs import DEVICE, DTYPES, EPS, assert_as_exact_as_torch, exact_norm, in_turn, randn
from kernel_pages import _interpretable as _interpretable
from kernel_pages import attend, check_attention, check_invariant, check_padding, check_slots, make_pages
from torch import Tensor

from dflash_toolkit.kernels import reference
from dflash_toolkit.kernels.formats import values_of
from dflash_toolkit.kernels.triton import accept, attention, layer_inputs, merge, norm

# ---- attention -------------------------------------------------------------------------------------


def test_tokens_do_not_attend_to_padding() -> None:
    check_padding(40, DTYPES[-1])


SHAPES = [  # S, heads of a group, head width, contexts, page size, window, scores
    (1, 1, 8, (0,), 16, 0, "sinks"),
    (1, 4, 128, (260,), 16, 0, ""),
    (8, 4, 64, (130,), 16, 0, ""),
    (3, 3, 40, (1, 63, 130), 128, 0, "cap"),
    (3, 1, 40, (260,), 64, 200, ""),
    (1, 7, 64, (63, 0, 130), 16, 50, "sinks"),
    (5, 7, 8, (63, 0, 1), 64, 5, ""),
    (16, 3, 128, (120,), 16, 130, "cap"),  # the block crosses the first long split's start
    (16, 7, 128, (130,), 64, 0, ""),  # two tiles of rows
    (16, 4, 64, (0, 260), 16, 0, "sinks"),
    (2, 2, 512, (70,), 16, 40, "cap"),
]
CHUNKS = [
    (7, 5, 64, (125, 260, 0), 16, -64, ""),
    (16, 7, 40, (120,), 64, -128, "sinks"),
    (3, 2, 8, (1, 130), 16, -3, ""),
]
Shape = tuple[int, int, int, tuple[int, ...], int, int, str]


BLOCKS = [(causal, dtype) for causal in (True, False) for dtype in DTYPES]  # each in turn meets a window


@pytest.mark.parametrize(
    ("shape", "way"),
    in_turn([(shape,) for shape in SHAPES], BLOCKS) + [(shape, BLOCKS[0]) for shape in CHUNKS],
    ids=str,
)
@pytest.mark.sampled
def test_attention_is_as_exact_as_torch_in_one_pass_and_in_two(shape: Shape, way: tuple[bool, torch.dtype]) -> None:
    (block, group, width, contexts, size, window, scores), (causal, dtype) = shape, way
    pages = make_pages(contexts, block, size, 2, width, dtype).scored(scores, 2 * group)
    q = randn(len(contexts) * block, 2 * group, width, dtype=dtype)
    for whole in (False, True):
        found = attend(q, pages, causal=causal, window=window, whole=whole)
        check_attention(q, pages, found, causal=causal, window=window)


WAYS = [(1, 16, "split"), (8, 2, "split"), (8, 2, "in pairs"), (9, 1, "whole"), (9, 2, "whole"), (1, 65, "whole")]


@pytest.mark.parametrize(("batch", "block", "way"), WAYS)
def test_sum_order_depends_on_the_batch_not_the_block_length(
    batch: int, block: int, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ways: list[str] = []
    real = attention._attention

    def attend(*args: Any) -> Tensor:
        whole, pairs = args[3:5]
        ways.append("whole" if whole else "in pairs" if pairs else "split")  # `whole` before all
        return real(*args)

    monkeypatch.setattr(attention, "_attention", attend)
    monkeypatch.setattr(attention, "multiprocessors", lambda _: 8 if way == "in pairs" else 132)
    pages = make_pages((5,) * batch, block, 16, 2, 16)
    q = randn(batch * block, 2 * 3, 16)
    found = attention.block_attention(q, pages.kv(), causal=True)
    check_attention(q, pages, found, causal=True)
    assert ways == [way]


CROSSINGS = [  # S, group, context, window, whole, scores: blocks that cross a tile, a split, the first long split
    (8, 4, 60, 0, False, ""),
    (8, 4, 124, 50, False, "sinks"),
    (8, 4, 124, 0, True, "cap"),
    (8, 4, 124, -128, False, ""),  # chunks
    (16, 7, 120, 0, False, ""),
    (3, 1, 0, 0, False, "cap"),
]


@pytest.mark.parametrize(("crossing", "dtype"), in_turn([(crossing,) for crossing in CROSSINGS]), ids=str)
def test_causal_slots_have_the_bits_of_plain_steps(
    crossing: tuple[int, int, int, int, bool, str], dtype: torch.dtype
) -> None:
    block, group, context, window, whole, scores = crossing
    pages = make_pages((context,), block, 16, 1, 64, dtype).scored(scores, group)
    q, slots = randn(block, group, 64, dtype=dtype), range(0, block, 3 if block < 16 else 7)
    in_block = check_slots(q, pages, slots, window=window, whole=whole)
    for k in slots:  # it depends on neither the other slots' queries nor later keys
        others = torch.arange(block, device=DEVICE) != k
        changed = replace(pages, cache=pages.cache.clone())
        changed.cache[:, pages.slots(block)[0, k + 1 :]] = randn(2, block - k - 1, 1, 64, dtype=dtype)
        asked = torch.where(others[:, None, None], randn(*q.shape, dtype=dtype), q)
        assert torch.equal(attend(asked, changed, causal=True, window=window, whole=whole)[k], in_block[k])


@pytest.mark.parametrize(("causal", "dtype"), in_turn([(True,), (False,)]), ids=str)
def test_attention_is_batch_invariant_bit_for_bit(causal: bool, dtype: torch.dtype) -> None:
    contexts = (63, 0, 200)
    q, pages = randn(3 * 3, 2 * 3, 64, dtype=dtype), make_pages(contexts, 3, 16, 2, 64, dtype)
    check_invariant(q, pages, contexts, 3, causal=causal)


@pytest.mark.parametrize("window", [50, -70], ids=["window", "chunks"])
@pytest.mark.parametrize("way", [{"whole": True}, {"whole": False}, {"far": 128}], ids=str)
def test_keys_before_the_window_are_not_read(way: dict[str, Any], window: int) -> None:
    pages, q = make_pages((260,), 3, 16, 1, 64), randn(3, 2, 64)
    found = attend(q, pages, causal=True, window=window, **way)
    check_attention(q, pages, found, causal=True, window=window)
    before = replace(pages.one(0), lengths=torch.zeros_like(pages.lengths)).slots(208)[0]  # 211, to whole tiles
    pages.cache[:, before] = math.nan
    assert torch.equal(attend(q, pages, causal=True, window=window, **way), found)


def test_slots_of_a_free_block_do_not_feel_each_others_queries() -> None:
    pages = make_pages((130,), 8, 16, 1, 64)
    q, other = randn(8, 4, 64), randn(8, 4, 64)
    asked = torch.where(torch.arange(8, device=DEVICE)[:, None, None] == 5, q, other)
    assert torch.equal(attend(asked, pages, causal=False)[5], attend(q, pages, causal=False)[5])


def test_attention_splits_cover_every_position_once() -> None:
    short, count, long = (getattr(attention, name).value for name in ("SHORT", "SHORT_SPLITS", "LONG"))
    middle = merge.MIDDLE.value
    ends = [0, *itertools.accumulate([short] * count + [middle * short] * (count // middle) + [long] * 3)]
    for reach in range(1, ends[-1] + 1):
        assert attention.splits_of(reach) == sum(end < reach for end in ends)


# ---- norm ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("wide", [True, False], ids=["fp32-parts", "own-parts"])
@pytest.mark.parametrize("parts", [0, 1, 2, 5])
@pytest.mark.parametrize(("rows", "width"), [(1, 8), (3, 40), (5, 1000), (2, 4096)])
def test_the_norm_is_that_of_the_rounded_sum_and_batch_invariant(
    rows: int, width: int, parts: int, wide: bool, dtype: torch.dtype
) -> None:
    x, weight = randn(rows, width, dtype=dtype), randn(width, dtype=dtype)
    partials = randn(parts, rows, width, dtype=torch.float32 if wide else dtype) if parts else None
    taps, before = torch.full((rows, 3, width), 7.0, dtype=dtype, device=DEVICE), x.clone()
    total, normed = norm.add_rms_norm(x, partials, weight, EPS, taps.flatten(1)[:, width : 2 * width])
    expected_total, expected = reference.add_rms_norm(x, partials, weight, EPS)
    assert torch.equal(x, before) and (total is x) == (partials is None)
    exact = x.double() if partials is None else x.double() + partials.double().sum(0)
    assert_as_exact_as_torch(total, expected_total, exact)
    assert_as_exact_as_torch(normed, reference.add_rms_norm(total, None, weight, EPS)[1], exact_norm(total, weight))
    assert_as_exact_as_torch(normed, expected, exact_norm(exact, weight))
    assert torch.equal(taps[:, 1], total) and (taps[:, ::2] == 7).all()
    alone = norm.add_rms_norm(x[-1:], None if partials is None else partials[:, -1:].contiguous(), weight, EPS)
    assert torch.equal(alone[0], total[-1:]) and torch.equal(alone[1], normed[-1:])


@pytest.mark.parametrize("normed", [True, False], ids=["normed", "not normed"])
@pytest.mark.parametrize(("rows", "width", "dtype"), in_turn([(3, 40), (2, 1000)]), ids=str)
def test_outputs_of_sublayers_are_normed_before_they_are_added(
    rows: int, width: int, dtype: torch.dtype, normed: bool
) -> None:
    x, partials, own = randn(rows, width, dtype=dtype), randn(3, rows, width), randn(width, dtype=dtype)
    weight, scalar = randn(width) if normed else None, randn(1, dtype=dtype) if normed else None
    total, after = norm.add_rms_norm(x, partials, weight, EPS, None, own, scalar)
    expected = reference.add_rms_norm(x, partials, weight, EPS, None, own, scalar)
    exact = (x.double() + exact_norm(partials.double().sum(0), own)) * (1.0 if scalar is None else scalar.double())
    assert_as_exact_as_torch(total, expected[0], exact)
    if weight is None:
        assert after is total and norm.add_rms_norm(x, None, None, EPS) == (x, x)
    else:
        assert_as_exact_as_torch(after, expected[1], exact_norm(exact, weight))
    quantized = norm.add_rms_norm_quantized(x, partials, weight, EPS, None, own, scalar)
    assert torch.equal(quantized[0], total) and torch.equal(values_of(quantized[1]), after)


@pytest.mark.parametrize(("rows", "biased", "dtype"), in_turn([(3, True), (2, False)]), ids=str)
def test_queries_of_all_heads_are_normed_together_and_keys(rows: int, biased: bool, dtype: torch.dtype) -> None:
    partials, bias = randn(2, rows, 120 + 2 * 40), randn(200) if biased else None
    q_weight, k_weight = randn(120), randn(40)
    arguments = (bias, q_weight, k_weight, EPS, dtype)
    found, expected = (ops.norm_queries_keys(partials, *arguments) for ops in (norm, reference))
    qkv = (partials.double().sum(0) + (0 if bias is None else bias.double())).to(dtype)
    exact = torch.cat([exact_norm(qkv[:, :120], q_weight), exact_norm(qkv[:, 120:160], k_weight), qkv[:, 160:]], dim=1)
    assert_as_exact_as_torch(found, expected, exact[None])
    assert torch.equal(found[:, -1:], norm.norm_queries_keys(partials[:, -1:].contiguous(), *arguments))


@pytest.mark.parametrize(("activation", "size", "dtype"), in_turn([("silu", 40), ("gelu_tanh", 256)]), ids=str)
def test_inputs_of_layers_equal_their_definitions(activation: Any, size: int, dtype: torch.dtype) -> None:
    ids = torch.tensor([5, 0, 8], device=DEVICE)
    table, projected = randn(9, 2 * size, dtype=dtype), randn(3, 2 * size, dtype=dtype)
    given = ids, table, projected, randn(size), EPS, 0.3
    inputs, expected = (each.layer_inputs(*given) for each in (layer_inputs, reference))
    torch.testing.assert_close(inputs, expected, rtol=4 * torch.finfo(dtype).eps, atol=1e-3)
    gates = randn(2, 3, size)
    found, gated = (each.gate_layer_input(gates, expected[:, 1], activation) for each in (layer_inputs, reference))
    torch.testing.assert_close(found, gated, rtol=4 * torch.finfo(dtype).eps, atol=1e-3)


@pytest.mark.parametrize(("parts", "total"), [((1e8, -1e8, 1.0), 1), ((1.0, -1e8, 1e8), 0)])
def test_parts_are_added_in_their_order(parts: tuple[float, ...], total: int) -> None:
    x, weight = torch.zeros(1, 8, device=DEVICE), torch.ones(8, device=DEVICE)
    partials = torch.tensor(parts, device=DEVICE)[:, None, None].expand(3, 1, 8).contiguous()
    assert (norm.add_rms_norm(x, partials, weight, EPS)[0] == total).all()


# ---- acceptance ------------------------------------------------------------------------------------


@pytest.mark.parametrize("forced", [False, True], ids=["matched", "forced"])
@pytest.mark.parametrize("block", [1, 2, 3, 8, 16, 64])
@pytest.mark.parametrize("batch", [1, 3, 20])
def test_accepted_tokens_and_lengths_are_those_of_the_definition(batch: int, block: int, forced: bool) -> None:
    choice, drafts = torch.randint(1 << 40, (2, batch, block), device=DEVICE)
    draft = drafts[:, 1:]  # as the runtime has it: rows are not contiguous
    for request in range(batch):  # every length of prefix, and matches after a mismatch
        agree = (request * 7 + block - 1) % block
        choice[request, : block - 1] = draft[request]
        if agree < block - 1:
            choice[request, agree] += 1
    numbers = torch.arange(batch, device=DEVICE)
    exactly = torch.randint(block, (batch,), device=DEVICE, dtype=torch.int32) if forced else None
    found, expected = [], []
    for ops, results in ((accept, found), (reference, expected)):
        lengths, last = (numbers * 100).int(), numbers - 50
        results += [*ops.accept(draft, choice, numbers % 4 != 1, lengths, last, exactly), lengths, last]
    for ours, wanted in zip(found, expected, strict=True):
        assert ours.dtype == wanted.dtype and torch.equal(ours, wanted)
    # sampling counts tokens by scattering all of them, so those after the committed ones are token ids too
    assert (found[1] >= 0).all()
