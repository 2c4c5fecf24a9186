"""scripts/bench/adapt.py on a tiny pair: every way serves the same answers, and the trainer reports its steps."""

import json
from pathlib import Path

import pytest

from scripts.bench import adapt as program


def test_ways_are_measured_against_time(
    target_dir: Path, drafter_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked, output = tmp_path / "asked.jsonl", tmp_path / "adapt.json"
    asked.write_text("".join(json.dumps({"prompt": f"what is {i}?"}) + "\n" for i in range(6)))
    words = ["--target", str(target_dir), "--drafter", str(drafter_dir), "--prompts", f"a={asked}"]
    words += [
        "--requests",
        "2",
        "--max-tokens",
        "6",
        "--max-model-len",
        "96",
        "--seconds",
        "1",
        "--ways",
        "plain",
        "frozen=0.5",
        "adapted",
        "--window",
        "0.5",
    ]
    assert program.main([*words, "--buffer", "0.1", "--output", str(output)]) == 0
    found = json.loads(output.read_text())
    assert list(found["ways"]) == ["plain", "frozen", "adapted"] and "plain: " in capsys.readouterr().out
    for way in found["ways"].values():
        assert way["wrong"] == 0 and len(way["rows"]) >= 1
        assert all(row["tokens_per_step"] >= 1 and row["second"] > 0 for row in way["rows"])
    training = found["ways"]["adapted"]["training"]
    assert training["error"] is None and training["promotions"] == 0
