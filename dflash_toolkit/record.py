"""The record that an export keeps of itself: weights, shape and outputs, to detect later changes.

The record is in config.json under this project's own key, which every other loader ignores. `dflash-doctor` computes
it again and compares. It holds hashes of the tensors as they are stored (bf16), the drafter's configuration, the
drafter's outputs for fixed inputs (on the CPU in fp32, so the same on every machine), and the target's outputs for
fixed tokens (in the dtype and on the device of training, so the same except for rounding).

The output of a place, a tensor of any size, is kept as a few numbers: its scale, and its projections on fixed random
vectors of signs. The differences of two tensors' projections estimate the distance of the tensors.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from .fingerprint import joint_digest, json_digest, tensor_digest
from .models.dflash.architecture import all_sizes
from .models.dflash.checkpoint import stored_tensors
from .models.dflash.config import DrafterConfig
from .models.dflash.network import Drafter
from .models.target import Target

RECORD_KEY = "record"  # within the provenance
SCHEMA = 1
TOKENS = 48  # length of the fixed text for the target
CONTEXT, SLOTS = 16, 8  # sizes of the fixed block for the drafter
PROJECTIONS = 8
SHORT = 16  # hex digits of a tensor's hash
DIGITS = 6
_LOW = (1 << 32) - 1


def export_record(drafter: Drafter, target: Target, computed: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Returns what `save_drafter(drafter, path, {RECORD_KEY: export_record(drafter, target)})` adds to a checkpoint.

    Args:
        computed: the target's signature if it is known: a sharded target computes it in all its processes at once.

    Returns:
        JSON values, some kilobytes: "sha256" and "tensors" (name -> short sha256 of the bf16 bytes), "configuration",
        "drafter" and "target" (see `drafter_signature`, `target_signature`), and a "seal" over all of it.
    """
    tensors = stored_tensors(drafter)
    hashes = {name: tensor_digest(tensor) for name, tensor in tensors.items()}
    record = {
        "schema": SCHEMA,
        "sha256": joint_digest(hashes),
        "tensors": {name: found[:SHORT] for name, found in hashes.items()},
        "configuration": configuration(drafter.config),
        "drafter": drafter_signature(drafter.config, tensors),
        "target": computed or target_signature(target, drafter.config.target_layer_ids),
    }
    return record | {"seal": seal(record)}


def seal(record: Mapping[str, Any]) -> str:
    """Returns the sha256 of a record without its seal: an edit of all of config.json changes the record's copy, too."""
    return json_digest({key: value for key, value in record.items() if key != "seal"})


def configuration(config: DrafterConfig) -> dict[str, Any]:
    """Returns the drafter's configuration as JSON values, by the names of `DrafterConfig`."""
    left_out = {
        "rope_factor",
        "scaled_frequencies",
        "acceptance_slope",
        "acceptance_bias",
        *(all_sizes().keys() - config.sizes.keys()),
    }
    values = {k: v for k, v in asdict(config).items() if k not in left_out}
    values["rope_scaling"] = config.rope_scaling.parameters if config.rope_scaling else None
    return {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}


@torch.no_grad()
def drafter_signature(config: DrafterConfig, tensors: Mapping[str, Tensor]) -> dict[str, list[float]]:
    """Returns a drafter's outputs for fixed features and a fixed block of SLOTS, on the CPU in fp32.

    No part depends on the target, so the first place that differs is the drafter's own.

    Returns:
        The numbers of `summary` by place, in the order of computation: "context", "layers.i", "output", and those of
        a selector's signature.
    """
    drafter = Drafter.of_tensors(config, {n: t.to("cpu") for n, t in tensors.items()}).float().eval()
    features = signs(CONTEXT * config.feature_size, 101).view(1, CONTEXT, -1)
    x = signs(SLOTS * config.hidden_size, 102).view(1, SLOTS, -1)
    place, positions = torch.arange(CONTEXT)[None], torch.arange(CONTEXT, CONTEXT + SLOTS)[None]
    found = {"context": summary(drafter.hidden_norm(drafter.fc(features))[0])}
    context, rope = drafter.context_kv(features, place), drafter.rope(positions)
    x = last = drafter.scaled(x)
    begun = drafter.begin(torch.zeros_like(positions), SLOTS) if drafter.between else None
    for i, layer in enumerate(drafter.layers):
        x = last = layer(x, rope, (context.keys[i], context.values[i]), drafter.own_mask(i, positions, place))
        if drafter.between:
            x, _ = drafter.between(i, x, begun)
        found[f"layers.{i}"] = summary(x[0])
    hidden = drafter.states(x, last, ())[0]
    found["output"] = summary(drafter.for_head(hidden))
    if chooser := config.architecture.chooser(drafter, None):
        computed = chooser.signature(hidden, lambda rows: signs(SLOTS * rows, 103).view(SLOTS, -1))
        found |= {place: summary(tensor) for place, tensor in computed.items()}
    return found


