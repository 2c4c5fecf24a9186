"""Embeddings of tokens that every layer has of its own, and how the layers add them (Gemma 4 E2B and E4B)."""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from ..kernels.formats import Activation
from ..kernels.ops import Ops
from ..models.spec import LAYER_INPUT_MATRICES

# names of `TokenInputWeights` in a checkpoint
TOKEN_INPUTS = tuple(
    f"model.{name}.weight"
    for name in ("embed_tokens_per_layer", "per_layer_model_projection", "per_layer_projection_norm")
)


class LayerInputWeights(NamedTuple):
    """A last sub-layer: x + norm(projection(activation(gate(x)) * inputs)), with inputs from `TokenInputWeights`."""

    gate: Tensor  # [P, D]
    projection: Tensor  # [D, P]
    norm: Tensor  # [D]
    activation: Activation

    @classmethod
    def empty(
        cls, size: int, d: int, activation: Activation, new: Callable[..., Tensor], norm: Callable[[int], Tensor]
    ) -> "LayerInputWeights":
        return cls(new(size, d), new(d, size), norm(d), activation)

    def parameter_views(self) -> dict[str, Tensor]:
        """Checkpoint name inside the layer -> the view that the tensor is copied into."""
        names = [*LAYER_INPUT_MATRICES, "post_per_layer_input_norm"]
        return {
            f"{name}.weight": view for name, view in zip(names, (self.gate, self.projection, self.norm), strict=True)
        }

    def partial_sums(self, x: Tensor, inputs: Tensor, ops: Ops) -> Tensor:
        """Returns the sub-layer's output before its norm, partial sums [N, M, D], for x [M, D] and inputs [M, P]."""
        gated = ops.gate_layer_input(ops.linear_split_k(x, self.gate), inputs, self.activation)
        return ops.linear_split_k(gated, self.projection)


class TokenInputWeights(NamedTuple):
    """Weights that make the inputs of all layers, before the first one runs."""

    table: Tensor  # [V, L P]
    projection: Tensor  # [L P, D], of the embeddings that the first layer reads
    norm: Tensor  # [P], of every layer's part of the projection

    @classmethod
    def empty(
        cls, vocab: int, layers: int, size: int, d: int, new: Callable[..., Tensor], norm: Callable[[int], Tensor]
    ) -> "TokenInputWeights":
        return cls(new(vocab, layers * size), new(layers * size, d), norm(size))

    def parameter_views(self) -> dict[str, Tensor]:
        return dict(zip(TOKEN_INPUTS, self, strict=True))

    def inputs(self, ids: Tensor, embedded: Tensor, eps: float, ops: Ops) -> Tensor:
        """Returns the inputs [M, L, P] of ids [M] with embeddings [M, D]."""
        projected = ops.linear(embedded, self.projection)
        return ops.layer_inputs(ids, self.table, projected, self.norm, eps, self.projection.shape[1] ** -0.5)
