"""scripts/peers/vllm_requests.py without vllm: loads and their figures."""

import multiprocessing
import time
from pathlib import Path
from types import SimpleNamespace as Namespace
from typing import Any

import pytest

from scripts.peers import vllm_requests as program

TOKENS = 4  # per step and request, three of which were drafted


class Llm:
    """The part of vllm.LLM that the script uses: every step writes tokens for all requests."""

    def __init__(self, **options: Any) -> None:
        if options["model"] == "none":
            raise ValueError("no such\nmodel")
        self.llm_engine, self.engine_core, self.stopped = self, self, False
        self.most, self.drafts = options["max_num_seqs"], 0
        self.left: dict[str, int] = {}
        self.at_a_time: list[int] = []

    def add_request(self, name: str, prompt: dict[str, list[int]], params: Namespace) -> None:
        assert prompt["prompt_token_ids"] and params.output_kind == "delta"
        self.left[name] = params.max_tokens

    def step(self) -> list[Namespace]:
        time.sleep(0.005)  # seconds are rounded to milliseconds
        self.at_a_time.append(len(self.left))
        written = {name: min(TOKENS, left) for name, left in self.left.items()}
        self.drafts += len(written)
        self.left = {name: left - written[name] for name, left in self.left.items() if left > written[name]}
        return [
            Namespace(
                request_id=name,
                outputs=[Namespace(token_ids=[1] * n)],
                finished=name not in self.left,
                metrics=Namespace(last_token_ts=time.monotonic()),
                num_cached_tokens=0,
            )
            for name, n in written.items()
        ]

    def has_unfinished_requests(self) -> bool:
        return bool(self.left)

    def get_metrics(self) -> list[Namespace]:
        values = zip(program.COUNTERS, (self.drafts, (TOKENS - 1) * self.drafts), strict=True)
        return [Namespace(name=name, value=value) for name, value in values]

    def shutdown(self) -> None:
        self.stopped = True


def work_on(monkeypatch: pytest.MonkeyPatch, model: str, after: Path | None = None) -> tuple[list[Any], list[Llm]]:
    """The output for three prompts, two at a time, and the engines that were started."""
    started: list[Llm] = []

    def llm(**options: Any) -> Llm:
        started.append(Llm(**options))
        return started[-1]

    vllm = Namespace(
        __version__="0",
        LLM=llm,
        SamplingParams=Namespace,
        sampling_params=Namespace(RequestOutputKind=Namespace(DELTA="delta")),
    )
    monkeypatch.setattr(program, "import_vllm", lambda: vllm)
    context = multiprocessing.get_context("spawn")
    said = context.Queue()
    loads = [("a", 2, [[1], [2], [3]]), ("a", 1, [[1], [2], [3]])]
    work = program.Work(3, {"model": model, "max_num_seqs": 2}, {"max_tokens": 12}, loads, 2, after)
    (turn := context.Event()).set()
    program.work_on(work, said, context.Barrier(1), turn)
    reports = [said.get(timeout=60)]
    while isinstance(reports[-1][1], dict):  # the last is None or an error
        reports.append(said.get(timeout=60))
    return reports, started


def test_loads_are_decoded_in_turn_with_acceptance(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    go = tmp_path / "go"
    go.touch()
    (version, *rows, end), (llm,) = work_on(monkeypatch, "one", go)
    assert version == (3, {"vllm": "0"}) and end == (3, None) and llm.stopped
    assert [(row["set"], row["requests"], row["tau"]) for _, row in rows] == [("a", 2, TOKENS), ("a", 1, TOKENS)]
    # each load three times, once to warm up: two at a time, then the third alone; then all alone
    assert [n for n in llm.at_a_time if n] == 3 * [2, 2, 2, 1, 1, 1] + 3 * 9 * [1]
    for _, row in rows:
        assert len(row["every_tokens_per_second"]) == 2
        assert row["tokens_per_second"] == max(row["every_tokens_per_second"])
    for (_, row), counted in zip(rows, (24, 36), strict=True):  # the clock stops where none is left to follow
        assert row["tokens_per_second"] * row["seconds"] == pytest.approx(counted, rel=0.2)


def test_engine_start_failure_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    assert work_on(monkeypatch, "none") == ([(3, "vllm cannot start: no such model")], [])


def test_missing_vllm_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--target", "t", "--drafter", "d", "--prompts", "a=b", "--output", str(tmp_path / "o.json")]
    assert program.main(words) == 2
    assert "vllm" in capsys.readouterr().err
