"""scripts/peers/vllm_workloads.py without vllm: options of its engines, jobs and mistakes."""

import importlib.util
from pathlib import Path
from types import SimpleNamespace as Namespace
from typing import Any

import pytest

from dflash_toolkit.files import read_json
from scripts import traffic
from scripts.peers import vllm_requests
from scripts.peers import vllm_workloads as program
from scripts.traffic import Workload, cells_of

SMALL = {
    "chat": Workload(24, 8, {2: 1.0}),
    "agent": Workload(40, 8, {1: 1.5}, shared=0.5),
    "mixed": Workload(24, 4, {2: None}, arriving=48),
    "first-token-16": Workload(16, 1, {1: 1.0}),
}
STEP = 0.5  # seconds of a step on the clock of the engine


class Llm:
    """The part of vllm.LLM that the script uses: two tokens per step after the first; prompts of 40 and more take
    three steps."""

    def __init__(self, **options: Any) -> None:
        if options["model"] == "none":
            raise ValueError("no such\nmodel")
        self.llm_engine, self.engine_core, self.stopped = self, self, False
        self.clock = 0.0
        self.requests: dict[str, Namespace] = {}
        self.aborted: list[str] = []

    def add_request(self, name: str, prompt: dict[str, list[int]], params: Namespace) -> None:
        assert params.output_kind == "delta" and params.ignore_eos
        ids = prompt["prompt_token_ids"]
        wait = 3 if len(ids) >= 40 else 1
        self.requests[name] = Namespace(left=params.max_tokens, wait=wait, first=True)

    def abort_request(self, names: list[str]) -> None:
        self.aborted += names

    def step(self) -> list[Namespace]:
        self.clock += STEP
        outputs = []
        for name, request in list(self.requests.items()):
            request.wait -= 1
            if request.wait > 0:
                continue
            count = 1 if request.first else min(2, request.left)
            request.first, request.left = False, request.left - count
            outputs.append(
                Namespace(
                    request_id=name, outputs=[Namespace(token_ids=[1] * count)], finished=not request.left,
                    metrics=Namespace(last_token_ts=self.clock), num_cached_tokens=16,
                )
            )  # fmt: skip
            if not request.left or name in self.aborted:
                del self.requests[name]
        return outputs

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    def shutdown(self) -> None:
        self.stopped = True


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Llm]:
    engines: list[Llm] = []

    def llm(**options: Any) -> Llm:
        engines.append(Llm(**options))
        return engines[-1]

    kinds = Namespace(RequestOutputKind=Namespace(DELTA="delta"))
    vllm = Namespace(__version__="0.33", LLM=llm, SamplingParams=Namespace, sampling_params=kinds)
    monkeypatch.setattr(program, "import_vllm", lambda: vllm)
    monkeypatch.setattr(traffic, "WORKLOADS", SMALL)
    monkeypatch.setattr(vllm_requests, "time", Namespace(monotonic=lambda: engines[-1].clock))
    return engines


def arguments(tmp_path: Path, *words: str, **changes: Any) -> Any:
    values = {
        "shape": "smollm2", "target": None, "drafter": None, "prompts": [], "workload": list(traffic.WORKLOADS),
        "requests": [], "ways": None, "accept": 0.5, "repeats": 1, "gpu_memory_utilization": 0.5,
        "output": tmp_path / "o.json", "argv": [],
    }  # fmt: skip
    return Namespace(**values | changes)


def work_on(tmp_path: Path, model: str = "one") -> dict[str, Any]:
    args = arguments(tmp_path)
    result = program.heading("peers/vllm_workloads.py", "vllm", args)
    return program.measure(program.Work("k3", {"model": model}, args, 300, result))


def test_vllm_jobs_are_timed_on_the_clock_of_its_engine(started: list[Llm], tmp_path: Path) -> None:
    result = work_on(tmp_path)
    assert result == read_json(tmp_path / "o.json") and result["engine"] == "vllm"
    assert result["versions"]["vllm"] == "0.33" and started[0].stopped
    chat, agent, mixed, first = result["rows"]
    assert chat["tokens"] == 16 and chat["decoded_tokens"] == 14 and chat["cached_tokens"] == 32
    assert chat["decode_tokens_per_second"] == pytest.approx(14 / (4 * STEP)), "seven tokens in four steps"
    assert chat["inter_token_ms"] == {"p50": pytest.approx(1e3 * STEP), "p99": pytest.approx(1e3 * STEP)}
    assert agent["cached_tokens"] == agent["turn_before"]["cached_tokens"] == 16
    assert mixed["seconds"] == 3 * STEP and agent["first_token_ms"] == 1e3 * 3 * STEP
    assert mixed["whole_tokens_per_second"] == pytest.approx(2 * 2 * 3 / mixed["seconds"])
    assert mixed["p99_to_quiet"] == pytest.approx(1.0) and len(started[0].aborted) == 4, "two requests, two runs"
    assert first["tokens"] == 1 and first["decode_tokens_per_second"] is None


def test_engine_that_cannot_start_is_one_line(started: list[Llm], tmp_path: Path) -> None:
    with pytest.raises(program.UserError, match="vllm cannot start: no such model"):
        work_on(tmp_path, "none")
    assert not started


def test_shape_options_have_long_contexts_and_a_prefix_cache(tmp_path: Path) -> None:
    cells = cells_of(["agent", "mixed"], [16])
    (tmp_path / "a").mkdir()
    options = program.options_of("k7", cells, arguments(tmp_path, shape="qwen3-8b"), tmp_path / "a")
    assert options["max_model_len"] == 32400 and options["max_num_seqs"] == 17
    assert options["enable_prefix_caching"] and options["max_num_batched_tokens"] == 16384
    assert options["speculative_config"]["num_speculative_tokens"] == 7


def test_pair_options_have_adaptive_verification(target_dir: Path, drafter_dir: Path, tmp_path: Path) -> None:
    args = arguments(tmp_path, shape=None, target=str(target_dir), drafter=str(drafter_dir))
    cells = cells_of(["chat"], [4])
    adaptive = program.options_of("adaptive", cells, args, tmp_path)["speculative_config"]
    fixed = program.options_of("k3", cells, args, tmp_path)["speculative_config"]
    assert adaptive["enable_adaptive_verification"] and adaptive["num_speculative_tokens"] == 7, "the drafter's most"
    assert fixed["num_speculative_tokens"] == 3 and "enable_adaptive_verification" not in fixed
    assert "speculative_config" not in program.options_of("plain", cells, args, tmp_path)
    with pytest.raises(program.UserError, match="--ways 'k9': the drafter drafts at most 7 tokens"):
        program.options_of("k9", cells, args, tmp_path)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--workload", "chats"], "--workload 'chats' is not known"),
        (["--ways", "adaptive"], "--ways 'adaptive' is not known"),
        (["--ways", "blocks"], "--ways 'blocks' is not known"),
        ([], "vllm"),
    ],
)
def test_mistakes_are_one_line(words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if importlib.util.find_spec("vllm"):
        pytest.skip("vllm is installed")
    assert program.main(["--shape", "smollm2", "--output", str(tmp_path / "o.json"), *words]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1 and not list(tmp_path.iterdir())
