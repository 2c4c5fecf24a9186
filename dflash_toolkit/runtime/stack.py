"""One stack of decoder layers over a paged cache: the target's, and with other weights the drafter's."""

from dataclasses import dataclass

from torch import Tensor

from ..kernels.ops import Ops
from ..kernels.weight import Weight
from .weights import LayerWeights, ModelSpec


@dataclass(frozen=True, slots=True)
class Rows:
    """Where the rows of one pass stand: row b * S + k is slot k of request b, at position lengths[b] + k."""

    lengths: Tensor  # int32 [B], tokens before the block
    page_table: Tensor  # int32 [B, pages of a request]
    page_size: int
    counts: Tensor | None = None  # int32 [B], rows of each request that are tokens; the rest is padding. None: all


@dataclass(frozen=True, slots=True)
class Decoder:
    """Layers, their cache and the operations they run on; holds no state of requests."""

    spec: ModelSpec
    layers: list[LayerWeights]
    norm: Tensor  # [D], the final one
    rope: Tensor  # fp32 [2, positions, H / 2]
    cache: Tensor  # [layers, 2, slots, G, H]
    ops: Ops

    def forward(self, x: Tensor, rows: Rows, taps: dict[int, Tensor] | None = None) -> Tensor:
        """Run embeddings through every layer and write their keys and values into the pages.

        Args:
            x: [M, D].
            taps: layer id -> view [M, D] that receives that layer's output.

        Returns:
            Normed hidden states [M, D].
        """
        ops, eps, page_size = self.ops, self.spec.rms_norm_eps, rows.page_size
        taps = taps or {}
        first = self.layers[0]
        _, h = ops.add_rms_norm(x, None, first.input_norm, eps)
        qkv: Tensor | None = ops.linear_split_k(h, first.qkv)
        for i, (layer, following) in enumerate(zip(self.layers, [*self.layers[1:], None], strict=True)):
            assert qkv is not None
            q = ops.rope_write(
                qkv,
                layer.qkv_bias,
                layer.q_norm,
                layer.k_norm,
                eps,
                self.rope,
                rows.lengths,
                rows.page_table,
                self.cache[i],
                page_size,
                rows.counts,
            )
            a = ops.block_attention(
                q,
                self.cache[i],
                rows.lengths,
                rows.page_table,
                page_size,
                causal=self.spec.causal[i],
                window=self.spec.windows[i],
                counts=rows.counts,
            )
            norm, then = (following.input_norm, following.qkv) if following else (self.norm, None)
            x, h, qkv = post_attention(ops, layer, x, a, norm, then, eps, taps.get(i))
        return h


def post_attention(
    ops: Ops,
    layer: LayerWeights,
    x: Tensor,
    a: Tensor,
    norm: Tensor,
    qkv: Weight | None,
    eps: float,
    tap: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """From a layer's attention a [M, N H] to the next layer's norm [D] and qkv; see `fused_post_attention`."""
    if layer.o_bias is None and ops.fuses_post_attention(x, [layer.o, layer.gate_up, layer.down, qkv]):
        return ops.fused_post_attention(x, a, layer.o, layer.post_norm, layer.gate_up, layer.down, norm, qkv, eps, tap)
    x, h = ops.add_rms_norm(x, ops.linear_split_k(a, layer.o, layer.o_bias), layer.post_norm, eps)
    active = ops.linear_swiglu(h, layer.gate_up)
    x, h = ops.add_rms_norm(x, ops.linear_split_k(active, layer.down), norm, eps, tap)
    return x, h, None if qkv is None else ops.linear_split_k(h, qkv)
