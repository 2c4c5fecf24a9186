"""FLOPs of a step of the drafter, the numerator of its model FLOPs utilisation (MFU).

A multiply-add is two FLOPs. Only matrix products are counted, and only necessary ones: no masked pairs, invalid blocks,
padding or recomputation.
"""

from collections import Counter

import torch
from torch import Tensor

from dflash_toolkit.models.dflash.network import DrafterConfig

from ..objective.blocks import Blocks


def drafter_step_flops(
    shape: DrafterConfig, context_tokens: int, block_rows: int, visible_pairs: int, head_rows: int, vocab: int
) -> float:
    """Returns the FLOPs of one forward and backward of the drafter and the frozen head after it.

    A product of R rows with a matrix [I, O] is 2*R*I*O forward, and as much each for the gradients of the matrix and of
    the rows. `fc` reads frozen features without gradient, and the head's matrix has none:

        fc          4 * T * K*D * D
        context     6 * T * D * 2*G*H                           per layer
        block       6 * R * (2*N*H*D + 2*G*H*D + 3*I*D)         per layer
        attention   12 * N*H * P                                of all layers: QK', PV and four products backward
        head        4 * R' * D * V

    An architecture adds 6 FLOPs for each of its multiply-adds: per row in a layer, per R' slot in a selector.

    Args:
        context_tokens: T, tokens of all documents whose features are projected.
        block_rows: R, slots of the valid blocks, anchors included.
        visible_pairs: P, (query slot, visible key) pairs of one head of every layer; see `visible_pairs`.
        head_rows: R', supervised slots.
        vocab: V, rows of the head.
    """
    d, queries, keys = shape.hidden_size, shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    context = 6 * context_tokens * d * 2 * keys
    block = 6 * block_rows * d * (2 * queries + 2 * keys + 3 * shape.intermediate_size)
    attention = 12 * queries * visible_pairs
    fusion = 4 * context_tokens * shape.feature_size * d
    head = 4 * head_rows * d * vocab
    selector = 6 * head_rows * shape.architecture.selector_products(shape)
    block += 6 * block_rows * shape.architecture.layer_products(shape)
    return float(fusion + shape.num_layers * (context + block) + attention + head + selector)


def visible_pairs(blocks: Blocks, shape: DrafterConfig) -> Tensor:
    """Returns the number of (query slot, visible key) pairs over all layers, a scalar: of the context before the slot's
    anchor and its own block, as far as the layer sees."""
    before = blocks.positions[:, :, :1]  # the anchor's position in its document, [B, A, 1]
    slot = torch.arange(blocks.size, device=before.device)
    distance, pairs = slot[:, None] - slot, before.new_zeros(())
    for kind, layers in Counter(shape.layer_types).items():
        layer = shape.layer_types.index(kind)
        window = shape.window(layer)
        inside = distance >= 0 if shape.causal_inside_block(layer) else torch.ones_like(distance, dtype=torch.bool)
        context = before.expand(-1, -1, blocks.size)
        if window:
            inside = inside & (distance.abs() < window)
            context = context.minimum((window - 1 - slot).clamp(min=0))
        pairs = pairs + layers * ((context + inside.sum(1)) * blocks.valid[:, :, None]).sum()
    return pairs
