"""A stack of decoder layers over a paged cache, for the target and for the drafter.

A layer is a mixer and an FFN. Each ends in split-K partial sums, which the norm before the next one adds to the
residual stream. A drafter may have a convolution before and after each. The end of a mixer, its FFN and the beginning
of the next mixer may run as one kernel. That depends on the weights and the device, not on the batch.
"""

import functools
import itertools
from collections import Counter
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from ..kernels.delta import DeltaMemory, TreeInputs
from ..kernels.formats import Operand, format_of, values_of
from ..kernels.ops import Ops
from ..kernels.paged import FP8, PagedKV
from ..kernels.tree import TreeRows
from ..models.drafting import BetweenWeights
from ..models.spec import AttentionSpec, GatedDeltaNetSpec, LayerSpec, ModelSpec, Rope
from .graphs import to_device
from .weights import (
    AttentionWeights,
    ConvolutionWeights,
    DrafterWeights,
    GatedDeltaNetWeights,
    LayerWeights,
    MlpWeights,
    MoeWeights,
    ParallelExperts,
    TargetWeights,
)

Result = TypeVar("Result")
Pages = dict[tuple[int, int], Tensor]  # a tensor for each number and width of KV heads
Slices = Generator[None, None, Result]  # a pass of the layers, of which each `next` launches a part


def exhaust(slices: Slices[Result]) -> Result:
    """Runs all slices and returns their result."""
    while True:
        try:
            next(slices)
        except StopIteration as end:
            result: Result = end.value
            return result


@dataclass(frozen=True, slots=True)
class States:
    """The states of recurrent layers that a pass continues from."""

    slots: Tensor  # int32 [B]; 0: no request
    counts: Tensor  # int32 [B], rows of each request that are tokens; 0 with `nodes`
    stay: Tensor | None = (
        None  # int32 [B], committed rows of the last block. None: the chunk of a prompt, which is kept whole
    )
    nodes: TreeInputs | None = None  # for all layers, for rows of trees: receives what `Stack.keep_path` needs


@dataclass(frozen=True, slots=True)
class Rows:
    """The positions of the rows of one pass: row b * S + k is slot k of request b, at position lengths[b] + k.

    With `tree`, the rows are anchors and nodes of draft trees, at its positions.
    """

    lengths: Tensor  # int32 [B], tokens before the block
    page_table: Tensor  # int32 [B, pages of a request]
    page_size: int
    counts: Tensor | None = None  # int32 [B], rows of each request that are tokens; the rest is padding. None: all
    states: States | None = None  # if layers are recurrent
    tree: TreeRows | None = None
    paths: Tensor | None = None  # int32 [B, N + 1, K + 1], see `Trees`; given with `tree`
    last: Tensor | None = None  # int64 [B], anchor tokens, for a stack with a module between its layers
    chains: bool = False  # whether no node of `tree` has a sibling
    wanted: Tensor | None = None  # int64 [W], the pass returns the states of these rows. None: of all


