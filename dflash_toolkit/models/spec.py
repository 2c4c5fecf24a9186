"""Reads the shapes and the arithmetic of a stack of decoder layers from its configuration."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..config import UnsupportedModel, UserError
from ..kernels.formats import BLOCK, DENSE, FP8_BLOCK, MXFP4, Format
from ..kernels.loss_terms import PLAIN, LogitScale
from .families import ARCHITECTURES as ARCHITECTURES
from .families import activation_of
from .layer_spec import CHUNKED as CHUNKED
from .layer_spec import FULL as FULL
from .layer_spec import SLIDING as SLIDING
from .layer_spec import AttentionSpec as AttentionSpec
from .layer_spec import ConvolutionSpec as ConvolutionSpec
from .layer_spec import GatedDeltaNetSpec as GatedDeltaNetSpec
from .layer_spec import LayerSpec as LayerSpec
from .layer_spec import MlpSpec as MlpSpec
from .layer_spec import MoeSpec as MoeSpec
from .layer_spec import Rope as Rope
from .layer_spec import refusal
from .quantized import QuantizedModules
from .rope import full_rope, rope_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

LAYER_INPUT_MATRICES = ("per_layer_input_gate", "per_layer_projection")  # names in a checkpoint
NOT_COMPUTED = ("mlp_bias", "use_bias", "use_bidirectional_attention")  # options that this engine refuses


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """A stack of decoder layers between an embedding and a head."""

    hidden_size: int  # D
    vocab_size: int  # V
    layers: tuple[LayerSpec, ...]
    rms_norm_eps: float
    tied_head: bool
    context_limit: int  # prompt and answer, in tokens
    embedding_scale: float = 1.0  # the target's embeddings are multiplied with it
    rounds_embedding_scale: bool = False  # to the dtype of the weights, before it is multiplied
    tap_scale: float = 1.0  # outputs of the model's layers, over those of this stack
    unused_layers: int = 0  # more layers in checkpoints, which draft tokens
    logit_scale: LogitScale = PLAIN  # scale of the head's products

    @property
    def input_size(self) -> int:
        """Returns the size of each layer's own embedding of a token, or 0."""
        return self.layers[0].input_size

    @property
    def quantized(self) -> bool:
        """Whether any matrix is quantized."""
        return self.formats != {DENSE}

    @property
    def formats(self) -> set[Format]:
        """Returns the formats of all matrices of mixers and FFNs."""
        return {part.weight for layer in self.layers for part in (layer.mixer, layer.ffn)}

    @property
    def attention(self) -> list[AttentionSpec]:
        """Returns the mixers of the layers that have pages, in layer order."""
        mixers = [layer.mixer for layer in self.layers if isinstance(layer.mixer, AttentionSpec)]
        return [mixer for mixer in mixers if mixer.source is None]

    @property
    def delta_nets(self) -> list[GatedDeltaNetSpec]:
        """Returns the mixers of the layers that have states, in layer order."""
        return [layer.mixer for layer in self.layers if isinstance(layer.mixer, GatedDeltaNetSpec)]

    @property
    def recurrent(self) -> bool:
        """Whether a request has states, which every token changes."""
        return bool(self.delta_nets)

    @property
    def kv_values_per_token(self) -> int:
        """Numbers that the cache keeps of a token, keys and values of all layers."""
        return sum(2 * mixer.num_kv_heads * mixer.head_dim for mixer in self.attention)

    @property
    def routes(self) -> bool:
        """Whether the weights that a step reads depend on its tokens."""
        return any(layer.routed for layer in self.layers)

    @property
    def dense_parameters(self) -> int:
        """Counts the matrices of mixers, MLPs and the head: every step reads them, for any rows."""
        d = self.hidden_size
        mixers = sum(n * k for layer in self.layers for n, k in layer.mixer.matrices(d).values())
        widths = [layer.ffn.intermediate_size for layer in self.layers if isinstance(layer.ffn, MlpSpec)]
        inputs = 3 * d * self.input_size * len(self.layers)
        return mixers + 3 * d * sum(widths) + inputs + self.vocab_size * d

    @classmethod
    def of_target(cls, config: "PreTrainedConfig") -> "ModelSpec":
        """Read a Hugging Face config. Raises UnsupportedModel for what the runtime does not compute."""
        c: Any = config
        name = c.name_or_path or c.model_type
        if c.model_type not in ARCHITECTURES:
            raise refusal(c, f"architecture {c.model_type!r}")
        quantized = QuantizedModules.of(config)
        every = SLIDING if getattr(c, "sliding_window", None) else FULL
        kinds = getattr(c, "layer_types", None) or [every] * c.num_hidden_layers
        chunk = getattr(c, "attention_chunk_size", None) or 0
        if unknown := {*kinds} - {SLIDING, FULL, CHUNKED if chunk else FULL, "linear_attention"}:
            raise refusal(c, f"a layer of {min(unknown)!r}")
        for key in NOT_COMPUTED:
            if (value := getattr(c, key, None)) and value != "vision":  # images
                raise refusal(c, f"architecture {c.model_type!r} with {key} {value!r}")
        architecture = ARCHITECTURES[c.model_type]
        if architecture.hybrid:
            _check_hybrid(c)

        def attention_of(kind: str) -> AttentionSpec:
            shape = c.per_layer_config[kind] if getattr(c, "is_heterogeneous", False) else c
            head_dim = getattr(shape, "head_dim", None) or c.hidden_size // c.num_attention_heads
            partial = rope_of(c, kind).get("partial_rotary_factor", 1.0) if architecture.partial_rope else 1.0
            return architecture.attention(
                bool(getattr(c, "attention_bias", getattr(c, "qkv_bias", False))),
                bool(getattr(c, "use_qk_norm", False)),
                num_heads=c.num_attention_heads,
                num_kv_heads=shape.num_key_value_heads,
                head_dim=head_dim,
                values_are_keys=getattr(c, "attention_k_eq_v", False) and kind == FULL,
                rope=Rope.of(c, kind, int(head_dim * partial)),
                window=windows.get(kind, 0),
                factor=_score_factor(c) or architecture.factor,
                soft_cap=getattr(c, "attn_logit_softcapping", None) or 0.0,
            )

        windows = {SLIDING: getattr(c, "sliding_window", 0), CHUNKED: -chunk}
        attention = {kind: attention_of(kind) for kind in (SLIDING, FULL, CHUNKED) if kind in kinds}
        sources, experts, input_size = _sources(c, kinds), _parallel_experts(c), _input_size(c)
        dense_parts = [*["experts", "router.proj"] * bool(experts), *LAYER_INPUT_MATRICES * bool(input_size)]

        def format_of(part: str, shapes: Mapping[str, tuple[int, int]]) -> Format:
            return quantized.format_of({f"{part}.{matrix}": shape for matrix, shape in shapes.items()})

        def layer_of(layer: int) -> LayerSpec:
            part, ffn, d = f"model.layers.{layer}", architecture.ffn(c, layer), c.hidden_size
            if layer in sources and getattr(c, "use_double_wide_mlp", False):
                ffn = replace(ffn, intermediate_size=2 * ffn.intermediate_size)
            if other := next((name for name in dense_parts if f"{part}.{name}" in quantized), None):
                raise refusal(c, f"'{part}.{other}' with quantized weights")
            where = ".experts" * isinstance(ffn, MoeSpec)  # experts are one module
            ffn = replace(ffn, weight=format_of(f"{part}.{architecture.ffn_name}{where}", ffn.matrices(d)))
            if isinstance(ffn, MoeSpec) and ffn.shared:
                shared = f"{part}.{architecture.ffn_name}.{ffn.shared_name}.gate_proj"
                if (shared in quantized) != (ffn.weight != DENSE):
                    raise UnsupportedModel(
                        f"target {name}: expert {shared!r} and the others must all be quantized or all 16-bit"
                    )
                if ffn.shared > 1 and ffn.weight not in (DENSE, FP8_BLOCK):
                    raise refusal(c, f"a quantized {shared!r} that is larger than other experts")
            if isinstance(ffn, MoeSpec) and ffn.clamp and ffn.weight not in (DENSE, MXFP4):
                raise refusal(c, "experts that are neither in MXFP4 nor in 16 bits")
            mixer: AttentionSpec | GatedDeltaNetSpec
            if kinds[layer] in attention:
                mixer = replace(attention[kinds[layer]], source=sources.get(layer))
                if (turning := getattr(c, "no_rope_layers", None)) and not turning[layer]:
                    mixer = _without_rope(mixer, c)
            else:
                mixer = _gated_delta_net(c, architecture.by_key_heads)
            kind = "self_attn" if isinstance(mixer, AttentionSpec) else "linear_attn"
            gates = f"{part}.linear_attn.in_proj_b{'a' * architecture.by_key_heads}"
            if quantized.format != FP8_BLOCK and kind == "linear_attn" and gates in quantized:
                raise refusal(c, f"{gates!r} with quantized weights")
            mixer = replace(mixer, weight=format_of(f"{part}.{kind}", mixer.matrices(d)))
            if mixer.weight == FP8_BLOCK and architecture.by_key_heads:
                _check_heads_are_blocks(c)
            return LayerSpec(
                mixer,
                ffn,
                zero_centered=architecture.zero_centered,
                fp32_norms=architecture.zero_centered or architecture.fp32_norms,
                norms=architecture.norms,
                ffn_name=architecture.ffn_name,
                scaled=architecture.scaled_layers,
                experts=experts,
                input_size=input_size,
            )

        # Granite multiplies what layers add to the residual stream. Here the stream is smaller by that factor instead,
        # as the norms, which alone read it, do not depend on its size up to their epsilon.
        residual, scale = getattr(c, "residual_multiplier", 1.0), getattr(c, "embedding_multiplier", 1.0)
        if architecture.scaled_embedding:
            scale = c.hidden_size**0.5
        return cls(
            hidden_size=c.hidden_size,
            vocab_size=c.vocab_size,
            layers=tuple(layer_of(layer) for layer in range(c.num_hidden_layers)),
            rms_norm_eps=c.rms_norm_eps / residual**2,
            tied_head=bool(c.tie_word_embeddings),
            context_limit=context_limit(c),
            embedding_scale=scale / residual,
            tap_scale=residual,
            unused_layers=getattr(c, "num_nextn_predict_layers", 0) or 0,
            rounds_embedding_scale=architecture.scaled_embedding,
            logit_scale=logit_scale(c),
        )


