"""scripts/bench/sharded_target.py on two processes of a CPU."""

import importlib
import json
import sys
from pathlib import Path

import pytest
from forked import run_several


def _bench(rank: int, output: Path) -> None:
    sys.argv = ["sharded_target.py", "--tiny", "--device", "cpu", "--steps", "1", "--output", str(output)]
    with open(output.with_suffix(".txt"), "a" if rank else "w") as sys.stdout:
        importlib.import_module("scripts.bench.sharded_target").main()


def test_a_sharded_target_is_timed_beside_a_whole_one(tmp_path: Path) -> None:
    pytest.importorskip("dflash_toolkit.train")
    output = tmp_path / "result.json"
    assert run_several(2, _bench, output) == [0, 0]
    result = json.loads(output.read_text())
    assert result["command"][1:] == ["scripts/bench/sharded_target.py", "--tiny", "--device", "cpu", "--steps", "1"]
    assert [row["processes_to_a_target"] for row in result["rows"]] == [2, 1] and result["processes"] == 2
    for row in result["rows"]:
        assert "error" not in row and row["tokens_per_second"] > 0 and row["sequences_per_second"] > 0
    table = output.with_suffix(".txt").read_text().splitlines()
    assert [line.split(" | ")[0] for line in table[2:]] == ["| 2", "| 1"], "the first process alone speaks"
