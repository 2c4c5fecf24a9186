"""What a GEMM is given as its weight: values as they are, FP8 with a scale a row (an own copy for drafting), or FP8
with a scale a block (a checkpoint's own, whose GEMMs quantize their rows).

`linear` and the other operations take any of them. A kernel asks `parts`; nothing else knows the forms apart.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

FP8_MAX = 448.0  # of float8_e4m3fn
ROWS = 8192  # quantized at a time
BLOCK = 128  # rows and columns that have one scale in a block-scaled weight; columns of a row of activations
LEAST = 1e-12  # what the largest value of a scaled group counts as, at least


@dataclass(frozen=True, slots=True)
class RowScaledFp8:
    """`data * scale[:, None]`: fp8 with one fp32 scale a row."""

    data: Tensor  # float8_e4m3fn [N, K]
    scale: Tensor  # fp32 [N]

    @classmethod
    def of(cls, matrix: Tensor) -> "RowScaledFp8":
        """Quantize a matrix [N, K] so that the largest value of each row is the largest of the format."""
        scale = matrix.abs().amax(1).float().clamp(min=LEAST) / FP8_MAX
        data = torch.empty_like(matrix, dtype=torch.float8_e4m3fn)
        for rows, source, s in zip(data.split(ROWS), matrix.split(ROWS), scale.split(ROWS), strict=True):
            rows.copy_(source.float() / s[:, None])  # some at a time: a head in fp32 is gigabytes
        return cls(data, scale)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The values in another format."""
        return (self.data.float() * self.scale[:, None]).to(dtype)

    def split(self, rows: int) -> "list[RowScaledFp8]":
        """So many rows each, the last the rest, as views."""
        each = zip(self.data.split(rows), self.scale.split(rows), strict=True)
        return [RowScaledFp8(data, scale) for data, scale in each]

    def __len__(self) -> int:
        return len(self.data)

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + self.scale.nbytes


@dataclass(frozen=True, slots=True)
class BlockScaledFp8:
    """FP8 with one fp32 scale for every 128 rows and 128 columns (DeepSeek-V3, arXiv 2412.19437, section 3.3).

    Its GEMMs quantize their rows too, by `quantize_groups`, and scale what each block of columns adds in fp32.
    `by_rows`: a block is a whole row, of the weights and of what they are multiplied with.
    """

    data: Tensor  # float8_e4m3fn [N, K]
    scale: Tensor  # fp32 [N / 128, K / 128]; by rows: [N, 1]
    by_rows: bool = False

    @classmethod
    def empty(cls, n: int, k: int, new: Callable[..., Tensor], by_rows: bool = False) -> "BlockScaledFp8":
        """Of N and K that are multiples of 128; `new` is torch.empty, perhaps with a device."""
        data, blocks = new(n, k, dtype=torch.float8_e4m3fn), (n, 1) if by_rows else (n // BLOCK, k // BLOCK)
        return cls(data, new(*blocks, dtype=torch.float32), by_rows)

    @classmethod
    def of(cls, matrix: Tensor, by_rows: bool = False) -> "BlockScaledFp8":
        """Quantize a matrix [N, K] so that the largest value of each block is the largest of the format."""
        if by_rows:
            rows = RowScaledFp8.of(matrix)
            return cls(rows.data, rows.scale[:, None], by_rows=True)
        tiles = matrix.float().unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))  # [N / 128, 128, K / 128, 128]
        scale = tiles.abs().amax((1, 3)).clamp(min=LEAST) / FP8_MAX
        return cls((tiles / scale[:, None, :, None]).flatten(2).flatten(0, 1).to(torch.float8_e4m3fn), scale)

    def row_scales(self) -> Tensor:
        """The scales of every row, fp32 [N, K / 128]; where rows are scaled [N, 1]."""
        if self.by_rows:
            return self.scale
        return self.scale.repeat_interleave(BLOCK, 0)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The values in another format."""
        scales = self.row_scales()
        return (self.data.float().unflatten(1, (scales.shape[1], -1)) * scales[..., None]).flatten(1).to(dtype)

    def __getitem__(self, i: int | slice) -> "BlockScaledFp8":
        """One or more of several matrices [E, N, K] with scales [E, N / 128, K / 128], by rows [E, N, 1], as a view."""
        return BlockScaledFp8(self.data[i], self.scale[i], by_rows=self.by_rows)

    def split(self, rows: list[int]) -> "list[BlockScaledFp8]":
        """So many rows each, multiples of 128, as views."""
        scales = self.scale.split([n if self.by_rows else n // BLOCK for n in rows])
        each = zip(self.data.split(rows), scales, strict=True)
        return [BlockScaledFp8(data, scale, by_rows=self.by_rows) for data, scale in each]

    def __len__(self) -> int:
        return len(self.data)

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + self.scale.nbytes


@dataclass(frozen=True, slots=True)
class QuantizedRows:
    """Rows of a GEMM as they are, and as one with a block-scaled weight takes them: `quantize_groups` of them."""

    values: Tensor  # [M, K]
    data: Tensor  # float8_e4m3fn [M, K]
    scale: Tensor  # fp32 [M, K / 128]

    def __len__(self) -> int:
        return len(self.values)


Weight = Tensor | RowScaledFp8 | BlockScaledFp8  # [N, K]
Operand = Tensor | QuantizedRows  # [M, K]
Stacked = Tensor | BlockScaledFp8  # [E, N, K], of which [i] is a `Weight`


def parts(weight: Weight) -> tuple[Tensor, Tensor | None]:
    """What is in memory: the stored values [N, K] and, of FP8, their scales."""
    return (weight, None) if isinstance(weight, Tensor) else (weight.data, weight.scale)


def values_of(x: Operand) -> Tensor:
    """The rows as they are."""
    return x if isinstance(x, Tensor) else x.values


def takes_groups(weight: Weight | Stacked) -> bool:
    """Whether GEMMs with it quantize their rows in groups of BLOCK columns."""
    return isinstance(weight, BlockScaledFp8) and not weight.by_rows


def is_quantized(weight: Weight) -> bool:
    """Whether it has a scale a row."""
    return isinstance(weight, RowScaledFp8)


def dense(weight: Weight, dtype: torch.dtype) -> Tensor:
    """The values [N, K]; `dtype` is what a quantized weight gets."""
    return weight if isinstance(weight, Tensor) else weight.dense(dtype)


def quantize_groups(rows: Tensor, columns: int = BLOCK) -> tuple[Tensor, Tensor]:
    """Rows [M, K] as GEMMs with a block-scaled weight take them, quantized as DeepGEMM and vLLM do.

    Returns:
        float8_e4m3fn [M, K], and fp32 scales [M, K / columns] that it is to be multiplied with: every 128 columns of a
        row, or so many, have one, by which the largest value of them is the largest of the format.
    """
    groups = rows.float().unflatten(1, (-1, columns))
    largest = groups.abs().amax(2, keepdim=True).clamp(min=LEAST)
    most = largest.new_full((), FP8_MAX)  # a number instead is multiplied with a reciprocal, which rounds twice
    return (groups * (most / largest)).flatten(1).to(torch.float8_e4m3fn), (largest / most)[..., 0]


def cast_fp8(rows: Tensor) -> Tensor:
    """Rows in fp8 as they come; what is larger than the format's largest becomes that."""
    return rows.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
