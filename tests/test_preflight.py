"""Every command checks target, folders and disk before its first expensive stage."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import BertConfig

from dflash_toolkit import Target, preflight
from dflash_toolkit.config import UnsupportedModel, UserError
from dflash_toolkit.doctor.cli import main as doctor
from dflash_toolkit.evaluation.cli import main as evaluate
from dflash_toolkit.models.target_files import load_config
from dflash_toolkit.preflight import check_new_folder, check_space, check_target
from dflash_toolkit.runtime.load import load_engine, load_parts
from dflash_toolkit.serve.cli import main as serve
from dflash_toolkit.train.cli import main as train
from dflash_toolkit.train.config import configure
from dflash_toolkit.train.data_cli import main as answer
from dflash_toolkit.train.run.cost import before_responses

# a decoder in which transformers has no list of layers; nothing but its config.json is there to be read
UNSUPPORTED = BertConfig(
    vocab_size=300, hidden_size=32, num_hidden_layers=6, num_attention_heads=4, intermediate_size=64, is_decoder=True
)


@pytest.fixture
def unsupported(target_dir: Path, tmp_path: Path) -> Path:
    """A target without weights, of an architecture that no command supports."""
    folder = tmp_path / "unsupported"
    shutil.copytree(target_dir, folder)
    (folder / "model.safetensors").unlink()
    (folder / "config.json").write_text(json.dumps(UNSUPPORTED.to_dict() | {"architectures": ["BertLMHeadModel"]}))
    return folder


COMMANDS = pytest.mark.parametrize(
    ("main", "more"),
    [
        (train, ["--data", "{data}", "--output", "{out}", "drafter.num_heads=4", "drafter.head_dim=8"]),
        (answer, ["--data", "{data}", "--output", "{out}/answers.jsonl"]),
        (evaluate, ["--drafter", "{drafter}", "--prompts", "a={data}", "--output", "{out}"]),
        (doctor, ["--drafter", "{drafter}"]),
        (serve, ["--drafter", "{drafter}", "--port", "0"]),
    ],
    ids=["train", "data", "eval", "doctor", "serve"],
)


@COMMANDS
@pytest.mark.parametrize("base", [True, False], ids=["with-base", "adapter-alone"])
def test_a_target_with_an_adapter_is_refused_with_the_way_to_merge_it(
    main: Callable[[list[str]], int], more: list[str], base: bool, target_dir: Path, data: Path, drafter_dir: Path,
    tmp_path: Path, capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    adapted, out = tmp_path / "adapted", tmp_path / "out"
    shutil.copytree(target_dir, adapted)
    if not base:
        (adapted / "config.json").unlink()
    (adapted / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    words = [word.format(data=data, out=out, drafter=drafter_dir) for word in more]
    assert main(["--target", str(adapted), "--device", "cpu", *words]) == 2
    said = capfd.readouterr().err.strip().splitlines()[-1]
    assert f"target {adapted}: " in said and "merge_and_unload().save_pretrained(DIR)" in said
    assert not out.exists()


def test_every_way_to_load_a_target_refuses_an_adapter(target_dir: Path, tmp_path: Path) -> None:
    adapted = str(shutil.copytree(target_dir, tmp_path / "adapted"))
    (tmp_path / "adapted/adapter_config.json").write_text("{}")
    for load in (Target.load, load_config, load_engine, load_parts):
        with pytest.raises(UserError, match="adapter_config"):
            load(adapted)


@COMMANDS
@pytest.mark.slow
def test_unsupported_target_is_refused_before_writing_files(
    main: Callable[[list[str]], int], more: list[str], unsupported: Path, data: Path, drafter_dir: Path,
    tmp_path: Path, capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    out = tmp_path / "out"
    words = [word.format(data=data, out=out, drafter=drafter_dir) for word in more]
    assert main(["--target", str(unsupported), "--device", "cpu", *words]) == 2
    said = capfd.readouterr().err.strip().splitlines()[-1]
    assert said.startswith("error: ") and f"target {unsupported}: architecture 'bert' is not s" in said
    assert not [path for path in out.rglob("*") if path.is_file() and path.stat().st_size]


def test_a_supported_target_needs_no_weights_to_be_checked(target_dir: Path, tmp_path: Path) -> None:
    shutil.copy(target_dir / "config.json", tmp_path)
    for runtime in ("engine", "reference", "auto"):
        check_target(str(tmp_path), runtime)


def test_only_the_engine_refuses_transformers_only_models(target_dir: Path, tmp_path: Path) -> None:
    values = json.loads((target_dir / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | {"model_type": "olmo"}))
    check_target(str(tmp_path), "auto")
    with pytest.raises(UnsupportedModel, match="'olmo' is not served"):
        check_target(str(tmp_path), "engine")


def test_a_missing_package_of_a_quantized_target_is_named(
    target_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = json.loads((target_dir / "config.json").read_text())
    values["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    (tmp_path / "config.json").write_text(json.dumps(values))
    monkeypatch.setattr(preflight.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"package bitsandbytes is not installed.*dflash-toolkit\[quantized\]"):
        check_target(str(tmp_path))


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"output x: cannot be written, for .*file is not a directory"):
        check_new_folder(tmp_path / "file" / "below", "output x")
    check_new_folder(tmp_path / "new" / "below", "output x")
    assert not (tmp_path / "new").exists()


def full(path: Any) -> Any:
    return SimpleNamespace(total=1 << 40, used=(1 << 40) - 1000, free=1000)


def test_too_little_disk_space_is_one_line_with_both_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_space(tmp_path / "new", 1, "files") > 1
    monkeypatch.setattr(preflight.shutil, "disk_usage", full)
    with pytest.raises(UserError, match=r"files take 3\.0 GiB, but only .* MiB are free"):
        check_space(tmp_path, 3 << 30, "files")


@pytest.mark.slow
def test_training_without_space_for_checkpoints_writes_nothing(
    target_dir: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(preflight.shutil, "disk_usage", full)
    words = ["--target", str(target_dir), "--data", str(data), "--output", str(tmp_path / "out"), "drafter.layers=1"]
    words.append("drafter.taps=2")
    assert train(words) == 2
    assert "the checkpoints of this run take" in capsys.readouterr().err
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_features_on_another_disk_have_a_line_of_their_own(tmp_path: Path, drafter: Any) -> None:
    folders = work, features = tmp_path / "work", tmp_path / "features"
    for folder in folders:
        folder.mkdir()
    run = {"run": {"features": "disk", "feature_dir": str(features)}}
    lines = before_responses(configure({"target": "x", "data": ["y"]} | run), drafter.config, 10, work)
    assert [line.rpartition(" in ")[2] for line in lines] == [str(work), str(features)]
    assert "features" in lines[1] and "features" not in lines[0].rpartition(" in ")[0]


@pytest.mark.slow
def test_dflash_data_reports_an_upper_bound_of_its_output(
    target_dir: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(preflight.shutil, "disk_usage", full)
    words = ["--target", str(target_dir), "--data", str(data), "--output", str(tmp_path / "a.jsonl")]
    assert answer([*words, "--max-tokens", "16", "--samples", "1"]) == 0
    said = capsys.readouterr().err
    assert "disk: at most" in said and "that may be too little: lower prompts.max_prompts or max_tokens" in said
