"""Loading fused weights from checkpoint files, and refused checkpoints."""

import contextlib
import copy
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES
from conftest import make_drafter, make_target
from damage import damage
from engines import ROPES
from transformers import Gemma4TextConfig, LlamaConfig, Qwen2Config, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from dflash_toolkit import Drafter, SamplingParams, Target, UserError, generate, save_drafter
from dflash_toolkit.models import spec as specs
from dflash_toolkit.models.dflash.shape import drafter_shape
from dflash_toolkit.models.spec import ModelSpec, Rope
from dflash_toolkit.runtime import EngineOptions, SyntheticAcceptance, load_engine
from dflash_toolkit.runtime.prefill_job import PrefillJob
from dflash_toolkit.runtime.weights import TargetWeights
from scripts.shapes import SHAPES, named_shape, random_drafter, random_target

OPTIONS = EngineOptions(max_num_seqs=2, kv_cache_tokens=1200, page_size=4, num_speculative_tokens=7)
CPU = torch.device("cpu")
STORED = ["Llama", "Qwen2", "Qwen3", "Qwen3-MoE", "Phi-3", "OLMo 2", "GLM-4", "Granite", "Qwen2-MoE", "GLM-4-MoE"]
STORED += ["Gemma 4 E2B with images", "Gemma 4 26B-A4B", "Llama 4", "Llama 4 with images"]


def test_engine_loaded_by_name_equals_engine_from_modules(
    target_dir: Path, drafter_dir: Path, target: Target, drafter: Drafter
) -> None:
    engine, tokenizer = load_engine(str(target_dir), str(drafter_dir), "cpu", options=OPTIONS)
    params = SamplingParams(max_tokens=30)
    assert engine.generate([[1, 2, 3]], params)[0].tokens == generate(target, drafter, [1, 2, 3], params).tokens
    assert len(tokenizer) == len(target.tokenizer)


def test_a_drafter_of_another_target_is_refused(target_dir: Path, tmp_path: Path) -> None:
    save_drafter(make_drafter(make_target(layers=8)), tmp_path)
    with pytest.raises(UserError, match="taps layer 5; this target of 6 layers"):
        load_engine(str(target_dir), str(tmp_path), "cpu", options=OPTIONS)


def test_a_chunk_may_fill_every_page_of_a_request(target: Target, drafter: Drafter) -> None:
    """The largest one that memory is measured with does, beyond the context; rope has to reach as far."""
    runner = load_engine(target, drafter, options=replace(OPTIONS, page_size=64, max_model_len=70))[0].runner
    positions = runner.pages_per_request * 64
    assert positions > 70 + 2 * 8
    runner.prefills.unpadded(PrefillJob([1] * positions, 0, [1] * runner.pages_per_request)).run()


def test_one_chunk_of_all_positions_is_full_attention() -> None:
    target = ARCHITECTURES["Llama 4"].target(attention_chunk_size=256)
    for limit, window in ((128, 0), (512, -256)):
        options = EngineOptions(max_num_seqs=1, max_model_len=limit)
        stack = load_engine(target, None, options=options)[0].runner.verifier.stack
        assert [mixer.spec.window for mixer in stack._mixers] == [window, window, 0] * 2


def test_an_engine_starts_without_transformers_networks(target_dir: Path, drafter_dir: Path) -> None:
    """Importing them takes as long as loading an 8B target."""
    program = (
        "import sys; from dflash_toolkit.runtime import EngineOptions, load_engine; "
        "options = EngineOptions(max_num_seqs=1, num_speculative_tokens=3); "
        "load_engine(sys.argv[1], sys.argv[2], 'cpu', options=options); "
        "print(*(f'transformers.{name}' in sys.modules for name in ('configuration_utils', 'modeling_utils')))"
    )
    words = [sys.executable, "-c", program, str(target_dir), str(drafter_dir)]
    found = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    assert found.split() == ["True", "False"]


