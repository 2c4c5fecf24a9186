"""Slot weights and the drafter's loss: weighted cross-entropy of the frozen head, normalised by the sum of weights."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_toolkit.kernels.loss import frozen_head_loss

from .blocks import Blocks
from .config import LossKnobs


@dataclass(slots=True)
class DraftLoss:
    """The loss of one step and what it says about acceptance."""

    loss: Tensor  # scalar, differentiable
    slot_accuracy: Tensor  # [S - 1] share of supervised slots whose argmax is the label; NaN where there is none
    acceptance_length: Tensor  # scalar, teacher-forced estimate of tau over the step's blocks
    rows: int  # R, supervised slots
    weighted_sum: Tensor  # scalar, differentiable; over `weight_sum` it is the loss
    weight_sum: Tensor  # scalar
    supervised: Tensor  # [S - 1] slots that have a label
    blocks: Tensor  # scalar, valid blocks

    def totals(self) -> Tensor:
        """What can be added up over micro steps and processes, float64 [4 + 2 * (S - 1)]; see `of_totals`."""
        correct = torch.where(self.supervised > 0, self.slot_accuracy * self.supervised, 0.0)
        accepted = (self.acceptance_length - 1) * self.blocks
        sums = torch.stack([t.detach().double() for t in (self.weighted_sum, self.weight_sum, accepted, self.blocks)])
        return torch.cat([sums, correct.double(), self.supervised.double()])

    @classmethod
    def of_totals(cls, totals: Tensor) -> "DraftLoss":
        """The loss of everything that was added up."""
        weighted, weight, accepted, blocks = totals[:4]
        correct, supervised = totals[4:].chunk(2)
        return cls(
            loss=weighted / weight, slot_accuracy=correct / supervised, acceptance_length=1 + accepted / blocks,
            rows=int(supervised.sum()), weighted_sum=weighted, weight_sum=weight, supervised=supervised, blocks=blocks,
        )  # fmt: skip


def decay_weights(slots: int, gamma: float, device: torch.device | str = "cpu") -> Tensor:
    """w_k = exp(-(k - 1) / gamma) for slots k = 1..`slots` (arXiv 2602.06036 section 4.2)."""
    return torch.exp(-torch.arange(slots, device=device, dtype=torch.float32) / gamma)


def dpace_weights(losses: Tensor, supervised: Tensor, alpha: float) -> Tensor:
    """D-PACE (arXiv 2605.18810): how much slot j matters to the expected accepted length.

    q_i = exp(-CE_i), smoothed to (1 - alpha) q_i + alpha; w_j = sum over m >= j of prod_{i <= m} q_i.

    Args:
        losses: [..., S - 1] cross-entropy per slot, no gradient flows through the weights.
        supervised: [..., S - 1] bool; a product stops at the first slot that has no label.

    Returns:
        [..., S - 1], zero where not supervised.
    """
    q = (1 - alpha) * torch.exp(-losses.detach().float()) + alpha
    reach = (q * supervised).cumprod(-1)  # prod_{i <= m} q_i
    return reach.flip(-1).cumsum(-1).flip(-1) * supervised


def draft_loss(hidden: Tensor, blocks: Blocks, head_weight: Tensor, knobs: LossKnobs, gamma: float) -> DraftLoss:
    """The loss of a batch of blocks.

    Args:
        hidden: [B, A*S, D] normed outputs of the drafter.
        head_weight: [V, D], the target's.

    Raises:
        ValueError: no slot of the batch is supervised.
    """
    supervised = blocks.supervised[:, :, 1:]  # slot 0 is the anchor; its output is discarded
    if not supervised.any():
        raise ValueError("no supervised slot in this batch")
    by_slot = hidden.view(*blocks.inputs.shape, -1)[:, :, 1:]
    rows = frozen_head_loss(by_slot[supervised], head_weight, blocks.labels[:, :, 1:][supervised], knobs.head_rows)

    def grid(values: Tensor) -> Tensor:  # [R] back to [B, A, S - 1], zero where not supervised
        return torch.zeros(supervised.shape, dtype=values.dtype, device=values.device).masked_scatter(
            supervised, values
        )

    if knobs.weights == "dpace":
        weights = dpace_weights(grid(rows.loss.detach()), supervised, knobs.alpha)[supervised]
    else:
        decay = decay_weights(supervised.shape[-1], gamma, hidden.device)
        weights = decay.expand(supervised.shape)[supervised]
    weighted_sum, weight_sum = (weights * rows.loss).sum(), weights.sum()

    correct = grid(rows.correct)
    accepted = correct.long().cumprod(-1).sum(-1)[blocks.valid]
    return DraftLoss(
        loss=weighted_sum / weight_sum,
        slot_accuracy=correct.sum((0, 1)) / supervised.sum((0, 1)),
        acceptance_length=1 + accepted.float().mean(),
        rows=len(rows.loss),
        weighted_sum=weighted_sum,
        weight_sum=weight_sum,
        supervised=supervised.sum((0, 1)),
        blocks=blocks.valid.sum(),
    )
