"""`dflash-doctor` on a DSpine drafter: healthy, with other codes, with messages that were never trained."""

import copy
from pathlib import Path
from typing import Any

import doctor_cases
import pytest
import torch
from conftest import make_dspine, make_target
from doctor_cases import BLOCK, SHORT_TEXTS, TOKENS, Patient, answered, every, fit, named

from dflash_toolkit import Drafter, Target, save_drafter
from dflash_toolkit.record import RECORD_KEY, export_record


def patient_of(drafter: Drafter, target: Target, path: Path) -> Patient:
    note = {"target": "tiny", "trained_block_size": BLOCK}
    save_drafter(drafter, path / "exported", note | {RECORD_KEY: export_record(drafter, target)})
    return Patient(target, drafter, path)


@pytest.fixture(scope="module")
def sick(tmp_path_factory: pytest.TempPathFactory) -> Patient:
    target, path = make_target(), tmp_path_factory.mktemp("dspine")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(doctor_cases, "make_drafter", lambda target, **shape: make_dspine(target, **shape))
        shape: dict[str, Any] = {"block_size": BLOCK}
        return patient_of(fit(target, answered(target, SHORT_TEXTS, TOKENS), path, steps=80, **shape), target, path)


def test_a_healthy_dspine_drafter_has_no_findings(sick: Patient) -> None:
    for recorded in (True, False):
        found = sick.examine(recorded=recorded)
        assert (found["fault"], found["warning"]) == ([], [])
        by_check = {finding.check: finding.figures for finding in found["ok"]}
        assert by_check["serving"]["decoded"] == by_check["serving"]["teacher_forced"] > 4


def test_other_transfer_codes_are_found(sick: Patient) -> None:
    (fault,) = sick.examine(every("transfer_codes", lambda codes: codes.flip(0)))["fault"]
    assert fault.check == "weights" and "copy the export again" in fault.remedy


def test_untrained_messages_are_named(sick: Patient, tmp_path: Path) -> None:
    drafter = copy.deepcopy(sick.drafter)
    with torch.no_grad():
        for name, weight in drafter.named_parameters():
            if "writes" in name:
                weight.zero_()
    found = patient_of(drafter, sick.target, tmp_path).examine()
    assert "injection" in named(found["fault"])
    assert any("never trained" in fault.measured for fault in found["fault"])
