"""The programs under scripts/ start in an environment that has the project installed, wherever they are called."""

import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from paths import ROOT

SCRIPTS = ROOT / "scripts"
HELP_OF_ALL = """
import runpy, sys
for path in sys.argv[1:]:
    sys.argv = [path, "--help"]
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as end:
        if not end.code:
            continue
    sys.exit(f"{path} --help does not end with 0")
"""


def test_every_script_prints_help(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    try:
        distribution("dflash-toolkit")
    except PackageNotFoundError:
        pytest.skip("the project is not installed here, only on the path")
    others = {"zlab.py", "vllm_bench.py", "vllm_routing.py"}  # for other environments
    others |= {
        "decode_sets.py",
        "faults.py",
        "fuzz_cases.py",
        "fuzz_values.py",
        "hooks.py",
        "measure.py",
        "shapes.py",
        "traffic.py",
        "training_lab.py",
    }  # no programs
    paths = [str(path) for path in sorted(SCRIPTS.rglob("*.py")) if path.name not in others]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", HELP_OF_ALL, *paths]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert len(paths) >= 9 and done.returncode == 0, done.stderr
    assert done.stdout.count("usage: ") >= len(paths)
