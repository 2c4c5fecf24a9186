"""INT4 weights (W4A16): four bits a number, and a scale and a zero point for each group of columns of a row.

A value is (q - zero) * scale, with q and zero in 0..15. AWQ, GPTQ and pack-quantized checkpoints are repacked to this
form while they load (checkpoint/int4.py). GEMMs multiply the values with rows in 16 bits.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .base import Format, Quantized, Weight

QUARTERS = (64, 32, 16)  # columns of a quarter of a block; the first that fits is used
ZERO_BITS = 0xFF  # the lowest byte of a scale
SYMMETRIC_ZERO = 8
SLICE = 4096  # rows of a matrix that a GPU dequantizes at a time, for many rows


def quarter_of(k: int, group: int) -> int:
    """Returns the columns of a quarter of a block, see `GroupedInt4`; 0 if K columns do not divide into blocks."""
    return next((each for each in QUARTERS if k % (4 * each) == 0 and group % each == 0), 0)


@dataclass(frozen=True, slots=True)
class Int4(Format):
    """A matrix is `GroupedInt4`."""

    halves: bool = True
    group: int = 0  # columns that share a scale; 0: all columns of a row
    zeros: bool = True  # checkpoints have zero points; otherwise all are SYMMETRIC_ZERO
    stored: str = ""  # the form in checkpoints, see checkpoint/int4.py

    def empty(self, *shape: int, new: Callable[..., Tensor]) -> "GroupedInt4":
        """Returns an uninitialized matrix, with the zero points of symmetric weights."""
        *several, n, k = shape
        scale = new(*several, k // (self.group or k), n, dtype=torch.int32).fill_(SYMMETRIC_ZERO)
        return GroupedInt4(new(*several, n, k // 4, dtype=torch.int16), scale.mT, self)

    def tensors(self, name: str, weight: Weight) -> dict[str, Tensor]:
        """Returns views of the parts of a matrix: the packed numbers, the three high bytes of scales, zero points."""
        assert isinstance(weight, GroupedInt4)
        scale = weight.scale.mT.view(torch.uint8).unflatten(-1, (-1, 4)).transpose(-3, -2)
        found = {name: weight.data, f"{name}_scale": scale[..., 1:]}
        return found | {f"{name}_zero": scale[..., 0]} if self.zeros else found


@dataclass(frozen=True, slots=True)
class GroupedInt4(Quantized):
    """Packed numbers, int16 [N, K / 4], and int32 [N, groups].

    The columns are in blocks of four times `quarter_of`. An int16 has a column of the first quarter of a block in its
    lowest four bits, then the same ones of the other quarters. The upper 24 bits of an int32 are those of the scale in
    fp32, which hold any scale in 16 bits; the lowest byte is the zero point. Groups are the outer dimension in memory.
    """

    form: Int4

    @property
    def format(self) -> Format:
        return self.form

    @property
    def shape(self) -> torch.Size:
        *outer, width = self.data.shape
        return torch.Size([*outer, 4 * width])

    @property
    def group(self) -> int:
        """Returns the columns that share a scale."""
        return self.shape[-1] // self.scale.shape[-1]

    @property
    def quarter(self) -> int:
        """Returns the columns of a quarter of a block."""
        return quarter_of(self.shape[-1], self.group)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Returns the values [N, K], rounded once from fp32."""
        numbers, groups = unpack(self.data, self.quarter), self.scale.shape[-1]
        scale, zero = (self.scale & ~ZERO_BITS).view(torch.float32), self.scale & ZERO_BITS
        values = (numbers.unflatten(-1, (groups, -1)) - zero[..., None]) * scale[..., None]
        return values.flatten(-2).to(dtype)


def pack(numbers: Tensor, quarter: int) -> Tensor:
    """Packs integers [..., K] in 0..15 to int16 [..., K / 4]; `quarter` is from `quarter_of`."""
    first, second, third, fourth = numbers.to(torch.int16).unflatten(-1, (-1, 4, quarter)).unbind(-2)
    return (first | second << 4 | third << 8 | fourth << 12).flatten(-2)


def unpack(data: Tensor, quarter: int) -> Tensor:
    """Returns the numbers, int16 [..., K]."""
    blocks = data.unflatten(-1, (-1, quarter))
    return torch.stack([blocks >> shift & 15 for shift in (0, 4, 8, 12)], dim=-2).flatten(-3)
