"""`dflash-doctor` on a drafter whose files are right: a gap to decoding, prompts unlike those of training, recall."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import MASK, make_target
from doctor_cases import ALL_TEXTS, Clinic, answered, config, edit, fit, tensors
from doctor_cases import clinic as clinic

import dflash_toolkit.decode
import dflash_toolkit.train.loop
from dflash_toolkit.calibration import Calibration
from dflash_toolkit.confidence import JudgedNode
from dflash_toolkit.doctor.confidences import area, judged
from dflash_toolkit.doctor.files import Case
from dflash_toolkit.doctor.probe import Scores
from dflash_toolkit.doctor.symptoms import _cliff
from dflash_toolkit.models.dflash.network import ContextKV, Drafter
from dflash_toolkit.models.target import Target
from dflash_toolkit.models.target_files import load_config
from dflash_toolkit.train.objective.blocks import Blocks

# ---- training against serving ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("every", "severity"), [(5, "warning"), (2, "fault"), (1, "fault")])
def test_different_features_in_decoding_are_reported_as_a_gap(
    every: int, severity: str, clinic: Clinic, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest, blocks = dflash_toolkit.decode.propose, 0

    def forgetful(target: Target, drafter: Drafter, context: ContextKV, last: int, position: int) -> list[int]:
        """Sees nothing of what the target has read, in one block of `every`."""
        nonlocal blocks
        blocks += 1
        if blocks % every == 0:
            keys, values = ([torch.zeros_like(t) for t in held] for held in (context.keys, context.values))
            context = replace(context, keys=keys, values=values)
        return honest(target, drafter, context, last, position)

    monkeypatch.setattr(dflash_toolkit.decode, "propose", forgetful)
    found = clinic.examine(*ALL_TEXTS)
    (gap,) = (f for f in found[severity] if f["check"] == "serving" and "teacher-forced" in f["measured"])
    assert found["fault"] == ([gap] if severity == "fault" else [])
    assert "the features of decoding differ from those of a whole text" in gap["remedy"]
    assert gap["figures"]["teacher_forced"] > 5 > gap["figures"]["decoded"]
    if every == 1:
        (recorded,) = (f for f in found["warning"] if "when it was exported" in f["measured"])
        assert recorded["remedy"] == "fix the faults named here"


@pytest.fixture(scope="module")
def other_prompts(clinic: Clinic) -> str:
    texts = ("Write a story of a fox.", "Which way is north?", "List ten facts.", "Translate: good day.")
    path = clinic.path / "others.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return f"p={path}"


def test_different_prompts_are_reported_as_a_possible_cause(clinic: Clinic, other_prompts: str) -> None:
    (warning,) = (f for f in clinic.examine("--prompts", other_prompts)["warning"] if f["check"] == "serving")
    assert "5.50 when it was exported" in warning["measured"]
    # its export left no record, so the prompts are one possibility among others
    open_causes = ("weights changed or layers lost", "another target than tiny", "prompts unlike those of training")
    assert all(cause in warning["remedy"] for cause in open_causes)


# ---- the curve -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("present", "severity"), [(9, "fault"), (3, "warning")])
def test_another_block_size_than_was_trained_is_named_alone(present: int, severity: str, clinic: Clinic) -> None:
    found = clinic.examine(break_it=edit(block_size=present))
    named = found["fault"] + found["warning"]
    assert [f["check"] for f in named] == ["curve"] and named == found[severity]
    assert f"block_size is {present}, it was trained with 6" in named[0]["measured"]
    assert "set block_size to 6" in named[0]["remedy"]


@pytest.mark.slow
def test_slots_trained_differently_are_found_by_the_cliff(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = dflash_toolkit.train.gradients.sample_blocks

    def spoiled(*arguments: Any, **more: Any) -> Blocks:
        blocks = honest(*arguments, **more)
        labels = blocks.labels.clone()
        labels[:, :, 4:] = 5  # for every answer
        return replace(blocks, labels=labels)

    monkeypatch.setattr(dflash_toolkit.train.gradients, "sample_blocks", spoiled)
    target = make_target()
    drafter = fit(target, answered(target), tmp_path)
    found = Clinic(tmp_path, target, drafter).examine()
    assert [f["check"] for f in found["fault"]] == ["curve"]
    assert "slot 4 is accepted" in found["fault"][0]["measured"] and "block_size 4" in found["fault"][0]["remedy"]


def drawn(accepted: list[float], blocks: int, seed: int) -> Scores:
    """Blocks with slots that are right with these probabilities."""
    g = torch.Generator().manual_seed(seed)
    hits = torch.rand(blocks, len(accepted), generator=g) < torch.tensor(accepted)
    return Scores(hits, hits, torch.ones_like(hits), torch.zeros(blocks).long(), torch.arange(blocks))


def test_only_a_sure_fall_is_a_cliff() -> None:
    falling = [0.8 * 0.93**k for k in range(15)]
    assert [_cliff(drawn(falling, 300, seed)) for seed in range(40)] == [None] * 40, "acceptance falls along a block"
    assert [_cliff(drawn([0.9] * 5 + [0.2] * 10, 300, seed)) for seed in range(9)] == [6] * 9
    assert _cliff(drawn([0.9, 0.2], 6, 0)) is None, "of six blocks nothing is sure"
    assert _cliff(drawn([0.3, 0.05, 0.0], 300, 0)) is None, "a bad drafter has no cliff"


def blurred(noise: float) -> Any:
    """Noise on every matrix, of so many times its own spread."""

    def blur(held: dict[str, torch.Tensor]) -> None:
        g = torch.Generator().manual_seed(0)
        for weight in held.values():
            if weight.dim() == 2:
                weight += noise * weight.std() * torch.randn(weight.shape, generator=g).to(weight.dtype)

    return blur


# ---- recall ----------------------------------------------------------------------------------------------------


def test_low_recall_means_missing_data(clinic: Clinic, other_prompts: str) -> None:
    found = clinic.examine("--prompts", other_prompts)
    (warning,) = (f for f in found["warning"] if f["check"] == "recall")
    assert warning["figures"]["recall_16"][0] < 0.3 and "does not know the next token" in warning["remedy"]
    assert [f["check"] for f in found["fault"]] == ["acceptance"]


def test_high_recall_with_low_rank_means_short_training(clinic: Clinic) -> None:
    found = clinic.examine(*ALL_TEXTS, break_it=tensors(blurred(0.4)))
    (warning,) = (f for f in found["warning"] if f["check"] == "recall")
    assert warning["figures"]["top_1"][0] < 0.5 < 0.6 < warning["figures"]["recall_16"][0]
    assert "knows the token but ranks it too low" in warning["remedy"]
    (low,) = (f for f in found["warning"] if f["check"] == "acceptance")
    assert 0.2 <= low["figures"]["position_1"] < 0.5 and low["remedy"].startswith("low: ")
    assert "too little training" in low["remedy"]
    assert not found["fault"]


def test_a_fault_silences_warnings_that_it_explains(clinic: Clinic) -> None:
    found = clinic.examine(break_it=edit(mask_token_id=MASK - 1))
    assert [f["check"] for f in found["fault"]] == ["mask row"]
    (serving,) = (f for f in found["warning"] if f["check"] == "serving")
    assert serving["remedy"] == "fix the faults named here"
    (recall,) = (f for f in found["ok"] if f["check"] == "recall")
    assert recall["figures"]["top_1"][0] < 0.3


# ---- its probabilities -----------------------------------------------------------------------------------------


def test_a_foreign_calibration_is_reported_with_the_right_one(clinic: Clinic) -> None:
    def calibrated(slope: float, bias: list[float]) -> Any:
        return config(lambda values: values["dflash_config"].update(acceptance_slope=slope, acceptance_bias=bias))

    found = clinic.examine(break_it=calibrated(0.2, [-5.0, -3.0]))
    (finding,) = found["fault"] + found["warning"]
    figures = finding["figures"]
    assert finding["check"] == "calibration" and "worse than none, as one of another drafter is" in finding["measured"]
    assert figures["promised_stored"] < 0.7 * figures["accepted"] < figures["nodes"]
    set_to = f"set dflash_config.acceptance_slope to {round(figures['acceptance_slope'], 3)} and"
    assert set_to in finding["remedy"] and "dflash_config.acceptance_bias to [" in finding["remedy"]

    found = clinic.examine(break_it=calibrated(figures["acceptance_slope"], figures["acceptance_bias"]))
    assert not found["fault"] + found["warning"]
    (restored,) = (finding for finding in found["ok"] if finding["check"] == "calibration")
    assert restored["figures"]["promised_stored"] == pytest.approx(figures["accepted"], rel=0.15)


def nodes_of(informed: bool, ranked: bool, blocks: int = 300) -> list[JudgedNode]:
    """Blocks of five slots with three candidates each, accepted with the drafter's probabilities, with others of the
    same order, or by dice."""
    dice, found = torch.Generator().manual_seed(1), list[JudgedNode]()
    for _ in range(blocks):
        for slot in range(1, 6):
            thought, true = (torch.rand(2, generator=dice) * 0.6 + 0.3).tolist()
            best = thought if informed else true
            shares = (best, 0.6 * (1 - best), 0.3 * (1 - best)) if ranked else (0.25, 0.25, 0.25)
            taken = int(torch.multinomial(torch.tensor([*shares, 1 - sum(shares)]), 1, generator=dice))
            for rank, share in enumerate((thought, 0.6 * (1 - thought), 0.3 * (1 - thought))):
                found.append(
                    JudgedNode(math.log(share if ranked else thought - 0.01 * rank), slot, taken == rank, not rank)
                )
            if taken == 3:
                break
    return found


def test_uninformative_probabilities_are_a_warning(clinic: Clinic) -> None:
    case = Case.read(str(clinic.healthy), load_config(clinic.target), None, None)
    good = judged(case, nodes_of(True, True), "dflash-serve ...")
    assert good.severity == "ok" and "too few" not in good.measured and "none is stored" in good.measured
    assert good.figures["auc_trees"] > good.figures["auc_chains"] > 0.65
    order, nothing = (judged(case, nodes_of(False, ranked), "dflash-serve --target t") for ranked in (True, False))
    for finding in (order, nothing):
        assert finding.severity == "warning" and "do not predict acceptance" in finding.measured
        assert abs(finding.figures["auc_chains"] - 0.5) < 0.05
        assert "`dflash-serve --target t --no-draft-tree`" in finding.remedy
    assert "trees by the order of their tokens alone" in order.remedy and order.figures["auc_trees"] > 0.7
    assert "draft trees and chains of their own length cannot pay" in nothing.remedy
    few = judged(case, nodes_of(False, False, blocks=9), "dflash-serve ...")
    assert few.severity == "ok" and "too few" in few.measured, "of nine blocks nothing is sure"


def test_an_optimistic_calibration_is_reported_with_its_ratio(clinic: Clinic) -> None:
    case = Case.read(str(clinic.healthy), load_config(clinic.target), None, None)
    assert case.config is not None
    nodes = [node._replace(accepted=node.accepted and not i % 2) for i, node in enumerate(nodes_of(True, True))]
    case = replace(case, config=replace(case.config, acceptance_slope=1.0, acceptance_bias=(0.01,)))
    finding = judged(case, nodes, "dflash-serve ...")
    ratio = finding.figures["promised_stored"] / finding.figures["accepted"]
    assert finding.severity == "warning" and ratio == pytest.approx(2, rel=0.1)
    assert f"the stored calibration promises {ratio:.2f} times as much" in finding.measured
    slope, bias = finding.figures["acceptance_slope"], finding.figures["acceptance_bias"]
    fitted = Calibration(slope, tuple(bias))
    log_probs, slots = (torch.tensor([node[i] for node in nodes]) for i in (0, 1))
    assert float(fitted(log_probs.exp(), slots).sum()) == pytest.approx(finding.figures["accepted"], rel=0.05), "damped"


def test_the_area_under_the_curve_counts_pairs() -> None:
    values, accepted = torch.tensor([0.9, 0.4, 0.4, 0.1, 0.7]), torch.tensor([True, True, False, False, False])
    assert area(values, accepted)[0] == pytest.approx((3 + 1.5) / 6)
    assert all(math.isnan(each) for each in area(values[:2], accepted[:2]))
