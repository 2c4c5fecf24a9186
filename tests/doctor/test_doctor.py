"""`dflash-doctor`: a drafter that is well is called well, and each way to break one is called by its name."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES
from conftest import MASK, PAD, TEMPLATE, make_drafter, make_target
from doctor_cases import (
    ALL_TEXTS,
    THINKING,
    Break,
    Clinic,
    answered,
    config,
    edit,
    fit,
    tensors,
    write_target,
)
from doctor_cases import clinic as clinic

import dflash_toolkit.train.loop
import dflash_toolkit.train.objective.blocks
from dflash_toolkit import Target, load_drafter
from dflash_toolkit.doctor.cli import main
from dflash_toolkit.doctor.probe import Scores, gain
from dflash_toolkit.fingerprint import model_digest, template_digest
from dflash_toolkit.models.dflash.checkpoint import PROVENANCE_KEY
from dflash_toolkit.models.dflash.speculators import save_speculators
from dflash_toolkit.record import RECORD_KEY, export_record
from dflash_toolkit.train.objective.blocks import Blocks
from dflash_toolkit.train.responses.rows import Row

# ---- a drafter that is well -----------------------------------------------------------------------------------


def test_a_healthy_drafter_passes_every_check(clinic: Clinic, capsys: pytest.CaptureFixture[str]) -> None:
    found = clinic.examine()
    assert (found["fault"], found["warning"]) == ([], [])
    checks = [finding["check"] for finding in found["ok"]]
    assert set(checks) == {
        "configuration", "fit", "tensors", "weights", "template", "record", "layer ids", "tap order", "rope",
        "mask row", "causality", "layer order", "rope rows", "gate and up", "q and k norms", "norm weights",
        "k and v", "q heads", "fc blocks", "context", "positions", "labels", "thinking", "curve", "serving",
        "recall", "acceptance", "calibration",
    }  # fmt: skip
    assert "nothing is wrong with this drafter" in capsys.readouterr().out
    acceptance, serving = (next(f for f in found["ok"] if f["check"] == name) for name in ("acceptance", "serving"))
    assert acceptance["figures"]["tau"] > 5 and len(acceptance["figures"]["given_previous"]) == 5
    # in fp32 a block drafted from the whole answer is the block that decoding drafts
    assert serving["figures"]["decoded"] == serving["figures"]["teacher_forced"]


# ---- ways to break it -----------------------------------------------------------------------------------------

BREAKS: dict[str, tuple[Break, str, str]] = {
    "layer ids - 1": (edit(target_layer_ids=[0, 1, 2]), "layer ids", "[1, 2, 3]"),
    "scaled": (  # a rope that was trained plain
        config(lambda values: values["rope_parameters"].update(rope_type="linear", factor=4.0)),
        "rope",
        'set rope_theta to 10000.0 and rope_parameters (and rope_scaling, if there) to {"rope_type": "default"',
    ),
    "mask row": (edit(mask_token_id=MASK - 1), "mask row", f"mask_token_id to {MASK}"),
    "mask pad": (edit(mask_token_id=PAD), "mask row", f"mask_token_id to {MASK}"),
    "mask outside": (edit(mask_token_id=300), "configuration", "config.json"),
    "two thetas": (config(lambda values: values.update(rope_theta=5e5)), "configuration", "config.json"),
    "template": (edit(template_hash="0" * 64), "template", "train again with the present"),
    "missing": (tensors(lambda held: held.pop("layers.1.mlp.up_proj.weight")), "tensors", "export the drafter again"),
    "unused": (tensors(lambda held: held.update(extra=torch.ones(3))), "tensors", "variant"),
    "zeroed": (tensors(lambda held: held["layers.0.self_attn.v_proj.weight"].zero_()), "weights", "export again"),
    "not finite": (tensors(lambda held: held["norm.weight"][3:4].fill_(math.nan)), "weights", "diverged"),
}


@pytest.mark.parametrize("name", BREAKS)
@pytest.mark.sampled
def test_each_broken_checkpoint_gets_only_its_own_fault(clinic: Clinic, name: str) -> None:
    break_it, check, remedy = BREAKS[name]
    faults = clinic.examine(break_it=break_it)["fault"]
    assert [fault["check"] for fault in faults] == [check]
    assert remedy in faults[0]["remedy"]


def test_other_target_digest_with_equal_outputs_is_a_warning(clinic: Clinic) -> None:
    target = Target.load(clinic.target, "cpu")
    record = {RECORD_KEY: export_record(load_drafter(str(clinic.healthy)), target)}
    for digest, warned in ((model_digest(clinic.target), []), ("0" * 64, ["target"])):
        note = record | {"target_digest": digest}
        found = clinic.examine(break_it=config(lambda values, note=note: values[PROVENANCE_KEY].update(note)))
        assert not found["fault"] and [finding["check"] for finding in found["warning"]] == warned


def test_equal_digest_with_other_outputs_blames_computation(clinic: Clinic) -> None:
    target = Target.load(clinic.target, "cpu")
    with torch.no_grad():
        target.layers[3].mlp.down_proj.weight.mul_(-1)  # as other kernels might
    record = {RECORD_KEY: export_record(load_drafter(str(clinic.healthy)), target)}
    note = record | {"target_digest": model_digest(clinic.target)}
    found = clinic.examine(break_it=config(lambda values: values[PROVENANCE_KEY].update(note)))
    (finding,) = found["warning"]
    assert not found["fault"] and finding["check"] == "target"
    assert "weights and configuration are those of training: compute as there, in float32 on cpu" in finding["remedy"]


def test_less_acceptance_at_a_temperature_is_named(clinic: Clinic) -> None:
    found = clinic.examine("--temperature", "1", *ALL_TEXTS)
    (finding,) = found["warning"]
    figures = finding["figures"]
    assert not found["fault"] and finding["check"] == "temperature"
    assert figures["tau_at_temperature"] < 0.5 * figures["tau"] and figures["trained_at"] == [0.0]
    assert "responses.temperature=1; those of its training were sampled at 0" in finding["remedy"]
    found = clinic.examine("--temperature", "0.01", *ALL_TEXTS)
    assert (found["fault"], found["warning"]) == ([], [])
    assert "temperature" in {finding["check"] for finding in found["ok"]}
    assert main([*clinic.arguments(clinic.healthy), "--temperature", "-1"]) == 2


def test_the_other_thinking_mode_is_named(clinic: Clinic, tmp_path: Path) -> None:
    target = make_target()
    target.tokenizer.chat_template = THINKING
    path, trained_so = write_target(target, tmp_path), edit(template_hash=template_digest(target.tokenizer))
    found = clinic.examine("--target", path, break_it=trained_so)
    assert (found["fault"], found["warning"]) == ([], [])
    (thinking,) = (finding["figures"] for finding in found["ok"] if finding["check"] == "thinking")
    assert thinking["tau_other"] < thinking["tau"] and not thinking["trained_so"]
    faults = clinic.examine("--target", path, "--thinking", "--limit", "2", break_it=trained_so)["fault"]
    assert [fault["check"] for fault in faults] == ["thinking"]
    assert "enable_thinking=false" in faults[0]["remedy"]


def test_the_record_of_responses_is_read_as_training_writes_it(clinic: Clinic) -> None:
    answers = [{"regenerate": True}, {"regenerate": False}]
    found = clinic.examine(break_it=config(lambda values: values[PROVENANCE_KEY].update(answers=answers)))["warning"]
    assert any("not of the target" in finding["measured"] for finding in found)


def test_a_target_of_another_shape_does_not_fit(clinic: Clinic, tmp_path: Path) -> None:
    target = make_target(layers=8)
    target.tokenizer.chat_template = THINKING
    deeper = write_target(target, tmp_path)
    assert main([*clinic.arguments(clinic.healthy), "--target", deeper]) == 1
    faults = clinic.examine("--target", deeper)["fault"]
    assert [fault["check"] for fault in faults] == ["fit", "template"]
    assert "layers" in faults[0]["measured"] and "made for tiny" in faults[0]["remedy"]


def test_other_target_weights_show_as_low_recall(clinic: Clinic, tmp_path: Path) -> None:
    other = make_target()
    for weight in other.model.parameters():
        if weight.dim() == 2:
            weight.normal_(0, 0.3)
    faults = clinic.examine("--target", write_target(other, tmp_path))["fault"]
    assert [fault["check"] for fault in faults] == ["acceptance"]
    assert "cannot predict this target's answers" in faults[0]["remedy"]


def test_an_untrained_drafter_is_found_by_its_weights(clinic: Clinic, tmp_path: Path) -> None:
    target = make_target()
    drafter = make_drafter(target, block_size=6)
    drafter.init_weights(torch.Generator().manual_seed(0))
    faults = Clinic(tmp_path, target, drafter).examine()["fault"]
    assert [fault["check"] for fault in faults] == ["weights"] and "never trained" in faults[0]["measured"]


# ---- trainers that break it -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_shifted_labels_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = dflash_toolkit.train.gradients.sample_blocks

    def shifted(*arguments: Any, **more: Any) -> Blocks:
        blocks = honest(*arguments, **more)
        known = blocks.supervised.roll(-1, 2)
        known[:, :, 0] = known[:, :, -1] = False
        return replace(blocks, labels=blocks.labels.roll(-1, 2), supervised=known)

    monkeypatch.setattr(dflash_toolkit.train.gradients, "sample_blocks", shifted)
    target = make_target()
    drafter = fit(target, answered(target), tmp_path)
    faults = Clinic(tmp_path, target, drafter).examine(*ALL_TEXTS)["fault"]
    assert [fault["check"] for fault in faults] == ["labels"] and "anchor + k + 1" in faults[0]["remedy"]


@pytest.mark.slow
def test_a_trainer_that_shows_the_anchors_own_feature_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = dflash_toolkit.train.objective.blocks.context_before_anchor
    monkeypatch.setattr(
        dflash_toolkit.train.objective.blocks,
        "context_before_anchor",
        lambda f, blocks: honest(f, replace(blocks, anchor=blocks.anchor + 1)),
    )
    target = make_target()
    for layer in target.layers[4:]:  # a late feature says the next token, as it nearly does in a real target
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    # more texts than it can memorise, so that it learns to read that feature instead
    prompts = torch.randint(0, 250, (128, 12), generator=torch.Generator().manual_seed(1))
    texts = target.model.generate(prompts, max_new_tokens=40, min_new_tokens=40, do_sample=False, pad_token_id=PAD)
    rows = [Row(i, 12, text.tolist()) for i, text in enumerate(texts)]
    drafter = fit(
        target, rows, tmp_path, block_size=3, steps=200, anchors=24, rate=1.5e-2,
        layers=1, target_layer_ids=(4,), num_kv_heads=4, head_dim=16,
    )  # fmt: skip
    faults = Clinic(tmp_path, target, drafter).examine(*ALL_TEXTS)["fault"]
    assert [fault["check"] for fault in faults] == ["context"]
    assert "strictly before the anchor" in faults[0]["remedy"]


# ---- bad input ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--drafter", "/no/such/drafter"], "no such directory"),
        (["--target", "/no/such/target"], "no such directory"),
        (["--prompts", "chat="], "expected NAME=SOURCE"),
        (["--prompts", "a=x.jsonl", "a=y.jsonl"], "'a' is used twice"),
        (["--prompts", "chat=/no/such/file"], "no such file"),
        (["--limit", "0"], "limit is 0"),
        (["--max-tokens", "8", "--limit", "1"], "too short to judge a drafter by"),
        (["--output", "/no/such/folder/report.json"], "there is no directory"),
        (["--device", "tpu"], "device 'tpu'"),
        (["max_token=3"], "unknown key"),
    ],
)
def test_bad_input_is_one_line(
    clinic: Clinic, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(clinic.arguments(clinic.healthy, *arguments)) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert len(errors) == 1 and words in errors[0]


# ---- the judgement --------------------------------------------------------------------------------------------


def scores(hits: torch.Tensor) -> Scores:
    rows = torch.arange(len(hits))
    return Scores(hits, hits, torch.ones_like(hits), rows // 40, rows % 40)


def test_a_gain_counts_the_accepted_drafts_and_noise_is_not_clear() -> None:
    g = torch.Generator().manual_seed(0)
    weak, equal, strong = (scores(torch.rand(160, 7, generator=g) < p) for p in (0.6, 0.6, 0.8))
    found = gain(strong, weak)
    assert found.tokens == pytest.approx(strong.tau - weak.tau, abs=1e-5) and found.z > 4
    assert abs(gain(equal, weak).z) < 3
    assert gain(weak, weak).z == 0
    assert gain(weak, strong).z == pytest.approx(-found.z)


# ---- in the speculators form, and with little to go by ---------------------------------------------------------


def test_the_remedies_of_the_speculators_form_name_its_own_keys(clinic: Clinic) -> None:
    def converted(path: Path) -> None:
        drafter, target = load_drafter(str(path)), Target.load(clinic.target, "cpu")
        shutil.rmtree(path)
        save_speculators(drafter, path, target.config, target.embedding.weight, target.head_weight)
        edit(rope_theta=1e2, mask_token_id=PAD)(path)

    remedies = {fault["check"]: fault["remedy"] for fault in clinic.examine(*ALL_TEXTS, break_it=converted)["fault"]}
    assert "rope_parameters.rope_theta of transformer_layer_config to 10000.0 in" in remedies["rope"]
    assert f"mask_token_id (and dflash_config.mask_token_id, if there) to {MASK}" in remedies["mask row"]


def test_file_findings_are_kept_if_answers_are_too_short(clinic: Clinic, capsys: pytest.CaptureFixture[str]) -> None:
    few = ("--limit", "1", "--max-tokens", "12")
    broken = clinic.examine(*few, break_it=BREAKS["zeroed"][0])
    assert [f["check"] for f in broken["fault"]] == ["weights"]
    (warning,) = (f for f in broken["warning"] if f["check"] == "acceptance")
    assert "too short to judge" in warning["remedy"]
    assert main(clinic.arguments(clinic.healthy, *few)) == 2
    assert "too short to judge" in capsys.readouterr().err
    clinic.path.joinpath("long.jsonl").write_text(json.dumps({"id": "tale", "prompt": "x" * 2000}) + "\n")
    assert main(clinic.arguments(clinic.healthy, "--prompts", f"p={clinic.path / 'long.jsonl'}")) == 2
    assert "prompt 'tale': " in capsys.readouterr().err


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("name", "rope"),
    [
        ("Qwen3-MoE", "theta 10000"),
        ("Qwen3.5 with images", "theta 10000"),
        ("Gemma 3", "theta 1e+06"),
        ("gpt-oss", "theta 150000, yarn x 32"),
    ],
)
def test_doctor_examines_drafters_of_every_target_family(name: str, rope: str, tmp_path: Path) -> None:
    target = ARCHITECTURES[name].target(eos_token_id=None)  # its answers are as long as they may be
    target.tokenizer.eos_token, target.tokenizer.chat_template = None, TEMPLATE.replace("<|end|>", "")
    drafter = make_drafter(target, layers=1)
    found = Clinic(tmp_path, target, drafter).examine("--max-tokens", "16", "--limit", "3")
    ok = {finding["check"]: finding["measured"] for finding in found["ok"]}
    first = next(finding["measured"] for finding in found["ok"] if finding["check"] == "rope")
    assert first.endswith(f"the target's {rope}")
    assert {"configuration", "fit", "tensors", "weights", "mask row", "layer ids", "context", "serving"} <= ok.keys()
    assert {finding["check"] for finding in found["fault"]} <= {"acceptance"}, "of random weights"
