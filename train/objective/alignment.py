"""Schedules of a drafter with a module between its layers (DSpine): true tokens first, and the weight of its loss."""

import torch
from torch import Tensor

from dflash_toolkit.kernels.reference import position_uniform

from .blocks import Blocks

# Shares of the run. The authors' warm-up is 146 steps.
REPLACEMENT = 0.5  # probability that a block reads true tokens at first
REPLACED, OWN = 1 / 6, 1 / 3  # until the first it stays, at the second it is 0
ALIGNMENT, WARM_UP = 0.5, 0.04  # weight of the module's loss after the warm-up
STREAM = 7  # stream of random numbers, apart from those of decoding


def alignment_weight(done: float) -> float:
    """Returns the weight of the module's loss, relative to the cross-entropy, at the share `done` of a run."""
    return ALIGNMENT * min(1.0, done / WARM_UP)


def replacement(done: float) -> float:
    """Returns the probability that a block reads the true tokens."""
    return REPLACEMENT * min(1.0, max(0.0, (OWN - done) / (OWN - REPLACED)))


def slot_tokens(blocks: Blocks, done: float) -> tuple[Tensor, Tensor]:
    """Returns the true token of every slot [B, A*S], and the blocks that read them, bool [B, A].

    The choice depends on the block and on `done` only: neither on the number of processes nor on `optim.splits`.
    """
    tokens = torch.cat([blocks.inputs[:, :, :1], blocks.labels[:, :, 1:]], dim=2)
    seeds = blocks.inputs[:, :, 0] + round(done * 1e9)
    return tokens.flatten(1), position_uniform(seeds, blocks.positions[:, :, 0], STREAM) < replacement(done)
