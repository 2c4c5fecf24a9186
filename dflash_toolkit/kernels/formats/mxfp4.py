"""MXFP4 weights of checkpoints: e2m1 values, and one power of two for every 32 columns (OCP Microscaling Formats 1.0).

A kernel moves the bits of values to those of bf16 with few instructions, and has one scale for each quarter of a block
of columns. So `Mxfp4Weight.sort_` puts the values and scales of a checkpoint into another order, in place.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .base import Format, Quantized, Weight

GROUP = 32  # columns that share a scale
COLUMNS = 4 * GROUP  # of a block
BIAS = 127  # a scale s is 2 ** (s - BIAS)
ADDED = 66  # to scales in memory, with which a kernel's products in bf16 are in range; larger ones than LARGEST are not
LARGEST = 254 - ADDED
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of the three bits after the sign


@dataclass(frozen=True, slots=True)
class Mxfp4(Format):
    """A matrix is `Mxfp4Weight`. GEMMs multiply its exact values with rows in their own dtype."""

    def empty(self, *shape: int, new: Callable[..., Tensor]) -> "Mxfp4Weight":
        """Returns an uninitialized matrix; K must be a multiple of 32."""
        *several, k = shape
        padded = -(-k // COLUMNS) * COLUMNS
        data, scale = (new(*several, padded // n, dtype=torch.uint8) for n in (2, GROUP))
        data[..., k // 2 :].zero_()
        scale[..., k // GROUP :].zero_()
        return Mxfp4Weight(data, scale, k)

    def tensors(self, name: str, weight: Weight) -> dict[str, Tensor]:
        """Returns the checkpoint tensors of the matrix with this name; call `sort_` after they were read."""
        assert isinstance(weight, Mxfp4Weight)
        groups = weight.columns // GROUP
        blocks = weight.data.unflatten(-1, (-1, GROUP // 2))[..., :groups, :]
        return {f"{name}_blocks": blocks, f"{name}_scales": weight.scale[..., :groups]}


MXFP4 = Mxfp4()


@dataclass(frozen=True, slots=True)
class Mxfp4Weight(Quantized):
    """Values, uint8 [N, P / 2], and the exponents of scales, uint8 [N, P / 32], of K columns and zeros up to P = 128 n.

    Two bytes hold a value a, b, c and d of each group of a block of columns. Their bits, from the highest, are the sign
    of a; d; the signs of b and c; exponent and mantissa of a, then of b and of c. Scales have ADDED more than in
    checkpoints, and the order [P / 128, N, 4].
    """

    columns: int  # K

    @property
    def format(self) -> Format:
        return MXFP4

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.data.shape[:-1], self.columns))

    @classmethod
    def of(cls, matrix: Tensor) -> "Mxfp4Weight":
        """Quantizes a matrix [N, K]; the largest value of a group gets an exponent of the format, as in OCP's rule."""
        groups = matrix.float().unflatten(-1, (-1, GROUP))
        exponent = groups.abs().amax(-1).clamp(min=2.0**-60).log2().floor() - 2
        steps = (groups / exponent.exp2()[..., None]).abs()
        bounds = torch.tensor([(a + b) / 2 for a, b in itertools.pairwise(VALUES)], device=matrix.device)
        codes = torch.bucketize(steps, bounds) | (groups < 0).int() << 3
        found = MXFP4.empty(*matrix.shape, new=matrix.new_empty)
        blocks, scales = MXFP4.tensors("", found).values()
        blocks.copy_(codes[..., 0::2] | codes[..., 1::2] << 4)
        scales.copy_(exponent + BIAS)
        found.sort_()
        return found

    def sort_(self) -> None:
        """Changes the order of a checkpoint, where byte i of a group has its values 2 i and 2 i + 1, to that above."""
        for matrix in self.data.flatten(0, -2).split(1 << 12):
            groups = matrix.unflatten(-1, (-1, GROUP // 2)).int()
            codes = torch.stack([groups & 15, groups >> 4], -1).flatten(-2)
            a, b, c, d = codes.unflatten(-2, (-1, 4)).unbind(-2)
            signs = (a & 8) << 12 | (b & 8) << 7 | (c & 8) << 6
            words = signs | d << 11 | (a & 7) << 6 | (b & 7) << 3 | c & 7
            matrix.copy_(words.to(torch.int16).view(torch.uint8).flatten(-2))
        for scale in self.scale.view(-1, *self.scale.shape[-2:]):
            scale.clamp_(max=LARGEST).add_(ADDED)
            scale.copy_(scale.unflatten(-1, (-1, 4)).transpose(0, 1).reshape(scale.shape))

    def dense(self, dtype: torch.dtype) -> Tensor:
        words = self.data.unflatten(-1, (-1, COLUMNS // 2)).view(torch.int16).int()  # [..., N, P / 128, 32]
        table = torch.tensor([*VALUES, *(-value for value in VALUES)], device=words.device)
        a, b, c = ((words >> sign & 8) | (words >> at & 7) for sign, at in ((12, 6), (7, 3), (6, 0)))
        codes = [a, b, c, words >> 11 & 15]
        blocks, rows = words.shape[-2], words.shape[-3]
        scales = self.scale.view(*self.scale.shape[:-2], blocks, rows, 4).transpose(-3, -2)
        values = torch.ldexp(torch.stack([table[code] for code in codes], -2), scales.int()[..., None] - (BIAS + ADDED))
        return values.flatten(-3)[..., : self.columns].to(dtype)
