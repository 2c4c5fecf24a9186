"""The DFlash network: a few Qwen3-style layers that read the target's hidden states and fill a whole block at once.

It is the backbone of every architecture; `architecture.py` describes the parts around its sublayers and the choice of
tokens.

It owns no embedding and no LM head; it receives tensors and never sees the target. Training and decoding use the
same two calls: `context_kv` turns tapped features into every layer's context keys and values (once per token), and
`forward` runs blocks against them. Contract: DFlash (arXiv 2602.06036) section 4.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from torch.utils.checkpoint import checkpoint

from ...calibration import Calibration
from ...kernels.loss_terms import LogitScale
from ...kernels.reference import draw
from ..drafting import Between, TokenSelector
from ..rope import RopeScaling
from ..spec import ARCHITECTURES, LayerSpec, MlpSpec, ModelSpec, Rope
from .architecture import DraftArchitecture, of_config, of_sizes
from .flex import attend

LONGEST_BLOCK = 1024  # far beyond what is ever accepted; a typing error would use all memory


@dataclass(frozen=True, kw_only=True, slots=True)
class DrafterConfig:
    """The configuration of the network, its place on the target and the shapes of its checkpoint.

    Raises:
        ValueError: a combination that cannot work; the message names the numbers.
    """

    hidden_size: int  # D, the target's
    num_layers: int  # L
    num_heads: int  # N
    num_kv_heads: int  # G
    head_dim: int  # H
    intermediate_size: int
    vocab_size: int  # V, the target's
    num_target_layers: int
    target_layer_ids: tuple[int, ...]  # 0-based; the feature is that layer's output
    mask_token_id: int
    block_size: int = 16  # S: one anchor and S - 1 drafted tokens
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1e6
    max_position_embeddings: int = 32768
    layer_types: tuple[str, ...] = ()  # empty: full attention on every layer
    sliding_window: int | None = None
    is_causal: bool | None = False  # None: sliding layers are causal inside the block, full ones are not
    attention_bias: bool = False
    rope_scaling: RopeScaling | None = None  # None: plain RoPE
    input_embedding_scale: float = 1.0  # on a block's rows of the target's embedding table
    output_multiplier: float = 1.0  # on the head's logits
    final_logit_softcapping: float | None = None  # then: cap * tanh(logits / cap)
    conv_kernel_size: int = 0  # taps of the convolutions around every sublayer; 0: there are none
    conv_group_size: int = 0  # channels that share the coefficients of a row
    selector_rank: int = 0  # rank of the scores of pairs of tokens; 0: every slot takes its own best
    selector_top_k: int = 0  # scored best tokens per slot
    # the measured calibration, see `Calibration`; not part of the network, and not compared
    acceptance_slope: float = field(default=1.0, compare=False)
    acceptance_bias: tuple[float, ...] = field(default=(), compare=False)  # slots 1..S - 1; empty: not measured
    rope_factor: float = field(default=1.0, init=False, repr=False, compare=False)  # on cosines and sines
    scaled_frequencies: tuple[float, ...] = field(default=(), init=False, repr=False, compare=False)  # [H / 2] or none

    def __post_init__(self) -> None:
        for name in ("hidden_size", "num_heads", "num_kv_heads", "head_dim", "intermediate_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be >= 1")
        if self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}; RoPE turns pairs, so it must be even")
        if not 2 <= self.block_size <= LONGEST_BLOCK:
            raise ValueError(
                f"block_size is {self.block_size}: a block needs an anchor and at least one mask (2..{LONGEST_BLOCK})"
            )
        for name in ("rms_norm_eps", "rope_theta", "input_embedding_scale", "output_multiplier", *self._capped):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be a number > 0")
        if not (0 < self.acceptance_slope < math.inf and all(map(math.isfinite, self.acceptance_bias))):
            raise ValueError(
                f"acceptance_slope is {self.acceptance_slope} and acceptance_bias {list(self.acceptance_bias)}; "
                f"the slope must be > 0, and all of them finite"
            )
        if self.num_layers < 1:
            raise ValueError(f"num_layers is {self.num_layers}: a drafter needs at least one layer")
        if not self.target_layer_ids:
            raise ValueError("target_layer_ids is empty: a drafter needs at least one tapped layer")
        if len(set(self.target_layer_ids)) != len(self.target_layer_ids):
            raise ValueError(f"target_layer_ids {list(self.target_layer_ids)} names a layer twice")
        last = self.num_target_layers - 1
        for layer in self.target_layer_ids:
            if layer == last:
                raise ValueError(
                    f"target_layer_ids names layer {layer}, the target's last: its output comes already normed; "
                    f"use ids 0..{last - 1}"
                )
            if not 0 <= layer < last:
                raise ValueError(f"target layer id {layer} is out of range for a target of {last + 1} layers")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(
                f"mask_token_id {self.mask_token_id} is not a row of the target's embedding (0..{self.vocab_size - 1})"
            )
        if not self.layer_types:
            object.__setattr__(self, "layer_types", ("full_attention",) * self.num_layers)
        if len(self.layer_types) != self.num_layers:
            raise ValueError(f"layer_types has {len(self.layer_types)} entries for {self.num_layers} layers")
        unknown = set(self.layer_types) - {"full_attention", "sliding_attention"}
        if unknown:
            raise ValueError(f"layer_types holds {sorted(unknown)}; known: full_attention, sliding_attention")
        if "sliding_attention" in self.layer_types and (self.sliding_window or 0) < 1:
            raise ValueError(f"layer_types has sliding_attention, but sliding_window is {self.sliding_window}")
        self._check_parts()
        if self.architecture.causal:
            object.__setattr__(self, "is_causal", True)
        self.architecture.check(self)
        if self.rope_scaling is not None:  # once, and not in a forward, which torch.compile would have to trace
            frequencies, factor = self.rope_scaling.frequencies(self.rope_theta, self.head_dim)
            object.__setattr__(self, "scaled_frequencies", frequencies)
            object.__setattr__(self, "rope_factor", factor)

    def _check_parts(self) -> None:
        for part in self.architecture.parts:
            sizes = [getattr(self, name) for name in part.sizes]
            if min(sizes) < 0 or (min(sizes) == 0) != (max(sizes) == 0):
                found = " and ".join(f"{name} {size}" for name, size in zip(part.sizes, sizes, strict=True))
                wanted = "both, each >= 1, or neither" if len(sizes) == 2 else "a number >= 1 for each, or for none"
                raise ValueError(f"{found.replace(' ', ' is ', 1)}; give {wanted}")

    @property
    def architecture(self) -> DraftArchitecture:
        """The architecture, by its parts."""
        return of_config(self)

    @property
    def is_dflash2(self) -> bool:
        return self.architecture.kind == "dflash2"

    @property
    def has_selector(self) -> bool:
        """Whether a selector chooses the tokens of slots."""
        return self.architecture.has_selector(self.sizes)

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of its architecture's parts."""
        return {name: getattr(self, name) for name in self.architecture.sizes}

    @property
    def draft_candidates(self) -> int:
        """The number of best tokens of a slot to sample its draft from."""
        return self.architecture.candidates(self)

    @property
    def calibration(self) -> Calibration:
        """The calibration of the slots of a block; a slot without a measured bias has the last one's."""
        return Calibration(self.acceptance_slope, self.acceptance_bias or (0.0,)).of_slots(self.block_size - 1)

    @property
    def _capped(self) -> tuple[str, ...]:
        return () if self.final_logit_softcapping is None else ("final_logit_softcapping",)

    @property
    def feature_size(self) -> int:
        """K * D, the width of the concatenated taps."""
        return len(self.target_layer_ids) * self.hidden_size

    def spec(self) -> ModelSpec:
        """Returns the layers for an engine: Qwen3's, optionally with convolutions around them."""
        mixers = [
            ARCHITECTURES["qwen3"].attention(
                self.attention_bias,
                num_heads=self.num_heads,
                num_kv_heads=self.num_kv_heads,
                head_dim=self.head_dim,
                causal=self.causal_inside_block(i),
                window=self.window(i),
                rope=Rope(tuple(self.rope_frequencies().double().tolist()), self.rope_factor),
            )
            for i in range(self.num_layers)
        ]
        conv = self.architecture.around_spec(self)
        return ModelSpec(
            hidden_size=self.hidden_size,
            vocab_size=self.vocab_size,
            layers=tuple(LayerSpec(mixer, MlpSpec(self.intermediate_size), conv) for mixer in mixers),
            rms_norm_eps=self.rms_norm_eps,
            tied_head=True,
            context_limit=self.max_position_embeddings,
        )

    def causal_inside_block(self, layer: int) -> bool:
        """Whether block slots of this layer see only earlier slots (the rule of vLLM and z-lab 0.1.0)."""
        return self.layer_types[layer] == "sliding_attention" if self.is_causal is None else self.is_causal

    def window(self, layer: int) -> int:
        """The distance of keys, before or after, from which a query of this layer does not see them; 0 is no limit."""
        return (self.sliding_window or 0) if self.layer_types[layer] == "sliding_attention" else 0

    def rope_frequencies(self, device: torch.device | None = None) -> Tensor:
        """Radians per position, fp32 [H / 2]."""
        if self.rope_scaling is not None:
            return torch.tensor(self.scaled_frequencies, device=device, dtype=torch.float32)
        half = torch.arange(0, self.head_dim, 2, device=device, dtype=torch.float32)
        return self.rope_theta ** (-half / self.head_dim)

    def with_block_size(self, block_size: int) -> "DrafterConfig":
        """Returns the drafter with another block size (shorter than it was trained with works well)."""
        return replace(self, block_size=block_size)

    def resized(self, **sizes: int) -> "DrafterConfig":
        """Returns the drafter with parts of these sizes, 0 for a part that it loses; so it may be of another
        architecture."""
        values = {each.name: getattr(self, each.name) for each in fields(self) if each.init} | sizes
        made = of_sizes(values).config()
        known = {each.name for each in fields(made)}
        return made(**{name: value for name, value in values.items() if name in known})


