"""Every shipped configuration loads strictly, and the files it names are there."""

from dataclasses import replace
from pathlib import Path

import pytest

from dflash_toolkit.config import from_mapping, read_yaml
from dflash_toolkit.drafter import default_target_layer_ids
from dflash_toolkit.prompts import read_prompts
from train.config import TrainConfig

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / "configs").glob("**/*.yaml"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_a_shipped_config_is_valid_and_says_how_to_launch_it(path: Path) -> None:
    config = from_mapping(TrainConfig, read_yaml(path), path.name)
    assert f"dflash-train --config configs/{path.name}" in path.read_text()
    for file in (*config.data, *config.held_out):
        assert read_prompts(ROOT / file)


def test_the_default_config_is_the_defaults_spelled_out() -> None:
    spelled = from_mapping(TrainConfig, read_yaml(ROOT / "configs/qwen3-8b.yaml"))
    assert spelled == TrainConfig(target="Qwen/Qwen3-8B")
    assert default_target_layer_ids(36, spelled.drafter.taps) == (1, 9, 17, 25, 33)
    assert spelled.gamma == 7.0
    assert replace(spelled, drafter=replace(spelled.drafter, block_size=8)).gamma == 4.0


def test_the_demo_is_trained_watched_and_reported_on_different_prompts() -> None:
    parts = [read_prompts(ROOT / f"scripts/prompts/count_{part}.jsonl") for part in ("train", "held_out", "report")]
    assert [len(part) for part in parts] == [150, 12, 8]
    assert len({prompt.messages[0]["content"] for part in parts for prompt in part}) == 170
