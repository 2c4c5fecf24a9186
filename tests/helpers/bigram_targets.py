"""A target with a next token that depends on the current one alone, so that a tiny drafter learns it in a few steps."""

import torch
from conftest import make_target

from dflash_toolkit import Target
from dflash_toolkit.train.live.replay import is_held_out
from dflash_toolkit.train.online import Record


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


def prompts_to_learn(first: int = 0) -> list[list[int]]:
    """Returns 44 prompts: few to train on, and as many for measuring as a promotion needs."""
    sides: dict[bool, list[list[int]]] = {True: [], False: []}
    for i in range(first, first + 400):
        prompt = [i % 250, 2 * i % 250, 7 + i // 250, 5 * i % 250]
        sides[is_held_out(Record([*prompt, 0], torch.zeros(4, 1), [(4, 5)]))].append(prompt)
    return sides[True][:20] + sides[False][:24]
