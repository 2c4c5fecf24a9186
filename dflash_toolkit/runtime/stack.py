"""One stack of decoder layers over a paged cache: the target's, and with other weights the drafter's."""

from dataclasses import dataclass
from types import ModuleType

from torch import Tensor

from .weights import LayerWeights, ModelSpec


@dataclass(frozen=True, slots=True)
class Rows:
    """Where the rows of one pass stand: row b * S + k is slot k of request b, at position lengths[b] + k."""

    lengths: Tensor  # int32 [B], tokens before the block
    page_table: Tensor  # int32 [B, pages of a request]
    page_size: int


@dataclass(frozen=True, slots=True)
class Decoder:
    """Layers, their cache and the operations they run on; holds no state of requests."""

    spec: ModelSpec
    layers: list[LayerWeights]
    norm: Tensor  # [D], the final one
    rope: Tensor  # fp32 [2, positions, H / 2]
    cache: Tensor  # [layers, 2, slots, G, H]
    ops: ModuleType  # kernels.reference or the Triton kernels: the same names and signatures

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
        qkv = ops.linear_partials(h, first.qkv)
        for i, (layer, following) in enumerate(zip(self.layers, [*self.layers[1:], None], strict=True)):
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
            )
            a = ops.block_attention(
                q,
                self.cache[i],
                rows.lengths,
                rows.page_table,
                page_size,
                causal=self.spec.causal[i],
                window=self.spec.windows[i],
            )
            x, h, qkv = ops.finish_layer(
                x,
                a,
                layer.o,
                layer.o_bias,
                layer.post_norm,
                layer.gate_up,
                layer.down,
                following.input_norm if following else self.norm,
                following.qkv if following else None,
                eps,
                taps.get(i),
            )
        return h
