"""`dflash-doctor`: a drafter that is well is called well, and each way to break one is called by its name."""

import functools
import json
import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES
from conftest import MASK, PAD, TEMPLATE, make_drafter, make_target
from safetensors.torch import load_file, save_file

import dflash_toolkit.train.loop
import dflash_toolkit.train.objective.blocks
from dflash_toolkit import Drafter, SamplingParams, Target, generate, load_drafter, save_drafter
from dflash_toolkit.data.prompts import encode_chat
from dflash_toolkit.doctor.cli import main
from dflash_toolkit.doctor.probe import Scores, gain
from dflash_toolkit.fingerprint import model_digest, template_digest
from dflash_toolkit.models.dflash.checkpoint import PROVENANCE_KEY
from dflash_toolkit.models.dflash.speculators import save_speculators
from dflash_toolkit.record import RECORD_KEY, export_record
from dflash_toolkit.train.config import DrafterOptions, LossOptions, OptimOptions, RunOptions, TrainConfig
from dflash_toolkit.train.objective.blocks import Blocks
from dflash_toolkit.train.responses.rows import Row
from dflash_toolkit.train.run.definition import Run

TEXTS = ("Why is the sky blue?", "Count to ten.", "Name a colour.")
ALL_TEXTS = ("--limit", str(len(TEXTS)))  # else a drafter is examined on one of them
TOKENS = 33  # so that the blocks of an answer are drafted at once
THINKING = TEMPLATE + "{% if add_generation_prompt and enable_thinking is defined and enable_thinking %}?{% endif %}"


def fit(
    target: Target, rows: list[Row], work: Path, steps: int = 100, anchors: int = 12, rate: float = 8e-3, **shape: Any
) -> Drafter:
    """A drafter trained on `rows` by the real loop."""
    shape = {"block_size": 6} | shape
    config = TrainConfig(
        target="tiny", drafter=DrafterOptions(block_size=shape["block_size"]), loss=LossOptions(anchors=anchors),
        optim=OptimOptions(steps=steps, batch_size=min(8, len(rows)), learning_rate=rate),
        run=RunOptions(feature_cache_gb=1, log_every=1000),
    )  # fmt: skip
    drafter = make_drafter(target, **shape).train()
    dflash_toolkit.train.loop.train(Run(config, target, drafter, rows, [], work, {}, lambda trained, export: None))
    return drafter.eval()


def write_target(target: Target, path: Path) -> str:
    target.model.save_pretrained(path)
    target.tokenizer.save_pretrained(path)
    return str(path)


def answered(target: Target, texts: Sequence[str] = TEXTS, tokens: int = TOKENS) -> list[Row]:
    rows = []
    for i, text in enumerate(texts):
        prompt = encode_chat(target.tokenizer, [{"role": "user", "content": text}])
        answer = generate(target, None, prompt, SamplingParams(max_tokens=tokens)).tokens
        assert len(answer) == tokens and len(set(answer)) > tokens // 2, "a long and varied answer"
        rows.append(Row(i, len(prompt), prompt + answer))
    return rows


class Clinic:
    """A target, a drafter that has memorised its answers, and `examine` to see a copy of it, broken or not."""

    def __init__(self, path: Path, target: Target, drafter: Drafter, provenance: dict[str, Any] | None = None) -> None:
        path.mkdir(exist_ok=True)
        self.path, self.target, self.healthy = path, write_target(target, path / "target"), path / "healthy"
        save_drafter(drafter, self.healthy, provenance)
        self.prompts = path / "prompts.jsonl"
        self.prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in TEXTS))

    def arguments(self, drafter: Path, *more: str) -> list[str]:
        return [
            "--target", self.target, "--drafter", str(drafter), "--device", "cpu", "--dtype", "float32",
            "--prompts", f"p={self.prompts}", "--limit", "1", "--max-tokens", str(TOKENS), *more,
        ]  # fmt: skip

    def examine(self, *more: str, break_it: Callable[[Path], None] | None = None) -> dict[str, list[dict[str, Any]]]:
        """The findings by severity; the exit code must agree with them."""
        broken, report = self.path / "broken", self.path / "report.json"
        shutil.rmtree(broken, ignore_errors=True)
        shutil.copytree(self.healthy, broken)
        if break_it:
            break_it(broken)
        code = main(self.arguments(broken, "--output", str(report), *more))
        written = json.loads(report.read_text(), parse_constant=lambda c: pytest.fail(f"{c} is not JSON"))
        found: dict[str, list[dict[str, Any]]] = {"ok": [], "warning": [], "fault": []}
        for finding in written["findings"]:
            assert finding["measured"] and bool(finding["remedy"]) == (finding["severity"] != "ok")
            found[finding["severity"]].append(finding)
        assert code == int(written["fault"]) == int(bool(found["fault"]))
        return found


