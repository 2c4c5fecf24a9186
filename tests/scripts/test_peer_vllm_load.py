"""vLLM 0.33's own configuration and loader take the drafters of every architecture, on a CPU: `make test-peers`.

Which of the two other engines serves a target with a drafter is read in their wheels once more, too.
"""

import ast
import itertools
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES
from paths import ROOT
from safetensors.torch import load_file
from torch import Tensor
from transformers import Qwen3Config

from dflash_toolkit import Drafter, save_drafter
from dflash_toolkit.models.dflash.serving import SERVED
from dflash_toolkit.models.dflash.shape import drafter_shape

pytestmark = [pytest.mark.peers, pytest.mark.timeout(900)]


PARTS = {"conv_kernel_size": 2, "conv_group_size": 4, "selector_rank": 6, "selector_top_k": 16}
SCALES = {"output_multiplier": 0.2, "final_logit_softcapping": 20.0, "input_embedding_scale": 1.5}
IN_8_BITS = {"FP8": "fp8", "DFlash 2 in INT8": "int8"}
MORE = ["windows", "DFlash 2", "DFlash 2, scaled", *IN_8_BITS]


def site() -> Path:
    if not (given := os.environ.get("DFLASH_PEERS_SITE")):
        pytest.skip("DFLASH_PEERS_SITE is not set: run `make test-peers`")
    return ROOT / given


@pytest.fixture(scope="module")
def drafters() -> dict[str, Drafter]:
    """A drafter for the tiny target of every architecture, one with sliding windows, and some of DFlash 2."""
    found = {}
    for number, (name, each) in enumerate(ARCHITECTURES.items()):
        shape = drafter_shape(each.config().get_text_config(decoder=True), taps=3, layers=2)
        found[name] = Drafter.fresh(shape, number)
    windows = {"layer_types": ("sliding_attention",) * 2, "sliding_window": 64}
    plain = found["Qwen3.5"].config
    found["windows"] = Drafter.fresh(replace(plain, **windows), 99)
    for name, more in {"DFlash 2": {}, "DFlash 2, scaled": windows | SCALES}.items():
        found[name] = Drafter.fresh(replace(plain, **PARTS, **more), 100)
        with torch.no_grad():
            for parameter in found[name].parameters():
                parameter += 0.1 * torch.randn(parameter.shape)
    return found | dict(zip(IN_8_BITS, (found["Qwen3.5"], found["DFlash 2"]), strict=True))


@pytest.fixture(scope="module")
def loaded(
    drafters: dict[str, Drafter], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[dict[str, Any], dict[str, Tensor], dict[str, Tensor]]]:
    """vLLM's reading of each drafter, its parameters there, and those on disk."""
    folder, packages = tmp_path_factory.mktemp("pairs"), site()
    pairs = []
    for name, drafter in drafters.items():
        shape, pair = drafter.config, folder / re.sub(r"\W", "_", name)
        save_drafter(drafter, pair / "drafter", dtype=IN_8_BITS.get(name))
        # the target's class may need a missing package (torchvision); only these numbers are read
        stand_in = Qwen3Config(
            hidden_size=shape.hidden_size, vocab_size=shape.vocab_size, num_hidden_layers=shape.num_target_layers,
            max_position_embeddings=shape.max_position_embeddings, num_attention_heads=4, num_key_value_heads=2,
            head_dim=32, intermediate_size=64, architectures=["Qwen3ForCausalLM"],
        )  # fmt: skip
        stand_in.save_pretrained(pair / "target")
        pairs.append(pair)
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts/peers/vllm_load.py"), str(folder), *map(str, pairs)],
        env={**os.environ, "PYTHONPATH": str(packages)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads(done.stdout)
    return {
        name: (found, load_file(folder / f"{pair.name}.safetensors"), load_file(pair / "drafter/model.safetensors"))
        for name, found, pair in zip(drafters, results, pairs, strict=True)
    }


@pytest.mark.parametrize("name", [*ARCHITECTURES, *MORE])
def test_vllm_reads_the_drafter_configuration(name: str, drafters: dict[str, Drafter], loaded: Any) -> None:
    config, (found, tensors, _) = drafters[name].config, loaded[name]
    assert found["class"] == ("DFlash2Qwen3ForCausalLM" if config.is_dflash2 else "DFlashQwen3ForCausalLM")
    if config.is_dflash2:
        assert found["convolution"] == [2, 4, 16] and found["selector_top_k"] == 16
        assert found["logits"] == [config.output_multiplier, config.final_logit_softcapping]
    # it counts the inputs of layers
    assert found["captured"] == [layer + 1 for layer in config.target_layer_ids]
    assert found["causal"] == [False] * config.num_layers
    assert found["windows"] == [config.sliding_window] * config.num_layers
    assert found["rotary"] == [[config.head_dim, config.rope_theta]] * config.num_layers
    assert (found["mask_token_id"], found["eps"]) == (config.mask_token_id, config.rms_norm_eps)
    width = config.hidden_size
    raw = (torch.arange(3 * width) % 97).view(3, width).bfloat16() * config.input_embedding_scale
    assert torch.equal(tensors["rows"], raw), "a block's rows are those of the table, as they are"


@pytest.mark.parametrize("name", [*ARCHITECTURES, *MORE])
def test_vllm_loads_every_weight(name: str, drafters: dict[str, Drafter], loaded: Any) -> None:
    _, theirs, stored = loaded[name]
    ours = dict(stored)
    kinds = ("weight", "weight_scale") if name in IN_8_BITS else ("weight",)
    fused = {
        "self_attn.qkv_proj": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
        "mlp.gate_up_proj": ["mlp.gate_proj", "mlp.up_proj"],
    }
    for layer in range(drafters[name].config.num_layers):
        for (whole, parts), kind in itertools.product(fused.items(), kinds):
            joined = torch.cat([ours.pop(f"layers.{layer}.{part}.{kind}") for part in parts])
            found = theirs[f"model.layers.{layer}.{whole}.{kind}"]
            assert found.dtype == joined.dtype and torch.equal(found, joined)
    for key, value in ours.items():
        assert torch.equal(theirs[f"model.{key}"], value), key


# ---- served targets ---------------------------------------------------------------------------------------------


def classes(folder: Path) -> dict[str, tuple[list[str], set[str]]]:
    """Bases and methods of every class in the files below a folder, by its name."""
    found: dict[str, tuple[list[str], set[str]]] = {}
    for file in folder.rglob("*.py"):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ClassDef):
                methods = {each.name for each in node.body if isinstance(each, ast.FunctionDef)}
                found.setdefault(node.name, ([ast.unparse(base) for base in node.bases], methods))
    return found


def has(found: dict[str, tuple[list[str], set[str]]], name: str, sign: str) -> bool:
    """Whether a class is, inherits or defines `sign`."""
    if name == sign or name not in found:
        return name == sign
    bases, methods = found[name]
    return sign in methods or any(has(found, base, sign) for base in bases if base != name)


def test_served_targets_match_the_wheels() -> None:
    vllm, sglang = site() / "vllm/model_executor/models", site() / "sglang/srt/models"
    registry = dict(re.findall(r'"(\w+)":\s*\(\s*"[\w.]+",\s*"(\w+)",?\s*\)', (vllm / "registry.py").read_text()))
    theirs, others = classes(vllm), classes(sglang)
    found = {}
    for name in SERVED:
        taps = has(theirs, registry[name], "SupportsEagle3"), has(others, name, "set_dflash_layers_to_capture")
        found[name] = tuple(engine for engine, it in zip(("vllm", "sglang"), taps, strict=True) if it)
    assert found == SERVED
