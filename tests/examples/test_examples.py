"""The examples: the commands that each one gives can be run, and those that a CPU is enough for are run."""

import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from forked import Command, free_port
from option_parsers import PROGRAMS
from paths import ROOT

from dflash_toolkit.train.cli import main as train

EXAMPLES = ROOT / "examples"
SCRIPTS = sorted(EXAMPLES.glob("*.sh"))
# curl finds a server once that has written what it was given: a script ends its server when it is through
STAND_IN = """#!/bin/sh
case "$0" in */curl) test "$(tail -c 2 "$CALLS" 2>&1 | od -An -tx1 | tr -d ' ')" = 0a00; exit ;; esac
{ printf '%s\\0' "${0##*/}" "$@"; printf '\\n\\0'; } >> "$CALLS"
case "$0" in */vllm | */dflash-serve) exec sleep 60 ;; esac
"""
TINY = ["--drafter.layers=1", "--responses.max-tokens=8", "--optim.steps=2", "--loss.anchors=4", "--prompts.held-out=1"]


@pytest.fixture
def commands(tmp_path: Path) -> Callable[..., list[list[str]]]:
    """Runs a script with stand-ins for the programs; returns what each was given."""
    for name in (*PROGRAMS, "torchrun", "vllm", "curl", "python"):
        (tmp_path / name).write_text(STAND_IN)
        (tmp_path / name).chmod(0o755)

    def run(script: Path, *more: str, **variables: str) -> list[list[str]]:
        calls = tmp_path / "calls"
        calls.unlink(missing_ok=True)
        paths = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "CALLS": str(calls)}
        subprocess.run(["sh", script, *more], cwd=ROOT, env=os.environ | paths | variables, check=True, timeout=60)
        return [call.split("\0")[:-1] for call in calls.read_text().split("\n\0")[:-1]]

    return run


@pytest.mark.slow  # one waits for a server
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_every_command_of_an_example_can_be_run(script: Path, commands: Callable[..., list[list[str]]]) -> None:
    checked = 0
    for program, *words in commands(script):
        if program == "torchrun":
            launcher, trainer = words[: words.index("-m")], words[words.index("-m") + 1]
            assert launcher == ["--nproc-per-node", "8"] and trainer == "dflash_toolkit.train.cli"
            program, words = "dflash-train", words[words.index("-m") + 2 :]
        if program in PROGRAMS:
            PROGRAMS[program](words)
            checked += 1
        elif program == "python":
            assert (ROOT / words[0]).is_file()
    assert checked


@pytest.mark.slow
def test_a_drafter_is_trained_on_a_cpu_and_compared_with_another(
    commands: Callable[..., list[list[str]]],
    target_dir: Path,
    drafter_dir: Path,
    data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    places = {"TARGET": str(target_dir), "DATA": str(data), "OUTPUT": str(tmp_path / "run")}
    ((_, *words),) = commands(EXAMPLES / "train_cpu.sh", *TINY, **places)
    assert train(words) == 0
    sys.path.insert(0, str(EXAMPLES))
    import evaluate_two_drafters

    sys.path.remove(str(EXAMPLES))
    drafters = [str(drafter_dir), str(tmp_path / "run")]
    words = ["--target", str(target_dir), "--drafters", *drafters, "--output", str(tmp_path / "reports")]
    assert evaluate_two_drafters.main([*words, "--prompts", f"a={data}", "--limit", "1", "--max-tokens", "4"]) == 0
    assert f"Comparison: {tmp_path / 'reports' / 'compare.html'}" in capsys.readouterr().out.replace("\n", " ")
    assert {file.name for file in (tmp_path / "reports").iterdir()} >= {"0", "1", "compare.html", "compare.json"}


@pytest.mark.slow
def test_a_served_drafter_answers_the_question(
    commands: Callable[..., list[list[str]]],
    target_dir: Path,
    drafter_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    variables = {"TARGET": str(target_dir), "DRAFTER": str(drafter_dir), "PORT": str(free_port())}
    calls = commands(EXAMPLES / "serve_and_chat.sh", "--device", "cpu", **variables)
    words = {program: words for program, *words in calls}
    server = Command("dflash_toolkit.serve.cli", words["dflash-serve"], tmp_path)
    try:
        assert server.line().endswith("float32 on cpu)")
        monkeypatch.setattr(sys, "argv", words["python"])
        runpy.run_path(str(ROOT / words["python"][0]), run_name="__main__")
    finally:
        server.kill()
    assert capsys.readouterr().out.strip()


def test_a_target_and_its_drafter_are_trained_in_a_loop(
    target_dir: Path, drafter_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--target", str(target_dir), "--drafter", str(drafter_dir), "--rounds", "2", "--samples", "1"]
    example = runpy.run_path(str(EXAMPLES / "rl_loop.py"))
    assert example["main"]([*words, "--max-tokens", "8", "--learning-rate", "1e-2"]) == 0
    *rounds, last = capsys.readouterr().out.splitlines()
    assert [line[:7] for line in rounds] == ["round 0", "round 1"] and "tokens per step" in rounds[1]
    assert last == "target version 2, drafter version 2"
