"""A model card says what its run found, and `--push-to-hub` uploads the drafter with it."""

import base64
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import yaml
from programs import Program

from dflash_toolkit import load_drafter
from dflash_toolkit.train.cli import main
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

    minutes = result["curve"]["gpu_minutes"]
    assert f"2 optimiser steps in a run of {minutes} GPU minutes on" in card if minutes else "GPU minutes" not in card
    curve = {"gpu_minutes": 9, "points": 4, "an_hour_more": 0.123, "error": 0.02}
    publish.write_cards(output, dflash_train.record() | {"result": result | {"curve": curve}})
    card = (output / "README.md").read_text()
    assert (
        "By the curve of its 4 measurements, an hour more would add 0.12 tokens a step (standard error 0.02)." in card
    )

    weights = (output / "model.safetensors").read_bytes()
    assert dflash_train(*SHORT, "--push-to-hub", "me/tiny")[-1].startswith("uploaded to http://127.0.0.1:")
    assert hub.repositories == ["me/tiny"] and set(hub.files) == {"README.md", "config.json", "model.safetensors"}
    assert hub.files["model.safetensors"] == weights and b"--drafter me/tiny\n" in hub.files["README.md"]

    small = ["export", "--drafter", str(output), "--output", str(output / "small"), "--push-to-hub", "me/small"]
    measure = ["--target", str(target_dir), "--prompts", f"a={dflash_train.data}", "--limit", "3", "--max-tokens", "8"]
    assert dflash_train.main([*small, *measure]) == 0
    said = dflash_train.capsys.readouterr().out
    assert re.match(r"acceptance length \d\.\d{3} in fp8, \d\.\d{3} in 16 bits: .\d\.\d{3} \(standard error ", said)
    config, card = json.loads(hub.files["config.json"]), hub.files["README.md"].decode()
    assert config["quantization_config"]["format"] == "float-quantized" and hub.repositories[-1] == "me/small"
    assert config["dflash_toolkit"]["measured_on"]["max_tokens"] == 8 and config["dflash_toolkit"]["record"]["sha256"]
    assert "MB, matrices in fp8;" in card and "--drafter me/small\n" in card and "me/tiny" not in card
    assert "## Acceptance in 16 bits" in card and "\n\n\n" not in card.partition("## Weights in FP8")[2]
    assert said.strip() in card and " on 3 prompts" in said and "| a | " in card
    assert hub.files["model.safetensors"] == (output / "small/model.safetensors").read_bytes() != weights
    assert load_drafter(str(output / "small")).config == load_drafter(str(output)).config


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


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--output", "DRAFTER"], "is the drafter itself; choose another directory"),
        (["--target", "t"], "target is given without prompts; give both"),
        (["--prompts", "a=b"], "prompts is given without target"),
        (["--dtype", "int4"], "'int4' is not one of fp8, int8"),
        (["--max-tokens", "1"], "is 1; it must be >= 2"),
        (["--drafter", "SMALL"], "is quantized already"),
    ],
)
def test_an_export_refuses_mistakes_in_one_line(
    words: list[str], said: str, drafter_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = tmp_path / "small"
    assert main(["export", "--drafter", str(drafter_dir), "--output", str(small), "--dtype", "int8"]) == 0
    card = (small / "README.md").read_text()
    assert card.startswith("# small\n\n## Weights in INT8") and "was not measured" in card
    capsys.readouterr()
    given = [word.replace("DRAFTER", str(drafter_dir)).replace("SMALL", str(small)) for word in words]
    assert main(["export", "--drafter", str(drafter_dir), "--output", str(tmp_path / "new"), *given]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and said in error and error.count("\n") == 1
    assert not (tmp_path / "new").exists()
