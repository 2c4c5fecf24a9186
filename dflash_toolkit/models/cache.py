"""Caches of a target: of one text, for decoding that takes rejected tokens back, or of several texts at a time.

Attention keeps a key and a value of every token, and the last ones can be dropped. A recurrent layer (gated delta net,
Mamba) has one state that every token changes: a copy from before the block replaces it, and the accepted tokens run
again.
"""

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from ..config import UnsupportedModel
from .layer_spec import CHUNKED

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

CROPPED = (DynamicLayer, DynamicSlidingWindowLayer)  # exact classes: a subclass may keep more


class TargetCache(DynamicCache):
    """transformers' cache of one row of tokens; a part of its last block can be taken back.

    Raises:
        UnsupportedModel: a model that keeps state that no such cache holds.
    """

    def __init__(self, config: "PreTrainedConfig", name: str) -> None:
        try:
            super().__init__(config=config)
        except KeyError as error:
            raise UnsupportedModel(f"target {name}: transformers has no cache for layers of type {error}") from error
        self._chunked = CHUNKED in (getattr(config, "layer_types", None) or ())  # its windows are chunks of positions
        self._kept: dict[int, dict[str, Any]] = {}
        self._attention: list[Any] = [layer for layer in self.layers if type(layer) in CROPPED]
        for layer in self._attention:
            if isinstance(layer, DynamicSlidingWindowLayer):
                layer.activate_past_recording()  # else tokens that left the window cannot come back

    @property
    def recurrent(self) -> bool:
        return any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in self.layers)

    def begin_block(self) -> None:
        """Begins a block of tokens, some of which may be taken back."""
        states = {i: vars(layer) for i, layer in enumerate(self.layers) if type(layer) not in CROPPED}
        self._kept = {i: copy.deepcopy(state) for i, state in states.items() if _holds_tensors(state)}

    def end_block(self, tokens: int, stay: int) -> bool:
        """Keeps the first `stay` of the `tokens` that ran since `begin_block`.

        Returns:
            Whether these are gone too and must run again.
        """
        again = bool(self._kept) and stay < tokens
        for layer in self._attention:
            layer.crop(-(tokens if again else tokens - stay))
        if again:
            for i, state in self._kept.items():
                vars(self.layers[i]).update(state)
        self._kept = {}
        return again

    def tree_mask(self, visible: Tensor, dtype: torch.dtype) -> Tensor | dict[str, Tensor]:
        """Returns the mask to add to attention scores for a tree of Q tokens: [1, 1, Q, kept + Q].

        One per kind of layer if there are several, by transformers' names. Every token sees all cached tokens within
        its layer's window.

        Args:
            visible: bool [Q, Q], which of the tree's tokens each sees.
        """
        count, depths = self.get_seq_length(), visible.sum(-1) - 1
        masks = {}
        for layer in self._attention:
            window = layer.sliding_window if isinstance(layer, DynamicSlidingWindowLayer) else None
            name = "full_attention" if window is None else CHUNKED if self._chunked else "sliding_attention"
            if name not in masks:
                kept = count if window is None else min(count, window - 1)
                seen = torch.cat([visible.new_ones(len(visible), kept), visible], dim=1)
                if window is not None:
                    positions = torch.cat([torch.arange(-kept, 0, device=depths.device), depths])
                    first = (count + depths) // window * window - count if self._chunked else depths - window + 1
                    seen &= positions >= first[:, None]
                hidden = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
                masks[name] = hidden.masked_fill_(~seen, torch.finfo(dtype).min)[None, None]
        return masks if len(masks) > 1 else next(iter(masks.values()))

    @torch.inference_mode()
    def move_path(self, tokens: int, rows: Sequence[int]) -> None:
        """Moves `rows` of the last `tokens` tokens, a tree, after the tokens before; `end_block` drops the rest."""
        for layer in self._attention:
            if layer.is_initialized:
                for kept in (layer.keys, layer.values):
                    tree = kept[:, :, -tokens:]
                    tree[:, :, : len(rows)] = tree[:, :, list(rows)]

    def flush(self) -> None:
        """Keeps all tokens that ran; transformers 5.15 needs a crop after every forward of a layer with a window."""
        for layer in self._attention:
            layer.crop(0)


def _holds_tensors(state: dict[str, Any]) -> bool:
    """Whether a layer has any state; some models have layers with an empty place in the cache."""
    parts = [part for value in state.values() for part in (value.values() if isinstance(value, dict) else [value])]
    return any(isinstance(part, Tensor) for part in parts)


class BatchCache(DynamicCache):
    """transformers' cache of several rows of tokens, padded on the left; rows can be removed and added."""

    @staticmethod
    def holds(config: "PreTrainedConfig") -> bool:
        """Whether this cache supports the model's state: keys and values, or states of one row each."""
        try:
            kinds = {type(layer) for layer in DynamicCache(config=config).layers}
        except KeyError:
            return False
        return {kind for kind in kinds if kind.__name__ != "DummyLayer"} <= {*CROPPED, LinearAttentionLayer}

    def keep(self, rows: Sequence[int], length: int) -> None:
        """Keeps these rows, in this order, and the last `length` places of each; new ones on the left are padding."""
        for layer in self.layers:
            for owner, name in (parts := _parts(layer)):
                index = torch.tensor(rows, device=owner[name].device)
                owner[name] = owner[name].index_select(0, index)
            if type(layer) not in CROPPED or not parts:
                continue
            places = length
            if isinstance(layer, DynamicSlidingWindowLayer):
                layer.cumulative_length, places = length, min(length, layer.sliding_window - 1)
            for owner, name in parts:
                had = owner[name].shape[2]
                owner[name] = F.pad(owner[name], (0, 0, places - had, 0))  # a negative number removes places

    def append(self, other: "BatchCache") -> None:
        """Appends the rows of a cache of the same length."""
        for layer, more in zip(self.layers, other.layers, strict=True):
            for (owner, name), (source, _) in zip(_parts(layer), _parts(more), strict=True):
                owner[name] = torch.cat([owner[name], source[name]])


def _parts(layer: Any) -> list[tuple[dict[Any, Any], Any]]:
    """Returns where a layer of a `BatchCache` keeps tensors (first axis: rows): each a dictionary and its key."""
    names = ("keys", "values", "conv_states", "recurrent_states")
    spaces = [(vars(layer), name) for name in names if name in vars(layer)]
    inner = [(space[name], key) for space, name in spaces if isinstance(space[name], dict) for key in space[name]]
    return [(space, name) for space, name in (*spaces, *inner) if isinstance(space[name], Tensor)]
