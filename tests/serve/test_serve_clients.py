"""Other projects' clients against a tiny server: `make test-peers`.

DFLASH_PEERS_CLIENTS is a folder with an environment for each of them; DFLASH_PEERS_SITE has vLLM, whose benchmark needs
no device.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from conftest import make_drafter
from live_server import make_engine, serving
from paths import ROOT
from reciting import ARGUMENTS, SAYS, make_reciting

from dflash_toolkit import Target

pytestmark = [pytest.mark.peers, pytest.mark.timeout(600)]
KEY = "secret"
OFFLINE = {"HF_HUB_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}


@pytest.fixture(scope="module")
def target() -> Target:
    return make_reciting()


@pytest.fixture(scope="module")
def url(target: Target) -> Iterator[str]:
    with serving(make_engine(target, make_drafter(target), max_model_len=4096)) as url:
        yield url


@pytest.fixture(scope="module")
def tokenizer(target: Target, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("tokenizer"))
    target.tokenizer.save_pretrained(folder)
    target.model.config.save_pretrained(folder)
    return folder


def run(*words: str, **env: str) -> str:
    """Runs a program, which must succeed, and returns its output."""
    done = subprocess.run(words, env={**os.environ, **OFFLINE, **env}, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    return done.stdout


def program(client: str, name: str) -> str:
    """Returns a program in a client's environment."""
    folder = os.environ.get("DFLASH_PEERS_CLIENTS")
    if not folder:
        pytest.skip("DFLASH_PEERS_CLIENTS is not set: run `make test-peers`")
    return str(ROOT / folder / client / "bin" / name)


def counted(url: str) -> dict[str, float]:
    """Returns the draft counters in /metrics."""
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    pairs = [line.rpartition(" ") for line in lines if line.startswith("vllm:spec_decode_num")]
    return {name.partition("{")[0]: float(value) for name, _, value in pairs if "position" not in name}


@pytest.mark.parametrize("keys", [[], [KEY]], ids=["open", "keys"])
def test_schemathesis_finds_no_undescribed_reply(target: Target, keys: list[str], tmp_path: Path) -> None:
    """Also finds no 5xx, and no accepted body that the description excludes."""
    schemathesis = program("schemathesis", "schemathesis")
    header = ["-H", f"Authorization: Bearer {KEY}"] if keys else []
    engine = make_engine(target, make_drafter(target), max_model_len=128)
    with serving(engine, api_keys=keys) as url:
        # described bodies may still be refused: a prompt may be too long, a schema may have no grammar
        run(
            schemathesis, "run", f"{url}/openapi.json", *header, "--checks", "all",
            "--exclude-checks", "positive_data_acceptance", "--phases", "examples,coverage,fuzzing",
            "--max-examples", "60", "--seed", "1", "--max-response-time", "60", "--continue-on-failure",
            "--report-dir", str(tmp_path),
        )  # fmt: skip


@pytest.mark.parametrize(
    ("backend", "path"),
    [
        ("openai", "/v1/completions"),
        ("openai-chat", "/v1/chat/completions"),
        ("openai-responses", "/v1/responses"),
    ],
)
def test_vllm_bench_serve_prints_the_acceptance(url: str, tokenizer: str, backend: str, path: str) -> None:
    site = os.environ.get("DFLASH_PEERS_SITE")
    if not site:
        pytest.skip("DFLASH_PEERS_SITE is not set: run `make test-peers`")
    before = counted(url)
    output = run(
        sys.executable, str(ROOT / "scripts/peers/vllm_bench.py"), "--backend", backend, "--base-url", url,
        "--endpoint", path, "--model", "org/tiny", "--tokenizer", tokenizer, "--dataset-name", "random",
        "--random-input-len", "20", "--random-output-len", "12", "--num-prompts", "6", "--max-concurrency", "3",
        "--ignore-eos", "--disable-tqdm",
        PYTHONPATH=str(ROOT / site),
    )  # fmt: skip
    found = {name.strip(): float(value) for name, value in re.findall(r"^([^:\n]+):\s+([\d.]+)\s*$", output, re.M)}
    assert (found["Successful requests"], found["Failed requests"]) == (6, 0)
    assert found["Total generated tokens"] == 72
    brought = {name: value - before.get(name, 0) for name, value in counted(url).items()}
    drafts, accepted = (brought[f"vllm:spec_decode_num_{name}_total"] for name in ("drafts", "accepted_tokens"))
    assert (found["Drafts"], found["Accepted tokens"]) == (drafts, accepted) and drafts > 0
    assert found["Acceptance length"] == pytest.approx(1 + accepted / drafts, abs=0.01)


