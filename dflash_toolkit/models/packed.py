"""Forward passes over documents that follow each other in one row: each sees itself alone, nothing is padding.

transformers looks up a model's attention function by name. `alone` gives a model the one below for the length of a
forward, and the arguments that every model hands on to it. On a GPU it is FlashAttention over sequences of different
lengths: -3 or -4 where installed (`kernels/flash.py`), else the -2 that PyTorch brings (`torch.nn.attention.varlen`).

Gated delta nets keep a state instead. Their two functions that mix tokens, a short convolution and the delta rule, are
exchanged for the same length of time: the convolution gets zeros between the documents, and the rule takes each
document by itself, or all of them at once where `flash-linear-attention` is installed. Other ways of mixing
tokens are not known here: `separable` says so, and such a model gets one document in a forward.
"""

import contextlib
import functools
import inspect
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import UnsupportedModel, UserError
from ..kernels import fla
from ..kernels import flash as kernel
from ..kernels.features import LEAST_CAPABILITY, features_of
from .layer_spec import CHUNKED

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAME = "packed_documents"  # transformers takes names with "flash" in them for others
# arguments of models that change nothing here: places and lengths that are known already, and options for the caller
NO_EFFECT = frozenset(
    ("position_ids", "cu_seq_lens_k", "max_length_k", "use_cache", "cache_position", "logits_to_keep",
     "num_items_in_batch", "output_attentions", "output_hidden_states", "output_router_logits", "return_dict")
)  # fmt: skip
HALF = (torch.float16, torch.bfloat16)  # dtypes of FlashAttention
WIDEST = 256  # head of PyTorch's FlashAttention-2
CONVOLUTION, DELTA_RULE = "causal_conv1d_fn", "torch_chunk_gated_delta_rule"  # in transformers' modules


def has_flash(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether packed documents go through FlashAttention there, and not one by one."""
    return device.type == "cuda" and dtype in HALF and features_of(device).capability >= LEAST_CAPABILITY


def separable(model: "PreTrainedModel") -> bool:
    """Whether `alone` keeps documents of this model apart: all that mixes tokens is attention that needs no mask (as
    FlashAttention in transformers gets none, every window, cap and sink is an argument), attention within chunks, or a
    gated delta net."""
    decoder: Any = model.get_decoder()
    config = decoder.config
    kinds = list(getattr(config, "layer_types", None) or ())
    windows = "sliding_attention" in kinds if kinds else getattr(config, "sliding_window", None) is not None
    nets = _delta_nets(decoder)
    return (
        (bool(decoder._supports_flash_attn) or CHUNKED in kinds)  # a part that reads images may not
        and model._can_set_attn_implementation()
        and {*kinds} <= {"full_attention", "sliding_attention", CHUNKED, "linear_attention"}
        and kinds.count("linear_attention") == len(nets)
        and len(nets) == sum(isinstance(module, nn.Conv1d) for module in decoder.modules())
        and (bool(nets) or not decoder._is_stateful)
        and (not windows or "sliding_window=" in _source(type(decoder).__module__))
    )


def _delta_nets(decoder: nn.Module) -> list[nn.Module]:
    """The modules that mix tokens by the two functions."""
    kinds = ((module, type(module)) for module in decoder.modules())
    return [module for module, kind in kinds if _is_delta_net(kind.__module__, kind.__name__)]


@functools.cache
def _is_delta_net(module: str, kind: str) -> bool:
    names = (CONVOLUTION, DELTA_RULE)
    if not all(hasattr(sys.modules[module], name) for name in names):
        return False
    body = _source(module).partition(f"\nclass {kind}(")[2].partition("\nclass ")[0]  # decorators may hide a forward
    return all(f"= {name}(" in body for name in names)


@functools.cache
def _source(module: str) -> str:
    return inspect.getsource(sys.modules[module])


@contextlib.contextmanager
def alone(model: "PreTrainedModel", lengths: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Arguments for a forward of `model` over a row [1, T] that holds documents of `lengths` tokens.

    Meanwhile the model's attention is the one of this module, without a mask, and gated delta nets of its class, this
    model's or another's, start again with every document.

    Raises:
        ValueError: a document without tokens.
        UnsupportedModel: a model that is not `separable`.
    """
    if min(lengths) < 1:
        raise ValueError(f"documents of {list(lengths)} tokens; each needs one or more")
    if not separable(model):
        raise UnsupportedModel(
            f"{type(model).__name__} mixes tokens in ways that packed rows cannot follow: give it one row at a time"
        )
    from transformers import AttentionInterface  # seconds to import, and the runtime needs none of it

    AttentionInterface.register(NAME, attention)
    device, before = model.device, model.config._attn_implementation

    def ends_of(lengths: Iterable[int]) -> Tensor:
        return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)

    ends, extra = ends_of(lengths), dict[str, Tensor]()
    if CHUNKED in (getattr(model.config, "layer_types", None) or ()):
        chunk = model.config.attention_chunk_size
        extra["chunk_ends"] = ends_of(min(chunk, n - start) for n in lengths for start in range(0, n, chunk))
    positions = torch.cat([torch.arange(n) for n in lengths])[None].to(device)
    model.set_attn_implementation(NAME)
    try:
        with _nets_reset(model, lengths, ends):
            yield {
                "position_ids": positions,
                "cu_seq_lens_q": ends,
                "cu_seq_lens_k": ends,
                "max_length_q": max(lengths),
                "max_length_k": max(lengths),
                **extra,
            }
    finally:
        model.set_attn_implementation(before)


