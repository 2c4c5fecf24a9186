"""scripts/bench/adapt.py on a tiny pair: the answers of all phases are compared, and the trainer reports its steps."""

import json
from pathlib import Path

import pytest

from scripts.bench import adapt as program


def test_phases_are_measured_against_time(target_dir: Path, drafter_dir: Path, tmp_path: Path) -> None:
    words = ["--target", str(target_dir), "--drafter", str(drafter_dir), "--requests", "2", "--max-tokens", "6"]
    words += ["--max-model-len", "96", "--window", "0.5", "--short", "0.5", "--buffer", "0.1", "--prompts"]
    for name in "ab":
        file = tmp_path / f"{name}.jsonl"
        file.write_text("".join(json.dumps({"prompt": f"{name} {i}?"}) + "\n" for i in range(6)))
        words.append(f"{name}={file}")
    chat = [{"role": "user", "content": "a 1?"}, {"role": "assistant", "content": "one two three"}]
    (tmp_path / "answers.jsonl").write_text(json.dumps({"messages": chat}) + "\n")
    words += ["--answers", str(tmp_path / "answers.jsonl"), "--tune-steps", "1", "--tune-layers", "1"]
    output = tmp_path / "adapt.json"
    assert program.main([*words, "--phases", "a=1", "b=0.5", "tune", "a=0.5", "kill=0.5", "--output", str(output)]) == 0
    found = json.loads(output.read_text())
    kinds = ("plain", "adapted", "frozen")  # a slow machine has one row where a fast one has two
    places = {kind: list(dict.fromkeys((row["set"], row["target"]) for row in found[kind])) for kind in kinds}
    assert places["plain"] == [("a", 0), ("b", 0), ("a", 1)] and places["frozen"] == [("b", 0), ("a", 1)]
    assert places["adapted"] == [("a", 0), ("b", 0), ("a", 1)]
    assert "exit code -9" in found["adapted"][-1]["training"]["error"]
    rows = [row for kind in kinds for row in found[kind]]
    assert sum(row["compared"] for row in rows) > 0 and all(row["wrong"] == 0 for row in rows)
    assert all(row["tokens_per_step"] >= 1 and row["phase_second"] > 0 for row in rows)


def test_an_unknown_phase_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        program.main(["--target", "x", "--prompts", "a=b", "--phases", "c=1", "--output", str(tmp_path / "x.json")])
    assert "phase 'c=1' is neither tune nor kill=SECONDS nor one of a=SECONDS" in capsys.readouterr().err
