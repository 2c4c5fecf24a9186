"""A target whose next token depends on the current one alone, so that a tiny drafter learns it in a few steps."""

import torch
from conftest import make_target

from dflash_toolkit import Target


def bigram_target(seed: int = 0, layers: int = 6) -> Target:
    """Returns a target without effective layers: its greedy answers end in one of a few cycles, those of the seed."""
    target = make_target(tied=False, layers=layers)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer in target.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        target.head_weight.copy_(torch.randn(target.head_weight.shape, generator=generator))
    return target