@torch.inference_mode()
def target_signature(target: Target, taps: Sequence[int]) -> dict[str, Any]:
    """Returns a target's outputs for TOKENS fixed tokens.

    Args:
        taps: 0-based layer ids.

    Returns:
        "dtype" and "device" of the computation, and "places": the numbers of `summary` for "embedding", "layers.i" (the
        output of each tapped layer, lowest first) and "final" (after the final norm), if the target has it.
    """
    ids = fixed_ids(target.embedding.num_embeddings).to(target.device)[None]
    layers = sorted(set(taps))
    out = target.forward(ids, taps=layers, final=True)
    assert out.features is not None
    places = {"embedding": summary(target.embed(ids)[0])}
    for layer, hidden in zip(layers, out.features[0].chunk(len(layers), dim=-1), strict=True):
        places[f"layers.{layer}"] = summary(hidden)
    if out.final is not None:  # unknown for a target that is served elsewhere
        places["final"] = summary(out.final[0])
    return {"dtype": str(target.dtype).removeprefix("torch."), "device": target.device.type, "places": places}


def fixed_ids(rows: int) -> Tensor:
    """Returns the fixed tokens [TOKENS] for an embedding of `rows` rows."""
    return _scrambled(torch.arange(TOKENS), 100) * rows >> 32


def signs(count: int, stream: int) -> Tensor:
    """Returns fixed +1 and -1, fp32 [count]; another `stream` gives others."""
    return (_scrambled(torch.arange(count), stream) >> 31).float() * 2 - 1


def _scrambled(numbers: Tensor, stream: int) -> Tensor:
    """Returns 32 well mixed bits of each number (int64), the same in every version of torch, by murmur3's rounds."""
    mixed = (numbers * 0x9E3779B1 + stream * 0x85EBCA77) & _LOW
    for factor in (0x85EBCA6B, 0xC2B2AE35):
        mixed = ((mixed ^ (mixed >> 16)) * factor) & _LOW
    return mixed ^ (mixed >> 16)


def summary(hidden: Tensor) -> list[float]:
    """Returns the numbers to keep of hidden states [T, D]: their scale, then PROJECTIONS projections.

    The scale is the median over tokens of the median absolute value. For the projections each token is divided by its
    own median absolute value and squashed, x / (1 + |x|): a few channels of a real model are thousands of times the
    others in all layers, and would hide the rest.
    """
    wide = hidden.detach().float().cpu()
    size = wide.abs().median(-1, keepdim=True).values.clamp(min=1e-30)
    scaled = wide / size
    squashed = (scaled / (1 + scaled.abs())).flatten()
    directions = torch.stack([signs(squashed.numel(), 1 + i) for i in range(PROJECTIONS)])
    projected = directions @ squashed / math.sqrt(squashed.numel())
    return [_rounded(float(size.median())), *(_rounded(value) for value in projected.tolist())]


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else 0.0


def distance(now: Sequence[float], then: Sequence[float]) -> float:
    """Returns the relative distance of two summarised tensors: 0 for equal, about 1.4 for unrelated ones."""
    if len(now) != len(then) or len(now) < 2:
        return math.inf
    (scale, *here), (recorded, *there) = now, then
    size = math.sqrt(sum(a * a + b * b for a, b in zip(here, there, strict=True)) / 2)
    apart = math.sqrt(sum((a - b) ** 2 for a, b in zip(here, there, strict=True)))
    larger = max(abs(scale), abs(recorded))
    return max(apart / size if size else float(apart > 0), abs(scale - recorded) / larger if larger else 0.0)
