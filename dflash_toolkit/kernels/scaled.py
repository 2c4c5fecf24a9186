"""Matrices in eight bits, for what need not be exact: the drafter and its own copy of the head."""

from dataclasses import dataclass

import torch
from torch import Tensor

FP8_MAX = 448.0  # of float8_e4m3fn
ROWS = 8192  # rounded at a time


@dataclass(frozen=True, slots=True)
class ScaledMatrix:
    """`data * scale[:, None]`: fp8 with one fp32 scale a row."""

    data: Tensor  # float8_e4m3fn [N, K]
    scale: Tensor  # fp32 [N]

    @classmethod
    def of(cls, matrix: Tensor) -> "ScaledMatrix":
        """Round a matrix [N, K] so that the largest value of each row is the largest of the format."""
        scale = matrix.abs().amax(1).float().clamp(min=1e-12) / FP8_MAX
        data = torch.empty_like(matrix, dtype=torch.float8_e4m3fn)
        for rows, source, s in zip(data.split(ROWS), matrix.split(ROWS), scale.split(ROWS), strict=True):
            rows.copy_(source.float() / s[:, None])  # some at a time: a head in fp32 is gigabytes
        return cls(data, scale)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The values in another format."""
        return (self.data.float() * self.scale[:, None]).to(dtype)

    def __len__(self) -> int:
        return len(self.data)

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + self.scale.nbytes


Matrix = Tensor | ScaledMatrix


def narrowed(rows: Tensor) -> Tensor:
    """Rows in fp8 as they come; what is larger than the format's largest becomes that."""
    return rows.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)


def dense(matrix: Matrix, dtype: torch.dtype) -> Tensor:
    """The values [N, K]; `dtype` is what a rounded matrix gets."""
    return matrix.dense(dtype) if isinstance(matrix, ScaledMatrix) else matrix


def stored(matrix: Matrix) -> Tensor:
    """What is in memory for a matrix, without its scales."""
    return matrix.data if isinstance(matrix, ScaledMatrix) else matrix
