"""Weight formats: one file for each, with its data, its reference GEMM and its names in checkpoints.

`Gpu` (gpu.py) maps a format's class to its GEMM kernels. `models/quantized.py` reads the format from a configuration.
"""

from torch import Tensor

from .base import (
    FP8_MAX,
    LEAST,
    Activation,
    Format,
    Operand,
    Quantized,
    QuantizedRows,
    Weight,
    dequantized,
    parts,
    values_of,
)
from .dense import DENSE
from .fp8_block import BLOCK, FP8_BLOCK, FP8_CHANNEL, BlockScaledFp8, quantize_groups
from .fp8_row import FP8_ROW, RowScaledFp8, cast_fp8, is_row_scaled
from .int4 import GroupedInt4, Int4
from .mxfp4 import MXFP4, Mxfp4Weight

__all__ = [
    "BLOCK",
    "DENSE",
    "FP8_BLOCK",
    "FP8_CHANNEL",
    "FP8_MAX",
    "FP8_ROW",
    "LEAST",
    "MXFP4",
    "Activation",
    "BlockScaledFp8",
    "Format",
    "GroupedInt4",
    "Int4",
    "Mxfp4Weight",
    "Operand",
    "Quantized",
    "QuantizedRows",
    "RowScaledFp8",
    "Weight",
    "cast_fp8",
    "dequantized",
    "format_of",
    "is_row_scaled",
    "parts",
    "quantize_groups",
    "values_of",
]


def format_of(weight: Weight) -> Format:
    return DENSE if isinstance(weight, Tensor) else weight.format
