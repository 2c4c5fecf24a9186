"""Weights as steps read them: fused projections, and one kind of decoder layer for all targets and drafters.

Tensors are copied from safetensors directly into their part of the fused matrix on the device.
"""

import copy
import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..checkpoint.int4 import conversions
from ..checkpoint.reader import EMBEDDING, HEAD, load_files, load_weights, tensor_names, text_name, weight_files
from ..config import UnsupportedModel
from ..kernels.clamped import ClampedExperts
from ..kernels.formats import Activation, Mxfp4Weight, RowScaledFp8, Weight, format_of, parts
from ..kernels.ops import Ops, ops_for
from ..kernels.routing import SigmoidRouting
from ..models.dflash.config import DrafterConfig
from ..models.dflash.network import Drafter
from ..models.drafting import BetweenWeights, SelectorWeights
from ..models.spec import (
    AttentionSpec,
    ConvolutionSpec,
    GatedDeltaNetSpec,
    LayerSpec,
    MlpSpec,
    ModelSpec,
    MoeSpec,
)
from .layer_inputs import TOKEN_INPUTS, LayerInputWeights, TokenInputWeights

CENTERED = ("_layernorm.weight", ".q_norm.weight", ".k_norm.weight", "model.norm.weight")  # where norms are
SORTED = (".in_proj_qkvz.weight", ".in_proj_ba.weight")  # see `GatedDeltaNetWeights.sort`
STACKED = ".experts.down_proj"  # a name in checkpoints that store all experts in one tensor
EVEN = 8  # cuBLAS takes twice as long for 257 columns of 256 rows in bf16 as for 264
WIDE_IN_FP8 = 2560  # hidden size from which layers in fp8 were faster at all measured row counts; at 1024 they were not


@dataclass(slots=True)
class AttentionWeights:
    """The weights of an `AttentionSpec`."""

    qkv: Weight  # [(N + 2 G) H, D]; gated attention: the gates of a head follow its queries, (2 N + 2 G) H
    qkv_bias: Tensor | None  # [(N + 2 G) H]
    q_norm: Tensor | None  # [H], or [N H] with `joint_qk_norm`
    k_norm: Tensor | None  # [H], or [G H]
    o: Weight  # [D, N H]
    o_bias: Tensor | None  # [D]
    sinks: Tensor | None  # [N]

    @classmethod
    def empty(
        cls, spec: AttentionSpec, d: int, new: Callable[..., Tensor], norm: Callable[[int], Tensor]
    ) -> "AttentionWeights":
        matrix, normed = functools.partial(spec.weight.empty, new=new), spec.qk_norm or spec.joint_qk_norm
        shares = spec.source is not None

        def ones(size: int) -> Tensor:  # norms without weights in a checkpoint keep them
            return norm(size).fill_(1.0)

        return cls(
            qkv=matrix(spec.qkv_rows, d),
            qkv_bias=new(spec.qkv_rows) if spec.qkv_bias else None,
            q_norm=ones(spec.width if spec.joint_qk_norm else spec.head_dim) if normed else None,
            k_norm=ones(spec.kv_width if spec.joint_qk_norm else spec.head_dim) if normed and not shares else None,
            o=matrix(d, spec.width),
            o_bias=new(d) if spec.o_bias else None,
            sinks=new(spec.num_heads) if spec.sinks else None,
        )

    def parameter_views(self, spec: AttentionSpec) -> dict[str, Tensor]:
        tensors = spec.weight.tensors
        found = tensors("self_attn.o_proj.weight", self.o)
        letters = "q" + spec.own_projections
        heads = [spec.q_rows, *[spec.kv_width] * (2 if len(letters) > 1 else 0)]
        if spec.fused:
            found |= tensors("self_attn.qkv_proj.weight", self.qkv)
        else:
            for letter, weight in zip(letters, self.qkv.split(heads), strict=False):
                found |= tensors(f"self_attn.{letter}_proj.weight", weight)
        if self.qkv_bias is not None:
            names = [f"self_attn.{letter}_proj.bias" for letter in letters]
            found |= zip(names, self.qkv_bias.split(heads), strict=False)
        optional = {"o_proj.bias": self.o_bias, "sinks": self.sinks}
        if spec.weighted_norms:
            optional |= {"q_norm.weight": self.q_norm, "k_norm.weight": self.k_norm}
        return found | {f"self_attn.{name}": t for name, t in optional.items() if t is not None}

    def copy_keys(self, spec: AttentionSpec) -> None:
        """Copies the projection of the keys to that of the values, where the values are the keys."""
        for matrix in parts(self.qkv):
            if matrix is not None:
                rows = len(matrix) * spec.kv_width // spec.qkv_rows
                matrix[-rows:].copy_(matrix[-2 * rows : -rows])


