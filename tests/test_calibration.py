"""The calibration of a drafter's probabilities."""

import pytest
import torch
from torch import Tensor

from dflash_toolkit.calibration import Calibration

PLANTED = Calibration(0.6, (0.5, 0.0, -0.8, -1.5))


def pairs(count: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Draws probabilities, slots and acceptance by PLANTED."""
    dice = torch.Generator().manual_seed(seed)
    probabilities = torch.sigmoid(2 * torch.randn(count, generator=dice))
    slots = torch.randint(1, 5, (count,), generator=dice)
    return probabilities, slots, torch.rand(count, generator=dice) < PLANTED(probabilities, slots)


def test_refit_recovers_a_planted_calibration() -> None:
    found = Calibration.cold(4).refit(*pairs(40_000))
    assert found.slope == pytest.approx(PLANTED.slope, abs=0.05)
    assert found.bias == pytest.approx(PLANTED.bias, abs=0.1)


def test_calibrated_probabilities_match_acceptance_rates() -> None:
    probabilities, slots, accepted = pairs(20_000)
    found = Calibration.cold(4).refit(probabilities, slots, accepted)
    for slot in range(1, 5):
        of = slots == slot
        share = found(probabilities[of], slots[of]).mean()
        assert float(share) == pytest.approx(float(accepted[of].float().mean()), abs=0.005)


def test_cold_calibration_keeps_the_drafter_probability() -> None:
    probabilities, slots, _ = pairs(100)
    torch.testing.assert_close(Calibration.cold(4)(probabilities, slots), probabilities.double())


def test_slots_without_observations_keep_their_bias() -> None:
    probabilities, slots, accepted = pairs(2000)
    nothing = slots == 0
    assert PLANTED.refit(probabilities[nothing], slots[nothing], accepted[nothing]) == PLANTED
    first = slots == 1
    found = PLANTED.refit(probabilities[first], slots[first], ~accepted[first])
    assert found.bias[1:] == PLANTED.bias[1:] and found.bias[0] != PLANTED.bias[0]


def test_damping_limits_the_effect_of_few_observations() -> None:
    """Without damping, five accepted nodes would give an infinite bias."""
    few = torch.full((5,), 0.5), torch.ones(5, dtype=torch.int64), torch.ones(5, dtype=torch.bool)
    found = [Calibration.cold(4).refit(*few, damping=damping) for damping in (1.0, 10.0, 100.0)]
    biases = [each.bias[0] for each in found]
    assert 4 > biases[0] > biases[1] > biases[2] > 0
    assert [each.slope for each in found] == [1.0] * 3, "even odds say nothing of the slope"


def test_overconfident_drafters_are_calibrated_down() -> None:
    certain = torch.ones(200), torch.ones(200, dtype=torch.int64), torch.arange(200) % 2 == 0
    found = Calibration.cold(1).refit(*certain)
    assert float(found(torch.ones(1), torch.ones(1, dtype=torch.int64))) == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize("seed", range(4))
def test_refit_maximizes_the_likelihood(seed: int) -> None:
    """The gradient of the definition in PyTorch is zero at the fit."""
    probabilities, slots, accepted = pairs(300, seed)
    found = PLANTED.refit(probabilities, slots, accepted, damping=3.0)
    at = torch.tensor([found.slope, *found.bias], dtype=torch.float64, requires_grad=True)
    before = torch.tensor([PLANTED.slope, *PLANTED.bias], dtype=torch.float64)
    scores = at[0] * torch.logit(probabilities.double()) + at[1:][slots - 1]
    likelihood = torch.nn.functional.binary_cross_entropy_with_logits(scores, accepted.double(), reduction="sum")
    (likelihood + 3 / 8 * (at - before).square().sum()).backward()
    assert at.grad is not None and at.grad.abs().max() < 1e-6
