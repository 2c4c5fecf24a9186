"""A short convolution along the slots of a block, around every sublayer, with coefficients computed per row."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ...kernels.convolve import convolve


class DynamicConvolution(nn.Module):
    """One convolution before a sublayer and one after it; the input of the first gives the coefficients of both.

    Parameter names are those of the checkpoint. T taps, groups of g adjacent channels.
    """

    def __init__(self, hidden_size: int, taps: int, group_size: int) -> None:
        super().__init__()
        self.group_size = group_size
        self.base_kernel = nn.Parameter(torch.empty(2, taps, hidden_size))
        self.kernel_projection = nn.Linear(hidden_size, 2 * taps * (hidden_size // group_size), bias=False)

    @torch.no_grad()
    def init_weights(self) -> None:
        """Initialises to the identity: the drafter then equals the one without convolutions, bit for bit."""
        self.base_kernel.zero_()[:, 0] = 1.0
        self.kernel_projection.weight.zero_()

    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor], block_size: int | None) -> Tensor:
        """Applies the sublayer between its two convolutions.

        Args:
            x: normed rows of blocks, [B, Q, D].
            sublayer: maps [B, Q, D] to [B, Q, D].
            block_size: slots of a block, of which Q is a multiple; None: all Q are one block.
        """
        taps, block = self.base_kernel.shape[1], block_size or x.shape[1]
        before, after = self.kernel_projection(x).unflatten(-1, (2, taps, -1)).unbind(-3)  # [B, Q, T, D / g]
        y = sublayer(convolve(x, before, self.base_kernel[0], block))
        return convolve(y, after, self.base_kernel[1], block)
