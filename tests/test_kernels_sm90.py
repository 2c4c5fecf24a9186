"""Every kernel compiles for Hopper without a GPU, and keeps its values in registers."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

HERE = Path(__file__).parent
KERNEL = re.compile(r"^def (\w+_kernel)\(", re.MULTILINE)


def test_kernels_compile_for_sm_90_without_spills() -> None:
    # the interpreter, which the other tests run in, replaces the compiler for a whole process
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(HERE / "sm90.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    sources = (HERE.parent / "dflash_toolkit/kernels").glob("*.py")
    kernels = {name for path in sources for name in KERNEL.findall(path.read_text())}
    assert {report["kernel"] for report in found.values()} == kernels, "every kernel has a case"
    assert len(found) >= 50
    assert {name: report["spills"] for name, report in found.items() if report["spills"]} == {}
    assert [name for name, report in found.items() if report["serialized"]] == []
    assert max(report["shared"] for report in found.values()) <= 227 * 1024
