"""Named shapes and random weights, for benchmarks."""

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from transformers import (
    Gemma4TextConfig,
    Glm4Config,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from dflash_toolkit.config import UserError
from dflash_toolkit.kernels.formats import cast_fp8
from dflash_toolkit.kernels.formats.int4 import SYMMETRIC_ZERO
from dflash_toolkit.models.device import use_device
from dflash_toolkit.models.dflash.config import DrafterConfig
from dflash_toolkit.models.dflash.network import Drafter
from dflash_toolkit.models.dflash.shape import drafter_shape
from dflash_toolkit.models.quantized import FORM
from dflash_toolkit.models.restrictions import Restrictions
from dflash_toolkit.models.spec import ModelSpec
from dflash_toolkit.runtime.load import Parts
from dflash_toolkit.runtime.weights import DrafterWeights, TargetWeights

STD = 0.02  # standard deviation of matrices
MXFP4_SCALE = 186  # exponent of the scales of MXFP4 in memory, where that of 1 is 193
FP8_STD = 64.0  # standard deviation of fp8 values; their scales make it STD
INT4_STD = 4.6  # standard deviation of uniform numbers of four bits
ROUTED_STD = 32.0  # standard deviation of embeddings if tokens choose experts


def _qwen2(layers: int, hidden: int, intermediate: int, heads: int) -> PreTrainedConfig:
    return Qwen2Config(
        vocab_size=151936,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=2,
        max_position_embeddings=32768,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=True,
    )


def _qwen3(layers: int, hidden: int, intermediate: int, heads: int, tied: bool) -> PreTrainedConfig:
    return Qwen3Config(
        vocab_size=151936,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=tied,
    )


def _hybrid(layers: int, hidden: int, heads: int, kv_heads: int, recurrent_heads: int) -> dict[str, Any]:
    return {
        "vocab_size": 248320,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": recurrent_heads,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
        },
        "max_position_embeddings": 262_144,
        "tie_word_embeddings": False,
    }


SHAPES: dict[str, PreTrainedConfig] = {
    "qwen3-0.6b": _qwen3(28, 1024, 3072, 16, True),
    "qwen3-1.7b": _qwen3(28, 2048, 6144, 16, True),
    "qwen3-4b": _qwen3(36, 2560, 9728, 32, True),
    "qwen3-8b": _qwen3(36, 4096, 12288, 32, False),
    "qwen3-14b": _qwen3(40, 5120, 17408, 40, False),
    "qwen3-32b": _qwen3(64, 5120, 25600, 64, False),
    "qwen2.5-0.5b": _qwen2(24, 896, 4864, 14),
    "qwen2.5-1.5b": _qwen2(28, 1536, 8960, 12),
    "smollm2": LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 1e5},
        tie_word_embeddings=True,
    ),
    "llama3.1-8b": LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        tie_word_embeddings=False,
    ),
    "phi-4": Phi3Config(
        vocab_size=100352,
        hidden_size=5120,
        intermediate_size=17920,
        num_hidden_layers=40,
        num_attention_heads=40,
        num_key_value_heads=10,
        max_position_embeddings=16384,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 250000},
        tie_word_embeddings=False,
    ),
    "granite-3.3-8b": GraniteConfig(
        vocab_size=49159,
        hidden_size=4096,
        intermediate_size=12800,
        num_hidden_layers=40,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 1e7},
        tie_word_embeddings=True,
        embedding_multiplier=12.0,
        residual_multiplier=0.22,
        attention_multiplier=0.0078125,
        logits_scaling=16.0,
    ),
    "glm-4-9b": Glm4Config(
        vocab_size=151552,
        hidden_size=4096,
        intermediate_size=13696,
        num_hidden_layers=40,
        num_attention_heads=32,
        num_key_value_heads=2,
        head_dim=128,
        max_position_embeddings=32768,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        tie_word_embeddings=False,
    ),
    "gemma-4-31b": Gemma4TextConfig(
        vocab_size=262144,
        hidden_size=5376,
        intermediate_size=21504,
        num_hidden_layers=60,
        num_attention_heads=32,
        num_key_value_heads=16,
        head_dim=256,
        num_global_key_value_heads=4,
        global_head_dim=512,
        attention_k_eq_v=True,
        hidden_size_per_layer_input=0,
        sliding_window=1024,
        final_logit_softcapping=30.0,
        max_position_embeddings=262144,
    ),
    "qwen3-30b-a3b": Qwen3MoeConfig(  # type: ignore[call-arg]  # its layers read head_dim, its class declares none
        vocab_size=151936,
        hidden_size=2048,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        max_position_embeddings=40960,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=False,
    ),
    "qwen3.5-9b": Qwen3_5TextConfig(**_hybrid(32, 4096, 16, 4, 32), intermediate_size=12288),
    "qwen3.8-27b": Qwen3_5TextConfig(**_hybrid(64, 5120, 24, 4, 48), intermediate_size=17408),
    "qwen3.6-35b-a3b": Qwen3_5MoeTextConfig(
        **_hybrid(40, 2048, 16, 2, 32),
        moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
        num_experts=256,
        num_experts_per_tok=8,
    ),
    # transformers' defaults with the layers of the 20b
    "gpt-oss-20b": GptOssConfig(
        num_hidden_layers=24, num_local_experts=32, quantization_config={"quant_method": "mxfp4"}
    ),
}


