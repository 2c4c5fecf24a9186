"""Checks of a target and a drafter before another engine starts."""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packaging.version import Version

from dflash_toolkit.config import UserError
from dflash_toolkit.models.dflash.architecture import DFLASH, architectures, named
from dflash_toolkit.models.dflash.serving import READ, SERVED, block_scale, served_elsewhere
from dflash_toolkit.network import unreachable

if TYPE_CHECKING:
    from .external import Engine

SPECULATORS = {each.kind: each.names[0] for each in architectures()}  # speculators_model_type -> architecture
SLIDING = "sliding layers or is_causal"  # features of DFlashDraftModel; older releases silently ignore them


@dataclass(frozen=True)
class Draft:
    """Holds the parts of a drafter's config.json that other engines need."""

    name: str
    architecture: str
    speculators: bool  # a checkpoint of the speculators library
    block_size: int
    raw: Mapping[str, Any]  # the part with hidden_size and the like

    def check(self, engine: "Engine", version: str) -> None:
        """Raises UserError unless this release supports the drafter."""
        if self.architecture not in engine.releases:
            known = ", ".join(name for name in engine.releases if name != SLIDING)
            raise UserError(
                f"drafter {self.name}: dflash-serve cannot start {engine.name} with architecture "
                f"{self.architecture!r}, only with {known}{served_elsewhere(self.architecture)}"
            )
        if self.speculators and not engine.speculators:
            raise UserError(
                f"drafter {self.name}: {engine.name} does not read the speculators format; convert it: python -c "
                f"\"from dflash_toolkit import *; save_drafter(load_drafter('{self.name}'), 'OUT')\""
            )
        drafting = named(self.architecture) or DFLASH
        if part := drafting.part_lacking(engine.name, self.raw.get("dflash_config") or {}):
            raise UserError(
                f"drafter {self.name}: it has no {part}, which {engine.name} needs for a {drafting.title} drafter; "
                f"use the built-in engine (remove --engine)"
            )
        for what in (self.architecture, *([SLIDING] if self._sliding else [])):
            if Version(version) < Version(least := engine.releases[what]):
                raise UserError(
                    f"drafter {self.name}: {engine.name} {version} does not support {what}; "
                    f"install a newer release: pip install '{engine.name}>={least}'"
                )

    @property
    def _sliding(self) -> bool:
        nested = self.raw.get("dflash_config") or {}
        causal = self.raw.get("is_causal") is True or nested.get("causal") is True
        return causal or "sliding_attention" in (self.raw.get("layer_types") or ())

    def check_served(self, engine: "Engine", version: str, name: str, target: Mapping[str, Any]) -> None:
        """Raises UserError if this release serves the target without drafters, or scales embeddings differently."""
        architecture = next(iter(target.get("architectures") or ()), "none")
        if Version(version) > Version(READ[engine.name]):
            return
        others = [f"use --engine {other}" for other in SERVED.get(architecture, ()) if other != engine.name]
        if architecture in SERVED and engine.name not in SERVED[architecture]:
            raise UserError(
                f"target {name}: {engine.name} {version} passes no hidden states of {architecture} to a DFlash "
                "drafter; " + " or ".join([*others, "remove --drafter"])
            )
        if (drafting := named(self.architecture)) and engine.name in drafting.scaled_by:
            return
        fed = block_scale(engine.name, architecture, target.get("hidden_size") or 1)
        nested = self.raw.get("dflash_config") or {}
        trained = nested.get("input_embedding_scale") or self.raw.get("input_embedding_scale") or 1.0
        if not math.isclose(trained, fed, rel_tol=0.01):
            raise UserError(
                f"drafter {self.name}: its input_embedding_scale is {trained:g}, but {engine.name} {version} scales "
                f"its blocks by {fed:.4g} for {architecture}, so few drafts would be accepted; "
                + " or ".join([*others, "remove --drafter"])
            )

    def check_fits(self, target: Mapping[str, Any]) -> None:
        """Raises UserError if the drafter was trained for another target."""
        for key, target_key, what in (
            ("hidden_size", "hidden_size", "hidden size"),
            ("vocab_size", "vocab_size", "vocabulary"),
            ("num_target_layers", "num_hidden_layers", "number of target layers"),
        ):
            value, expected = self.raw.get(key), target.get(target_key)
            if None not in (value, expected) and value != expected:
                raise UserError(
                    f"the drafter's {what} is {value}, the target's {expected}; give a drafter that was trained for "
                    "this target"
                )


def read_draft(name: str) -> Draft:
    """Reads a drafter's config.json. Raises UserError if it cannot be read or its block size is invalid."""
    raw = read_config("drafter", name)
    nested, kind = raw.get("dflash_config") or {}, raw.get("speculators_model_type")
    architecture = SPECULATORS.get(str(kind), str(kind)) if kind else next(iter(raw.get("architectures") or ()), "none")
    size = next((group["block_size"] for group in (nested, raw) if group.get("block_size") is not None), 16)
    if not isinstance(size, int) or size < 2:
        raise UserError(f"drafter {name}: config.json: 'block_size' is {size!r}; expected a whole number above 1")
    return Draft(name, architecture, bool(kind), size, raw.get("transformer_layer_config") or raw)


def read_config(what: str, name: str) -> dict[str, Any]:
    """Reads config.json from a directory or the hub; returns the text part of a multimodal target's."""
    from huggingface_hub import hf_hub_download

    try:
        here = os.path.isdir(name)
        if not here and name.count("/") != 1:
            raise UserError(f"{what} {name}: no such directory; give a directory or an id of the hub (OWNER/NAME)")
        path = os.path.join(name, "config.json") if here else hf_hub_download(name, "config.json")
        found = json.loads(Path(path).read_bytes())
        if not isinstance(found, dict):
            raise ValueError("it is not a JSON object")
    except (OSError, ValueError, RecursionError) as error:
        if unreachable(error):
            line = f"{what} {name}: no such directory, and the hub cannot be reached; give the directory of a {what}"
            raise UserError(line) from error
        raise UserError(f"{what} {name}: cannot read its config.json ({' '.join(str(error).split())})") from error
    text = found.get("text_config")
    return text | {"architectures": found.get("architectures")} if text else found


def check_heads(what: str, raw: Mapping[str, Any], gpus: int) -> None:
    """Raises UserError if the number of GPUs does not divide the attention heads."""
    heads = raw.get("num_attention_heads")
    if isinstance(heads, int) and heads % gpus:
        message = f"tensor_parallel_size is {gpus}, which does not divide the {what}'s {heads} attention heads"
        raise UserError(f"{message}; give a divisor")