@dataclass(slots=True)
class ContextKV:
    """Every draft layer's keys (normed, rotated) and values of the context, and their positions."""

    keys: list[Tensor]  # L x [B, G, T, H]
    values: list[Tensor]  # L x [B, G, T, H]
    positions: Tensor  # [B, T]

    @property
    def length(self) -> int:
        return self.positions.shape[1]

    def append(self, other: "ContextKV") -> "ContextKV":
        """Returns the concatenation along T, without computing anything again."""
        return ContextKV(
            [torch.cat(pair, dim=2) for pair in zip(self.keys, other.keys, strict=True)],
            [torch.cat(pair, dim=2) for pair in zip(self.values, other.values, strict=True)],
            torch.cat([self.positions, other.positions], dim=1),
        )


@dataclass(frozen=True, slots=True)
class SampledDraft:
    """Tokens of K slots, and the distributions that they were sampled from, given those before."""

    tokens: Tensor  # int64 [K]
    candidates: Tensor  # int64 [K, C]
    q: Tensor  # fp32 [K, C], zero for every other token


class RMSNorm(nn.Module):
    """Qwen3's: the mean square in fp32, rounded to the input's dtype before the weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class MLP(nn.Module):
    """Qwen3's, with SiLU."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        d, ffn = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(d, ffn, bias=False)
        self.up_proj = nn.Linear(d, ffn, bias=False)
        self.down_proj = nn.Linear(ffn, d, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Rotates the pairs (i, i + H / 2) of x [B, heads, T, H] by the angles with the given cos and sin [B, T, H]."""
    cos, sin = (part[:, None] for part in rope)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class DraftAttention(nn.Module):
    """Queries from the block; keys and values from context and block through the same projections."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        d, h, bias = config.hidden_size, config.head_dim, config.attention_bias
        self.head_dim = h
        self.q_proj = nn.Linear(d, config.num_heads * h, bias=bias)
        self.k_proj = nn.Linear(d, config.num_kv_heads * h, bias=bias)
        self.v_proj = nn.Linear(d, config.num_kv_heads * h, bias=bias)
        self.o_proj = nn.Linear(config.num_heads * h, d, bias=bias)
        self.q_norm = RMSNorm(h, config.rms_norm_eps)
        self.k_norm = RMSNorm(h, config.rms_norm_eps)

    def _heads(self, projected: Tensor) -> Tensor:
        return projected.unflatten(-1, (-1, self.head_dim))  # [B, T, heads, H]

    def keys_values(self, hidden: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Returns keys (normed, then rotated) and values (unchanged) [B, G, T, H] of `hidden` [B, T, D]."""
        k = self.k_norm(self._heads(self.k_proj(hidden))).transpose(1, 2)
        v = self._heads(self.v_proj(hidden)).transpose(1, 2)
        return rotate(k, rope).to(v.dtype), v  # under autocast the fp32 norm weight promotes k

    def forward(
        self, x: Tensor, rope: tuple[Tensor, Tensor], context: tuple[Tensor, Tensor], mask: Tensor | BlockMask | None
    ) -> Tensor:
        q = self.q_norm(self._heads(self.q_proj(x))).transpose(1, 2)  # [B, N, Q, H]
        q = rotate(q, rope).to(context[1].dtype)
        k_block, v_block = self.keys_values(x, rope)
        k = torch.cat([context[0], k_block], dim=2)
        v = torch.cat([context[1], v_block], dim=2)
        grouped = k.shape[1] != q.shape[1]
        if isinstance(mask, BlockMask):
            out = attend(q, k, v, mask, grouped, self.head_dim)
        else:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class DraftLayer(nn.Module):
    """Pre-norm decoder layer; the context enters only as keys and values, without input_layernorm or FFN."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.self_attn = DraftAttention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention_conv, self.mlp_conv = (config.architecture.around(config) for _ in range(2))

    def forward(
        self,
        x: Tensor,
        rope: tuple[Tensor, Tensor],
        context: tuple[Tensor, Tensor],
        mask: Tensor | BlockMask | None,
        block_size: int | None = None,
    ) -> Tensor:
        """Returns the next layer's rows of the blocks x [B, Q, D], of `block_size` slots each; None: one block of Q."""
        u = self.input_layernorm(x)
        if self.attention_conv is None:
            x = x + self.self_attn(u, rope, context, mask)
        else:
            x = x + self.attention_conv(u, lambda u: self.self_attn(u, rope, context, mask), block_size)
        u = self.post_attention_layernorm(x)
        return x + (self.mlp(u) if self.mlp_conv is None else self.mlp_conv(u, self.mlp, block_size))


class Drafter(nn.Module):
    """The whole drafter. Parameter names are those of the checkpoint (`fc`, `hidden_norm`, `layers.i...`, `norm`)."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(config.feature_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(DraftLayer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        architecture = config.architecture
        self.between_name = architecture.between_name
        if self.between_name:
            self.add_module(self.between_name, architecture.between(config))
        for name, tensor in architecture.fixed_tensors(config).items():
            self.register_buffer(name, tensor)
        if architecture.selector_name:
            self.add_module(architecture.selector_name, architecture.selector(config))
        self.recompute = False  # in training: recompute activations inside a layer in the backward

    @classmethod
    def of_tensors(cls, config: DrafterConfig, tensors: Mapping[str, Tensor]) -> "Drafter":
        """Returns the network around its weights, by name, without copying them.

        `Drafter(config)` first makes random weights, which takes seconds for a target of 8B.

        Raises:
            RuntimeError: a tensor is missing, unknown or misshapen.
        """
        with torch.device("meta"):
            drafter = cls(config)
        drafter.load_state_dict(tensors, assign=True)
        return drafter

    @classmethod
    def fresh(cls, config: DrafterConfig, seed: int) -> "Drafter":
        """Returns the network in fp32 on the CPU with random weights by `seed`, see `init_weights`."""
        with torch.device("meta"):
            drafter = cls(config)
        drafter.to_empty(device="cpu").init_weights(torch.Generator().manual_seed(seed))
        return drafter

    @property
    def selector(self) -> TokenSelector | None:
        """The module that chooses among the best tokens of every slot; None: each slot takes its own best."""
        return getattr(self, self.config.architecture.selector_name, None)

    @property
    def between(self) -> Between | None:
        """The module that changes the rows of blocks after every layer; None: nothing does."""
        return getattr(self, self.between_name, None)

    def begin(self, tokens: Tensor, block_size: int, replaced: Tensor | None = None) -> Any:
        """Returns what `between` needs in one pass, see `Between.begin`."""
        assert self.between is not None
        return self.between.begin(dict(self.named_buffers(recurse=False)), tokens, block_size, replaced)

    def without_selector(self) -> "Drafter":
        """Returns a drafter with the same weights that takes the best token of each slot."""
        architecture = self.config.architecture
        sizes = [name for part in architecture.parts if part.selects for name in part.sizes]
        prefix = f"{architecture.selector_name}."
        kept = {name: weight for name, weight in self.state_dict().items() if not name.startswith(prefix)}
        return Drafter.of_tensors(self.config.resized(**dict.fromkeys(sizes, 0)), kept)

    @property
    def device(self) -> torch.device:
        return self.fc.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.fc.weight.dtype

    def init_weights(self, generator: torch.Generator | None = None, std: float = 0.02) -> None:
        """Initialises: normal(0, 0.02) matrices, unit norms, zero biases (as Qwen3).

        The parts of other architectures than plain DFlash have no effect at first.
        """
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=std, generator=generator)
            elif name.endswith(".bias"):
                nn.init.zeros_(parameter)
            else:
                nn.init.ones_(parameter)
        for fixed in self.buffers():
            fixed.zero_()
        around = [conv for layer in self.layers for conv in (layer.attention_conv, layer.mlp_conv)]
        for part in (*around, self.between, self.selector):
            if part is not None:
                part.init_weights()  # type: ignore[operator, union-attr]

    def context_kv(self, features: Tensor, positions: Tensor) -> ContextKV:
        """Projects tapped features [B, T, K*D] at `positions` [B, T] into every layer's context keys and values."""
        ctx = self.hidden_norm(self.fc(features))  # [B, T, D], the same for every layer
        rope = self.rope(positions)
        pairs = [layer.self_attn.keys_values(ctx, rope) for layer in self.layers]  # type: ignore[operator, union-attr]
        return ContextKV([k for k, _ in pairs], [v for _, v in pairs], positions)

    def forward(
        self, block: Tensor, positions: Tensor, context: ContextKV,
        masks: Mapping[str, Tensor | BlockMask] | None = None, tokens: Tensor | None = None,
        replaced: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Runs block embeddings against the context.

        Args:
            block: rows of the target's embedding table for `[anchor, MASK, ...]` of one or more blocks, [B, Q, D].
            positions: position of every slot, [B, Q].
            context: keys and values of T context tokens.
            masks: visibility by the type of a layer: bool [B, 1, Q, T + Q] or a flex BlockMask over the same axes.
                None is for a single block in decoding, which sees context and itself by each layer's own rule.
            tokens, replaced: for a drafter with a module between its layers, see `Between.begin`.

        Returns:
            Normed hidden states [B, Q, D]; the target's lm_head turns slots 1..S-1 into draft logits. The changes after
            the head (`output_multiplier`, `final_logit_softcapping`) keep their order and so their argmax. With a
            module between the layers [B, Q, 2 D]: then the output of the last layer before that module; and in
            training [B, Q, 2 D + 1], with the sum of its losses.
        """
        rope, block_size = self.rope(positions), self.config.block_size if masks else None
        x = self.scaled(block)
        between, begun = self.between, None
        if between is not None:
            assert tokens is not None
            begun = self.begin(tokens, block_size or x.shape[1], replaced)
        last, costs = x, []  # torch.compile cannot call list[Tensor]
        for i, layer in enumerate(self.layers):
            mask = masks[self.config.layer_types[i]] if masks else self.own_mask(i, positions, context.positions)
            pair = (context.keys[i], context.values[i])
            if self.recompute and torch.is_grad_enabled():
                x = checkpoint(layer, x, rope, pair, mask, block_size, use_reentrant=False, preserve_rng_state=False)
            else:
                x = layer(x, rope, pair, mask, block_size)
            if between is not None:
                last = x
                x, cost = between(i, x, begun)
                costs += [] if cost is None else [cost]
        return self.states(x, last, costs)

    def states(self, x: Tensor, last: Tensor, costs: Sequence[Tensor]) -> Tensor:
        """Returns the result of `forward` from the last layer's rows, after and before the module between the layers.

        Args:
            costs: losses [B, Q] of that module.
        """
        hidden = self.norm(x)
        if self.between is None:
            return hidden
        found = [hidden, last, *([torch.stack(list(costs)).sum(0)[..., None]] if costs else [])]
        return torch.cat(found, dim=-1)

    def for_head(self, states: Tensor) -> Tensor:
        """Returns the part [..., D] of the result of `forward` that is multiplied with the head."""
        return states[..., : self.config.hidden_size]

    def choose(self, hidden: Tensor, logits: Tensor, anchor: int, head: Tensor | None = None) -> Tensor:
        """Returns the drafted tokens of slots 1..S-1: each slot's largest logit, or the selector's walk over its best.

        Args:
            hidden: the result of `forward` for these slots, [S - 1, D] or wider.
            logits: the plain output of the target's lm_head for it, [S - 1, V].
            anchor: the token in slot 0.
            head: the weight of the lm_head, [V, D], which some architectures read.
        """
        chooser = self.config.architecture.chooser(self, head)
        if chooser is None:
            return logits.argmax(-1)
        unary, candidates = self.candidates(logits)
        return chooser.walk(hidden, unary, candidates, anchor)

    def sample(
        self, hidden: Tensor, logits: Tensor, anchor: int, temperature: float, uniform: Tensor,
        head: Tensor | None = None,
    ) -> SampledDraft:  # fmt: skip
        """Samples every slot's token from the softmax of its candidates' scores over `temperature`; else as `choose`.

        With a selector the scores are those after the token sampled at the slot before.

        Args:
            temperature: > 0, the request's; its filters apply only to the target.
            uniform: fp64 [S - 1] in [0, 1), one per slot.
        """
        unary, candidates = self.candidates(logits)
        rows: list[Tensor] = []  # rows of q

        def pick(k: int, scores: Tensor) -> Tensor:
            place, q = draw(scores[None], scores.new_full((1,), temperature), uniform[k, None])
            rows.append(q[0])
            return place[0]

        chooser = self.config.architecture.chooser(self, head)
        if chooser is None:
            tokens = torch.stack([candidates[k, pick(k, scores)] for k, scores in enumerate(unary)])
        else:
            tokens = chooser.walk(hidden, unary, candidates, anchor, pick)
        return SampledDraft(tokens, candidates, torch.stack(rows))

    def conditional(
        self, hidden: Tensor, logits: Tensor, anchor: int, head: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Returns the input of `best_first`: each slot's best tokens [S - 1, C], and their log-probabilities.

        These are fp32 [S - 1, C, C], of each after each of the slot before. Without a selector slots are independent,
        and the softmax is over the vocabulary; with one it is over the candidates' scores. Arguments as for `choose`.
        """
        unary, candidates = self.candidates(logits)
        if (chooser := self.config.architecture.chooser(self, head)) is not None:
            scores = chooser.lattice(hidden, unary, candidates, anchor)
            return candidates, scores.log_softmax(-1)
        wide = logits.float().clone()
        LogitScale(self.config.output_multiplier, self.config.final_logit_softcapping).apply_(wide)
        own = wide.log_softmax(-1).gather(-1, candidates)
        return candidates, own[:, None].expand(-1, own.shape[1], -1)

    def candidates(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Returns each slot's best tokens [S - 1, C], largest logit first, ties by the lowest id, and their logits.

        The logits are fp32 [S - 1, C], after the head.
        """
        count = self.config.draft_candidates
        best = logits.sort(dim=-1, descending=True, stable=True)
        unary = best.values[:, :count].float().contiguous()
        LogitScale(self.config.output_multiplier, self.config.final_logit_softcapping).apply_(unary)
        return unary, best.indices[:, :count]

    def scaled(self, block: Tensor) -> Tensor:
        """Returns a block's rows of the embedding table as the input of the first layer."""
        scale = self.config.input_embedding_scale
        return block if scale == 1.0 else block * scale

    def rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Returns cos and sin [B, T, H] of neox RoPE, in fp32 and then cast to the drafter's dtype.

        The frequencies are not a buffer: `module.to(bfloat16)` would round them and shift every far position.
        """
        frequencies = self.config.rope_frequencies(positions.device)
        angles = (positions[..., None].float() * frequencies).repeat(1, 1, 2)
        cos, sin = (part * self.config.rope_factor for part in (angles.cos(), angles.sin()))
        return cos.to(self.dtype), sin.to(self.dtype)

    def own_mask(self, layer: int, block: Tensor, context: Tensor) -> Tensor | None:
        """Returns visibility by the rule of `layer`, bool [B, 1, Q, T + Q] from positions [B, Q], [B, T]; None: all."""
        causal, window = self.config.causal_inside_block(layer), self.config.window(layer)
        if not (causal or window):
            return None
        distance = block[:, :, None] - torch.cat([context, block], dim=1)[:, None, :]  # query minus key position
        mask = torch.ones_like(distance, dtype=torch.bool)
        if causal:
            mask &= distance >= 0
        if window:
            mask &= distance.abs() < window
        return mask[:, None]
