"""What a target remembers of a text, for decoding that takes rejected tokens back.

Attention keeps a key and a value of every token, and the last ones are dropped. A recurrent layer (gated delta net,
Mamba) has one state that every token changes: a copy from before the block takes its place, and the tokens that stay
run again.
"""

import copy
from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionCacheLayerMixin

from ..config import UnsupportedModel

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

CROPPED = (DynamicLayer, DynamicSlidingWindowLayer)  # themselves: of a subclass nobody knows what else it keeps


class TargetCache(DynamicCache):
    """transformers' cache of one row of tokens, whose last block can be taken back in part.

    Raises:
        UnsupportedModel: a model that keeps what no such cache holds.
    """

    def __init__(self, config: "PreTrainedConfig", name: str) -> None:
        try:
            super().__init__(config=config)
        except KeyError as error:
            raise UnsupportedModel(f"target {name}: transformers has no cache for layers of type {error}") from error
        self._kept: dict[int, dict[str, Any]] = {}
        self._attention: list[Any] = [layer for layer in self.layers if type(layer) in CROPPED]
        for layer in self._attention:
            if isinstance(layer, DynamicSlidingWindowLayer):
                layer.activate_past_recording()  # else what falls out of the window cannot come back

    @property
    def recurrent(self) -> bool:
        return any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in self.layers)

    def begin_block(self) -> None:
        """A block follows of which tokens may be taken back."""
        states = {i: vars(layer) for i, layer in enumerate(self.layers) if type(layer) not in CROPPED}
        self._kept = {i: copy.deepcopy(state) for i, state in states.items() if _holds_tensors(state)}

    def end_block(self, tokens: int, stay: int) -> bool:
        """Of the `tokens` that ran since `begin_block` only the first `stay` are to stay.

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

    def settle(self) -> None:
        """What ran stays; transformers 5.15 wants a crop behind every forward of a layer with a window."""
        for layer in self._attention:
            layer.crop(0)


def _holds_tensors(state: dict[str, Any]) -> bool:
    """Whether a layer remembers anything; those of some models have an empty place in the cache."""
    parts = [part for value in state.values() for part in (value.values() if isinstance(value, dict) else [value])]
    return any(isinstance(part, Tensor) for part in parts)
