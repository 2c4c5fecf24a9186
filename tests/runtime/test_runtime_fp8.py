"""Targets in fp8 blocks: from files and from modules; the engine's answers equal those of transformers' modules."""

import functools
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES
from conftest import make_drafter, make_tokenizer
from damage import damage
from engines import knowing, make_engine, prompts_of
from fp8_targets import CHANGES, HYBRID, SIZES, in_fp8, in_modules, rows_of_reference
from kernel_inputs import fp8_type as fp8_type
from safetensors.torch import load_file, save_file
from small_vocabulary import hf_greedy
from torch import Tensor
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from dflash_toolkit import SamplingParams, Target, UserError, generate, save_drafter
from dflash_toolkit.config import UnsupportedModel
from dflash_toolkit.kernels import reference
from dflash_toolkit.kernels.formats import (
    DENSE,
    FP8_BLOCK,
    FP8_CHANNEL,
    BlockScaledFp8,
    QuantizedRows,
    dequantized,
    parts,
    quantize_groups,
)
from dflash_toolkit.kernels.ops import Reference
from dflash_toolkit.models.quantized import EIGHT, FORM, GROUP
from dflash_toolkit.models.spec import GatedDeltaNetSpec, ModelSpec
from dflash_toolkit.models.target_files import load_config
from dflash_toolkit.runtime import EngineOptions, load_engine
from dflash_toolkit.runtime.weights import GatedDeltaNetWeights, TargetWeights
from scripts.shapes import named_shape, random_target


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target as Qwen3-*-FP8 has it."""
    path = tmp_path_factory.mktemp("fp8")
    in_fp8(ARCHITECTURES["Qwen3"].target(**SIZES), path)
    return path


@pytest.mark.parametrize("name", ["Qwen3", "Qwen3-MoE", "Qwen3-Next", "Qwen3.5-MoE"])
def test_fp8_answers_equal_those_of_transformers_modules(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, gated = reference.add_rms_norm, reference.gated_rms_norm
    norms = set[str]()

    def quantized(rows: Tensor, norm: str) -> QuantizedRows:  # as kernels hand rows on
        norms.add(norm)
        return QuantizedRows(rows, *quantize_groups(rows))

    def add_rms_norm(*given: Any) -> tuple[Tensor, QuantizedRows]:
        total, normed = plain(*given)
        return total, quantized(normed, "plain")

    monkeypatch.setattr(Reference, "add_rms_norm_quantized", staticmethod(add_rms_norm))
    gated_quantized = staticmethod(lambda *given: quantized(gated(*given), "gated"))
    monkeypatch.setattr(Reference, "gated_rms_norm_quantized", gated_quantized)
    sizes = SIZES | CHANGES.get(name, {})
    in_fp8(ARCHITECTURES[name].target(**sizes), tmp_path)
    with in_modules(tmp_path) as target:
        check_answers(tmp_path, target)
    assert norms == ({"plain", "gated"} if name in CHANGES else {"plain"})


def check_answers(folder: Path, target: Target) -> None:
    """With and without a drafter, from files and from modules, in batches and after chunks of prompts."""
    drafter = make_drafter(target, taps=1)
    prompts = prompts_of(3, 6, 11, 17)
    params = SamplingParams(max_tokens=11, ignore_eos=True)
    expected = [generate(target, None, prompt, params).tokens for prompt in prompts]
    assert hf_greedy(target, prompts[0], 11) == expected[0]
    drafted = make_engine(target, drafter, prefix_cache=True)
    plain = load_engine(str(folder), None, "cpu", options=replace(drafted.options, num_speculative_tokens=0))[0]
    assert plain.runner.target.spec.quantized
    loaded, copied = (engine.runner.target.parameter_views() for engine in (plain, drafted))
    assert all(torch.equal(view.float(), copied[name].float()) for name, view in loaded.items())
    knowing(drafted, dict(zip(map(tuple, prompts), expected, strict=True)), lambda position: position % 5 == 0)
    for engine in (plain, drafted):
        found = engine.generate(prompts, params)
        # a value between two numbers of the format may round to the other one if sums are split differently
        assert sum(answer.tokens == tokens for answer, tokens in zip(found, expected, strict=True)) >= len(prompts) - 1
    assert sum(len(answer.steps) for answer in found) < 0.5 * sum(len(answer.tokens) for answer in found)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="test_runtime_gpu.py runs the kernels")
@pytest.mark.usefixtures("fp8_type")
@pytest.mark.parametrize("fp8_type", ["uint8"], indirect=True)
def test_kernels_without_fp8_products_generate_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs the engine's kernels in the interpreter, with attention, experts and a head, against their definitions."""
    pytest.importorskip("triton")
    from dflash_toolkit.kernels.gpu import Gpu

    in_fp8(ARCHITECTURES["Qwen3-MoE"].target(**SIZES | {"num_hidden_layers": 1}), tmp_path)
    params, options = SamplingParams(max_tokens=3, ignore_eos=True), EngineOptions(max_model_len=32, max_num_seqs=1)
    found = []
    for kernels in (False, True):
        if kernels:
            monkeypatch.setattr("dflash_toolkit.runtime.engine.ops_for", lambda _: Gpu())
        engine = load_engine(str(tmp_path), None, "cpu", options=options)[0]
        assert isinstance(engine.runner.ops, Gpu) == kernels
        found.append([answer.tokens for answer in engine.generate(prompts_of(5), params)])
    assert found[0] == found[1]