@dataclass(slots=True)
class GatedDeltaNetWeights:
    """The weights of a `GatedDeltaNetSpec`."""

    qkvz: Weight  # [C + N H_v, D]: queries, keys, values, gates of the norm
    ba: Tensor  # [2 N, D], projections to beta and to the decay
    conv: Tensor  # [C, T]
    a_log: Tensor  # [N]
    dt_bias: Tensor  # [N]
    norm: Tensor  # [H_v]
    o: Weight  # [D, N H_v]

    @classmethod
    def empty(cls, spec: GatedDeltaNetSpec, d: int, new: Callable[..., Tensor]) -> "GatedDeltaNetWeights":
        matrix = functools.partial(spec.weight.empty, new=new)
        return cls(
            qkvz=matrix(spec.channels + spec.width, d),
            ba=new(2 * spec.num_heads, d),
            conv=new(spec.channels, spec.taps),
            a_log=new(spec.num_heads),
            dt_bias=new(spec.num_heads),
            norm=new(spec.head_dim),
            o=matrix(d, spec.width),
        )

    def parameter_views(self, spec: GatedDeltaNetSpec) -> dict[str, Tensor]:
        found = {"conv1d.weight": self.conv[:, None], "norm.weight": self.norm}
        found |= {"A_log": self.a_log, "dt_bias": self.dt_bias}
        matrices: dict[str, Weight] = {"out_proj": self.o}
        if spec.by_key_heads:  # `sort` reorders the rows after loading
            matrices |= {"in_proj_qkvz": self.qkvz, "in_proj_ba": self.ba}
        else:
            (qkv, z), (b, a) = self.qkvz.split([spec.channels, spec.width]), self.ba.split(spec.num_heads)
            matrices |= {"in_proj_qkv": qkv, "in_proj_z": z, "in_proj_b": b, "in_proj_a": a}
        for name, weight in matrices.items():
            found |= format_of(weight).tensors(f"{name}.weight", weight)
        return {f"linear_attn.{name}": view for name, view in found.items()}

    def sort(self, spec: GatedDeltaNetSpec, loaded: Collection[str] | None = None) -> None:
        """Sorts rows that were loaded by key head: all queries, then all keys, values, gates; likewise ba.

        Args:
            loaded: names of the layer's tensors that were just loaded; None: all.
        """
        values = spec.num_heads // spec.num_k_heads
        each, (qkvz, scale) = [*[spec.k_head_dim] * 2, *[values * spec.head_dim] * 2], parts(self.qkvz)
        name = "linear_attn.in_proj_qkvz.weight"
        sorts = [(name, qkvz, each), ("linear_attn.in_proj_ba.weight", self.ba, [values] * 2)]
        if scale is not None:
            name += format_of(self.qkvz).scale_suffix
            sorts.append((name, scale, [rows * len(scale) // len(qkvz) for rows in each]))
        for name, matrix, rows in sorts:
            if loaded is not None and name not in loaded:
                continue
            heads = matrix.unflatten(0, (spec.num_k_heads, -1))
            matrix.copy_(torch.cat([part.flatten(0, 1) for part in heads.split(rows, dim=1)]))


@dataclass(slots=True)
class MlpWeights:
    """The weights of an `MlpSpec`."""

    gate_up: Weight  # [2 I, D], as `linear_swiglu` takes it
    down: Weight  # [D, I]
    activation: Activation = "silu"

    @classmethod
    def empty(cls, spec: MlpSpec, d: int, new: Callable[..., Tensor]) -> "MlpWeights":
        i = spec.intermediate_size
        matrix = functools.partial(spec.weight.empty, new=new)
        return cls(gate_up=matrix(2 * i, d), down=matrix(d, i), activation=spec.activation)

    def parameter_views(self, fused: bool = False) -> dict[str, Tensor]:
        """`fused`: see `MlpSpec`. Such a matrix is a view [2, I, D] if gates and ups alternate."""
        form, found = format_of(self.gate_up), dict[str, Tensor]()
        gate, up = form.gate_up(self.gate_up)
        matrices: dict[str, Weight] = {"gate": gate, "up": up, "down": self.down}
        if fused:
            matrices = {"gate_up": form.gate_then_up(self.gate_up), "down": self.down}
        for part, weight in matrices.items():
            found |= form.tensors(f"mlp.{part}_proj.weight", weight)
        return found


@dataclass(slots=True)
class MoeWeights:
    """The weights of a `MoeSpec`. A shared expert is the last ones, and its gate is the last row of the router."""

    spec: MoeSpec
    router: Tensor  # [E or E + 1, D], and zeros up to a multiple of EVEN rows
    gate_up: Weight  # [E, 2 I, D], the gates of an expert, then its ups, as transformers stacks them
    down: Weight  # [E, D, I]
    router_bias: Tensor | None = None  # as many as rows
    clamped: ClampedExperts | None = None
    sigmoid: SigmoidRouting | None = None
    router_norm: Tensor | None = None  # [D], of the norm before the router, which then divides its logits by root D
    scales: Tensor | None = None  # [E], of the weights of experts

    @classmethod
    def empty(cls, spec: MoeSpec, d: int, new: Callable[..., Tensor]) -> "MoeWeights":
        count, i, rows = spec.experts, spec.intermediate_size, spec.router_rows
        matrix = functools.partial(spec.weight.empty, count, new=new)
        router = new(-(-rows // EVEN) * EVEN, d)
        router[rows:].zero_()
        found = cls(spec, router, gate_up=matrix(2 * i, d), down=matrix(d, i))
        if spec.sigmoid:
            correction = None if spec.weighted_inputs else new(spec.num_experts, dtype=torch.float32)
            found.sigmoid = SigmoidRouting(correction, *spec.sigmoid)
        if spec.clamp:
            found.clamped = ClampedExperts(new(count, 2 * i), new(count, d), *spec.clamp)
            found.router_bias = new(len(router)).zero_()
        if spec.scaled:
            found.router_norm, found.scales = new(d), new(spec.num_experts)
        return found

    def parameter_views(self, stacked: bool) -> dict[str, Tensor]:
        """Returns views by name. `stacked`: all experts are one tensor, as in modules, not one each."""
        count, i, tensors = self.spec.num_experts, self.spec.intermediate_size, self.spec.weight.tensors
        if self.clamped and self.router_bias is not None:
            return self._clamped_views(self.clamped, self.router_bias)
        if self.router_norm is not None and self.scales is not None:
            found = {"router.scale": self.router_norm, "router.per_expert_scale": self.scales}
            found["router.proj.weight"] = self.router[:count]
            return found | tensors("experts.gate_up_proj", self.gate_up) | tensors("experts.down_proj", self.down)
        llama_4 = self.spec.weighted_inputs
        found = {f"mlp.{'router' if llama_4 else 'gate'}.weight": self.router[:count]}
        if stacked:
            for part, whole in (("gate_up", self.gate_up[:count]), ("down", self.down[:count])):
                transposed = whole.mT if llama_4 and isinstance(whole, Tensor) else whole
                found |= tensors(f"mlp.experts.{part}_proj", transposed)
        experts = {} if stacked else {f"experts.{expert}": expert for expert in range(count)}
        if self.sigmoid is not None and self.sigmoid.correction is not None:
            found["mlp.gate.e_score_correction_bias"] = self.sigmoid.correction
        elif self.sigmoid is None and self.spec.shared:
            found["mlp.shared_expert_gate.weight"] = self.router[count : count + 1]
        if self.spec.shared == 1:
            experts[self.spec.shared_name] = count
        for name, at in experts.items():
            gate, up = self.gate_up[at].split([i, i])
            for part, view in (("gate", gate), ("up", up), ("down", self.down[at])):
                found |= tensors(f"mlp.{name}.{part}_proj.weight", view)
        return found | (self._slices() if self.spec.shared > 1 else {})

    def _slices(self) -> dict[str, Tensor]:
        """Returns views [s, I, D] and [D, s, I] of the matrices of a shared expert that is s of ours."""
        count, tensors, prefix = self.spec.num_experts, self.spec.weight.tensors, f"mlp.{self.spec.shared_name}."
        found = {name: t.transpose(0, 1) for name, t in tensors(f"{prefix}down_proj.weight", self.down[count:]).items()}
        for name, whole in tensors(f"{prefix}gate_proj.weight", self.gate_up[count:]).items():
            found[name], found[name.replace("gate_proj", "up_proj")] = whole.chunk(2, dim=1)
        return found

    def _clamped_views(self, clamped: ClampedExperts, router_bias: Tensor) -> dict[str, Tensor]:
        """Returns views by the names of gpt-oss, which stacks all experts and transposes matrices in 16 bits."""
        found = {"mlp.router.weight": self.router[: self.spec.num_experts]}
        found["mlp.router.bias"] = router_bias[: self.spec.num_experts]
        for name, matrix, bias in (
            ("mlp.experts.gate_up_proj", self.gate_up, clamped.gate_up_bias),
            ("mlp.experts.down_proj", self.down, clamped.down_bias),
        ):
            found |= self.spec.weight.tensors(name, matrix.mT if isinstance(matrix, Tensor) else matrix)
            found[f"{name}_bias"] = bias
        return found

    def sort(self) -> None:
        """Changes the order of MXFP4 values, after they were read from a checkpoint."""
        for matrix in (self.gate_up, self.down):
            if isinstance(matrix, Mxfp4Weight):
                matrix.sort_()


def _norm_dtype(spec: LayerSpec, dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32) if spec.fp32_norms else dtype


def _ffn_weights(spec: MlpSpec | MoeSpec, d: int, new: Callable[..., Tensor]) -> MlpWeights | MoeWeights:
    return MoeWeights.empty(spec, d, new) if isinstance(spec, MoeSpec) else MlpWeights.empty(spec, d, new)


class ConvolutionWeights(NamedTuple):
    """The weights of a `ConvolutionSpec` around one sub-layer: the first half is before it, the second after it."""

    base: Tensor  # [2, T, D]
    projection: Weight  # [2 T (D / g), D], applied to the sub-layer's input

    @classmethod
    def empty(cls, spec: ConvolutionSpec, d: int, new: Callable[..., Tensor]) -> "ConvolutionWeights":
        return cls(new(2, spec.taps, d), new(2 * spec.taps * (d // spec.group_size), d))

    def parameter_views(self) -> dict[str, Tensor]:
        assert isinstance(self.projection, Tensor), "quantized weights are not loaded"
        return {"base_kernel": self.base, "kernel_projection.weight": self.projection}


class ParallelExperts(NamedTuple):
    """Experts next to an MLP, as in Gemma 4 26B-A4B: norm(mlp) + norm(experts(norm(x))) is the output of both."""

    input_norm: Tensor  # [D], before the experts
    output_norm: Tensor  # [D], of their output
    mlp_norm: Tensor  # [D], of the output of the MLP
    experts: MoeWeights

    @classmethod
    def empty(
        cls, spec: MoeSpec, d: int, new: Callable[..., Tensor], norm: Callable[[int], Tensor]
    ) -> "ParallelExperts":
        return cls(norm(d), norm(d), norm(d), MoeWeights.empty(spec, d, new))

    def parameter_views(self) -> dict[str, Tensor]:
        names = "pre_feedforward_layernorm_2", "post_feedforward_layernorm_2", "post_feedforward_layernorm_1"
        norms = self.input_norm, self.output_norm, self.mlp_norm
        found = {f"{name}.weight": norm for name, norm in zip(names, norms, strict=True)}
        return found | self.experts.parameter_views(stacked=True)


@dataclass(slots=True)
class LayerWeights:
    """One decoder layer."""

    input_norm: Tensor | None  # [D], before the mixer; norms are in fp32 if they multiply in it
    mixer: AttentionWeights | GatedDeltaNetWeights
    post_norm: Tensor | None  # [D], before the FFN
    ffn: MlpWeights | MoeWeights
    mixer_conv: ConvolutionWeights | None = None
    ffn_conv: ConvolutionWeights | None = None
    mixer_output_norm: Tensor | None = None  # [D], of the mixer's output
    ffn_output_norm: Tensor | None = None  # [D], of the FFN's output
    experts: ParallelExperts | None = None
    inputs: LayerInputWeights | None = None
    scalar: Tensor | None = None  # [1], multiplies the layer's output

    @classmethod
    def empty(cls, spec: LayerSpec, d: int, device: torch.device, dtype: torch.dtype) -> "LayerWeights":
        new = functools.partial(torch.empty, device=device, dtype=dtype)
        convs = (ConvolutionWeights.empty(spec.conv, d, new) for _ in range(2)) if spec.conv else ()
        norm = functools.partial(new, dtype=_norm_dtype(spec, dtype))
        mixer: AttentionWeights | GatedDeltaNetWeights
        if isinstance(spec.mixer, GatedDeltaNetSpec):
            mixer = GatedDeltaNetWeights.empty(spec.mixer, d, new)
        else:
            mixer = AttentionWeights.empty(spec.mixer, d, new, norm)
        names = spec.norms
        inputs = [norm(d) if name else None for name in (names.mixer_input, names.ffn_input)]
        outputs = [norm(d) if name else None for name in (names.mixer_output, names.ffn_output)]
        layer = cls(inputs[0], mixer, inputs[1], _ffn_weights(spec.ffn, d, new), *convs)
        layer.mixer_output_norm, layer.ffn_output_norm = outputs
        if spec.experts:
            layer.experts = ParallelExperts.empty(spec.experts, d, new, norm)
        if spec.input_size:
            assert isinstance(spec.ffn, MlpSpec)
            layer.inputs = LayerInputWeights.empty(spec.input_size, d, spec.ffn.activation, new, norm)
        layer.scalar = new(1) if spec.scaled else None
        return layer

    @property
    def in_fp8(self) -> bool:
        """Whether it is a copy that `quantized` has made."""
        return isinstance(self.mixer, AttentionWeights) and isinstance(self.mixer.o, RowScaledFp8)

    def quantized(self, *, first: bool) -> "LayerWeights":
        """Returns the layer with its matrices in fp8, except the queries, keys and values of the `first` layer.

        These have their own launch, which supports bf16 only. Rows after a norm are cast without scaling, so the norm's
        weights are scaled to the order of one by a power of two, and the scales of the matrix undo it. Convolutions
        preserve the order of such rows, and the matrix of their coefficients also follows the norm.
        """

        def after_norm(
            norm: Tensor | None, matrix: Weight, conv: ConvolutionWeights | None
        ) -> tuple[Tensor | None, RowScaledFp8, ConvolutionWeights | None]:
            assert norm is not None, "a drafter's"
            size = norm.float().pow(2).mean().sqrt().clamp(min=1e-6).log2().round().exp2()

            def narrow(matrix: Weight) -> RowScaledFp8:
                assert isinstance(matrix, Tensor), "quantized once"
                found = RowScaledFp8.of(matrix)
                return replace(found, scale=found.scale * size)

            around = None if conv is None else conv._replace(projection=narrow(conv.projection))
            return (norm / size).to(norm.dtype), narrow(matrix), around

        mixer, ffn = self.mixer, self.ffn
        assert isinstance(mixer, AttentionWeights), "a drafter's"
        assert isinstance(mixer.o, Tensor) and isinstance(ffn, MlpWeights) and isinstance(ffn.down, Tensor)
        post_norm, gate_up, ffn_conv = after_norm(self.post_norm, ffn.gate_up, self.ffn_conv)
        o = RowScaledFp8.of(mixer.o)
        down = RowScaledFp8.of(ffn.down)
        input_norm, qkv, mixer_conv = self.input_norm, mixer.qkv, self.mixer_conv
        if not first:
            input_norm, qkv, mixer_conv = after_norm(input_norm, qkv, mixer_conv)
        mixer, ffn = replace(mixer, qkv=qkv, o=o), MlpWeights(gate_up, down)
        return LayerWeights(input_norm, mixer, post_norm, ffn, mixer_conv, ffn_conv)

    def fusible(self, following: "LayerWeights | None") -> tuple[Weight, Weight, Weight, Weight | None] | None:
        """Returns the matrices of a fused post-attention: output projection, FFN, and the next queries, keys, values.

        Returns None if one of them has a bias, the FFN has experts, the next mixer is not attention, or the norms or
        the activation are not those of Llama.
        """
        mixer, following_mixer = self.mixer, following.mixer if following else None
        if isinstance(self.ffn, MoeWeights) or not isinstance(mixer, AttentionWeights) or mixer.o_bias is not None:
            return None
        if self.ffn.activation != "silu" or self.post_norm is None or self.mixer_output_norm is not None:
            return None
        if isinstance(following_mixer, GatedDeltaNetWeights):
            return None
        return mixer.o, self.ffn.gate_up, self.ffn.down, following_mixer.qkv if following_mixer else None

    def fuses(self, following: "LayerWeights | None", x: Tensor, ops: Ops) -> bool:
        """Returns whether everything after the attention of rows x [M, D] is one operation."""
        matrices = self.fusible(following)
        if matrices is None or self.post_norm is None or self.post_norm.dtype != x.dtype:
            return False
        if self.ffn_conv is None:
            return ops.fuses_post_attention(x, matrices)
        convolutions = self.ffn_conv, following.mixer_conv if following else None
        return ops.fuses_conv_post_attention(x, matrices, convolutions)

    def parameter_views(self, spec: LayerSpec, stacked: bool = False) -> dict[str, Tensor]:
        """Checkpoint name inside the layer -> the view that the tensor is copied into; `stacked`: see `MoeWeights`."""
        if isinstance(self.ffn, MoeWeights):
            ffn = self.ffn.parameter_views(stacked)
        else:
            ffn = self.ffn.parameter_views(isinstance(spec.ffn, MlpSpec) and spec.ffn.fused)
        ffn = {name.replace("mlp.", f"{spec.ffn_name}.", 1): view for name, view in ffn.items()}
        names = spec.norms  # random weights are sampled in this order
        norms = {names.mixer_input: self.input_norm, names.mixer_output: self.mixer_output_norm}
        norms |= {names.ffn_input: self.post_norm, names.ffn_output: self.ffn_output_norm}
        found = {f"{name}.weight": norm for name, norm in norms.items() if norm is not None}
        if isinstance(self.mixer, GatedDeltaNetWeights):
            assert isinstance(spec.mixer, GatedDeltaNetSpec)
            found |= self.mixer.parameter_views(spec.mixer) | ffn
        else:
            assert isinstance(spec.mixer, AttentionSpec)
            mixer, o = self.mixer.parameter_views(spec.mixer), "self_attn.o_proj.weight"
            found |= {o: mixer[o]} | ffn | mixer
        for more in (self.experts, self.inputs):
            if more is not None:
                found |= more.parameter_views()
        if self.scalar is not None:
            found["layer_scalar"] = self.scalar
        for part, conv in (("attention_conv", self.mixer_conv), ("mlp_conv", self.ffn_conv)):
            if conv is not None:
                found |= {f"{part}.{name}": view for name, view in conv.parameter_views().items()}
        return found


def _unused(spec: ModelSpec) -> tuple[str, ...]:
    """Returns the beginnings of the names of tensors in checkpoints that the engine does not read."""
    depth = len(spec.layers)
    found = [f"model.layers.{layer}." for layer in range(depth, depth + spec.unused_layers)]
    for layer, kind in enumerate(spec.layers):
        if isinstance(kind.mixer, AttentionSpec) and kind.mixer.source is not None:
            found += [f"model.layers.{layer}.self_attn.{letter}_" for letter in "kv"]
    return tuple(found)


@dataclass(slots=True)
class TargetWeights:
    """The whole target."""

    spec: ModelSpec
    embedding: Tensor  # [V, D]
    layers: list[LayerWeights]
    norm: Tensor  # [D]
    head: Tensor  # [V, D], the embedding itself when tied
    inputs: TokenInputWeights | None = None

    @classmethod
    def empty(cls, spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> "TargetWeights":
        d, v = spec.hidden_size, spec.vocab_size
        embedding = torch.empty(v, d, device=device, dtype=dtype)
        head = embedding if spec.tied_head else torch.empty(v, d, device=device, dtype=dtype)
        layers = [LayerWeights.empty(layer, d, device, dtype) for layer in spec.layers]
        norm = torch.empty(d, device=device, dtype=_norm_dtype(spec.layers[-1], dtype))
        inputs = None
        if size := spec.input_size:
            whole, narrow = (functools.partial(torch.empty, device=device, dtype=t) for t in (dtype, norm.dtype))
            inputs = TokenInputWeights.empty(v, len(layers), size, d, whole, narrow)
        return cls(spec, embedding, layers, norm, head, inputs)

    def parameter_views(self, stacked: bool = False) -> dict[str, Tensor]:
        """Checkpoint name -> the view that the tensor is copied into; `stacked`: see `MoeWeights`."""
        found = {EMBEDDING: self.embedding, "model.norm.weight": self.norm}
        if not self.spec.tied_head:
            found[HEAD] = self.head
        if self.inputs is not None:
            found |= self.inputs.parameter_views()
        for i, (kind, layer) in enumerate(zip(self.spec.layers, self.layers, strict=True)):
            found |= {f"model.layers.{i}.{name}": view for name, view in layer.parameter_views(kind, stacked).items()}
        return found

    @classmethod
    def load(cls, folder: Path, spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> "TargetWeights":
        """Reads the safetensors of a checkpoint directory.

        Raises:
            UnsupportedModel: there are no safetensors files.
            UserError: a file is damaged or does not fit the target.
        """
        files = weight_files(folder)
        if not files:
            raise UnsupportedModel(f"target {folder}: no *.safetensors file in its directory, the only known format")
        weights = cls.empty(spec, device, dtype)
        views = weights.parameter_views(stacked=any(name.endswith(STACKED) for name in tensor_names(files)))
        load_files(f"target {folder}", views, files, conversions(spec.formats), _unused(spec))
        return weights.as_computed()

    @classmethod
    def of_module(cls, model: Any, spec: ModelSpec) -> "TargetWeights":
        """Copies the weights of a loaded Hugging Face model, on its device."""
        state = {text_name(name): tensor for name, tensor in model.state_dict().items()}
        first = state[EMBEDDING]
        weights = cls.empty(spec, first.device, first.dtype)
        load_weights("target", weights.parameter_views(stacked=True), state)
        return weights.as_computed()

    def as_computed(self, loaded: Collection[str] | None = None) -> "TargetWeights":
        """Adds one to norms that are stored minus one, and sorts rows and values. Returns these weights.

        Args:
            loaded: names of the tensors that were just loaded; None: all.
        """
        for i, (kind, layer) in enumerate(zip(self.spec.layers, self.layers, strict=True)):
            prefix = f"model.layers.{i}."
            own = None if loaded is None else {n.removeprefix(prefix) for n in loaded if n.startswith(prefix)}
            if isinstance(layer.ffn, MoeWeights) and own is None:  # 4-bit weights are never loaded in part
                layer.ffn.sort()
            if isinstance(kind.mixer, GatedDeltaNetSpec) and kind.mixer.by_key_heads:
                assert isinstance(layer.mixer, GatedDeltaNetWeights)
                layer.mixer.sort(kind.mixer, own)
            if isinstance(kind.mixer, AttentionSpec) and kind.mixer.values_are_keys:
                assert isinstance(layer.mixer, AttentionWeights)
                layer.mixer.copy_keys(kind.mixer)
        if self.spec.layers[-1].zero_centered:
            for name, view in self.parameter_views().items():
                if name.endswith(CENTERED) and (loaded is None or name in loaded):
                    view.add_(1.0)
        return self

    @classmethod
    def shared_with(cls, model: Any, spec: ModelSpec) -> "TargetWeights":
        """Shares weights with a loaded Hugging Face model, which then reads the fused matrices.

        A layer's tensors are copied, then replaced by views of their copies, except those with sorted rows or another
        form. An FP8 model keeps its own.
        """
        if spec.quantized:
            return cls.of_module(model, spec)
        state = {text_name(name): tensor for name, tensor in model.state_dict(keep_vars=True).items()}  # buffers too
        embedding = state.pop(EMBEDDING).data
        head = embedding if spec.tied_head else state.pop(HEAD).data
        norm, centered = state.pop("model.norm.weight").data, spec.layers[-1].zero_centered
        norm = norm.to(_norm_dtype(spec.layers[-1], norm.dtype), copy=centered)
        inputs = None
        if spec.input_size:
            inputs = TokenInputWeights(*(state.pop(name).data for name in TOKEN_INPUTS))
            inputs = inputs._replace(norm=inputs.norm.to(norm.dtype))
        weights = cls(spec, embedding, [], norm, head, inputs)
        for i, kind in enumerate(spec.layers):
            layer = LayerWeights.empty(kind, spec.hidden_size, embedding.device, embedding.dtype)
            prefix = f"model.layers.{i}."
            views = {prefix + name: view for name, view in layer.parameter_views(kind, True).items()}
            load_weights("target", views, {name: state[name] for name in state if name.startswith(prefix)})
            for name, view in views.items():
                alike = (view.shape, view.dtype) == (state[name].shape, state[name].dtype)
                if alike and not (centered and name.endswith((*CENTERED, *SORTED))):
                    state[name].data = view
            weights.layers.append(layer)
        return weights.as_computed()


@dataclass(slots=True)
class DrafterWeights:
    """The whole drafter, and a stacked copy of its key and value projections for the context."""

    spec: ModelSpec
    config: DrafterConfig
    fc: Tensor  # [D, K D]
    hidden_norm: Tensor  # [D]
    layers: list[LayerWeights]
    norm: Tensor  # [D]
    selector: SelectorWeights | None  # None: every slot chooses its own most probable token
    context_kv: Tensor = field(init=False)  # [L 2 G H, D]
    context_bias: Tensor | None = field(init=False)  # [L 2 G H]
    k_norms: Tensor = field(init=False)  # [L, H]
    head: Weight | None = None  # [V, D], a copy of its own; None: the target's
    between: BetweenWeights | None = None  # changes the rows after every layer, and then chooses the tokens

    @classmethod
    def of_module(cls, drafter: Drafter) -> "DrafterWeights":
        """Copies a drafter's weights, on its device."""
        return cls._from(drafter.config, drafter.state_dict())

    @classmethod
    def _from(cls, config: DrafterConfig, state: Mapping[str, Tensor]) -> "DrafterWeights":
        weights = cls.empty(config, state["fc.weight"].device, state["fc.weight"].dtype)
        load_weights("drafter", weights.parameter_views(), state)
        weights.context_kv, weights.context_bias, weights.k_norms = weights._stacked()
        return weights

    @classmethod
    def empty(cls, config: DrafterConfig, device: torch.device, dtype: torch.dtype) -> "DrafterWeights":
        """Returns uninitialized weights, without the stacked copy."""
        spec, d = config.spec(), config.hidden_size
        new = functools.partial(torch.empty, device=device, dtype=dtype)
        layers = [LayerWeights.empty(layer, d, device, dtype) for layer in spec.layers]
        selector = config.architecture.selector_weights(config, new)
        between = config.architecture.between_weights(config, new)
        return cls(spec, config, new(d, config.feature_size), new(d), layers, new(d), selector, between=between)

    def parameter_views(self) -> dict[str, Tensor]:
        """Checkpoint name -> the view that the tensor is copied into."""
        found = self.own_views()
        for i, (kind, layer) in enumerate(zip(self.spec.layers, self.layers, strict=True)):
            found |= {f"layers.{i}.{name}": view for name, view in layer.parameter_views(kind).items()}
        return found

    def own_views(self) -> dict[str, Tensor]:
        """Returns the `parameter_views` outside of the layers."""
        found = {"fc.weight": self.fc, "hidden_norm.weight": self.hidden_norm, "norm.weight": self.norm}
        if self.between is not None:
            found |= self.between.parameter_views()
        if self.selector is None:
            return found
        prefix = self.config.architecture.selector_name
        return found | {f"{prefix}.{name}": view for name, view in self.selector.parameter_views().items()}

    def stack_context(self, index: int, layer: LayerWeights) -> None:
        """Copies the projections of a layer's keys and values to their place in the stacked copy."""
        mixer, start, count = layer.mixer, self.spec.attention[0].q_rows, len(self.layers)
        assert isinstance(mixer, AttentionWeights) and isinstance(mixer.qkv, Tensor) and mixer.k_norm is not None
        self.context_kv.view(count, -1, self.context_kv.shape[1])[index].copy_(mixer.qkv[start:])
        self.k_norms[index].copy_(mixer.k_norm)
        if self.context_bias is not None and mixer.qkv_bias is not None:
            self.context_bias.view(count, -1)[index].copy_(mixer.qkv_bias[start:])

    def _stacked(self) -> tuple[Tensor, Tensor | None, Tensor]:
        """Returns the stacked projections and biases of all layers' keys and values, and the key norms."""
        start = self.spec.attention[0].q_rows
        mixers = [layer.mixer for layer in self.layers if isinstance(layer.mixer, AttentionWeights)]
        kv = torch.cat([w.qkv[start:] for w in mixers if isinstance(w.qkv, Tensor)])
        biases = [w.qkv_bias[start:] for w in mixers if w.qkv_bias is not None]
        norms = torch.stack([w.k_norm for w in mixers if w.k_norm is not None])
        return kv, torch.cat(biases) if biases else None, norms

    def begins(self, layer: int) -> bool:
        """Whether the queries, keys and values of a layer have their own launch, see `LayerWeights.quantized`."""
        return layer == 0 or self.between is not None

    def quantized(self, head: Tensor) -> "DrafterWeights":
        """Returns weights to draft in fp8, with a copy of `head` [V, D]. The context's projection is shared unchanged.

        Layers of a small model are not quantized, as quantizing the rows takes longer than fp8 saves. Layers that need
        several launches on this GPU are not either, as these launches convert fp8 in registers.
        """
        found = copy.copy(self)
        found.head = RowScaledFp8.of(head)
        ops, rows = ops_for(self.norm.device), self.norm[None]
        following = [None if self.between else layer for layer in self.layers]
        fused = (layer.fuses(after, rows, ops) for layer, after in zip(self.layers, following, strict=True))
        if self.spec.hidden_size >= WIDE_IN_FP8 and all(fused):
            found.layers = [layer.quantized(first=self.begins(i)) for i, layer in enumerate(self.layers)]
        return found
