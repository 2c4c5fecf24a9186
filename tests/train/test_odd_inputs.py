"""Inputs that are damaged, out of range or of another kind: one line that names them, as early as can be."""

from pathlib import Path

import pytest
import torch
from test_data_cli import argv, write
from test_data_endpoint import Fake, fake, whole  # noqa: F401  # a fixture
from test_train_guards import command
from test_train_odd import refusal

import train.data_cli
from train.cli import main
from train.config import OptimOptions, RunOptions
from train.data_cli import main as answer


def error_of(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().err.splitlines()[-1].removeprefix("error: ")


# ---- options -----------------------------------------------------------------------------------------------------


def test_numbers_out_of_range_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"optim.learning_rate is 0.0; it must be > 0"):
        OptimOptions(learning_rate=0.0)
    with pytest.raises(ValueError, match=r"run.feature_cache_gb is 1e\+300"):
        RunOptions(feature_cache_gb=1e300)


@pytest.mark.parametrize(
    ("more", "named"),
    [
        (["server.timeout=1e12"], "server.timeout is 1000000000000.0; it must be > 0 and at most 604800"),
        (["server.retries=5000"], "server.retries is 5000"),
        (["--endpoint", "http://127.0.0.1:9", "--batch-size", "200000"], "batch_size is 200000; with endpoint"),
    ],
)
def test_what_no_machine_can_do_is_refused(
    more: list[str], named: str, target_dir: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert answer(argv(target_dir, data, tmp_path / "a.jsonl", *more)) == 2
    assert named in error_of(capsys)


# ---- files that hold something else ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.parquet", "a.txt", "a.json"])
def test_dflash_train_reads_files_of_other_kinds(
    name: str, target_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = {"a.parquet": b"PAR1\xff", "a.txt": b"say\nmore", "a.json": b'[\n{"prompt": "say"}, {"prompt": "more"}]'}[
        name
    ]
    (tmp_path / name).write_bytes(text)
    arguments = command(target_dir, str(tmp_path / name), tmp_path / "run", "optim.steps=1", "prompts.held_out=0")
    if name == "a.parquet":
        assert refusal(capsys, arguments).startswith(f"{tmp_path / name}: cannot be read")
        assert not (tmp_path / "run").exists(), "nothing is left behind"
    else:
        assert main(arguments) == 0
        assert "2 answers" in capsys.readouterr().err


def test_a_prompt_without_an_answer_is_named_before_the_target_is_read(
    target_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"id": f"row-{i}", "prompt": f"say {i}"} for i in range(4)]
    path = write(tmp_path / "p.jsonl", rows)
    monkeypatch.setattr("train.cli._loaded", None)
    said = refusal(capsys, command(target_dir, str(path), tmp_path / "run", "answers.regenerate=false"))
    assert "without an answer; answers.regenerate=true" in said and not (tmp_path / "run").exists()


# ---- answers of dflash-data ------------------------------------------------------------------------------------


# ---- dflash-data -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("token", [300, -5, 10**30])
def test_a_token_that_the_target_does_not_have_ends_it(
    token: int,
    fake: Fake,  # noqa: F811
    target_dir: Path,
    data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fake.reply = lambda body, number: (200, whole("x", ids=[65, token]))
    assert answer(argv(target_dir, data, tmp_path / "a.jsonl", "--endpoint", fake.url)) == 2
    assert f"tiny answered with token {token}, outside the target's vocabulary of 300" in error_of(capsys)
    assert not (tmp_path / "a.jsonl").read_text()


@pytest.mark.parametrize(
    ("more", "named"),
    [
        (["--device", "cuda:9"], "cuda:9"),
        (["--dtype", "int3"], "int3"),
        (["--drafter", "/no/such"], "/no/such"),
        (["--endpoint", "http://127.0.0.1:9"], "does not answer"),
        (["--runtime", "vllm"], "runtime vllm needs vllm"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_what_answers_is_checked_before_prompts_are_read(
    more: list[str],
    named: str,
    target_dir: Path,
    data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(train.data_cli, "_choose", None)
    assert answer(argv(target_dir, data, tmp_path / "a.jsonl", *more)) == 2
    assert named in error_of(capsys)


# ---- files of a run --------------------------------------------------------------------------------------------


def test_a_resume_point_without_weights_is_one_line(
    target_dir: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = command(target_dir, str(data), tmp_path / "run", "prompts.held_out=0")
    assert main(run) == 0
    path = tmp_path / "run/work/state.pt"
    (tmp_path / "run/run.json").unlink()  # as if it had not ended
    for weights in ({}, None, {"fc.weight": torch.zeros(1)}):
        torch.save(torch.load(path) | {"drafter": weights}, path)
        assert refusal(capsys, run) == f"{path}: holds no weights of this drafter; remove it to start afresh"


def test_a_folder_for_features_that_cannot_be_made_is_said_before_answers(
    target_dir: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    more = ("run.features=disk", f"run.feature_dir={tmp_path}/file/x")
    said = refusal(capsys, command(target_dir, str(data), tmp_path / "run", *more))
    assert said.startswith(f"run.feature_dir {tmp_path}/file/x: cannot be created")
    assert not list((tmp_path / "run").glob("work/answers*.jsonl"))


def test_a_missing_account_is_said_before_answers(
    target_dir: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("wandb").teardown()  # it remembers the mode of an earlier run
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    said = refusal(capsys, command(target_dir, str(data), tmp_path / "run", "run.wandb=tiny"))
    assert said.startswith("run.wandb=tiny: ") and "WANDB_MODE=offline" in said
    assert not list((tmp_path / "run").glob("work/answers*.jsonl"))
