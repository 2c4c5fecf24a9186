"""Several processes share the prompts of one command."""

import subprocess
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from forked import Module
from programs import Program, data_argv, lines, user, write

from dflash_toolkit import UserError
from dflash_toolkit.files import read_json
from dflash_toolkit.train.distributed import launch as launching
from dflash_toolkit.train.responses.shares import join_shares, share_file

TIMES = ("samples=2", "--greedy-first", "temperature=1.2", "--batch-size", "3", "--device", "cpu")


@pytest.fixture
def said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The output of processes, which are forked."""
    said = tmp_path / "said"
    forked = SimpleNamespace(Popen=partial(Module, said), TimeoutExpired=subprocess.TimeoutExpired)
    monkeypatch.setattr(launching, "subprocess", forked)
    return said


@pytest.mark.usefixtures("said")
def test_two_processes_write_the_same_file_as_one(dflash_data: Program, tmp_path: Path) -> None:
    talk = {"messages": [user("ask 1 of them"), {"role": "assistant", "content": "a"}, user("ask 2 of them")]}
    data = write(tmp_path / "p.jsonl", [*lines(tmp_path / "p.jsonl"), talk])
    dflash_data("--data", data, *TIMES, output="one.jsonl")
    dflash_data("--data", data, *TIMES, "--gpus", 2)
    assert dflash_data.rows() == dflash_data.rows("one.jsonl")
    one, two = (read_json(tmp_path / f"{name}.run.json") for name in ("one", "a"))
    assert one["finished"] == two["finished"] and one["speed"]["tokens"] == two["speed"]["tokens"]
    assert not [*tmp_path.glob("*.share*")]


def test_shares_of_a_stopped_run_count_for_any_number_of_processes(dflash_data: Program, tmp_path: Path) -> None:
    dflash_data(*TIMES, output="whole.jsonl")
    dflash_data(*TIMES)
    rows = dflash_data.rows()
    record = tmp_path / "a.run.json"
    values = {key: value for key, value in read_json(record).items() if key not in ("finished", "speed")}
    write(record, [values])
    write(dflash_data.output, rows[:5])
    write(share_file(dflash_data.output, 3), rows[7:11])
    said = dflash_data(*TIMES)
    missing = sum(len(row["tokens"]) - row["prompt_tokens"] for row in (*rows[5:7], *rows[11:]))
    assert any(line.startswith(f"{missing} tokens in") for line in said), "nothing is written twice"
    assert dflash_data.rows() == dflash_data.rows("whole.jsonl")


def test_row_in_two_shares_is_joined_once(tmp_path: Path) -> None:
    rows = [{"index": index, "sample": sample, "part": 0, "text": "x"} for sample in (0, 1) for index in (2, 0, 1)]
    output = write(tmp_path / "a.jsonl", rows[:4])
    write(share_file(output, 1), rows[2:])
    join_shares(output)
    assert lines(output) == sorted(rows, key=lambda row: (row["index"], row["sample"]))
    assert not share_file(output, 1).exists()


def test_shares_stay_when_they_cannot_be_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = write(tmp_path / "a.jsonl", [{"index": 1, "sample": 0, "part": 0}])
    write(share_file(output, 1), [{"index": 0, "sample": 0, "part": 0}])

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", full)
        with pytest.raises(UserError, match="No space left"):
            join_shares(output)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "a.jsonl.share1"]
    join_shares(output)
    assert [row["index"] for row in lines(output)] == [0, 1]


def test_a_mistake_of_several_processes_is_one_line(target_dir: Path, tmp_path: Path, said: Path) -> None:
    words = data_argv(target_dir, Path("/no/such.jsonl"), tmp_path / "a.jsonl", "--gpus", "2", "--device", "cpu")
    assert launching.launch("dflash_toolkit.train.data_cli", words, 2) == 2
    err = said.read_text()
    assert err.count("error:") == 1 and "/no/such.jsonl" in err and "Traceback" not in err


def test_a_refused_option_of_several_processes_is_one_line(
    target_dir: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = data_argv(target_dir, tmp_path / "p.jsonl", tmp_path / "a.jsonl", "--gpus", "2", "max_tokens=0")
    assert launching.launch("dflash_toolkit.train.data_cli", words, 2) == 2
    err = capfd.readouterr().err
    assert err.count("error:") == 1 and "max_tokens" in err and "Traceback" not in err
