"""The drafter that a target gets unless somebody says otherwise. Without torch until a shape is asked for."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from .network import DrafterConfig

LAYERS, TAPS, BLOCK_SIZE = 5, 5, 16


def drafter_shape(
    target: "PreTrainedConfig",
    *,
    layers: int = LAYERS,
    taps: int = TAPS,
    block_size: int = BLOCK_SIZE,
    target_layer_ids: tuple[int, ...] = (),
    mask_token_id: int | None = None,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    intermediate_size: int | None = None,
) -> "DrafterConfig":
    """A few layers with the target's widths, heads and vocabulary; what is given takes the place of the target's.

    Args:
        taps: evenly spaced, where `target_layer_ids` names none.
        mask_token_id: by default the last row of the embedding.

    Raises:
        ValueError: a combination that cannot work.
    """
    from .network import DrafterConfig

    def given(value: int | None, default: Any) -> int:
        return int(default if value is None else value)

    depth, widths = int(target.num_hidden_layers), target.hidden_size // target.num_attention_heads
    return DrafterConfig(
        hidden_size=target.hidden_size,
        num_layers=layers,
        num_heads=given(num_heads, target.num_attention_heads),
        num_kv_heads=given(num_kv_heads, target.num_key_value_heads),
        head_dim=given(head_dim, getattr(target, "head_dim", None) or widths),
        intermediate_size=given(intermediate_size, target.intermediate_size),
        vocab_size=target.vocab_size,
        num_target_layers=depth,
        target_layer_ids=target_layer_ids or default_target_layer_ids(depth, taps),
        mask_token_id=given(mask_token_id, target.vocab_size - 1),
        block_size=block_size,
        rms_norm_eps=target.rms_norm_eps,
        rope_theta=float(target.rope_parameters["rope_theta"]),
        max_position_embeddings=target.max_position_embeddings,
    )


def default_target_layer_ids(num_target_layers: int, num_taps: int) -> tuple[int, ...]:
    """Taps evenly spaced from layer 1 to layer n - 3; one tap is the middle layer (arXiv 2602.06036 section 5).

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
        raise ValueError(f"a target of {num_target_layers} layers has no {num_taps} distinct layers to tap")
    return ids
