"""Defines products of rows with weight matrices of any format."""

import torch.nn.functional as F
from torch import Tensor

from ..formats import Activation, Operand, Weight, dequantized, format_of, values_of
from ..loss_terms import LogitScale


def linear(x: Operand, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """Multiplies x [M, K] with weight [N, K] transposed and adds bias [N]; returns [M, N] in x's dtype."""
    return format_of(weight).linear(values_of(x), weight, bias)


def linear_split_k(x: Operand, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """Returns `linear` as P split-K partial sums, [P, M, N]; `add_rms_norm` or `rope_write` adds them up.

    P depends on (N, K) only, never on M, so that results are batch-invariant.
    """
    return linear(x, weight, bias)[None]


def linear_many_rows(x: Tensor, weight: Tensor) -> Tensor:
    """Multiplies x [M, K] with weight [N, K] transposed; batch-invariant for any M, unlike `linear`."""
    return F.linear(x, weight)


def linear_swiglu(x: Operand, weight: Weight, activation: Activation = "silu") -> Tensor:
    """Returns activation(gate) * up, [M, I], where weight [2 * I, K] holds the rows gate 0, up 0, gate 1, up 1, ...

    A block-scaled weight holds all gates, then all ups, as a block must not mix them.
    """
    product = linear(x, weight)
    gate, up = product.chunk(2, 1) if format_of(weight).halves else (product[:, 0::2], product[:, 1::2])
    return activate(gate, activation) * up


def activate(gate: Tensor, activation: Activation) -> Tensor:
    return F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")


def linear_swiglu_quantized(x: Operand, weight: Weight, activation: Activation = "silu") -> Operand:
    """Computes `linear_swiglu`; a kernel may also quantize the result for the next GEMM, of a target in fp8 blocks."""
    return linear_swiglu(x, weight, activation)


def linear_argmax(x: Tensor, weight: Weight) -> Tensor:
    """Returns the column with the largest logit of every row, int64 [M]; the lowest of tied columns."""
    return linear(x, weight).argmax(-1)


def linear_top(x: Tensor, weight: Weight, count: int) -> tuple[Tensor, Tensor]:
    """Returns the `count` largest logits of every row, fp32 [M, count], and their columns, int64 [M, count].

    Larger logits come first; among equal logits in x's dtype, lower columns do.
    """
    found = F.linear(x, dequantized(weight, x.dtype)).sort(dim=-1, descending=True, stable=True)
    return found.values[:, :count].float(), found.indices[:, :count]


def linear_top_lse(x: Tensor, weight: Weight, count: int, scale: LogitScale) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the `count` largest logits of every row, their columns, and the log-sum-exp of all logits.

    Larger logits come first; among equal products in x's dtype, lower columns do.

    Returns:
        Logits after `scale`, fp32 [M, count]; columns, int64 [M, count]; the log-sum-exp of all logits, fp32 [M].
    """
    products = F.linear(x, dequantized(weight, x.dtype))
    found = products.sort(dim=-1, descending=True, stable=True)
    top, every = found.values[:, :count].float().contiguous(), products.float()
    scale.apply_(top)
    scale.apply_(every)
    return top, found.indices[:, :count], every.logsumexp(-1)
