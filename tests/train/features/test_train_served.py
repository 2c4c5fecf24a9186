"""Hidden states from a vLLM server. A stand-in writes files as its ExampleHiddenStatesConnector does."""

import fcntl
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES
from conftest import make_tokenizer
from programs import Program, write
from safetensors.torch import save_file
from servers import Reply, stand_in
from training_runs import weights

from dflash_toolkit import Target, UserError
from dflash_toolkit.record import target_signature
from dflash_toolkit.train.features.served import ServedTarget


class Server:
    """Computes the tapped layers of `target` and leaves a file, whole only after its reply."""

    def __init__(self, target: Target, taps: list[int], folder: Path) -> None:
        self.target, self.taps, self.folder = target, taps, folder
        self.texts: list[list[int]] = []
        self.failures = 0  # replies to come with status 503
        self.url, self.lock = "", threading.Lock()

    def answer(self, request: BaseHTTPRequestHandler, content: bytes) -> Reply:
        if request.command == "GET":
            return 200, json.dumps({"data": [{"id": "big"}]}).encode(), {}
        text = json.loads(content)["prompt"]
        with self.lock:
            if self.failures:
                self.failures -= 1
                return 503, b"{}", {}
            self.texts.append(text)
            path = self.folder / f"cmpl-{len(self.texts)}.safetensors"
            features = self.target.forward(torch.tensor([text]), taps=self.taps).features
        assert features is not None
        hidden = features[0].unflatten(1, (len(self.taps), -1)).contiguous()
        held = open(f"{path}.lock", "w")  # noqa: SIM115 - closed when the file is whole
        fcntl.flock(held, fcntl.LOCK_EX)

        def finish() -> None:
            time.sleep(0.02)
            save_file({"hidden_states": hidden, "token_ids": torch.tensor(text)}, path)
            held.close()

        threading.Thread(target=finish).start()
        reply: dict[str, Any] = {"choices": [], "kv_transfer_params": {"hidden_states_path": str(path)}}
        return 200, json.dumps(reply).encode(), {}


@pytest.fixture
def server(target_dir: Path, tmp_path: Path) -> Iterator[Server]:
    (tmp_path / "states").mkdir()
    state = Server(Target.load(str(target_dir), "cpu"), [], tmp_path / "states")
    with stand_in(state.answer) as state.url:
        yield state


@pytest.fixture
def given(dflash_train: Program, tmp_path: Path) -> Program:
    """A run of few steps on responses that are there."""
    rows = [{"prompt": f"ask {i} of it", "response": f"say {i} and {i}"} for i in range(6)]
    return replace(dflash_train, data=write(tmp_path / "r.jsonl", rows))


ASKED = ("responses.regenerate=false", "prompts.held_out=0", "optim.steps=2", "run.features=disk")


def test_a_served_target_trains_the_same_drafter(given: Program, server: Server, tmp_path: Path) -> None:
    given(*ASKED, output="plain")
    taps = json.loads((tmp_path / "plain/config.json").read_text())["dflash_config"]["target_layer_ids"]
    server.taps, server.failures = taps, 1
    said = given(*ASKED, "--run.feature-endpoint", server.url)
    assert any(f"must be {[tap + 1 for tap in taps]}" in line for line in said)
    assert weights(tmp_path / "run") == weights(tmp_path / "plain")
    assert len({tuple(text) for text in server.texts}) == len(server.texts), "each text once"
    assert not list((tmp_path / "states").iterdir()), "files that are read are removed"
    records = [json.loads((tmp_path / run / "config.json").read_text()) for run in ("plain", "run")]
    plain, served = (each["dflash_toolkit"]["record"]["target"]["places"] for each in records)
    assert plain.pop("final") and served == plain, "what the doctor compares"


@pytest.mark.parametrize("name", ["Gemma 3 with images", "Qwen3.5 with images", "gpt-oss"])
def test_embedding_and_head_are_all_that_is_loaded(name: str, tmp_path: Path) -> None:
    architecture = ARCHITECTURES[name]
    (architecture.whole_model() if architecture.vision else architecture.model()).save_pretrained(tmp_path / "target")
    make_tokenizer().save_pretrained(tmp_path / "target")
    whole = Target.load(str(tmp_path / "target"), "cpu")
    (tmp_path / "states").mkdir()
    server = Server(whole, [4, 1], tmp_path / "states")
    with stand_in(server.answer) as url:
        target = ServedTarget(whole.name, url, [4, 1], "cpu")
        assert torch.equal(target.head_weight, whole.head_weight)
        assert torch.equal(target.embedding.weight, whole.embedding.weight)
        assert all(weight.is_meta for weight in target.layers.parameters())
        ids = torch.arange(20)[None] + 40
        found = target.forward(ids, taps=[1, 4], lengths=[7, 13]).features
        parts = [whole.forward(part, taps=[1, 4]).features for part in ids.split([7, 13], dim=1)]
        assert torch.equal(found, torch.cat(parts, dim=1))
        assert target_signature(target, [4, 1])["places"].keys() == {"embedding", "layers.1", "layers.4"}


def test_a_faulty_feature_server_is_one_line(target_dir: Path, server: Server) -> None:
    server.taps = [1, 0]
    target = ServedTarget(str(target_dir), server.url, [1], "cpu")
    ids = torch.tensor([[40, 41, 42]])
    with pytest.raises(UserError, match=r"not \(3, 1, \d+\); .*layer_ids \[2\]"):
        target.forward(ids, taps=[1])
    assert len(list(server.folder.glob("*.safetensors"))) == 1, "other files stay"
    for params, words in (
        (None, "writes no hidden states: start vLLM with"),
        ({"hidden_states_path": "/nowhere/x.safetensors"}, "must write to a folder that this machine sees"),
    ):
        reply = json.dumps({"data": [{"id": "big"}], "kv_transfer_params": params}).encode()
        with stand_in(lambda *_, reply=reply: (200, reply, {})) as url, pytest.raises(UserError, match=words):
            ServedTarget(str(target_dir), url, [1], "cpu").forward(ids, taps=[1])


def test_a_served_target_refuses_decoding_options(given: Program) -> None:
    said = given.refuses("--run.feature-endpoint", "http://localhost:1", "loss.kl=0.5")
    for words in ("give --responses (dflash-data --endpoint)", "prompts.held_out=0", "leave out loss.kl"):
        assert words in said
