"""Drafters to start a run from, in every form."""

from pathlib import Path
from typing import Any

import torch
from conftest import make_drafter, make_target
from damage import damage
from safetensors.torch import load_file

from dflash_toolkit import Drafter, save_drafter
from dflash_toolkit.models.dflash.speculators import save_speculators
from dflash_toolkit.models.rope import RopeScaling

STILL = ("optim.steps=1", "optim.learning_rate=1e-30")  # a step that changes no fp32 weight
YARN = RopeScaling(rope_type="yarn", factor=4.0, original_max_position_embeddings=16)


def small_drafter(**changes: Any) -> Drafter:
    return make_drafter(make_target(), **({"taps": 2, "layers": 1, "block_size": 4} | changes))


def write_start(form: str, path: Path, drafter: Drafter) -> Path:
    if form == "z-lab":
        save_drafter(drafter, path)
        return path
    target = make_target()
    save_speculators(drafter, path, target.config, target.embedding.weight, target.head_weight)
    # as that library writes it: the target's depth is not recorded
    theirs = {"emb_dim": 256, "projector_type": "dflash", "sample_from_anchor": False, "shift_label": False}
    damage(path / "config.json", theirs | {"dflash_toolkit": None})
    if form == "prefixed":
        tensors = load_file(path / "model.safetensors") | {"verifier_norm.weight": torch.ones(32)}
        renamed = {f"model.{name}": value for name, value in tensors.items()}
        damage(path / "model.safetensors", dict.fromkeys(tensors) | renamed)
    return path
