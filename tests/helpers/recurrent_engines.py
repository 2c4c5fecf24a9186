"""Engines of targets with recurrent layers."""

import random
from collections.abc import Sequence
from functools import cache

import torch
from conftest import make_drafter, make_target

from dflash_toolkit import Drafter, Target
from dflash_toolkit.runtime import Engine, Request
from dflash_toolkit.runtime.request import StepShape


@cache
def pair(kind: str = "qwen3_5") -> tuple[Target, Drafter]:
    target = make_target(kind, tied=False)
    with torch.no_grad():
        for parameter in target.model.parameters():
            if parameter.dim() == 1:  # norms of zeros would hide mistakes
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return target, make_drafter(target)


def any_shapes(engine: Engine, dice: random.Random) -> None:
    """Chooses steps of blocks and of chains of any length, like a row budget, with any number of rows."""

    def chosen(requests: Sequence[Request]) -> StepShape:
        block = dice.choice([1, *engine.runner.trees.blocks, 8, 8])
        rows = len(requests) * dice.randrange(2, 7) - 1
        return StepShape(block, rows if block > 1 and dice.random() < 0.8 else 0)

    engine.scheduler.choose_shape = chosen
