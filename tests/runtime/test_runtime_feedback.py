"""Outcomes of verified trees: the drafter's own log-odds are recovered, and the calibration follows them."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from engines import make_engine, pair

from dflash_toolkit import Drafter
from dflash_toolkit.calibration import Calibration
from dflash_toolkit.kernels.reference import accept_trees, cut_trees, draft_children, grow_trees
from dflash_toolkit.runtime.trees.feedback import CalibrationFeed, NodeOutcomes, node_outcomes

BATCH, SLOTS, COUNT, VOCABULARY = 4, 5, 4, 9
CALIBRATION = Calibration(0.7, (0.4, 0.0, -0.3, -0.6, -0.8))


def test_node_outcomes_have_the_drafters_own_odds() -> None:
    dice = torch.Generator().manual_seed(2)
    unary = 2 * torch.randn(BATCH, SLOTS, COUNT, generator=dice)
    candidates = torch.stack(
        [torch.randperm(VOCABULARY, generator=dice)[:COUNT] for _ in range(BATCH * SLOTS)]
    ).unflatten(0, (BATCH, SLOTS))
    lse = unary.logsumexp(-1) + 0.2
    fitted = torch.tensor([CALIBRATION.slope, *CALIBRATION.bias], dtype=torch.float64)
    values, ranks = draft_children(unary, lse, candidates, fitted, COUNT)
    discounts = torch.tensor([0.0, -1.5, 0.0, -0.2])
    values[:, 0] += discounts[:, None, None]
    trees = grow_trees(values, ranks, candidates, torch.tensor([5, 5, 0, 3], dtype=torch.int32), nodes=30)
    lengths, last = torch.zeros(BATCH, dtype=torch.int32), torch.zeros(BATCH, dtype=torch.int64)
    rows = cut_trees(trees, last, lengths, torch.arange(16).reshape(BATCH, 4), 16, rows=64)
    choice = torch.randint(VOCABULARY, (64,), generator=dice)
    for row in range(64):  # the target often takes the likeliest child
        children = [r for r in range(row + 1, 64) if int(rows.requests[r]) >= 0 and int(rows.parents[r]) == row]
        if children and row % 3:
            choice[row] = rows.tokens[children[0]]
    active = torch.tensor([True, True, True, True])
    counts, _, path = accept_trees(rows, choice, active, lengths, last, SLOTS + 1)
    of_rows = (part.numpy() for part in (rows.starts, rows.parents, rows.depths, rows.log_probs))
    step = node_outcomes(*of_rows, path.numpy(), counts.numpy(), CALIBRATION, discounts.numpy())

    expected = list[tuple[int, float, bool]]()
    promised = np.zeros(BATCH)
    for row, (b, depth) in enumerate(zip(rows.requests.tolist(), rows.depths.tolist(), strict=True)):
        if b < 0 or not depth:
            continue
        promised[b] += np.exp(float(rows.log_probs[row]) - float(discounts[b]))
        walked = path[b].tolist()
        if int(rows.parents[row]) in walked:
            rank = candidates[b, depth - 1].tolist().index(int(rows.tokens[row]))
            p = float((unary[b, depth - 1, rank] - lse[b, depth - 1]).exp())
            expected.append((depth, np.log(p / (1 - p)), row in walked))
    assert len(expected) > 8 and any(accepted for *_, accepted in expected)
    slots, odds, accepted = map(list, zip(*expected, strict=True))
    assert step.slots.tolist() == slots and step.accepted.tolist() == accepted
    np.testing.assert_allclose(step.odds, odds, atol=1e-4)
    np.testing.assert_allclose(step.promised, promised, rtol=1e-5)
    assert step.accepted_nodes.tolist() == (counts - 1).tolist() and step.promised[2] == 0


@pytest.mark.parametrize("broken", [float("nan"), -float("inf")])
def test_drafts_with_nan_do_not_change_the_calibration(broken: float) -> None:
    """Not even if the target happens to choose one of them."""
    starts, parents, depths = np.array([0, 3, 6]), np.array([0, 0, 1, 3, 3, 4]), np.array([0, 1, 2, 0, 1, 2])
    log_probs = np.array([0.0, -0.5, -1.0, broken, broken, broken], dtype=np.float32)
    path, counts = np.array([[0, 1, 0], [3, 4, 5]]), np.array([2, 3])
    step = node_outcomes(starts, parents, depths, log_probs, path, counts, CALIBRATION)
    assert step.slots.tolist() == [1, 2] and step.accepted.tolist() == [True, False]
    assert np.isfinite(step.odds).all() and step.promised.tolist() == pytest.approx([np.exp(-0.5) + np.exp(-1.0), 0.0])
    found = CalibrationFeed(CALIBRATION)
    for _ in range(200):
        found.observe(step)
    assert np.isfinite([found.calibration.slope, *found.calibration.bias]).all() and found.calibration != CALIBRATION


def test_engine_starts_with_the_measured_acceptance() -> None:
    target, drafter = pair()
    drafter = Drafter.of_tensors(
        replace(drafter.config, acceptance_slope=0.7, acceptance_bias=(0.4, -0.2)), dict(drafter.named_parameters())
    )
    for length, bias in ((7, (0.4, *[-0.2] * 6)), (1, (0.4,))):
        trees = make_engine(target, drafter, draft_tree=4, num_speculative_tokens=length).runner.trees
        assert trees is not None and trees.calibration == Calibration(0.7, bias)


def step(planted: Calibration, dice: torch.Generator, count: int = 100) -> NodeOutcomes:
    odds = 2 * torch.randn(count, generator=dice, dtype=torch.float64)
    slots = torch.randint(1, SLOTS + 1, (count,), generator=dice)
    accepted = torch.rand(count, generator=dice) < planted(odds.sigmoid(), slots)
    return NodeOutcomes(slots.numpy(), odds.numpy(), accepted.numpy(), np.zeros(1), np.zeros(1, dtype=np.int64))


def fed(steps: list[NodeOutcomes]) -> list[Calibration]:
    """The calibration before every step."""
    feed, found = CalibrationFeed(Calibration.cold(SLOTS), window=4000), list[Calibration]()
    for each in steps:
        found.append(feed.calibration)
        feed.observe(each)
    return found


def test_the_calibration_follows_outcomes_reproducibly() -> None:
    dice = torch.Generator().manual_seed(0)
    later = replace(CALIBRATION, bias=tuple(bias - 2 for bias in CALIBRATION.bias))
    steps = [step(CALIBRATION, dice) for _ in range(150)] + [step(later, dice) for _ in range(300)]
    found = fed(steps)
    assert found[2] == Calibration.cold(SLOTS), "not before there is something to go by"
    assert found == fed(steps)
    assert len(set(map(id, found))) <= 10, "ever more seldom"
    for at, planted in ((149, CALIBRATION), (449, later)):
        assert found[at].slope == pytest.approx(planted.slope, abs=0.1)
        assert found[at].bias == pytest.approx(planted.bias, abs=0.35)


def test_steps_without_outcomes_change_no_calibration() -> None:
    dice = torch.Generator().manual_seed(0)
    nothing = step(CALIBRATION, dice, count=0)
    assert fed([nothing] * 60)[-1] == Calibration.cold(SLOTS)
    wrong = [step(replace(CALIBRATION, slope=-1.0), dice) for _ in range(60)]
    assert fed(wrong)[-1].slope == pytest.approx(0.05)
