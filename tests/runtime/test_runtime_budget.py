"""The choice of rows per step, compared with the best fixed choice, and how requests share the rows."""

import heapq
import itertools
import random
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_toolkit.kernels.launch import MAX_ROWS
from dflash_toolkit.kernels.reference import cut_trees, draft_children, expected_accepted, grow_trees
from dflash_toolkit.runtime.request import StepShape, Trust
from dflash_toolkit.runtime.step_costs import StepCosts
from dflash_toolkit.runtime.timing import Times
from dflash_toolkit.runtime.trees.budget import (
    EXACT_ROWS,
    ROWS,
    BudgetChooser,
    Promise,
    completed,
    key_of,
    row_buckets,
    rows_of_trees,
    tree_shapes,
)

BLOCKS = (1, 2, 4, 8, 16)
DRAFTED = BLOCKS[1:]
POOL = 24  # drafted blocks of a kind


def test_rows_are_more_than_anchors_and_no_more_than_trees_have() -> None:
    assert row_buckets(1) == (16, 32, 48, 64) and row_buckets(16) == ROWS[1:] and row_buckets(256) == ()
    assert EXACT_ROWS == MAX_ROWS
    assert row_buckets(4) == row_buckets(8) == ROWS[:6] and row_buckets(15) == ROWS


def table(batches: Sequence[int], row_ms: float, draft_ms: float) -> Times:
    """Seconds of 8 ms and so many a row verified and drafted, and of plain decoding and chains without trees."""
    found: Times = {}
    for batch in batches:
        for block in BLOCKS:
            drafted = draft_ms * (20 + batch * block) if block > 1 else 0.0
            found[batch, block] = 8.0 + row_ms * batch * block + drafted
            if block > 1:
                found |= {(batch, rows, block): 8.0 + row_ms * rows + drafted for rows in row_buckets(batch)}
    return {shape: ms / 1e3 for shape, ms in found.items()}


def test_a_gain_of_one_per_cent_changes_nothing() -> None:
    choose = BudgetChooser((1, 2, 4), StepCosts({(2, 1): 1.0, (2, 2): 1.1, (2, 4): 1.1}), lambda n: n)
    choose.LAST_LOOK = choose.FIRST_LOOK = 10**6
    nodes = [0.0] * len(row_buckets(2))  # there are no trees

    def promised(most: float) -> Promise:
        return Promise(2, 2, [[2.0, *nodes], [most, *nodes]])

    choose.observe(promised(2.0))
    shapes = [choose(2)]
    for more in (2.022, 2.0, 2.022, 2.0):
        for _ in range(20):
            choose.observe(promised(more))
        shapes.append(choose(2))
    assert set(shapes) == {shapes[0]} and shapes[0].block > 1
    for _ in range(20):
        choose.observe(promised(2.6))
    assert choose(2) == StepShape(4)


def test_a_request_without_drafts_rules_out_chains() -> None:
    times = {(2, 1): 1.0, (2, 4): 1.01, (2, 16, 4): 1.5}
    choose = BudgetChooser((1, 4), StepCosts(times), lambda n: n)
    for _ in range(9):
        choose.observe(Promise(2, 2, [[4.0, *[4.4] * len(row_buckets(2))]]))
    assert choose(2) == StepShape(4) and choose(2, chains=False) == StepShape(4, 16)
    nothing = Promise(2, 2, [[float("nan"), *[float("nan")] * len(row_buckets(2))]])
    choose.observe(nothing)
    assert choose(2, chains=False) == StepShape(4, 16), "drafts that are NaN promise nothing"


def test_times_of_a_cross_determine_all_tree_times() -> None:
    whole = table((1, 8, 256), 0.05, 0.02)
    shapes = tree_shapes((1, 8, 256), BLOCKS)
    assert len(shapes) == len(set(shapes)) == 4 + 3 + 6 + 3
    measured = {shape: whole[shape] for shape in whole if len(shape) == 2 or shape in shapes}
    assert completed(measured, (1, 8, 256), BLOCKS) == pytest.approx(whole)
    assert tree_shapes((1,), (1,)) == []


