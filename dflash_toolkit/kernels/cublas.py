"""The operations of `fused.py` with cuBLAS's products, for GPUs on which these are faster (`runtime/gemm_choice.py`).

cuBLAS picks its algorithm, and with it the order of a sum, by the number of rows. Up to MAX_ROWS rows are therefore
padded to MAX_ROWS, so that a row's result does not depend on how many rows run beside it.
"""

import functools

import torch.nn.functional as F
from torch import Tensor

from .fused import accept, add_rms_norm, block_attention, chain, context_write, linear_argmax, rope_write, sample
from .launch import MAX_ROWS
from .scaled import Matrix
from .triton.linear import by_cublas, swiglu

__all__ = [
    "accept",
    "add_rms_norm",
    "block_attention",
    "context_write",
    "finish_layer",
    "linear",
    "linear_argmax",
    "linear_partials",
    "linear_swiglu",
    "rope_write",
    "sample",
]


def linear(x: Tensor, weight: Matrix, bias: Tensor | None = None) -> Tensor:
    """x [M, K] times weight [N, K] transposed, plus bias [N]: [M, N] in x's dtype."""
    missing = max(0, MAX_ROWS - len(x))
    return by_cublas(F.pad(x, (0, 0, 0, missing)) if missing else x, weight, bias)[: len(x)]


def linear_partials(x: Tensor, weight: Matrix, bias: Tensor | None = None) -> Tensor:
    """`linear` as a sum of one part, [1, M, N] in x's dtype."""
    return linear(x, weight, bias)[None]


def linear_swiglu(x: Tensor, weight: Matrix) -> Tensor:
    """silu(gate) * up, [M, I], where weight [2 * I, K] holds the rows gate 0, up 0, gate 1, up 1, ..."""
    return swiglu(linear(x, weight))


finish_layer = functools.partial(chain, linear_partials, linear_swiglu)