def config_of(folder: Path, **changes: Any) -> Any:
    config = load_config(str(folder))
    config.quantization_config |= changes
    return config


def test_unconverted_modules_are_not_quantized(folder: Path) -> None:
    spec = ModelSpec.of_target(config_of(folder, modules_to_not_convert=["lm_head", "model.layers.1", "layers.3.mlp"]))
    assert [(layer.mixer.weight == FP8_BLOCK, layer.ffn.weight == FP8_BLOCK) for layer in spec.layers] == [
        (True, True), (False, False), (True, True), (True, True),
    ], "a name that ends with layers.3.mlp is not that of its matrices"  # fmt: skip
    spec = ModelSpec.of_target(config_of(folder, modules_to_not_convert=["model.language_model.layers.3.mlp"]))
    assert [layer.ffn.weight for layer in spec.layers] == [FP8_BLOCK] * 3 + [DENSE]
    weights = TargetWeights.empty(spec, torch.device("meta"), torch.bfloat16)
    kinds = {name: view.dtype for name, view in weights.parameter_views().items()}
    assert kinds["model.layers.2.mlp.up_proj.weight"] == torch.float8_e4m3fn
    assert kinds["model.layers.2.mlp.up_proj.weight_scale_inv"] == torch.float32
    assert kinds["model.layers.3.mlp.up_proj.weight"] == kinds["lm_head.weight"] == torch.bfloat16


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"quant_method": "hqq"}, "quantized weights with quant_method 'hqq' are not served .* --engine vllm"),
        ({"weight_block_size": None}, r"weight_block_size None are not served by this engine \(it takes \[128, 128\]"),
        ({"activation_scheme": "static"}, "activation_scheme 'static'"),
        ({"scale_fmt": "ue8m0"}, "scale_fmt 'ue8m0'"),
        ({"modules_to_not_convert": ["o_proj"]}, "q_proj' is quantized and 'model.layers.0.self_attn.o_proj' is not"),
    ],
)
def test_other_quantizations_are_one_line(folder: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedModel, match=said):
        ModelSpec.of_target(config_of(folder, **changes))


def test_dimensions_that_no_fp8_block_divides_are_refused(folder: Path) -> None:
    config = config_of(folder)
    config.intermediate_size = 192
    with pytest.raises(UnsupportedModel, match=r"layers.0.mlp.gate_proj.weight' of \(192, 128\)"):
        ModelSpec.of_target(config)


@pytest.mark.parametrize("form", ["16 bits", "blocks", "rows"])
def test_rows_and_scales_are_sorted_as_in_transformers(form: str) -> None:
    heads = {"num_heads": 4, "num_k_heads": 2, "head_dim": 128, "k_head_dim": 128, "taps": 4, "by_key_heads": True}
    spec = GatedDeltaNetSpec(**heads, weight={"16 bits": DENSE, "rows": FP8_CHANNEL}.get(form, FP8_BLOCK))
    weights = GatedDeltaNetWeights.empty(spec, 128, torch.empty)
    stored, ba = torch.randn(spec.channels + spec.width, 128), torch.randn(8, 128)
    matrix = stored if form == "16 bits" else BlockScaledFp8.of(stored, by_rows=form == "rows")
    for view, part in zip(parts(weights.qkvz), parts(matrix), strict=True):
        if view is not None and part is not None:
            view.copy_(part)
    weights.ba.copy_(ba)
    weights.sort(spec)
    config = ARCHITECTURES["Qwen3-Next"].config(linear_key_head_dim=128, linear_value_head_dim=128)
    mixer = Qwen3NextGatedDeltaNet(config, 0)
    made = mixer.fix_query_key_value_ordering(dequantized(matrix, torch.float32).T[None], ba.T[None])
    *qkvz, b, a = (part.flatten(2)[0].T for part in made)
    assert torch.equal(dequantized(weights.qkvz, torch.float32), torch.cat(qkvz))
    assert torch.equal(weights.ba, torch.cat([b, a]))


