"""Replaces the weights of an engine in place. Captured graphs keep their addresses, so no step is captured again.

All tensors are checked before the first one is written.
"""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.reader import EMBEDDING, HEAD, load_weights, text_name
from ..config import UnsupportedModel, UserError
from ..kernels.formats import Int4, RowScaledFp8
from ..kernels.formats.mxfp4 import Mxfp4
from .weights import STACKED, DrafterWeights, LayerWeights, TargetWeights

META = torch.device("meta")


@torch.no_grad()
def update_drafter(weights: DrafterWeights, tensors: Mapping[str, Tensor]) -> None:
    """Copies all tensors of a drafter of the same shape, by their names in a checkpoint; layers in fp8 stay in fp8.

    Raises:
        UserError: a tensor is unknown, missing, not finite, or has another shape; nothing is written then.
    """
    dtype, device = weights.fc.dtype, weights.fc.device
    load_weights("drafter", DrafterWeights.empty(weights.config, META, dtype).parameter_views(), tensors)
    if broken := next((name for name, tensor in tensors.items() if not bool(tensor.isfinite().all())), None):
        raise UserError(f"drafter: tensor {broken!r} holds a value that is not finite")
    for i, (kind, layer) in enumerate(zip(weights.spec.layers, weights.layers, strict=True)):
        prefix = f"layers.{i}."
        own = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
        fresh = LayerWeights.empty(kind, weights.spec.hidden_size, device, dtype)
        load_weights("drafter", fresh.parameter_views(kind), own)
        weights.stack_context(i, fresh)
        _copy(layer, fresh.quantized(first=weights.begins(i)) if layer.in_fp8 else fresh)
    for name, view in weights.own_views().items():
        view.copy_(tensors[name])


@torch.no_grad()
def update_target(weights: TargetWeights, tensors: Mapping[str, Tensor]) -> None:
    """Copies tensors of a target, some or all, by their names in a Hugging Face checkpoint.

    Raises:
        UnsupportedModel: a target in 4 bits: the engine holds its weights in other forms.
        UserError: a tensor is unknown, or has another shape or format; nothing is written then.
    """
    if any(isinstance(form, Int4 | Mxfp4) for form in weights.spec.formats):
        raise UnsupportedModel("the weights of a target in 4 bits cannot be replaced; start a new engine")
    named = {text_name(name): tensor for name, tensor in tensors.items()}
    head = named.pop(HEAD, None) if weights.spec.tied_head else None
    if head is not None and not (EMBEDDING in named and torch.equal(head, named[EMBEDDING])):
        raise UserError(f"target: {HEAD!r} must equal {EMBEDDING!r}, as the engine's target has one for both")
    stacked = any(name.endswith(STACKED) for name in named)
    views = weights.parameter_views(stacked)
    chosen = {name: views[name] for name in named if name in views}
    load_weights("target", {name: torch.empty_like(view, device=META) for name, view in chosen.items()}, named)
    load_weights("target", chosen, named)
    weights.as_computed(chosen)


def update_head(weights: DrafterWeights, head: Tensor) -> None:
    """Quantizes the target's head [V, D] again for a drafter that has a copy of it in fp8."""
    if weights.head is not None:
        _copy(weights.head, RowScaledFp8.of(head))


def _copy(old: Any, new: Any) -> None:
    """Copies the tensors of a structure to the same places of another one."""
    if isinstance(old, Tensor):
        old.copy_(new)
    elif is_dataclass(old):
        for field in fields(old):
            _copy(getattr(old, field.name), getattr(new, field.name))
    elif isinstance(old, tuple):
        for each in zip(old, new, strict=True):
            _copy(*each)
