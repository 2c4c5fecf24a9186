"""The loss of a selector over the candidates of a block's slots: DFlash 2's, or another `TokenSelector`.

A selector receives the hidden states of whole blocks, each slot's best tokens with their logits, and the true previous
token of each slot. It returns scores of the candidates, the tokens that it would draft, and the loss of its scores.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_toolkit.kernels.loss import RowLoss
from dflash_toolkit.models.drafting import TokenSelector

from .blocks import Blocks

RAMP = 0.001  # share of the run over which the loss ramps up


@dataclass(frozen=True, slots=True)
class Chain:
    """A head's result for a batch of blocks."""

    loss: Tensor  # [R] of the supervised slots, fp32, differentiable; 0 where the label is no candidate
    drafted: Tensor  # [B, A, S - 1] tokens of slots 1..S-1, each chosen given the previous one


@dataclass(frozen=True, slots=True)
class Selector:
    """A head, and the current share of its loss."""

    head: TokenSelector
    top_k: int  # C, candidates of a slot
    share: float = 1.0

    def __call__(self, hidden: Tensor, blocks: Blocks, rows: RowLoss, slot: Tensor) -> Chain:
        """Returns the loss of the supervised slots, and the drafted tokens.

        Args:
            hidden: [B, A*S, D or more], the result of `Drafter.forward`.
            rows: losses and candidates of the R supervised slots.
            slot: [R] long, index of these among slots 1..S-1 of all blocks.
        """
        assert rows.candidates is not None and rows.unary is not None
        every = hidden.view(-1, blocks.size, hidden.shape[2])[:, 1:]  # [B*A, S - 1, D]

        def grid(values: Tensor) -> Tensor:  # [R, C] to [B*A, S - 1, C]; unsupervised slots are zero and unused
            whole = values.new_zeros(every.shape[0] * every.shape[1], self.top_k)
            return whole.index_copy(0, slot, values).view(*every.shape[:2], -1)

        before = torch.cat([blocks.inputs[:, :, :1], blocks.labels[:, :, 1:-1]], dim=2).flatten(0, 1)
        scores, drafted = self.head(every, grid(rows.unary), grid(rows.candidates), before)
        at = rows.candidates == blocks.labels[:, :, 1:].flatten()[slot, None]  # [R, C]
        losses = self.head.losses(scores.flatten(0, 1).index_select(0, slot), at, rows.teacher)
        return Chain(losses, drafted.view(*blocks.labels.shape[:2], -1))


def ramp(done: float) -> float:
    """Returns the current weight of the selector's loss when the share `done` of a run is done."""
    return min(1.0, done / RAMP)
