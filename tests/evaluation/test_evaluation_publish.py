"""Publishing of a report: model card, badge, and Weights & Biases."""

import json
import re
import shlex
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from wandb_runs import wandb_records

from dflash_toolkit.command_line import parse_cli
from dflash_toolkit.evaluation.cli import EvalConfig, main
from dflash_toolkit.evaluation.report.publish import shown_command

WRITTEN = "---\nlicense: mit\n---\r\n\n# Mine\n\nWords of mine.\n"


@pytest.fixture
def own_drafter(drafter_dir: Path, tmp_path: Path) -> Path:
    """Returns a drafter in a writable folder."""
    return Path(shutil.copytree(drafter_dir, tmp_path / "my-drafter"))


@pytest.fixture
def words(target_dir: Path, own_drafter: Path, tmp_path: Path) -> list[str]:
    prompts = tmp_path / "sky.jsonl"
    prompts.write_text(json.dumps({"prompt": "Why is the sky blue?"}) + "\n")
    return [
        "--target", str(target_dir), "--drafter", str(own_drafter), "--device", "cpu", "--prompts", f"sky={prompts}",
        "--max-tokens", "6", "--temperature", "0", "1", "--thinking", "false", "--output", str(tmp_path / "report"),
    ]  # fmt: skip


def overall(output: Path) -> dict[str, Any]:
    return json.loads((output / "report.json").read_text())["sections"][0]["overall"]


def test_write_model_card_replaces_only_the_report(
    words: list[str], own_drafter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    card = own_drafter / "README.md"
    card.write_bytes(WRITTEN.encode())
    assert main([*words, "--write-model-card"]) == 0
    text = card.read_bytes().decode()
    tau = overall(tmp_path / "report")["tau_pooled"]
    image = f"https://img.shields.io/badge/acceptance_length-{tau:.2f}_tokens_a_step-teal"
    assert text.startswith(WRITTEN) and text.count(image) == 1
    assert "shields.io" not in capsys.readouterr().out
    assert text.count("| sky | 1 |") == 2, "a table for each temperature"

    (command,) = re.findall(r"```bash\n(.*)\n```", text)
    again = shlex.split(command)[1:]
    assert "--write-model-card" not in again and "--output" not in again
    given, shown = (parse_cli(EvalConfig, line, "", "") for line in (words, again))
    assert (given.sampling, given.sets, given.target, given.drafter) == (
        shown.sampling, shown.sets, shown.target, shown.drafter,
    )  # fmt: skip

    card.write_bytes((text + "After.\n").encode())
    assert main([*words, "--write-model-card", "--max-tokens", "5"]) == 0
    later = card.read_bytes().decode()
    assert later.startswith(WRITTEN) and later.endswith("<!-- dflash-eval: end -->\nAfter.\n")
    assert later.count("dflash-eval: begin") == 1 and "--max-tokens 5" in later


def test_write_model_card_creates_a_missing_card(words: list[str], own_drafter: Path) -> None:
    assert main([*words, "--write-model-card", "--max-tokens", "1"]) == 0
    text = (own_drafter / "README.md").read_text()
    assert text.startswith("<!-- dflash-eval: begin -->\n\n![acceptance length: not measured](https://img.shields.io/")


@pytest.mark.parametrize(
    "damage", ["<!-- dflash-eval: begin -->", "<!-- dflash-eval: end --><!-- dflash-eval: begin -->"]
)
def test_a_damaged_card_is_refused_before_measuring(
    words: list[str], own_drafter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    (own_drafter / "README.md").write_text(damage)
    assert main([*words, "--write-model-card"]) == 2
    assert "README.md: the lines <!-- dflash-eval: begin --> and" in capsys.readouterr().err
    assert (own_drafter / "README.md").read_text() == damage and not (tmp_path / "report").exists()


def test_write_model_card_needs_a_local_drafter(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words, "--write-model-card", "--drafter", "z-lab/none"]) == 2
    assert "write-model-card: z-lab/none is not a directory" in capsys.readouterr().err


def test_shown_commands_have_no_secrets(words: list[str]) -> None:
    command = shown_command(parse_cli(EvalConfig, [*words, "--no-baseline", "--wandb", "mine"], "", ""))
    assert "--no-baseline" in command and "wandb" not in command and command.endswith("--thinking false")


# ---- Weights & Biases -----------------------------------------------------------------------------------------


def test_a_report_is_logged_to_wandb(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb").teardown()  # it keeps the settings of its first use in the process
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    assert main([*words, "--wandb", "tiny"]) == 0
    folder, deadline = tmp_path / "report/wandb", time.monotonic() + 120  # its own process may still be writing
    while not any(record.HasField("exit") for record in wandb_records(folder)):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    records = wandb_records(folder)
    runs = [record.run for record in records if record.HasField("run")]
    assert {run.project for run in runs} == {"tiny"}
    config = {item.key: json.loads(item.value_json) for run in runs for item in run.config.update}
    assert config["max_tokens"] == 6 and config["device"] == "cpu" and "wandb" not in config
    summary = {item.key: json.loads(item.value_json) for record in records for item in record.summary.update}
    figures = overall(tmp_path / "report")
    assert summary["greedy, no thinking/sky/tau_pooled"] == pytest.approx(figures["tau_pooled"])
    assert summary["temperature 1, no thinking/sky/requests"] == 1
    pages = [path.read_text() for path in folder.rglob("*.html")]
    assert pages == [(tmp_path / "report/report.html").read_text()]


def test_a_missing_wandb_account_is_refused_before_measuring(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("wandb").teardown()
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert main([*words, "--wandb", "tiny"]) == 2
    said = capsys.readouterr().err
    assert "error: wandb=tiny: " in said and "WANDB_MODE=offline" in said and not (tmp_path / "report").exists()