def _sources(config: Any, kinds: Sequence[str]) -> dict[int, int]:
    """Returns for each layer without own keys and values the last layer of its kind that has some (Gemma 4 E2B)."""
    first = config.num_hidden_layers - (getattr(config, "num_kv_shared_layers", 0) or 0)
    last = {kind: layer for layer, kind in enumerate(kinds[:first])}
    if missing := {*kinds} - {*last}:
        raise refusal(config, f"num_kv_shared_layers {config.num_kv_shared_layers}, all layers of {min(missing)!r},")
    return {layer: last[kinds[layer]] for layer in range(first, len(kinds))}


def _input_size(config: Any) -> int:
    """Returns the size of every layer's embedding of a token (Gemma 4 E2B). Raises UnsupportedModel."""
    size = getattr(config, "hidden_size_per_layer_input", 0) or 0
    if size and config.vocab_size_per_layer_input != config.vocab_size:
        raise refusal(config, f"vocab_size_per_layer_input {config.vocab_size_per_layer_input}, not vocab_size,")
    return size


def _parallel_experts(config: Any) -> MoeSpec | None:
    """Returns the experts next to every MLP (Gemma 4 26B-A4B)."""
    if not getattr(config, "enable_moe_block", False):
        return None
    return MoeSpec(
        num_experts=config.num_experts,
        top_k=config.top_k_experts,
        intermediate_size=config.moe_intermediate_size,
        normalized=True,
        activation=activation_of(config),
        scaled=True,
    )


