"""What ends an answer: every source of stop tokens, and every program follows them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import EOS, PAD, TEMPLATE, make_target, make_tokenizer
from programs import Program, lines, write
from transformers import GenerationConfig

from dflash_toolkit import SamplingParams, Target, generate
from dflash_toolkit.runtime.load import load_engine
from dflash_toolkit.stop_tokens import chat_end, stop_tokens

USER, ASSISTANT = 258, 259  # tokens of the roles
ENDS = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ '<|pad|>' if m.role == 'assistant' }}{% endfor %}"
ENDS_TWICE = ENDS + "<|end|>"  # Phi-3
LAST_ENDS = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ '<|pad|>' if loop.last }}{% endfor %}"  # gpt-oss
WRAPS = ENDS.replace("<|pad|>", "<|system|><|pad|>")  # Command A
NO_END = ENDS.replace("<|pad|>", "")  # GLM
REFUSES = "{{ raise_exception('no') }}"


@pytest.mark.parametrize(
    ("template", "end"),
    [(TEMPLATE, EOS), (ENDS, PAD), (ENDS_TWICE, PAD), (LAST_ENDS, None), (WRAPS, PAD), (NO_END, None), (REFUSES, None)],
)
def test_chat_end_is_the_common_suffix_of_responses(template: str, end: int | None) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    assert chat_end(tokenizer) == end


def test_stop_tokens_join_template_tokenizer_and_configs() -> None:
    tokenizer, config = make_tokenizer(), make_target().config
    tokenizer.chat_template, tokenizer.eos_token, config.eos_token_id = ENDS, "<|user|>", [7, EOS]
    assert stop_tokens(config, GenerationConfig(eos_token_id=9), tokenizer) == (PAD, USER, 9, 7, EOS)
    tokenizer.chat_template = tokenizer.eos_token = config.eos_token_id = None
    assert stop_tokens(config, None, tokenizer) == stop_tokens(config, None) == ()


@pytest.mark.parametrize("named_by", ["tokenizer", "template"])
def test_each_program_stops_at_an_end_no_config_names(named_by: str, tmp_path: Path, dflash_data: Program) -> None:
    target = make_target(tied=False)
    model: Any = target.model
    with torch.no_grad():  # it says 7, then PAD for ever
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        for weight in (model.model.embed_tokens.weight, model.lm_head.weight):
            weight.zero_()
        model.model.embed_tokens.weight[:, 0] = model.lm_head.weight[7, 0] = 9.0
        model.model.embed_tokens.weight[[7, PAD], :2] = torch.tensor([0.0, 9.0])
        model.lm_head.weight[PAD, 1] = 9.0
    if named_by == "tokenizer":
        target.tokenizer.eos_token = "<|pad|>"
    else:
        target.tokenizer.chat_template = ENDS
    folder, data = tmp_path / "t", tmp_path / "p.jsonl"
    model.save_pretrained(folder)
    target.tokenizer.save_pretrained(folder)
    write(data, [{"prompt": "name a fruit"}])

    engine, _ = load_engine(str(folder), device="cpu")
    params = SamplingParams(max_tokens=5)
    assert engine.generate([[1, 2]], params)[0].tokens == [7, PAD]
    assert generate(Target.load(str(folder), "cpu"), None, [1, 2], params).tokens == [7, PAD]
    for runtime in ("engine", "reference"):
        output = tmp_path / runtime / "r.jsonl"
        dflash_data("--device", "cpu", "--target", folder, "--data", data, "--runtime", runtime, "--output", output)
        (row,) = lines(output)
        assert (row["tokens"][row["spans"][0][0] :], row["finish_reason"]) == ([7, PAD], "stop")
