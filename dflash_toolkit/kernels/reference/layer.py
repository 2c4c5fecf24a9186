"""Defines a dense layer after its attention, as one operation."""

from collections.abc import Sequence

from torch import Tensor

from ..formats import RowScaledFp8, Weight, cast_fp8, is_row_scaled
from .matmul import linear_split_k, linear_swiglu
from .norm import add_rms_norm, block_conv, conv_add_rms_norm


def fuses_post_attention(x: Tensor, weights: Sequence[Weight | None]) -> bool:
    """Returns whether `fused_post_attention` supports the stream x [M, D] and these matrices; the reference does."""
    return True


def fused_post_attention(
    x: Tensor,
    a: Tensor,
    o: Weight,
    post_norm: Tensor,
    gate_up: Weight,
    down: Weight,
    norm: Tensor,
    qkv: Weight | None,
    eps: float,
    tap: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Computes a dense layer after its attention, and the queries, keys and values of the next, without biases.

    Args:
        x: the residual stream [M, D] before the layer.
        a: the layer's attention [M, N * H].
        o, post_norm, gate_up, down: the layer's weights; gate_up as for `linear_swiglu`.
        norm: [D], norm of the next layer, or the final norm.
        qkv: [(N + 2 * G) * H, D] of the next layer; None after the last layer.
        tap: a view [M, D] that receives the layer's output.

    Matrices in fp8 are multiplied with rows in fp8: rows of `a` are scaled by their largest value, others are cast.

    Returns:
        The layer's output and its norm, both [M, D], and the next layer's qkv without its bias, as split-K partial sums
        [P, M, (N + 2 * G) * H] for `rope_write`, or None.
    """

    a = RowScaledFp8.of(a).dense(a.dtype) if is_row_scaled(o) else a
    x, h = add_rms_norm(x, linear_split_k(a, o), post_norm, eps)
    active = linear_swiglu(_operand(h, gate_up), gate_up)
    x, h = add_rms_norm(x, linear_split_k(_operand(active, down), down), norm, eps, tap)
    return x, h, None if qkv is None else linear_split_k(_operand(h, qkv), qkv)


def fuses_conv_post_attention(
    x: Tensor, weights: Sequence[Weight | None], convolutions: Sequence[tuple[Tensor, Weight] | None]
) -> bool:
    """Returns whether `fused_conv_post_attention` supports the stream x [M, D] and these; the reference does."""
    return True


def fused_conv_post_attention(
    x: Tensor,
    a: Tensor,
    after: Tensor,
    base: Tensor,
    o: Weight,
    post_norm: Tensor,
    ffn: tuple[Tensor, Weight],
    gate_up: Weight,
    down: Weight,
    norm: Tensor,
    following: tuple[Tensor, Weight] | None,
    qkv: Weight | None,
    eps: float,
    block: int,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Computes `fused_post_attention` of a layer with convolutions around its sub-layers, see `block_conv`.

    Args:
        after: partial sums [P, M, T * (D / g)], the coefficients of the convolution after o.
        base: [T, D], base of that convolution.
        ffn: base [2, T, D] and projection [2 * T * (D / g), D] of the convolutions around the FFN. The projection has
            the rows of the coefficients before it, then those after it.
        following: the same for the next layer's attention; None after the last layer.

    Returns:
        The layer's output and its norm, both [M, D], and the next layer's qkv without bias and `after`, or None twice.
    """
    a = RowScaledFp8.of(a).dense(a.dtype) if is_row_scaled(o) else a
    x, h = conv_add_rms_norm(x, linear_split_k(a, o), after, base, block, post_norm, eps)
    before, after = linear_split_k(_operand(h, ffn[1]), ffn[1]).chunk(2, dim=2)
    inside = _operand(block_conv(h, before, ffn[0][0], block), gate_up)
    active = _operand(linear_swiglu(inside, gate_up), down)
    x, h = conv_add_rms_norm(x, linear_split_k(active, down), after, ffn[0][1], block, norm, eps)
    if following is None or qkv is None:
        return x, h, None, None
    before, after = linear_split_k(_operand(h, following[1]), following[1]).chunk(2, dim=2)
    inside = _operand(block_conv(h, before, following[0][0], block), qkv)
    return x, h, linear_split_k(inside, qkv), after


def _operand(rows: Tensor, weight: Weight) -> Tensor:
    return cast_fp8(rows).to(rows.dtype) if is_row_scaled(weight) else rows
