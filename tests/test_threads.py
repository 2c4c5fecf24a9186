"""Threads that compute and threads that wait: set before torch is there, and the user's own word is kept."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from paths import ROOT

from dflash_toolkit import threads
from dflash_toolkit.threads import SPINS, WAITING, usable_cores

PROGRAMS = [
    "dflash_toolkit.train.cli --target ./no",
    "dflash_toolkit.train.data_cli --target ./no --data x --output x.jsonl",
    "dflash_toolkit.serve.cli --target ./no --port 0",
    "dflash_toolkit.evaluation.cli --target ./no --drafter ./no --prompts a=scripts/demo/prompts/count_report.jsonl",
    "dflash_toolkit.doctor.cli --target ./no --drafter ./no",
]


def run(script: str, **extra: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in WAITING} | extra
    return subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize(
    "package", ["dflash_toolkit.train", "dflash_toolkit.serve", "dflash_toolkit.evaluation", "dflash_toolkit.doctor"]
)
def test_idle_threads_sleep_from_the_import_of_torch(package: str) -> None:
    script = f"import os, sys, {package}; print('torch' in sys.modules, *map(os.environ.get, {WAITING}))"
    assert run(script).stdout == f"False PASSIVE {SPINS} None\n"


def test_every_command_uses_the_requested_thread_count(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    before = torch.get_num_threads()
    try:
        for threads, words in enumerate(PROGRAMS, before + 1):
            module, *argv = words.split()
            assert importlib.import_module(module).main([*argv, "--threads", str(threads)]) == 2
            assert torch.get_num_threads() == threads and capsys.readouterr().err.count("error: ") == 1
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("own", [{"OMP_WAIT_POLICY": "ACTIVE"}, {"GOMP_SPINCOUNT": "7"}, {"KMP_BLOCKTIME": "1"}])
def test_the_users_wait_policy_is_kept(own: dict[str, str]) -> None:
    script = f"import os, dflash_toolkit.train; print({{k: v for k, v in os.environ.items() if k in {WAITING}}})"
    assert run(script, **own).stdout == f"{own}\n"


def test_the_default_number_of_threads_is_the_environments() -> None:
    script = "import dflash_toolkit.train; from dflash_toolkit.threads import use_threads; use_threads(None)\n"
    script += "import torch; print(torch.get_num_threads())"
    assert run(script, OMP_NUM_THREADS="1").stdout == "1\n"


@pytest.mark.parametrize(
    ("quota", "expected"), [("400000 100000", 4), ("50000 100000", 1), ("max 100000", 24), ("", 24)]
)
def test_usable_cores_respect_affinity_and_container_limit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, quota: str, expected: int
) -> None:
    (tmp_path / "cpu.max").write_text(quota)
    monkeypatch.setattr(threads, "QUOTA", tmp_path / "cpu.max")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(24)), raising=False)
    assert usable_cores() == expected
    (tmp_path / "cpu.max").unlink()
    assert usable_cores() == 24, "not every system has the file"
