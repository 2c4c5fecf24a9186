"""The memory of training by shapes: near measured peaks, divided to fit a card, refused with advice before any work."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from programs import Program
from transformers import PreTrainedConfig

from dflash_toolkit.config import UserError
from dflash_toolkit.models.dflash.shape import drafter_shape
from dflash_toolkit.models.target_files import load_config
from dflash_toolkit.preflight import GIB
from dflash_toolkit.roofline import SHEETS
from dflash_toolkit.train import pipeline
from dflash_toolkit.train.config import TrainConfig, configure
from dflash_toolkit.train.run.memory import TrainingMemory, check_memory, memory_of
from dflash_toolkit.train.run.target_weights import Weights
from scripts.shapes import named_shape

DISPLAY_GIB = 0.9  # taken by a display and the CUDA context


def memory_for(target: PreTrainedConfig, config: TrainConfig, **more: Any) -> TrainingMemory:
    shape = drafter_shape(target, kind=config.drafter.kind, layers=config.drafter.layers)
    return memory_of(config, target, Weights.of_target(target), shape, 2048, **more)


def fit(name: str, gib: float, values: dict[str, Any]) -> tuple[TrainConfig, str]:
    """Returns the choice for a card of this memory."""
    config = configure({"target": name} | values)
    free = int((gib - DISPLAY_GIB) * GIB)
    return check_memory(config, memory_for(named_shape(name), config), free, int(gib * GIB))


# scripts/results at commit 4470a42: train_step_qwen3_8b_h200 and, with two GPUs, train_sharded_qwen3_8b_h100
@pytest.mark.parametrize(
    ("optim", "run", "tokens", "world", "gib", "error"),
    [
        ({}, {}, 8192, 1, 48.62, 0.02),
        ({}, {}, 2048, 1, 48.11, 0.02),
        ({"optimizer": "adamw"}, {}, 8192, 1, 52.53, 0.02),
        ({"accumulate": 4}, {}, 8192, 1, 52.84, 0.02),
        ({"recompute": True}, {}, 8192, 1, 35.24, 0.06),
        ({"optimizer": "adamw"}, {"fsdp": True}, 8192, 2, 45.29, 0.02),
        ({"optimizer": "muon"}, {"fsdp": True}, 8192, 2, 43.33, 0.02),
        ({"optimizer": "adamw"}, {"fsdp": True, "fsdp_reshard_after_forward": False}, 8192, 2, 47.08, 0.02),
        ({"optimizer": "adamw"}, {"zero": 2}, 8192, 2, 50.57, 0.02),
        ({"optimizer": "adamw"}, {"zero": 3}, 8192, 2, 74.05, 0.05),
    ],
)
def test_computed_memory_is_near_measured_peaks(
    optim: dict[str, Any], run: dict[str, Any], tokens: int, world: int, gib: float, error: float
) -> None:
    config = configure({"target": "t", "optim": optim, "run": run, "drafter": {"kind": "dflash"}})
    memory = replace(memory_for(named_shape("qwen3-8b"), config, world=world), tokens=tokens, blocks=2048)
    assert memory.need(config).total / GIB == pytest.approx(gib, rel=error)


@pytest.mark.parametrize("name", ["qwen2.5-0.5b", "qwen3-1.7b", "qwen3-4b", "qwen3-8b"])
@pytest.mark.parametrize("card", ["A100 80GB", "H100", "H200"])
def test_a_step_is_whole_on_cards_of_80_gb(name: str, card: str) -> None:
    found, line = fit(name, SHEETS[card].memory_gib, {})
    assert not line and (found.optim.splits, found.optim.recompute, found.run.offload_target) == (1, False, None)


@pytest.mark.parametrize(
    ("name", "card"),
    [("qwen3-4b", "RTX 3090"), ("qwen3-4b", "RTX 4090"), ("qwen3-4b", "A10"), ("qwen3-4b", "L4"),
     ("qwen3-1.7b", "RTX 4070"), ("qwen3-1.7b", "RTX 4080"), ("qwen3-8b", "L40S")],
)  # fmt: skip
def test_a_step_is_divided_until_it_fits_the_card(name: str, card: str) -> None:
    gib = SHEETS[card].memory_gib
    found, line = fit(name, gib, {})
    assert f"optim.splits={found.optim.splits}" in line and "the update is the same" in line
    needed = memory_for(named_shape(name), found).need(found).total / GIB
    assert needed < 0.95 * gib - DISPLAY_GIB
    whole = memory_for(named_shape(name), found).need(configure({"target": name})).total / GIB
    assert whole > gib, "else nothing had to change"


def test_smaller_cards_get_smaller_steps() -> None:
    needs = []
    for gib in (80, 48, 32, 24):
        found, _ = fit("qwen3-4b", gib, {})
        needs.append(memory_for(named_shape("qwen3-4b"), found).need(found).total)
    assert needs == sorted(needs, reverse=True) and needs[0] > 1.5 * needs[-1]


@pytest.mark.parametrize(
    ("name", "gib", "values"),
    [("qwen3-8b", 24, {}), ("qwen3-4b", 16, {}), ("qwen3-4b", 24, {"optim": {"splits": 1}}),
     ("qwen3-8b", 24, {"optim": {"optimizer": "adamw", "ema": 0.99}, "run": {"compile": "off"}})],
)  # fmt: skip
def test_a_run_that_cannot_fit_is_refused_with_advice(name: str, gib: float, values: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"^training takes at least [\d.]+ GiB .* are free; .* GiB less\)") as refused:
        fit(name, gib, values)
    message = str(refused.value)
    assert "\n" not in message
    if "any of these is enough" in message:
        stored = {"run": values.get("run", {}) | {"features": "disk"}, "prompts": {"held_out": 0}}
        assert "run.features=disk prompts.held_out=0" in message
        found, _ = fit(name, gib, values | stored)
        assert found.run.offload_target, "the target leaves the GPU"
    for option in ("optim.ema=0", "optim.optimizer=muon", "run.compile=auto"):
        name_, _, value = option.partition("=")
        part, _, key = name_.partition(".")
        given = values.get(part, {}).get(key)
        assert (option in message) == (given is not None and str(given) != value)


def test_advice_names_a_target_that_the_user_keeps_on_the_gpu() -> None:
    stored = {"run": {"features": "disk", "offload_target": False}, "prompts": {"held_out": 0}}
    with pytest.raises(UserError, match=r"any of these is enough: .*no run.offload_target \([\d.]+ GiB less\)"):
        fit("qwen3-8b", 24, stored)
    del stored["run"]["offload_target"]  # type: ignore[attr-defined]
    assert fit("qwen3-8b", 24, stored)[0].run.offload_target


def test_advice_without_a_way_out_names_a_smaller_target() -> None:
    values = {"drafter": {"layers": 2, "kind": "dflash"}, "run": {"zero": 3, "features": "disk"}}
    with pytest.raises(UserError, match=r"are free; use a smaller target$"):
        fit("qwen3-8b", 4, values | {"prompts": {"held_out": 0}})


def test_the_target_reads_a_joined_row_whole() -> None:
    """Its forward pass takes memory for every token of the row, however many passes the drafter makes."""
    options = {"optim": {"splits": 64, "recompute": True, "pack_tokens": 131072}, "drafter": {"layers": 1}}
    short, long = (configure({"target": "t", "prompts": prompts} | options) for prompts in ({}, {"join_to": 131072}))
    memory = memory_for(named_shape("qwen3-8b"), long)
    assert memory.need(long).total > 1.2 * memory.need(short).total


def test_given_options_are_kept() -> None:
    given = {"optim": {"splits": 12, "recompute": True}}
    found, line = fit("qwen3-4b", 24, given)
    assert (found.optim.splits, found.optim.recompute) == (12, True) and not line
    assert fit("qwen3-1.7b", 12, {"optim": {"recompute": False}})[0].optim.recompute is False
    assert fit("qwen3-4b", 80, {"optim": {"splits": 3}})[0].optim.splits == 3


def test_a_target_that_is_needed_cannot_be_offloaded() -> None:
    with pytest.raises(UserError, match=r"run.offload_target needs run.features=disk .* change run.features=auto"):
        configure({"target": "t", "run": {"offload_target": True}})
    configure({"target": "t", "run": {"offload_target": True, "features": "disk"}, "prompts": {"held_out": 0}})


def test_a_run_divides_its_steps_or_is_refused_before_responses(
    dflash_train: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run computes on the CPU; only the memory is that of a GPU."""
    monkeypatch.setattr(pipeline, "resolve_device", lambda device: torch.device("cuda"))
    free = [100]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[0], free[0]))
    many = ["loss.anchors=9000", "optim.steps=2"]
    assert dflash_train.refuses(*many).startswith("training takes at least")
    assert not list(dflash_train.output.glob("work/answers*"))
    config = configure({"target": str(dflash_train.target), "optim": {"splits": 4, "batch_size": 2, "steps": 2},
                        "loss": {"anchors": 9000}, "drafter": {"layers": 1, "taps": 2, "block_size": 4}})  # fmt: skip
    target = load_config(config.target)
    shape = drafter_shape(target, layers=1, taps=2, block_size=4, kind=None)
    free[0] = int(1.06 * memory_of(config, target, Weights.of_target(target), shape, 2048).need(config).total)
    said = dflash_train(*many)
    assert any(line.endswith("and the update is the same") for line in said)
    assert 1 < dflash_train.record()["config"]["optim"]["splits"] <= 4
