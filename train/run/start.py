"""A run that starts from a drafter there is: for a fine-tuned or quantized target, or to go on with other data.

Any form that `load_drafter` reads will do: z-lab's, ours, the speculators library's, with a scaled rope too. What is
trained is full attention over the target's own head: of a reduced vocabulary (d2t, t2d) the layers alone are taken, and
sliding or causal ones see everything from then on. A run says so.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import PreTrainedConfig

from dflash_toolkit.checkpoint.reader import locate
from dflash_toolkit.config import UserError
from dflash_toolkit.models.dflash.checkpoint import check_fits, load_drafter, read_json, reduced_vocabulary
from dflash_toolkit.models.dflash.network import Drafter, DrafterConfig

from ..config import DrafterOptions


@dataclass(frozen=True, slots=True)
class Start:
    """What a run starts from."""

    drafter: Drafter  # fp32, on the CPU
    changed: tuple[str, ...]  # a line for everything that is trained in another way than the checkpoint says


def load_start(
    name: str, target: PreTrainedConfig, options: DrafterOptions, given: Iterable[str], output: Path
) -> Start:
    """A drafter of any form that `load_drafter` reads, of a reduced vocabulary too, fit to train for `target`.

    Args:
        given: options that were chosen; the others follow the checkpoint.
        output: where the run exports to.

    Raises:
        UserError: it cannot be read, does not fit the target, is not the shape that was asked for, or would be
            overwritten.
    """
    folder = locate("drafter", name)
    if folder.resolve() == output.resolve():
        raise UserError(f"init_from and output are both {name}; the run would overwrite what it starts from")
    drafter = load_drafter(name, dtype=torch.float32, layers_only=True)
    check_fits(drafter.config, target)
    found = options_of(drafter.config)
    for key in given:
        asked, holds = getattr(options, key), getattr(found, key)
        if asked not in (None, (), holds):
            raise UserError(
                f"drafter.{key} is {_plain(asked)}, but init_from={name} has {_plain(holds)}; leave the option out"
            )
    shape, changed = drafter.config, []
    if (rows := reduced_vocabulary(read_json(folder / "config.json"))) is not None:
        changed.append(
            f"drafter {name} has a reduced vocabulary of {rows}; its layers are taken, the head is the target's"
        )
    if attention := _other_attention(shape):
        changed.append(f"drafter {name} has {attention}; full attention is trained")
    drafter.config = replace(
        shape,
        # a form that does not record the target's depth is read as the least that its layer ids need
        num_target_layers=int(target.num_hidden_layers),
        layer_types=(), sliding_window=None, is_causal=False,
    )  # fmt: skip
    return Start(drafter.requires_grad_(True), tuple(changed))


def _other_attention(shape: DrafterConfig) -> str:
    """In which layers a drafter sees less than everything; empty if in none."""
    layers = range(shape.num_layers)
    sliding = [layer for layer in layers if shape.layer_types[layer] == "sliding_attention"]
    causal = [layer for layer in layers if shape.causal_inside_block(layer)]
    found = []
    if sliding:
        found.append(f"a sliding window of {shape.sliding_window} tokens (layers {sliding})")
    if causal:
        found.append(f"causal attention inside the block (layers {causal})")
    return " and ".join(found)


def options_of(shape: DrafterConfig) -> DrafterOptions:
    """The options that spell a shape out."""
    return DrafterOptions(
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
