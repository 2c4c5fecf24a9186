"""The attention of a long chunk of a prompt through FlashAttention, where one that reads pages is installed.

That is FlashAttention-3 (`flash_attn_interface`, arXiv 2407.08608). With `num_splits=1` a row's keys are summed in one
go, in blocks at fixed places, so that where a prompt is cut into chunks changes no bit of it.
"""

import functools
import importlib
import importlib.util
import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from .launch import is_hopper

MIN_ROWS = 513  # below, the kernel of `hopper/attention.py` is as fast, and chunks are captured graphs


@functools.cache
def with_pages() -> Callable[..., Tensor] | None:
    """FlashAttention-3's function over a paged cache, or None; a build that cannot be loaded is told of once."""
    if importlib.util.find_spec("flash_attn_interface") is None:
        return None
    try:
        module = importlib.import_module("flash_attn_interface")
        return module.flash_attn_with_kvcache
    except (ImportError, OSError, AttributeError) as error:
        warnings.warn(
            f"FlashAttention-3 is installed and cannot be loaded ({error}); prompts go without it", stacklevel=2
        )
        return None


def fits(q: Tensor, lengths: Tensor, *, causal: bool, window: int) -> bool:
    """Whether this is a long chunk of one prompt, and FlashAttention-3 there to take it."""
    return (
        len(q) >= MIN_ROWS
        and len(lengths) == 1
        and causal
        and not window
        and q.is_cuda
        and is_hopper(q.device.index)
        and q.dtype in (torch.bfloat16, torch.float16)
        and q.shape[2] in (64, 128)
        and with_pages() is not None
    )


def launch(q: Tensor, cache: Tensor, lengths: Tensor, page_table: Tensor, page_size: int) -> Tensor:
    """Causal `block_attention` of the reference for one request, which `fits`."""
    attend = with_pages()
    assert attend is not None
    keys, values = cache.unflatten(1, (-1, page_size)).unbind()
    out = attend(
        q[None], keys, values, cache_seqlens=lengths + len(q), page_table=page_table, causal=True, num_splits=1
    )
    return out.flatten(2)[0]
