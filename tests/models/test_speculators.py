"""The speculators form: layer ids counted from one, copies of the head, and read back as it was written."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import check_same, make_drafter, make_target
from damage import damage
from safetensors.torch import load_file

from dflash_toolkit import Drafter, Target, UserError, load_drafter
from dflash_toolkit.models.dflash import checkpoint
from dflash_toolkit.models.dflash.checkpoint import config_json
from dflash_toolkit.models.dflash.speculators import save_speculators
from dflash_toolkit.models.rope import RopeScaling

Changes = dict[str, Any]
SLIDING = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 9, "is_causal": None}


def export_speculators(drafter: Drafter, path: Path) -> Target:
    target = make_target(tied=False)
    save_speculators(drafter, path, target.config, target.embedding.weight, target.head_weight)
    return target


def test_the_speculators_form_counts_from_one_and_copies_the_head(drafter: Drafter, tmp_path: Path) -> None:
    target = export_speculators(drafter, tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    assert values["aux_hidden_state_layer_ids"] == [i + 1 for i in drafter.config.target_layer_ids]
    assert values["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 7
    assert values["transformer_layer_config"]["num_hidden_layers"] == 2
    assert values["sliding_window_non_causal"] is True
    tensors = load_file(tmp_path / "model.safetensors")
    assert set(tensors) == {*checkpoint.tensor_shapes(drafter.config), "embed_tokens.weight", "lm_head.weight"}
    assert torch.equal(tensors["embed_tokens.weight"], target.embedding.weight.bfloat16())
    assert torch.equal(tensors["lm_head.weight"], target.head_weight.bfloat16())


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
WINDOWS = {"layer_types": ("sliding_attention",) * 2, "sliding_window": 9, "is_causal": None}


@pytest.mark.parametrize(
    "changes",
    [{}, SLIDING | {"is_causal": False}, WINDOWS, {"rope_scaling": RopeScaling(rope_type="llama3", **LLAMA3)}],
    ids=str,
)
def test_the_speculators_form_round_trips(target: Target, tmp_path: Path, changes: Changes) -> None:
    drafter = make_drafter(target, **changes)
    export_speculators(drafter, tmp_path)
    check_same(load_drafter(str(tmp_path)), drafter)
    layer = json.loads((tmp_path / "config.json").read_text())["transformer_layer_config"]
    flat = config_json(drafter.config)
    assert all(layer.get(key) == flat.get(key) for key in ("rope_theta", "rope_parameters", "rope_scaling"))


@pytest.mark.parametrize("changes", [SLIDING, {"is_causal": True}, SLIDING | {"is_causal": True}], ids=str)
def test_only_sliding_layers_may_be_causal_and_then_all_are(target: Target, tmp_path: Path, changes: Changes) -> None:
    with pytest.raises(UserError, match="cannot hold causal layers"):
        export_speculators(make_drafter(target, **changes), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("key", "causal"), [(None, [False] * 2), (True, [False] * 2), (False, [True, False])], ids=str)
def test_the_key_of_causality_is_about_sliding_layers(
    target: Target, tmp_path: Path, key: bool | None, causal: list[bool]
) -> None:
    export_speculators(make_drafter(target, **SLIDING | {"is_causal": False}), tmp_path)
    damage(tmp_path / "config.json", {"sliding_window_non_causal": key})  # None: without it
    config = load_drafter(str(tmp_path)).config
    assert [config.causal_inside_block(layer) for layer in range(2)] == causal
