"""scripts/bench/target_features.py on tiny shapes: what it writes, and that it sees documents that are not apart."""

import json
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from dflash_toolkit.models import packed
from scripts.bench import target_features

TINY = ["--tiny", "--steps", "1", "--device", "cpu"]


def test_packed_features_are_timed_and_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert target_features.main([*TINY, "--output", str(tmp_path / "found.json")]) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["command"][1:] == ["scripts/bench/target_features.py", *TINY]
    experts, nets = found["results"]
    assert (experts["experts"], nets["experts"], nets["flash_linear_attention"]) == ("grouped_mm", None, None)
    rows = [*experts["rows"], *nets["rows"]]
    assert [(row["documents"], row["tokens"]) for row in rows] == [*target_features.TINY_ROWS] * 2
    for row in rows:
        assert row["agrees"] and row["distance_largest"] < 1e-5 and row["neighbours"] < 1e-6
        assert row["distance_mixed"] > 1e-2 and row["packed_tokens_per_second"] > 0
    assert len(capsys.readouterr().out.splitlines()) == 5


def test_documents_that_see_one_another_are_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def mixed(own: Any, lengths: Any, ends: Tensor, *qkv: Tensor, cu_seqlens: Tensor, **others: Any) -> Any:
        return own(*qkv, **others)

    monkeypatch.setattr(packed, "delta_rule", mixed)
    assert target_features.main([*TINY, "--shapes", "qwen3.5-9b"]) == 1
    assert "DIFFERS" in capsys.readouterr().out
