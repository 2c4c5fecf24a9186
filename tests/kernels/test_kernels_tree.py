"""Kernels of draft trees equal their definitions, on the GPU or in Triton's interpreter."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from kernel_forests import plant, random_trees, rows_of, without_others
from kernel_inputs import DEVICE, DTYPES, assert_as_exact_as_torch, in_turn, integers, operands, randn
from kernel_pages import _interpretable as _interpretable
from kernel_pages import attend, make_pages
from torch import Tensor

from dflash_toolkit.draft_tree import best_first
from dflash_toolkit.kernels import gpu, reference
from dflash_toolkit.kernels import reference as definition
from dflash_toolkit.kernels.formats import RowScaledFp8
from dflash_toolkit.kernels.loss_terms import LogitScale
from dflash_toolkit.kernels.tree import TreeRows, Trees
from dflash_toolkit.kernels.triton import linear, rope, tree_accept, tree_build, tree_results, walk

# ---- attention -------------------------------------------------------------------------------------


FORESTS = [  # contexts, slots, nodes, rows, page, KV heads, group, head width, window, scores
    ((0,), 3, 12, 13, 16, 1, 1, 8, 0, "cap"),
    ((190, 5), 7, 12, 25, 16, 2, 4, 64, 0, ""),
    ((30, 130, 63), 4, 9, 30, 64, 1, 7, 40, 0, "sinks"),  # a path that reaches into the next split; two tiles of rows
    ((127, 95), 16, 20, 40, 32, 1, 3, 128, 50, "sinks"),
    ((64, 0, 31, 32, 33, 5, 96, 170), 15, 30, 64, 32, 2, 2, 16, 20, ""),
    ((130,), 15, 63, 70, 64, 1, 1, 256, 0, ""),  # followed by padding
    ((62, 30), 4, 9, 22, 16, 1, 5, 16, -32, ""),  # chunks that begin inside trees
]


@pytest.mark.parametrize(("shape", "dtype"), in_turn([(shape,) for shape in FORESTS]), ids=str)
@pytest.mark.sampled
def test_a_node_is_that_token_decoded_plainly_bit_for_bit(shape: tuple[Any, ...], dtype: torch.dtype) -> None:
    *shape, window, scores = shape
    forest = plant(*shape, dtype=dtype, scores=scores)
    found = forest.attend(window)
    assert_as_exact_as_torch(found, forest.defined(dtype, window), forest.defined(torch.float64, window))
    used = int(forest.rows.starts[-1])
    assert not found[used:].any()
    step = 1 if DEVICE == "cuda" else max(1, used // 3)
    for row in {*range(0, used, step), used - 1}:
        assert torch.equal(found[row], forest.plain(row, window)), row


MANY = [  # contexts, slots, nodes, rows, page, KV heads, group, head width, window, scores
    ((64, 0, 31, 32, 33, 5, 96, 1, 200), 5, 8, 48, 16, 1, 2, 64, 0, "sinks"),
    ((64, 0, 31, 32, 33, 5, 96, 1, 170), 15, 30, 64, 32, 2, 2, 16, 20, ""),
    ((3, 0, 31, 32, 33, 5, 96, 1, 127), 4, 30, 150, 64, 1, 7, 24, 9, "sinks"),  # a window shorter than trees
    ((30, 0, 31, 32, 33, 5, 62, 1, 61), 4, 8, 80, 16, 1, 5, 8, -32, ""),  # chunks that begin inside trees
    ((0, 1, 31, 32, 33, 5, 62, 1, 95), 6, 64, 590, 32, 1, 1, 8, 0, "cap"),  # every node that there may be
    ((0, 1, 2, 63, 64, 65, 30, 1, 9), 3, 8, 150, 64, 1, 1, 128, 0, ""),  # more padding than a tile
]


@pytest.mark.parametrize(("shape", "dtype"), in_turn([(shape,) for shape in MANY]), ids=str)
def test_nodes_of_many_requests_see_their_ancestors(shape: tuple[Any, ...], dtype: torch.dtype) -> None:
    *shape, window, scores = shape
    forest = plant(*shape, dtype=dtype, scores=scores)
    found, used = forest.attend(window), int(forest.rows.starts[-1])
    assert_as_exact_as_torch(found, forest.defined(dtype, window), forest.defined(torch.float64, window))
    assert not found[used:].any()
    for request in (1, 8):
        mine = forest.rows.requests == request
        assert torch.equal(found[mine], without_others(forest, request).attend(window)[mine])
    if shape[2] == 64:
        assert int(forest.rows.starts.diff().max()) == 65 and (forest.rows.ancestors < 0).any()


CHAINS = [  # contexts, slots, nodes, rows, page, KV heads, group, head width, window, scores
    ((0,), 3, 3, 4, 16, 1, 1, 8, 0, ""),
    ((190, 5), 7, 7, 16, 16, 2, 4, 64, 0, ""),
    ((30, 130, 63), 12, 12, 30, 64, 1, 7, 40, 0, "sinks"),  # two tiles of rows; into the next split
    ((127, 95), 16, 16, 20, 32, 1, 3, 128, 50, "sinks"),
    ((64, 0, 31, 32, 33, 5, 96, 1, 200), 5, 5, 40, 16, 1, 2, 64, 0, "cap"),  # in one pass
    ((64, 0, 31, 32, 33, 5, 96, 1, 170), 15, 30, 64, 32, 2, 2, 16, 20, ""),
    ((126, 61), 9, 9, 24, 16, 1, 5, 64, -64, ""),  # chunks that begin inside chains
    ((64, 3, 31, 32, 33, 5, 96, 1, 17), 3, 8, 70, 64, 1, 1, 256, 0, ""),  # followed by padding
    ((130,), 3, 3, 90, 64, 1, 1, 24, 0, ""),  # padding, more than a tile
]


@pytest.mark.parametrize(("shape", "dtype"), in_turn([(shape,) for shape in CHAINS]), ids=str)
@pytest.mark.sampled
def test_chains_are_blocks_of_as_many_rows_of_each_request(shape: tuple[Any, ...], dtype: torch.dtype) -> None:
    *shape, window, scores = shape
    forest = plant(*shape, dtype=dtype, children=1, scores=scores)
    found = forest.attend_chains(window)
    assert_as_exact_as_torch(found, forest.defined(dtype, window), forest.defined(torch.float64, window))
    if len(forest.pages.lengths) <= 8:
        assert torch.equal(found, forest.attend(window))
    starts = forest.rows.starts.tolist()
    assert not found[starts[-1] :].any()
    for b in range(len(starts) - 1):
        block, one = forest.q[starts[b] : starts[b + 1]], forest.pages.one(b)
        alone = attend(block, one, causal=True, window=window, whole=len(starts) > 9)
        assert torch.equal(found[starts[b] : starts[b + 1]], alone), b
    where = forest.pages.kv(window), forest.rows, min(forest.trees.paths.shape[1:])
    assert torch.equal(definition.chain_attention(forest.q, *where), forest.defined(dtype, window))


@pytest.mark.gpu
@pytest.mark.parametrize("contexts", [(700, 0, 5, 2100, 63, 64, 128, 1), (130, 700, 127) * 4], ids=["split", "whole"])
@pytest.mark.parametrize(("groups", "group", "width", "size"), [(8, 4, 128, 64), (2, 7, 64, 64), (2, 4, 256, 64)])
def test_tree_attention_is_exact_on_a_gpu_and_in_a_graph(
    groups: int, group: int, width: int, size: int, contexts: tuple[int, ...]
) -> None:
    for window in (-64, 0, 100):
        scores = "sinks" if window else ""
        chains = plant(contexts, 15, 40, 160, size, groups, group, width, torch.bfloat16, 1, scores)
        found = chains.attend_chains(window)
        assert_as_exact_as_torch(found, chains.defined(torch.bfloat16, window), chains.defined(torch.float64, window))
        if len(contexts) <= 8:
            assert torch.equal(found, chains.attend(window))
        forest = plant(contexts, 15, 40, 160, size, groups, group, width, torch.bfloat16, scores=scores)
        found = forest.attend(window)
        assert_as_exact_as_torch(found, forest.defined(torch.bfloat16, window), forest.defined(torch.float64, window))
        if len(contexts) > 8:
            assert torch.equal(found[mine := forest.rows.requests == 5], without_others(forest, 5).attend(window)[mine])
            continue
        for row in range(int(forest.rows.starts[-1])):
            assert torch.equal(found[row], forest.plain(row, window)), row
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = forest.attend()
    for _ in range(3):
        forest.q.copy_(randn(*forest.q.shape, dtype=torch.bfloat16))
        graph.replay()
        assert torch.equal(captured, forest.attend())


# ---- the head --------------------------------------------------------------------------------------

SCALES = [LogitScale(), LogitScale(0.3), LogitScale(1.5, 4.0)]


@pytest.mark.parametrize(
    ("m", "n", "k", "scale", "dtype"),
    in_turn([(3, 300, 129, SCALES[0]), (17, 70, 40, SCALES[1]), (1, 256, 64, SCALES[2])]),
)
def test_top_logits_include_the_log_sum_exp(m: int, n: int, k: int, scale: LogitScale, dtype: torch.dtype) -> None:
    x, weight, _ = operands(m, n, k, dtype)
    found = linear.linear_top_lse(x, weight, 5, scale)
    for ours, torchs in zip(linear.linear_top(x, weight, 5), found, strict=False):
        if ours.is_floating_point():
            scale.apply_(ours)
        assert torch.equal(ours, torchs)
    every = x.double() @ weight.double().T
    scale.apply_(every)
    eps = 4 * torch.finfo(dtype).eps * every.abs().max().item()
    torch.testing.assert_close(found[2].double(), every.logsumexp(-1), rtol=1e-5, atol=eps)
    torch.testing.assert_close(found[2], definition.linear_top_lse(x, weight, 5, scale)[2], rtol=1e-5, atol=eps)
    assert all(
        torch.equal(a, b[-1:]) for a, b in zip(linear.linear_top_lse(x[-1:], weight, 5, scale), found, strict=True)
    )


def test_tree_top_logits_of_an_fp8_head_match_float64() -> None:
    numbers, head = torch.randint(-7, 8, (2, 300, 96)).float()
    numbers[:, 0], head[:, 1] = 7, 7  # every row is in the format exactly
    x, scale = (numbers[:20] / 64).to(DEVICE, torch.bfloat16), LogitScale(1.0, 30.0)
    weight = RowScaledFp8.of(head.to(DEVICE) / 64)
    every = x.double() @ weight.dense(torch.float64).T
    scale.apply_(every)
    values, ids, lse = gpu.linear_top_lse(x, weight, 8, scale)
    torch.testing.assert_close(lse.double(), every.logsumexp(-1), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(values.double(), every.gather(1, ids), rtol=2.0**-6, atol=0)


# ---- building --------------------------------------------------------------------------------------


def wider(values: Tensor) -> Tensor:
    """The slots of longer blocks, [B, K, ...] of [B, K + 1, ...], which hold NaN before them."""
    filler = torch.full_like(values[:, :1], math.nan if values.is_floating_point() else 1 << 40)
    return torch.cat([filler, values], dim=1)[:, 1:]


def drafts(batch: int, slots: int, count: int, ties: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, largest first, their log-sum-exp and tokens, of which there are 90."""
    logits = randn(batch, slots, 90) * 3
    best = (logits.round() if ties else logits).sort(dim=-1, descending=True, stable=True)
    unary, candidates = best.values[..., :count].contiguous(), best.indices[..., :count].contiguous()
    return wider(unary), wider(logits.logsumexp(-1)), wider(candidates)