@dataclass(frozen=True, slots=True)
class Attention:
    """A mixer: queries, keys and values of normed rows; attention over the pages; the output projection."""

    spec: AttentionSpec
    weights: AttentionWeights
    eps: float  # epsilon of the query and key norms
    rope: Tensor  # fp32 [2 or 3, positions, R / 2], see `Rope.table`
    cache: Tensor  # [2, slots, G, H]
    scales: Tensor | None  # [2, G, slots] of an fp8 cache
    ops: Ops

    @property
    def groups_input(self) -> bool:
        """Whether the rows that are projected are quantized in groups."""
        return format_of(self.weights.qkv).groups_rows

    def project(self, h: Operand) -> Tensor:
        """Returns partial sums [P, M, (N + 2 G) H] of h [M, D]; gated attention has 2 N instead of N."""
        return self.ops.linear_split_k(h, self.weights.qkv)

    def mix(self, projected: Operand, rows: Rows) -> Tensor:
        """Writes the rows' keys and values into the pages, and returns attention [M, N H]."""
        assert isinstance(projected, Tensor), "partial sums"
        w, spec, ops = self.weights, self.spec, self.ops
        lengths, pages, size, counts = rows.lengths, rows.page_table, rows.page_size, rows.counts
        rope_write = functools.partial(
            ops.rope_write, gated=spec.gated, interleaved=spec.interleaved, normed_values=spec.normed_values,
            queries_only=spec.source is not None, scales=self.scales,
        )  # fmt: skip
        qkv, cache = (projected, w.qkv_bias, w.q_norm, w.k_norm, self.eps, self.rope), self.cache
        if spec.joint_qk_norm:
            assert w.q_norm is not None and w.k_norm is not None
            dtype = cache.dtype if self.scales is None else self.scales.dtype
            normed = ops.norm_queries_keys(projected, w.qkv_bias, w.q_norm, w.k_norm, self.eps, dtype)
            qkv = normed, None, None, None, self.eps, self.rope
        kv = PagedKV(
            cache, lengths, pages, size, spec.window, self.scales, spec.factor, spec.soft_cap, w.sinks
        )  # fmt: skip
        if (tree := rows.tree) is not None:
            assert rows.paths is not None and spec.causal
            q = rope_write(*qkv, tree.positions, pages, cache, size, at=tree.slots)
            if rows.chains:
                longest = min(rows.paths.shape[1:])
                mixed = ops.chain_attention(q, kv, tree, longest)
            else:
                mixed = ops.tree_attention(q, kv, tree, rows.paths)
        else:
            q = rope_write(*qkv, lengths, pages, cache, size, counts)
            mixed = ops.block_attention(q, kv, causal=spec.causal, counts=counts)
        return ops.gate_heads(mixed, projected, spec.head_dim) if spec.gated else mixed

    def output(self, mixed: Operand) -> Tensor:
        """Partial sums [P, M, D]."""
        return self.ops.linear_split_k(mixed, self.weights.o, self.weights.o_bias)


@dataclass(frozen=True, slots=True)
class GatedDeltaNet:
    """A mixer: a short convolution over queries, keys and values of normed rows, then the delta rule, normed and gated.

    A block does not change the state: the next block adds the committed rows, see `DeltaMemory`. Before rows of trees
    `Stack.fold` adds them; no node changes the state, and `Stack.keep_path` keeps the accepted ones.
    """

    spec: GatedDeltaNetSpec
    weights: GatedDeltaNetWeights
    eps: float  # epsilon of the norm
    memory: DeltaMemory
    number: int  # among the recurrent layers
    ops: Ops

    @property
    def groups_input(self) -> bool:
        """Whether the rows that are mixed are quantized in groups."""
        return format_of(self.weights.qkvz).groups_rows

    def project(self, h: Operand) -> Operand:
        """Returns h [M, D] itself: `mix` multiplies it by two matrices."""
        return h

    def mix(self, h: Operand, rows: Rows) -> Operand:
        """Returns the normed and gated output of the delta rule, [M, N H_v]."""
        w, spec, states, ops = self.weights, self.spec, rows.states, self.ops
        assert states is not None
        ba = ops.linear_split_k(h, w.ba)  # split, as a matrix this narrow has two tiles
        qkv, gate = ops.linear(h, w.qkvz).split([spec.channels, spec.width], dim=1)
        inputs = (qkv, ba, w.conv, w.a_log, w.dt_bias, self.memory, states.slots)
        if states.stay is None:
            mixed = ops.delta_chunk(*inputs, rows.lengths, states.counts)
        elif states.nodes is not None:
            assert rows.tree is not None and rows.paths is not None
            kept = states.nodes.of_layer(self.number)
            mixed = ops.tree_delta_inputs(*inputs, rows.tree, rows.paths, kept)
            mixed = ops.tree_delta_rule(mixed, kept.gates, self.memory, states.slots, rows.tree, rows.paths)
        else:
            parts = ops.delta_inputs(*inputs, states.stay, states.counts, rows.tree)
            mixed = ops.delta_rule(*parts, self.memory, states.slots, states.stay, states.counts, rows.tree)
        norm = ops.gated_rms_norm_quantized if format_of(w.o).groups_rows else ops.gated_rms_norm
        return norm(mixed, gate, w.norm, self.eps)

    def output(self, mixed: Operand) -> Tensor:
        """Partial sums [P, M, D]."""
        return self.ops.linear_split_k(mixed, self.weights.o)


