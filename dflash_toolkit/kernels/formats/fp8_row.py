"""FP8 weights with one scale per row, multiplied with rows in 16 bits: copies that a drafter makes of its own matrices.

No checkpoint has this format. Kernels may also quantize the rows, as drafts need not be exact.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from .base import FP8_MAX, LEAST, Format, Quantized, Weight

ROWS = 8192  # rows that are quantized at a time


@dataclass(frozen=True, slots=True)
class Fp8Row(Format):
    """A matrix is `RowScaledFp8`."""


FP8_ROW = Fp8Row(row_scales=True)


@dataclass(frozen=True, slots=True)
class RowScaledFp8(Quantized):
    """`data * scale[:, None]`: float8_e4m3fn [N, K] and fp32 [N]."""

    @property
    def format(self) -> Format:
        return FP8_ROW

    @classmethod
    def of(cls, matrix: Tensor) -> "RowScaledFp8":
        """Quantizes a matrix [N, K] so that the largest value of each row is the largest of the format."""
        scale = matrix.abs().amax(1).float().clamp(min=LEAST) / FP8_MAX
        data = torch.empty_like(matrix, dtype=torch.float8_e4m3fn)
        for rows, source, s in zip(data.split(ROWS), matrix.split(ROWS), scale.split(ROWS), strict=True):
            rows.copy_(source.float() / s[:, None])  # in parts, as a whole head in fp32 takes gigabytes
        return cls(data, scale)

    def dense(self, dtype: torch.dtype) -> Tensor:
        return (self.data.float() * self.scale[:, None]).to(dtype)


def is_row_scaled(weight: Weight) -> bool:
    return isinstance(weight, RowScaledFp8)


def cast_fp8(rows: Tensor) -> Tensor:
    """Casts rows to FP8 without a scale; values outside the format's range become its largest."""
    return rows.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