def test_heads_that_share_a_block_of_sorted_rows_are_refused() -> None:
    config = ARCHITECTURES["Qwen3-Next"].config(**SIZES, **HYBRID)
    config.quantization_config = dict(FORM)
    with pytest.raises(UnsupportedModel, match=r"linear_key_head_dim 64, .*128"):
        ModelSpec.of_target(config)


def test_weights_that_contradict_the_configuration_are_refused(folder: Path, tmp_path: Path) -> None:
    path, name = Path(shutil.copytree(folder, tmp_path / "model")), "model.layers.0.mlp.up_proj.weight"
    damage(path / "model.safetensors", {name: torch.zeros(256, 128, dtype=torch.bfloat16)})
    with pytest.raises(UserError, match=rf"'{name}' .*bfloat16.*float8_e4m3fn"):
        load_engine(str(path), None, "cpu")
    damage(path / "config.json", {"quantization_config": None})
    with pytest.raises(UnsupportedModel, match=r"float8_e4m3fn.*float32|weight_scale_inv"):
        load_engine(str(path), None, "cpu")


def test_random_weights_in_fp8_are_of_the_size_of_others() -> None:
    config = named_shape("qwen3-8b-fp8")
    config.num_hidden_layers, config.vocab_size = 1, 64
    config.hidden_size, config.intermediate_size, config.num_attention_heads = 256, 512, 8
    weights = random_target(ModelSpec.of_target(config), torch.device("cpu"), torch.bfloat16)
    for matrix in (weights.layers[0].mixer.qkv, weights.layers[0].ffn.gate_up, weights.layers[0].ffn.down):
        assert isinstance(matrix, BlockScaledFp8) and 0.019 < matrix.dense(torch.float32).std() < 0.021
    assert named_shape("qwen3-8b").num_hidden_layers == 36 and not hasattr(
        named_shape("qwen3-8b"), "quantization_config"
    )


# ---- FP8 by channels and tokens ------------------------------------------------------------------------------------

DYNAMIC = {
    "quant_method": "compressed-tensors", "format": "float-quantized",
    "ignore": ["lm_head", "re:.*layers.1.(mlp|feed_forward).*", "re:.*in_proj_[ab]$"],
    "config_groups": {"group_0": {"targets": ["Linear"], **GROUP}},
}  # fmt: skip


QUANTIZED = ("_proj", "in_proj_qkv", "in_proj_z")


