"""FP8 weights of checkpoints; their GEMMs also quantize the rows.

FP8_BLOCK has one fp32 scale for every 128 rows and 128 columns (DeepSeek-V3, arXiv 2412.19437, section 3.3), and one
for every 128 columns of a GEMM's rows. FP8_CHANNEL has one scale for each whole row of the weights and of the GEMM's
rows (FP8_DYNAMIC of compressed-tensors).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .base import FP8_MAX, LEAST, Format, Quantized, Weight
from .fp8_row import RowScaledFp8

BLOCK = 128  # rows and columns of a block-scaled weight that share a scale; columns of activations that share one


@dataclass(frozen=True, slots=True)
class Fp8Block(Format):
    """A matrix is `BlockScaledFp8`."""

    def empty(self, *shape: int, new: Callable[..., Tensor]) -> "BlockScaledFp8":
        """Returns an uninitialized matrix; N and K must be multiples of 128."""
        *several, n, k = shape
        blocks = (n, 1) if self.row_scales else (n // BLOCK, k // BLOCK)
        data, scale = new(*shape, dtype=torch.float8_e4m3fn), new(*several, *blocks, dtype=torch.float32)
        return BlockScaledFp8(data, scale, self.row_scales)

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        """Adds the exact products of each block of columns, scales the sum in fp32 and adds the blocks in order."""
        assert isinstance(weight, BlockScaledFp8)
        size = x.shape[1] if self.row_scales else BLOCK
        rows, scales = quantize_groups(x, size)
        total = torch.zeros(len(x), len(weight), device=x.device)
        columns = zip(rows.split(size, 1), weight.data.split(size, 1), scales.T, weight.row_scales().T, strict=True)
        for a, b, scale_a, scale_b in columns:
            total += (a.double() @ b.double().T).float() * (scale_a[:, None] * scale_b)
        return (total if bias is None else total + bias.float()).to(x.dtype)


FP8_BLOCK = Fp8Block(scale_suffix="_scale_inv", quantizes_rows=True, groups_rows=True, halves=True)
FP8_CHANNEL = Fp8Block(scale_suffix="_scale", quantizes_rows=True, row_scales=True, halves=True)


@dataclass(frozen=True, slots=True)
class BlockScaledFp8(Quantized):
    """float8_e4m3fn [N, K] and fp32 scales [N / 128, K / 128]; `by_rows`: [N, 1]."""

    by_rows: bool = False

    @property
    def format(self) -> Format:
        return FP8_CHANNEL if self.by_rows else FP8_BLOCK

    @classmethod
    def of(cls, matrix: Tensor, by_rows: bool = False) -> "BlockScaledFp8":
        """Quantizes a matrix [N, K] so that the largest value of each block is the largest of the format."""
        if by_rows:
            rows = RowScaledFp8.of(matrix)
            return cls(rows.data, rows.scale[:, None], by_rows=True)
        tiles = matrix.float().unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))  # [N / 128, 128, K / 128, 128]
        scale = tiles.abs().amax((1, 3)).clamp(min=LEAST) / FP8_MAX
        return cls((tiles / scale[:, None, :, None]).flatten(2).flatten(0, 1).to(torch.float8_e4m3fn), scale)

    def row_scales(self) -> Tensor:
        """Returns the scales of every row, fp32 [N, K / 128]; `by_rows`: [N, 1]."""
        if self.by_rows:
            return self.scale
        return self.scale.repeat_interleave(BLOCK, 0)

    def dense(self, dtype: torch.dtype) -> Tensor:
        scales = self.row_scales()
        return (self.data.float().unflatten(1, (scales.shape[1], -1)) * scales[..., None]).flatten(1).to(dtype)


def quantize_groups(rows: Tensor, columns: int = BLOCK) -> tuple[Tensor, Tensor]:
    """Quantizes rows [M, K] for a GEMM with a block-scaled weight, as DeepGEMM and vLLM do.

    Returns:
        float8_e4m3fn [M, K], and the fp32 scales [M, K / columns] of its groups of columns. Each scale makes the
        largest value of its group the largest of the format.
    """
    groups = rows.float().unflatten(1, (-1, columns))
    largest = groups.abs().amax(2, keepdim=True).clamp(min=LEAST)
    most = largest.new_full((), FP8_MAX)  # dividing by a number would multiply by its reciprocal, which rounds twice
    return (groups * (most / largest)).flatten(1).to(torch.float8_e4m3fn), (largest / most)[..., 0]
