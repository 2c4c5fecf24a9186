"""Configurations of a drafter that are refused, and the default taps."""

import pytest
from drafter_configs import make_config
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_toolkit.models.dflash.shape import default_target_layer_ids


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_size": 1}, "block_size is 1"),
        ({"num_layers": 0, "layer_types": ()}, "num_layers is 0"),
        ({"num_heads": 0}, "num_heads is 0"),
        ({"num_kv_heads": 0}, "num_kv_heads is 0"),
        ({"num_kv_heads": 3}, "num_heads 4 is not a multiple of num_kv_heads 3"),
        ({"head_dim": 7}, "head_dim is 7"),
        ({"target_layer_ids": ()}, "target_layer_ids is empty"),
        ({"target_layer_ids": (1, 8)}, "layer 8, the target's last"),
        ({"target_layer_ids": (1, 9)}, "layer id 9 is out of range"),
        ({"target_layer_ids": (-1, 1)}, "layer id -1 is out of range"),
        ({"target_layer_ids": (1, 4, 1)}, "names a layer twice"),
        ({"mask_token_id": 50}, r"mask_token_id 50 is not a row.*0\.\.49"),
        ({"mask_token_id": -1}, "mask_token_id -1"),
        ({"layer_types": ("full_attention",)}, "1 entries for 2 layers"),
        ({"layer_types": ("full_attention", "linear_attention")}, "linear_attention"),
        ({"layer_types": ("full_attention", "sliding_attention")}, "sliding_window is None"),
        ({"layer_types": ("sliding_attention",) * 2, "sliding_window": 0}, "sliding_window is 0"),
        ({"rope_theta": float("inf")}, "rope_theta is inf"),
        ({"input_embedding_scale": 0.0}, "input_embedding_scale is 0.0"),
        ({"output_multiplier": -1.0}, "output_multiplier is -1.0"),
        ({"final_logit_softcapping": -30.0}, "final_logit_softcapping is -30.0"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_configuration_that_cannot_work_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_config(**changes)


def test_with_block_size_changes_the_block_size_alone() -> None:
    config = make_config(sliding_window=4, layer_types=("full_attention", "sliding_attention"), is_causal=None)
    changed = config.with_block_size(12)
    assert changed.block_size == 12
    assert changed.with_block_size(config.block_size) == config


@pytest.mark.parametrize(
    ("layers", "taps", "ids"),
    [
        (36, 5, (1, 9, 17, 25, 33)),  # Qwen3-4B, Qwen3-8B
        (64, 5, (1, 16, 31, 46, 61)),  # Qwen3-32B
        (40, 5, (1, 10, 19, 28, 37)),  # Qwen3-14B
        (36, 1, (18,)),
        (6, 3, (1, 2, 3)),
    ],
)
def test_default_taps_are_those_of_published_drafters(layers: int, taps: int, ids: tuple[int, ...]) -> None:
    assert default_target_layer_ids(layers, taps) == ids


@given(layers=st.integers(5, 200), taps=st.integers(2, 12))
@settings(derandomize=True)
def test_default_taps_rise_from_layer_1_to_layer_n_minus_3(layers: int, taps: int) -> None:
    if taps > layers - 3:
        with pytest.raises(
            ValueError, match=f"{taps} taps, but {layers} layers of the target allow {max(1, layers - 3)}"
        ):
            default_target_layer_ids(layers, taps)
        return
    ids = default_target_layer_ids(layers, taps)
    assert len(ids) == taps and list(ids) == sorted(set(ids))
    assert (ids[0], ids[-1]) == (1, layers - 3)


@pytest.mark.parametrize(("layers", "taps"), [(36, 0), (2, 1), (3, 2)])
def test_a_target_too_shallow_for_the_taps_is_refused(layers: int, taps: int) -> None:
    with pytest.raises(ValueError, match="tap"):
        default_target_layer_ids(layers, taps)