def quantize_experts(name: str, module: Any) -> dict[str, Tensor]:
    """The tensors of its checkpoint; from then on it computes with them."""
    tensors: dict[str, Any] = dict.fromkeys((f"{name}.gate_up_proj", f"{name}.down_proj"))
    stacked, transposed = [], "feed_forward" in name  # Llama 4's
    for matrices, names in ((module.gate_up_proj, ("gate_proj", "up_proj")), (module.down_proj, ("down_proj",))):
        each = [BlockScaledFp8.of(matrix, by_rows=True) for matrix in (matrices.mT if transposed else matrices)]
        for i, weight in enumerate(each):
            weight.scale.copy_(weight.scale.bfloat16())
            for part, piece in zip(names, weight.split([len(weight) // len(names)] * len(names)), strict=True):
                tensors[f"{name}.{i}.{part}.weight"] = piece.data.contiguous()
                tensors[f"{name}.{i}.{part}.weight_scale"] = piece.scale.bfloat16().contiguous()
        stacked.append(BlockScaledFp8(*(torch.stack([getattr(w, x) for w in each]) for x in ("data", "scale")), True))

    def forward(x: Tensor, chosen: Tensor | None = None, weights: Tensor | None = None) -> Tensor:
        if chosen is None or weights is None:  # each expert has its own rows
            chosen = torch.arange(len(each)).repeat_interleave(len(x) // len(each))[:, None]
            weights = torch.ones(len(x), 1)
        return reference.experts_mlp(x, *stacked, weights, chosen).sum(0)

    module.forward = forward
    return tensors


@pytest.mark.parametrize("name", ["Qwen3.5-MoE", "Llama 4"])
def test_fp8_by_channels_equals_modules_with_quantized_rows(name: str, tmp_path: Path) -> None:
    dense = ARCHITECTURES[name].target(**SIZES | CHANGES.get(name, {}))
    dense.model.save_pretrained(tmp_path)
    dense.tokenizer.save_pretrained(tmp_path)
    tensors = {}
    for name, module in dense.model.named_modules():
        if name.startswith(("model.layers.1.mlp", "model.layers.1.feed_forward")):
            continue
        if name.endswith(QUANTIZED):
            weight = BlockScaledFp8.of(module.weight, by_rows=True)
            weight.scale.copy_(weight.scale.bfloat16())  # as such checkpoints have them
            tensors |= {f"{name}.weight": weight.data, f"{name}.weight_scale": weight.scale.bfloat16()}
            module.forward = functools.partial(rows_of_reference, weight=weight)
        elif name.endswith("experts"):
            tensors |= quantize_experts(name, module)
    damage(tmp_path / "model.safetensors", tensors)
    damage(tmp_path / "config.json", {"quantization_config": DYNAMIC})
    prompts, params = prompts_of(5, 9, 14), SamplingParams(max_tokens=12, ignore_eos=True)
    expected = [generate(dense, None, prompt, params).tokens for prompt in prompts]
    save_drafter(make_drafter(dense, taps=1), tmp_path / "drafter")
    options = EngineOptions(num_speculative_tokens=7, max_num_seqs=2, kv_cache_tokens=400)
    engine = load_engine(str(tmp_path), str(tmp_path / "drafter"), "cpu", options=options)[0]
    formats = [(layer.mixer.weight, layer.ffn.weight) for layer in engine.runner.target.spec.layers]
    assert formats == [(FP8_CHANNEL, FP8_CHANNEL), (FP8_CHANNEL, DENSE), *[(FP8_CHANNEL, FP8_CHANNEL)] * 2]
    knowing(engine, dict(zip(map(tuple, prompts), expected, strict=True)), lambda position: position % 5 == 0)
    found = engine.generate(prompts, params)
    assert sum(ours.tokens == theirs for ours, theirs in zip(found, expected, strict=True)) >= 2
    assert sum(len(answer.steps) for answer in found) < 0.5 * sum(len(answer.tokens) for answer in found)


STATIC = {**EIGHT, "strategy": "tensor", "dynamic": False}
MODELOPT = {"quant_algo": "FP8", "kv_cache_quant_algo": None, "exclude_modules": ["lm_head", "model.layers.1.*"]}
BY_TENSOR = {
    "modelopt's file": MODELOPT,
    "modelopt": {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": MODELOPT["exclude_modules"]},
    "compressed-tensors": DYNAMIC | {
        "ignore": ["lm_head", r"re:model\.layers\.1\..*"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": STATIC, "input_activations": STATIC}},
    },
}  # fmt: skip


@pytest.mark.parametrize("form", BY_TENSOR)
@pytest.mark.parametrize("name", ["Qwen3", "Qwen3-MoE"])
def test_scales_of_whole_fp8_matrices_become_those_of_rows(name: str, form: str, tmp_path: Path) -> None:
    ARCHITECTURES[name].target(**SIZES).model.save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    stored, values = load_file(tmp_path / "model.safetensors"), {}
    for key, matrix in list(stored.items()):
        if matrix.dim() == 2 and "_proj" in key and "layers.1." not in key:
            scale = matrix.abs().max() / 448
            stored[key] = (matrix / scale).to(torch.float8_e4m3fn)
            values[key] = stored[key].float() * scale
            stored |= {f"{key}_scale": scale, f"{key.removesuffix('weight')}input_scale": torch.tensor(0.5)}
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    if form == "modelopt's file":
        (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": MODELOPT}))
    else:
        damage(tmp_path / "config.json", {"quantization_config": BY_TENSOR[form]})
    options = EngineOptions(max_num_seqs=1, kv_cache_tokens=400)
    weights = load_engine(str(tmp_path), None, "cpu", options=options)[0].runner.target
    assert [layer.mixer.weight for layer in weights.spec.layers[:2]] == [FP8_CHANNEL, DENSE]
    views = weights.parameter_views()
    for key, value in values.items():
        assert torch.equal(views[key].float() * views[f"{key}_scale"], value), key
    if form.startswith("modelopt"):
        loaded = dict(Target.load(str(tmp_path), "cpu").model.named_parameters())
        o = "model.layers.0.self_attn.o_proj.weight"
        assert torch.equal(loaded[o], values[o])


def test_shared_experts_are_as_the_others() -> None:
    config = ARCHITECTURES["Qwen3.5-MoE"].config(**SIZES | HYBRID)
    for kept in ("shared_expert", "experts"):
        config.quantization_config = DYNAMIC | {"ignore": ["lm_head", "re:.*in_proj_[ab]$", rf"re:.*mlp\.{kept}"]}
        with pytest.raises(UnsupportedModel, match=r"layers.0.mlp.shared_expert.gate_proj'"):
            ModelSpec.of_target(config)


def test_gates_in_fp8_by_channels_are_one_line() -> None:
    config = ARCHITECTURES["Qwen3.5"].config(**SIZES | HYBRID)
    config.quantization_config = DYNAMIC | {"ignore": ["lm_head"]}
    with pytest.raises(UnsupportedModel, match=r"linear_attn.in_proj_b' .*--engine vllm"):
        ModelSpec.of_target(config)


def test_unsupported_compressed_tensors_schemes_name_the_key(folder: Path) -> None:
    def group(**changes: Any) -> dict[str, Any]:
        return {"config_groups": {"group_0": {"targets": ["Linear"], **GROUP, **changes}}}

    for changes, said in (
        (group(input_activations=None), "input_activations.num_bits None"),
        (group(weights=GROUP["weights"] | {"strategy": "block"}), "weights.strategy 'block'"),
        (group(targets=["re:.*mlp.*"]), r"targets \['re:.*'\]"),
        ({"config_groups": {"a": {}, "b": {}}}, "2 config_groups"),
        ({"format": "mxfp8-quantized"}, "format 'mxfp8-quantized'"),
    ):
        config = config_of(folder)
        config.quantization_config = DYNAMIC | KV_CACHE | changes
        with pytest.raises(UnsupportedModel, match=f"compressed-tensors with {said} are not served .* --engine vllm"):
            ModelSpec.of_target(config)


KV_CACHE = {"kv_cache_scheme": EIGHT | {"strategy": "tensor", "dynamic": False}}
SCALES = {f"model.layers.0.self_attn.{name}_scale": torch.ones(1) for name in "kv"}


def test_scales_of_a_quantized_cache_are_not_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Their weights are in 16 bits, in FP8, or nothing says why they are stored."""
    target = ARCHITECTURES["Qwen3"].target(**SIZES)
    target.model.save_pretrained(tmp_path)
    target.tokenizer.save_pretrained(tmp_path)
    options = EngineOptions(max_num_seqs=1, kv_cache_tokens=400)
    expected = load_engine(str(tmp_path), None, "cpu", options=options)[0].generate(
        [[1, 2]], SamplingParams(max_tokens=8)
    )
    assert "notice" not in capsys.readouterr().err
    damage(tmp_path / "model.safetensors", SCALES)
    only_the_cache = DYNAMIC | KV_CACHE | {"config_groups": {}}
    for quantization in (None, only_the_cache):
        damage(tmp_path / "config.json", {"quantization_config": quantization})
        found = load_engine(str(tmp_path), None, "cpu", options=options)[0].generate(
            [[1, 2]], SamplingParams(max_tokens=8)
        )
        assert found[0].tokens == expected[0].tokens
        (line,) = (line for line in capsys.readouterr().err.splitlines() if "KV cache" in line)
        assert line == (
            f"notice: target {tmp_path}: its scales of a quantized KV cache are not used, see --kv-cache-dtype"
        )
    in_fp8 = ModelSpec.of_target(fp8_by_channels(KV_CACHE))
    assert in_fp8 == ModelSpec.of_target(fp8_by_channels({}))


def fp8_by_channels(changes: dict[str, Any]) -> Any:
    config = ARCHITECTURES["Qwen3"].config(**SIZES)
    config.quantization_config = DYNAMIC | changes
    return config


@pytest.mark.parametrize(
    "name", ["model.language_model.layers.1.mlp.up_proj", r"re:.*model\.language_model\.layers\.1\.mlp.*"]
)
def test_ignored_modules_of_a_model_with_images_are_known(name: str) -> None:
    ignored = [name.replace("up_proj", part) for part in ("up_proj", "gate_proj", "down_proj")]
    spec = ModelSpec.of_target(fp8_by_channels({"ignore": ["lm_head", *ignored]}))
    assert [layer.ffn.weight for layer in spec.layers[:3]] == [FP8_CHANNEL, DENSE, FP8_CHANNEL]
