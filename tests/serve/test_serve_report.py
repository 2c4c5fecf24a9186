"""`dflash-serve --from-report`: options that a report of dflash-eval recommends, for every engine."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from conftest import make_drafter, make_target
from damage import damage
from forked import fork_processes
from other_engines import NEWEST, parse
from refusals import refusal
from safetensors.torch import load_file

from dflash_toolkit import UserError, save_drafter
from dflash_toolkit.evaluation.cli import main as evaluate
from dflash_toolkit.runtime import load_engine
from dflash_toolkit.serve import cli, external
from dflash_toolkit.serve.report_options import check_target, other_target, recommended

ADVICE = {"use_drafter": True, "num_speculative_tokens": 5, "max_concurrency": 4}
FIGURES = {"tokens_per_second": 9.0, "over_blocks": 1.0, "over_blocks_ci95": None, "command": "dflash-serve"}
BLOCKS = {"drafts": "blocks", "draft_tree": 0, "draft_tree_width": None, **FIGURES}
CHAINS = {"drafts": "chains", "draft_tree": 7, "draft_tree_width": 1, **FIGURES}
TREES = {"drafts": "trees", "draft_tree": 31, "draft_tree_width": None, **FIGURES}
LOADS = [TREES | {"concurrency": 1}, CHAINS | {"concurrency": 4}, BLOCKS | {"concurrency": 16}]


@pytest.fixture(scope="module")
def measured(target_dir: Path, drafter_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A report of the pair, with a sweep over draft lengths."""
    path = tmp_path_factory.mktemp("measured")
    (path / "few.txt").write_text("Why is the sky blue?\nWhat is 2+2?\n")
    words = ["--target", target_dir, "--drafter", drafter_dir, "--device", "cpu", "--max-tokens", 6]
    words += ["--prompts", path / "few.txt", "--output", path, "--draft-length", 2, 7, "--sweep-requests", 2]
    assert evaluate([str(word) for word in words]) == 0
    return json.loads((path / "report.json").read_text())


def written(report: dict[str, Any], path: Path, **advice: Any) -> str:
    """Writes the report with another recommendation, as its own depends on the machine."""
    (path / "report.json").write_text(json.dumps(report | {"recommendation": report["recommendation"] | advice}))
    return str(path / "report.json")


@pytest.mark.parametrize(
    ("advice", "given", "expected"),
    [
        ({}, [], {"max_num_seqs": 4, "num_speculative_tokens": 5}),
        ({"max_concurrency": None}, [], {"num_speculative_tokens": 5}),
        ({}, ["--max-num-seqs", "9"], {"num_speculative_tokens": 5}),
        ({}, ["--num-speculative-tokens", "3"], {"max_num_seqs": 4}),
        ({}, ["--draft-tree", "15"], {"max_num_seqs": 4}),
        ({"use_drafter": False}, [], {"num_speculative_tokens": 0}),
        ({"drafting": LOADS}, [], {"max_num_seqs": 4, "draft_tree": 7, "draft_tree_width": 1}),
        ({"drafting": LOADS, "max_concurrency": None}, [], {"draft_tree": 31}),
        ({"drafting": LOADS}, ["--max-num-seqs", "64"], {"draft_tree": 0}),
        ({"drafting": LOADS}, ["--engine", "vllm"], {"max_num_seqs": 4, "num_speculative_tokens": 5}),
    ],
    ids=str,
)
def test_given_options_win_over_those_of_a_report(
    advice: dict[str, Any], given: list[str], expected: dict[str, Any],
    measured: dict[str, Any], target_dir: Path, drafter_dir: Path, tmp_path: Path,
) -> None:  # fmt: skip
    path = written(measured, tmp_path, **ADVICE | advice)
    config, options = parse("--target", str(target_dir), "--drafter", str(drafter_dir), *given)
    assert recommended(path, config, options) == expected


