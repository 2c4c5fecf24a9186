"""scripts/bench/workloads.py on tiny pairs: figures of jobs, the prefix cache, mistakes and the comparison."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from paths import ROOT
from programs import says, write
from tiny_shape import tiny_shape

from dflash_toolkit.files import read_json, write_json
from scripts import traffic
from scripts.bench import workloads as program
from scripts.traffic import Answer, Workload

__all__ = ["tiny_shape"]  # a fixture
FULL = traffic.WORKLOADS
SMALL = {
    "chat": Workload(24, 8, {1: 1.4, 2: 1.3}),
    "agent": Workload(160, 16, {1: 1.5}, shared=0.8),
    "mixed": Workload(24, 4, {2: None}, arriving=200),
    "first-token-16": Workload(16, 1, {1: 1.0}),
    "first-token-32": Workload(32, 1, {1: 1.0}),
}


@pytest.fixture(autouse=True)
def small_workloads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traffic, "WORKLOADS", SMALL)


def check_row(row: dict[str, Any]) -> None:
    requests, gaps = row["requests"], row["inter_token_ms"]
    assert row["tokens"] == requests * row["output"]
    assert row["whole_tokens_per_second"] == pytest.approx(row["tokens"] / row["seconds"])
    assert 0 < row["first_token_ms"] <= 1e3 * row["seconds"] * (1 + 1e-9)
    assert 0 <= row["decoded_tokens"] <= row["tokens"] - requests
    assert row["seconds"] == sorted(row["every_seconds"])[(len(row["every_seconds"]) - 1) // 2]
    if row["output"] > 1:
        assert 0 < gaps["p50"] <= gaps["p99"] <= 1e3 * row["seconds"]
    else:
        assert gaps == {"p50": None, "p99": None} and row["decode_tokens_per_second"] is None


def test_figures_of_a_real_pair_are_consistent(target_dir: Path, drafter_dir: Path, tmp_path: Path) -> None:
    text = write(tmp_path / "p.jsonl", says(*(f"ask {i} of it" for i in range(9))))
    pair = ["--target", str(target_dir), "--drafter", str(drafter_dir), "--prompts", f"own={text}", "--device", "cpu"]
    jobs = ["--workload", "chat", "agent", "first-token", "mixed", "--ways", "plain", "blocks", "trees"]
    jobs += ["--repeats", "1"]
    assert program.main([*pair, *jobs, "--output", str(tmp_path / "o.json")]) == 0
    found = read_json(tmp_path / "o.json")
    assert found["engine"] == "ours" and found["accept"] is None and str(tmp_path) not in str(found["command"])
    cells = [(name, requests) for name, workload in SMALL.items() for requests in workload.goals]
    assert sorted((row["workload"], row["requests"]) for row in found["rows"]) == sorted(3 * cells)
    for row in found["rows"]:
        if row["arriving"]:
            assert row["p99_to_quiet"] == row["inter_token_ms"]["p99"] / row["quiet_inter_token_ms"]["p99"]
            assert row["first_token_ms"] == 1e3 * row["seconds"]
            continue
        check_row(row)
        assert row["way"] != "plain" or row["tokens_per_step"] in (None, 1.0)
        if row["workload"] == "agent":
            check_row(
                row | row["turn_before"] | {"seconds": row["seconds"], "whole_tokens_per_second": 16 / row["seconds"]}
            )
            assert 64 <= row["cached_tokens"] <= 128 and row["turn_before"]["cached_tokens"] == 0
        else:
            assert row["cached_tokens"] == 0, "prompts are new"


def test_second_turn_continues_prompt_and_answer() -> None:
    sent: list[list[int]] = []

    class Echo:
        def submit(self, prompt: list[int], max_tokens: int) -> Answer:
            sent.append(prompt)
            return Answer(0.0, [7] * max_tokens, [(1.0, 1), (2.0, max_tokens - 1)], finished=True)

        def step(self) -> None: ...

        def cancel(self, answer: Answer) -> None: ...

    (cell,) = traffic.cells_of(["agent"], [1])
    traffic.run_cell(Echo(), cell, traffic.random_tokens(300))
    assert [len(prompt) for prompt in sent] == [112, 160]
    assert sent[1][:128] == sent[0] + [7] * 16


def test_workloads_may_have_their_own_numbers_of_requests() -> None:
    cells = traffic.cells_of(["chat=3,5", "agent", "first-token-16=4"], [])
    assert [(cell.name, cell.requests) for cell in cells] == [
        ("chat", 3), ("chat", 5), ("agent", 1), ("first-token-16", 1),
    ]  # fmt: skip


def test_shapes_accept_at_random(tmp_path: Path) -> None:
    shape = ["--shape", "tiny", "--layers", "4", "--device", "cpu", "--workload", "chat", "--requests", "2"]
    accept = ["--accept", "0.999", "--repeats", "1", "--ways", "k7"]
    assert program.main([*shape, *accept, "--output", str(tmp_path / "o.json")]) == 0
    found = read_json(tmp_path / "o.json")
    (row,) = found["rows"]
    check_row(row)
    assert row["tokens_per_step"] == 7.0, "seven tokens after the first, in one step"
    assert found["accept"] == 0.999 and found["model"] == "tiny" and found["engines"]["k7"]["start_s"] > 0


def answer(submitted: float, *arrivals: tuple[float, int]) -> Answer:
    tokens = [1] * sum(count for _, count in arrivals)
    return Answer(submitted, tokens, list(arrivals), finished=True)


def test_figures_come_from_times_of_arrival() -> None:
    answers = [answer(0.0, (1.0, 1), (2.0, 4), (4.0, 3)), answer(0.0, (3.0, 1), (5.0, 7))]
    found = traffic.figures(answers)
    assert found["tokens"] == 16 and found["seconds"] == 5.0 and found["whole_tokens_per_second"] == 16 / 5
    assert found["decoded_tokens"] == 10 and found["decode_tokens_per_second"] == 10 / 2, "after the last first token"
    assert found["first_token_ms"] == 2000.0 and found["inter_token_ms"] == {"p50": 2000.0, "p99": 2000.0}
    assert found["tokens_per_step"] == 14 / 3


def test_run_with_the_median_time_counts() -> None:
    found = traffic.median_run([{"seconds": seconds} for seconds in (3.0, 1.0, 2.0)])
    assert found == {"seconds": 2.0, "every_seconds": [3.0, 1.0, 2.0]}


def test_prompts_from_text_end_with_a_conversation() -> None:
    source = traffic.text_tokens([[1, 2, 3], [4, 5]])
    for count in (1, 2, 7, 30):
        prompt = source(count)
        assert len(prompt) == count and prompt[-1] in (3, 5)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--workload", "chats"], "--workload 'chats' is not known; known: chat, agent"),
        (["--requests", "0"], "the numbers of requests of 'chat' are [0]; each must be >= 1"),
        (["--workload", "chat=1,x"], "the numbers of requests of 'chat=1,x' are [1, 0]"),
        (["--compare", "one.json"], "--compare needs our result and at least one of vLLM"),
        (["--ways", "tree"], "--ways 'tree' is not known"),
        (["--ways", "trees"], "--ways 'trees' is not known"),
        (["--accept", "1"], "--accept is 1.0; it must be between 0 and 1"),
        (["--repeats", "0"], "--repeats is 0"),
        (["--target", "t"], "give either --shape or --target"),
        (["--shape", "", "--target", "t"], "--target needs --drafter and --prompts"),
        (["--shape", "none"], "shape 'none' is not known"),
        (["--output", "/no/such/file.json"], "no such directory"),
    ],
)
def test_mistakes_are_one_line(words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "o.json"
    assert program.main(["--shape", "smollm2", "--device", "cpu", "--output", str(output), *words]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1 and not output.exists()


def result_of(path: Path, by: str, rows: list[dict[str, Any]], **more: Any) -> Path:
    write_json(path, {"engine": by, "gpu": "H200", "model": "m", "accept": 0.8, "rows": rows} | more)
    return path


def row_of(workload: str, way: str, seconds: float, **more: Any) -> dict[str, Any]:
    prompt, output, _, _, arriving = SMALL[workload]
    lengths = {"prompt": prompt, "output": output, "arriving": arriving}
    figures = {"seconds": seconds, "whole_tokens_per_second": 100 / seconds, "first_token_ms": 1e3 * seconds}
    gaps = {"inter_token_ms": {"p50": 1.0, "p99": 2.0}}
    return {"workload": workload, "requests": 1, "way": way} | lengths | figures | gaps | more


def test_comparison_uses_the_best_way_of_vllm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ours = result_of(tmp_path / "a", "ours", [
        row_of("chat", "plain", 4.0), row_of("chat", "blocks", 1.0), row_of("first-token-16", "plain", 2.0),
        row_of("first-token-16", "k3", 2.0), row_of("agent", "k3", 1.0), row_of("mixed", "k3", 1.0, p99_to_quiet=1.6),
    ])  # fmt: skip
    peer = result_of(tmp_path / "b", "vllm", [
        row_of("chat", "plain", 3.0), row_of("chat", "k3", 1.5), row_of("chat", "k7", 1.25),
        row_of("first-token-16", "plain", 1.0), row_of("first-token-16", "k7", 3.0),
        row_of("agent", "plain", 2.0), row_of("agent", "k7", 3.0),
    ])  # fmt: skip
    assert program.main(["--compare", str(ours), str(peer)]) == 0
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()[2:]]
    assert [(line[0], line[3], line[6], line[7]) for line in lines] == [
        ("chat", "plain", "0.75x", ""),
        ("chat", "k7", "1.25x", "1.40x"),
        ("first-token-16", "plain", "0.50x", ""),
        ("first-token-16", "k7", "1.50x", "1.00x"),
        ("agent", "plain", "2.00x", "1.50x"),
        ("mixed", "-", "1.60x", "at most 2.00x"),
    ]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"gpu": "H100"}, "gpu is 'H200' in"),
        ({"accept": 0.9}, "accept is 0.8"),
        ({"engine": "ours"}, "is no result of"),
    ],
)
def test_unlike_results_are_not_compared(
    more: dict[str, Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours, peer = result_of(tmp_path / "a", "ours", []), result_of(tmp_path / "b", "vllm", [], **more)
    assert program.main(["--compare", str(ours), str(peer)]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_workload_definitions_import_no_torch() -> None:
    code = "import sys, scripts.traffic; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_goals_are_those_of_the_published_table() -> None:
    found = {name: (w.prompt, w.output, w.shared, list(w.goals.values())) for name, w in FULL.items()}
    assert found["chat"] == (1000, 250, 0.0, [1.4, 1.3, 1.2, 1.15, 1.1, 1.1])
    assert found["retrieval"] == (8000, 250, 0.0, [1.2, 1.15, 1.1])
    assert found["agent"] == (32000, 400, 0.9, [1.5, 1.3, 1.2])
    assert [w.prompt for name, w in FULL.items() if name.startswith("first-token-")] == [512, 8192, 32000]
