"""dflash-train for a target of every family, from prompts to an exported drafter, with responses by the reference."""

import json
from pathlib import Path

import pytest
from architectures import ARCHITECTURES
from conftest import EOS, PAD, make_tokenizer
from programs import Program

from dflash_toolkit import SamplingParams, Target, generate, load_drafter


@pytest.mark.parametrize("name", ["Phi-3", "Gemma 4 26B-A4B", "gpt-oss", "Llama 4", "Qwen3.5 with images"])
def test_a_drafter_is_trained_measured_and_exported_for_every_family(
    name: str, dflash_train: Program, tmp_path: Path
) -> None:
    dflash_train.target = tmp_path / "target"
    ARCHITECTURES[name].model().save_pretrained(dflash_train.target)
    make_tokenizer().save_pretrained(dflash_train.target)
    asked = (
        "optim.steps=2", "responses.max_tokens=8", "responses.runtime=reference", "loss.kl=0.5",
        "optim.pack_tokens=128", "run.features=disk", "run.speculators=true",
        "prompts.held_out=4",
    )  # fmt: skip
    dflash_train(*asked)
    assert "finished" in dflash_train(*asked)[-1], "the same target, template and options"

    record = dflash_train.record()
    assert 4 <= record["result"]["answers"] <= 8 and record["result"]["acceptance_length"] >= 1
    assert record["samplers"][0]["thinking"] is None and record["template_hash"]
    target, drafter = Target.load(str(dflash_train.target), "cpu"), load_drafter(str(tmp_path / "run")).float()
    assert drafter.config.vocab_size == target.config.vocab_size and drafter.config.mask_token_id not in (EOS, PAD)
    assert load_drafter(str(tmp_path / "run/speculators")).config.target_layer_ids == drafter.config.target_layer_ids

    params, prompt = SamplingParams(max_tokens=8), list(range(40, 60))
    drafted = generate(target, drafter, prompt, params)
    assert drafted.steps and drafted.tokens == generate(target, None, prompt, params).tokens
    origin = json.loads((tmp_path / "run/config.json").read_text())["dflash_toolkit"]
    assert origin["target_digest"] == record["target_digest"] and origin["answers"] == record["samplers"]
