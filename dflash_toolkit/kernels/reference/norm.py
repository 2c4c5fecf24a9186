"""Defines RMSNorms, alone and with the residual sum or the convolution before them."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..formats import Operand


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (normed.to(weight.dtype) * weight).to(x.dtype)


def add_rms_norm(
    x: Tensor,
    partial_sums: Tensor | None,
    weight: Tensor | None,
    eps: float,
    tap: Tensor | None = None,
    output_norm: Tensor | None = None,
    scalar: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Adds a sub-layer's output to the residual stream and norms it for the next sub-layer.

    Args:
        x: the residual stream [M, D].
        partial_sums: the sub-layer's output, split along K, [P, M, D]; None adds nothing.
        weight: [D], of the RMSNorm (Zhang and Sennrich 2019): y = x / sqrt(mean(x^2) + eps) * weight, multiplied in
            the dtype of `weight`, which is x's dtype or fp32. None: the next sub-layer has no norm before it.
        tap: a view [M, D] that receives the new residual stream.
        output_norm: [D], of an RMSNorm of the sub-layer's output, rounded to x's dtype, before it is added.
        scalar: [1], multiplies the sum.

    Returns:
        The new residual stream and its norm, both [M, D] in x's dtype; without a `weight` it twice.
    """
    if partial_sums is not None:
        added = partial_sums.float().sum(0)
        if output_norm is not None:
            added = rms_norm(added.to(x.dtype), output_norm, eps).float()
        x = (x.float() + added).to(x.dtype)
    if scalar is not None:
        x = x * scalar
    if tap is not None:
        tap.copy_(x)
    return x, x if weight is None else rms_norm(x, weight, eps)


def add_rms_norm_quantized(
    x: Tensor,
    partial_sums: Tensor | None,
    weight: Tensor | None,
    eps: float,
    tap: Tensor | None = None,
    output_norm: Tensor | None = None,
    scalar: Tensor | None = None,
) -> tuple[Tensor, Operand]:
    """`add_rms_norm` for a GEMM that quantizes rows in groups; a kernel may return quantized rows."""
    return add_rms_norm(x, partial_sums, weight, eps, tap, output_norm, scalar)


def block_conv(x: Tensor, dynamic: Tensor, base: Tensor, block: int) -> Tensor:
    """Computes a short convolution along the rows of each block, with coefficients that differ by row.

    Row t is the sum over tau < T of (base[tau, c] + dynamic[t, tau, c // g]) * x[t - tau, c]; rows before the first one
    of a block count as zero.

    Args:
        x: [M, D], M / `block` whole blocks one after the other; or its split-K partial sums [P, M, D].
        dynamic: [M, T * (D / g)], T taps of D / g groups of g channels; or its partial sums. They may be columns of a
            wider matrix.
        base: [T, D].

    Returns:
        [M, D], summed in fp32 and rounded once to the dtype of `base`.
    """
    wide, own = (t.float().sum(0) if t.dim() == 3 else t.float() for t in (x, dynamic))
    taps, width = base.shape
    kernel = own.unflatten(1, (taps, -1))
    kernel = base.float() + kernel.repeat_interleave(width // kernel.shape[2], dim=2)  # [M, T, D]
    rows = wide.unflatten(0, (-1, block))
    found = torch.zeros_like(rows)
    for tau in range(taps):
        found = found + kernel[:, tau].view_as(rows) * F.pad(rows, (0, 0, tau, 0))[:, :block]
    return found.flatten(0, 1).to(base.dtype)


def conv_add_rms_norm(
    x: Tensor,
    partial_sums: Tensor,
    dynamic: Tensor,
    base: Tensor,
    block: int,
    weight: Tensor,
    eps: float,
    tap: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Applies `block_conv` to a sub-layer's partial sums [P, M, D], then `add_rms_norm`."""
    return add_rms_norm(x, block_conv(partial_sums, dynamic, base, block)[None], weight, eps, tap)


def norm_queries_keys(
    partial_sums: Tensor, bias: Tensor | None, q_weight: Tensor, k_weight: Tensor, eps: float, dtype: torch.dtype
) -> Tensor:
    """Adds up qkv and norms the queries of all heads of a row together, and the keys; `rope_write` then norms nothing.

    Args:
        partial_sums: [P, M, (N + 2 * G) * H]; their sum, with bias [(N + 2 * G) * H], is rounded to `dtype`.
        q_weight, k_weight: [N * H] and [G * H], of the RMSNorms.

    Returns:
        [1, M, (N + 2 * G) * H] in `dtype`.
    """
    total = partial_sums.float().sum(0)
    qkv = (total if bias is None else total + bias.float()).to(dtype)
    q, k, v = qkv.split([len(q_weight), *[len(k_weight)] * 2], dim=1)
    return torch.cat([rms_norm(q, q_weight, eps), rms_norm(k, k_weight, eps), v], dim=1)[None]


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Returns the RMSNorm of every head of x [M, N H] by weight [H], times silu(gate [M, N H]); gate may be columns."""
    normed = rms_norm(x.unflatten(1, (-1, len(weight))), weight, eps)
    return (normed.flatten(1).float() * F.silu(gate.float())).to(x.dtype)


def gated_rms_norm_quantized(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Operand:
    """`gated_rms_norm` for a GEMM that quantizes rows in groups; a kernel may return quantized rows."""
    return gated_rms_norm(x, gate, weight, eps)
