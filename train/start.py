"""A run that starts from a drafter there is: for a fine-tuned or quantised target, or to go on with other data.

Any form that `load_drafter` reads will do: z-lab's, ours, the speculators library's. Sliding or causal layers, a
reduced vocabulary (d2t, t2d) and a scaled rope (YaRN) are refused: what is trained is full attention over plain RoPE
with the target's own head.
"""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch
from transformers import PreTrainedConfig

from dflash_toolkit.checkpoint import check_fits, load_drafter, locate
from dflash_toolkit.config import UserError
from dflash_toolkit.drafter import Drafter, DrafterConfig

from .config import DrafterKnobs


def load_start(name: str, target: PreTrainedConfig, knobs: DrafterKnobs, given: Iterable[str], output: Path) -> Drafter:
    """A drafter of any form that `load_drafter` reads, in fp32 on the CPU, fit to train for `target`.

    Args:
        given: knobs that were chosen; the others follow the checkpoint.
        output: where the run exports to.

    Raises:
        UserError: it cannot be read, does not fit the target, is not the shape that was asked for, has attention that
            the trainer does not train, or would be overwritten.
    """
    folder = locate(name)
    if folder.resolve() == output.resolve():
        raise UserError(f"init_from and output are both {name}; the run would overwrite what it starts from")
    drafter = load_drafter(name, dtype=torch.float32)
    check_fits(drafter.config, target)
    found = knobs_of(drafter.config)
    for key in given:
        asked, holds = getattr(knobs, key), getattr(found, key)
        if asked not in (None, (), holds):
            raise UserError(
                f"drafter.{key} is {_plain(asked)}, but init_from={name} has {_plain(holds)}; leave the knob out"
            )
    shape = drafter.config
    if any(kind != "full_attention" for kind in shape.layer_types) or shape.is_causal:
        raise UserError(
            f"drafter {name}: its attention is causal or sliding inside the block; only full attention is trained"
        )
    # a form that does not record the target's depth is read as the least that its layer ids need
    drafter.config = replace(shape, num_target_layers=int(target.num_hidden_layers))
    return drafter.requires_grad_(True)


def knobs_of(shape: DrafterConfig) -> DrafterKnobs:
    """The knobs that spell a shape out."""
    return DrafterKnobs(
        layers=shape.num_layers,
        taps=len(shape.target_layer_ids),
        target_layer_ids=shape.target_layer_ids,
        block_size=shape.block_size,
        mask_token_id=shape.mask_token_id,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        intermediate_size=shape.intermediate_size,
    )


def _plain(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value
