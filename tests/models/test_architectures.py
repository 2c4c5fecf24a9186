"""Every architecture that is named as a target: transformers defines it, and the target changes nothing about it."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from architectures import ARCHITECTURES, Architecture, tiny
from conftest import EOS, VOCAB, make_drafter, make_tokenizer
from known_drafts import PROMPT, check_books, drafting, knows
from layer_runs import count_runs
from refusals import refusal
from safetensors.torch import load_file, save_file
from small_vocabulary import hf_greedy
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    BertConfig,
    LlamaConfig,
    T5Config,
)

from dflash_toolkit import SamplingParams, Target, generate
from dflash_toolkit.config import UnsupportedModel
from dflash_toolkit.decode import run_by_path
from dflash_toolkit.draft_tree import WIDTH
from dflash_toolkit.models.cache import TargetCache
from dflash_toolkit.models.spec import ARCHITECTURES as COMPUTED
from dflash_toolkit.models.spec import ModelSpec
from dflash_toolkit.models.structure import text_config
from dflash_toolkit.models.target_files import load_config

# for these with images transformers loads the language model alone, which is listed here itself
EACH = pytest.mark.parametrize("name", [name for name in ARCHITECTURES if not re.match("(Qwen|Llama).*images", name)])
IDS = torch.tensor([PROMPT])


@EACH
def test_a_tap_is_the_hidden_state_after_its_layer(name: str) -> None:
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
def test_layers_above_the_highest_tap_do_not_run_without_logits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny(name)
    full = target.forward(IDS, taps=(3, 1), logits="all").features
    ran = count_runs(target, monkeypatch)
    assert torch.equal(target.forward(IDS, taps=(3, 1)).features, full) and ran == [0, 1, 2, 3]


@EACH
def test_embedding_and_head_match_the_model(name: str) -> None:
    target = tiny(name)
    assert target.config.num_hidden_layers == len(target.layers)
    assert (target.config.vocab_size, target.config.hidden_size) == tuple(target.head_weight.shape)
    with torch.no_grad():
        out = target.model(IDS, output_hidden_states=True)
        outside = getattr(target.config, "embedding_multiplier", 1.0)  # Granite's, which its embedding does not apply
        assert torch.equal(target.embedding(IDS) * outside, out.hidden_states[0])
        chosen = target.head(out.hidden_states[-1]).argmax(-1)
    assert torch.equal(chosen, out.logits.argmax(-1))


@EACH
@pytest.mark.sampled
def test_a_greedy_answer_is_that_of_hf_generate_with_every_drafter(name: str) -> None:
    target = tiny(name)
    drafter = make_drafter(target)
    truth = tuple(hf_greedy(target, PROMPT, 24, eos=(VOCAB,)))
    assert len(set(truth)) > 10, "a repetitive answer would hide misplaced tokens"
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    assert generate(target, None, PROMPT, params).tokens == list(truth)
    few = SamplingParams(max_tokens=10, ignore_eos=True)  # its drafts are random: a step gives a token or two
    assert generate(target, drafter, PROMPT, few).tokens == list(truth[:10])
    with drafting(knows(truth, {3, 4, 11, 19, 20})):
        generation = generate(target, drafter, PROMPT, params)
    assert generation.tokens == list(truth)
    assert [step.accepted for step in generation.steps] == [2, 0, 6, 7, 0, 2], "as the mistakes were sown"
    check_books(generation)


def test_queries_are_scaled_as_transformers_scales_them() -> None:
    model = ARCHITECTURES["Llama 4"].model()
    with torch.no_grad():
        expected = model(IDS).logits
        target = Target(model, name="scaled")
        assert not any(getattr(layer.self_attn, "attn_temperature_tuning", None) for layer in target.layers[2::3])
        torch.testing.assert_close(target.forward(IDS, logits="all").logits, expected)


@EACH
def test_the_log_probabilities_of_a_prompt_are_the_model_s_own(name: str) -> None:
    check_prompt_logprobs(tiny(name))


def check_prompt_logprobs(target: Target) -> None:
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


@pytest.mark.parametrize("name", [each.name for each in ARCHITECTURES.values() if each.vision])
def test_a_multimodal_checkpoint_loads_its_language_model(name: str, tmp_path: Path) -> None:
    whole = ARCHITECTURES[name].whole_model()
    whole.config.eos_token_id = [9, EOS]
    whole.save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    target = Target.load(str(tmp_path), "cpu")
    model = whole.language_model if "Llama" in name else whole  # the whole fails in transformers 5.24
    with torch.no_grad():
        out = model(IDS, output_hidden_states=True)
    found = target.forward(IDS, taps=(2,), logits="all")
    torch.testing.assert_close(found.features, out.hidden_states[3])
    torch.testing.assert_close(found.logits, out.logits)
    assert target.config.name_or_path == str(tmp_path) and set(target.stop_token_ids) == {9, EOS}
    weights = load_file(tmp_path / "model.safetensors")
    gone = next(weight for weight in sorted(weights) if "language_model" in weight and "o_proj" in weight)
    del weights[gone]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert "1 tensors are missing from its weights" in refusal(Target.load, str(tmp_path), "cpu")


def test_a_quantized_multimodal_checkpoint_counts_as_quantized() -> None:
    whole = ARCHITECTURES["Qwen3.5 with images"].config()
    whole.quantization_config, whole.name_or_path = {"quant_method": "fp8"}, "x/y"
    text = text_config(whole)
    assert text.quantization_config == {"quant_method": "fp8"} and text.name_or_path == "x/y"
    assert text_config(text) is text


MERGED = {"_name_or_path", "architectures", "tie_word_embeddings"}  # and quantization_config, eos_token_id, see above
UNUSED = {  # `dtype` is an option of every command
    "chunk_size_feed_forward", "dtype", "id2label", "initializer_range", "is_encoder_decoder", "label2id", "model_type",
    "output_attentions", "output_hidden_states", "problem_type", "return_dict", "transformers_version",
}  # fmt: skip


@pytest.mark.parametrize("name", [each.name for each in ARCHITECTURES.values() if each.vision])
def test_top_level_keys_of_the_language_model_are_merged(name: str) -> None:
    """A newer transformers may put further keys into both parts of a config; each must be merged or be without use."""
    whole = ARCHITECTURES[name].config()
    shared = whole.to_dict().keys() & whole.get_text_config().to_dict().keys()
    assert shared <= MERGED | UNUSED
    whole.architectures, whole.name_or_path, whole.tie_word_embeddings = ["A"], "x/y", True
    text = text_config(whole)
    assert (text.architectures, text.name_or_path, text.tie_word_embeddings) == (["A"], "x/y", True)


# ---- what is kept of a text ------------------------------------------------------------------------------------------


def kept(cache: TargetCache) -> list[torch.Tensor]:
    """Every tensor of a cache."""
    found: list[torch.Tensor] = []
    for value in (value for layer in cache.layers for value in vars(layer).values()):
        found += [part for part in (value.values() if isinstance(value, dict) else [value]) if torch.is_tensor(part)]
    return found


@EACH
@pytest.mark.parametrize("stay", [1, 3, 6])
@pytest.mark.sampled
def test_taking_back_part_of_a_block_keeps_the_rest_exact(name: str, stay: int) -> None:
    target = tiny(name)
    caches = target.new_cache(), target.new_cache()
    for each in caches:
        target.forward(IDS[:, :12], cache=each)
        each.flush()
    cache, plain = caches
    cache.begin_block()
    target.forward(IDS[:, 12:18], cache=cache, logits="all")
    again = cache.end_block(6, stay)
    assert again == (ARCHITECTURES[name].recurrent and stay < 6)
    if again:
        target.forward(IDS[:, 12 : 12 + stay], cache=cache)
        cache.flush()
    target.forward(IDS[:, 12 : 12 + stay], cache=plain)
    plain.flush()
    for ours, theirs in zip(kept(cache), kept(plain), strict=True):
        assert ours.shape == theirs.shape
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    nexts = [target.forward(IDS[:, 12 + stay :], cache=each, logits="all").logits for each in caches]
    torch.testing.assert_close(*nexts, rtol=1e-4, atol=1e-4)
    whole = target.forward(IDS, logits="all").logits
    torch.testing.assert_close(nexts[0], whole[:, 12 + stay :], rtol=1e-2, atol=1e-2)


@EACH
def test_a_tree_path_leaves_the_cache_of_its_tokens_alone(name: str) -> None:
    target = tiny(name)
    assert target.tree_width() == WIDTH and target.tree_width(2) == 2
    path, tree = [0, 2, 3], torch.tensor([[IDS[0, 12], 7, IDS[0, 13], IDS[0, 14], 9]])  # 9 stands behind 7
    visible = torch.eye(5, dtype=torch.bool)
    for row, ancestors in ((1, [0]), (2, [0]), (3, [0, 2]), (4, [0, 1])):
        visible[row, ancestors] = True
    cache, plain = target.new_cache(), target.new_cache()
    for each in (cache, plain):
        target.forward(IDS[:, :12], cache=each)
        each.flush()
    if ARCHITECTURES[name].recurrent:
        found = run_by_path(target, tree, visible, (), cache).logits
        assert cache.get_seq_length() == 12, "no path stays"
        target.forward(tree[:, path], cache=cache)
        cache.flush()
    else:
        cache.begin_block()
        found = target.forward(tree, cache=cache, logits="all", visible=visible).logits
        cache.move_path(5, path)
        cache.end_block(5, 3)
    alone = target.forward(IDS[:, 12:15], cache=plain, logits="all").logits
    plain.flush()
    torch.testing.assert_close(found[:, path], alone, rtol=1e-4, atol=1e-4)
    for ours, theirs in zip(kept(cache), kept(plain), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_a_recurrent_model_that_ignores_its_cache_is_refused() -> None:
    few = {"num_experts": 2, "num_experts_per_tok": 1, "attn_layer_offset": 2, "attn_layer_period": 3}
    jamba = Architecture("Jamba", "JambaConfig", {**few, "mamba_d_state": 8, "mamba_dt_rank": 4}).target()
    assert "computes other hidden states after a cache than without one" in refusal(jamba.new_cache)


# ---- heads and scales ------------------------------------------------------------------------------------------------

HEADS_OF_THEIR_OWN = {
    "tied": Architecture("Llama", "LlamaConfig", {"tie_word_embeddings": True}),
    "biased": Architecture("Phi", "PhiConfig"),
    "scaled logits": Architecture("Granite", "GraniteConfig", {"logits_scaling": 4.0, "embedding_multiplier": 3.0}),
    "tied and soft-capped": Architecture(
        "Gemma 2",
        "Gemma2Config",
        {"head_dim": 8, "final_logit_softcapping": 2.0, "tie_word_embeddings": True, "initializer_range": 0.05},
    ),
}


@pytest.mark.parametrize("kind", HEADS_OF_THEIR_OWN)
def test_changes_after_the_last_norm_do_not_matter(kind: str) -> None:
    target = HEADS_OF_THEIR_OWN[kind].target()
    if kind == "biased":
        target.structure.head.bias.normal_(generator=torch.Generator().manual_seed(1)).mul_(5)
    final = target.forward(IDS, final=True).final
    with torch.no_grad():
        logits = target.model(IDS).logits
    assert final is not None and torch.equal(target.head(final).argmax(-1), logits.argmax(-1))
    assert (target.head_weight is target.embedding.weight) == ("tied" in kind)
    check_prompt_logprobs(target)
    truth = tuple(hf_greedy(target, PROMPT, 32, eos=(VOCAB,)))
    with drafting(knows(truth, {3, 4, 11})):
        generation = generate(target, make_drafter(target), PROMPT, SamplingParams(max_tokens=32, ignore_eos=True))
    assert generation.tokens == list(truth)


# ---- what is no target, and what the engine does not compute ---------------------------------------------------------

HEADS = {
    "vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16,
}  # fmt: skip
LACKING = [
    (AutoModelForSeq2SeqLM, T5Config(d_model=16, d_kv=8, d_ff=16, num_layers=2, num_heads=2, vocab_size=64),
     "separate decoder"),
    (AutoModelForCausalLM, BertConfig(**HEADS, is_decoder=True), "list of its 2 decoder layers"),
    (AutoModel, LlamaConfig(**HEADS), "LM head"),
]  # fmt: skip


@pytest.mark.parametrize(("auto", "config", "part"), LACKING, ids=lambda value: getattr(value, "model_type", ""))
def test_a_model_that_lacks_a_part_is_refused_by_that_part(auto: Any, config: Any, part: str) -> None:
    said = refusal(Target, auto.from_config(config), name="x/y")
    start = (
        f"target x/y: architecture {config.model_type!r} is not supported with transformers {transformers.__version__}"
    )
    assert said == f"{start}: it has no {part}"


@EACH
def test_an_unsupported_target_error_names_a_working_command(name: str) -> None:
    config = tiny(name).config
    if config.model_type in COMPUTED:
        assert len(ModelSpec.of_target(config).layers) == config.num_hidden_layers
        return
    with pytest.raises(UnsupportedModel, match=f"{config.model_type}' .*is not served by .*dflash-serve --engine vllm"):
        ModelSpec.of_target(config)
