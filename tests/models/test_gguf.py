"""An export has what llama.cpp's converter reads, and every tensor has a name that its reader knows.

The facts are of `DFlashModel` in llama.cpp's `conversion/qwen.py`, which is a Qwen3 model with further tensors, and of
`src/models/dflash.cpp`. The package gguf has the names of Qwen3's tensors, but not yet those of drafters.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import make_dflash2, make_drafter
from safetensors.torch import load_file

from dflash_toolkit import Target, save_drafter

gguf = pytest.importorskip("gguf")

PER_LAYER = {
    *("attn_norm.weight", "attn_q.weight", "attn_k.weight", "attn_v.weight", "attn_output.weight"),
    *("attn_q_norm.weight", "attn_k_norm.weight", "ffn_norm.weight", "ffn_gate.weight", "ffn_up.weight"),
    "ffn_down.weight",
}
CONVOLUTIONS = {"attn_conv_base", "attn_conv_proj.weight", "ffn_conv_base", "ffn_conv_proj.weight"}
SELECTOR = {"selector_hidden.weight", "selector_predecessor.weight", "selector_successor.weight"}
# names that the converter adds to those of Qwen3
ADDED = {
    "fc.weight": "fc.weight",
    "hidden_norm.weight": "enc.output_norm.weight",
    "candidate_selector.hidden_projection.weight": "selector_hidden.weight",
    "candidate_selector.predecessor_codebook": "selector_predecessor.weight",
    "candidate_selector.successor_codebook": "selector_successor.weight",
}
IN_LAYERS = {
    "attention_conv.base_kernel": "attn_conv_base",
    "attention_conv.kernel_projection.weight": "attn_conv_proj.weight",
    "mlp_conv.base_kernel": "ffn_conv_base",
    "mlp_conv.kernel_projection.weight": "ffn_conv_proj.weight",
}


def converted(name: str, layers: int) -> str | None:
    """Returns a tensor's name in a GGUF file; None if the converter would stop at it."""
    _, _, rest = name.partition("layers.")
    layer, _, part = rest.partition(".")
    if part in IN_LAYERS:
        return f"blk.{layer}.{IN_LAYERS[part]}"
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, layers)
    return ADDED.get(name) or names.get_name(f"model.{name}", try_suffixes=(".weight", ".bias"))


@pytest.mark.parametrize("make", [make_drafter, make_dflash2], ids=["DFlash", "DFlash 2"])
def test_every_tensor_has_the_name_of_llama_cpps_reader(make: Any, target: Target, tmp_path: Path) -> None:
    drafter = make(target)
    save_drafter(drafter, tmp_path)
    found = [converted(name, drafter.config.num_layers) for name in load_file(tmp_path / "model.safetensors")]
    parts = PER_LAYER | (CONVOLUTIONS if drafter.config.is_dflash2 else set())
    expected = {f"blk.{layer}.{part}" for layer in range(drafter.config.num_layers) for part in parts}
    expected |= {"fc.weight", "enc.output_norm.weight", "output_norm.weight"}
    assert len(found) == len(set(found)), "each tensor has a name of its own"
    assert set(found) == expected | (SELECTOR if drafter.config.is_dflash2 else set())


def test_the_config_has_the_keys_of_llama_cpps_converter(target: Target, tmp_path: Path) -> None:
    """It counts taps from 1 itself, and reads windows only with all of their three keys."""
    drafter = make_dflash2(target, layer_types=("sliding_attention", "full_attention"), sliding_window=9)
    save_drafter(drafter, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    nested = config["dflash_config"]
    assert config["architectures"] == ["DFlash2DraftModel"], "the converter chooses its class by this name"
    assert nested["target_layer_ids"] == list(drafter.config.target_layer_ids)
    assert config["block_size"] == nested["block_size"] == 8 and nested["mask_token_id"] < config["vocab_size"]
    sizes = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 6, "selector_top_k": 16}
    assert nested.items() >= sizes.items()
    assert config["use_sliding_window"] is True and config["sliding_window"] == 9
    assert config["layer_types"] == ["sliding_attention", "full_attention"]
    keys = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
    keys += ("intermediate_size", "rms_norm_eps", "rope_theta", "max_position_embeddings")
    assert all(isinstance(config[key], int | float) for key in keys)
