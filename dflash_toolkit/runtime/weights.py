"""Weights in the form the step reads them: fused projections, one decoder layer for Llama, Qwen2, Qwen3 and drafters.

Tensors go from safetensors straight to their place in the fused matrix on the device; nothing is built twice.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from ..checkpoint.filling import EMBEDDING, HEAD, check_tied, fill, fill_from_files, tensor_files
from ..config import UserError
from ..kernels.ops import ops_for
from ..kernels.weight import RowScaledFp8, Weight
from ..models.dflash.network import Drafter, DrafterConfig
from ..models.rope import ROPE_TYPES, scaled_frequencies
from ..models.target import context_limit

WIDE_IN_FP8 = 2560  # hidden size from which layers in fp8 are faster at any row count that was tried; 1024 is not


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """What fixes the shapes and the arithmetic of a stack of decoder layers."""

    hidden_size: int  # D
    num_layers: int
    num_heads: int  # N
    num_kv_heads: int  # G
    head_dim: int  # H
    intermediate_size: int  # I
    vocab_size: int  # V
    rms_norm_eps: float
    qk_norm: bool
    qkv_bias: bool
    o_bias: bool
    tied_head: bool
    context_limit: int  # prompt and answer, in tokens
    rope_frequencies: tuple[float, ...]  # [H / 2], radians per position
    rope_factor: float = 1.0  # on cosines and sines (yarn)
    causal: tuple[bool, ...] = ()  # by layer, inside the block
    windows: tuple[int, ...] = ()  # by layer, 0 is full attention

    @property
    def qkv_rows(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def kv_values_per_token(self) -> int:
        """Numbers that the cache keeps of a token, keys and values of all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim

    @classmethod
    def of_target(cls, config: PreTrainedConfig) -> "ModelSpec":
        """Read a Hugging Face config. Raises UserError for what the runtime does not compute."""
        c: Any = config
        name = c.name_or_path or c.model_type
        if getattr(c, "quantization_config", None):
            raise UserError(f"target {name}: quantised weights are not supported by the runtime")
        if getattr(c, "use_sliding_window", False) or "sliding_attention" in (getattr(c, "layer_types", None) or ()):
            raise UserError(f"target {name}: sliding-window attention is not supported by the runtime")
        if getattr(c, "mlp_bias", False):
            raise UserError(f"target {name}: mlp_bias is not supported by the runtime")
        if getattr(c, "hidden_act", "silu") != "silu":
            raise UserError(f"target {name}: hidden_act {c.hidden_act!r} is not supported by the runtime; only silu")
        kind = (c.rope_parameters or {}).get("rope_type", "default")
        if kind not in ROPE_TYPES:
            raise UserError(
                f"target {name}: rope type {kind!r} is not supported by the runtime: {', '.join(ROPE_TYPES)}"
            )
        head_dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
        if kind == "default":
            exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
            plain = 1.0 / c.rope_parameters["rope_theta"] ** exponents
            frequencies, factor = tuple(plain.double().tolist()), 1.0
        else:
            frequencies, factor = scaled_frequencies(c)
        bias = c.model_type == "qwen2" or bool(getattr(c, "attention_bias", False))
        return cls(
            hidden_size=c.hidden_size,
            num_layers=c.num_hidden_layers,
            num_heads=c.num_attention_heads,
            num_kv_heads=c.num_key_value_heads,
            head_dim=head_dim,
            intermediate_size=c.intermediate_size,
            vocab_size=c.vocab_size,
            rms_norm_eps=c.rms_norm_eps,
            qk_norm=c.model_type == "qwen3",
            qkv_bias=bias,
            o_bias=bias and c.model_type != "qwen2",
            tied_head=bool(c.tie_word_embeddings),
            context_limit=context_limit(c),
            rope_frequencies=frequencies,
            rope_factor=factor,
            causal=(True,) * c.num_hidden_layers,
            windows=(0,) * c.num_hidden_layers,
        )

    @classmethod
    def of_drafter(cls, config: DrafterConfig) -> "ModelSpec":
        sliding = [kind == "sliding_attention" for kind in config.layer_types]
        return cls(
            hidden_size=config.hidden_size,
            num_layers=config.num_layers,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            intermediate_size=config.intermediate_size,
            vocab_size=config.vocab_size,
            rms_norm_eps=config.rms_norm_eps,
            qk_norm=True,
            qkv_bias=config.attention_bias,
            o_bias=config.attention_bias,
            tied_head=True,
            context_limit=config.max_position_embeddings,
            rope_frequencies=tuple(config.rope_frequencies().double().tolist()),
            rope_factor=config.rope_factor,
            causal=tuple(config.causal_inside_block(i) for i in range(config.num_layers)),
            windows=tuple((config.sliding_window or 0) if s else 0 for s in sliding),
        )

    def rope_table(self, positions: int, device: torch.device) -> Tensor:
        """Cosines and sines, fp32 [2, positions, H / 2]."""
        frequencies = torch.tensor(self.rope_frequencies, dtype=torch.float32, device=device)
        angles = torch.arange(positions, device=device, dtype=torch.float32)[:, None] * frequencies
        return torch.stack([angles.cos(), angles.sin()]) * self.rope_factor


