"""Every shipped configuration loads strictly, and the files it names are there."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from paths import ROOT

from dflash_toolkit.config import UserError, read_yaml, to_mapping
from dflash_toolkit.data.prompts import read_prompts
from dflash_toolkit.models.dflash.checkpoint import check_fits
from dflash_toolkit.models.dflash.network import Drafter
from dflash_toolkit.models.dflash.shape import LAYERS, TAPS, default_target_layer_ids, drafter_shape
from dflash_toolkit.models.published import published_for
from dflash_toolkit.train.config import TrainConfig, configure
from dflash_toolkit.train.optim.schedule import packing
from dflash_toolkit.train.run.target_weights import computes
from dflash_toolkit.train.training_options import PACK_TOKENS
from scripts.docs.generated import RECIPES, config_of

FILES = sorted((ROOT / "configs").glob("**/*.yaml"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_shipped_configs_are_valid_and_name_their_launcher(path: Path) -> None:
    config = configure(read_yaml(path), path.name)
    assert f"dflash-train --config configs/{path.name}" in path.read_text()
    for file in (*config.data, *config.held_out):
        assert read_prompts(ROOT / file)


def test_the_default_config_is_the_defaults_spelled_out() -> None:
    spelled = configure(read_yaml(ROOT / "configs/qwen3-8b.yaml"))
    default = TrainConfig(target="Qwen/Qwen3-8B")  # kind, layers and taps depend on the target
    drafter = replace(default.drafter, kind="dflash2", layers=LAYERS, taps=TAPS)
    assert spelled == replace(default, drafter=drafter, optim=replace(default.optim, epochs=default.epochs))
    assert default_target_layer_ids(36, TAPS) == (1, 9, 17, 25, 33)
    assert spelled.gamma == 7.0
    assert replace(spelled, drafter=replace(spelled.drafter, block_size=8)).gamma == 4.0


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_fits_its_target(name: str) -> None:
    """Each drafter is built, without storage, for a configuration of its target's real sizes."""
    path = ROOT / "configs" / f"{name}.yaml"
    assert len(path.read_text().splitlines()) <= 25 and "GB" in path.read_text()
    config, target = configure(read_yaml(path), path.name), config_of(name)
    given = asdict(config.drafter) | {"mask_token_id": target.vocab_size - 1}
    shape = drafter_shape(target, **given)
    check_fits(shape, target)
    with torch.device("meta"):
        drafter = Drafter(shape)
    assert drafter.fc.weight.shape == (target.hidden_size, len(shape.target_layer_ids) * target.hidden_size)
    assert (shape.num_layers, len(shape.target_layer_ids)) == (config.drafter.layers, config.drafter.taps)
    kinds = getattr(target, "layer_types", None) or ()
    if "linear_attention" in kinds:
        assert {kinds[layer] for layer in shape.target_layer_ids} == {"full_attention"}
        assert "linear-attention" in path.read_text()
    assert computes(target) or config.response_files, "another engine writes the responses"
    assert any(each.architecture == RECIPES[name] for each in published_for(config.target))


def test_every_gpu_recipe_is_listed() -> None:
    names = {path.stem for path in FILES}
    assert names == {*RECIPES, "demo", "tiny-cpu"}
    listed = (ROOT / "configs" / "README.md").read_text()
    assert all(f"`{name}.yaml`" in listed for name in names)


def test_the_demo_uses_disjoint_prompts_per_purpose() -> None:
    parts = [
        read_prompts(ROOT / f"scripts/demo/prompts/count_{part}.jsonl") for part in ("train", "held_out", "report")
    ]
    assert [len(part) for part in parts] == [150, 12, 8]
    assert len({prompt.messages[0]["content"] for part in parts for prompt in part}) == 170


CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize("name", ["demo.yaml", "tiny-cpu.yaml"])
def test_a_shipped_cpu_run_is_the_same_experiment_on_a_gpu(name: str) -> None:
    config = configure(read_yaml(ROOT / "configs" / name))
    assert packing(config, GPU) == packing(config, CPU) == (0, 0)
    assert config.optim.optimizer == "adamw" and config.dtype == "float32"


