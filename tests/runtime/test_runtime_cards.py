"""The choice of draft lengths with the step times that every card would have by its roofline."""

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
from card_times import PAIRS, step_times

from dflash_toolkit.roofline import SHEETS, Roofline
from dflash_toolkit.runtime.draft_length import BlockChooser, block_sizes, expected_tokens
from dflash_toolkit.runtime.engine import expected_of_first_requests
from dflash_toolkit.runtime.request import RollingAcceptance, StepShape
from dflash_toolkit.runtime.step_costs import StepCosts
from dflash_toolkit.runtime.timing import Times
from dflash_toolkit.runtime.trees.budget import BudgetChooser, Promise, key_of, row_buckets

pytestmark = pytest.mark.slow

BLOCKS = block_sizes(16)
RATES = [step / 20 for step in range(21)]

every_card = pytest.mark.parametrize("card", SHEETS.values(), ids=SHEETS)
every_pair = pytest.mark.parametrize("pair", PAIRS)


class Chooser(BlockChooser):
    """Never probes."""

    FIRST_PROBE = LAST_PROBE = 10**9


def of(*rates: float) -> list[Any]:
    return [SimpleNamespace(acceptance=SimpleNamespace(rate=rate, tried=True, known=True), length=0) for rate in rates]


def promised(rates: list[float], block: int, times: Times) -> float:
    return expected_tokens(rates, block)[-1] / times[len(rates), block]


@every_card
@every_pair
@pytest.mark.sampled
def test_chosen_lengths_are_never_slower_than_plain_decoding(card: Roofline, pair: str) -> None:
    for batch in (1, 2, 8, 32, 128):
        times = step_times(card, pair, [batch], BLOCKS)
        choose = Chooser(BLOCKS, StepCosts(times), lambda rows, batch=batch: batch)  # type: ignore[misc]
        for rate in (*RATES, *reversed(RATES), 0.9, 0.0, 0.5):
            rates = [rate, *[rate / 2] * (batch - 1)]
            block = choose(of(*rates))
            assert promised(rates, block, times) >= 0.98 * promised(rates, 1, times)


@every_card
@every_pair
@pytest.mark.sampled
def test_chosen_lengths_follow_acceptance_up_and_down(card: Roofline, pair: str) -> None:
    for batch in (1, 8, 64):
        times = step_times(card, pair, [batch], BLOCKS)
        choose = Chooser(BLOCKS, StepCosts(times), lambda rows, batch=batch: batch)  # type: ignore[misc]
        choose(of(*[0.0] * batch))
        up = [choose(of(*[rate] * batch)) for rate in RATES]
        down = [choose(of(*[rate] * batch)) for rate in reversed(RATES)]
        assert up == sorted(up) and down == sorted(down, reverse=True)
        assert up[0] == down[-1] == 1
        best = max(BLOCKS, key=lambda block: promised([1.0] * batch, block, times))
        assert promised([1.0] * batch, up[-1], times) >= promised([1.0] * batch, best, times) / BlockChooser.GAIN


@every_card
@pytest.mark.sampled
def test_drafts_without_acceptance_cost_less_than_two_per_cent(card: Roofline) -> None:
    for pair, batch in (("8B", 1), ("8B in FP8", 64)):
        times = step_times(card, pair, [batch], BLOCKS)
        choose = BlockChooser(BLOCKS, StepCosts(times), lambda rows, batch=batch: batch)  # type: ignore[misc]
        expected, unread, spent = expected_of_first_requests(), deque[int](), 0.0
        acceptance, shown = RollingAcceptance(expected), of(expected.rate)[0].acceptance
        shown.tried = shown.known = False
        requests: list[Any] = [SimpleNamespace(acceptance=shown, blocks_in_flight=unread, length=0)] * batch
        for _ in range(512):
            unread.append(choose(requests))
            spent += times[batch, unread[-1]]
            block = unread.popleft() if len(unread) > 1 else 1  # a step is launched before the one before it is read
            if block > 1:
                acceptance.observe(block - 1, 0)
                expected.observe(block - 1, 0)
                shown.rate, shown.tried, shown.known = acceptance.rate, True, True
        assert spent < 1.02 * 512 * times[batch, 1]


@every_card
@pytest.mark.sampled
def test_trees_without_acceptance_cost_less_than_two_per_cent(card: Roofline) -> None:
    for pair, batch in (("8B", 1), ("8B", 128), ("8B in FP8", 64)):
        times = step_times(card, pair, [batch], BLOCKS)
        choose, spent = BudgetChooser(BLOCKS, StepCosts(times), lambda rows, batch=batch: batch), 0.0  # type: ignore[misc]
        nothing = Promise(batch, batch, [[0.0] * (1 + len(row_buckets(batch)))] * len(BLOCKS[1:]))
        for _ in range(1024):
            shape = choose(batch)
            spent += times[key_of(shape, batch)]
            if shape.rows:
                choose.observe(nothing)
        assert spent < 1.02 * 1024 * times[batch, 1]


def test_nothing_is_tried_where_full_acceptance_would_not_pay() -> None:
    times = {(2, 1): 1.0, (2, 2): 2.0, (2, 4): 4.0, (2, 16, 2): 2.1, (2, 16, 4): 4.2}
    blocks, trees = (
        BlockChooser((1, 2, 4), StepCosts(times), lambda rows: 2),
        BudgetChooser((1, 2, 4), StepCosts(times), lambda rows: 2),
    )
    assert {blocks(of(1.0, 1.0)) for _ in range(300)} == {1}
    assert {trees(2) for _ in range(300)} == {StepShape(1)}
    costs = StepCosts(times | {(2, 4): 3.9})
    assert 4 in {BlockChooser((1, 2, 4), costs, lambda rows: 2)(of(1.0, 1.0)) for _ in range(300)}
    assert BudgetChooser((1, 2, 4), costs, lambda rows: 2)(2).block == 4


def test_drafting_starts_again_when_the_load_falls() -> None:
    times = {(64, 1): 1.0, (64, 4): 4.0, (64, 64, 4): 4.1, (1, 1): 1.0, (1, 4): 1.1, (1, 16, 4): 1.2}
    blocks, trees = (
        BlockChooser((1, 4), StepCosts(times), lambda n: n),
        BudgetChooser((1, 4), StepCosts(times), lambda n: n),
    )
    assert {blocks(of(0.0)) for _ in range(2000)} == {1, 4}, "probes have become rare"
    assert {blocks(of(*[1.0] * 64)) for _ in range(300)} == {1}
    assert {trees(64) for _ in range(300)} == {StepShape(1)}
    assert 4 in [blocks(of(0.0)) for _ in range(BlockChooser.LAST_PROBE)]
    assert blocks(of(1.0)) == 4 and trees(1).block == 4
    untried = of(0.0)
    untried[0].acceptance.tried = False
    assert {blocks(of(*[0.0] * 64)) for _ in range(300)} == {1}
    blocks(of(0.0))
    assert 4 in [blocks(untried) for _ in range(BlockChooser.FIRST_PROBE)], "a new request is tried soon"