# ---- attention -------------------------------------------------------------------------------------------------


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
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    chunk_ends: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Causal attention of every document within itself, as transformers calls it.

    Args:
        query: [1, N, T, H]; key and value: [1, G, T, H].
        cu_seq_lens_q: int32 [documents + 1], where each begins, and T.
        max_length_q: tokens of the longest.
        sliding_window: a token sees so many, itself included.
        softcap: scores s become softcap * tanh(s / softcap).
        s_aux: [N], attention sinks: the score of one more key, which has no value.
        chunk_ends: as `cu_seq_lens_q`, for layers that attend within chunks of documents.

    Returns:
        [1, T, N, H], and None for the probabilities.

    Raises:
        UserError: an argument that this attention does not know (a mask, dropout): without it the hidden states would
            be other than the model's.
    """
    unknown = [name for name, value in others.items() if value is not None and name not in NO_EFFECT]
    if attention_mask is not None:
        unknown.append("attention_mask")
    if dropout:
        unknown.append("dropout")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        unknown.append("is_causal=False")
    if unknown:
        raise UserError(
            f"{type(module).__name__} asks for attention with {', '.join(unknown)}, which rows that are packed do not "
            f"have: such a target is not supported"
        )
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [T, heads, H]
    layer: Any = module
    if chunk_ends is not None and layer.config.layer_types[layer.layer_idx] == CHUNKED:
        cu_seq_lens_q = chunk_ends
    fits = softcap is None and v.shape[-1] == q.shape[-1] <= WIDEST
    if has_flash(query.device, query.dtype) and fits:
        out = flash(q, k, v, cu_seq_lens_q, max_length_q, scaling, sliding_window, s_aux)
    else:
        out = one_by_one(q, k, v, cu_seq_lens_q, scaling, sliding_window, softcap, s_aux)
    return out[None], None


def flash(
    q: Tensor, k: Tensor, v: Tensor, ends: Tensor, longest: int, scale: float | None, window: int | None,
    sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`one_by_one` of documents of up to `longest` tokens: by FlashAttention-3 or -4 if installed, else PyTorch's."""
    before = None if window is None or window >= longest else window - 1
    found = kernel.packed(q, k, v, ends, longest, scale, before) if sinks is None else None
    if found is not None:
        return found
    varlen, with_sums = _varlen_attn()
    asked: dict[str, Any] = {"scale": scale, "window_size": (-1 if before is None else before, 0)}
    if sinks is None:
        out: Tensor = varlen(q, k, v, ends, ends, longest, longest, **asked)
        return out
    out, sums = varlen(q, k, v, ends, ends, longest, longest, **asked, return_aux=with_sums)
    return with_sinks(out, sums, sinks)


def with_sinks(out: Tensor, sums: Tensor, sinks: Tensor) -> Tensor:
    """Attention [T, N, H] with `sinks` [N], of the one without and the logarithm [N, T] of its softmax's sums."""
    return out * (sums.T - sinks).sigmoid()[..., None].to(out.dtype)


@functools.cache
def _varlen_attn() -> tuple[Callable[..., Any], Any]:
    """PyTorch's, and what asks it for sums; imported when first needed, as that takes longer than the rest of an
    engine's imports."""
    from torch.nn.attention.varlen import AuxRequest, varlen_attn

    # later versions need a flag if there are fewer heads of keys than of queries
    has_flag = "enable_gqa" in inspect.signature(varlen_attn).parameters
    return (functools.partial(varlen_attn, enable_gqa=True) if has_flag else varlen_attn), AuxRequest(lse=True)


