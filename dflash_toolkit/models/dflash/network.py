"""The DFlash network: a few Qwen3-style layers that read the target's hidden states and fill a whole block at once.

It is the backbone of every architecture; `architecture.py` describes the parts around its sublayers and the choice of
tokens.

It owns no embedding and no LM head; it receives tensors and never sees the target. Training and decoding use the
same two calls: `context_kv` turns tapped features into every layer's context keys and values (once per token), and
`forward` runs blocks against them. Contract: DFlash (arXiv 2602.06036) section 4.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from torch.utils.checkpoint import checkpoint

from ...kernels.loss_terms import LogitScale
from ...kernels.reference import draw
from ..drafting import Between, TokenSelector
from .config import DrafterConfig
from .flex import attend


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
