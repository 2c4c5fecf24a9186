"""The convolution of DFlash 2 with a gradient: kernels on a CUDA GPU, the definition elsewhere."""

from typing import Any

import torch
from torch import Tensor

from .ops import ops_for


def convolve(x: Tensor, dynamic: Tensor, base: Tensor, block: int) -> Tensor:
    """Applies `block_conv` to many blocks in every sequence, differentiably.

    torch.compile treats it as one opaque operator. Gradients do not depend on scheduling.

    Args:
        x: [B, Q, D], Q / `block` blocks one after the other.
        dynamic: [B, Q, T, D / g]; may be a slice of a wider tensor.
        base: [T, D].

    Returns:
        [B, Q, D] in x's dtype, or autocast's.
    """
    if torch.is_autocast_enabled(x.device.type):  # as in the layer's GEMMs; halves the bytes of an fp32 norm
        x = x.to(torch.get_autocast_dtype(x.device.type))
    rows, own = x.flatten(0, 1), dynamic.flatten(2).flatten(0, 1)
    if x.is_cuda:
        return _convolve(rows.contiguous(), own, base.contiguous(), block).view_as(x)
    return ops_for(x.device).block_conv(rows, own, base, block).to(x.dtype).view_as(x)


@torch.library.custom_op("dflash_toolkit::convolve", mutates_args=())
def _convolve(x: Tensor, dynamic: Tensor, base: Tensor, block: int) -> Tensor:
    from .triton import convolution  # needs triton

    return convolution.block_conv(x, dynamic, base, block, x.dtype)


@torch.library.custom_op("dflash_toolkit::convolve_backward", mutates_args=())
def _convolve_backward(
    d_out: Tensor, x: Tensor, dynamic: Tensor, base: Tensor, block: int
) -> tuple[Tensor, Tensor, Tensor]:
    from .triton import convolution

    return convolution.block_conv_backward(d_out, x, dynamic, base, block)


@_convolve.register_fake
def _(x: Tensor, dynamic: Tensor, base: Tensor, block: int) -> Tensor:
    return torch.empty_like(x)


@_convolve_backward.register_fake
def _(d_out: Tensor, x: Tensor, dynamic: Tensor, base: Tensor, block: int) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(x), dynamic.new_empty(dynamic.shape), torch.empty_like(base)


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, int], output: Tensor) -> None:
    *tensors, ctx.block = inputs
    ctx.save_for_backward(*tensors)


def _gradients(ctx: Any, d_out: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
    return (*_convolve_backward(d_out.contiguous(), *ctx.saved_tensors, ctx.block), None)


_convolve.register_autograd(_gradients, setup_context=_keep)
