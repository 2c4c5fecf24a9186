"""Threads that compute and threads that wait: set before torch is there, and the user's own word is kept."""

import os
import subprocess
import sys

import pytest
from paths import ROOT

from dflash_toolkit.threads import WAITING

PROGRAMS = {
    "train.cli": [],
    "train.data_cli": ["--data", "x", "--output", "x.jsonl"],
    "serve.cli": ["--port", "0"],
    "dflash_toolkit.evaluation.cli": ["--drafter", "./no", "--prompts", "a=scripts/demo/prompts/count_report.jsonl"],
    "dflash_toolkit.doctor.cli": ["--drafter", "./no"],
}
RUN = f"""
import importlib, os, sys
class Watch:  # sees the environment that torch, and OpenMP beneath it, is loaded with
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print({{k: v for k, v in os.environ.items() if k in {WAITING}}})
            sys.meta_path.remove(self)
sys.meta_path.insert(0, Watch())
importlib.import_module(sys.argv[1]).main(sys.argv[2:])
import torch
print(torch.get_num_threads())
"""


def run(script: str, *words: str, **extra: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in WAITING} | extra
    return subprocess.run(
        [sys.executable, "-c", script, *words], cwd=ROOT, env=environment, capture_output=True, text=True
    )


@pytest.mark.parametrize("program", PROGRAMS)
def test_threads_are_as_many_as_asked_for_and_sleep_when_idle(program: str) -> None:
    words = ["--target", "./nowhere", "--threads", "3", *PROGRAMS[program]]
    done = run(RUN, program, *words, OMP_NUM_THREADS="2")
    assert done.stdout.splitlines() == ["{'OMP_WAIT_POLICY': 'PASSIVE'}", "3"], done.stderr
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


@pytest.mark.parametrize("own", [{"OMP_WAIT_POLICY": "ACTIVE"}, {"GOMP_SPINCOUNT": "7"}, {"KMP_BLOCKTIME": "1"}])
def test_the_users_own_way_of_waiting_is_kept(own: dict[str, str]) -> None:
    script = f"import os, train; print({{k: v for k, v in os.environ.items() if k in {WAITING}}})"
    assert run(script, **own).stdout == f"{own}\n"


def test_without_a_number_there_are_as_many_threads_as_the_environment_says() -> None:
    script = "import train; from dflash_toolkit.threads import use_threads; use_threads(None)\n"
    script += "import torch; print(torch.get_num_threads())"
    assert run(script, OMP_NUM_THREADS="1").stdout == "1\n"
