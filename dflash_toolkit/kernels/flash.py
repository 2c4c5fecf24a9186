"""Loads FlashAttention-3 and -4 if they are installed (docs/flash-attention.md).

FlashAttention-3 (`flash_attn_interface`, arXiv 2407.08608) is built from its repository, for Hopper GPUs. The extra
`flash-attn` is FlashAttention-4 (`flash_attn.cute`), for Hopper and Blackwell; it compiles a kernel at the first use of
a head width. They compute long chunks of a prompt and, in training, the target's attention over packed rows.

A prompt row's keys are summed in one split, in blocks at fixed positions, so the bits do not depend on where a prompt
is cut into chunks. Values after the last key in its page are multiplied by zero: they must be finite.
"""

import functools
import importlib
import importlib.util
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .features import features_of
from .paged import PagedKV

# rows of a prompt's chunk; below this, this project's kernels are as fast, and chunks are captured graphs
MIN_ROWS = 513


@dataclass(frozen=True, slots=True)
class Flash:
    """An installed FlashAttention; the two functions return tensors like q."""

    name: str
    paged: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]  # q, keys, values, lengths, page_table
    packed: Callable[[Tensor, Tensor, Tensor, Tensor, int, float | None, int | None], Tensor]  # as `packed`


def _version_3() -> Flash:
    module = importlib.import_module("flash_attn_interface")
    with_pages, varlen = module.flash_attn_with_kvcache, module.flash_attn_varlen_func

    def paged(q: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, page_table: Tensor) -> Tensor:
        return with_pages(
            q.unsqueeze(0), keys, values, cache_seqlens=lengths, page_table=page_table, causal=True, num_splits=1
        ).squeeze(0)

    def packed(
        q: Tensor, k: Tensor, v: Tensor, ends: Tensor, longest: int, scale: float | None, before: int | None
    ) -> Tensor:
        window = (-1 if before is None else before, -1 if before is None else 0)
        return _first(
            varlen(q, k, v, ends, ends, longest, longest, softmax_scale=scale, causal=True, window_size=window)
        )

    return Flash("FlashAttention-3", paged, packed)


def _version_4() -> Flash:
    varlen = importlib.import_module("flash_attn.cute").flash_attn_varlen_func

    def paged(q: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, page_table: Tensor) -> Tensor:
        found = varlen(q.unsqueeze(0), keys, values, seqused_k=lengths, page_table=page_table, causal=True)
        return _first(found).squeeze(0)

    def packed(
        q: Tensor, k: Tensor, v: Tensor, ends: Tensor, longest: int, scale: float | None, before: int | None
    ) -> Tensor:
        return _first(
            varlen(
                q, k, v, cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=longest, max_seqlen_k=longest,
                softmax_scale=scale, causal=True, window_size=(before, None if before is None else 0),
            )
        )  # fmt: skip

    return Flash("FlashAttention-4", paged, packed)


def _first(found: Any) -> Tensor:
    """Returns the output of a function that may also return the log of the softmax's sums."""
    return found[0] if isinstance(found, tuple) else found


# module -> its loader, and the major capabilities it runs on; the faster module comes first
VERSIONS: dict[str, tuple[Callable[[], Flash], tuple[int, ...]]] = {
    "flash_attn_interface": (_version_3, (9,)),
    "flash_attn.cute": (_version_4, (9, 10)),
}


@functools.cache
def load(module: str) -> Flash | None:
    """Returns this module's FlashAttention, or None; warns once if it is installed and cannot be loaded."""
    try:
        if importlib.util.find_spec(module) is None:
            return None
    except (ModuleNotFoundError, ValueError):  # its package is not installed
        return None
    try:
        return VERSIONS[module][0]()
    except (ImportError, OSError, AttributeError, RuntimeError) as error:
        warnings.warn(f"{module} is installed but cannot be loaded ({error}); attention does not use it", stacklevel=2)
        return None


@functools.cache
def installed(device: torch.device) -> Flash | None:
    """Returns the FlashAttention for this device, or None."""
    if device.type != "cuda":
        return None
    major = features_of(device).capability[0]
    versions = (load(module) for module, (_, majors) in VERSIONS.items() if major in majors)
    return next((found for found in versions if found is not None), None)


def _computes(q: Tensor) -> bool:
    return q.is_cuda and q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] in (64, 128)


def fits(q: Tensor, kv: PagedKV, *, causal: bool) -> bool:
    """Returns whether this is a long chunk of one prompt that an installed FlashAttention can compute."""
    return (
        len(q) >= MIN_ROWS
        and len(kv.lengths) == 1
        and causal
        and kv.plain
        and kv.factor is None
        and _computes(q)
        and installed(q.device) is not None
    )


def launch(q: Tensor, kv: PagedKV) -> Tensor:
    """Computes the causal `block_attention` of the reference for one request that `fits`."""
    flash = installed(q.device)
    assert flash is not None
    keys, values = kv.cache.unflatten(1, (-1, kv.size)).unbind()
    return flash.paged(q, keys, values, kv.lengths + len(q), kv.table).flatten(1)


def packed(
    q: Tensor, k: Tensor, v: Tensor, ends: Tensor, longest: int, scale: float | None, before: int | None
) -> Tensor | None:
    """Returns the causal attention [T, N, H] within documents, or None if no installed module computes it.

    Args:
        q: [T, N, H]; k and v: [T, G, H].
        ends: int32 [documents + 1], the start of each document, and T.
        longest: tokens of the longest document.
        before: number of earlier tokens that a token sees; None: all.
    """
    flash = installed(q.device) if _computes(q) else None
    return None if flash is None else flash.packed(q, k, v, ends, longest, scale, before)