@pytest.mark.parametrize(
    ("nodes", "rows"), [(1, ROWS[:1]), (15, ROWS[:1]), (16, ROWS[:2]), (20, ROWS[:2]), (63, ROWS[:4])]
)
def test_small_trees_have_no_more_rows_than_hold_them(nodes: int, rows: tuple[int, ...]) -> None:
    assert rows_of_trees(1, nodes) == rows and rows_of_trees(256, nodes) == ()
    assert {shape[1] for shape in tree_shapes((1,), BLOCKS, nodes)} == set(rows)
    measured = dict.fromkeys(tree_shapes((1,), BLOCKS, nodes), 1.0)
    assert {shape[1] for shape in completed(measured, (1,), DRAFTED)} == set(rows)
    assert rows_of_trees(16, nodes)[-1] >= min(16 * (nodes + 1), ROWS[-1])


# ---- promises of trees -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pairs", [False, True], ids=["independent", "selector"])
def test_expected_tokens_of_a_batch_equal_those_of_its_cut(pairs: bool) -> None:
    batch, slots, count = 3, 5, 4
    dice = torch.Generator().manual_seed(1)
    unary = torch.randn(batch, slots, count, generator=dice)
    candidates = torch.randint(50, (batch, slots, count), generator=dice)
    selector = None
    if pairs:
        tables = [torch.randn(50, 2, generator=dice) for _ in range(2)]
        state = torch.randn(batch, slots, 2, generator=dice)
        selector = (state, *tables, torch.tensor([1, 2, 3]))
    calibration = torch.tensor([0.8, *([0.1] * slots)], dtype=torch.float64)
    values, ranks = draft_children(unary, unary.logsumexp(-1) + 0.1, candidates, calibration, 3, selector)
    limits = torch.tensor([5, 0, 3], dtype=torch.int32)
    trees = grow_trees(values, ranks, candidates, limits, nodes=40)
    found = expected_accepted(trees, values, ranks, limits, (2, 6), row_buckets(batch))
    assert found.shape == (2, 1 + len(row_buckets(batch))) and found.dtype == torch.float32
    nowhere = torch.zeros(batch, 4, dtype=torch.int32)
    for i, rows in enumerate(row_buckets(batch), 1):
        cut = cut_trees(trees, torch.zeros(batch, dtype=torch.int64), limits * 0, nowhere, 16, rows)
        of = cut.depths > 0
        assert float(found[1, i]) == pytest.approx(float(cut.log_probs[of].exp().sum()), rel=1e-5)
        first = of & (cut.depths == 1)
        assert float(found[0, i]) >= float(cut.log_probs[first].exp().sum()) - 1e-5, "no row is left for deeper nodes"
    chain = 0.0
    for b, limit in enumerate(limits.tolist()):
        path, rank = 0.0, 0
        for slot in range(limit):
            path += float(values[b, slot, rank, 0])
            rank = int(ranks[b, slot, rank, 0]) if pairs else 0
            chain += np.exp(path)
    assert float(found[1, 0]) == pytest.approx(chain, rel=1e-5)
    assert float(found[0, 0]) == pytest.approx(float(values[[0, 2], 0, 0, 0].exp().sum()), rel=1e-5)


# ---- simulated decoding ----------------------------------------------------------------------------------------------


