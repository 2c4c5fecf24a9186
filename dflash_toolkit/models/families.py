"""Lists the families of models that the engine computes, and how their layers differ from Llama's."""

from dataclasses import dataclass, replace
from typing import Any

from ..kernels.formats import Activation
from .layer_spec import AttentionSpec, MlpSpec, MoeSpec, NormNames, refusal

EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")  # keys of a configuration
ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}  # as configurations name them
INPUTS = NormNames()  # Llama's


def activation_of(config: Any) -> Activation:
    """Returns the activation of an FFN's gates. Raises UnsupportedModel."""
    given = getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", "silu")
    if given not in ACTIVATIONS:
        raise refusal(config, f"hidden_act {given!r}")
    return ACTIVATIONS[given]


@dataclass(frozen=True, slots=True)
class Architecture:
    """Lists how the layers of a family of models differ from Llama's."""

    qk_norm: bool = False
    qkv_bias: bool | None = None  # None: as `attention_bias` of the configuration says
    o_bias: bool | None = None
    experts: bool = False  # in layers that `decoder_sparse_step` and `mlp_only_layers` do not leave out
    hybrid: bool = False  # gated delta nets as `layer_types` says; gated attention with partial RoPE; centered norms
    by_key_heads: bool = False  # see `GatedDeltaNetSpec`
    partial_rope: bool = False  # `partial_rotary_factor` of the configuration counts
    joint_qk_norm: bool = False  # see `AttentionSpec`
    interleaved: bool = False  # see `AttentionSpec`
    zero_centered: bool = False  # see `LayerSpec`
    fp32_norms: bool = False  # see `LayerSpec`
    norms: NormNames = INPUTS
    scaled_embedding: bool = False  # times the root of the hidden size, in the weights' dtype
    fused_qkv: bool = False  # see `AttentionSpec.fused`
    fused_gate_up: bool = False  # see `MlpSpec.fused`
    clamped: bool = False  # see `ClampedExperts`
    sigmoid: bool = False  # see `SigmoidRouting`
    sinks: bool = False  # see `AttentionSpec`
    normed_values: bool = False  # see `AttentionSpec`
    factor: float | None = None  # see `AttentionSpec`
    scaled_layers: bool = False  # see `LayerSpec`
    weighted_norms: bool = True  # see `AttentionSpec`
    weighted_inputs: bool = False  # see `MoeSpec`
    ffn_name: str = "mlp"  # see `LayerSpec`

    def attention(self, bias: bool, qk_norm: bool = False, **sizes: Any) -> AttentionSpec:
        qkv_bias, o_bias = (bias if fixed is None else fixed for fixed in (self.qkv_bias, self.o_bias))
        return AttentionSpec(
            qk_norm=self.qk_norm or qk_norm,
            qkv_bias=qkv_bias,
            o_bias=o_bias,
            gated=self.hybrid,
            fused=self.fused_qkv,
            joint_qk_norm=self.joint_qk_norm,
            interleaved=self.interleaved,
            sinks=self.sinks,
            weighted_norms=self.weighted_norms,
            normed_values=self.normed_values,
            **sizes,
        )

    def ffn(self, config: Any, layer: int) -> MlpSpec | MoeSpec:
        between = (layer + 1) % getattr(config, "decoder_sparse_step", 1)
        dense = between or layer in getattr(config, "mlp_only_layers", ())
        dense = dense or layer < getattr(config, "first_k_dense_replace", 0)
        dense = dense or layer not in getattr(config, "moe_layers", (layer,))
        count = next((n for key in EXPERTS if (n := getattr(config, key, None)) is not None), 0)
        if not self.experts or dense or not count:
            size = getattr(config, "intermediate_size_mlp", config.intermediate_size)
            return MlpSpec(size, activation=activation_of(config), fused=self.fused_gate_up)
        sigmoid = (config.n_group, config.topk_group, config.routed_scaling_factor) if self.sigmoid else None
        clamp = getattr(config, "swiglu_alpha", 1.702), getattr(config, "swiglu_limit", 7.0)  # some versions have none
        own = self.clamped or self.weighted_inputs
        size = config.intermediate_size if own else config.moe_intermediate_size
        shared = getattr(config, "shared_expert_intermediate_size", 0) or getattr(config, "n_shared_experts", 0) * size
        if self.weighted_inputs:
            shared, sigmoid = size, (1, 1, 1.0)
        if shared % size:
            raise refusal(config, f"a shared expert of {shared}, no multiple of the others' {size},")
        return MoeSpec(
            num_experts=count,
            top_k=config.num_experts_per_tok,
            intermediate_size=size,
            clamp=clamp if self.clamped else None,
            normalized=getattr(config, "norm_topk_prob", not self.weighted_inputs),
            shared=shared // size,
            sigmoid=sigmoid,
            weighted_inputs=self.weighted_inputs,
        )


