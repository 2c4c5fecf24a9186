"""Defines the interface of weight formats, and the rows that GEMMs multiply with the weights."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor

FP8_MAX = 448.0  # largest float8_e4m3fn
Activation = Literal["silu", "gelu_tanh"]  # of gates: x * sigmoid(x), or the tanh form of gelu
LEAST = 1e-12  # lower bound of the largest value of a scaled group, so that no scale is zero


@dataclass(frozen=True, slots=True)
class Format:
    """Defines how the matrices of a model are stored, loaded and multiplied. The defaults are a weight-only format.

    A format is a module of this package. `Gpu` maps its class to the GEMM kernels.
    """

    scale_suffix: str = ""  # suffix of the scales' tensor in a checkpoint
    quantizes_rows: bool = False  # GEMMs quantize their rows, whatever their number
    groups_rows: bool = False  # they quantize groups of columns, see `QuantizedRows`
    row_scales: bool = False  # every row of a matrix has one scale
    halves: bool = False  # a matrix for `linear_swiglu` holds all gates, then all ups; otherwise they alternate

    def empty(self, *shape: int, new: Callable[..., Tensor]) -> "Weight":
        """Returns an uninitialized matrix [N, K] or [E, N, K]; `new` is torch.empty with a device and a dtype."""
        raise NotImplementedError

    def operand(self, x: "Operand") -> "Operand":
        """Converts rows to the form that its GEMM kernels accept."""
        return x if self.groups_rows else values_of(x)

    def linear(self, x: Tensor, weight: "Weight", bias: Tensor | None = None) -> Tensor:
        """Computes the reference GEMM: x [M, K] times weight [N, K] transposed, plus bias [N], in x's dtype."""
        return F.linear(x, dequantized(weight, x.dtype), bias)

    def gate_up(self, weight: "Weight") -> "tuple[Weight, Weight]":
        """Returns views of the gates and of the ups of a matrix [2 I, K] for `linear_swiglu`."""
        if self.halves:
            gate, up = weight.split([len(weight) // 2] * 2)
            return gate, up
        return weight[0::2], weight[1::2]

    def gate_then_up(self, weight: "Weight") -> "Weight":
        """Returns a view of a matrix [2 I, K] for `linear_swiglu` with all gates first, [2, I, K] if they alternate."""
        if self.halves:
            return weight
        assert isinstance(weight, Tensor), "no checkpoint has this format"
        return weight.unflatten(0, (-1, 2)).transpose(0, 1)

    def tensors(self, name: str, weight: "Weight") -> dict[str, Tensor]:
        """Returns the checkpoint tensors of the matrix with this name."""
        data, scale = parts(weight)
        if scale is None:
            return {name: data}
        assert self.scale_suffix, "no checkpoint has this format"
        return {name: data, f"{name}{self.scale_suffix}": scale}


@dataclass(frozen=True, slots=True)
class Quantized(ABC):
    """A matrix [N, K], or several [E, N, K], with scales; whole rows can be split off as views."""

    data: Tensor
    scale: Tensor

    @property
    @abstractmethod
    def format(self) -> Format: ...

    @property
    def shape(self) -> torch.Size:
        """Returns [N, K] or [E, N, K]."""
        return self.data.shape

    @abstractmethod
    def dense(self, dtype: torch.dtype) -> Tensor:
        """Returns the values [N, K] in another dtype."""

    def __getitem__(self, at: int | slice) -> Self:
        """Returns one or more of several matrices, as a view."""
        return replace(self, data=self.data[at], scale=self.scale[at])

    def split(self, rows: int | list[int]) -> list[Self]:
        """Splits by rows, like `Tensor.split`. Sizes must be multiples of the rows that share a scale."""
        shared = len(self.data) // len(self.scale)
        scales = [n // shared for n in rows] if isinstance(rows, list) else rows // shared
        each = zip(self.data.split(rows), self.scale.split(scales), strict=True)
        return [replace(self, data=data, scale=scale) for data, scale in each]

    def __len__(self) -> int:
        return len(self.data)

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + self.scale.nbytes


@dataclass(frozen=True, slots=True)
class QuantizedRows:
    """The rows of a GEMM, and the same rows quantized for a block-scaled weight, see `quantize_groups`."""

    values: Tensor  # [M, K]
    data: Tensor  # float8_e4m3fn [M, K]; its values in fp16 for a GPU without fp8 products
    scale: Tensor  # fp32 [M, K / 128]

    def __len__(self) -> int:
        return len(self.values)

    def index_select(self, dim: int, at: Tensor) -> "QuantizedRows":
        """Returns some of the rows, like `Tensor.index_select`; `dim` is 0."""
        return QuantizedRows(*(each.index_select(dim, at) for each in (self.values, self.data, self.scale)))


Weight = Tensor | Quantized  # [N, K]; [E, N, K] for a mixture of experts
Operand = Tensor | QuantizedRows  # [M, K]


def parts(weight: Weight) -> tuple[Tensor, Tensor | None]:
    """Returns the stored values and, for a quantized weight, the scales."""
    return (weight, None) if isinstance(weight, Tensor) else (weight.data, weight.scale)


def values_of(x: Operand) -> Tensor:
    """Returns the rows before quantization."""
    return x if isinstance(x, Tensor) else x.values


def dequantized(weight: Weight, dtype: torch.dtype) -> Tensor:
    """Returns the values [N, K]; a quantized weight is converted to `dtype`."""
    return weight if isinstance(weight, Tensor) else weight.dense(dtype)
