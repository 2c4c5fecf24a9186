"""Every architecture that is named as a target: transformers defines it, and the target changes nothing about it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, tiny
from conftest import EOS, VOCAB, make_drafter
from test_decode import PROMPT, check_books, drafting, hf_greedy, knows
from test_target import count_runs, refusal
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    BertConfig,
    LlamaConfig,
    MambaConfig,
    T5Config,
)

from dflash_toolkit import SamplingParams, Target, generate
from dflash_toolkit.config import UnsupportedModel
from dflash_toolkit.models.spec import ARCHITECTURES as COMPUTED
from dflash_toolkit.models.spec import ModelSpec
from dflash_toolkit.models.target import load_config

EACH = pytest.mark.parametrize("name", ARCHITECTURES)
IDS = torch.tensor([PROMPT])


@EACH
def test_a_tap_is_the_hidden_state_behind_its_layer_whatever_else_is_asked_for(name: str) -> None:
    target, taps = tiny(name), (4, 0, 2)
    with torch.no_grad():
        out = target.model(IDS, output_hidden_states=True)
    expected = torch.cat([out.hidden_states[tap + 1] for tap in taps], dim=-1)
    for logits, wanted in (("none", None), ("last", out.logits[:, -1:]), ("all", out.logits)):
        found = target.forward(IDS, taps=taps, logits=logits)
        assert torch.equal(found.features, expected), logits
        if wanted is None:
            assert found.logits is None
        else:
            torch.testing.assert_close(found.logits, wanted)
    found = target.forward(IDS, taps=taps, final=True)
    assert torch.equal(found.features, expected) and torch.equal(found.final, out.hidden_states[-1])


@EACH
def test_no_layer_above_the_highest_tap_runs_when_nobody_asks_for_logits(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tiny(name)
    full = target.forward(IDS, taps=(3, 1), logits="all").features
    ran = count_runs(target, monkeypatch)
    assert torch.equal(target.forward(IDS, taps=(3, 1)).features, full) and ran == [0, 1, 2, 3]


@EACH
def test_the_embedding_is_what_the_first_layer_reads_and_the_head_chooses_as_the_model_does(name: str) -> None:
    target = tiny(name)
    assert target.config.num_hidden_layers == len(target.layers)
    assert (target.config.vocab_size, target.config.hidden_size) == tuple(target.head_weight.shape)
    with torch.no_grad():
        out = target.model(IDS, output_hidden_states=True)
        assert torch.equal(target.embedding(IDS), out.hidden_states[0])
        chosen = target.head(out.hidden_states[-1]).argmax(-1)
    assert torch.equal(chosen, out.logits.argmax(-1))


@EACH
def test_a_greedy_answer_is_that_of_hf_generate_with_every_drafter(name: str) -> None:
    target = tiny(name)
    drafter = make_drafter(target)
    truth = tuple(hf_greedy(target, PROMPT, 32, eos=(VOCAB,)))
    assert len(set(truth)) > 10, "a repetitive answer would hide misplaced tokens"
    params = SamplingParams(max_tokens=32, ignore_eos=True)
    for helper in (None, drafter):
        assert generate(target, helper, PROMPT, params).tokens == list(truth)
    with drafting(knows(truth, {3, 4, 11, 19, 20})):
        generation = generate(target, drafter, PROMPT, params)
    assert generation.tokens == list(truth)
    assert [step.accepted for step in generation.steps] == [2, 0, 6, 7, 0, 7, 2], "as the mistakes were sown"
    check_books(generation)


@EACH
def test_the_log_probabilities_of_a_prompt_are_the_model_s_own(name: str) -> None:
    target = tiny(name)
    with torch.no_grad():
        expected = target.model(IDS).logits[0, :-1].log_softmax(-1)
    found = generate(target, None, PROMPT, SamplingParams(max_tokens=1, prompt_logprobs=0)).prompt_logprobs
    assert found is not None
    wanted = expected.gather(1, IDS[0, 1:, None])[:, 0]
    for own, log_probability in zip((each for each, _ in found), wanted.tolist(), strict=True):
        assert own.chosen == pytest.approx(log_probability, abs=1e-4)


@EACH
def test_a_checkpoint_is_loaded_as_it_was_saved(name: str, tmp_path: Path) -> None:
    made = tiny(name)
    made.model.save_pretrained(tmp_path)
    made.tokenizer.save_pretrained(tmp_path)
    loaded = Target.load(str(tmp_path), "cpu")
    expected, found = (each.forward(IDS, taps=(3, 0), logits="all") for each in (made, loaded))
    torch.testing.assert_close((found.features, found.logits), (expected.features, expected.logits))
    for (weight, a), b in zip(made.model.named_parameters(), loaded.model.parameters(), strict=True):
        assert torch.equal(a, b), weight
    assert loaded.stop_token_ids == (EOS,) and loaded.config.name_or_path == loaded.name == str(tmp_path)
    assert load_config(str(tmp_path)).to_dict().keys() == loaded.config.to_dict().keys()


SIZES = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2}
HEADS = {**SIZES, "num_attention_heads": 2, "intermediate_size": 16}
LACKING = [
    (AutoModelForSeq2SeqLM, T5Config(d_model=16, d_kv=8, d_ff=16, num_layers=2, num_heads=2, vocab_size=64),
     "decoder that stands alone"),
    (AutoModelForCausalLM, BertConfig(**HEADS, is_decoder=True), "list of its 2 decoder layers"),
    (AutoModel, LlamaConfig(**HEADS), "LM head"),
    (AutoModelForCausalLM, MambaConfig(**SIZES), "forward that takes 'past_key_values'"),
]  # fmt: skip


@pytest.mark.parametrize(("auto", "config", "part"), LACKING, ids=lambda value: getattr(value, "model_type", ""))
def test_a_model_that_lacks_a_part_is_refused_by_that_part(auto: Any, config: Any, part: str) -> None:
    said = refusal(Target, auto.from_config(config), name="x/y")
    assert said == f"target x/y: architecture {config.model_type!r} is not supported: it has no {part}"


@EACH
def test_the_engine_names_the_command_that_serves_what_it_does_not_compute(name: str) -> None:
    config = tiny(name).config
    if config.model_type in COMPUTED:
        assert len(ModelSpec.of_target(config).layers) == config.num_hidden_layers
        return
    with pytest.raises(UnsupportedModel, match=f"{config.model_type}' is not served by .*dflash-serve --engine vllm"):
        ModelSpec.of_target(config)
