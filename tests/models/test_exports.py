"""For a target of every architecture a plain drafter is written as vLLM, SGLang and z-lab's client read drafters.

The names and keys are facts of vLLM 0.33.0, SGLang 0.5.23 and dflash 0.1.0; vLLM's own loader takes the same exports in
`tests/scripts/test_peer_vllm_load.py`.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from architectures import ARCHITECTURES, tiny
from safetensors.torch import load_file

from dflash_toolkit import Drafter, save_drafter
from dflash_toolkit.models.dflash.shape import drafter_shape
from dflash_toolkit.models.spec import logit_scale

pytestmark = pytest.mark.slow

EACH = pytest.mark.parametrize("name", ARCHITECTURES)
PROJECTIONS = [f"self_attn.{part}_proj" for part in "qkvo"] + [f"mlp.{part}_proj" for part in ("gate", "up", "down")]
NORMS = ["input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm"]
FEATURES = {"fc.weight", "hidden_norm.weight", "norm.weight"}


def exported(name: str, path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """config.json and tensors of the drafter that an architecture's tiny target gets; 3 taps of its 6 layers."""
    config = ARCHITECTURES[name].config().get_text_config(decoder=True)
    save_drafter(Drafter.fresh(drafter_shape(config, taps=3), 1), path)
    return json.loads((path / "config.json").read_text()), load_file(path / "model.safetensors")


@EACH
def test_the_config_has_only_keys_that_loaders_read_correctly(name: str, tmp_path: Path) -> None:
    target = ARCHITECTURES[name].config().get_text_config(decoder=True)
    config, _ = exported(name, tmp_path)
    assert (config["architectures"], config["model_type"]) == (["DFlashDraftModel"], "qwen3")
    for key in ("hidden_size", "vocab_size", "max_position_embeddings"):
        assert config[key] == getattr(target, key)
    assert config["num_target_layers"] == target.num_hidden_layers
    # vLLM and z-lab would turn part of a head, or by sections, where these keys came along
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": config["rope_theta"]}
    assert not {"partial_rotary_factor", "rope_scaling", "mrope_section", "use_gemma_norm"} & set(config)
    nested = config["dflash_config"]
    scale = logit_scale(target)
    assert set(nested) - {"output_multiplier"} <= {
        "target_layer_ids", "mask_token_id", "block_size", "final_logit_softcapping",
    }  # fmt: skip
    assert nested.get("output_multiplier", 1.0) == scale.multiplier
    assert all(0 <= layer < target.num_hidden_layers - 1 for layer in nested["target_layer_ids"])
    assert 0 <= nested["mask_token_id"] < target.vocab_size and nested["block_size"] == config["block_size"]
    assert nested.get("final_logit_softcapping") == scale.cap


@EACH
def test_the_tensors_are_those_that_the_loaders_name_in_bf16(name: str, tmp_path: Path) -> None:
    config, tensors = exported(name, tmp_path)
    layers = {f"layers.{i}.{part}.weight" for i in range(config["num_hidden_layers"]) for part in PROJECTIONS + NORMS}
    assert set(tensors) == layers | FEATURES
    assert all(tensor.dtype == torch.bfloat16 for tensor in tensors.values())
    width = config["hidden_size"]
    assert tensors["fc.weight"].shape == (width, width * len(config["dflash_config"]["target_layer_ids"]))
    rows = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"], "v": config["num_key_value_heads"]}
    for part, heads in rows.items():
        shape = tensors[f"layers.0.self_attn.{part}_proj.weight"].shape
        assert shape == (heads * config["head_dim"], width)


@EACH
def test_blocks_read_the_embedding_table_unscaled(name: str) -> None:
    target, ids = tiny(name), torch.tensor([[7, 250, 299, 7]])
    raw = F.embedding(ids, target.model.get_input_embeddings().weight)
    assert torch.equal(target.embed(ids), raw)
    assert torch.equal(raw, target.embedding(ids)) == ("Gemma" not in name), "Gemma's module multiplies by sqrt(D)"