def test_aiperf_measures_and_reads_the_metrics(url: str, tokenizer: str, tmp_path: Path) -> None:
    aiperf = program("aiperf", "aiperf")
    run(
        aiperf, "profile", "-m", "org/tiny", "--url", url, "--endpoint-type", "chat", "--streaming",
        "--tokenizer", tokenizer, "--concurrency", "2", "--request-count", "6", "--isl", "20", "--osl", "10",
        "--use-server-token-count", "--extra-inputs", "ignore_eos:true", "--output-artifact-dir", str(tmp_path),
        HF_HUB_OFFLINE="",  # otherwise it treats a folder as a name on the hub
    )  # fmt: skip
    found = json.loads((tmp_path / "profile_export_aiperf.json").read_text())
    assert found["request_count"]["avg"] == 6 and found["output_sequence_length"]["avg"] == 10
    assert not found.get("error_summary")
    metrics = json.loads((tmp_path / "server_metrics_export.json").read_text())["metrics"]
    assert {f"vllm:spec_decode_num_{name}" for name in ("drafts", "draft_tokens", "accepted_tokens")} <= metrics.keys()


def test_guidellm_measures(url: str, tokenizer: str, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    run(
        program("guidellm", "guidellm"), "run", "--disable-progress", "--profile", "kind=concurrent,streams=2",
        "--backend", f"kind=openai_http,target={url},model=org/tiny", "--constraint", "kind=max_requests,count=6",
        "--tokenizer", f"kind=huggingface_auto,model={tokenizer}",
        "--data", "kind=synthetic_text,prompt_tokens=20,output_tokens=10", "--output", f"kind=json,path={report}",
    )  # fmt: skip
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    totals: dict[str, Any] = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (6, 0)
    assert benchmark["metrics"]["output_token_count"]["successful"]["mean"] == 10


@pytest.mark.parametrize(
    "client", ["openai", "langchain-openai", "litellm", "llama-index", "instructor", "openai-agents"]
)
def test_client_reads_chats_calls_and_shapes(url: str, client: str) -> None:
    """The newest releases; each also sends back what it got, with the results of the calls."""
    package = {"llama-index": "llama-index-llms-openai-like"}.get(client, client)
    script = str(ROOT / "scripts/peers/client_calls.py")
    found = json.loads(run(program(package, "python"), script, client, url, "org/tiny", PYTHONPATH="").splitlines()[-1])
    shapes = [found.pop(name) for name in ("shape", "called") if name in found]
    shapes += [found.pop("response")] if client == "instructor" else []
    assert all(shape["kind"] in ("x", "y") and isinstance(shape["sure"], bool) for shape in shapes)
    assert found.pop("calls", ["weather", "now"]) == ["weather", "now"]
    assert found.pop("unthought", SAYS["</think>"]) == SAYS["</think>"]
    assert set(found.values()) <= {SAYS["a"]} and (shapes or found)


def test_aider_gets_an_answer(url: str, tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text("print(1)\n")
    printed = run(
        program("aider-chat", "aider"), "--model", "openai/org/tiny", "--yes-always", "--no-git", "--map-tokens", "0",
        "--edit-format", "ask", "--no-show-model-warnings", "--no-check-update", "--analytics-disable", "--no-pretty",
        "--chat-history-file", str(tmp_path / "chat"), "--input-history-file", str(tmp_path / "input"),
        "--message", "Please: a", str(tmp_path / "code.py"),
        OPENAI_API_BASE=f"{url}/v1", OPENAI_API_KEY="none", HOME=str(tmp_path), PYTHONPATH="",
    )  # fmt: skip
    assert re.search(r"^Tokens: \d+ sent, [1-9]\d* received", printed, re.M) and "litellm." not in printed


def test_anthropic_reads_messages_streams_thinking_and_calls(url: str) -> None:
    """The script also checks that the client assembles each stream into the whole message."""
    script = str(ROOT / "scripts/peers/anthropic_calls.py")
    found = json.loads(run(program("anthropic", "python"), script, url, "org/tiny").splitlines()[-1])
    assert found["text"] == found["after"] == SAYS["a"] and found["counted"] == found["used"]
    assert found["thinking"] == ["thinking", "text"]
    assert (found["called"], found["stop_reason"]) == (ARGUMENTS, "tool_use")
    assert found["refused"] == "invalid_request_error"
