"""How probable it is that the target accepts a drafted token, from what the drafter thinks of it."""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

DAMPING = 10.0  # as strong as so many pairs that are even odds hold the values from before
EXTREME = 1e-6  # probabilities this close to 0 or 1 count as this


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
        """The most likely calibration of n nodes whose parents were accepted, drawn towards this one.

        Slots with few nodes stay close to where they are, and without any node nothing changes.

        Args:
            probabilities: the drafter's, [n].
            slots: int64 [n], 1..S-1.
            accepted: bool [n].
            damping: > 0; adds damping / 8 * (change of a parameter)^2 to the negative log-likelihood.
        """
        before = torch.tensor([self.slope, *self.bias], dtype=torch.float64, device=slots.device)
        x = torch.cat([_log_odds(probabilities)[:, None], F.one_hot(slots - 1, len(self.bias)).double()], dim=1)
        y, pull, now = accepted.double(), damping / 4, before

        def loss(at: Tensor) -> float:
            likelihood = F.binary_cross_entropy_with_logits(x @ at, y, reduction="sum")
            return float(likelihood + pull / 2 * (at - before).square().sum())

        for _ in range(50):  # Newton's method; convex, so halved steps always get there
            p = torch.sigmoid(x @ now)
            gradient = x.T @ (p - y) + pull * (now - before)
            curvature = (x.T * (p * (1 - p))) @ x + pull * torch.eye(len(now), dtype=x.dtype, device=x.device)
            step = torch.linalg.solve(curvature, gradient)
            while loss(now - step) > loss(now) and step.abs().max() > 1e-9:
                step = step / 2
            now = now - step
            if step.abs().max() < 1e-9:
                break
        slope, *bias = now.tolist()
        return Calibration(slope, tuple(bias))


def _log_odds(probabilities: Tensor) -> Tensor:
    return torch.logit(probabilities.double(), eps=EXTREME)
