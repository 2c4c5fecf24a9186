"""Which files of a target's folder the engine reads, and which head it uses."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES
from conftest import make_drafter, make_target, make_tokenizer
from refusals import refusal
from safetensors.torch import load_file, save_file

from dflash_toolkit import SamplingParams, Target, UserError, generate, save_drafter
from dflash_toolkit.models.spec import ModelSpec, context_limit
from dflash_toolkit.runtime import EngineOptions, load_engine
from dflash_toolkit.runtime.load import load_parts

PROMPT, SHORT = [1, 2, 3], SamplingParams(max_tokens=8, ignore_eos=True)
OPTIONS = EngineOptions(max_num_seqs=1, kv_cache_tokens=1200, page_size=4)


def saved(target: Target, path: Path) -> Path:
    target.model.save_pretrained(path)
    target.tokenizer.save_pretrained(path)
    return path


def configured(path: Path, **values: Any) -> None:
    config = json.loads((path / "config.json").read_text()) | values
    (path / "config.json").write_text(json.dumps(config))


def answer(path: str | Path) -> list[int]:
    engine, _ = load_engine(str(path), None, "cpu", options=OPTIONS)
    return engine.generate([PROMPT], SHORT)[0].tokens


@pytest.mark.parametrize(("options", "drafter", "said"), [
    ({"max_model_len": 513}, {}, "max_model_len is 513, but the target supports 512"),
    ({"num_speculative_tokens": 99}, {}, "num_speculative_tokens is 99; the drafter drafts at most"),
    ({"max_model_len": 300, "kv_cache_tokens": 256}, {}, "kv_cache_tokens is 256 and a request of 300 tokens"),
    ({}, {"hidden_size": 128}, "the drafter's hidden size is 128, the target's 32"),
    ({}, {"vocab_size": 500}, "the drafter's vocabulary is 500, the target's"),
])  # fmt: skip
def test_mistakes_are_refused_before_any_weights_are_read(
    tmp_path: Path, options: dict[str, Any], drafter: dict[str, Any], said: str
) -> None:
    target = make_target()
    path = saved(target, tmp_path / "target")
    save_drafter(make_drafter(target), tmp_path / "drafter")
    configured(tmp_path / "drafter", **drafter)
    for file in tmp_path.glob("*/*.safetensors"):
        file.unlink()
    chosen = EngineOptions(**options)
    assert said in refusal(load_engine, str(path), str(tmp_path / "drafter"), "cpu", options=chosen)


@pytest.mark.parametrize("template", ["{% if %}", "{{ messages"])
def test_chat_template_that_cannot_be_parsed_is_refused(tmp_path: Path, template: str) -> None:
    path = saved(make_target(), tmp_path / "target")
    (tmp_path / "chat.jinja").write_text("\n" + template)
    said = refusal(load_engine, str(path), device="cpu", chat_template=str(tmp_path / "chat.jinja"))
    assert said.startswith(f"chat_template {tmp_path / 'chat.jinja'}: line 2: ")


@pytest.mark.parametrize(
    "name", ["adapter_model.safetensors", "scheduler.safetensors", "model-00001-of-00002.safetensors"]
)
def test_unknown_tensors_are_not_read(name: str, tmp_path: Path) -> None:
    target = make_target()
    path = saved(target, tmp_path)
    save_file({"base_model.model.lora_A.weight": torch.ones(2, 2)}, path / name)
    assert answer(path) == generate(target, None, PROMPT, SHORT).tokens


def test_a_tensor_of_two_files_of_a_target_is_named(tmp_path: Path) -> None:
    path = saved(make_target(), tmp_path)
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").rename(path / "model-0.safetensors")
    save_file({"model.norm.weight": tensors["model.norm.weight"]}, path / "model-1.safetensors")
    with pytest.raises(UserError, match=r"'model.norm.weight'.*model-0.safetensors.*model-1.safetensors"):
        answer(path)


def test_a_stored_head_is_used_even_if_the_config_ties_it(tmp_path: Path) -> None:
    path = saved(make_target(tied=False), tmp_path)
    expected = answer(path)
    configured(path, tie_word_embeddings=True)
    loaded = Target.load(str(path), "cpu")
    assert answer(path) == generate(loaded, None, PROMPT, SHORT).tokens == expected
    for share in (False, True):
        engine = load_parts(loaded, share=share).engine(OPTIONS, None)
        assert engine.generate([PROMPT], SHORT)[0].tokens == expected


def test_a_stored_copy_of_a_tied_head_takes_no_memory(tmp_path: Path) -> None:
    path = saved(make_target(), tmp_path)
    expected = answer(path)
    tensors = load_file(path / "model.safetensors")
    head = {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    save_file(tensors | head, path / "model.safetensors", metadata={"format": "pt"})
    weights = load_parts(str(path), device="cpu").target
    assert weights.head is weights.embedding and answer(path) == expected


def test_the_only_stored_matrix_is_embedding_and_head(tmp_path: Path) -> None:
    path = saved(make_target(), tmp_path)
    expected = answer(path)
    tensors = load_file(path / "model.safetensors")
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    assert answer(path) == generate(Target.load(str(path), "cpu"), None, PROMPT, SHORT).tokens == expected


@pytest.mark.parametrize("stored", [True, False], ids=["stored", "absent"])
@pytest.mark.parametrize(("top", "inner"), [*itertools.product((True, False, None), repeat=2)])
@pytest.mark.sampled
def test_heads_are_tied_as_in_transformers(top: Any, inner: Any, stored: bool, tmp_path: Path) -> None:
    """Either part of the config of a model with images may tie the head; a missing key is false in this one."""
    changes = {} if stored else {"tie_word_embeddings": True}
    whole = ARCHITECTURES["Qwen3.5 with images"].whole_model(**changes)
    whole.save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for part, value in ((config, top), (config["text_config"], inner)):
        part.pop("tie_word_embeddings", None)
        part.update({} if value is None else {"tie_word_embeddings": value})
    (tmp_path / "config.json").write_text(json.dumps(config))
    if not stored and not top and not inner:
        for load in (Target.load, answer):
            assert "'lm_head.weight'; config.json does not tie the head" in refusal(load, str(tmp_path))
        return
    with torch.no_grad():
        expected = whole(torch.tensor([PROMPT])).logits
    target = Target.load(str(tmp_path), "cpu")
    torch.testing.assert_close(target.forward(torch.tensor([PROMPT]), taps=(2,), logits="all").logits, expected)
    assert answer(tmp_path) == generate(target, None, PROMPT, SHORT).tokens


def test_yarn_extends_the_context_limit() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "rope_theta": 1e4}
    stretched = make_target(limit=160, rope_parameters=yarn)
    assert context_limit(stretched.config) == stretched.context_limit == 512
    assert ModelSpec.of_target(stretched.config).context_limit == 512
    wide = make_target(limit=2048, rope_parameters=yarn)
    assert wide.context_limit == 2048
    assert make_target(limit=77).context_limit == 77


def test_on_a_cpu_the_first_token_comes_before_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    target, order = make_target(), []
    engine = load_engine(target, None, options=OPTIONS)[0]
    real = engine.runner.decode

    def decode(*args: Any) -> Any:
        order.append("step")
        return real(*args)

    monkeypatch.setattr(engine.runner, "decode", decode)
    engine.submit(PROMPT, SHORT, lambda request, step: order.append("first" if step is None else "read"))
    while engine.step():
        pass
    assert order == ["first"] + ["step", "read"] * 7
