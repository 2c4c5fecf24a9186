"""The whole way with targets of gated delta nets, dense and with experts: a target learns a few sentences, a drafter
learns them from it, and the engine writes them in far fewer steps than they have tokens."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from architectures import ARCHITECTURES
from conftest import EOS, PAD
from fastapi.testclient import TestClient
from reports import load

from dflash_toolkit import SamplingParams, Target, generate
from dflash_toolkit.data.prompts import encode_chat
from dflash_toolkit.doctor.cli import main as dflash_doctor
from dflash_toolkit.evaluation.cli import main as dflash_eval
from dflash_toolkit.runtime import AsyncEngine, EngineOptions, load_engine
from dflash_toolkit.serve.app import create_app
from dflash_toolkit.serve.config import ServeConfig
from dflash_toolkit.train.cli import main

SENTENCES = {
    "Why is the sky blue?": "Air scatters blue light more than red light.",
    "Count to ten.": "One two three four five six seven eight nine ten.",
}
BLOCK = 8


@dataclass(frozen=True)
class Learnt:
    target: Target
    prompts: list[list[int]]
    answers: list[list[int]]
    target_dir: Path
    drafter_dir: Path


def teach(target: Target, prompts: list[list[int]], answers: list[list[int]]) -> None:
    """Until the answers are what it writes."""
    texts = [torch.tensor(prompt + answer) for prompt, answer in zip(prompts, answers, strict=True)]
    ids = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=PAD)
    labels = ids.where(ids != PAD, -100)
    for row, prompt in zip(labels, prompts, strict=True):
        row[: len(prompt)] = -100
    model = target.model.requires_grad_(True)
    optimizer, loss = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.0), torch.tensor(9.0)
    for _ in range(100):
        if loss < 0.02:
            break
        loss = model(ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.requires_grad_(False)


@pytest.fixture(scope="module", params=["Qwen3.5", "Qwen3.5-MoE"])
def learnt(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Learnt:
    """By dflash-train itself, with answers that the engine writes."""
    torch.set_num_threads(1)
    work = tmp_path_factory.mktemp("learnt")
    target = ARCHITECTURES[request.param].target(initializer_range=0.1)
    prompts = [encode_chat(target.tokenizer, [{"role": "user", "content": text}]) for text in SENTENCES]
    answers = [[*target.tokenizer.encode(text, add_special_tokens=False), EOS] for text in SENTENCES.values()]
    teach(target, prompts, answers)
    target.model.save_pretrained(work / "target")
    target.tokenizer.save_pretrained(work / "target")
    (work / "p.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in SENTENCES))
    argv = [
        "--target", str(work / "target"), "--data", str(work / "p.jsonl"), "--output", str(work / "drafter"),
        "drafter.layers=2", "drafter.taps=3", f"drafter.block_size={BLOCK}", "responses.max_tokens=64",
        "responses.samples=1", "responses.runtime=engine", "loss.anchors=24", "optim.batch_size=2", "optim.steps=90",
        "optim.learning_rate=8e-3", "prompts.held_out=0", "run.feature_cache_gb=1",
    ]  # fmt: skip
    assert main(argv) == 0
    return Learnt(target, prompts, answers, work / "target", work / "drafter")


def test_a_learnt_text_is_drafted_almost_completely(learnt: Learnt) -> None:
    options = EngineOptions(max_num_seqs=2, kv_cache_tokens=400, page_size=4, num_speculative_tokens=BLOCK - 1)
    engine, _ = load_engine(str(learnt.target_dir), str(learnt.drafter_dir), "cpu", "float32", options)
    params = SamplingParams(max_tokens=64)
    found = engine.generate(learnt.prompts, params)
    assert [got.tokens for got in found] == learnt.answers
    assert [generate(learnt.target, None, prompt, params).tokens for prompt in learnt.prompts] == learnt.answers
    fewest = sum(-(-(len(answer) - 1) // BLOCK) for answer in learnt.answers)  # after the prefill's token
    assert fewest <= sum(len(got.steps) for got in found) <= fewest + 1


def test_recurrent_target_in_bf16_is_recognized_as_trained(learnt: Learnt, tmp_path: Path) -> None:
    """Its states make more of a rounding than attention does."""
    argv = [
        "--target", str(learnt.target_dir), "--drafter", str(learnt.drafter_dir), "--device", "cpu",
        "--dtype", "bfloat16", "--prompts", f"p={learnt.target_dir.parent / 'p.jsonl'}", "--max-tokens", "48",
        "--output", str(tmp_path / "report.json"),
    ]  # fmt: skip
    assert dflash_doctor(argv) == 0
    findings = json.loads((tmp_path / "report.json").read_text())["findings"]
    assert {finding["severity"] for finding in findings} == {"ok"}
    (found,) = (finding["figures"] for finding in findings if finding["check"] == "target")
    assert found["dtype"] == "float32" and 0.05 < max(found["distance"].values()) < found["tolerance"] < 0.5


def test_a_learnt_text_is_served_and_evaluated_with_trees(learnt: Learnt, tmp_path: Path) -> None:
    trees = {"draft_tree": 20, "draft_tree_width": 4, "num_speculative_tokens": BLOCK - 1}
    options = EngineOptions(max_num_seqs=2, kv_cache_tokens=600, page_size=4, **trees)
    engine, _ = load_engine(str(learnt.target_dir), str(learnt.drafter_dir), "cpu", "float32", options)
    app = create_app(AsyncEngine(engine, learnt.target.tokenizer), ServeConfig(target="org/learnt"))
    client = TestClient(app)
    for text, answer in SENTENCES.items():
        body = {"model": "org/learnt", "messages": [{"role": "user", "content": text}], "temperature": 0}
        assert client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"] == answer
    assert sum(engine.runner.tree_rows.values()) > 0
    argv = [
        "--target", str(learnt.target_dir), "--drafter", str(learnt.drafter_dir), "--device", "cpu",
        "--dtype", "float32", "--prompts", f"p={learnt.target_dir.parent / 'p.jsonl'}", "--max-tokens", "64",
        "--runtime", "engine", "--draft-tree", "20", "--draft-tree-width", "4", "--output", str(tmp_path / "report"),
    ]  # fmt: skip
    assert dflash_eval(argv) == 0
    report = load(tmp_path / "report")
    assert report["overall"]["identical_to_plain"] == 1.0 and report["arguments"]["draft_tree"] == 20
    assert report["overall"]["tau_pooled"] > BLOCK / 2
