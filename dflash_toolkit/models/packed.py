"""Forward passes over documents that stand one behind the other in one row: each sees itself alone, nothing is padding.

transformers looks up a model's attention function by name. `alone` gives a model the one below for the length of a
forward, and the arguments that every model hands on to it. On a GPU it is FlashAttention over sequences of different
lengths: -3 or -4 where installed (`kernels/flash.py`), else the -2 that PyTorch brings (`torch.nn.attention.varlen`).
"""

import contextlib
import functools
import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import UserError
from ..kernels import flash as kernel

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAME = "packed_documents"  # transformers takes names with "flash" in them for others
# what models hand on that changes nothing here: places and lengths that are known already, and what is for the caller
NO_EFFECT = frozenset(
    ("position_ids", "cu_seq_lens_k", "max_length_k", "use_cache", "cache_position", "logits_to_keep",
     "num_items_in_batch", "output_attentions", "output_hidden_states", "output_router_logits", "return_dict")
)  # fmt: skip
HALF = (torch.float16, torch.bfloat16)  # what FlashAttention computes in


def has_flash(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether packed documents go through FlashAttention there, and not one by one."""
    return device.type == "cuda" and dtype in HALF and torch.cuda.get_device_capability(device) >= (8, 0)


@contextlib.contextmanager
def alone(model: "PreTrainedModel", lengths: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Arguments for a forward of `model` over a row [1, T] that holds documents of `lengths` tokens.

    Meanwhile the model's attention is the one of this module, without a mask.

    Raises:
        ValueError: a document without tokens.
    """
    if min(lengths) < 1:
        raise ValueError(f"documents of {list(lengths)} tokens; each needs one or more")
    from transformers import AttentionInterface  # seconds to import, and the runtime needs none of it

    AttentionInterface.register(NAME, attention)
    device, before = model.device, model.config._attn_implementation
    ends = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)
    positions = torch.cat([torch.arange(n) for n in lengths])[None].to(device)
    model.set_attn_implementation(NAME)
    try:
        yield {
            "position_ids": positions,
            "cu_seq_lens_q": ends,
            "cu_seq_lens_k": ends,
            "max_length_q": max(lengths),
            "max_length_k": max(lengths),
        }
    finally:
        model.set_attn_implementation(before)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    *,
    cu_seq_lens_q: Tensor,
    max_length_q: int,
    scaling: float | None = None,
    sliding_window: int | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Causal attention of every document within itself, as transformers calls it.

    Args:
        query: [1, N, T, H]; key and value: [1, G, T, H].
        cu_seq_lens_q: int32 [documents + 1], where each begins, and T.
        max_length_q: tokens of the longest.
        sliding_window: a token sees so many, itself included.

    Returns:
        [1, T, N, H], and None for the probabilities.

    Raises:
        UserError: an argument that this attention does not know (attention sinks, soft capping, a mask): without it the
            hidden states would be other than the model's.
    """
    unknown = [name for name, value in others.items() if value is not None and name not in NO_EFFECT]
    if attention_mask is not None:
        unknown.append("attention_mask")
    if dropout:
        unknown.append("dropout")
    if is_causal is False:
        unknown.append("is_causal=False")
    if unknown:
        raise UserError(
            f"{type(module).__name__} asks for attention with {', '.join(unknown)}, which rows that are packed do not "
            f"have: such a target is not supported; give one of Llama's, Qwen2's or Qwen3's architecture"
        )
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [T, heads, H]
    if has_flash(query.device, query.dtype):
        out = flash(q, k, v, cu_seq_lens_q, max_length_q, scaling, sliding_window)
    else:
        out = one_by_one(q, k, v, cu_seq_lens_q, scaling, sliding_window)
    return out[None], None


def flash(
    q: Tensor, k: Tensor, v: Tensor, ends: Tensor, longest: int, scale: float | None, window: int | None
) -> Tensor:
    """`one_by_one` of documents of up to `longest` tokens: by FlashAttention-3 or -4 if installed, else PyTorch's."""
    before = None if window is None or window >= longest else window - 1
    found = kernel.packed(q, k, v, ends, longest, scale, before)
    if found is not None:
        return found
    out: Tensor = _varlen_attn()(
        q, k, v, ends, ends, longest, longest, scale=scale, window_size=(-1 if before is None else before, 0)
    )
    return out


@functools.cache
def _varlen_attn() -> Callable[..., Any]:
    """PyTorch's, imported when it is first needed: that takes longer than the rest of an engine's imports."""
    from torch.nn.attention.varlen import varlen_attn

    # later versions want to be told that there are fewer heads of keys than of queries
    told = "enable_gqa" in inspect.signature(varlen_attn).parameters
    return functools.partial(varlen_attn, enable_gqa=True) if told else varlen_attn


def one_by_one(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, scale: float | None, window: int | None) -> Tensor:
    """Attention [T, N, H] of q [T, N, H] over k and v [T, G, H] within each document: the definition."""
    found = []
    for begin, end in itertools.pairwise(ends.tolist()):
        one_q, one_k, one_v = (x[begin:end].transpose(0, 1)[None] for x in (q, k, v))
        place = torch.arange(end - begin, device=q.device)
        distance = place[:, None] - place
        visible = (distance >= 0) & (distance < (window or len(place)))
        found.append(
            F.scaled_dot_product_attention(one_q, one_k, one_v, attn_mask=visible, scale=scale, enable_gqa=True)
        )
    return torch.cat(found, dim=2)[0].transpose(0, 1)
