"""Maps the drafter's probability of a token to the probability that the target accepts the token."""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

DAMPING = 10.0  # the earlier values weigh as much as this many observations at even odds
EXTREME = 1e-6  # probabilities are clamped to this distance from 0 and 1
LARGEST = float(np.log1p(-EXTREME) - np.log(EXTREME))  # log-odds of a clamped probability


@dataclass(frozen=True, slots=True)
class Calibration:
    """Computes sigmoid(slope * log-odds + bias of the slot), the acceptance probability of a node given its parent.

    The log-odds are those of the drafter's probability of the node's token after its parent.
    """

    slope: float
    bias: tuple[float, ...]  # [S - 1], for slots 1..S-1

    @classmethod
    def cold(cls, slots: int) -> "Calibration":
        """Returns the calibration that keeps the drafter's own probabilities."""
        return cls(1.0, (0.0,) * slots)

    def of_slots(self, count: int) -> "Calibration":
        """Returns a copy for `count` slots; added slots have the bias of the last one."""
        return replace(self, bias=(*self.bias[:count], *self.bias[-1:] * (count - len(self.bias))))

    def __call__(self, probabilities: Tensor, slots: Tensor) -> Tensor:
        """Returns calibrated probabilities, fp64 in the shape of the arguments; slots are 1..S-1."""
        bias = torch.tensor(self.bias, dtype=torch.float64, device=slots.device)
        return torch.sigmoid(self.slope * _log_odds(probabilities) + bias[slots - 1])

    def refit(self, probabilities: Tensor, slots: Tensor, accepted: Tensor, damping: float = DAMPING) -> "Calibration":
        """Fits n nodes with accepted parents, see `refit_odds`.

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
        """Returns the most likely calibration of n nodes with accepted parents, regularized towards this one.

        Slots with few nodes change little, and without nodes nothing changes. Starts no threads, so it may run during
        decoding.

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
        for _ in range(50):  # Newton's method; the loss is convex, so halving the step always converges
            p = np.exp(-np.logaddexp(0, -scores(now)))
            error, weight = p - accepted, p * (1 - p)
            gradient = np.array([(error * x).sum(), *by_slot(error)]) + pull * (now - before)
            # the Hessian has no entry for two biases, so the slope's step has a closed form
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
