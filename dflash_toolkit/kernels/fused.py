"""The Triton kernels under the names of their definitions in `reference.py`."""

from collections.abc import Callable

from torch import Tensor

from . import flash
from .hopper.head import launch_head
from .hopper.layer import launch_layer
from .hopper.ring import fits
from .scaled import Matrix
from .triton.accept import accept
from .triton.attention import block_attention as block_attention_by_tiles
from .triton.linear import linear, linear_partials, linear_swiglu
from .triton.linear import linear_argmax as linear_argmax_by_tiles
from .triton.norm import add_rms_norm
from .triton.rope import context_write, rope_write
from .triton.sample import sample

__all__ = [
    "accept",
    "add_rms_norm",
    "block_attention",
    "context_write",
    "finish_layer",
    "linear",
    "linear_argmax",
    "linear_partials",
    "linear_swiglu",
    "rope_write",
    "sample",
]


def block_attention(
    q: Tensor,
    cache: Tensor,
    lengths: Tensor,
    page_table: Tensor,
    page_size: int,
    *,
    causal: bool,
    window: int = 0,
) -> Tensor:
    """FlashAttention for a long chunk of a prompt, where it is installed; else the kernel over tiles."""
    if flash.fits(q, lengths, causal=causal, window=window):
        return flash.launch(q, cache, lengths, page_table, page_size)
    return block_attention_by_tiles(q, cache, lengths, page_table, page_size, causal=causal, window=window)


def finish_layer(
    x: Tensor,
    a: Tensor,
    o: Matrix,
    o_bias: Tensor | None,
    post_norm: Tensor,
    gate_up: Matrix,
    down: Matrix,
    norm: Tensor,
    qkv: Matrix | None,
    eps: float,
    tap: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """One launch where that kernel fits, else one for every product and norm."""
    if o_bias is None and fits(x, [o, gate_up, down, qkv]):
        return launch_layer(x, a, o, post_norm, gate_up, down, norm, qkv, eps, tap)
    return chain(linear_partials, linear_swiglu, x, a, o, o_bias, post_norm, gate_up, down, norm, qkv, eps, tap)


def chain(
    partials: Callable[..., Tensor], swiglu: Callable[[Tensor, Matrix], Tensor], x: Tensor, a: Tensor, o: Matrix,
    o_bias: Tensor | None, post_norm: Tensor, gate_up: Matrix, down: Matrix, norm: Tensor, qkv: Matrix | None,
    eps: float, tap: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """`finish_layer` with these `linear_partials` and `linear_swiglu`: a launch for every product and norm."""
    x, h = add_rms_norm(x, partials(a, o, o_bias), post_norm, eps)
    x, h = add_rms_norm(x, partials(swiglu(h, gate_up), down), norm, eps, tap)
    return x, h, None if qkv is None else partials(h, qkv)


def linear_argmax(x: Tensor, weight: Matrix) -> Tensor:
    """The column with the largest logit of every row, int64 [M]; streamed or tile by tile, the same bits."""
    # up to 64 rows tiles by themselves are faster, and in fp8 always
    if len(x) > 64 and isinstance(weight, Tensor) and fits(x, [weight]):
        return launch_head(x, weight)
    return linear_argmax_by_tiles(x, weight)
