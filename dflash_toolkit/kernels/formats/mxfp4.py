"""MXFP4 weights of checkpoints: e2m1 values, and one power of two for every 32 columns (OCP Microscaling Formats 1.0).

In memory a 32-bit word of a GPU register has eight values whose bits a kernel moves to bf16 with few instructions. So
`Mxfp4Weight.sort_` puts the values of a checkpoint into another order, in place.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .base import Format, Quantized, Weight

GROUP = 32  # columns that share a scale
ALIGNED = 16  # bytes; scales of a row begin at multiples, so that a kernel can copy them while it computes
BIAS = 127  # a scale s is 2 ** (s - BIAS)
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of the three bits after the sign


@dataclass(frozen=True, slots=True)
class Mxfp4(Format):
    """A matrix is `Mxfp4Weight`. GEMMs multiply its exact values with rows in their own dtype."""

    def empty(self, *shape: int, new: Callable[..., Tensor]) -> "Mxfp4Weight":
        """Returns an uninitialized matrix; K must be a multiple of 32."""
        *several, k = shape
        scale = new(*several, -(-k // GROUP // ALIGNED) * ALIGNED, dtype=torch.uint8)
        scale[..., k // GROUP :].zero_()
        return Mxfp4Weight(new(*several, k // 2, dtype=torch.uint8), scale)

    def tensors(self, name: str, weight: Weight) -> dict[str, Tensor]:
        """Returns the checkpoint tensors of the matrix with this name; call `sort_` after they were read."""
        assert isinstance(weight, Mxfp4Weight)
        return {f"{name}_blocks": weight.data.unflatten(-1, (-1, GROUP // 2)), f"{name}_scales": weight.exponents}


MXFP4 = Mxfp4()


@dataclass(frozen=True, slots=True)
class Mxfp4Weight(Quantized):
    """uint8 [N, K / 2] and the scales' exponents, uint8 [N, K / 32], and zeros up to a multiple of ALIGNED.

    Two bytes hold four values of one group, 8 columns apart. Their bits, from the highest, are those of the values
    a, b, c and d: a's sign; d's sign and mantissa; b's sign; d's exponent (2 bits); c's sign; exponent and mantissa of
    a, then of b and of c.
    """

    @property
    def format(self) -> Format:
        return MXFP4

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.data.shape[:-1], 2 * self.data.shape[-1]))

    @property
    def exponents(self) -> Tensor:
        """Returns the scales without the zeros."""
        return self.scale[..., : self.shape[-1] // GROUP]

    @classmethod
    def of(cls, matrix: Tensor) -> "Mxfp4Weight":
        """Quantizes a matrix [N, K]; the largest value of a group gets an exponent of the format, as in OCP's rule."""
        groups = matrix.float().unflatten(-1, (-1, GROUP))
        exponent = groups.abs().amax(-1).clamp(min=2.0**-60).log2().floor() - 2
        steps = (groups / exponent.exp2()[..., None]).abs()
        bounds = torch.tensor([(a + b) / 2 for a, b in itertools.pairwise(VALUES)], device=matrix.device)
        codes = torch.bucketize(steps, bounds) | (groups < 0).int() << 3
        blocks = (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8)
        found = MXFP4.empty(*matrix.shape, new=matrix.new_empty)
        found.data.copy_(blocks.flatten(-2))
        found.exponents.copy_(exponent + BIAS)
        found.sort_()
        return found

    def sort_(self) -> None:
        """Changes the order of a checkpoint, where byte i of a group has its values 2 i and 2 i + 1, to that above."""
        for matrix in self.data.flatten(0, -2).split(1 << 12):
            blocks = matrix.unflatten(-1, (-1, GROUP // 2)).int()
            a, b, c, d = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2).split(8, -1)
            words = (a & 8) << 12 | (a & 7) << 6 | (b & 8) << 9 | (b & 7) << 3 | (c & 8) << 6 | c & 7
            words |= (d & 8) << 11 | (d & 1) << 13 | (d & 6) << 9
            matrix.copy_(words.to(torch.int16).view(torch.uint8).flatten(-2))

    def dense(self, dtype: torch.dtype) -> Tensor:
        words = self.data.unflatten(-1, (-1, GROUP // 2)).view(torch.int16).int()
        table = torch.tensor([*VALUES, *(-value for value in VALUES)], device=words.device)
        last = (words >> 11 & 8) | (words >> 9 & 6) | (words >> 13 & 1)
        codes = [*((words >> 12 - i & 8) | (words >> 6 - i & 7) for i in (0, 3, 6)), last]
        values = torch.cat([table[code] for code in codes], -1)
        return torch.ldexp(values, self.exponents.int()[..., None] - BIAS).flatten(-2).to(dtype)