def test_without_a_sweep_the_engine_chooses_the_draft_length(
    measured: dict[str, Any], target_dir: Path, drafter_dir: Path, tmp_path: Path
) -> None:
    path = written(measured | {"sweeps": {}}, tmp_path, **ADVICE)
    config, options = parse("--target", str(target_dir), "--drafter", str(drafter_dir))
    assert recommended(path, config, options) == {"max_num_seqs": 4}


@pytest.mark.parametrize(("engine", "flag", "count"), [("vllm", "num_speculative_tokens", 5), ("sglang", "", 6)])
def test_other_engines_get_the_length_and_load_of_a_report(
    engine: str, flag: str, count: int, measured: dict[str, Any], target_dir: Path, drafter_dir: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    path = written(measured, tmp_path, **ADVICE)
    started: list[list[str]] = []

    def start(config: Any, given: Any, passed: Any) -> None:
        started.append(external.command(external.BY_NAME[engine], config, given, NEWEST[engine]))
        raise UserError("started")

    monkeypatch.setattr(cli, "start", start)  # the other engine is not installed here
    argv = ["--engine", engine, "--target", str(target_dir), "--drafter", str(drafter_dir), "--from-report", path]
    assert cli.main(argv) == 2
    (words,) = started
    if flag:
        assert json.loads(words[words.index("--speculative-config") + 1])[flag] == count
    else:
        assert words[words.index("--speculative-num-draft-tokens") + 1] == str(count)
    assert words[words.index("--max-num-seqs" if flag else "--max-running-requests") + 1] == "4"
    assert f"from {path}: --max-num-seqs 4 --num-speculative-tokens 5\n" in capsys.readouterr().err


def test_a_report_of_another_drafter_is_refused(
    measured: dict[str, Any], target_dir: Path, drafter_dir: Path, tmp_path: Path
) -> None:
    path = written(measured, tmp_path, **ADVICE)
    save_drafter(make_drafter(make_target(), layers=1), tmp_path / "other")
    config, options = parse("--target", str(target_dir), "--drafter", str(tmp_path / "other"))
    assert "was measured with other weights than those of drafter" in refusal(recommended, path, config, options)
    config, options = parse("--target", str(target_dir))
    assert "no drafter is given; add --drafter" in refusal(recommended, path, config, options)


def test_a_report_of_another_target_is_a_warning(measured: dict[str, Any], target_dir: Path, tmp_path: Path) -> None:
    path = written(measured, tmp_path)
    assert other_target(path, str(target_dir)) is other_target(path, f"/copied/{target_dir.name}/") is None
    assert other_target(path, "Qwen/Qwen3-8B") == str(target_dir)


def test_a_report_of_other_target_weights_is_refused(
    measured: dict[str, Any], target_dir: Path, drafter_dir: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The engine compares the weights that it has loaded."""
    path = written(measured, tmp_path, **ADVICE)
    engine, _ = load_engine(str(target_dir), None, "cpu")
    check_target(path, engine.runner.target.parameter_views(stacked=True).items(), "float32")
    other = Path(shutil.copytree(target_dir, tmp_path / target_dir.name))
    norm = "model.layers.2.input_layernorm.weight"
    damage(other / "model.safetensors", {norm: load_file(other / "model.safetensors")[norm] + 1})
    fork_processes(monkeypatch)
    argv = ["--target", str(other), "--drafter", str(drafter_dir), "--from-report", path, "--port", "0"]
    assert cli.main([*argv, "--device", "cpu"]) == 2
    assert "measured with other weights of the target" in capsys.readouterr().err


def test_a_report_without_recommendation_is_refused(
    measured: dict[str, Any], target_dir: Path, drafter_dir: Path, tmp_path: Path
) -> None:
    (tmp_path / "report.json").write_text(json.dumps(measured | {"recommendation": None}))
    config, options = parse("--target", str(target_dir), "--drafter", str(drafter_dir))
    assert "has no recommendation" in refusal(recommended, str(tmp_path), config, options)