BOTH_SIDES = NormNames(
    mixer_output="post_attention_layernorm",
    ffn_input="pre_feedforward_layernorm",
    ffn_output="post_feedforward_layernorm",
)  # Gemma's
GLM_SIDES = NormNames(mixer_output="post_self_attn_layernorm", ffn_output="post_mlp_layernorm")
OUTPUTS = NormNames(
    mixer_input=None, mixer_output="post_attention_layernorm", ffn_input=None, ffn_output="post_feedforward_layernorm"
)  # OLMo's

HYBRID = Architecture(
    qk_norm=True, qkv_bias=False, o_bias=False, zero_centered=True, partial_rope=True, hybrid=True
)  # Qwen3.5

GEMMA_4 = Architecture(
    qk_norm=True,
    fp32_norms=True,
    norms=BOTH_SIDES,
    scaled_embedding=True,
    normed_values=True,
    factor=1.0,
    scaled_layers=True,
)

# supported architectures by `model_type`
ARCHITECTURES = {
    "llama": Architecture(),
    "mistral": Architecture(qkv_bias=False, o_bias=False),
    "qwen2": Architecture(qkv_bias=True, o_bias=False),
    "qwen3": Architecture(qk_norm=True),
    "qwen3_moe": Architecture(qk_norm=True, experts=True),
    "qwen3_next": replace(HYBRID, experts=True, by_key_heads=True),
    "qwen3_5_text": HYBRID,
    "qwen3_5_moe_text": replace(HYBRID, experts=True),
    "phi3": Architecture(qkv_bias=False, o_bias=False, partial_rope=True, fused_qkv=True, fused_gate_up=True),
    "ernie4_5": Architecture(interleaved=True),
    "granite": Architecture(),
    "smollm3": Architecture(),
    "olmo2": Architecture(joint_qk_norm=True, norms=OUTPUTS, fp32_norms=True),
    "olmo3": Architecture(joint_qk_norm=True, norms=OUTPUTS, fp32_norms=True),
    "qwen2_moe": Architecture(o_bias=False, experts=True),
    "glm4_moe": Architecture(o_bias=False, partial_rope=True, experts=True, sigmoid=True),
    "glm4": Architecture(o_bias=False, partial_rope=True, norms=GLM_SIDES, fused_gate_up=True, interleaved=True),
    "gpt_oss": Architecture(experts=True, clamped=True, sinks=True, fp32_norms=True),
    "gemma2": Architecture(zero_centered=True, norms=BOTH_SIDES, scaled_embedding=True),
    "gemma3_text": Architecture(qk_norm=True, zero_centered=True, norms=BOTH_SIDES, scaled_embedding=True),
    "llama4_text": Architecture(
        experts=True, interleaved=True, weighted_norms=False, weighted_inputs=True, ffn_name="feed_forward"
    ),
    "gemma4_text": GEMMA_4,
    "gemma4_unified_text": GEMMA_4,
}
