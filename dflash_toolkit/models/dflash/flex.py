"""FlexAttention of the drafter in training, with tiles that fit into the shared memory of the GPU."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from ...kernels.features import features_of

LARGE_TILES = 160 << 10  # bytes of shared memory that PyTorch's tiles may need
# Options of FlexAttention's kernels for 16-bit heads; None for PyTorch's own. Blocks of 16 slots and their contexts
# leave tiles half empty: small ones lose less (an H200, heads of 64: 5.3 instead of 7.2 ms for forward and backward of
# 37 thousand slots). PyTorch's tiles do not fit every GPU with 99 KiB of shared memory (its issues 133254, 180278,
# 198224 and pull requests 184310 and 198228, which have the tiles that fit). For fewer than 128 slots PyTorch would
# take the kernel of its decoding, which has no choice for these masks: TRITON names the other one.
NARROW = {"BLOCK_M1": 32, "BLOCK_N1": 64, "BLOCK_M2": 64, "BLOCK_N2": 32}
SQUARE = {"fwd_num_stages": 2, "BLOCK_M": 128, **dict.fromkeys(("BLOCK_N", *NARROW), 64)}
TRITON = {"BACKEND": "TRITON"}
FLEX_OPTIONS: dict[str, dict[str, int | str] | None] = {
    "CPU": None,
    "heads of 64": {**TRITON, **NARROW},
    "any": {**TRITON},
    "99 KiB, heads of 256": {**TRITON, "num_stages": 2, **dict.fromkeys(("BLOCK_M", "BLOCK_N", *NARROW), 32)},
    "99 KiB before sm_100": {**TRITON, **SQUARE, "bwd_num_stages": 2},
    "99 KiB": {**TRITON, **SQUARE, "bwd_num_stages": 1},
}


def attend(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, grouped: bool, head_dim: int) -> Tensor:
    """Returns the attention [B, N, Q, H] of queries [B, N, Q, H] to keys and values [B, G, T, H].

    Args:
        grouped: whether several heads of queries share one of keys.
        head_dim: H, as a number when the shapes are symbols of a compiled step.
    """
    attention: Any = _compiled_flex_attention() if q.is_cuda else flex_attention
    options = FLEX_OPTIONS[flex_options(head_dim, q.device)]
    return attention(q, k, v, block_mask=mask, enable_gqa=grouped, kernel_options=options)


@torch.compiler.assume_constant_result
def flex_options(head_dim: int, device: torch.device) -> str:
    """Returns the name of the FLEX_OPTIONS of a device; PyTorch 2.11 cannot compile a dict as a constant."""
    if device.type != "cuda":
        return "CPU"
    if head_dim <= 64:
        return "heads of 64"
    features = features_of(device)
    if features.shared_memory >= LARGE_TILES:
        return "any"
    if head_dim > 128:
        return "99 KiB, heads of 256"
    return "99 KiB before sm_100" if features.capability < (10, 0) else "99 KiB"


@functools.cache
def _compiled_flex_attention() -> Callable[..., Tensor]:
    return torch.compile(flex_attention, dynamic=True)  # eager, it would materialise the scores
