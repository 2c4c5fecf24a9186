"""Defines what layers read of their own embeddings of each token (Gemma 4 E2B and E4B)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..formats import Activation
from .matmul import activate
from .norm import rms_norm


def layer_inputs(ids: Tensor, table: Tensor, projected: Tensor, norm: Tensor, eps: float, scale: float) -> Tensor:
    """Returns the input of each token to every layer, [M, L, P]: its embedding of that layer, and its projection.

    Args:
        ids: [M].
        table: [V, L * P], embeddings, which are multiplied with the root of P.
        projected: [M, L * P], a projection of the embeddings that the first layer reads.
        norm: [P], of an RMSNorm of each layer's projection times `scale`.
    """
    size = len(norm)
    root = torch.tensor(size**0.5, dtype=table.dtype, device=table.device)
    embedded = F.embedding(ids, table).unflatten(1, (-1, size)) * root
    return (rms_norm((projected * scale).view_as(embedded), norm, eps) + embedded) * 2.0**-0.5


def gate_layer_input(partial_sums: Tensor, inputs: Tensor, activation: Activation) -> Tensor:
    """Returns activation(gate) * inputs, [M, P], for the gate's split-K partial sums [N, M, P]."""
    gate = partial_sums.float().sum(0).to(inputs.dtype)
    return activate(gate, activation) * inputs
