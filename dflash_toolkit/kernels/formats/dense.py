"""Weights in 16 or 32 bits."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from .base import Format


@dataclass(frozen=True, slots=True)
class Dense(Format):
    """A matrix is a tensor."""

    def empty(self, *shape: int, new: Callable[..., Tensor]) -> Tensor:
        return new(*shape)


DENSE = Dense()