def one_by_one(
    q: Tensor, k: Tensor, v: Tensor, ends: Tensor, scale: float | None, window: int | None,
    softcap: float | None = None, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attention [T, N, H] of q [T, N, H] over k and v [T, G, H] within each document: the definition."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    found = []
    for begin, end in itertools.pairwise(ends.tolist()):
        one_q, one_k, one_v = (x[begin:end].transpose(0, 1)[None] for x in (q, k, v))
        place = torch.arange(end - begin, device=q.device)
        distance = place[:, None] - place
        visible = (distance >= 0) & (distance < (window or len(place)))
        if softcap is None and sinks is None:
            found.append(F.scaled_dot_product_attention(one_q, one_k, one_v, attn_mask=visible, scale=scale))
            continue
        scores = one_q @ one_k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~visible, -torch.inf)
        if sinks is not None:
            column = sinks.to(scores.dtype)[:, None, None].expand(1, -1, len(place), 1)
            scores = torch.cat([scores, column], dim=-1)
        shares = scores.softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32))[..., : len(place)]
        found.append(shares.to(v.dtype) @ one_v)
    return torch.cat(found, dim=2)[0].transpose(0, 1)


# ---- gated delta nets ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _nets_reset(model: "PreTrainedModel", lengths: Sequence[int], ends: Tensor) -> Iterator[None]:
    """Exchange the two functions where the model's gated delta nets look for them."""
    modules = {type(net).__module__ for net in _delta_nets(model.get_decoder())}
    spaces = [vars(sys.modules[module]) for module in modules]
    before = [(space, {name: space[name] for name in (CONVOLUTION, DELTA_RULE)}) for space in spaces]
    ends = ends.long()
    try:
        for space, own in before:
            space[CONVOLUTION] = functools.partial(convolution, own[CONVOLUTION], ends)
            space[DELTA_RULE] = functools.partial(delta_rule, own[DELTA_RULE], lengths, ends)
        yield
    finally:
        for space, own in before:
            space.update(own)


def _refuse(function: str, others: dict[str, Any]) -> None:
    """Raises UserError for arguments that say more than where documents begin."""
    supported = NO_EFFECT | {"cu_seq_lens_q", "max_length_q", "cu_seqlens"}
    if unknown := [name for name, value in others.items() if value is not None and name not in supported]:
        raise UserError(
            f"{function} is asked for {', '.join(unknown)}, which packed rows do not have: such a target is "
            f"not supported"
        )


def convolution(
    own: Callable[..., Tensor], ends: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None,
    activation: str | None = None, **others: Any,
) -> Tensor:  # fmt: skip
    """`own` causal convolution of x [1, C, T] by weight [C, W] along T, of each document by itself."""
    _refuse(CONVOLUTION, others)
    gap = weight.shape[-1] - 1  # zeros between two documents, as many as before the first
    token = torch.arange(x.shape[-1], device=x.device)
    place = token + gap * torch.bucketize(token, ends[1:], right=True)
    spaced = x.new_zeros(*x.shape[:-1], x.shape[-1] + gap * (len(ends) - 2))
    spaced[..., place] = x
    return own(spaced, weight, bias, activation=activation)[..., place]


def delta_rule(
    own: Callable[..., Any], lengths: Sequence[int], ends: Tensor, q: Tensor, k: Tensor, v: Tensor, *,
    g: Tensor, beta: Tensor, use_qk_l2norm_in_kernel: bool, initial_state: None = None,
    output_final_state: bool = False, **others: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """`own` gated delta rule of q, k [1, T, N, H], v [1, T, M, V], g and beta [1, T, M], of each document by itself."""
    kept = {"initial_state": initial_state, "output_final_state": output_final_state or None}
    _refuse(DELTA_RULE, others | kept)
    normed = {"use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel}
    if q.is_cuda and (rule := fla.delta_rule()) is not None:
        return rule(q, k, v, g=g, beta=beta, cu_seqlens=ends, **normed)[0], None
    parts = zip(*(x.split(list(lengths), dim=1) for x in (q, k, v, g, beta)), strict=True)
    return torch.cat([own(*qkv, g=g, beta=beta, **normed)[0] for *qkv, g, beta in parts], dim=1), None
