"""The shape that a drafter gets by default is that of the published drafters for the same target."""

from dataclasses import replace
from typing import Any

import pytest
import transformers
from transformers import PreTrainedConfig

from dflash_toolkit.models.dflash.shape import default_kind, default_target_layer_ids, drafter_shape
from dflash_toolkit.models.target_files import choose_mask_token

HYBRID = ["linear_attention"] * 3 + ["full_attention"]


def target(kind: str, **values: Any) -> PreTrainedConfig:
    return getattr(transformers, f"{kind}Config")(**values)


QWEN35 = {"vocab_size": 248320, "head_dim": 256, "max_position_embeddings": 262144}
ROPE35 = {"rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10], "mrope_interleaved": True}
QWEN35["rope_parameters"] = ROPE35 | {"rope_type": "default"}
# (heads, key/value heads, head dim), FFN, layers, theta: facts of model pages
PUBLISHED = {
    "Qwen3-8B": (
        target("Qwen3", hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32,
               num_key_value_heads=8, head_dim=128, vocab_size=151936, rope_parameters={"rope_theta": 1e6}),
        (32, 8, 128), 12288, 5, 1e6, (1, 9, 17, 25, 33),
    ),
    "Qwen3.6-27B and Qwen3.8-27B": (
        target("Qwen3_5Text", hidden_size=5120, intermediate_size=17408, num_hidden_layers=64, num_attention_heads=24,
               num_key_value_heads=4, layer_types=HYBRID * 16, **QWEN35),
        (32, 8, 128), 17408, 5, 1e7, (3, 15, 31, 47, 59),
    ),
    "Qwen3.6-35B-A3B": (
        target("Qwen3_5MoeText", hidden_size=2048, num_hidden_layers=40, num_attention_heads=16, num_key_value_heads=2,
               layer_types=HYBRID * 10, **QWEN35),
        (32, 8, 128), 6144, 6, 1e7, (3, 7, 11, 15, 23, 27, 31, 35),
    ),
    "gpt-oss-20b": (
        target("GptOss", num_hidden_layers=24, num_local_experts=32),
        (32, 8, 128), 8640, 6, 150000.0, (1, 4, 7, 10, 12, 15, 18, 21),
    ),
    "Gemma 3 27B": (
        target("Gemma3Text", hidden_size=5376, intermediate_size=21504, num_hidden_layers=62, num_attention_heads=32,
               num_key_value_heads=16, head_dim=128),
        (32, 8, 128), 21504, 5, 1e6, (1, 16, 30, 44, 59),
    ),
    "OLMo 3 7B": (
        target("Olmo3", hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32),
        (32, 8, 128), 11008, 5, 5e5, (1, 8, 15, 22, 29),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_default_shapes_match_published_drafters(name: str) -> None:
    config, heads, ffn, layers, theta, taps = PUBLISHED[name]
    shape = drafter_shape(config)
    assert (shape.num_heads, shape.num_kv_heads, shape.head_dim) == heads
    assert (shape.intermediate_size, shape.num_layers, shape.rope_theta) == (ffn, layers, theta)
    assert shape.target_layer_ids == taps
    assert (shape.hidden_size, shape.vocab_size) == (config.hidden_size, config.vocab_size)
    assert shape.rope_scaling is None and set(shape.layer_types) == {"full_attention"}


@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Qwen3"])
def test_a_small_dense_target_gives_its_own_heads(kind: str) -> None:
    shape = drafter_shape(target(kind, hidden_size=576, num_attention_heads=9, num_key_value_heads=3, head_dim=64))
    assert (shape.num_heads, shape.num_kv_heads, shape.head_dim) == (9, 3, 64)


@pytest.mark.parametrize("width", [32, 320, 1024, 1536, 2560])
def test_narrow_targets_of_other_families_get_fewer_heads(width: int) -> None:
    shape = drafter_shape(target("Mistral", hidden_size=width, num_attention_heads=4, num_key_value_heads=2))
    assert shape.head_dim == 128 and shape.num_heads == 4 * shape.num_kv_heads
    assert shape.num_heads * shape.head_dim <= max(512, 2 * width)


@pytest.mark.parametrize(("width", "kind"), [(896, "dflash"), (1535, "dflash"), (1536, "dflash2"), (4096, "dflash2")])
def test_a_target_with_long_steps_gets_the_parts_of_dflash_2(width: int, kind: str) -> None:
    assert default_kind(target("Qwen3", hidden_size=width)) == kind
    config = target("Qwen3", hidden_size=width // 64 * 64)
    assert drafter_shape(config, kind=None).architecture.kind == default_kind(config)
    assert drafter_shape(config, kind="dflash").architecture.kind == "dflash"
    for sizes in ({"selector_rank": 0}, {"conv_kernel_size": 0}, {"selector_rank": 4}):
        shape = drafter_shape(config, kind=None, **sizes)
        assert shape.architecture.kind == "dflash2" and all(getattr(shape, name) == s for name, s in sizes.items())


def test_given_sizes_replace_the_defaults() -> None:
    config = PUBLISHED["Qwen3.6-35B-A3B"][0]
    shape = drafter_shape(config, layers=3, taps=2, num_heads=8, num_kv_heads=2, head_dim=64, intermediate_size=100)
    assert (shape.num_layers, shape.num_heads, shape.num_kv_heads, shape.head_dim) == (3, 8, 2, 64)
    assert (shape.intermediate_size, shape.target_layer_ids) == (100, (3, 35))


def test_a_shallow_target_of_experts_gets_fewer_taps() -> None:
    config = target("Qwen3Moe", num_hidden_layers=6)
    assert drafter_shape(config).target_layer_ids == (1, 2, 3)
    with pytest.raises(ValueError, match="8 taps, but 6 layers of the target allow 3"):
        drafter_shape(config, taps=8)


@pytest.mark.parametrize(
    ("kinds", "taps", "ids"),
    [
        (HYBRID * 6, 5, (3, 7, 11, 15, 19)),  # Qwen3.5-0.8B: the last layer is never tapped
        (HYBRID * 2, 3, (1, 3, 5)),  # too few for all of them
        (["linear_attention"] * 8, 3, (1, 3, 5)),
        (["sliding_attention", "full_attention"] * 4, 3, (1, 3, 5)),  # no recurrent ones
    ],
)
def test_taps_of_a_recurrent_target_follow_full_attention(kinds: list[str], taps: int, ids: Any) -> None:
    assert default_target_layer_ids(len(kinds), taps, kinds) == ids


def test_the_shape_keeps_logit_scales_but_no_embedding_scale() -> None:
    shape = drafter_shape(target("Gemma2"))
    assert (shape.final_logit_softcapping, shape.output_multiplier, shape.input_embedding_scale) == (30.0, 1.0, 1.0)
    assert drafter_shape(target("Granite", logits_scaling=8.0)).output_multiplier == 0.125
    assert drafter_shape(target("Cohere", logit_scale=0.0625)).output_multiplier == 0.0625


def test_a_feed_forward_width_is_found_where_none_or_many_are_given() -> None:
    assert drafter_shape(target("GPT2", n_embd=768)).intermediate_size == 3072
    assert drafter_shape(target("Gemma3nText", hidden_size=2048)).intermediate_size == 16384


def test_the_norms_epsilon_is_found_by_its_other_names() -> None:
    assert drafter_shape(target("Cohere", layer_norm_eps=3e-5)).rms_norm_eps == 3e-5
    assert drafter_shape(target("GptOss")).rms_norm_eps == 1e-5


def test_padded_rows_of_the_embedding_are_the_masks() -> None:
    class Tokenizer:
        def __len__(self) -> int:
            return 248077

    assert choose_mask_token(Tokenizer(), 248320) == 248077, "as in z-lab's for Qwen3.5"


SIZES = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16}
NO_SELECTOR = {"selector_rank": 0, "selector_top_k": 0}
NO_CONVOLUTION = {"conv_kernel_size": 0, "conv_group_size": 0}


@pytest.mark.parametrize(
    ("given", "sizes"),
    [
        ({}, SIZES),  # those of z-lab's published drafters
        ({"selector_rank": 0}, SIZES | NO_SELECTOR),
        ({"conv_group_size": 0}, SIZES | NO_CONVOLUTION),
        ({"conv_group_size": 32, "selector_top_k": 8}, SIZES | {"conv_group_size": 32, "selector_top_k": 8}),
    ],
    ids=str,
)
def test_kind_dflash2_has_both_parts_by_default(given: dict[str, int], sizes: dict[str, int]) -> None:
    config = PUBLISHED["Qwen3-8B"][0]
    shape, plain = drafter_shape(config, kind="dflash2", **given), drafter_shape(config)
    assert shape == replace(plain, **sizes) and not plain.is_dflash2
    assert drafter_shape(config, **dict.fromkeys(sizes, 0)) == plain


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"selector_rank": 8}, "selector_rank is 8, which is a part of kind dflash2; kind is dflash"),
        ({"kind": "dflash2", "selector_rank": 0, "conv_kernel_size": 0}, "kind dflash2 without its parts is kind"),
        ({"kind": "dflash2", "conv_kernel_size": 0, "conv_group_size": 16}, "conv_kernel_size is 0 and conv_group"),
    ],
)
def test_impossible_drafter_sizes_are_named(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        drafter_shape(PUBLISHED["Qwen3-8B"][0], **given)
