"""Scales the queries of Llama 4's layers without rope by the positions of their tokens.

transformers counts these positions from the length of the cache. That is wrong for the rows of a draft tree, for rows
after padding, and for packed documents: their positions are given.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from .rope import temperatures


def scale_by_positions(layers: Iterable[nn.Module]) -> None:
    """Makes transformers' layers use the positions that they are given."""
    for layer in layers:
        attention: Any = getattr(layer, "self_attn", None)
        if getattr(attention, "attn_temperature_tuning", False) and not attention.use_rope:
            attention.attn_temperature_tuning = False
            _Scaled(attention.floor_scale, attention.attn_scale).attach(layer, attention.q_proj)


class _Scaled:
    """Scales the queries of one layer."""

    def __init__(self, floor: float, scale: float) -> None:
        self._how = floor, scale
        self._factors = torch.ones(1)

    def attach(self, layer: nn.Module, projection: nn.Module) -> None:
        layer.register_forward_pre_hook(self._enter, with_kwargs=True)
        projection.register_forward_hook(self._leave)

    def _enter(self, layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self._factors = temperatures(kwargs["position_ids"], *self._how)[..., None]

    def _leave(self, projection: nn.Module, args: Any, queries: Tensor) -> Tensor:
        return (queries * self._factors).to(queries.dtype)