def _without_rope(mixer: AttentionSpec, config: Any) -> AttentionSpec:
    """Returns the mixer of a layer that does not turn its queries and keys; Llama 4 does not norm them either."""
    tuned = getattr(config, "attn_temperature_tuning", False)
    rope = mixer.rope.still((config.floor_scale, config.attn_scale) if tuned else None)
    return replace(mixer, rope=rope, qk_norm=mixer.qk_norm and mixer.weighted_norms)


def _score_factor(config: Any) -> float | None:
    """Returns the factor on the scores of attention; None for the usual one."""
    if (multiplier := getattr(config, "attention_multiplier", None)) is not None:  # Granite
        return float(multiplier)
    scalar = getattr(config, "query_pre_attn_scalar", None)  # Gemma
    return scalar**-0.5 if scalar else None


def _gated_delta_net(config: Any, by_key_heads: bool) -> GatedDeltaNetSpec:
    return GatedDeltaNetSpec(
        num_heads=config.linear_num_value_heads,
        num_k_heads=config.linear_num_key_heads,
        head_dim=config.linear_value_head_dim,
        k_head_dim=config.linear_key_head_dim,
        taps=config.linear_conv_kernel_dim,
        by_key_heads=by_key_heads,
    )


def _check_heads_are_blocks(config: Any) -> None:
    """Rows of a block are sorted with one scale. Raises UnsupportedModel for a block with rows of two heads."""
    for key in ("linear_key_head_dim", "linear_value_head_dim"):
        if (width := getattr(config, key)) % BLOCK:
            raise refusal(config, f"{key} {width}, no multiple of its fp8 blocks of {BLOCK},")


