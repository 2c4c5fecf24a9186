"""`dflash-doctor` on DFlash 2 drafters: what their two parts bring, and each way to break them."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import doctor_cases
import pytest
import torch
from conftest import MASK, make_drafter, make_target
from doctor_cases import (
    BLOCK,
    SHORT_TEXTS,
    TOKENS,
    Break,
    Patient,
    answered,
    config,
    every,
    exchange,
    fit,
    named,
)

from dflash_toolkit import Drafter, Target, load_drafter, save_drafter
from dflash_toolkit.models.dflash.checkpoint import PROVENANCE_KEY
from dflash_toolkit.models.dflash2.convolution import DynamicConvolution
from dflash_toolkit.record import RECORD_KEY, export_record
from dflash_toolkit.train.config import TrainConfig
from dflash_toolkit.train.features.source import FeatureSource
from dflash_toolkit.train.objective.blocks import sample_blocks
from dflash_toolkit.train.objective.loss import compute_loss
from dflash_toolkit.train.training_options import DrafterOptions, LossOptions

SHAPE = {"block_size": BLOCK, "taps": 2, "layers": 2, "conv_kernel_size": 2, "conv_group_size": 8}
SELECTOR = {"selector_rank": 8, "selector_top_k": 16}


def blurred(drafter: Drafter, target: Target) -> Drafter:
    """The drafter with noise on its layers, and a selector that has learnt what the slots no longer know."""
    drafter = copy.deepcopy(drafter).requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    for weight in drafter.layers.parameters():
        if weight.dim() == 2:
            weight += 0.4 * weight.std() * torch.randn(weight.shape, generator=generator)
    assert drafter.candidate_selector is not None
    drafter.candidate_selector.init_weights()
    learner = torch.optim.Adam(drafter.candidate_selector.requires_grad_().parameters(), 4e-2)
    features = FeatureSource(target, drafter.config.target_layer_ids, 64)(answered(target, SHORT_TEXTS, TOKENS))
    blocks = sample_blocks(features, TOKENS, BLOCK, MASK, generator)
    asked = TrainConfig(target="tiny", drafter=DrafterOptions(block_size=BLOCK), loss=LossOptions(anchors=TOKENS))
    for _ in range(40):
        learner.zero_grad()
        compute_loss(drafter, target, features, blocks, asked, False).loss.backward()
        learner.step()
    return drafter.eval()


def patient_of(drafter: Drafter, target: Target, path: Path) -> Patient:
    note = {"target": "tiny", "trained_block_size": BLOCK}
    save_drafter(drafter, path / "exported", note | {RECORD_KEY: export_record(drafter, target)})
    return Patient(target, drafter, path)


@pytest.fixture(scope="module")
def sick(tmp_path_factory: pytest.TempPathFactory) -> Patient:
    target, path = make_target(), tmp_path_factory.mktemp("dflash2")
    fitted = fit(target, answered(target, SHORT_TEXTS, TOKENS), path, steps=80, **SHAPE, **SELECTOR)
    return patient_of(blurred(fitted, target), target, path)


def test_a_healthy_drafter_has_no_findings(sick: Patient) -> None:
    for recorded in (True, False):
        found = sick.examine(recorded=recorded)
        assert (found["fault"], found["warning"]) == ([], [])
        by_check = {finding.check: finding.figures for finding in found["ok"]}
        assert {"codebooks", "selector", "convolution"} <= by_check.keys()
        (alone,) = by_check["selector"]["ways"].values()
        assert by_check["selector"]["tau"] > 1 + 1.3 * (alone["tau"] - 1) > 2
        # in fp32 a block drafted from the whole answer is the block that decoding drafts
        assert by_check["serving"]["decoded"] == by_check["serving"]["teacher_forced"]


def sizes(**changes: Any) -> Break:
    return config(lambda values: values["dflash_config"].update(changes))


# the break; the check that names it and words of its remedy, with a record and without one
SWAPPED = ("codebooks", "exchange the names candidate_selector.predecessor_codebook and candidate_selector.succ")
SCALED = ("logit scale", "set output_multiplier to 1.0 and final_logit_softcapping to null in dflash_config")
BREAKS: dict[str, tuple[Break, tuple[str, str], tuple[str, str] | None]] = {
    "codebooks swapped": (exchange("predecessor_codebook", "successor_codebook"), SWAPPED, SWAPPED),
    "another multiplier": (sizes(output_multiplier=50.0), SCALED, SCALED),
    "a cap that was not trained": (sizes(final_logit_softcapping=0.1), SCALED, None),
    "selector lost": (
        every("successor_codebook", torch.zeros_like), ("weights", "the export lost these tensors"),
        ("weights", "the export lost these tensors"),
    ),
    "convolution lost": (
        every("kernel_projection", torch.zeros_like), ("weights", "the export lost these tensors"),
        ("weights", "the export lost these tensors"),
    ),
    "selector doing harm": (
        every("successor_codebook", torch.neg), ("weights", "copy the export again"),
        ("selector", "the selector does harm: train it longer, or leave it out: python -c"),
    ),
    "fewer candidates": (
        sizes(selector_top_k=2), ("configuration", "set selector_top_k to 16 in dflash_config of config.json"), None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BREAKS)
@pytest.mark.sampled
def test_each_dflash2_break_gets_only_its_own_fault(sick: Patient, name: str) -> None:
    break_it, *expected = BREAKS[name]
    for recorded, named_so in zip((True, False), expected, strict=True):
        found = sick.examine(break_it, recorded=recorded, texts=SHORT_TEXTS[: 1 if recorded else 2])
        if named_so is None:
            assert not found["fault"], "without a record it cannot be known, or does no harm"
            continue
        (fault,) = found["fault"]
        assert fault.check == named_so[0] and named_so[1] in fault.remedy
        assert named(found["warning"]) <= {"serving", "recall", "acceptance"}


def test_a_harmful_selector_is_found_by_sweeps(sick: Patient) -> None:
    def recorded_later(path: Path) -> None:
        BREAKS["selector doing harm"][0](path)
        record = export_record(load_drafter(str(path)), sick.target)
        config(lambda values: values[PROVENANCE_KEY].update({RECORD_KEY: record}))(path)

    (fault,) = sick.examine(recorded_later)["fault"]
    assert fault.check == "selector" and "does harm" in fault.remedy


def test_parts_that_were_never_trained_are_named(sick: Patient, tmp_path: Path) -> None:
    """As of a plain drafter that was given both parts and no step of training."""
    drafter, fresh = copy.deepcopy(sick.drafter), Drafter.fresh(sick.drafter.config, 0)
    parts = {name: weight for name, weight in fresh.named_parameters() if "_conv." in name or "selector" in name}
    drafter.load_state_dict(parts, strict=False)
    found = patient_of(drafter, sick.target, tmp_path).examine()
    assert named(found["fault"]) == {"selector", "convolution"}
    assert all("never trained" in fault.measured for fault in found["fault"])
    found = patient_of(fresh, sick.target, tmp_path / "fresh").examine()
    (fault,) = (fault for fault in found["fault"] if fault.check == "weights")
    assert "every tensor is as it was initialised" in fault.measured
    assert named(found["fault"]) <= {"weights", "acceptance"}


def test_convolutions_that_were_trained_across_blocks_are_found(
    sick: Patient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = DynamicConvolution.forward

    def across(self: DynamicConvolution, x: torch.Tensor, sublayer: Callable[..., Any], _: int | None) -> torch.Tensor:
        return honest(self, x, sublayer, None)

    def reading_before(*given: Any, **shape: Any) -> Drafter:
        drafter = make_drafter(*given, **shape)
        for name, weight in drafter.named_parameters():
            if name.endswith("base_kernel"):
                weight.data[:, 1:] = 1.0  # from the start the slot before counts as much
        return drafter

    with monkeypatch.context() as patch:
        patch.setattr(DynamicConvolution, "forward", across)
        patch.setattr(doctor_cases, "make_drafter", reading_before)
        rows = answered(sick.target, SHORT_TEXTS, TOKENS)
        drafter = fit(sick.target, rows, tmp_path, anchors=TOKENS, steps=80, **SHAPE)
    (fault,) = patient_of(drafter, sick.target, tmp_path).examine()["fault"]
    assert fault.check == "convolution" and "train again with convolutions inside each block" in fault.remedy