@pytest.mark.parametrize("kind", ROPES)
@pytest.mark.parametrize("config", [LlamaConfig, Qwen2Config, Qwen3Config])
def test_rope_frequencies_are_those_of_transformers(kind: str, config: Any) -> None:
    rope = {"rope_type": kind, "rope_theta": 5e5, "original_max_position_embeddings": 4096} | ROPES[kind]
    spec = ModelSpec.of_target(config(rope_parameters=rope, max_position_embeddings=16384))
    theirs = LlamaRotaryEmbedding(config(rope_parameters=rope, max_position_embeddings=16384))
    rope = spec.attention[0].rope
    assert rope == Rope(tuple(theirs.inv_freq.double().tolist()), theirs.attention_scaling)
    assert (rope.factor != 1.0) == (kind == "yarn")


@pytest.mark.parametrize("name", STORED)
def test_sharded_and_untied_checkpoints_load(name: str, tmp_path: Path) -> None:
    target = ARCHITECTURES[name].target()
    stored = target.model
    if name == "Llama 4 with images":
        stored = ARCHITECTURES[name].whole_model()
        stored.language_model.load_state_dict(target.model.state_dict())
    stored.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    spec = ModelSpec.of_target(target.config)
    loaded = TargetWeights.load(tmp_path, spec, CPU, torch.float32)
    copied = TargetWeights.of_module(target.model, spec)
    shared = TargetWeights.shared_with(copy.deepcopy(target.model), spec)
    for same in (copied, shared):
        for key, view in loaded.parameter_views().items():
            assert torch.equal(view, same.parameter_views()[key]), key
    normed = ("Qwen3", "Qwen3-MoE", "OLMo 2", "GLM-4-MoE", *STORED[-4:])
    assert (loaded.layers[0].mixer.q_norm is not None) == (name in normed)
    assert (loaded.layers[0].mixer.qkv_bias is not None) == (name in ("Qwen2", "GLM-4", "Qwen2-MoE", "GLM-4-MoE"))


@pytest.mark.parametrize(
    ("architecture", "unused", "unknown"),
    [
        ("GLM-4-MoE", "layers.6.eh_proj", "layers.7.eh_proj"),  # a layer that drafts tokens
        ("Gemma 4 E2B with images", "layers.5.self_attn.k_proj", "layers.2.self_attn.r_proj"),  # of a shared layer
        ("Gemma 4", "vision_embedder.patch_dense", "layers.2.self_attn.r_proj"),  # reads images
    ],
)
def test_unused_tensors_of_checkpoints_are_skipped(
    architecture: str, unused: str, unknown: str, tmp_path: Path
) -> None:
    target = ARCHITECTURES[architecture].target()
    target.model.save_pretrained(tmp_path)
    for name in (unused, unknown):
        damage(tmp_path / WEIGHTS, {f"model.{name}.weight": torch.zeros(1)})
        refused = pytest.raises(UserError, match=name) if name == unknown else contextlib.nullcontext()
        with refused:
            TargetWeights.load(tmp_path, ModelSpec.of_target(target.config), CPU, torch.float32)


INDEX, WEIGHTS, ENDS = "model.safetensors.index.json", "model.safetensors", "generation_config.json"
DAMAGE: list[tuple[str, Any, str]] = [  # file, what it holds instead, what is said
    (WEIGHTS, {"model.norm.weight": None}, "1 tensors are missing from its weights, first 'model.norm.weight'"),
    (WEIGHTS, {"model.layers.9.mlp.up_proj.weight": torch.zeros(1)}, "'model.layers.9.mlp.up_proj"),
    (WEIGHTS, {"model.norm.weight": torch.zeros(3)}, r"has shape \(3,\), not \(32,\)"),
    (WEIGHTS, "half", r"model\.safetensors is corrupt"),
    (WEIGHTS, None, r"no \*.safetensors file"),
    *((INDEX, text, r"model\.safetensors\.index\.json: not the index") for text in ("{", "", "{}", "[]", "3", b"\xff")),
    *((INDEX, f'{{"weight_map": {value}}}', "not the index") for value in ("3", '{"a": 3}')),
    *((ENDS, text, r"generation_config\.json|eos_token_id") for text in ("{", "[]", "3", '{"eos_token_id": [["x"]]}')),
    (ENDS, '{"eos_token_id": "x"}', r"generation_config\.json|eos_token_id"),
]


