"""dflash-serve --adapt: the drafter learns from the requests, and answers, metrics and routes show it."""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from bigram_targets import bigram_target
from conftest import make_drafter
from forked import Command, free_port

from dflash_toolkit import UserError, load_drafter, save_drafter
from dflash_toolkit.config import from_mapping
from dflash_toolkit.runtime import EngineOptions
from dflash_toolkit.serve.adapt import with_room
from dflash_toolkit.serve.config import ServeConfig
from dflash_toolkit.serve.keys import ADMIN_VARIABLE

LATE_S = 240
ADMIN = {"Authorization": "Bearer admin"}


@pytest.fixture
def models(tmp_path: Path) -> tuple[Path, Path]:
    """A target and a drafter that can learn it, on disk."""
    target = bigram_target(layers=8)
    target.model.save_pretrained(tmp_path / "target")
    target.tokenizer.save_pretrained(tmp_path / "target")
    save_drafter(make_drafter(target), tmp_path / "drafter")
    return tmp_path / "target", tmp_path / "drafter"


class Client:
    """Sends requests to a server."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}"

    def complete(self, prompt: list[int], **more: Any) -> dict[str, Any]:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 16, "temperature": 0, "ignore_eos": True} | more
        answer = httpx.post(f"{self._url}/v1/completions", json=body, timeout=LATE_S)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def drafter(self) -> dict[str, Any]:
        found: dict[str, Any] = httpx.get(f"{self._url}/v1/drafter", timeout=LATE_S).json()
        return found

    def metrics(self) -> str:
        return httpx.get(f"{self._url}/metrics", timeout=LATE_S).text

    def roll_back(self) -> httpx.Response:
        return httpx.post(f"{self._url}/v1/drafter/rollback", headers=ADMIN, timeout=LATE_S)

    def wait(self, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        ends = time.monotonic() + LATE_S
        while not condition(state := self.drafter()):
            assert time.monotonic() < ends, state
            time.sleep(0.1)
        return state


@pytest.fixture
def serve(
    models: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Client]]:
    monkeypatch.setenv(ADMIN_VARIABLE, "admin")
    servers = []

    def start(*words: str, drafter: bool = True) -> Client:
        port = free_port()
        given = ["--target", str(models[0]), "--served-model-name", "tiny", "--port", str(port), "--device", "cpu"]
        given += ["--drafter", str(models[1])] if drafter else []
        servers.append(Command("dflash_toolkit.serve.cli", [*given, "--adapt", "--page-size", "4", *words], tmp_path))
        assert "serves tiny" in servers[-1].line()
        return Client(port)

    yield start
    for server in servers:
        server.kill()


@pytest.mark.slow
def test_a_server_learns_from_its_requests_and_rolls_back(serve: Callable[..., Client], tmp_path: Path) -> None:
    client = serve("--adapt-share", "1", "--adapt-output", str(tmp_path / "versions"))
    prompts = [[i, 2 * i % 250, 7, 5 * i % 250] for i in range(200)]
    before = [client.complete(prompt) for prompt in prompts]
    assert client.roll_back().status_code in (200, 400)
    state = client.wait(lambda state: state["drafter_version"] > 0)
    assert state["training"]["promotions"] >= 1 and state["training"]["error"] is None
    after = [client.complete(prompt) for prompt in prompts[:20]]
    assert [a["choices"][0]["text"] for a in after] == [b["choices"][0]["text"] for b in before[:20]]
    assert after[0]["usage"]["dflash"]["drafter_version"] >= 1
    shown = client.metrics()
    assert "dflash:drafter_version" in shown and "dflash:adapt_steps_total" in shown
    # the first version has none: until the next promotion, if this one was withdrawn meanwhile
    client.wait(lambda _: "dflash:adapt_held_out_acceptance_length{" in client.metrics())
    folder = tmp_path / "versions" / "version-1"
    ends = time.monotonic() + LATE_S
    while not (folder / "model.safetensors").exists() and time.monotonic() < ends:
        time.sleep(0.1)
    assert load_drafter(str(folder)).config.num_layers == 2
    version = client.drafter()["drafter_version"]
    assert client.roll_back().json()["success"]
    client.wait(lambda state: state["training"]["rollbacks"] >= 1 and state["drafter_version"] > version)


@pytest.mark.slow
def test_a_server_without_a_drafter_trains_one(serve: Callable[..., Client]) -> None:
    client = serve("--adapt-share", "1", drafter=False)
    prompts = [[i, 2 * i % 250, 7, 5 * i % 250] for i in range(12)]
    first = [client.complete(prompt) for prompt in prompts]
    state = client.wait(lambda state: state["training"]["steps"] > 2)
    assert state["num_speculative_tokens"] == 15 and state["training"]["requests"] == 12
    assert [client.complete(p)["choices"][0]["text"] for p in prompts] == [a["choices"][0]["text"] for a in first]


@pytest.mark.slow
@pytest.mark.parametrize("opt_in", [False, True])
def test_a_request_may_opt_out_or_in(serve: Callable[..., Client], opt_in: bool) -> None:
    client = serve(*["--adapt-opt-in"] * opt_in)
    for store in (None, False, True):
        more = {} if store is None else {"store": store}
        for i in range(3):
            client.complete([i, 3, len(json.dumps(more))], **more)
    expected = 3 if opt_in else 6
    client.wait(lambda state: state["training"]["requests"] == expected)
    time.sleep(0.5)
    assert client.drafter()["training"]["requests"] == expected


def test_the_engine_leaves_memory_for_a_trainer_on_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = make_drafter(bigram_target(layers=8))
    needed = 28 * sum(p.numel() for p in drafter.parameters()) + (8 << 30)
    assert with_room(EngineOptions(), drafter, None).gpu_memory_utilization is None, "there is no GPU"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 100 << 30))
    share = with_room(EngineOptions(), drafter, None).gpu_memory_utilization
    assert share == pytest.approx(0.9 - needed / (100 << 30))
    assert with_room(EngineOptions(), drafter, "cuda:1").gpu_memory_utilization is None
    assert with_room(EngineOptions(gpu_memory_utilization=0.7), drafter, None).gpu_memory_utilization == 0.7
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 8 << 30))
    assert with_room(EngineOptions(), drafter, None).gpu_memory_utilization == 0.2


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"adapt": True, "adapt_share": 0.0}, r"adapt_share is 0.0; it must be in \(0, 1\]"),
        ({"adapt": True, "adapt_memory_gib": 0.0}, "adapt_memory_gib is 0.0; it must be > 0"),
        ({"adapt_output": "out"}, "adapt_output is given, but not adapt; add --adapt"),
        ({"adapt": True, "engine": "vllm"}, "adapt needs --engine dflash, not vllm"),
    ],
)
def test_options_of_adapting_are_checked(given: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        from_mapping(ServeConfig, {"target": "x"} | given, "test")