@lru_cache
def pool(rate: float, width: int) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Returns drafted blocks: path probabilities and depths of the 63 likeliest nodes, and those of the chain."""
    dice, found = random.Random(f"{rate} {width}"), []
    for _ in range(POOL):
        best = [min(max(dice.gauss(rate, 0.2), 0.0), 0.98) if rate else 0.0 for _ in range(DRAFTED[-1] - 1)]
        levels = [[p, *((1 - p) * 0.5**r for r in range(1, width))] for p in best]
        heap, nodes = [(-p, 0) for p in levels[0] if p > 0], []
        heapq.heapify(heap)
        while heap and len(nodes) < 63:
            path, slot = heapq.heappop(heap)
            nodes.append((-path, slot + 1))
            for p in levels[slot + 1] if slot + 1 < len(levels) else ():
                if path * p < -1e-6:
                    heapq.heappush(heap, (path * p, slot + 1))
        paths, depths = np.array(nodes or [(0.0, 1)]).T
        found.append((paths, depths, np.cumprod(best)))
    return found


class World:
    """Simulates requests with perfectly calibrated drafts, and the tokens that every choice would commit."""

    def __init__(self, rates: Sequence[float], times: Times, width: int = 4) -> None:
        self.requests, self.times, self.dice = len(rates), times, random.Random(0)
        self.pools = [pool(rate, width) for rate in rates]

    def promise(self) -> Promise:
        blocks = [self.dice.choice(pool) for pool in self.pools]
        chain = np.sum([block[2] for block in blocks], axis=0)
        paths, depths = (np.concatenate([block[i] for block in blocks]) for i in (0, 1))
        found = []
        for block in DRAFTED:
            nodes = np.cumsum(np.sort(paths[depths < block])[::-1])
            ends = [min(rows - self.requests, len(nodes)) - 1 for rows in row_buckets(self.requests)]
            found.append([float(chain[: block - 1].sum()), *map(float, nodes[ends])])
        return Promise(self.requests, self.requests, found)

    def run(self, choose: BudgetChooser, steps: int) -> tuple[float, dict[StepShape, float], dict[StepShape, int]]:
        """Returns tokens per second, those of every fixed choice, and how often each choice was made.

        Results are read two steps late, and those of steps over trees have promises."""
        tokens = seconds = 0.0
        every = [StepShape(1), *map(StepShape, DRAFTED)]
        every += [StepShape(block, rows) for block in DRAFTED for rows in row_buckets(self.requests)]
        totals, made = dict.fromkeys(every, 0.0), dict.fromkeys(every, 0)
        unread: list[Promise | None] = []
        for _ in range(steps):
            if len(unread) == 2 and (read := unread.pop(0)):
                choose.observe(read)
            choice, promise = choose(self.requests, awaited=any(unread)), self.promise()
            got = {StepShape(1): float(self.requests)}
            for block, (chain, *nodes) in zip(DRAFTED, promise.accepted, strict=True):
                got[StepShape(block)] = self.requests + chain
                for rows, accepted in zip(row_buckets(self.requests), nodes, strict=True):
                    got[StepShape(block, rows)] = self.requests + accepted
            for each in every:
                totals[each] += got[each]
            made[choice] += 1
            tokens += got[choice]
            seconds += self.times[key_of(choice, self.requests)]
            deep = sum(block <= choice.block for block in DRAFTED) if choice.rows else 0
            unread.append(Promise(promise.requests, promise.batch, promise.accepted[:deep]) if deep else None)
        rates = {each: total / steps / self.times[key_of(each, self.requests)] for each, total in totals.items()}
        return tokens / seconds, rates, made


SLACK = 0.05  # share of a long run: a choice changes only for a gain of 2 %, and unknown choices are tried


@pytest.mark.slow
@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    rates=st.integers(0, 4).flatmap(
        lambda power: st.lists(st.sampled_from((0.0, 0.3, 0.6, 0.9)), min_size=2**power, max_size=2**power)
    ),
    row_ms=st.sampled_from((0.0, 0.01, 0.03, 0.1, 0.3)),
    draft_ms=st.sampled_from((0.002, 0.01, 0.03)),
    width=st.sampled_from((1, 4)),
)
def test_never_slower_than_plain_decoding_or_the_best_common_block(
    rates: list[float], row_ms: float, draft_ms: float, width: int
) -> None:
    times = table((len(rates),), row_ms, draft_ms)
    rate, fixed, _ = World(rates, times, width).run(BudgetChooser(BLOCKS, StepCosts(times), lambda n: n), 400)
    assert rate >= (1 - SLACK) * max(fixed[choice] for choice in fixed if not choice.rows)
    assert rate >= (1 - 2 * SLACK) * max(fixed.values()), "nor much slower than the best trees"


@pytest.mark.parametrize(
    ("rates", "width", "row_ms", "gain"),
    [
        pytest.param([0.6], 4, 0.005, 1.15, id="siblings where rows are free"),
        pytest.param([0.9, 0.0, 0.9, 0.0, 0.6, 0.0, 0.3, 0.9], 1, 0.15, 1.05, id="chains of own length"),
        pytest.param([0.9, 0.3, 0.6, 0.9], 4, 0.02, 1.1, id="trees of a mixed batch"),
    ],
)
def test_trees_are_chosen_where_they_are_faster(rates: list[float], width: int, row_ms: float, gain: float) -> None:
    times = table((len(rates),), row_ms, 0.005)
    rate, fixed, made = World(rates, times, width).run(BudgetChooser(BLOCKS, StepCosts(times), lambda n: n), 400)
    assert rate > gain * max(fixed[choice] for choice in fixed if not choice.rows)
    assert max(made, key=made.__getitem__).rows


def test_useless_drafts_end_in_plain_decoding_with_few_tries() -> None:
    times = table((4,), 0.02, 0.01)
    rate, fixed, made = World([0.0] * 4, times, width=1).run(BudgetChooser(BLOCKS, StepCosts(times), lambda n: n), 1000)
    assert made[StepShape(1)] >= 985 and rate > 0.99 * fixed[StepShape(1)]


def test_first_drafts_are_awaited_and_new_requests_probed_soon() -> None:
    times = table((1, 2), 0.02, 0.01)
    choose = BudgetChooser(BLOCKS, StepCosts(times), lambda n: n)
    assert choose(1) == StepShape(16, 16) and choose(1, awaited=True) == StepShape(1)
    choose.observe(Promise(1, 1, [[0.0] * 5] * 4))
    assert [choose(1) for _ in range(8)] == [StepShape(1)] * 7 + [StepShape(4, 16)]
    assert [choose(1) for _ in range(16)] == [StepShape(1)] * 15 + [StepShape(4, 16)]
    assert [choose(2, untried=1) for _ in range(16)].index(StepShape(4, 16)) == 15
    assert BudgetChooser((1,), StepCosts(times), lambda n: n)(2) == StepShape(1)


def test_batches_too_large_for_trees_use_chains() -> None:
    times = {shape: t for shape, t in table((1,), 0.0, 0.001).items() if len(shape) == 2}
    choose = BudgetChooser(
        BLOCKS, StepCosts(times | {(256, block): 1.0 for block in BLOCKS}), lambda n: 1 if n == 1 else 256
    )
    assert choose(1) == StepShape(16)
    choose.observe(Promise(1, 1, [[n, *[2.0 * n] * 4] for n in (0.9, 2.5, 5.0, 8.0)]))
    assert choose(1) == StepShape(16) and choose(200) == StepShape(16)
    choose.observe(Promise(200, 256, [[100.0], [200.0], [300.0], [400.0]]))
    assert set(choose.promises(200)) == {StepShape(block) for block in BLOCKS}


@pytest.mark.parametrize(("requests", "looks"), [(1, [2, 6, 14, 30, 46, 62]), (150, [2, 6, 14, 30, 62])])
def test_trees_probe_between_chains_soon_and_then_rarely(requests: int, looks: list[int]) -> None:
    """More requests give more information per step. Probes use the most promising trees, which cost the least."""
    times = {shape: 1.1 if len(shape) == 3 else 1.0 for shape in table((requests,), 0.0, 0.0)}
    choose = BudgetChooser(BLOCKS, StepCosts(times), lambda n: n)
    choose(requests)
    buckets = row_buckets(requests)
    nodes = [0.9 * requests if rows == buckets[-1] else 0.6 * requests for rows in buckets]
    choose.observe(Promise(requests, requests, [[0.9 * requests, *nodes]] * 4))
    shapes = [choose(requests) for _ in range(70)]
    rows = {0, 64} if requests == 1 else {0, 256}
    assert {shape.rows for shape in shapes} == rows and {shape.block for shape in shapes if shape.rows} == {16}
    assert {shape.block for shape in shapes if not shape.rows} == {2}
    assert [step for step, shape in enumerate(shapes, 1) if shape.rows] == looks


def test_longer_chains_do_not_restart_tree_probes() -> None:
    times = {shape: 1.5 if len(shape) == 3 else 1.0 for shape in table((1,), 0.0, 0.0)}
    choose = BudgetChooser(BLOCKS, StepCosts(times), lambda n: n)
    shapes, looks, promised = list[StepShape](), list[int](), 0.0
    for step in range(200):
        shapes.append(choose(1))
        if shapes[-1].rows:
            looks.append(step)
            promised = 1.8 - promised
            choose.observe(Promise(1, 1, [[n, *[n] * 4] for n in (0.9, 0.9, 0.9, promised)]))
    assert {shape.block for shape in shapes[100:] if not shape.rows} == {2, 16}
    assert min(b - a for a, b in itertools.pairwise(looks) if a > 50) == choose.LAST_LOOK


def test_tree_probes_follow_a_shrinking_batch() -> None:
    times = {shape: 1.1 if len(shape) == 3 else 1.0 for shape in table((1, 64), 0.0, 0.0)}
    choose = BudgetChooser(BLOCKS, StepCosts(times), lambda n: n)
    choose(64)
    for requests in (64, 1):
        choose.observe(Promise(requests, requests, [[0.9 * requests] * (1 + len(row_buckets(requests)))] * 4))
    assert sum(bool(choose(64).rows) for _ in range(4000)) > 8
    assert sum(bool(choose(1).rows) for _ in range(160)) >= 9


def test_one_probe_does_not_overrule_many_steps() -> None:
    times = {shape: 1.1 if len(shape) == 3 else 1.0 for shape in table((1,), 0.0, 0.0)}
    choose = BudgetChooser((1, 2), StepCosts(times), lambda n: n)
    for said in (*[0.8] * 20, 0.0):
        for _ in range(100):
            choose(1)
        choose.observe(Promise(1, 1, [[said, *[said] * 4]]))
    assert choose.promises(1)[StepShape(2)] == pytest.approx(1 + 0.7 * 0.8)


def test_short_chains_become_long_ones_once_these_pay() -> None:
    """Steps over chains report no promises; steps over trees do, and are slower here."""
    times = {shape: t * (1.5 if len(shape) == 3 else 1.0) for shape, t in table((1,), 0.02, 0.002).items()}
    choose = BudgetChooser(BLOCKS, StepCosts(times), lambda n: n)
    choose(1)
    choose.observe(Promise(1, 1, [[n, *[n] * 4] for n in (0.8, 0.9, 0.9, 0.9)]))
    assert choose(1) in (StepShape(2), StepShape(4)), "before the calibration is fitted, say"
    _, fixed, made = World([0.9], times).run(choose, 400)
    best = max((choice for choice in fixed if not choice.rows), key=fixed.__getitem__)
    assert best.block >= 8 and max(made, key=made.__getitem__) == best
    assert sum(count for choice, count in made.items() if choice.rows) <= 400 / choose.LAST_LOOK + 8


def test_overconfident_drafts_are_discounted_to_a_minimum() -> None:
    """All requests share one calibration; only the accepted nodes distinguish this one."""
    rows, batch, dice = 48, 8, random.Random(0)
    trusts, taken = [Trust() for _ in range(batch)], np.zeros((400, batch), dtype=int)
    for step in range(len(taken)):
        blocks = [dice.choice(pool(0.9, 4)) for _ in range(batch)]
        nodes = sorted(
            (-path * np.exp(trust.log_discount), b, path)
            for b, (trust, block) in enumerate(zip(trusts, blocks, strict=True))
            for path in block[0]
        )[: rows - batch]
        for b, trust in enumerate(trusts):
            mine = [path for _, of, path in nodes if of == b]
            taken[step, b] = len(mine)
            survived = int((blocks[b][2] > dice.random()).sum())
            trust.observe(sum(mine), 0 if b == 3 else min(survived, len(mine)))
    assert (taken[20:, 3] > 0).mean() < 0.1 and taken[20:, 3].mean() < 0.5, "tried now and then"
    others = np.delete(taken[20:].mean(axis=0), 3)
    assert others.min() > 4.5, "the others are not discounted"
    lone = Trust()
    for _ in range(30):
        lone.observe(3.0, 0)
    assert lone.log_discount < np.log(0.05) and Trust().log_discount == 0.0


def test_up_to_eight_requests_verify_at_most_128_rows() -> None:
    """Larger products round differently, and the documents promise equal bits for up to eight requests."""
    assert [row_buckets(batch)[-1] for batch in (7, 8, 9, 16)] == [128, 128, 256, 256]