@pytest.mark.parametrize(
    ("given", "epochs"),
    [
        ({}, 3),
        ({"responses": {"samples": 1}}, 6),
        ({"responses": {"samples": 4}}, 2),
        ({"responses": {"samples": 9}}, 1),
        ({"responses": {"regenerate": False}}, 6),
        ({"response_files": ["r.jsonl"]}, 6),
        ({"optim": {"epochs": 5}}, 5),
    ],
)
def test_several_responses_to_a_prompt_count_as_passes_over_one(given: dict[str, Any], epochs: int) -> None:
    assert configure({"target": "t", **given}).epochs == epochs


def test_the_first_response_is_greedy_by_default() -> None:
    responses = configure({"target": "t"}).responses
    assert (responses.samples, responses.greedy_first, responses.temperature) == (2, True, 1.0)
    assert configure({"target": "t", "responses": {"samples": 1, "temperature": 0}})
    with pytest.raises(UserError, match=r"temperature is 0.7, .* responses.greedy_first=false"):
        configure({"target": "t", "responses": {"samples": 1, "temperature": 0.7}})


@pytest.mark.parametrize("given", [{"optim": {"batch_size": 8}}, {"loss": {"anchors": 512}}])
def test_options_of_unpacked_rows_disable_packing(given: dict[str, dict[str, int]]) -> None:
    config = configure({"target": "t", **given})
    assert packing(config, GPU) == packing(config, CPU) == (0, 0)
    assert replace(config, optim=replace(config.optim, pack_tokens=None)) == TrainConfig(target="t")
    (group,) = given
    (key,) = given[group]
    taken_back = configure({"target": "t", group: {key: None}})
    assert taken_back == TrainConfig(target="t") and packing(taken_back, GPU)[0] == PACK_TOKENS
    for packed in ({"pack_tokens": 256}, {"pack_blocks": 12}):
        optim = {**given.get("optim", {}), **packed}
        with pytest.raises(UserError, match=rf"^optim.{next(iter(packed))} .*{group}.{key}"):
            configure({"target": "t", **given, "optim": optim})


@pytest.mark.parametrize(
    ("given", "with_effect"),
    [
        ({"loss": {"gamma": 5.0}}, {"loss": {"weights": "decay"}}),
        ({"loss": {"weights": "decay", "alpha": 0.25}}, {"loss": {"weights": "dpace"}}),
        ({"loss": {"temperature": 0.7}}, {"loss": {"tv": 0.9}}),
        ({"loss": {"selector": 0.5}, "drafter": {"kind": "dflash"}}, {"drafter": {"kind": "dflash2"}}),
        (
            {"loss": {"gold": "inject"}, "drafter": {"kind": "dflash"}},
            {"drafter": {"kind": "dflash2", "conv_kernel_size": 0}},
        ),
        ({"responses": {"regenerate": False, "samples": 3}}, {"responses": {"regenerate": True}}),
        ({"optim": {"decay": 0.5}}, {"optim": {"schedule": "wsd"}}),
        ({"run": {"feature_dir": "x"}}, {"run": {"features": "hybrid"}}),
        ({"run": {"features": "online", "feature_cache_gb": 4}}, {"run": {"features": "auto"}}),
    ],
)
def test_an_option_without_effect_is_refused_by_name(given: dict, with_effect: dict) -> None:  # type: ignore[type-arg]
    group = next(iter(given))
    with pytest.raises(UserError, match=rf"^{group}\.{list(given[group])[-1]} is .* no effect without"):
        configure({"target": "t", **given})
    assert configure({"target": "t"} | with_effect | {group: given[group] | with_effect.get(group, {})})


def test_a_configuration_that_was_written_down_is_read_back_equal() -> None:
    config = TrainConfig(target="t")
    kept = to_mapping(config)
    assert configure(kept) == config
