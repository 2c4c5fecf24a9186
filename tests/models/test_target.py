"""The frozen target: what its taps return, what does not run, and how a bad checkpoint is refused."""

import contextlib
import json
import re
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES
from conftest import EOS, VOCAB, make_target, make_tokenizer
from damage import damage
from fp8_targets import in_fp8
from refusals import refusal
from safetensors.torch import load_file, save_file

from dflash_toolkit import Target, UserError
from dflash_toolkit.models.device import resolve_device, resolve_dtype
from dflash_toolkit.models.spec import context_limit
from dflash_toolkit.models.target_files import choose_mask_token, load_config, load_generation_config, load_tokenizer

KINDS = ["llama", "qwen2", "qwen3"]
IDS = torch.randint(0, 256, (2, 11), generator=torch.Generator().manual_seed(1))


@cache
def tiny(kind: str = "llama", tied: bool = True) -> Target:
    return make_target(kind, tied=tied)


# ---- taps ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_cached_continuation_equals_one_pass(kind: str) -> None:
    target = tiny(kind)
    whole = target.forward(IDS, taps=(1, 3), logits="all")
    cache = target.new_cache()
    first = target.forward(IDS[:, :7], taps=(1, 3), cache=cache, logits="all")
    rest = target.forward(IDS[:, 7:], taps=(1, 3), cache=cache, logits="all")
    assert cache.get_seq_length() == 11
    for name in ("features", "logits"):
        joined = torch.cat([getattr(first, name), getattr(rest, name)], dim=1)
        torch.testing.assert_close(joined, getattr(whole, name), rtol=1e-4, atol=1e-4)


def test_no_hook_remains_after_a_forward_or_an_exception() -> None:
    target = make_target()

    def check() -> None:
        assert not any(module._forward_hooks for module in target.model.modules())

    for ids, taps in ((torch.tensor([[VOCAB]]), (1, 2)), (IDS, (1, 99))):
        with pytest.raises(IndexError):
            target.forward(ids, taps=taps)
        check()
    for logits in ("none", "all"):
        assert target.forward(IDS, taps=(1,), logits=logits).features is not None, "and it still works"
        check()


def test_the_target_is_frozen_and_in_evaluation_mode() -> None:
    target = tiny()
    assert not target.model.training
    assert not any(p.requires_grad for p in target.model.parameters())
    out = target.forward(IDS, taps=(1,), logits="all")
    assert not out.features.requires_grad and not out.logits.requires_grad


# ---- embedding, head and limits --------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_head_is_the_embedding_exactly_when_they_are_tied(kind: str, tied: bool) -> None:
    target = tiny(kind, tied)
    assert (target.head_weight is target.embedding.weight) == tied
    assert target.head_weight.shape == (VOCAB, target.config.hidden_size)
    with torch.no_grad():
        hidden = target.model.model(IDS).last_hidden_state  # normed
        assert torch.equal(target.head(hidden), target.model(IDS).logits), "the head applies no norm of its own"
        assert torch.equal(target.embed(IDS), target.model.get_input_embeddings()(IDS))


def test_the_mask_is_an_unused_row_or_a_reserved_token() -> None:
    tokenizer = make_tokenizer()
    rows = len(tokenizer)
    assert choose_mask_token(tokenizer, embedding_rows=VOCAB) == rows
    assert "mask_token_id" in refusal(choose_mask_token, tokenizer, rows)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|reserved_0|>", "<|reserved_1|>"]})
    assert choose_mask_token(tokenizer, rows + 2) == tokenizer.convert_tokens_to_ids("<|reserved_1|>")
    tokenizer.pad_token = "<|reserved_1|>"
    assert choose_mask_token(tokenizer, rows + 2) == tokenizer.convert_tokens_to_ids("<|reserved_0|>")


# ---- loading ---------------------------------------------------------------------------------------


@pytest.fixture
def broken_dir(target_dir: Path, tmp_path: Path) -> Path:
    """A copy of the tiny target, for a test to damage."""
    return Path(shutil.copytree(target_dir, tmp_path / "broken"))


def test_a_saved_target_loads_with_the_same_weights_and_tokenizer(target_dir: Path) -> None:
    loaded, made = Target.load(str(target_dir), device="cpu"), tiny()
    assert loaded.dtype == torch.float32 and loaded.device.type == "cpu"
    assert loaded.name == str(target_dir)
    for (name, a), b in zip(made.model.named_parameters(), loaded.model.parameters(), strict=True):
        assert torch.equal(a, b), name
    assert loaded.tokenizer("hello").input_ids == made.tokenizer("hello").input_ids
    assert Target.load(str(target_dir), "cpu", "bfloat16").dtype == torch.bfloat16


def test_a_name_longer_than_any_file_has_is_one_line() -> None:
    name = "x" * 5000
    for load in (load_config, load_generation_config, load_tokenizer):
        with contextlib.suppress(UserError):  # the generation config is optional
            assert load(name) is None
    assert refusal(load_config, name).startswith(f"target {name}: cannot read its config.json")


def test_the_context_limit_is_the_number_of_positions() -> None:
    target = make_target(limit=77)
    assert target.context_limit == 77
    target.config.max_position_embeddings = 0
    assert "max_position_embeddings is 0; no token has room" in refusal(context_limit, target.config)


