"""scripts/bench/tree_load.py: answers of blocks, chains and trees, and the time of full loads."""

import json
from pathlib import Path

import pytest
from paths import ROOT


def test_all_tree_modes_give_equal_answers_and_time_full_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target_dir: Path, drafter_dir: Path
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts/bench"))
    import tree_load as script

    (tmp_path / "a.jsonl").write_text('{"prompt": "Why?"}\n{"prompt": "Who wrote the book?"}\n')
    (tmp_path / "b.jsonl").write_text('{"prompt": "One and one is two."}\n')
    monkeypatch.setattr(script, "WAYS", {name: {**way, "num_speculative_tokens": 3 * bool(way.get("draft_tree"))}
                                         for name, way in script.WAYS.items() if name != "blocks"})  # fmt: skip
    script.WAYS["chains"]["draft_tree"], script.WAYS["trees"]["draft_tree"] = 3, 5
    monkeypatch.setattr("sys.argv", [
        "tree_load.py", "--target", str(target_dir), "--drafter", str(drafter_dir), "--output",
        str(tmp_path / "o.json"), "--prompts", f"a={tmp_path}/a.jsonl", f"b={tmp_path}/b.jsonl", "--sets", "a", "mixed",
        "--requests", "2",
        "--rounds", "2", "--least", "3", "--repeats", "2", "--max-tokens", "6", "--max-model-len", "64",
        "--ways", "plain", "chains", "trees",
    ])  # fmt: skip
    assert script.main() == 0
    rows = json.loads((tmp_path / "o.json").read_text())["rows"]
    ways = "plain", "chains", "trees"
    assert [(r["set"], r["way"]) for r in rows] == [(name, way) for name in ("a", "mixed") for way in ways]
    assert all(r["same"] == 1.0 for r in rows)
    for row in rows:  # four answers of six tokens, two at a time, of which both end together
        assert row["tokens_per_second"] * row["seconds"] == pytest.approx(24, rel=0.1)
        assert row["longest_step_ms"] <= 1e3 * row["seconds"] * 1.1 + 1
    steps = [sum(row["rows"].values()) for row in rows if row["way"] == "plain"]
    assert all(16 <= count <= 28 for count in steps), "of the second and third time alone"
    assert all(row["tokens_per_second"] == max(row["every_tokens_per_second"]) for row in rows)
    assert rows[0]["tau_pooled"] == 1.0 and not rows[0]["tree_rows"] and any(n > 4 for n in map(int, rows[-1]["rows"]))
    assert rows[-1]["tree_rows"] == rows[-1]["rows"], "no step drafts without a tree where lengths are not chosen"