def _check_hybrid(config: Any) -> None:
    """Raises UnsupportedModel for what transformers' Qwen3-Next and Qwen3.5 do not compute, or our layers do not."""
    for key, computed in (
        ("output_gate_type", (None, "silu", "swish")),
        ("attn_output_gate", (None, True)),
        ("attention_bias", (None, False)),
    ):
        if (value := getattr(config, key, None)) not in computed:
            raise refusal(config, f"{key} {value!r}")
    if "full_attention" not in config.layer_types:
        raise refusal(config, "a stack without a layer of full attention")


def logit_scale(config: Any) -> LogitScale:
    """Returns the multiplier on the products of a model's head, and their soft cap (Gemma 2 and 4)."""
    multiplier = getattr(config, "output_multiplier", None) or getattr(config, "logit_scale", None)  # Muse; Cohere
    if divisor := getattr(config, "logits_scaling", None):  # Granite
        multiplier = 1 / divisor
    return LogitScale(float(multiplier or 1.0), getattr(config, "final_logit_softcapping", None) or None)


def context_limit(config: "PreTrainedConfig") -> int:
    """Tokens of prompt and answer that a model was made for.

    YaRN stretches `original_max_position_embeddings` by its factor; model cards add it to a config.json and leave
    `max_position_embeddings` as it was.
    """
    limit = int(config.max_position_embeddings)
    rope = full_rope(config)
    if rope.get("rope_type") == "yarn" and rope.get("original_max_position_embeddings"):
        limit = max(limit, int(rope["factor"] * rope["original_max_position_embeddings"]))
    if rope.get("rope_type") == "longrope":  # rotates all keys otherwise in longer texts, but they are cached
        limit = min(limit, int(rope["original_max_position_embeddings"]))
    if limit < 1:
        raise UserError(f"target {config.name_or_path}: max_position_embeddings is {limit}; no token has room")
    return limit