def selector(batch: int, slots: int, rank: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    books = (randn(90, rank, dtype=dtype) for _ in range(2))
    return (wider(randn(batch, slots, rank, dtype=dtype)), *books, torch.randint(90, (batch,), device=DEVICE))


def calibration_of(slots: int) -> Tensor:
    return torch.cat([torch.tensor([0.7]), torch.randn(slots) / 2]).double().to(DEVICE)


CHILDREN = [(1, 1, 1, 1), (2, 3, 5, 3), (1, 4, 16, 8)]  # B, K, C, W


@pytest.mark.parametrize("paired", [False, True], ids=["slots", "pairs"])
@pytest.mark.parametrize(("batch", "slots", "count", "width"), CHILDREN)
def test_children_are_the_most_probable_candidates_calibrated(
    batch: int, slots: int, count: int, width: int, paired: bool
) -> None:
    unary, lse, candidates = drafts(batch, slots, count)
    pairs = selector(batch, slots, 20, DTYPES[-1]) if paired else None
    arguments = (calibration_of(slots), count, pairs)
    values, ranks = tree_build.draft_children(unary, lse, candidates, arguments[0], width, pairs)
    every, order = definition.draft_children(unary, lse, candidates, *arguments)
    torch.testing.assert_close(values, every[..., :width], rtol=1e-5, atol=1e-5)
    of_rank = torch.zeros_like(every).scatter(-1, order.long(), every)
    torch.testing.assert_close(values, of_rank.gather(-1, ranks.long()), rtol=1e-5, atol=1e-5)
    assert (values.diff(dim=-1) <= 0).all() and (ranks.sort(dim=-1).values.diff(dim=-1) > 0).all()
    for b in range(batch):  # with any other request in the batch
        alone = [None if part is None else part[b : b + 1] for part in (unary, lse, candidates)]
        mine = pairs and (pairs[0][b : b + 1], *pairs[1:3], pairs[3][b : b + 1])
        assert torch.equal(tree_build.draft_children(*alone, arguments[0], width, mine)[0][0], values[b])


def test_equal_children_keep_candidate_order_and_nan_is_last() -> None:
    unary, lse, candidates = drafts(1, 2, 8)
    unary[:] = torch.tensor([2.0, 2.0, math.nan, 1.0, 2.0, 1.0, -math.inf, 5.0], device=DEVICE)
    cold = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64, device=DEVICE)
    for draft_children in (tree_build.draft_children, definition.draft_children):
        values, ranks = draft_children(unary, torch.full_like(lse, 9.0), candidates, cold, 8)
        assert ranks[0, :, 0].tolist() == [[7, 0, 1, 4, 3, 5, 6, 2]] * 2
        assert (values[..., -1] == -math.inf).all()


