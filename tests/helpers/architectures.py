"""A tiny random target of every architecture that the documents name."""

import functools
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from conftest import EOS, PAD, VOCAB, make_tokenizer
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig

from dflash_toolkit import Target

WINDOW = 8  # tokens; shorter than the shortest text

SMALL = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "tie_word_embeddings": False, "bos_token_id": None,
    "eos_token_id": EOS, "pad_token_id": PAD, "initializer_range": 0.3,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SHARED = {**EXPERTS, "shared_expert_intermediate_size": 16}
SIGMOID = {
    "head_dim": 8, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 4,
    "topk_group": 2, "routed_scaling_factor": 1.5, "n_shared_experts": 2, "use_qk_norm": True, "attention_bias": True,
}  # fmt: skip
GATED_DELTA_NET = {  # on two of three layers
    "layer_types": ["linear_attention", "linear_attention", "full_attention"] * 2, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "head_dim": 16,
}  # fmt: skip
HYBRID = {"recurrent": True, "vision": {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16}}
SLIDING = {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2, "sliding_window": WINDOW}
GRANITE = {
    "embedding_multiplier": 3.0, "residual_multiplier": 0.3, "attention_multiplier": 0.2, "logits_scaling": 2.0,
}  # fmt: skip
GEMMA = {"head_dim": 8, "query_pre_attn_scalar": 8, **SLIDING}
GEMMA_4 = {**SLIDING, "head_dim": 8, "global_head_dim": 16, "final_logit_softcapping": 2.0}
GEMMA_4_31B = {
    **GEMMA_4, "attention_k_eq_v": True, "num_global_key_value_heads": 4, "hidden_size_per_layer_input": 0,
}  # fmt: skip
GEMMA_4_E2B = {
    **GEMMA_4, "num_kv_shared_layers": 3, "use_double_wide_mlp": True, "vocab_size_per_layer_input": VOCAB,
    "hidden_size_per_layer_input": 8,
}  # fmt: skip
GEMMA_4_MOE = {
    **GEMMA_4_31B, "enable_moe_block": True, "num_experts": 6, "top_k_experts": 3, "moe_intermediate_size": 16,
}  # fmt: skip
SMALL_VISION = {
    "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8,
    "num_hidden_layers": 1, "patch_size": 4, "position_embedding_size": 16,
}  # fmt: skip
LLAMA_4 = {
    "head_dim": 8, "num_local_experts": 4, "intermediate_size": 16, "intermediate_size_mlp": 64,
    "interleave_moe_layer_step": 2, "no_rope_layer_interval": 3, "attention_chunk_size": WINDOW, "floor_scale": 4,
    "attn_scale": 0.5,
}  # fmt: skip
LLAMA_4_VISION = {
    "hidden_size": 16, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 1, "image_size": 8,
    "patch_size": 4, "vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16,
}  # fmt: skip
SIGLIP = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "image_size": 8,
          "patch_size": 4}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Architecture:
    """An architecture and the configuration of a tiny model of it."""

    name: str  # as the documents call it
    config_class: str  # in transformers
    options: dict[str, Any] = field(default_factory=dict, hash=False)  # the text part's
    vision: dict[str, Any] | None = field(default=None, hash=False)  # options of what reads images, if anything does
    recurrent: bool = False  # some layers have a state that cannot be cropped

    def config(self, **changes: Any) -> PreTrainedConfig:
        """The tiny configuration; `changes` are to its text part."""
        values = SMALL | self.options | changes
        make = getattr(transformers, self.config_class)
        if self.vision is None:
            return make(**values)
        tied = values["tie_word_embeddings"]
        return make(text_config=values, vision_config=self.vision, tie_word_embeddings=tied)

    def model(self, **changes: Any) -> Any:
        """Returns a random fp32 model with fixed weights, large enough that greedy answers vary."""
        torch.manual_seed(11)
        model = AutoModelForCausalLM.from_config(self.config(**changes), dtype=torch.float32).eval()
        with torch.no_grad():
            for weight in model.parameters():
                if weight.dim() == 1:  # norms of ones and biases of zeros would hide mistakes
                    weight.add_(torch.randn_like(weight), alpha=0.1)
            for name, buffer in model.named_buffers():
                if name.endswith("correction_bias"):
                    buffer.normal_(std=0.3)
                if name.endswith("layer_scalar"):
                    buffer.fill_(0.8 + torch.rand(1).item())
        return model

    def whole_model(self, **changes: Any) -> Any:
        """The whole model for a multimodal one, with its vision tower: its checkpoints hold that."""
        torch.manual_seed(11)
        return AutoModelForImageTextToText.from_config(self.config(**changes), dtype=torch.float32).eval()

    def target(self, **changes: Any) -> Target:
        return Target(self.model(**changes), make_tokenizer(), self.name)


