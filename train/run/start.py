"""Starts a run from an existing drafter: for a fine-tuned or quantized target, or to continue with other data.

Accepts every form that `load_drafter` reads: z-lab's, ours, the speculators library's, also with a scaled rope. Its
layers keep their attention, and its blocks their size, unless an option changes them; no weight depends on either.
Parts of its own or another kind are added on request, and have no effect at first. The head is the target's own: from
a reduced vocabulary (d2t, t2d) only the layers are used. A run prints what it changes.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig

from dflash_toolkit.checkpoint.reader import locate
from dflash_toolkit.config import UserError
from dflash_toolkit.models.dflash.checkpoint import check_fits, load_drafter, read_json, reduced_vocabulary
from dflash_toolkit.models.dflash.config import DrafterConfig
from dflash_toolkit.models.dflash.network import Drafter
from dflash_toolkit.models.dflash.shape import with_attention

from ..training_options import DrafterOptions

SIGHT = ("layer_types", "sliding_window", "is_causal")  # attention options, which change no weight's shape
FREE = (*SIGHT, "block_size")  # options that a start may change


@dataclass(frozen=True, slots=True)
class Start:
    """The start of a run."""

    drafter: Drafter  # fp32, on the CPU
    changed: tuple[str, ...]  # lines on what is trained differently from the checkpoint


def load_start(
    name: str, target: PreTrainedConfig, options: DrafterOptions, given: Iterable[str], output: Path, seed: int
) -> Start:
    """Loads a drafter in any form of `load_drafter`, also with a reduced vocabulary, to train for `target`.

    Args:
        given: options that were given; the others follow the checkpoint.
        output: directory of the run's export.
        seed: for parts that the checkpoint lacks.

    Raises:
        UserError: it cannot be read, does not fit the target, has another shape than the options, or would be
            overwritten.
    """
    folder = locate("drafter", name)
    if folder.resolve() == output.resolve():
        raise UserError(f"init_from and output are both {name}; give another --output, or the run overwrites its start")
    drafter = load_drafter(name, dtype=torch.float32, layers_only=True)
    check_fits(drafter.config, target)
    given, before = list(given), _attention(drafter.config)
    changed = []
    if added := _parts_to_add(drafter.config, options, given):
        sizes = ", ".join(f"{key} {value}" for key, value in added.items())
        title = options.architecture.title if options.architecture else ""
        changed.append(f"drafter {name} gets parts of {title}, which have no effect yet: {sizes}")
        try:
            drafter = _with_parts(drafter, added, seed)
        except ValueError as error:
            raise UserError(f"drafter {name}: cannot get parts of {title}: {error}") from error
    found = options_of(drafter.config)
    for key in (key for key in given if key not in FREE):
        asked, holds = getattr(options, key), getattr(found, key)
        if asked not in (None, (), holds):
            raise UserError(
                f"drafter.{key} is {_plain(asked)}, but init_from={name} has {_plain(holds)}; leave the option out"
            )
    shape = drafter.config
    if (rows := reduced_vocabulary(read_json(folder / "config.json"))) is not None:
        changed.append(
            f"drafter {name} has a reduced vocabulary of {rows}; only its layers are used, with the target's head"
        )
    try:
        if "block_size" in given and options.block_size != shape.block_size:
            changed.append(
                f"drafter {name} has blocks of {shape.block_size}; blocks of {options.block_size} are trained"
            )
            shape = shape.with_block_size(options.block_size)
        trained = _with_attention_options(shape, options, given)
    except ValueError as error:
        raise UserError(f"drafter: {error}") from error
    if before != (after := _attention(trained)):
        changed.append(f"drafter {name} has {before}; {after} is trained")
    # a form without the target's depth is read as the smallest that its layer ids need
    drafter.config = replace(trained, num_target_layers=int(target.num_hidden_layers))
    return Start(drafter.requires_grad_(True), tuple(changed))


def _parts_to_add(shape: DrafterConfig, options: DrafterOptions, given: Collection[str]) -> dict[str, Any]:
    """Returns the sizes of requested parts that the drafter lacks."""
    kind = options.architecture
    if kind is None or not {"kind", *kind.sizes} & set(given):
        return {}
    wanted = kind.sizes_of(options.sizes, shape.hidden_size)
    return {name: size for name, size in wanted.items() if size and not getattr(shape, name, 0)}


def _with_parts(drafter: Drafter, sizes: dict[str, Any], seed: int) -> Drafter:
    """Returns the drafter with new parts, initialised as in a fresh one."""
    whole = Drafter.fresh(drafter.config.resized(**sizes), seed)
    whole.load_state_dict(drafter.state_dict(), strict=False)
    return whole


def _with_attention_options(shape: DrafterConfig, options: DrafterOptions, given: Collection[str]) -> DrafterConfig:
    asked = options.layer_types if "layer_types" in given else ()
    kinds = asked or shape.layer_types
    window = options.sliding_window if "sliding_window" in given else None
    if window is None and "sliding_attention" in set(kinds) & set(shape.layer_types):
        window = shape.sliding_window
    return with_attention(shape, kinds, window, options.is_causal if "is_causal" in given else shape.is_causal)


def _attention(shape: DrafterConfig) -> str:
    """Returns the attention of a drafter's layers in words."""
    layers = range(shape.num_layers)
    sliding = [layer for layer in layers if shape.layer_types[layer] == "sliding_attention"]
    causal = [layer for layer in layers if shape.causal_inside_block(layer)]
    found = []
    if sliding:
        found.append(f"a sliding window of {shape.sliding_window} tokens (layers {sliding})")
    if causal:
        found.append(f"causal attention inside the block (layers {causal})")
    return " and ".join(found) or "full attention"


def options_of(shape: DrafterConfig) -> DrafterOptions:
    """Returns the options of a shape."""
    return DrafterOptions(
        kind=shape.architecture.kind,
        layers=shape.num_layers,
        taps=len(shape.target_layer_ids),
        target_layer_ids=shape.target_layer_ids,
        block_size=shape.block_size,
        mask_token_id=shape.mask_token_id,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        intermediate_size=shape.intermediate_size,
        **{key: getattr(shape, key) for key in SIGHT},
        **DrafterOptions.sizes_in(shape),
    )


def _plain(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value
