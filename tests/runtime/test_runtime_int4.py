"""Targets in INT4 as AutoAWQ, GPTQModel and llm-compressor store them: the engine's answers and the reference's."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES
from conftest import make_drafter
from damage import damage
from engines import knowing, prompts_of
from int4_targets import in_int4, stored_parts
from small_vocabulary import hf_greedy

from dflash_toolkit import SamplingParams, Target, generate, save_drafter
from dflash_toolkit.checkpoint.int4 import conversions
from dflash_toolkit.config import UnsupportedModel
from dflash_toolkit.kernels.formats import DENSE, GroupedInt4, Int4
from dflash_toolkit.models.spec import ModelSpec
from dflash_toolkit.models.target_files import load_config
from dflash_toolkit.runtime import Engine, EngineOptions, load_engine

SIZES = {
    "num_hidden_layers": 4,
    "hidden_size": 128,
    "intermediate_size": 192,
    "moe_intermediate_size": 64,
    "head_dim": 32,
}
# form, columns of a group, symmetric, whole rows
FORMS = [
    ("awq", 64, False, False), ("gptq", 32, False, False), ("gptq_v2", 64, True, False),
    ("pack-quantized", 32, False, False), ("pack-quantized", 64, True, False), ("pack-quantized", 0, True, True),
]  # fmt: skip


@pytest.mark.parametrize(("form", "group", "symmetric", "whole"), FORMS)
def test_every_stored_form_holds_the_published_values(form: str, group: int, symmetric: bool, whole: bool) -> None:
    matrix = torch.randn(48, 384)
    parts, values = stored_parts(form, matrix, group or 384, symmetric)
    target = Int4(group=group, zeros=form != "pack-quantized" or not symmetric, stored=form)
    weight, find = target.empty(48, 384, new=torch.empty), conversions([DENSE, target])
    assert find is not None and find("model.norm.weight") is None
    views = target.tensors("m.weight", weight)
    for name, tensor in parts.items():
        view, convert = find(f"m.{name}") or ("", None)
        converted = convert(tensor) if convert else tensor
        if view:
            views.pop(view).copy_(converted)
    assert not views and torch.equal(weight.dense(torch.float32), values)


@pytest.mark.parametrize("symmetric", [True, False])
def test_packed_values_equal_those_of_compressed_tensors(symmetric: bool) -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    parts, values = stored_parts("pack-quantized", torch.randn(48, 384), 128, symmetric)
    arguments = QuantizationArgs(num_bits=4, type="int", symmetric=symmetric, strategy="group", group_size=128)
    scheme = QuantizationScheme(targets=["Linear"], weights=arguments)
    assert torch.equal(PackedQuantizationCompressor.decompress(parts, scheme)["weight"], values.bfloat16())


@pytest.mark.parametrize(
    ("name", "form", "group", "symmetric"),
    [("Qwen3", "awq", 64, False), ("Qwen3", "gptq", 32, True), ("Qwen3-MoE", "pack-quantized", 32, False)],
)
def test_int4_answers_equal_those_of_dequantized_modules(
    name: str, form: str, group: int, symmetric: bool, tmp_path: Path
) -> None:
    in_int4(ARCHITECTURES[name].target(**SIZES), tmp_path, form, group, symmetric=symmetric)
    target = Target.load(str(tmp_path), "cpu")
    assert getattr(target.config, "quantization_config", None) is None
    prompts, params = prompts_of(3, 9, 17), SamplingParams(max_tokens=11, ignore_eos=True)
    expected = [generate(target, None, prompt, params).tokens for prompt in prompts]
    assert hf_greedy(target, prompts[0], 11) == expected[0]
    save_drafter(make_drafter(target, taps=1), tmp_path / "drafter")
    options = EngineOptions(num_speculative_tokens=7, max_num_seqs=2, kv_cache_tokens=400, prefix_cache=True)
    engine = load_engine(str(tmp_path), str(tmp_path / "drafter"), "cpu", options=options)[0]
    (layer, *_) = engine.runner.target.layers
    assert isinstance(layer.mixer.o, GroupedInt4) and isinstance(layer.ffn.down, GroupedInt4)
    knowing(engine, dict(zip(map(tuple, prompts), expected, strict=True)), lambda position: position % 5 == 0)
    found = engine.generate(prompts, params)
    assert [answer.tokens for answer in found] == expected
    assert sum(len(answer.steps) for answer in found) < 0.5 * sum(len(answer.tokens) for answer in found)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("int4")
    in_int4(ARCHITECTURES["Qwen3"].target(**SIZES), path, "gptq", 64)
    return path


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"bits": 8}, "gptq with bits 8"),
        ({"group_size": 16}, "gptq with group_size 16"),
        ({"lm_head": True}, "gptq with lm_head True"),
        ({"dynamic": {"-:.*x": {}, ".*mlp.*": {"bits": 8}}}, r"gptq with dynamic '\.\*mlp"),
        ({"checkpoint_format": "marlin"}, "gptq with checkpoint_format 'marlin'"),
        ({"quant_method": "awq", "version": "gemv"}, "awq with version 'gemv'"),
        ({"group_size": 128}, r"o_proj.weight' of \(128, 128\)|mlp.down_proj.weight' of \(128, 192\)"),
    ],
)
def test_other_int4_weights_are_one_line(folder: Path, changes: dict[str, Any], said: str) -> None:
    config = load_config(str(folder))
    config.quantization_config |= changes
    with pytest.raises(UnsupportedModel, match=rf"{said}.* \(dflash-serve --engine vllm\)"):
        ModelSpec.of_target(config)


def test_modules_that_int4_checkpoints_keep_are_dense(folder: Path) -> None:
    config = load_config(str(folder))
    config.quantization_config["dynamic"] = {r"-:.*layers\.1\.mlp.*": {}}
    spec = ModelSpec.of_target(config)
    assert [isinstance(layer.ffn.weight, Int4) for layer in spec.layers] == [True, False, True, True]
    config.quantization_config = {"quant_method": "awq", "bits": 4, "group_size": 64, "modules_to_not_convert": ["mlp"]}
    assert ModelSpec.of_target(config).layers[0].ffn.weight == DENSE


def test_columns_sorted_by_activations_are_refused(folder: Path, tmp_path: Path) -> None:
    path, name = Path(shutil.copytree(folder, tmp_path / "model")), "model.layers.0.mlp.up_proj.g_idx"
    damage(path / "model.safetensors", {name: torch.arange(128, dtype=torch.int32).flip(0) // 64})
    for load in (lambda: load_engine(str(path), None, "cpu"), lambda: Target.load(str(path), "cpu")):
        with pytest.raises(UnsupportedModel, match=rf"{name}' .*desc_act.* \(dflash-serve --engine vllm\)"):
            load()


def test_int4_weights_are_not_replaced(folder: Path) -> None:
    engine = load_engine(str(folder), None, "cpu", options=EngineOptions(max_num_seqs=1, kv_cache_tokens=400))[0]
    with pytest.raises(UnsupportedModel, match="in 4 bits cannot be replaced"):
        engine.update_target({})


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe", "qwen3_5_moe"])
def test_a_drafter_changes_no_token_of_an_int4_target(kind: str, tmp_path: Path) -> None:
    from gpu_engines import LIMIT, pair
    from gpu_engines import knowing as knowing_on_gpu
    from gpu_engines import prompts_of as gpu_prompts

    target, drafter = pair(kind)
    in_int4(target, tmp_path, "awq", 64)
    prompts, params = gpu_prompts(64), SamplingParams(max_tokens=48, ignore_eos=True)

    def engine_of(batch: int, block: int) -> Engine:
        options = EngineOptions(
            max_num_seqs=batch, kv_cache_tokens=16 * LIMIT, prefix_cache=False, num_speculative_tokens=block - 1
        )
        return load_engine(str(tmp_path), drafter if block > 1 else None, "cuda", options=options)[0]

    plain = [answer.tokens for answer in engine_of(8, 1).generate(prompts, params)]
    for batch, block in ((8, 16), (1, 16), (8, 4)):
        engine = engine_of(batch, block)
        knowing_on_gpu(engine, prompts, plain)
        drafted = engine.generate(prompts, params)
        assert [answer.tokens for answer in drafted] == plain
        assert sum(len(answer.steps) for answer in drafted) < 64 * 47 / 2.5, "drafts were accepted"
    dense, regrets = Target.load(str(tmp_path), "cuda"), []
    for prompt, answer in zip(prompts, plain, strict=True):
        text = torch.tensor([prompt + answer], device="cuda")
        with torch.inference_mode():
            logprobs = dense.model(text).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
        regrets.append(logprobs.amax(-1) - logprobs.gather(1, text[0, len(prompt) :, None])[:, 0])
    # the modules' weights are rounded to bf16, which may change an expert or a near tie; wrong ones change all tokens
    assert torch.cat(regrets).mean() <= 0.01, "nats"
