"""A model card says what its run found, and `--push-to-hub` uploads the drafter with it."""

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import yaml
from programs import Program

from dflash_toolkit.train.prompts.dataset import DEFAULT
from dflash_toolkit.train.run import publish

SHORT = ("optim.steps=2", "run.evaluate_every=0", "run.evaluate_prompts=1", "run.evaluate_tokens=6")


class Hub(ThreadingHTTPServer):
    """The part of the hub's API that an upload needs; the client is the real one."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repositories: list[str] = []
        self.files: dict[str, bytes] = {}
        self.refuses = 0  # a status code


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        place = self.path.partition("?")[0].removeprefix("/api/")
        if self.server.refuses:
            return self.answer({"error": "Invalid user token."}, self.server.refuses)
        if place == "repos/create":
            wanted = json.loads(body)
            self.server.repositories.append("/".join(filter(None, (wanted.get("organization"), wanted["name"]))))
            return self.answer({"url": f"{huggingface_hub.constants.ENDPOINT}/{self.server.repositories[-1]}"})
        if place.endswith("/preupload/main"):
            files = [{"path": file["path"], "uploadMode": "regular"} for file in json.loads(body)["files"]]
            return self.answer({"files": [file | {"shouldIgnore": False} for file in files]})
        if place.endswith("/commit/main"):
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.server.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            url = f"{huggingface_hub.constants.ENDPOINT}/me/tiny/commit/{'0' * 40}"
            return self.answer({"commitUrl": url, "commitOid": "0" * 40})
        assert place == "validate-yaml", place
        return self.answer({"errors": [], "warnings": []})

    def answer(self, values: dict[str, Any], status: int = 200) -> None:
        content = json.dumps(values).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with Hub() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_TOKEN", "hf_token")
        yield server
        server.shutdown()


def metadata_of(card: str) -> dict[str, Any]:
    start, metadata, _ = card.split("---\n", 2)
    assert start == ""
    return yaml.safe_load(metadata)


@pytest.mark.slow
def test_a_run_writes_a_card_and_the_same_command_uploads_it(target_dir: Path, dflash_train: Program, hub: Hub) -> None:
    output = dflash_train.output
    dflash_train(*SHORT)
    assert hub.repositories == []
    card, result = (output / "README.md").read_text(), dflash_train.record()["result"]
    assert metadata_of(card)["tags"] == ["dflash", "speculative-decoding", "draft-model"]
    assert not {"base_model", "datasets"} & metadata_of(card).keys(), "neither has a name on the hub"
    assert f"**{result['acceptance_length']:.2f} tokens a step**" in card
    assert "sampled at temperature 0.0, by" in card, "of one response to a prompt, which is greedy"
    assert f" {dflash_train.record()['data']['cut']} responses were cut at the limit" in card
    assert f"dflash-serve --target {target_dir} --drafter run\n" in card and "vllm serve" in card

    weights = (output / "model.safetensors").read_bytes()
    assert dflash_train(*SHORT, "--push-to-hub", "me/tiny")[-1].startswith("uploaded to http://127.0.0.1:")
    assert hub.repositories == ["me/tiny"] and set(hub.files) == {"README.md", "config.json", "model.safetensors"}
    assert hub.files["model.safetensors"] == weights and b"--drafter me/tiny\n" in hub.files["README.md"]


def test_hub_refusal_is_one_line_before_any_work(tmp_path: Path, hub: Hub, dflash_train: Program) -> None:
    hub.refuses = 401
    error = dflash_train.refuses(*SHORT, "--push-to-hub", "me/tiny")
    assert error.startswith("--push-to-hub me/tiny: Client error '401 Unauthorized' for url 'http")
    assert "hf auth login" in error
    assert not (tmp_path / "run/work/prompts.jsonl").exists()


def test_a_card_names_the_target_and_the_datasets_of_the_hub(data: Path) -> None:
    config = {"target": "Qwen/Qwen3-8B", "response_files": [], "prompts": {"dataset": "a/default"}}
    for given, named in (([], ["a/default"]), ([str(data), "gsm8k=openai/gsm8k:main[:9]"], ["openai/gsm8k"])):
        found = publish._metadata(config | {"data": given})
        assert (found["base_model"], found["datasets"]) == ("Qwen/Qwen3-8B", named)
    assert "datasets" not in publish._metadata(config | {"data": [], "response_files": ["answers.jsonl"]})
    config["prompts"] = {"dataset": "mlabonne/open-perfectblend"}
    default, own = (publish._metadata(config | {"data": given}) for given in ([], [str(data)]))
    assert default["license"] == "other" and default["license_link"].endswith("/datasets/mlabonne/open-perfectblend")
    assert "license" not in own, "nothing is said about data of one's own"
    assert publish._metadata(config | {"data": [], "license": "mit"})["license"] == "mit"


def test_a_card_lists_the_sources_of_the_default_dataset(dflash_train: Program) -> None:
    dflash_train()
    record = dflash_train.record()
    assert "Prompts: " not in (dflash_train.output / "README.md").read_text(), "prompts of a file"
    for dataset, said in (
        (DEFAULT, "1,420,909 conversations, with a slight focus on maths, from HuggingFaceH4/ultrachat_200k, "),
        ("org/other", "Prompts: org/other: see its dataset card for its licence."),
    ):
        prompts = record["config"]["prompts"] | {"dataset": dataset}
        publish.write_cards(
            dflash_train.output, record | {"config": record["config"] | {"data": [], "prompts": prompts}}
        )
        assert said in (dflash_train.output / "README.md").read_text()