def test_a_chain_of_width_one_is_the_selectors_walk() -> None:
    slots, batch, dtype = 6, 3, DTYPES[-1]
    unary, lse, candidates = drafts(batch, slots, 5)
    pairs = selector(batch, slots, 24, dtype)
    cold = torch.tensor([1.0] + [0.0] * slots, dtype=torch.float64, device=DEVICE)
    children = tree_build.draft_children(unary, lse, candidates, cold, 1, pairs)
    trees = tree_build.grow_trees(*children, candidates, integers([slots] * batch), slots)
    assert torch.equal(trees.tokens, walk.walk(pairs[0], unary, candidates, *pairs[1:]))
    assert torch.equal(trees.depths, torch.arange(1, slots + 1, device=DEVICE).int().expand(batch, -1))


GROWTH = [  # B, K, C, W, N, limits
    (1, 1, 1, 1, 1, (1,)),
    (2, 3, 5, 3, 20, (3, 0)),
    (3, 15, 16, 8, 64, (15, 4, 15)),
    (2, 16, 16, 8, 63, (99, 16)),
    (2, 4, 4, 2, 64, (4, 1)),  # more than there are
]


@pytest.mark.parametrize(("paired", "ties"), [(False, True), (True, False)], ids=["slots", "pairs"])
@pytest.mark.parametrize(("batch", "slots", "count", "width", "nodes", "limits"), GROWTH)
@pytest.mark.sampled
def test_trees_and_their_cut_are_those_of_the_definition(
    batch: int, slots: int, count: int, width: int, nodes: int, limits: tuple[int, ...], paired: bool, ties: bool
) -> None:
    _, _, candidates = drafts(batch, slots, count)
    values = -randn(batch, slots, count if paired else 1, count).abs()
    values = (values * 2).round() / 2 if ties else values
    values, ranks = (part[..., :width].contiguous() for part in values.sort(dim=-1, descending=True, stable=True))
    arguments = (values, ranks.int(), candidates, integers(limits), nodes)
    trees, expected = tree_build.grow_trees(*arguments), definition.grow_trees(*arguments)
    for name in ("tokens", "parents", "depths", "log_probs", "ancestors"):
        assert torch.equal(getattr(trees, name), getattr(expected, name)), name
    used = torch.arange(slots + 1, device=DEVICE) <= torch.nn.functional.pad(expected.depths, (1, 0))[..., None]
    assert torch.equal(trees.paths * used, expected.paths * used)
    for b, limit in enumerate(limits):  # and those of the readable decoder
        if limit:
            lattice = torch.full((slots, count, count), -math.inf, device=DEVICE)
            lattice.scatter_(2, ranks[b].expand(-1, count, -1), values[b].expand(-1, count, -1))
            tree = best_first(candidates[b, :limit], lattice[:limit], nodes, width)
            found = len(tree.tokens)
            assert torch.equal(trees.tokens[b, :found], tree.tokens) and not trees.depths[b, found:].any()
            assert torch.equal(trees.parents[b, :found], tree.parents.int())

    pages = make_pages(tuple(range(37, 37 + batch)), nodes + 1, 16, 1, 8)
    last = torch.arange(batch, device=DEVICE) + 7
    for rows in {batch, batch + 1, batch + 5, batch + nodes, batch * (nodes + 1) + 3}:
        where = (last, pages.lengths, pages.table, pages.size, rows)
        cut, kept = tree_build.cut_trees(trees, *where), definition.cut_trees(expected, *where)
        for name in TreeRows.__slots__:
            assert torch.equal(getattr(cut, name), getattr(kept, name)), (name, rows)
        used = int(kept.starts[-1])
        assert used == min(rows, batch + int((expected.depths > 0).sum()))