@dataclass(slots=True)
class LayerWeights:
    """One decoder layer."""

    input_norm: Tensor  # [D]
    qkv: Weight  # [(N + 2 G) H, D]
    qkv_bias: Tensor | None  # [(N + 2 G) H]
    q_norm: Tensor | None  # [H]
    k_norm: Tensor | None  # [H]
    o: Weight  # [D, N H]
    o_bias: Tensor | None  # [D]
    post_norm: Tensor  # [D]
    gate_up: Weight  # [2 I, D], rows gate 0, up 0, gate 1, up 1, ...
    down: Weight  # [D, I]

    @classmethod
    def empty(cls, spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> "LayerWeights":
        def new(*shape: int) -> Tensor:
            return torch.empty(shape, device=device, dtype=dtype)

        d, h, i = spec.hidden_size, spec.head_dim, spec.intermediate_size
        return cls(
            input_norm=new(d),
            qkv=new(spec.qkv_rows, d),
            qkv_bias=new(spec.qkv_rows) if spec.qkv_bias else None,
            q_norm=new(h) if spec.qk_norm else None,
            k_norm=new(h) if spec.qk_norm else None,
            o=new(d, spec.num_heads * h),
            o_bias=new(d) if spec.o_bias else None,
            post_norm=new(d),
            gate_up=new(2 * i, d),
            down=new(d, i),
        )

    def quantized(self, *, first: bool) -> "LayerWeights":
        """The same layer with its matrices in fp8, but for the queries, keys and values of the `first`.

        Those have a launch of their own, which knows bf16 only. Rows behind a norm are cast as they come; so its
        weights are brought to the order of one, by a power of two which the scales of the matrix give back.
        """

        def behind(norm: Tensor, matrix: Weight) -> tuple[Tensor, RowScaledFp8]:
            assert isinstance(matrix, Tensor), "quantized once"
            size = norm.float().pow(2).mean().sqrt().clamp(min=1e-6).log2().round().exp2()
            narrow = RowScaledFp8.of(matrix)
            return (norm / size).to(norm.dtype), replace(narrow, scale=narrow.scale * size)

        assert isinstance(self.o, Tensor) and isinstance(self.down, Tensor)
        post_norm, gate_up = behind(self.post_norm, self.gate_up)
        found = replace(self, o=RowScaledFp8.of(self.o), post_norm=post_norm, gate_up=gate_up)
        found.down = RowScaledFp8.of(self.down)
        if not first:
            found.input_norm, found.qkv = behind(self.input_norm, self.qkv)
        return found

    def in_one_launch(self) -> bool:
        """Whether the layer kernel takes it, on its device; on a CPU the reference stands for that."""
        matrices = [self.o, self.gate_up, self.down, self.qkv]
        ops = ops_for(self.input_norm.device)
        return self.o_bias is None and ops.fuses_post_attention(self.input_norm[None], matrices)

    def places(self, spec: ModelSpec) -> dict[str, Tensor]:
        """Checkpoint name inside the layer -> the view that the tensor is copied into."""
        assert isinstance(self.qkv, Tensor) and isinstance(self.gate_up, Tensor), "quantized weights are not loaded"
        assert isinstance(self.o, Tensor) and isinstance(self.down, Tensor)
        h = spec.head_dim
        heads = [spec.num_heads * h, spec.num_kv_heads * h, spec.num_kv_heads * h]
        attention = "self_attn"
        found = {
            "input_layernorm.weight": self.input_norm,
            "post_attention_layernorm.weight": self.post_norm,
            f"{attention}.o_proj.weight": self.o,
            "mlp.gate_proj.weight": self.gate_up[0::2],
            "mlp.up_proj.weight": self.gate_up[1::2],
            "mlp.down_proj.weight": self.down,
        }
        for letter, view in zip("qkv", self.qkv.split(heads), strict=True):
            found[f"{attention}.{letter}_proj.weight"] = view
        if self.qkv_bias is not None:
            for letter, view in zip("qkv", self.qkv_bias.split(heads), strict=True):
                found[f"{attention}.{letter}_proj.bias"] = view
        optional = {"q_norm.weight": self.q_norm, "k_norm.weight": self.k_norm, "o_proj.bias": self.o_bias}
        return found | {f"{attention}.{name}": t for name, t in optional.items() if t is not None}


@dataclass(slots=True)
class TargetWeights:
    """The whole target."""

    spec: ModelSpec
    embedding: Tensor  # [V, D]
    layers: list[LayerWeights]
    norm: Tensor  # [D]
    head: Tensor  # [V, D], the embedding itself when tied

    @classmethod
    def empty(cls, spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> "TargetWeights":
        d, v = spec.hidden_size, spec.vocab_size
        embedding = torch.empty(v, d, device=device, dtype=dtype)
        head = embedding if spec.tied_head else torch.empty(v, d, device=device, dtype=dtype)
        layers = [LayerWeights.empty(spec, device, dtype) for _ in range(spec.num_layers)]
        return cls(spec, embedding, layers, torch.empty(d, device=device, dtype=dtype), head)

    def places(self) -> dict[str, Tensor]:
        """Checkpoint name -> the view that the tensor is copied into."""
        found = {EMBEDDING: self.embedding, "model.norm.weight": self.norm}
        if not self.spec.tied_head:
            found[HEAD] = self.head
        for i, layer in enumerate(self.layers):
            found |= {f"model.layers.{i}.{name}": view for name, view in layer.places(self.spec).items()}
        return found

    @classmethod
    def load(cls, folder: Path, spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> "TargetWeights":
        """Read the safetensors of a checkpoint directory. Raises UserError naming what is wrong."""
        weights = cls.empty(spec, device, dtype)
        fill_from_files(f"target {folder}", weights.places(), tensor_files(folder))
        return weights

    @classmethod
    def of_module(cls, model: Any, spec: ModelSpec) -> "TargetWeights":
        """Copy the weights of a loaded Hugging Face model, on its device."""
        state = model.state_dict()
        first = state[EMBEDDING]
        weights = cls.empty(spec, first.device, first.dtype)
        fill("target", weights.places(), state)
        return weights

    @classmethod
    def shared_with(cls, model: Any, spec: ModelSpec) -> "TargetWeights":
        """The weights of a loaded Hugging Face model, which from then on reads its own out of the fused matrices.

        Nothing is held twice: a layer's tensors are copied, then replaced by views of their copies.
        """
        state = dict(model.named_parameters())
        embedding = state.pop(EMBEDDING).data
        if spec.tied_head:
            check_tied("target", {EMBEDDING: embedding}, state)
        head = embedding if spec.tied_head else state.pop(HEAD).data
        weights = cls(spec, embedding, [], state.pop("model.norm.weight").data, head)
        for i in range(spec.num_layers):
            layer, prefix = LayerWeights.empty(spec, embedding.device, embedding.dtype), f"model.layers.{i}."
            places = {prefix + name: view for name, view in layer.places(spec).items()}
            fill("target", places, {name: state[name] for name in state if name.startswith(prefix)})
            for name, view in places.items():
                state[name].data = view
            weights.layers.append(layer)
        return weights


@dataclass(slots=True)
class DrafterWeights:
    """The whole drafter, and its keys' and values' projections once more, stacked for the context."""

    spec: ModelSpec
    config: DrafterConfig
    fc: Tensor  # [D, K D]
    hidden_norm: Tensor  # [D]
    layers: list[LayerWeights]
    norm: Tensor  # [D]
    context_kv: Tensor = field(init=False)  # [L 2 G H, D]
    context_bias: Tensor | None = field(init=False)  # [L 2 G H]
    k_norms: Tensor = field(init=False)  # [L, H]
    head: Weight | None = None  # [V, D], a copy of its own; None: the target's

    @classmethod
    def of_module(cls, drafter: Drafter) -> "DrafterWeights":
        """Copy a drafter's weights, on its device."""
        return cls._from(drafter.config, drafter.state_dict())

    @classmethod
    def _from(cls, config: DrafterConfig, state: Mapping[str, Tensor]) -> "DrafterWeights":
        spec = ModelSpec.of_drafter(config)
        device, dtype = state["fc.weight"].device, state["fc.weight"].dtype
        d = config.hidden_size
        weights = cls(
            spec,
            config,
            torch.empty(d, config.feature_size, device=device, dtype=dtype),
            torch.empty(d, device=device, dtype=dtype),
            [LayerWeights.empty(spec, device, dtype) for _ in range(config.num_layers)],
            torch.empty(d, device=device, dtype=dtype),
        )
        fill("drafter", weights.places(), state)
        weights.context_kv, weights.context_bias, weights.k_norms = weights._stacked()
        return weights

    def places(self) -> dict[str, Tensor]:
        """Checkpoint name -> the view that the tensor is copied into."""
        found = {"fc.weight": self.fc, "hidden_norm.weight": self.hidden_norm, "norm.weight": self.norm}
        for i, layer in enumerate(self.layers):
            found |= {f"layers.{i}.{name}": view for name, view in layer.places(self.spec).items()}
        return found

    def copy_from(self, drafter: Drafter) -> None:
        """Take the weights of a drafter of the same shape in place: captured steps go on with them."""
        fill("drafter", self.places(), drafter.state_dict())
        for old, new in zip((self.context_kv, self.context_bias, self.k_norms), self._stacked(), strict=True):
            if old is not None and new is not None:
                old.copy_(new)

    def _stacked(self) -> tuple[Tensor, Tensor | None, Tensor]:
        """What turns a context token into every layer's key and value: projections, biases and norms of the keys."""
        start = self.spec.num_heads * self.spec.head_dim
        kv = torch.cat([layer.qkv[start:] for layer in self.layers if isinstance(layer.qkv, Tensor)])
        biases = [layer.qkv_bias[start:] for layer in self.layers if layer.qkv_bias is not None]
        norms = torch.stack([layer.k_norm for layer in self.layers if layer.k_norm is not None])
        return kv, torch.cat(biases) if biases else None, norms

    def quantized(self, head: Tensor) -> "DrafterWeights":
        """To draft in fp8, with a copy of `head` [V, D]; the context's projection is shared as it is.

        The layers of a small model stay what they are, as quantizing the rows takes longer than fp8 saves, and those
        that are several launches on this GPU, as these widen fp8 in registers.
        """
        found = copy.copy(self)
        found.head = RowScaledFp8.of(head)
        if self.spec.hidden_size >= WIDE_IN_FP8 and all(layer.in_one_launch() for layer in self.layers):
            found.layers = [layer.quantized(first=i == 0) for i, layer in enumerate(self.layers)]
        return found
