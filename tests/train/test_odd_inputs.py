"""Inputs that are damaged, out of range or of another kind: one line that names them, as early as can be."""

import json
import lzma
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_drafter, make_target
from safetensors.torch import save_file
from test_data_cli import argv, write
from test_data_endpoint import Fake, fake, whole  # noqa: F401  # a fixture
from test_drafter import make_config
from test_train_guards import command
from test_train_odd import answers, read, refusal

import train.data_cli
from dflash_toolkit import UserError, save_drafter
from dflash_toolkit.config import read_yaml
from dflash_toolkit.data.sources import Source
from dflash_toolkit.fingerprint import TOKENS_BYTES
from dflash_toolkit.models.dflash.checkpoint import read_config
from train.cli import main
from train.config import OptimOptions, RunOptions
from train.data_cli import main as answer
from train.features.store import DiskStore, Stored
from train.responses.file import Match, read_training_rows, resume

DEEP = "[" * 100_000


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


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"block_size": 10**9}, "block_size is 1000000000"),
        ({"rope_theta": 0}, "rope_theta is 0.0; it must be a number > 0"),
        ({"rope_theta": "x"}, "'rope_theta' is 'x', of the wrong type"),
        ({"rope_theta": 10**400}, "'rope_theta' is 1000"),
        ({"rms_norm_eps": -1}, "rms_norm_eps is -1.0; it must be a number > 0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_drafter_s_number_out_of_range_is_named(
    changes: dict[str, Any], named: str, drafter_dir: Path, tmp_path: Path
) -> None:
    config = json.loads((drafter_dir / "config.json").read_text())
    config["dflash_config"].pop("block_size")
    config["rope_parameters"] |= {k: v for k, v in changes.items() if k == "rope_theta"}
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(UserError, match=named):
        read_config(tmp_path)


def test_an_infinite_rope_is_refused() -> None:
    with pytest.raises(ValueError, match="rope_theta is inf"):
        make_config(rope_theta=float("inf"))


# ---- files that hold something else ----------------------------------------------------------------------------


@pytest.mark.parametrize("text", [DEEP, f"[{'9' * 5000}]"], ids=["deep", "long"])
def test_json_that_python_does_not_read_is_one_line(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match=r"config\.json: not valid JSON"):
        list(Source(str(tmp_path / "config.json")).read())
    with pytest.raises(UserError, match=r"cannot read config\.json"):
        read_config(tmp_path)


def test_yaml_that_python_does_not_read_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(DEEP[:5000])
    with pytest.raises(UserError, match=r"a\.yaml: not valid YAML"):
        read_yaml(tmp_path / "a.yaml")


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


def test_answers_are_read_packed_and_without_a_last_newline(target_dir: Path, tmp_path: Path) -> None:
    plain = Path(answers(target_dir, tmp_path / "a.jsonl"))
    rows = read(target_dir, str(plain)).rows
    packed = tmp_path / "a.jsonl.xz"
    packed.write_bytes(lzma.compress(plain.read_bytes()))
    assert read(target_dir, str(packed)).rows == rows
    plain.write_bytes(plain.read_bytes()[:-1])
    assert read(target_dir, str(plain)).rows == rows
    plain.write_bytes(plain.read_bytes()[:-1])  # torn by a kill
    assert read(target_dir, str(plain)).rows == rows[:-1]


def test_a_last_line_without_its_newline_is_not_written_on(tmp_path: Path) -> None:
    row = {"index": 0, "sample": 0, "part": 0, "parts": 1, "prompt_tokens": 1, "tokens": [1, 2], "spans": [[1, 2]]}
    path = write(tmp_path / "a.jsonl", [row, row | {"index": 1}])
    first = path.read_bytes().splitlines(keepends=True)[0]
    path.write_bytes(path.read_bytes()[:-1])
    assert resume(path)[0] == {(0, 0)}
    assert path.read_bytes() == first


def test_what_was_left_out_before_a_kill_is_counted_after_it(tmp_path: Path) -> None:
    row = {"index": 0, "sample": 0, "part": 0, "parts": 2, "prompt_tokens": 1, "tokens": [1, 2], "spans": [[1, 2]]}
    first = row | {"left_out": ["later turns too long"]}
    torn = row | {"index": 1, "left_out": ["later turns too long"]}
    path = write(tmp_path / "a.jsonl", [first, row | {"part": 1}, torn])
    done, rows, _, left_out = resume(path)
    assert (done, rows, left_out) == ({(0, 0)}, 2, {"later turns too long": 1}), "the torn one will be asked again"


def test_bytes_that_are_no_text_are_not_repeated(target_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"a": "\xff' + b"x" * 10_000 + b'"}\n')
    with pytest.raises(UserError, match="line 1: not a row that dflash-data wrote") as found:
        read(target_dir, str(tmp_path / "a.jsonl"))
    assert len(str(found.value)) < 500


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


@pytest.mark.parametrize(
    "change",
    [{"tokens": [1, 300]}, {"tokens": [1, -7]}, {"tokens": [1, 10**21]}, {"spans": [[1]]}, {"tokens": [1, 2.0]}],
)
def test_a_damaged_row_of_answers_is_one_line(change: dict[str, Any], tmp_path: Path) -> None:
    row = {"index": 0, "prompt_tokens": 1, "tokens": [1, 2], "spans": [[1, 2]], "target": "t", "vocab_size": 300,
           "template_hash": "h", "sampler": {}}  # fmt: skip
    path = write(tmp_path / "answers.jsonl", [row, row | change])
    with pytest.raises(UserError, match=r"answers.jsonl, line 2: (not a row that|holds a token outside)"):
        read_training_rows([str(path)], Match("t", None, 300, "h"))


@pytest.mark.parametrize("lengths", [[2], [2, 2], [-1, 4]])
def test_a_shard_whose_parts_do_not_fit_is_one_line(lengths: list[int], tmp_path: Path) -> None:
    store = DiskStore(tmp_path, {})
    store.add(bytes(TOKENS_BYTES), Stored.of(torch.zeros(3, 4), torch.float32))
    store.flush()
    (shard,) = tmp_path.glob("*.safetensors")
    tensors = {"hidden": torch.zeros(3, 4), "lengths": torch.tensor(lengths)}
    tensors["keys"] = torch.zeros(2, dtype=torch.uint8)
    save_file(tensors, shard)
    with pytest.raises(UserError, match=r"not a shard of features .*do not fit.*remove it and run again"):
        DiskStore(tmp_path, {})


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


def test_a_drafter_that_computes_no_numbers_is_not_exported(tmp_path: Path) -> None:
    drafter = make_drafter(make_target())
    with torch.no_grad():
        for weight in drafter.parameters():
            weight.fill_(1e30)
    with pytest.raises(UserError, match=r"its training diverged: train again with a lower optim.learning_rate"):
        save_drafter(drafter, tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())


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