def test_the_cut_takes_the_likeliest_nodes_of_all_and_their_ancestors() -> None:
    trees, pages = random_trees(9, 5, 20), make_pages((5,) * 9, 21, 16, 1, 8)
    trees.log_probs.mul_(2).round_().div_(2)  # ties between requests, and within
    trees.log_probs.copy_(trees.log_probs.cummin(dim=1).values)
    last = torch.zeros(9, dtype=torch.int64, device=DEVICE)
    cut = tree_build.cut_trees(trees, last, pages.lengths, pages.table, pages.size, 64)
    nodes = cut.depths > 0
    ordered = trees.log_probs.flatten().sort(descending=True).values
    assert torch.equal(cut.log_probs[nodes].sort(descending=True).values, ordered[:55])
    assert torch.equal(cut.depths[cut.parents.long()][nodes], cut.depths[nodes] - 1)
    assert torch.equal(cut.requests[cut.parents.long()], cut.requests)


# ---- acceptance ------------------------------------------------------------------------------------


def choices_along(rows: TreeRows, trees: Trees, reach: int) -> Tensor:
    """The target's tokens int64 [M]: those of children on the way to a request's deepest node, up to `reach` of them,
    elsewhere tokens that are in no tree."""
    choice = torch.full_like(rows.tokens, 500) + torch.arange(len(rows.tokens), device=DEVICE)
    for b in range(len(rows.starts) - 1):
        start, end = int(rows.starts[b]), int(rows.starts[b + 1])
        at = start + int(rows.depths[start:end].argmax())
        while int(rows.depths[at]):
            if int(rows.depths[at]) <= reach + b:
                choice[rows.parents[at]] = rows.tokens[at]
            at = int(rows.parents[at])
    return choice


