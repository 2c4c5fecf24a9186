"""The part of a target that training reads: its embedding and its head."""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class TargetHead(Protocol):
    """A `Target`, or `HeadWeights` without the rest of a target."""

    @property
    def config(self) -> Any: ...

    @property
    def head_weight(self) -> Tensor: ...

    @property
    def head_bias(self) -> Tensor | None: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def embed(self, ids: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class HeadWeights:
    """The embedding and the head of a target, as tensors of any framework; they are never changed here."""

    embedding: Tensor  # [V, D]
    head_weight: Tensor  # [V, D], the embedding itself if they are tied
    head_bias: Tensor | None = None  # [V]
    config: Any = None  # the target's, for its factor on the logits and their soft cap; None: neither

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    def to(self, device: torch.device) -> "HeadWeights":
        """Returns these weights on a device."""
        embedding = self.embedding.to(device)
        head = embedding if self.head_weight is self.embedding else self.head_weight.to(device)
        return HeadWeights(embedding, head, None if self.head_bias is None else self.head_bias.to(device), self.config)

    def embed(self, ids: Tensor) -> Tensor:
        """Returns rows [..., D] of the embedding."""
        return F.embedding(ids, self.embedding)
