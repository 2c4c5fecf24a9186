"""Blocks with labels for tests of the losses."""

import torch

from dflash_toolkit.train.objective.blocks import Blocks

B, A, S, D, V = 2, 3, 5, 8, 37


def blocks(seed: int = 0) -> Blocks:
    g = torch.Generator().manual_seed(seed)
    supervised = torch.ones(B, A, S, dtype=torch.bool)
    supervised[:, :, 0] = False
    supervised[0, 1, 3:] = False
    supervised[1, 2] = False
    valid = torch.ones(B, A, dtype=torch.bool)
    valid[1, 2] = False
    labels = torch.randint(0, V, (B, A, S), generator=g).masked_fill(~supervised, 0)
    return Blocks(torch.zeros(B, A, dtype=torch.long), valid, labels.clone(), labels.clone(), labels, supervised)