WALKS = [(1, 1, 1, 2, 0), (3, 5, 20, 40, 1), (2, 16, 64, 128, 99), (9, 7, 12, 64, 0)]  # B, K, N, M, reach


@pytest.mark.parametrize("forced", [False, True])
@pytest.mark.parametrize(("batch", "slots", "nodes", "rows", "reach"), WALKS)
def test_accepted_tree_rows_match_the_definition_and_are_moved(
    batch: int, slots: int, nodes: int, rows: int, reach: int, forced: bool
) -> None:
    heads = (8, 128) if DEVICE == "cuda" else (2, 20)  # as many as several warps have to share
    pages = make_pages(tuple(range(10, 10 + batch)), nodes + 1, 16, *heads)
    trees = random_trees(batch, slots, nodes)
    tree_rows = rows_of(trees, pages, rows)
    choice, numbers = choices_along(tree_rows, trees, reach), torch.arange(batch, device=DEVICE)
    exactly = (numbers * 2).int() if forced else None
    found, expected = list[Tensor](), list[Tensor]()
    for ops, results in ((tree_accept, found), (definition, expected)):
        lengths, last = pages.lengths.clone(), numbers + 50
        results += ops.accept_trees(tree_rows, choice, numbers % 4 != 1, lengths, last, slots + 1, exactly)
        results += [lengths, last]
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)
    counts, _, path, *_ = expected
    if not forced and reach:
        assert int(counts.max()) > 2

    every = torch.where(pages.cache.isnan(), 0.0, pages.cache)
    cache = torch.stack([every, every.flip(-1), 2 * every])
    kept, moved = cache.clone(), cache.clone()
    arguments = (tree_rows, path, counts, pages.lengths, pages.table, pages.size)
    tree_accept.move_rows_(moved, *arguments)
    definition.move_rows_(kept, *arguments)
    assert torch.equal(moved, kept)
    for b, count in enumerate(counts.tolist()):
        at = pages.one(b).slots(nodes + 1)[0]
        assert torch.equal(moved[:, :, at[:count]], cache[:, :, tree_rows.slots[path[b, :count]].long()])
        assert torch.equal(moved[:, :, at[max(count, 1) :]], cache[:, :, at[max(count, 1) :]])


