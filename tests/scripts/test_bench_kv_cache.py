"""scripts/bench/kv_cache.py on a tiny pair; its times need a GPU."""

import json
from pathlib import Path

import pytest

from scripts.bench import kv_cache as program


def test_answers_of_both_caches_are_compared(tmp_path: Path, target_dir: Path, drafter_dir: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "Why?"}\n{"prompt": "Who wrote the book?"}\n')
    code = program.main([
        "--target", str(target_dir), "--drafter", str(drafter_dir), "--prompts", f"a={tmp_path}/a.jsonl",
        "--max-tokens", "24", "--requests", "2", "--output", str(tmp_path / "o.json"),
    ])  # fmt: skip
    found = json.loads((tmp_path / "o.json").read_text())
    assert code == 0 and found["prompts"] == 2 and 2 <= found["tokens"] <= 48
    assert found["same_tokens_16_bits"] == 1.0 and found["regret_nats_16_bits"] == pytest.approx(0.0, abs=1e-6)
    assert 0.2 < found["same_tokens"] <= 1.0 and 0.0 <= found["regret_nats"] < 2.0
    assert set(found["acceptance_length"]) == {"auto", "fp8"}


def test_a_shape_or_a_target_is_needed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(["--output", str(tmp_path / "o.json")]) == 2
    assert "give either --shape or --target" in capsys.readouterr().err
