"""Without a network: one line that says so and what to give instead, no error of a client."""

import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from paths import ROOT

from dflash_toolkit.network import unreachable

RUN = """
import importlib, sys
for words in sys.stdin.read().splitlines():
    module, *argv = words.split()
    print(importlib.import_module(module).main(argv), file=sys.stderr)
"""


def test_a_network_that_is_not_there_is_told_from_a_file_that_is_not() -> None:
    with pytest.raises(httpx.ConnectError) as refused:
        httpx.get("http://127.0.0.1:9", trust_env=False)
    assert unreachable(refused.value)
    try:
        raise OSError("cannot load it") from refused.value
    except OSError as error:
        assert unreachable(error), "by what it came from"
    assert not unreachable(FileNotFoundError(2, "No such file or directory"))
    assert not unreachable(OSError("some/offline-model is not a local folder and is not a valid model identifier"))


def test_every_command_says_that_the_hub_cannot_be_reached(target_dir: Path, tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    small = "drafter.layers=1 drafter.taps=2"
    commands = {
        f"train.cli --target {target_dir} --output {tmp_path}/a {small}": "dataset mlabonne/open-perfectblend cannot "
        "be loaded without a network, and the hub cannot be reached; give --data FILE",
        f"train.cli --target no/such --output {tmp_path}/b": "target no/such: ",
        f"train.data_cli --target {target_dir} --data no/such --output {tmp_path}/c.jsonl": "dataset no/such cannot be "
        "loaded without a network, and the hub cannot be reached; give --data FILE",
        f"dflash_toolkit.evaluation.cli --target {target_dir} --drafter no/such --prompts "
        "a=scripts/demo/prompts/count_report.jsonl": "drafter no/such: ",
        f"dflash_toolkit.doctor.cli --target {target_dir} --drafter no/such": "drafter no/such: ",
        "serve.cli --target no/such --port 0": "target no/such: ",
    }
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub")}
    typed, call = "\n".join(commands), [sys.executable, "-c", RUN]
    done = subprocess.run(call, cwd=ROOT, env=environment, input=typed, capture_output=True, text=True)
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ") or line in ("0", "1", "2")]
    assert lines[1::2] == ["2"] * len(commands), done.stderr
    for said, expected in zip(lines[::2], commands.values(), strict=True):
        assert said.startswith(f"error: {expected}") and "the hub cannot be reached; give " in said
        assert "Errno" not in said and "(" not in said
    assert "Errno" not in done.stderr and "Traceback" not in done.stderr
