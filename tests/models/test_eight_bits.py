"""Drafters in 8 bits: the stored form, what is read of it, and which forms are refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_dflash2, make_drafter, make_target
from safetensors.torch import load_file, save_file

from dflash_toolkit import Drafter, UserError, load_drafter, save_drafter
from dflash_toolkit.models.dflash.eight_bits import FORMS, MATRICES


@pytest.mark.parametrize("dtype", FORMS)
@pytest.mark.parametrize("make", [make_drafter, make_dflash2])
def test_matrices_are_stored_in_8_bits_and_read_in_16(make: Any, dtype: str, tmp_path: Path) -> None:
    drafter: Drafter = make(make_target())
    save_drafter(drafter, tmp_path, dtype=dtype)
    stored, read = load_file(tmp_path / "model.safetensors"), load_drafter(str(tmp_path))
    assert read.config == drafter.config
    kind, *_ = FORMS[dtype]
    for name, tensor in drafter.state_dict().items():
        found = read.state_dict()[name].float()
        if not MATRICES.fullmatch(name):
            assert torch.equal(found, tensor.bfloat16().float()) and name + "_scale" not in stored
            continue
        assert stored[name].dtype == kind and stored[name + "_scale"].shape == (len(tensor), 1)
        spacing = tensor.abs() / 16 if dtype == "fp8" else tensor.abs().amax(1, keepdim=True) / 254
        largest = tensor.abs().amax(1, keepdim=True)
        assert ((found - tensor).abs() <= spacing + largest * 2**-7).all(), "half a step, and two of bf16"
        assert not torch.equal(found, tensor.bfloat16().float())
    assert sum(MATRICES.fullmatch(name) is not None for name in stored) == 7 * drafter.config.num_layers


def test_a_single_scale_for_a_matrix_is_read(tmp_path: Path) -> None:
    save_drafter(make_drafter(make_target()), tmp_path, dtype="fp8")
    stored = load_file(tmp_path / "model.safetensors")
    name = "layers.0.mlp.up_proj.weight"
    stored[name + "_scale"] = torch.tensor(0.5)
    save_file(stored, tmp_path / "model.safetensors")
    assert torch.equal(load_drafter(str(tmp_path)).state_dict()[name].float(), stored[name].float() / 2)


@pytest.mark.parametrize(
    "change",
    [{"quant_method": "fbgemm_fp8"}, {"format": "nvfp4-pack-quantized"}, {"config_groups": {}},
     {"weights": {"num_bits": 4}}, {"weights": {"strategy": "group"}}],
    ids=str,
)  # fmt: skip
def test_other_quantized_forms_are_refused(change: dict[str, Any], tmp_path: Path) -> None:
    save_drafter(make_drafter(make_target()), tmp_path, dtype="int8")
    config = json.loads((tmp_path / "config.json").read_text())
    stated = config["quantization_config"]
    stated["config_groups"]["group_0"]["weights"] |= change.pop("weights", {})
    stated |= change
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"its weights are quantized \(.*dflash-train export wrote"):
        load_drafter(str(tmp_path))
