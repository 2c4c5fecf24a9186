"""A result file describes its run."""

import fcntl
import platform
import sys
from pathlib import Path

import pytest
import torch

from scripts.measure import setting, turn, without_folders, without_output


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ([], []),
        (["--batch", "1", "8"], ["--batch", "1", "8"]),
        (["--output", "/home/me/step.json", "--batch", "1"], ["--batch", "1"]),
        (["--batch", "1", "--output", "step.json"], ["--batch", "1"]),
    ],
)
def test_result_command_omits_the_output_path(given: list[str], kept: list[str]) -> None:
    assert without_output(given) == kept


@pytest.mark.parametrize(
    ("given", "kept"),
    [("a=/w/x/a.jsonl[8:]", "a=a.jsonl[8:]"), ("/o/drafter-8m", "drafter-8m"), ("model/part", "model/part")],
)
def test_result_command_omits_local_folders(given: str, kept: str) -> None:
    assert without_folders(given) == kept


def test_a_result_names_machine_versions_and_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/home/me/scripts/bench/step.py", "--batch", "8", "--output", "/home/me/x.json"])
    found = setting("bench/step.py")
    assert found["command"] == ["python", "scripts/bench/step.py", "--batch", "8"]
    assert found["versions"]["python"] == platform.python_version()
    assert found["versions"]["torch"] == torch.__version__ or torch.__version__.startswith(found["versions"]["torch"])
    assert found["gpu"].startswith("cpu, ") or torch.cuda.is_available()
    assert setting("bench/step.py", ["--shape", "tiny"])["command"][2:] == ["--shape", "tiny"]


def test_engines_that_start_together_are_timed_in_turns(tmp_path: Path) -> None:
    (tmp_path / "ready-1").touch()
    with turn((str(tmp_path), "2")), open(tmp_path / "timed") as other, pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with open(tmp_path / "timed") as other:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