WEIGHTS = {  # suffix of a shape's name -> `quantization_config`
    "-fp8": FORM,
    "-awq": {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True},
}


def named_shape(name: str) -> PreTrainedConfig:
    """Returns the configuration of a named shape, quantized if the name ends in one of `WEIGHTS`. Raises UserError."""
    suffix = next((each for each in WEIGHTS if name.endswith(each)), "")
    dense = name.removesuffix(suffix)
    if dense not in SHAPES:
        known = ", ".join(SHAPES)
        raise UserError(f"shape {name!r} is not known; known: {known}, and the same with {' or '.join(WEIGHTS)}")
    config: Any = copy.deepcopy(SHAPES[dense])
    if suffix:
        config.quantization_config = dict(WEIGHTS[suffix])
    return config


def random_target(spec: ModelSpec, device: torch.device, dtype: torch.dtype, seed: int = 0) -> TargetWeights:
    """Returns random weights of a shape, for benchmarks: normal(0, STD) matrices, unit norms, zero biases.

    A mixture of experts has large embeddings, so that rows keep differing between tokens and choose experts
    independently. Otherwise random layers would make all rows after one context equal, and all would choose the same.
    """
    weights = TargetWeights.empty(spec, device, dtype)
    randomise(weights.parameter_views(stacked=True).items(), device, seed)
    if spec.routes:
        weights.embedding.mul_(ROUTED_STD / STD)
    return weights


def random_drafter(config: DrafterConfig, device: torch.device, dtype: torch.dtype, seed: int = 1) -> DrafterWeights:
    """A random drafter, for benchmarks."""
    generator = torch.Generator(device=device).manual_seed(seed)
    with torch.device(device):
        drafter = Drafter(config).to(dtype)
    drafter.init_weights(generator)
    return DrafterWeights.of_module(drafter)


def random_parts(shape: str, layers: int | None = None, device: str = "auto", *, drafts: bool = True) -> Parts:
    """Returns random weights of a named shape and, with `drafts`, a random drafter. Raises UserError.

    Args:
        layers: layers of the target; the drafter is then small (None: all).
    """
    config, where = named_shape(shape), use_device(device)
    dtype = torch.bfloat16 if where.type == "cuda" else torch.float32
    if layers:
        config.num_hidden_layers = layers
    sizes = {"layers": 2, "taps": 1} if layers else {}
    drafter = random_drafter(drafter_shape(config, **sizes), where, dtype) if drafts else None
    return Parts(random_target(ModelSpec.of_target(config), where, dtype), drafter, (), Restrictions())


def randomise(views: Iterable[tuple[str, Tensor]], device: torch.device, seed: int) -> None:
    """Fills parameter views with random weights, see `random_target`."""
    generator = torch.Generator(device=device).manual_seed(seed)
    for name, view in views:
        if name.endswith(".bias"):
            view.zero_()
        elif view.dim() == 1:
            view.fill_(1.0)
        elif name.endswith("_scale_inv"):
            view.fill_(STD / FP8_STD)
        elif name.endswith("_blocks"):  # MXFP4
            view.random_(generator=generator)
        elif name.endswith("_scales"):
            view.fill_(MXFP4_SCALE)
        elif view.dtype == torch.int16:  # INT4
            view.random_(-(1 << 15), 1 << 15, generator=generator)
        elif view.dtype == torch.uint8 and name.endswith("_zero"):
            view.fill_(SYMMETRIC_ZERO)
        elif view.dtype == torch.uint8:
            scale = torch.tensor([STD / INT4_STD], device=device).view(torch.uint8)
            view.copy_(scale[1:])
        elif view.dtype == torch.float8_e4m3fn:
            wide = torch.empty(view.shape, device=device, dtype=torch.bfloat16)
            view.copy_(cast_fp8(wide.normal_(std=FP8_STD, generator=generator)))
        else:
            view.normal_(std=STD, generator=generator)
