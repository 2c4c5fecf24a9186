"""How probable it is that the target accepts a drafted token, from what the drafter thinks of it."""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

DAMPING = 10.0  # as strong as so many pairs that are even odds hold the values from before
EXTREME = 1e-6  # probabilities this close to 0 or 1 count as this
LARGEST = float(np.log1p(-EXTREME) - np.log(EXTREME))  # and their log-odds


@dataclass(frozen=True, slots=True)
class Calibration:
    """sigmoid(slope * log-odds + bias of the slot): the probability of a node whose parent is accepted.

    Log-odds are those of the probability that the drafter gives the node's token behind its parent.
    """

    slope: float
    bias: tuple[float, ...]  # [S - 1], of slots 1..S-1

    @classmethod
    def cold(cls, slots: int) -> "Calibration":
        """The drafter's own probabilities, before anything was verified."""
        return cls(1.0, (0.0,) * slots)

    def of_slots(self, count: int) -> "Calibration":
        """Of the first so many; more than there are have the last one's bias."""
        return replace(self, bias=(*self.bias[:count], *self.bias[-1:] * (count - len(self.bias))))

    def __call__(self, probabilities: Tensor, slots: Tensor) -> Tensor:
        """Calibrated probabilities, fp64 of the shape of both; slots are 1..S-1."""
        bias = torch.tensor(self.bias, dtype=torch.float64, device=slots.device)
        return torch.sigmoid(self.slope * _log_odds(probabilities) + bias[slots - 1])

    def refit(self, probabilities: Tensor, slots: Tensor, accepted: Tensor, damping: float = DAMPING) -> "Calibration":
        """The most likely calibration of n nodes whose parents were accepted, see `refit_odds`.

        Args:
            probabilities: the drafter's, [n].
            slots: int64 [n], 1..S-1.
            accepted: bool [n].
        """
        odds = _log_odds(probabilities)
        return self.refit_odds(odds.cpu().numpy(), slots.cpu().numpy(), accepted.cpu().numpy(), damping)

    def refit_odds(
        self, odds: np.ndarray, slots: np.ndarray, accepted: np.ndarray, damping: float = DAMPING
    ) -> "Calibration":
        """The most likely calibration of n nodes whose parents were accepted, drawn towards this one.

        Slots with few nodes stay close to where they are, and without any node nothing changes. Runs in the thread that
        calls it alone and starts no others: it may run beside decoding.

        Args:
            odds: fp64 [n], log-odds of the drafter's probabilities.
            slots: int64 [n], 1..S-1.
            accepted: bool [n].
            damping: > 0; adds damping / 8 * (change of a parameter)^2 to the negative log-likelihood.
        """
        x, at, pull = np.clip(odds, -LARGEST, LARGEST), slots - 1, damping / 4
        before = np.array([self.slope, *self.bias])
        now = before

        def by_slot(values: np.ndarray) -> np.ndarray:
            return np.bincount(at, values, minlength=len(self.bias))

        def scores(of: np.ndarray) -> np.ndarray:
            return of[0] * x + of[1:][at]

        def loss(of: np.ndarray) -> float:
            z = scores(of)
            return float((np.logaddexp(0, z) - accepted * z).sum() + pull / 2 * np.square(of - before).sum())

        last = loss(now)
        for _ in range(50):  # Newton's method; convex, so halved steps always get there
            p = np.exp(-np.logaddexp(0, -scores(now)))
            error, weight = p - accepted, p * (1 - p)
            gradient = np.array([(error * x).sum(), *by_slot(error)]) + pull * (now - before)
            # biases of two slots do not meet in the curvature, so the slope's step is known at once
            both, own = by_slot(weight * x), by_slot(weight) + pull
            slope = (gradient[0] - both @ (gradient[1:] / own)) / ((weight * x**2).sum() + pull - both @ (both / own))
            step = np.array([slope, *((gradient[1:] - both * slope) / own)])
            while (tried := loss(now - step)) > last and np.abs(step).max() > 1e-9:
                step = step / 2
            now, last = now - step, tried
            if np.abs(step).max() < 1e-9:
                break
        slope, *bias = now.tolist()
        return Calibration(slope, tuple(bias))


def _log_odds(probabilities: Tensor) -> Tensor:
    return torch.logit(probabilities.double(), eps=EXTREME)
