"""Without a network: one line that says so and what to give instead, no error of a client."""

import importlib
from pathlib import Path

import httpx
import pytest
from paths import ROOT

from dflash_toolkit.network import unreachable


def test_a_missing_network_differs_from_a_missing_file() -> None:
    with pytest.raises(httpx.ConnectError) as refused:
        httpx.get("http://127.0.0.1:9", trust_env=False)
    assert unreachable(refused.value)
    try:
        raise OSError("cannot load it") from refused.value
    except OSError as error:
        assert unreachable(error), "by what it came from"
    assert not unreachable(FileNotFoundError(2, "No such file or directory"))
    assert not unreachable(OSError("some/offline-model is not a local folder and is not a valid model identifier"))


def test_every_command_reports_an_unreachable_hub(
    target_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("datasets")  # conftest.py is offline, with an empty cache
    small = "drafter.layers=1 drafter.taps=2"
    commands = {
        f"dflash_toolkit.train.cli --target {target_dir} --output {tmp_path}/a {small}": "dataset "
        "mlabonne/open-perfectblend cannot be loaded without a network, and the hub cannot be reached; give a file",
        f"dflash_toolkit.train.cli --target no/such --output {tmp_path}/b": "target no/such: ",
        f"dflash_toolkit.train.data_cli --target {target_dir} --data no/such --output {tmp_path}/c.jsonl": "dataset "
        "no/such cannot be loaded without a network, and the hub cannot be reached; give a file",
        f"dflash_toolkit.evaluation.cli --target {target_dir} --drafter no/such --prompts "
        f"a={ROOT}/scripts/demo/prompts/count_report.jsonl": "drafter no/such: ",
        f"dflash_toolkit.doctor.cli --target {target_dir} --drafter no/such": "drafter no/such: ",
        "dflash_toolkit.serve.cli --target no/such --port 0": "target no/such: ",
    }
    for command, expected in commands.items():
        module, *argv = command.split()
        assert importlib.import_module(module).main(argv) == 2
        said = capsys.readouterr().err
        (error,) = (line for line in said.splitlines() if line.startswith("error: "))
        assert (
            error.removeprefix("error: ").removeprefix("--").startswith(expected)
            and "the hub cannot be reached; give " in error
        )
        assert "(" not in error and "Errno" not in said and "Traceback" not in said