@pytest.mark.parametrize(("file", "change", "said"), DAMAGE)
def test_a_checkpoint_that_does_not_fit_is_refused(
    target_dir: Path, tmp_path: Path, file: str, change: Any, said: str
) -> None:
    path = Path(shutil.copytree(target_dir, tmp_path / "damaged"))
    if file == INDEX:
        (path / WEIGHTS).unlink()
    damage(path / file, change)
    with pytest.raises(UserError, match=said):
        load_engine(str(path), None, "cpu", options=EngineOptions(num_speculative_tokens=0))
    if file == ENDS:  # it may be missing, but does not vanish
        (path / ENDS).unlink()
        load_engine(str(path), None, "cpu", options=EngineOptions(num_speculative_tokens=0))


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("num_speculative_tokens", 8, "is 8; the drafter drafts at most 7 tokens per step"),
        ("max_model_len", 513, "is 513, but the target supports 512"),
    ],
)
def test_options_are_checked_before_weights_are_read(
    target_dir: Path, drafter_dir: Path, tmp_path: Path, option: str, value: int, said: str
) -> None:
    path = Path(shutil.copytree(target_dir, tmp_path / "damaged"))
    damage(path / WEIGHTS, "")
    with pytest.raises(UserError, match=f"{option} {said}"):
        load_engine(str(path), str(drafter_dir), "cpu", options=EngineOptions(**{option: value}))


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            Gemma4TextConfig(hidden_size_per_layer_input=8, vocab_size_per_layer_input=9),
            "vocab_size_per_layer_input 9, not vocab_size, is not served by this engine",
        ),
        (LlamaConfig(layer_types=["chunked_attention"] * 32), "a layer of 'chunked_attention'"),
        (LlamaConfig(mlp_bias=True), "mlp_bias"),
        (LlamaConfig(hidden_act="gelu"), "hidden_act 'gelu'"),
        (LlamaConfig(rope_parameters=DYNAMIC), "rope type 'dynamic'"),
    ],
)
def test_unsupported_architecture_options_are_refused_by_name(config: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        ModelSpec.of_target(config)


def test_named_shapes_make_random_weights_that_fit() -> None:
    for name, config in SHAPES.items():
        taps = 8 if "a3b" in name or "gpt" in name else 5
        assert drafter_shape(config).feature_size == taps * config.hidden_size, name
        if config.model_type in specs.ARCHITECTURES:
            assert ModelSpec.of_target(config).hidden_size == config.hidden_size
    small = Qwen2Config(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=8, num_attention_heads=4,
        num_key_value_heads=2, rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )  # fmt: skip
    a, b = (random_target(ModelSpec.of_target(small), CPU, torch.float32, seed=3) for _ in range(2))
    assert torch.equal(a.layers[7].ffn.down, b.layers[7].ffn.down) and 0.01 < a.head.std() < 0.03
    assert random_drafter(drafter_shape(small), CPU, torch.float32).context_kv.shape == (5 * 2 * 2 * 4, 16)
    with pytest.raises(UserError, match="shape 'qwen9' is not known"):
        named_shape("qwen9")


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("max_num_seqs", 0, "max_num_seqs is 0"),
        ("page_size", 24, "page_size is 24; it must be a power of two"),
        ("gpu_memory_utilization", 1.5, "gpu_memory_utilization is 1.5"),
        ("num_speculative_tokens", -1, "is -1; it must be >= 0"),
    ],
)
def test_engine_options_refuse_values_out_of_range(option: str, value: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        EngineOptions(**{option: value})


@pytest.mark.parametrize("values", [{}, {"rate": 0.5, "mean_length": 2.0}, {"rate": 1.5}, {"mean_length": 0.5}])
def test_synthetic_acceptance_refuses_nonsense(values: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="synthetic"):
        SyntheticAcceptance(**values)