@dataclass(frozen=True, slots=True)
class Mlp:
    """An FFN with gates."""

    weights: MlpWeights
    ops: Ops

    @property
    def groups_input(self) -> bool:
        """Whether the rows are quantized in groups."""
        return format_of(self.weights.gate_up).groups_rows

    def __call__(self, h: Operand) -> Tensor:
        """Returns partial sums [P, M, D] of normed rows h [M, D]."""
        w, ops = self.weights, self.ops
        swiglu = ops.linear_swiglu_quantized if format_of(w.down).groups_rows else ops.linear_swiglu
        return ops.linear_split_k(swiglu(h, w.gate_up, w.activation), w.down)


@dataclass(frozen=True, slots=True)
class Moe:
    """An FFN of experts; the router chooses some for every row."""

    weights: MoeWeights
    ops: Ops

    @property
    def groups_input(self) -> bool:
        """Whether the rows that experts get are quantized in groups."""
        return format_of(self.weights.gate_up).groups_rows

    def __call__(self, h: Operand, routed: Operand | None = None) -> Tensor:
        """Returns partial sums [k, M, D] of normed rows h [M, D], one for every expert of a row.

        Args:
            routed: what the router reads, [M, D]; None: h.
        """
        spec, w, ops = self.weights.spec, self.weights, self.ops
        logits = ops.linear_split_k(h if routed is None else routed, w.router, w.router_bias)[:, :, : spec.router_rows]
        if spec.scaled:
            logits = logits * w.router.shape[1] ** -0.5
        dtype = torch.float32 if w.sigmoid or spec.scaled else values_of(h).dtype
        routing = ops.top_experts(
            logits, dtype, spec.top_k, normalized=spec.normalized, shared=spec.shared, sigmoid=w.sigmoid,
            scales=w.scales,
        )  # fmt: skip
        return ops.experts_mlp(h, w.gate_up, w.down, *routing, w.clamped, spec.activation, spec.weighted_inputs)


def add_experts(weights: ParallelExperts, x: Tensor, sums: Tensor, eps: float, ops: Ops) -> Tensor:
    """Returns the output of an MLP, partial sums [P, M, D], and of the experts next to it as sums [1, M, D].

    Args:
        x: the residual stream [M, D], which both read.
    """
    _, routed = ops.add_rms_norm(x, None, weights.experts.router_norm, eps)
    _, h = ops.add_rms_norm(x, None, weights.input_norm, eps)
    found = Moe(weights.experts, ops)(h, routed)
    total, _ = ops.add_rms_norm(torch.zeros_like(x), sums, None, eps, None, weights.mlp_norm)
    return ops.add_rms_norm(total, found, None, eps, None, weights.output_norm)[0][None]


@dataclass(frozen=True, slots=True)
class SublayerConvolutions:
    """Convolutions along the rows of each block, before and after a sub-layer; or none."""

    weights: ConvolutionWeights | None
    ops: Ops

    def enter(self, h: Operand, block: int) -> tuple[Operand, Tensor | None]:
        """Returns the input of the sub-layer, and the coefficients [P, M, T (D / g)] for its output.

        One GEMM of the normed rows h [M, D] computes the coefficients of both convolutions.
        """
        if self.weights is None:
            return h, None
        assert isinstance(h, Tensor), "drafters do not quantize rows in groups"
        before, after = self.ops.linear_split_k(h, self.weights.projection).chunk(2, dim=2)
        return self.ops.block_conv(h, before, self.weights.base[0], block), after

    def leave(
        self,
        x: Tensor,
        partial_sums: Tensor,
        after: Tensor | None,
        block: int,
        norm: Tensor | None,
        eps: float,
        tap: Tensor | None = None,
        *,
        quantized: bool = False,
        output_norm: Tensor | None = None,
        scalar: Tensor | None = None,
    ) -> tuple[Tensor, Operand]:
        """Returns the residual stream [M, D] plus the sub-layer's output, and its norm, in groups if `quantized`."""
        if self.weights is None or after is None:
            normed = self.ops.add_rms_norm_quantized if quantized else self.ops.add_rms_norm
            return normed(x, partial_sums, norm, eps, tap, output_norm, scalar)
        assert norm is not None, "a drafter's"
        return self.ops.conv_add_rms_norm(x, partial_sums, after, self.weights.base[1], block, norm, eps, tap)


