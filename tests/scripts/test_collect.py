"""scripts/docs/collect.py: raw results become published rows."""

import json
import random
import statistics
from pathlib import Path
from typing import Any

import pytest

from scripts.docs import collect

MACHINE = {"gpu": "H", "versions": {"torch": "2.11.0+cu130"}, "command": ["python", "a b.py"]}


@pytest.mark.parametrize(("requests", "k", "accept"), [(1, 3, 0.8), (5, 7, 0.865), (40, 2, 0.3), (3, 0, 0.5)])
def test_steps_of_slowest_request_match_simulation(requests: int, k: int, accept: float) -> None:
    dice = random.Random(0)

    def steps() -> int:
        written = count = 0
        while written < 30:
            written, count = written + 1 + next((i for i in range(k) if dice.random() >= accept), k), count + 1
        return count

    thrown = [max(steps() for _ in range(requests)) for _ in range(2000)]
    error = statistics.stdev(thrown) / len(thrown) ** 0.5
    found = collect.steps_of_longest(requests, 30, k, accept)
    assert found == pytest.approx(statistics.mean(thrown), abs=4 * error + 1e-9)


def test_server_rows_use_the_faster_vllm(tmp_path: Path) -> None:
    def served(speeds: dict[int, float]) -> list[dict[str, Any]]:
        rows = [
            {"clients": n, "streamed": True, "tokens_per_second": speed, "first_ms": n} for n, speed in speeds.items()
        ]
        return rows + [row | {"streamed": False, "tokens_per_second": 1e9} for row in rows]

    files = {
        "serve_ours": {"engine": [{"clients": n, "tokens_per_second": 9.0} for n in (1, 8)]}
        | {"server": served({1: 7, 8: 8})},
        "serve_vllm_k15": {"server": served({1: 3, 8: 4})},
        "serve_vllm_adaptive": {"server": served({1: 2, 8: 6})},
    }
    for name, found in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(MACHINE | found))
    raw = collect.Raw(tmp_path, "abc", "day")
    assert [(row["engine"], row["ours"], row["vllm"]) for row in collect.server(raw)] == [(9, 7, 3), (9, 8, 6)]
    assert raw.runs == [
        {"gpu": "H", "versions": {"torch": "2.11.0"}, "commit": "abc", "date": "day", "commands": ["python 'a b.py'"]}
    ]


def test_steps_of_both_engines_share_a_row(tmp_path: Path) -> None:
    ours = [
        {"batch": 8, "block": block, "ms_of_a_full_step": ms, "roofline_ms": 1.0} for block, ms in ((1, 2.0), (8, 4.0))
    ]
    files = {f"steps-{shape}": {"rows": ours} for shape in ("gemma-4-31b", "qwen3-8b-awq")}
    files["vllm-gemma-4-31b-k7"] = {"engines": {"k7": {"rows": [{"batch": 8, "ms_per_step": 5.0}]}}}
    for name, found in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(MACHINE | found))
    rows = list(collect.step_times(collect.Raw(tmp_path, "abc", "day")))
    assert [row.get("vllm_drafts") for row in rows] == [5.0, None], "shapes without a file are left out"
    assert rows[0] == {"target": "Gemma 4 31B", "requests": 8, "plain": 2.0, "drafts": 4.0, "share": 0.5} | {
        "vllm_drafts": 5.0
    }


def test_trained_drafters_become_points_of_the_curve(tmp_path: Path) -> None:
    run = {"kind": "dspine", "gpu_minutes": {"training": 8, "total": 11.0}, "prompts": 2000, "cost": 0.55}
    run |= {"response_tokens": 5_000_000, "seen_tokens": 36_000_000, "pooled": {"tokens_per_second": 900.0}}
    run |= {"loads": {"32": {"tokens_per_second": 9000.0}}}
    run |= {"sets": {name: {"tau_pooled": 2.5} for name in collect.SETS}}
    found = MACHINE | {"gpus": 4, "target": "Q-1.5B-Instruct", "target_parameters": 1.5e9, "runs": [run]}
    (tmp_path / "curve-15.json").write_text(json.dumps(found | {"gpu": "NVIDIA H200"}))
    raw = collect.Raw(tmp_path, "abc", "day")
    (row,) = collect.training_minutes(raw)
    expected = {"target": "Q-1.5B", "parameters": 1.5, "gpu": "H200", "seen_tokens": 36.0, "gsm8k": 2.5}
    assert row.items() >= (expected | {"speed": 900.0, "speed_32": 9000.0}).items()
    assert raw.runs[0]["gpu"] == "4 x NVIDIA H200"
    with pytest.raises(FileNotFoundError):
        list(collect.training_minutes(collect.Raw(tmp_path / "none", "abc", "day")))


def test_live_rows_are_means_of_three_windows(tmp_path: Path) -> None:
    rows = [
        {"second": 5.0 * i, "tokens_per_second": 100.0 * i, "tokens_per_step": float(i), "drafter_version": i}
        for i in range(1, 6)
    ]
    ways = {"plain": {"rows": rows[:2]}, "adapted": {"rows": rows}}
    (tmp_path / "live.json").write_text(json.dumps(MACHINE | {"ways": ways}))
    found = list(collect.live(collect.Raw(tmp_path, "abc", "day")))
    assert found == [{"seconds": 15.0, "plain": 150.0, "adapted": 200.0, "tau": 2.0, "version": 3}]


def test_compact_files_hold_the_same_json() -> None:
    run = {"gpu": "H", "commands": ["a", "b"]}
    table = {"runs": [run, run], "columns": [["µs", "a"]], "rows": [{"a": 1.5}, {"a": None}], "chart": {"x": "a"}}
    text = collect.compact(table)
    assert json.loads(text) == table and text.count("\n") < 25
