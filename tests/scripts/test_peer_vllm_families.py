"""vLLM accepts as many drafts as we do, of what was trained for a target of each dense family: `make test-gpu`."""

import importlib.util
import json
from pathlib import Path

import pytest
from architectures import ARCHITECTURES
from conftest import make_tokenizer
from programs import Program

from dflash_toolkit.evaluation import cli as evaluation
from scripts.peers import vllm_decode

# vLLM's attention needs heads no narrower than this, and pages of windows that are long enough
WIDE = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.1}
MORE = {"Qwen3": {"head_dim": 64}, "Mistral": {"head_dim": 64}, "OLMo 3": {"sliding_window": 128}}


@pytest.mark.gpu
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", ["Llama", "Qwen2", "Qwen3", "Mistral", "Phi-3", "OLMo 2", "OLMo 3"])
def test_vllm_accepts_as_many_drafts_as_we_do(name: str, dflash_train: Program, tmp_path: Path) -> None:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vllm is not installed")
    target, drafter = tmp_path / "target", tmp_path / "run"
    ARCHITECTURES[name].model(**WIDE, **MORE.get(name, {})).bfloat16().save_pretrained(target)
    make_tokenizer().save_pretrained(target)
    dflash_train.target = target
    dflash_train("optim.steps=400", "responses.runtime=reference", "run.evaluate_every=0", "loss.anchors=16",
                 "run.compile=off", "run.attention=sdpa")  # fmt: skip

    # the prompts that it was trained with, so that drafts are accepted
    asked = ["--target", str(target), "--drafter", str(drafter), "--prompts", f"seen={dflash_train.data}"]
    report = tmp_path / "report"
    how = ["--runtime", "reference", "--no-baseline", "--max-tokens", "24", "--output", str(report)]
    assert evaluation.main([*asked, *how]) == 0
    theirs = tmp_path / "vllm.json"
    # measuring memory would fail next to other tests on the same GPU
    options = ["--max-tokens", "24", "--gpu-memory-utilization", "0.1", "--enforce-eager"]
    options += ["--kv-cache-memory-bytes", str(2**30)]
    assert vllm_decode.main([*asked, *options, "--ours", str(report / "report.json"), "--output", str(theirs)]) == 0

    # texts may differ after a near-tie, so compare equal answers only
    found = json.loads(theirs.read_text())["sets"]["seen"]
    same = found["same_answers"]
    assert same["requests"] >= 3, found
    assert found["ours"]["tau_pooled"] > 1.25, f"the drafter has learned too little: {found}"
    # vLLM schedules ahead: it may count a step after the end of an answer
    assert same["drafts_of_ours"] <= same["drafts"] * 1.05, found
    assert same["drafts"] <= same["drafts_of_ours"] * 1.05 + same["requests"], found