class Stack:
    """Layers, their caches and states, and the operations they run on. It handles rows, not requests.

    Args:
        norm: [D], the final norm.
        ropes: fp32 [2 or 3, positions, R / 2] of every rope of the layers.
        caches: [layers of attention, 2, slots, G, H] for each G and H of the layers.
        memory: that of all recurrent layers, see `DeltaMemory.of_layers`.
        scales: the same for the scales of an fp8 cache, [layers of attention, 2, G, slots].
    """

    def __init__(
        self,
        spec: ModelSpec,
        layers: list[LayerWeights],
        norm: Tensor,
        ropes: dict[Rope, Tensor],
        caches: Pages,
        ops: Ops,
        memory: DeltaMemory | None = None,
        scales: Pages | None = None,
        between: BetweenWeights | None = None,
    ) -> None:
        self.spec, self.layers, self.norm, self.ropes, self.caches, self.ops = spec, layers, norm, ropes, caches, ops
        self.memory, self.all_scales, nets = memory, scales, spec.delta_nets
        self.between = between
        self.memories = [] if memory is None else memory.of_layers(len(nets))
        pages = {
            shape: zip(cache, itertools.repeat(None) if scales is None else scales[shape], strict=False)
            for shape, cache in caches.items()
        }
        states = iter(enumerate(self.memories))
        mixers = list[Attention | GatedDeltaNet]()

        def mixer(kind: LayerSpec, layer: LayerWeights) -> Attention | GatedDeltaNet:
            if isinstance(kind.mixer, GatedDeltaNetSpec):
                assert isinstance(layer.mixer, GatedDeltaNetWeights)
                number, own = next(states)
                return GatedDeltaNet(kind.mixer, layer.mixer, spec.rms_norm_eps, own, number, ops)
            assert isinstance(layer.mixer, AttentionWeights)
            form, rope = kind.mixer, ropes[kind.mixer.rope]
            if -form.window >= rope.shape[1]:  # all positions are in one chunk: more kernels compute full attention
                form = replace(form, window=0)
            if form.source is None:
                cache = next(pages[form.kv_heads])
            else:
                source = mixers[form.source]
                assert isinstance(source, Attention)
                cache = source.cache, source.scales
            return Attention(form, layer.mixer, spec.rms_norm_eps, rope, *cache, ops)

        self._convolutions = _stacked([w.mixer for w in layers if isinstance(w.mixer, GatedDeltaNetWeights)], norm)
        for kind, weights in zip(spec.layers, layers, strict=True):
            mixers.append(mixer(kind, weights))
        self._mixers = mixers
        ffns = (weights.ffn for weights in layers)
        self._ffns = [Moe(ffn, ops) if isinstance(ffn, MoeWeights) else Mlp(ffn, ops) for ffn in ffns]
        self._around_mixers = [SublayerConvolutions(weights.mixer_conv, ops) for weights in layers]
        self._around_ffns = [SublayerConvolutions(weights.ffn_conv, ops) for weights in layers]

    @classmethod
    def allocate(
        cls,
        weights: TargetWeights | DrafterWeights,
        ops: Ops,
        dtype: torch.dtype,
        num_pages: int,
        page_size: int,
        pages_per_request: int,
        max_num_seqs: int,
        max_block: int,
        kept_states: int,
        fp8_cache: bool = False,
    ) -> "Stack":
        """Returns a stack with empty caches and states; `kept_states`: slots for prefixes, after those of requests."""
        spec, device = weights.spec, weights.norm.device
        slots, shapes = num_pages * page_size, Counter(mixer.kv_heads for mixer in spec.attention)
        new = functools.partial(torch.zeros, device=device)
        # for all positions of the pages: a chunk may fill the last one
        ropes = {rope: rope.table(pages_per_request * page_size, device) for rope in {m.rope for m in spec.attention}}
        stored = FP8 if fp8_cache else dtype
        caches = {shape: new(layers, 2, slots, *shape, dtype=stored) for shape, layers in shapes.items()}
        scales = None
        if fp8_cache:
            scales = {shape: new(layers, 2, shape[0], slots, dtype=dtype) for shape, layers in shapes.items()}
        memory, count = None, len(spec.delta_nets)
        if count:  # all equal; slot 0 belongs to no request
            net = spec.delta_nets[0]
            memory = DeltaMemory.empty(
                count * (1 + max_num_seqs + kept_states), max_block, net.taps, net.channels, net.num_heads,
                (net.k_head_dim, net.head_dim), dtype, device,
            )  # fmt: skip
        between = weights.between if isinstance(weights, DrafterWeights) else None
        return cls(spec, weights.layers, weights.norm, ropes, caches, ops, memory, scales, between)

    @property
    def cached(self) -> list[Tensor]:
        """Returns keys and values, and their scales if there are any, as [layers of attention, 2, slots, G, ...]."""
        return [*self.caches.values(), *(each.mT for each in (self.all_scales or {}).values())]

    @property
    def cache(self) -> Tensor:
        """Returns keys and values where all layers have heads of one shape."""
        (found,) = self.caches.values()
        return found

    @property
    def scales(self) -> Tensor | None:
        """Returns the scales of an fp8 `cache`."""
        return None if self.all_scales is None else next(iter(self.all_scales.values()))

    def fold(self, states: States) -> None:
        """Adds the committed rows of the last block to the states, before rows of trees."""
        assert self.memory is not None and states.stay is not None
        self.ops.fold_(self.memory, self._convolutions, states.slots, states.stay, states.counts)

    def copy_states(self, source: int, target: int, rows: int = 0) -> None:
        """Copies the states of a slot to another, and adds the first rows of the source's last block to the copy."""
        memory = self.memory
        assert memory is not None
        numbers = to_device([target, rows, 0], torch.int32, memory.state.device).split(1)
        whole, parts = [memory.state, memory.window], [memory.inputs, memory.gates]
        for part in whole + parts * (rows > 0):
            layers = part.unflatten(0, (len(self.memories), -1))
            layers[:, target].copy_(layers[:, source])
        if rows:
            slots, stay, none = numbers
            self.fold(States(slots, none, stay))

    def nodes(self, rows: int) -> TreeInputs:
        """Returns room for what all recurrent layers compute for rows of trees."""
        assert self.memory is not None
        inputs, gates = self.memory.inputs, self.memory.gates
        shape = len(self.memories), rows
        return TreeInputs(inputs.new_empty(*shape, *inputs.shape[2:]), gates.new_empty(*shape, *gates.shape[2:]))

    def keep_path(self, states: States, path: Tensor, counts: Tensor) -> None:
        """Keeps the accepted rows of a pass over trees for the next block, see `DeltaMemory`.

        Args:
            path, counts: results of `accept_trees`.
        """
        assert self.memory is not None and states.nodes is not None
        self.ops.keep_path_(self.memory, states.nodes, states.slots, path, counts)

    def forward(self, x: Tensor, rows: Rows, taps: dict[int, Tensor] | None = None) -> Tensor:
        """Runs embeddings through every layer and writes their keys and values into the pages.

        Args:
            x: [M, D].
            taps: layer id -> view [M, D] that receives that layer's output.

        Returns:
            Normed hidden states [M, D], or those of the wanted rows; with a module between the layers the output of
            the last layer, which is not normed.
        """
        return exhaust(self.slices(x, rows, taps))

    def slices(
        self, x: Tensor, rows: Rows, taps: dict[int, Tensor] | None = None, inputs: Tensor | None = None
    ) -> Slices[Tensor]:
        """Runs `forward` in slices: yields after each mixer and after each layer.

        After its mixer, the last layer computes only the wanted rows, and all rows if its output is tapped.

        Args:
            inputs: [M, L, P], see `TokenInputWeights`; None where layers have none.
        """
        taps, block = taps or {}, 1 if rows.tree is not None else len(x) // len(rows.lengths)
        h: Operand
        quantized = self._mixers[0].groups_input
        normed = self.ops.add_rms_norm_quantized if quantized else self.ops.add_rms_norm
        _, h = normed(x, None, self.layers[0].input_norm, self.spec.rms_norm_eps)
        begun: tuple[Operand, Tensor | None] | None = self._begin(0, h, block)
        anchors = None
        if self.between is not None:
            assert rows.last is not None
            anchors = self.between.sent_by(rows.last, self.ops)
        for i, mixer in enumerate(self._mixers):
            assert begun is not None
            mixed, after = mixer.mix(begun[0], rows), begun[1]
            begun = None  # frees it
            yield
            if rows.wanted is not None and i + 1 == len(self._mixers):
                wanted = x.index_select(0, rows.wanted), mixed.index_select(0, rows.wanted)
                if i in taps:
                    self._finish(i, x, mixed, after, block, taps.pop(i), inputs)
                x, mixed = wanted
                inputs = None if inputs is None else inputs.index_select(0, rows.wanted)
            x, h, begun = self._finish(i, x, mixed, after, block, taps.get(i), inputs)
            del mixed
            if self.between is not None and i + 1 < len(self._mixers):
                assert anchors is not None
                norm = self.layers[i + 1].input_norm
                assert norm is not None, "a drafter's"
                x, h = self.between.inject(i, x, anchors, norm, self.spec.rms_norm_eps, self.ops)
                begun = self._begin(i + 1, h, block)
            yield
        return values_of(h) if self.between is None else x

    def _begin(self, i: int, h: Operand, block: int) -> tuple[Operand, Tensor | None]:
        """Returns the input of mixer i, and the coefficients of the convolution after it."""
        inside, after = self._around_mixers[i].enter(h, block)
        return self._mixers[i].project(inside), after

    def _finish(
        self,
        i: int,
        x: Tensor,
        mixed: Operand,
        after: Tensor | None,
        block: int,
        tap: Tensor | None,
        inputs: Tensor | None,
    ) -> tuple[Tensor, Operand, tuple[Operand, Tensor | None] | None]:
        """Computes the rest of a layer after its mixer: its output [M, D], the norm, and `_begin` of the next layer."""
        layer, ops, eps = self.layers[i], self.ops, self.spec.rms_norm_eps
        following = self.layers[i + 1] if i + 1 < len(self.layers) and self.between is None else None
        norm = following.input_norm if following else self.norm
        if layer.fuses(following, x, ops) and (matrices := layer.fusible(following)):
            o, gate_up, down, qkv = matrices
            assert isinstance(mixed, Tensor), "weights scaled in blocks are not fused"
            assert norm is not None and layer.post_norm is not None
            h: Operand
            projected: Tensor | None
            if layer.mixer_conv is None or layer.ffn_conv is None or after is None:
                x, h, projected = ops.fused_post_attention(
                    x, mixed, o, layer.post_norm, gate_up, down, norm, qkv, eps, tap
                )
            else:  # a drafter's, which has no taps
                around = following.mixer_conv if following else None
                x, h, projected, after = ops.fused_conv_post_attention(
                    x, mixed, after, layer.mixer_conv.base[1], o, layer.post_norm, layer.ffn_conv, gate_up, down,
                    norm, around, qkv, eps, block,
                )  # fmt: skip
            return x, h, None if projected is None else (projected, after)
        x, h = self._around_mixers[i].leave(
            x, self._mixers[i].output(mixed), after, block, layer.post_norm, eps,
            quantized=self._ffns[i].groups_input, output_norm=layer.mixer_output_norm,
        )  # fmt: skip
        inside, after = self._around_ffns[i].enter(h, block)
        quantized = following is not None and self._mixers[i + 1].groups_input
        sums, output_norm = self._ffns[i](inside), layer.ffn_output_norm
        if layer.experts is not None:
            sums = add_experts(layer.experts, x, sums, eps, ops)
        if layer.inputs is not None and inputs is not None:
            x, _ = ops.add_rms_norm(x, sums, None, eps, None, output_norm)
            sums, output_norm = layer.inputs.partial_sums(x, inputs[:, i], ops), layer.inputs.norm
        x, h = self._around_ffns[i].leave(
            x, sums, after, block, norm, eps, tap,
            quantized=quantized, output_norm=output_norm, scalar=layer.scalar,
        )  # fmt: skip
        return x, h, self._begin(i + 1, h, block) if following else None


def _stacked(mixers: Sequence[GatedDeltaNetWeights], like: Tensor) -> Tensor:
    """Returns the convolutions [L, C, T] of all recurrent layers; those of the weights become views of it."""
    if not mixers:
        return like.new_empty(0)
    whole = mixers[0].conv._base
    if whole is None or any(mixer.conv._base is not whole for mixer in mixers):  # of another engine with these weights
        whole = torch.stack([mixer.conv for mixer in mixers])
        for mixer, conv in zip(mixers, whole, strict=True):
            mixer.conv = conv
    return whole
