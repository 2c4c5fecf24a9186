"""The Triton kernels under the names of their definitions in `reference.py`."""

from .accept import accept
from .attention import block_attention
from .linear import linear, linear_argmax, linear_partials, linear_swiglu
from .norm import add_rms_norm
from .rope import context_write, rope_write

__all__ = [
    "accept",
    "add_rms_norm",
    "block_attention",
    "context_write",
    "linear",
    "linear_argmax",
    "linear_partials",
    "linear_swiglu",
    "rope_write",
]