ARCHITECTURES = {
    each.name: each
    for each in (
        Architecture("Llama", "LlamaConfig"),
        Architecture("Qwen2", "Qwen2Config"),
        Architecture("Qwen3", "Qwen3Config", {"head_dim": 8}),
        Architecture("Mistral", "MistralConfig", {"head_dim": 8, "sliding_window": None}),
        Architecture("Phi-3", "Phi3Config"),
        Architecture("Granite", "GraniteConfig", GRANITE),
        Architecture("SmolLM3", "SmolLM3Config", {"no_rope_layer_interval": 3}),
        Architecture("OLMo 2", "Olmo2Config"),
        Architecture("OLMo 3", "Olmo3Config", SLIDING),
        Architecture("GLM-4", "Glm4Config", {"head_dim": 8}),
        Architecture("Ernie 4.5", "Ernie4_5Config", {"head_dim": 8}),
        Architecture("Gemma 2", "Gemma2Config", {**GEMMA, "final_logit_softcapping": 2.0}),
        Architecture("Gemma 3", "Gemma3TextConfig", GEMMA),
        Architecture("Gemma 3 with images", "Gemma3Config", GEMMA, SIGLIP),
        Architecture("Gemma 4", "Gemma4TextConfig", GEMMA_4_31B),
        Architecture("Gemma 4 26B-A4B", "Gemma4TextConfig", GEMMA_4_MOE),
        Architecture("Gemma 4 E2B with images", "Gemma4Config", GEMMA_4_E2B, SMALL_VISION),
        Architecture("Qwen3-MoE", "Qwen3MoeConfig", {"head_dim": 8, "norm_topk_prob": True, **EXPERTS}),
        Architecture("GLM-4-MoE", "Glm4MoeConfig", SIGMOID),
        Architecture("Qwen2-MoE", "Qwen2MoeConfig", {**EXPERTS, "shared_expert_intermediate_size": 48}),
        Architecture(
            "gpt-oss",
            "GptOssConfig",
            {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": WINDOW},
        ),
        Architecture("Llama 4", "Llama4TextConfig", LLAMA_4),
        Architecture("Llama 4 with images", "Llama4Config", LLAMA_4, LLAMA_4_VISION),
        Architecture("Qwen3-Next", "Qwen3NextConfig", SHARED | GATED_DELTA_NET, recurrent=True),
        Architecture("Qwen3.5", "Qwen3_5TextConfig", GATED_DELTA_NET, recurrent=True),
        Architecture("Qwen3.5 with images", "Qwen3_5Config", GATED_DELTA_NET, **HYBRID),
        Architecture("Qwen3.5-MoE", "Qwen3_5MoeTextConfig", SHARED | GATED_DELTA_NET, recurrent=True),
        Architecture("Qwen3.5-MoE with images", "Qwen3_5MoeConfig", SHARED | GATED_DELTA_NET, **HYBRID),
    )
}


@functools.cache
def tiny(name: str) -> Target:
    """Returns the target of an architecture. The tests of a module share it and do not change it."""
    return ARCHITECTURES[name].target()