@pytest.mark.parametrize("name", ["/nowhere/at/all", "./nowhere", "a/b/c"])
def test_a_missing_directory_is_named(name: str) -> None:
    assert refusal(Target.load, name) == f"target {name}: no such directory"


def test_a_name_that_the_hub_does_not_give_is_one_line() -> None:
    said = refusal(Target.load, "no-owner/nothing")  # with a network the hub says that it has none, without one nobody
    assert said.startswith(("target no-owner/nothing: cannot read its config.json", "target no-owner/nothing: no such"))


LOST = "model.layers.2.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("file", "change", "said"),
    [
        *(("config.json", text, "config.json") for text in (None, "{ half", "3", "null", '{"model_type": []}')),
        ("config.json", {"num_attention_heads": "four"}, "config.json.*four"),
        ("config.json", {"hidden_size": 33}, "config.json.*33"),
        *(("tokenizer_config.json", text, "") for text in ("[]", "3", '{"tokenizer_class": 3}')),
        *(("tokenizer.json", text, "") for text in ("3", "[]", '{"added_tokens": []}')),
        *(("generation_config.json", text, "") for text in ("{", "[]", '{"eos_token_id": "x"}')),
        ("generation_config.json", '{"eos_token_id": ["x"]}', ""),
        *(("model.safetensors", text, "cannot load its weights") for text in (None, b"\xff" * 64, "half", b"")),
        ("model.safetensors", {LOST: None}, LOST),  # and never made up
        ("model.safetensors", {"model.norm.weight": torch.ones(5)}, r"norm.weight' has shape \(5,\), not \(32,\)"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_damaged_checkpoint_is_named_in_one_line(broken_dir: Path, file: str, change: Any, said: str) -> None:
    damage(broken_dir / file, change)
    assert re.match(f"target {broken_dir}: .*{said}", refusal(Target.load, str(broken_dir), device="cpu"))


def test_a_checkpoint_need_not_have_a_generation_config(broken_dir: Path) -> None:
    (broken_dir / "generation_config.json").unlink()
    assert Target.load(str(broken_dir), device="cpu").stop_token_ids == (EOS,)


def test_an_architecture_that_is_no_causal_language_model_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "t5", "architectures": ["T5Model"]}))
    said = refusal(Target.load, str(tmp_path))
    assert "architecture 't5' is not supported: transformers has no causal language model of it" in said


def test_a_missing_tokenizer_is_named(broken_dir: Path) -> None:
    for file in broken_dir.glob("tokenizer*"):
        file.unlink()
    assert refusal(load_tokenizer, str(broken_dir)).startswith(f"target {broken_dir}: cannot load its tokenizer")


@pytest.mark.parametrize("device", ["cuda:99", "warp", "cuda:-1", "meta", "mps"])
def test_a_missing_or_unsupported_device_is_named(device: str, target_dir: Path) -> None:
    assert repr(device) in refusal(Target.load, str(target_dir), device=device)


def test_an_unknown_dtype_is_named_with_those_known(target_dir: Path) -> None:
    said = refusal(Target.load, str(target_dir), dtype="int8")
    assert "'int8' is not one of auto, bfloat16, float16, float32" in said


def test_auto_is_bf16_on_a_gpu_and_fp32_on_a_cpu() -> None:
    assert resolve_dtype("auto", torch.device("cuda")) == torch.bfloat16
    assert resolve_dtype("auto", torch.device("cpu")) == torch.float32
    assert resolve_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")


# ---- FP8 in blocks -------------------------------------------------------------------------------------------------


# weights in blocks of two layers; experts have three each
IN_FP8 = {"Qwen3": 14, "Qwen3-MoE": 32, "Qwen3.5-MoE": 37, "Qwen3.5 with images": 13}


@pytest.mark.parametrize("name", IN_FP8)
@pytest.mark.parametrize("intermediate", [256, 192])
def test_a_target_in_fp8_blocks_is_its_numbers_on_a_cpu_or_one_line(
    name: str, intermediate: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("accelerate")
    sizes: dict[str, Any] = {"hidden_size": 128, "head_dim": 64, "num_hidden_layers": 2}
    widths = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")
    sizes |= dict.fromkeys(widths, intermediate)
    if "Qwen3.5" in name:
        sizes |= {"layer_types": ["linear_attention", "full_attention"]}
        sizes |= {"linear_key_head_dim": 64, "linear_value_head_dim": 64}
    numbers = in_fp8(ARCHITECTURES[name].target(**sizes), tmp_path)
    # as on a machine that has a GPU too, where transformers would keep FP8 for products that a CPU lacks
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    if intermediate % 128:  # transformers dequantizes with other blocks, and the features were off by 18
        said = refusal(Target.load, str(tmp_path), "cpu")
        assert "is not a multiple of its FP8 blocks of 128" in said and "192" in said
        return
    loaded = Target.load(str(tmp_path), "cpu")
    assert {parameter.dtype for parameter in loaded.model.parameters()} == {torch.float32}
    assert len(numbers) == IN_FP8[name]
    stored = load_file(tmp_path / "model.safetensors")
    exact = {key: numbers.get(key, value) for key, value in stored.items() if not key.endswith("_scale_inv")}
    save_file(exact, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    expected = Target.load(str(tmp_path), "cpu")
    ids = torch.arange(40)[None]
    ours, theirs = (each.forward(ids, taps=(0,), logits="all") for each in (loaded, expected))
    assert torch.equal(ours.features, theirs.features) and torch.equal(ours.logits, theirs.logits)