# ---- the result of a step -----------------------------------------------------------------------------


@pytest.fixture
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fills the output buffers of `tree_results` with a number that no result has."""
    monkeypatch.setattr(torch, "empty", lambda *shape, **how: torch.full(shape, -77, **how))


PROMISES = [  # B, K, W, N, limits, blocks, rows
    (1, 1, 1, 8, (1,), (2,), (2, 9, 16)),
    (3, 15, 8, 64, (15, 0, 4), (2, 4, 8, 16), (4, 16, 100, 195)),
    (8, 15, 1, 15, (15, 3, 15, 0, 15, 15, 1, 9), (2, 4, 8, 16), (16, 64, 128)),  # chains
    (33, 5, 3, 23, (5, 2, 0) * 11, (3, 6), (48, 160, 256)),
]


@pytest.mark.usefixtures("_poisoned")
@pytest.mark.parametrize(("paired", "ties"), [(False, True), (True, False)], ids=["slots", "pairs"])
@pytest.mark.parametrize(("batch", "slots", "width", "nodes", "limits", "blocks", "rows"), PROMISES)
def test_expected_tree_tokens_match_the_definition(
    batch: int, slots: int, width: int, nodes: int, limits: tuple[int, ...], blocks: tuple[int, ...],
    rows: tuple[int, ...], paired: bool, ties: bool,
) -> None:  # fmt: skip
    values = -randn(batch, slots, 8 if paired else 1, 8).abs() / 4
    values[0, 0] -= 40 * (batch > 1)  # a tree that promises next to nothing
    values[-1, :, :, -1] = -math.inf
    values = (values * 4).round() / 4 if ties else values
    values, ranks = (part[..., :width].contiguous() for part in values.sort(dim=-1, descending=True, stable=True))
    candidates = torch.zeros(batch, slots, 8, dtype=torch.int64, device=DEVICE)
    given = ranks.int(), integers(limits)
    trees = definition.grow_trees(values, given[0], candidates, given[1], nodes)
    asked = *given, blocks, rows
    found, again = (tree_results.expected_accepted(trees, values, *asked) for _ in range(2))
    assert torch.equal(found, again)
    exactly = replace(trees, log_probs=trees.log_probs.double())
    exact = definition.expected_accepted(exactly, values.double(), *asked)
    slack = 8 * torch.finfo(torch.float32).eps * exact.max().item()  # the exponent of a power of two is rounded
    assert_as_exact_as_torch(found, definition.expected_accepted(trees, values, *asked), exact, slack)


RESULTS = [(1, 1, 8, 2, 40), (3, 7, 20, 40, 129), (8, 15, 64, 128, 16), (33, 5, 12, 80, 70)]  # B, K, N, M, D


@pytest.mark.usefixtures("_poisoned")
@pytest.mark.parametrize(("batch", "slots", "nodes", "rows", "width", "dtype"), in_turn(RESULTS))
def test_packed_tree_results_match_the_definition(
    batch: int, slots: int, nodes: int, rows: int, width: int, dtype: torch.dtype
) -> None:
    pages = make_pages((9,) * batch, nodes + 1, 16, 1, 8)
    limits = [slots - b % 3 if b % 4 < 3 else 0 for b in range(batch)]
    trees = random_trees(batch, slots, nodes, limits=limits)
    tree_rows = rows_of(trees, pages, rows)
    choice, numbers = choices_along(tree_rows, trees, 2), torch.arange(batch, device=DEVICE)
    counts, tokens, path = definition.accept_trees(
        tree_rows, choice, numbers % 4 != 1, pages.lengths.clone(), numbers.clone(), slots + 1
    )
    promise, wide = randn(3, 5), randn(rows, width + 3).to(dtype)
    hidden = wide[:, :width]
    wide[:, width:] = math.nan  # other columns
    for broken in ((), (path[-1, 0],), (-1,), range(rows)):  # none, an anchor, a leaf or padding, all
        for row in broken:
            hidden[row, width // 2] = (math.nan, math.inf, -math.inf, torch.finfo(dtype).max)[int(row) % 4]
        result = tree_rows, hidden, tokens, counts, path, promise
        found, expected = tree_results.pack_tree_results(*result), definition.pack_tree_results(*result)
        assert found.dtype == expected.dtype and torch.equal(found, expected)


@pytest.mark.parametrize("write", [rope.rope_write, reference.rope_write], ids=["kernel", "definition"])
def test_tree_rows_rotate_by_position_and_are_written_to_slots(write: Any) -> None:
    pages = make_pages((30, 3), 9, 16, 2, 8)
    rows = rows_of(random_trees(2, 4, 8), pages, 18)  # no padding, which shares a slot
    angles = torch.rand(60, 4, device=DEVICE)
    table, partials = torch.stack([angles.cos(), angles.sin()]), (randn(2, 18, 48) * 64).round() / 64
    cache = torch.zeros_like(pages.cache)
    q = write(partials, None, None, None, 1e-6, table, rows.positions, pages.table, cache, 16, at=rows.slots)
    for row in range(18):
        alone = torch.zeros_like(cache)
        where = (integers([0]), integers([[1]]), alone, 64)  # in a cache of larger pages
        turned, mine = table[:, rows.positions[row] :][:, :1].contiguous(), partials[:, row : row + 1].contiguous()
        assert torch.equal(write(mine, None, None, None, 1e-6, turned, *where)[0], q[row])
        assert torch.equal(cache[:, rows.slots[row].long()], alone[:, 64])
    others = torch.ones(cache.shape[1], dtype=torch.bool, device=DEVICE)
    others[rows.slots.long()] = False
    assert not cache[:, others].any()
