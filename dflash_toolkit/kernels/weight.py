"""What a GEMM is given as its weight: values as they are, or FP8 with a scale a row (an own copy for drafting).

`linear` and the other operations take any of them. A kernel asks `parts`; nothing else knows the forms apart.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

FP8_MAX = 448.0  # of float8_e4m3fn
ROWS = 8192  # quantized at a time


@dataclass(frozen=True, slots=True)
class RowScaledFp8:
    """`data * scale[:, None]`: fp8 with one fp32 scale a row."""

    data: Tensor  # float8_e4m3fn [N, K]
    scale: Tensor  # fp32 [N]

    @classmethod
    def of(cls, matrix: Tensor) -> "RowScaledFp8":
        """Quantize a matrix [N, K] so that the largest value of each row is the largest of the format."""
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


Weight = Tensor | RowScaledFp8  # [N, K]


def parts(weight: Weight) -> tuple[Tensor, Tensor | None]:
    """What is in memory: the stored values [N, K] and their scales [N], or None."""
    return (weight.data, weight.scale) if isinstance(weight, RowScaledFp8) else (weight, None)


def is_quantized(weight: Weight) -> bool:
    return isinstance(weight, RowScaledFp8)


def dense(weight: Weight, dtype: torch.dtype) -> Tensor:
    """The values [N, K]; `dtype` is what a quantized weight gets."""
    return weight.dense(dtype) if isinstance(weight, RowScaledFp8) else weight


def cast_fp8(rows: Tensor) -> Tensor:
    """Rows in fp8 as they come; what is larger than the format's largest becomes that."""
    return rows.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