@pytest.fixture(scope="module")
def clinic(tmp_path_factory: pytest.TempPathFactory) -> Clinic:
    return _clinic(tmp_path_factory.getbasetemp() / "clinic")


@functools.cache  # other modules have it from here, and would train another
def _clinic(path: Path) -> Clinic:
    target = make_target()  # first: a fast run ends here
    path.mkdir()
    drafter = fit(target, answered(target), path)
    answers = {"regenerate": True, "temperature": 0.0, "thinking": None}
    note = {"target": "tiny", "template_hash": template_digest(target.tokenizer), "answers": [answers]}
    return Clinic(path, target, drafter, note | {"acceptance_length": 5.5, "trained_block_size": 6})


def config(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def rewrite(path: Path) -> None:
        values = json.loads((path / "config.json").read_text())
        change(values)
        (path / "config.json").write_text(json.dumps(values))

    return rewrite


def edit(**changes: Any) -> Callable[[Path], None]:
    """Change keys of config.json, wherever they stand in it, but for the record of the export."""

    def walk(values: dict[str, Any]) -> None:
        for key, value in values.items():
            if isinstance(value, dict) and key != RECORD_KEY:
                walk(value)
            elif key in changes:
                values[key] = changes[key]

    return config(walk)


def tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def rewrite(path: Path) -> None:
        held = load_file(path / "model.safetensors")
        change(held)
        save_file(held, path / "model.safetensors")

    return rewrite


# ---- a drafter that is well -----------------------------------------------------------------------------------


def test_nothing_is_wrong_with_a_drafter_that_is_well(clinic: Clinic, capsys: pytest.CaptureFixture[str]) -> None:
    found = clinic.examine()
    assert (found["fault"], found["warning"]) == ([], [])
    checks = [finding["check"] for finding in found["ok"]]
    assert set(checks) == {
        "configuration", "fit", "tensors", "weights", "template", "record", "layer ids", "tap order", "rope",
        "mask row", "causality", "layer order", "rope rows", "gate and up", "q and k norms", "norm weights",
        "context", "positions", "labels", "thinking", "curve", "serving", "recall", "acceptance",
        "calibration",
    }  # fmt: skip
    assert "nothing is wrong with this drafter" in capsys.readouterr().out
    acceptance, serving = (next(f for f in found["ok"] if f["check"] == name) for name in ("acceptance", "serving"))
    assert acceptance["figures"]["tau"] > 5 and len(acceptance["figures"]["given_previous"]) == 5
    # in fp32 a block drafted from the whole answer is the block that decoding drafts
    assert serving["figures"]["decoded"] == serving["figures"]["teacher_forced"]


# ---- ways to break it -----------------------------------------------------------------------------------------

BREAKS: dict[str, tuple[Callable[[Path], None], str, str]] = {
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
def test_a_broken_checkpoint_is_called_by_its_fault_and_by_no_other(clinic: Clinic, name: str) -> None:
    break_it, check, remedy = BREAKS[name]
    faults = clinic.examine(break_it=break_it)["fault"]
    assert [fault["check"] for fault in faults] == [check]
    assert remedy in faults[0]["remedy"]


def test_another_digest_of_the_target_is_a_warning_where_it_computes_alike(clinic: Clinic) -> None:
    target = Target.load(clinic.target, "cpu")
    record = {RECORD_KEY: export_record(load_drafter(str(clinic.healthy)), target)}
    for digest, warned in ((model_digest(clinic.target), []), ("0" * 64, ["target"])):
        note = record | {"target_digest": digest}
        found = clinic.examine(break_it=config(lambda values, note=note: values[PROVENANCE_KEY].update(note)))
        assert not found["fault"] and [finding["check"] for finding in found["warning"]] == warned


def test_a_target_of_the_same_digest_that_computes_otherwise_has_no_other_weights(clinic: Clinic) -> None:
    target = Target.load(clinic.target, "cpu")
    with torch.no_grad():
        target.layers[3].mlp.down_proj.weight.mul_(-1)  # as other kernels might
    record = {RECORD_KEY: export_record(load_drafter(str(clinic.healthy)), target)}
    note = record | {"target_digest": model_digest(clinic.target)}
    found = clinic.examine(break_it=config(lambda values: values[PROVENANCE_KEY].update(note)))
    (finding,) = found["warning"]
    assert not found["fault"] and finding["check"] == "target"
    assert "weights and configuration are those of training: compute as there, in float32 on cpu" in finding["remedy"]


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


def test_how_the_answers_were_written_is_read_as_training_notes_it(clinic: Clinic) -> None:
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


def test_a_target_of_other_weights_is_told_by_the_drafters_ignorance(clinic: Clinic, tmp_path: Path) -> None:
    other = make_target()
    for weight in other.model.parameters():
        if weight.dim() == 2:
            weight.normal_(0, 0.3)
    faults = clinic.examine("--target", write_target(other, tmp_path))["fault"]
    assert [fault["check"] for fault in faults] == ["acceptance"]
    assert "cannot predict this target's answers" in faults[0]["remedy"]


def test_a_drafter_that_was_never_trained_is_told_by_its_weights(clinic: Clinic, tmp_path: Path) -> None:
    target = make_target()
    drafter = make_drafter(target, block_size=6)
    drafter.init_weights(torch.Generator().manual_seed(0))
    faults = Clinic(tmp_path, target, drafter).examine()["fault"]
    assert [fault["check"] for fault in faults] == ["weights"] and "never trained" in faults[0]["measured"]


# ---- trainers that break it -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_labels_one_off_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = dflash_toolkit.train.loop.sample_blocks

    def shifted(*arguments: Any, **more: Any) -> Blocks:
        blocks = honest(*arguments, **more)
        known = blocks.supervised.roll(-1, 2)
        known[:, :, 0] = known[:, :, -1] = False
        return replace(blocks, labels=blocks.labels.roll(-1, 2), supervised=known)

    monkeypatch.setattr(dflash_toolkit.train.loop, "sample_blocks", shifted)
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
    weak, alike, strong = (scores(torch.rand(160, 7, generator=g) < p) for p in (0.6, 0.6, 0.8))
    found = gain(strong, weak)
    assert found.tokens == pytest.approx(strong.tau - weak.tau, abs=1e-5) and found.z > 4
    assert abs(gain(alike, weak).z) < 3
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


def test_what_the_files_say_stands_where_answers_are_too_short_to_measure(
    clinic: Clinic, capsys: pytest.CaptureFixture[str]
) -> None:
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


@pytest.mark.parametrize(
    ("name", "rope"),
    [
        ("Qwen3-MoE", "theta 10000"),
        ("Qwen3.5 with images", "theta 10000"),
        ("Gemma 3", "theta 1e+06"),
        ("gpt-oss", "theta 150000, yarn x 32"),
    ],
)
def test_a_drafter_of_any_target_is_examined(name: str, rope: str, tmp_path: Path) -> None:
    target = ARCHITECTURES[name].target(eos_token_id=None)  # its answers are as long as they may be
    drafter = make_drafter(target, layers=1)
    found = Clinic(tmp_path, target, drafter).examine("--max-tokens", "16", "--limit", "3")
    ok = {finding["check"]: finding["measured"] for finding in found["ok"]}
    first = next(finding["measured"] for finding in found["ok"] if finding["check"] == "rope")
    assert first.endswith(f"the target's {rope}")
    assert {"configuration", "fit", "tensors", "weights", "mask row", "layer ids", "context", "serving"} <= ok.keys()
    assert {finding["check"] for finding in found["fault"]} <= {"acceptance"}, "of random weights"
