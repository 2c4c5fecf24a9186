"""dflash-serve --adapt: the drafter learns from the requests, and answers, metrics and routes show it."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from bigram_targets import bigram_target, prompts_to_learn
from conftest import make_drafter
from forked import Command, free_port

from dflash_toolkit import UserError, load_drafter, save_drafter
from dflash_toolkit.config import from_mapping
from dflash_toolkit.runtime import EngineOptions
from dflash_toolkit.serve.adapt import with_room
from dflash_toolkit.serve.config import ServeConfig
from dflash_toolkit.serve.keys import ADMIN_VARIABLE, VARIABLE, excluded_keys

LATE_S = 240


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
        self._http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=LATE_S)

    def complete(self, prompt: list[int], key: str = "open", **more: Any) -> dict[str, Any]:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 16, "temperature": 0, "ignore_eos": True} | more
        answer = self._http.post("/v1/completions", json=body, headers=bearer(key))
        assert answer.status_code == 200, answer.text
        return answer.json()

    def texts(self, prompts: list[list[int]], **more: Any) -> list[str]:
        with ThreadPoolExecutor(8) as pool:
            answers = pool.map(lambda prompt: self.complete(prompt, **more), prompts)
            return [answer["choices"][0]["text"] for answer in answers]

    def drafter(self) -> dict[str, Any]:
        found: dict[str, Any] = self._http.get("/v1/drafter", headers=bearer("open")).json()
        return found

    def metrics(self) -> str:
        return self._http.get("/metrics", headers=bearer("open")).text

    def change(self, how: str, **body: Any) -> httpx.Response:
        return self._http.post(f"/v1/drafter/{how}", json=body, headers=bearer("admin"))

    def wait(self, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        ends = time.monotonic() + LATE_S
        while not condition(state := self.drafter()):
            assert time.monotonic() < ends, state
            time.sleep(0.1)
        return state


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture
def serve(models: tuple[Path, Path], tmp_path: Path) -> Iterator[Callable[..., Client]]:
    keys = {ADMIN_VARIABLE: "admin", VARIABLE: "open,secret"}
    (tmp_path / "excluded").write_text("secret\n")
    servers = []

    def start(*words: str) -> Client:
        port = free_port()
        given = ["--target", str(models[0]), "--served-model-name", "tiny", "--port", str(port), "--device", "cpu"]
        given += ["--adapt", "--adapt-exclude-key-file", str(tmp_path / "excluded"), "--page-size", "4", *words]
        servers.append(Command("dflash_toolkit.serve.cli", given, tmp_path, **keys))
        assert "serves tiny" in servers[-1].line()
        return Client(port)

    yield start
    for server in servers:
        server.kill()


@pytest.mark.slow
def test_a_server_without_a_drafter_trains_saves_and_rolls_back(serve: Callable[..., Client], tmp_path: Path) -> None:
    client = serve("--adapt-share", "1", "--adapt-output", str(tmp_path / "versions"))
    prompts = prompts_to_learn()
    client.texts(prompts[::8], store=False)
    client.texts(prompts[::8], key="secret", store=True)
    before = client.texts(prompts)
    assert client.change("rollback").status_code == 400, "there is one version"
    state = client.wait(lambda state: state["drafter_version"] > 0)
    training = state["training"]
    assert training["requests"] == training["learnt_from"] == 44, "the others were not to be learned from"
    assert training["promotions"] >= 1 and training["error"] is None and 0 < training["busy_share"] <= 1
    assert client.texts(prompts[:20]) == before[:20] and state["num_speculative_tokens"] == 15
    assert client.complete(prompts[0])["usage"]["dflash"]["drafter_version"] >= 1
    state = client.drafter()
    assert [each["drafter_version"] for each in state["versions"]][:1] == [0] and len(state["versions"]) > 1
    assert (
        f"drafter version {state['drafter_version']}, learnt from " in state["summary"] and " -> " in state["summary"]
    )
    shown = client.metrics()
    for name in ("drafter_version", "adapt_steps_total", "adapt_busy_share", 'version_tokens_total{version="0"}'):
        assert f"dflash:{name}" in shown
    # the first version has none: until the next promotion, if this one was withdrawn meanwhile
    client.wait(lambda _: "dflash:adapt_held_out_acceptance_length{" in client.metrics())
    ends = time.monotonic() + LATE_S
    while not (tmp_path / "versions/version-1/model.safetensors").exists() and time.monotonic() < ends:
        time.sleep(0.1)
    saved = tmp_path / "saved"
    assert client.change("save", path=str(saved)).json()["success"] and load_drafter(str(saved)).config.num_layers == 2
    (tmp_path / "file").write_text("")
    refused = client.change("save", path=str(tmp_path / "file/below"))
    assert refused.status_code == 400 and "was not saved" in refused.json()["error"]["message"]
    refused = client._http.post(
        "/update_weights_from_disk", json={"model_path": str(saved), "model": "drafter"}, headers=bearer("admin")
    )
    assert refused.status_code == 400 and "learns from the requests (--adapt)" in refused.json()["message"]
    version = client.drafter()["drafter_version"]
    assert client.change("rollback").json()["success"]
    client.wait(lambda state: state["training"]["rollbacks"] >= 1 and state["drafter_version"] > version)


@pytest.mark.slow
def test_a_server_may_learn_only_from_requests_that_opt_in(
    serve: Callable[..., Client], models: tuple[Path, Path]
) -> None:
    client = serve("--drafter", str(models[1]), "--adapt-opt-in")
    for i, more in enumerate(({}, {"store": False}, {"key": "secret", "store": True}, {"store": True})):
        client.texts([[j, 3, i] for j in range(3)], **more)
    client.wait(lambda state: state["training"]["requests"] == 3)
    client.texts([[9, 3, 9]], store=True)  # it comes after all others
    client.wait(lambda state: state["training"]["requests"] == 4)


def test_excluded_keys_are_keys_of_the_server(tmp_path: Path) -> None:
    file = tmp_path / "excluded"
    file.write_text("b\na\n")
    assert excluded_keys(str(file), ("a", "x", "b", "a")) == {"0", "2", "3"} and excluded_keys(None, ("a",)) == set()
    with pytest.raises(UserError, match="1 of 2 keys are no API keys of this server"):
        excluded_keys(str(file), ("a", "x"))


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
        ({"adapt": True, "adapt_learning_rate": 0.0}, "adapt_learning_rate is 0.0; it must be > 0"),
        ({"adapt_output": "out"}, "adapt_output is given, but not adapt; add --adapt"),
        ({"adapt": True, "engine": "vllm"}, "adapt needs --engine dflash, not vllm"),
    ],
)
def test_options_of_adapting_are_checked(given: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        from_mapping(ServeConfig, {"target": "x"} | given, "test")
