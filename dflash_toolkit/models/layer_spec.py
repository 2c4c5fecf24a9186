"""Defines the parts of a decoder layer: mixers, FFNs, norms, and the shapes of their weights."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..config import UnsupportedModel
from ..kernels.formats import DENSE, Activation, Format
from .rope import ROPE_TYPES, rope_of, scaled_frequencies, temperatures

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"  # kinds of layers


def refusal(config: Any, what: str) -> UnsupportedModel:
    """Returns the error for a configuration that this engine does not serve."""
    name = config.name_or_path or config.model_type
    return UnsupportedModel(
        f"target {name}: {what} is not served by this engine, but vLLM may (dflash-serve --engine vllm)"
    )


@dataclass(frozen=True, slots=True)
class Rope:
    """The rotation of a head's first R numbers."""

    frequencies: tuple[float, ...]  # [R / 2], radians per position
    factor: float = 1.0  # on cosines and sines (yarn)
    temperature: tuple[float, float] | None = None  # floor and scale of the factors of queries, see `temperatures`

    @classmethod
    def of(cls, config: Any, kind: str, turning: int) -> "Rope":
        """Reads the rope of layers of a kind from a Hugging Face config; `turning` numbers of each head turn.

        Raises:
            UnsupportedModel: the type of the rope is unknown.
        """
        parameters = rope_of(config, kind)
        rope_type = parameters.get("rope_type", "default")
        if rope_type not in (*ROPE_TYPES, "longrope", "proportional"):
            raise refusal(config, f"rope type {rope_type!r}")
        if rope_type != "default":
            return cls(*scaled_frequencies(config, kind))
        exponents = torch.arange(0, turning, 2, dtype=torch.float32) / turning
        return cls(tuple((1.0 / parameters["rope_theta"] ** exponents).double().tolist()))

    def still(self, temperature: tuple[float, float] | None = None) -> "Rope":
        """Returns a rotation of as many numbers that leaves every one as it is."""
        return Rope((0.0,) * len(self.frequencies), temperature=temperature)

    def table(self, positions: int, device: torch.device) -> Tensor:
        """Returns cosines, sines and, with a temperature, the factors of queries: fp32 [2 or 3, positions, R / 2]."""
        frequencies = torch.tensor(self.frequencies, dtype=torch.float32, device=device)
        places = torch.arange(positions, device=device, dtype=torch.float32)
        angles = places[:, None] * frequencies
        parts = [angles.cos() * self.factor, angles.sin() * self.factor]
        if self.temperature is not None:
            parts.append(temperatures(places, *self.temperature)[:, None].expand_as(angles))
        return torch.stack(parts)


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionSpec:
    """Softmax attention over the keys and values of all tokens."""

    num_heads: int  # N
    num_kv_heads: int  # G
    head_dim: int  # H
    qk_norm: bool  # norms of every head
    weighted_norms: bool = True  # these norms have weights
    qkv_bias: bool
    o_bias: bool
    causal: bool = True  # inside the block
    rope: Rope
    window: int = 0  # 0 is full attention; -C: rows see only their own chunk of C positions
    factor: float | None = None  # factor of the scores; None: H ** -0.5
    soft_cap: float = 0.0  # cap of the scores, see `PagedKV`; 0 is no cap
    sinks: bool = False  # one more score of each head; its value is zero
    gated: bool = False  # a head's output is multiplied with the sigmoid of as many more numbers, after its query
    fused: bool = False  # checkpoints have queries, keys and values in one matrix
    joint_qk_norm: bool = False  # a norm of the queries of all heads together, and one of the keys
    interleaved: bool = False  # pairs of numbers that turn are adjacent
    values_are_keys: bool = False  # values are the keys before their norm and rotation
    normed_values: bool = False  # the values of every head are normed, without weights
    source: int | None = None  # an earlier layer of the same kind, with the keys and values; None: it has its own
    weight: Format = DENSE  # format of its matrices

    @property
    def width(self) -> int:
        """Returns the width of the queries and of the attention output."""
        return self.num_heads * self.head_dim

    @property
    def qkv_rows(self) -> int:
        return self.q_rows + 2 * self.kv_width * (self.source is None)

    @property
    def kv_heads(self) -> tuple[int, int]:
        """G and H of its pages."""
        return self.num_kv_heads, self.head_dim

    @property
    def kv_width(self) -> int:
        """Returns the width of the keys, which is also that of the values."""
        return self.num_kv_heads * self.head_dim

    @property
    def q_rows(self) -> int:
        """Returns the rows of the queries' projection, gates included."""
        return (1 + self.gated) * self.width

    def matrices(self, d: int) -> dict[str, tuple[int, int]]:
        """Shapes of a checkpoint's matrices in a model of hidden size d."""
        if self.fused:
            return {"qkv_proj": (self.qkv_rows, d), "o_proj": (d, self.width)}
        own = {f"{letter}_proj": (self.kv_width, d) for letter in self.own_projections}
        return {"q_proj": (self.q_rows, d)} | own | {"o_proj": (d, self.width)}

    @property
    def own_projections(self) -> str:
        """Returns the letters of the projections of keys and values in a checkpoint."""
        return "" if self.source is not None else "k" if self.values_are_keys else "kv"


