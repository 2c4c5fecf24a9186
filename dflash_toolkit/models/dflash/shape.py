"""The default drafter of a target. Imports no torch until a shape is needed."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from .architecture import asked_by, of_kind

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from .config import DrafterConfig

LAYERS, TAPS, BLOCK_SIZE = 5, 5, 16
LAYERS_FOR_EXPERTS, TAPS_FOR_EXPERTS = 6, 8
# targets with published drafters that have the target's own heads
LIKE_THE_TARGET = ("llama", "qwen2", "qwen3")
HEAD_DIM, HEADS, KV_HEADS = 128, 32, 8
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
EPSILONS = ("rms_norm_eps", "norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon")
WINDOW = 2048  # window of sliding layers
# Hidden size from which the parts of DFlash 2 are faster: after equal minutes of training a target of 1536 decoded
# 1.2 % more tokens a second than with plain DFlash, and one of 896, with short steps, 3.1 % fewer (docs/dflash2.md).
WIDTH_FOR_PARTS = 1536


def drafter_shape(
    target: "PreTrainedConfig",
    *,
    layers: int | None = None,
    taps: int | None = None,
    block_size: int = BLOCK_SIZE,
    target_layer_ids: tuple[int, ...] = (),
    mask_token_id: int | None = None,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    intermediate_size: int | None = None,
    layer_types: tuple[str, ...] = (),
    sliding_window: int | None = None,
    is_causal: bool | None = False,
    kind: str | None = "dflash",
    **sizes: int | None,
) -> "DrafterConfig":
    """Returns a few layers with the target's width and vocabulary; given values replace the defaults.

    The defaults are those of published drafters. Layers and taps: 5 and 5 (arXiv 2602.06036; z-lab's for Qwen3, Llama,
    Qwen3.6-27B and Qwen3.8-27B), 6 and 8 for a target of experts (z-lab's for Qwen3.5- and Qwen3.6-35B-A3B). Heads: the
    target's own for Llama, Qwen2 and Qwen3, else 32 query and 8 key/value heads of 128 (z-lab's for Qwen3.5 to 3.8 and
    Muse-Glimmer-30B, whatever the target has), fewer below a hidden size of 2048. FFN: the target's own, and for a
    target of experts three times the hidden size (6144 for 2048 in the same two). RoPE is plain and rotates whole
    heads, with the theta of the target's full attention. A multiplier and a soft cap of the target's logits are kept
    (as in Muse-Glimmer-30B's drafter); blocks read the embedding's table unscaled.

    Args:
        target: the configuration of the language model; the text part of one with images.
        taps: evenly spaced, unless `target_layer_ids` is given; see `default_target_layer_ids`. By default fewer if the
            target is too shallow.
        mask_token_id: by default the last row of the embedding.
        layer_types, sliding_window, is_causal: see `with_attention`.
        kind: dflash, dflash2, or another registered kind; None: the kind of the given sizes, else see `default_kind`.
        sizes: those of the kind's parts, see `DraftArchitecture.sizes_of`.

    Raises:
        ValueError: a combination that cannot work.
    """
    from ..rope import full_rope
    from ..spec import logit_scale

    def given(value: int | None, default: Any) -> int:
        return int(default if value is None else value)

    depth, width, experts = int(target.num_hidden_layers), int(target.hidden_size), has_experts(target)
    if target.model_type in LIKE_THE_TARGET:
        heads, kv_heads = target.num_attention_heads, target.num_key_value_heads
        size = getattr(target, "head_dim", None) or width // heads
    else:
        kv_heads = min(KV_HEADS, max(1, width // 256))
        heads, size = kv_heads * HEADS // KV_HEADS, HEAD_DIM
    if not target_layer_ids:
        if taps is None and experts:
            taps = max(1, min(TAPS_FOR_EXPERTS, depth - 3))
        kinds = getattr(target, "layer_types", None) or ()
        target_layer_ids = default_target_layer_ids(depth, TAPS if taps is None else taps, kinds)
    scale = logit_scale(target)
    architecture = of_kind(kind) if kind else asked_by(sizes) or of_kind(default_kind(target))
    shape = architecture.config()(
        hidden_size=width,
        num_layers=given(layers, LAYERS_FOR_EXPERTS if experts else LAYERS),
        num_heads=given(num_heads, heads),
        num_kv_heads=given(num_kv_heads, kv_heads),
        head_dim=given(head_dim, size),
        intermediate_size=given(intermediate_size, 3 * width if experts else _ffn(target)),
        vocab_size=target.vocab_size,
        num_target_layers=depth,
        target_layer_ids=target_layer_ids,
        mask_token_id=given(mask_token_id, target.vocab_size - 1),
        block_size=block_size,
        rms_norm_eps=next((getattr(target, name) for name in EPSILONS if getattr(target, name, None)), 1e-6),
        rope_theta=float(full_rope(target).get("rope_theta", 1e6)),
        max_position_embeddings=target.max_position_embeddings,
        output_multiplier=scale.multiplier,
        final_logit_softcapping=scale.cap,
        **architecture.sizes_of(sizes, width),
    )
    return with_attention(shape, layer_types, sliding_window, is_causal)


def with_attention(
    shape: "DrafterConfig", layer_types: tuple[str, ...], sliding_window: int | None, is_causal: bool | None
) -> "DrafterConfig":
    """Returns the drafter with other attention: sliding windows, causal blocks.

    Args:
        layer_types: full_attention or sliding_attention for each layer, or one for all; none is full attention.
        sliding_window: of sliding layers, in tokens; by default `WINDOW`.
        is_causal: inside the block; None: sliding layers are causal, full ones are not.

    Raises:
        ValueError: a window that no layer has, one shorter than a block, or another combination that cannot work.
    """
    kinds = layer_types * shape.num_layers if len(layer_types) == 1 else layer_types
    sliding = "sliding_attention" in kinds
    if sliding_window is not None and not sliding:
        raise ValueError(f"sliding_window is {sliding_window}, but no layer is sliding_attention: give layer_types too")
    window = (WINDOW if sliding_window is None else sliding_window) if sliding else None
    if window is not None and window < shape.block_size:
        raise ValueError(
            f"sliding_window is {window}, less than a block of {shape.block_size}; raise it, as some servers hide "
            f"slots of a block from each other"
        )
    if is_causal is None and len(set(kinds)) < 2:  # explicit if it means the same
        is_causal = sliding
    return replace(shape, layer_types=kinds, sliding_window=window, is_causal=is_causal)


def default_kind(target: "PreTrainedConfig") -> str:
    """Returns the faster kind of drafter for a target at equal minutes of training, by the measurements so far."""
    return "dflash2" if int(target.hidden_size) >= WIDTH_FOR_PARTS else "dflash"


def has_experts(target: "PreTrainedConfig") -> bool:
    """Whether layers of a target are mixtures of experts."""
    return any(getattr(target, name, None) for name in EXPERTS)


def _ffn(target: "PreTrainedConfig") -> int:
    size = getattr(target, "intermediate_size", None) or 4 * target.hidden_size  # GPT-2's default
    return max(size) if isinstance(size, list) else size  # Gemma 3n gives one for each layer


def default_target_layer_ids(
    num_target_layers: int, num_taps: int, layer_types: "tuple[str, ...] | list[str]" = ()
) -> tuple[int, ...]:
    """Returns taps evenly spaced from layer 1 to layer n - 3; one tap is the middle layer (arXiv 2602.06036 section 5).

    Args:
        layer_types: of every layer. If some are recurrent and enough are full attention, each tap moves to the
            nearest of those, so that all taps are at the same place in the model's period.

    Raises:
        ValueError: the target is too shallow for that many distinct taps.
    """
    if num_taps < 1:
        raise ValueError(f"{num_taps} taps: a drafter needs at least one")
    if num_taps == 1:
        ids: tuple[int, ...] = (num_target_layers // 2,)
    else:
        span = num_target_layers - 4
        ids = tuple(round(1 + i * span / (num_taps - 1)) for i in range(num_taps))
    if list(ids) != sorted(set(ids)) or max(ids) > num_target_layers - 2:
        most = max(1, num_target_layers - 3)
        raise ValueError(
            f"{num_taps} taps, but {num_target_layers} layers of the target allow {most}; lower drafter.taps"
        )
    if "linear_attention" in layer_types:
        full = [i for i, kind in enumerate(layer_types[:-1]) if kind == "full_attention"]
        nearest = tuple(min(full, key=lambda layer: abs(layer - i)) for i in ids) if full else ()
        if len(set(nearest)) == len(ids):
            return nearest
    return ids