@dataclass(frozen=True, kw_only=True, slots=True)
class GatedDeltaNetSpec:
    """A recurrent mixer: a state per head, which every token decays and corrects (Yang et al., arXiv 2412.06464)."""

    num_heads: int  # N, of values
    num_k_heads: int  # heads of queries and of keys
    head_dim: int  # H_v, of values
    k_head_dim: int  # H_k
    taps: int  # T, of the short convolution before it
    by_key_heads: bool = False  # checkpoints have what it makes of a token in one matrix, one key head after the other
    weight: Format = DENSE  # format of its matrices, except those of beta and the decay

    @property
    def width(self) -> int:
        """Numbers that it makes of a token."""
        return self.num_heads * self.head_dim

    @property
    def channels(self) -> int:
        """C of the convolution: queries, keys and values."""
        return 2 * self.num_k_heads * self.k_head_dim + self.width

    def matrices(self, d: int) -> dict[str, tuple[int, int]]:
        """Shapes of a checkpoint's matrices in a model of hidden size d, those of beta and the decay left out."""
        out = {"out_proj": (d, self.width)}
        if self.by_key_heads:
            return {"in_proj_qkvz": (self.channels + self.width, d)} | out
        return {"in_proj_qkv": (self.channels, d), "in_proj_z": (self.width, d)} | out


@dataclass(frozen=True, slots=True)
class MlpSpec:
    """down(activation(gate(h)) * up(h))."""

    intermediate_size: int  # I
    weight: Format = DENSE  # format of its matrices
    activation: Activation = "silu"
    fused: bool = False  # checkpoints have gates and ups in one matrix, all gates first

    def matrices(self, d: int) -> dict[str, tuple[int, int]]:
        """Shapes of a checkpoint's matrices in a model of hidden size d."""
        i = self.intermediate_size
        sides = {"gate_up_proj": (2 * i, d)} if self.fused else {"gate_proj": (i, d), "up_proj": (i, d)}
        return sides | {"down_proj": (d, i)}


@dataclass(frozen=True, kw_only=True, slots=True)
class MoeSpec:
    """A mixture of experts: the sum over each row's `top_k` likeliest experts, every one an MLP times the row's weight.

    The weights are a softmax of the router's logits over all experts, or `sigmoid` ones.
    """

    num_experts: int  # E
    top_k: int
    intermediate_size: int  # I of an expert
    normalized: bool  # the weights of a row's own experts add up to 1
    shared: int = 0  # more experts, slices of the one that all rows take, times the sigmoid of the router's last row
    sigmoid: tuple[int, int, float] | None = None  # groups, best ones and scale of `SigmoidRouting`
    clamp: tuple[float, float] | None = None  # alpha and limit of `ClampedExperts`; then the router also has a bias
    weighted_inputs: bool = False  # the weights multiply the rows before the experts; the logits alone choose them
    weight: Format = DENSE  # format of the matrices of the experts
    activation: Activation = "silu"
    scaled: bool = False  # the router norms its input, and scales what it norms and the weight of every expert

    @property
    def experts(self) -> int:
        """In memory."""
        return self.num_experts + self.shared

    @property
    def router_rows(self) -> int:
        """Returns the rows of the router's matrix, with the gate of the shared expert."""
        return self.num_experts + (self.shared > 0 and self.sigmoid is None)

    @property
    def shared_name(self) -> str:
        return "shared_experts" if self.sigmoid and not self.weighted_inputs else "shared_expert"

    def matrices(self, d: int) -> dict[str, tuple[int, int]]:
        """Shapes of an expert's matrices in a model of hidden size d."""
        return MlpSpec(self.intermediate_size).matrices(d)


@dataclass(frozen=True, slots=True)
class ConvolutionSpec:
    """Convolutions along the rows of a block, before and after every sub-layer."""

    taps: int  # T
    group_size: int  # g, channels that share what a row adds to a tap


@dataclass(frozen=True, slots=True)
class NormNames:
    """Names in a checkpoint of the norms of a layer; None where the layer has no norm."""

    mixer_input: str | None = "input_layernorm"
    mixer_output: str | None = None  # norms the output before it is added to x
    ffn_input: str | None = "post_attention_layernorm"
    ffn_output: str | None = None


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """x + mixer(norm(x)), then x + ffn(norm(x)); the norms are RMSNorms. `norms` may place other ones."""

    mixer: AttentionSpec | GatedDeltaNetSpec
    ffn: MlpSpec | MoeSpec
    conv: ConvolutionSpec | None = None
    zero_centered: bool = False  # weights of its norms are stored less one
    fp32_norms: bool = False  # weights of its norms multiply in fp32; implied by `zero_centered`
    norms: NormNames = NormNames()
    scaled: bool = False  # the sum is multiplied with a number of the layer
    ffn_name: str = "mlp"  # in checkpoints
    experts: MoeSpec | None = None  # next to the FFN, see `ParallelExperts`
    input_size: int = 0  # P of its own embedding of every token, see `LayerInputWeights`; 0: it has none

    @property
    def routed(self) -> MoeSpec | None:
        """Returns the experts of the layer."""
        return self.ffn if isinstance(self.ffn, MoeSpec) else self.experts
