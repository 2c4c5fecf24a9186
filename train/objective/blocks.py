"""Training blocks from features: anchors, block inputs, labels and attention masks.

A block is `[anchor, MASK, ...]`. Slot k has position anchor + k and predicts the token AT that position. A block
attends to the context strictly before its anchor and to itself, nothing else. Within that, layers with a window attend
only to keys less than the window away from the slot, and causal layers only to slots up to their own: see
`Drafter.own_mask`.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

PADDING = -1  # document id of padding
TILE = 128  # size in FlexAttention's block mask


@dataclass(frozen=True, slots=True)
class Features:
    """Output of one forward pass of the target for the drafter: a batch of rows, padded on the right."""

    tokens: Tensor  # [B, T] long
    hidden: Tensor  # [B, T, K*D] tapped layers, concatenated
    supervised: Tensor  # [B, T] bool, the target's own response
    document: Tensor  # [B, T] long, id of the token's text; PADDING for none
    positions: Tensor  # [B, T] long, position inside its document
    final: Tensor | None = None  # [B, T, D] the target's last hidden state, normed; only for distribution losses

    def __post_init__(self) -> None:
        if not self.tokens.shape == self.supervised.shape == self.document.shape == self.positions.shape:
            raise ValueError("tokens, supervised, document and positions must share one shape [B, T]")
        if self.hidden.shape[:2] != self.tokens.shape:
            raise ValueError(f"hidden {tuple(self.hidden.shape)} does not cover tokens {tuple(self.tokens.shape)}")
        if self.final is not None and self.final.shape[:2] != self.tokens.shape:
            raise ValueError(f"final {tuple(self.final.shape)} does not cover tokens {tuple(self.tokens.shape)}")


@dataclass(frozen=True, slots=True)
class Blocks:
    """Sampled blocks of a batch. Block a of row b occupies query slots a*S .. a*S + S - 1."""

    anchor: Tensor  # [B, A] long, index of the anchor in its row (0 where the block is not valid)
    valid: Tensor  # [B, A] bool, false for blocks that only fill the tensor
    inputs: Tensor  # [B, A, S] long, anchor token then masks
    positions: Tensor  # [B, A, S] long
    labels: Tensor  # [B, A, S] long, the token at each slot's own position (0 for none)
    supervised: Tensor  # [B, A, S] bool, slots with a loss; never slot 0

    @property
    def size(self) -> int:
        return self.inputs.shape[2]

    def split(self, count: int) -> list["Blocks"]:
        """Returns `count` equal parts of every row's blocks, in order; blocks that are not valid fill the last one."""
        if count == 1:
            return [self]
        filled = [F.pad(each, (0, 0) * (each.dim() - 2) + (0, -self.anchor.shape[1] % count)) for each in self._tensors]
        parts = zip(*(each.chunk(count, dim=1) for each in filled), strict=True)
        return [Blocks(*map(Tensor.clone, part)) for part in parts]  # views would be other inputs to a compiled step

    @property
    def _tensors(self) -> list[Tensor]:
        return [getattr(self, each.name) for each in fields(self)]


def sent(values: Tensor, device: torch.device) -> Tensor:
    """Copies host values to `device`. The host does not wait for a GPU that is busy with the previous step."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)


def sample_blocks(
    features: Features,
    anchors: int,
    block_size: int,
    mask_token_id: int,
    generator: torch.Generator,
    fixed: bool = False,
) -> Blocks:
    """Samples anchors uniformly without replacement from supervised positions, sorted by position.

    An anchor is a supervised token whose successor in the same document is supervised too: the first token of a
    response is the earliest bonus token at inference. A block may extend beyond the end of its response; those slots
    have no loss.

    Args:
        anchors: maximum number of blocks per row; rows with fewer candidates get invalid blocks.
        generator: a CPU generator, so that the anchors are the same on every device.
        fixed: return exactly `anchors` blocks per row, however few candidates there are.
    """
    candidates = anchor_candidates(features)
    count = anchors if fixed else min(anchors, int(candidates.sum(1).max()))
    scores = sent(torch.rand(candidates.shape, generator=generator), candidates.device)
    scores = scores.masked_fill(~candidates, -1.0)
    best, anchor = scores.topk(max(count, 1), dim=1)
    valid = best >= 0
    anchor, order = anchor.masked_fill(~valid, features.tokens.shape[1]).sort(dim=1)  # invalid blocks last
    valid = valid.gather(1, order)
    anchor = anchor.masked_fill(~valid, 0)

    index = anchor[:, :, None] + torch.arange(block_size, device=anchor.device)  # [B, A, S] into the row
    inside = index < features.tokens.shape[1]
    index = index.clamp(max=features.tokens.shape[1] - 1)

    def at(values: Tensor) -> Tensor:
        return values.gather(1, index.flatten(1)).view_as(index)

    same_document = at(features.document) == features.document.gather(1, anchor)[:, :, None]
    supervised = inside & same_document & at(features.supervised) & valid[:, :, None]
    supervised[:, :, 0] = False
    # no label after the end of the response: the next turn depends on a question that the block does not see
    supervised[:, :, 1:] &= supervised[:, :, 1:].long().cumprod(-1).bool()
    labels = at(features.tokens).masked_fill(~supervised, 0)
    inputs = torch.full_like(labels, mask_token_id)
    inputs[:, :, 0] = features.tokens.gather(1, anchor)
    positions = features.positions.gather(1, anchor)[:, :, None] + torch.arange(block_size, device=anchor.device)
    return Blocks(anchor, valid, inputs, positions, labels, supervised)


def anchor_candidates(features: Features) -> Tensor:
    """Returns positions [B, T] that may be an anchor: supervised, with a supervised next token in the same document."""
    following = torch.zeros_like(features.supervised)
    following[:, :-1] = features.supervised[:, 1:] & (features.document[:, 1:] == features.document[:, :-1])
    return features.supervised & following


# ---- attention masks: one pair of predicates for the dense mask, the flex mask and the tests --------------------
#
#              kv = | context 0..T-1 | block 0 | block 1 | ...
#   q = block 0     |   < anchor 0   |   all   |         |
#       block 1     |   < anchor 1   |         |   all   |

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def context_before_anchor(features: Features, blocks: Blocks) -> MaskMod:
    """A query attends to the context of its own document strictly before its anchor.

    Strictly, because at inference the anchor's own feature does not exist yet. Training that includes it gives perfect
    offline numbers and no acceptance when served.
    """
    document, anchor, size, context = features.document, blocks.anchor, blocks.size, features.tokens.shape[1]

    def predicate(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        at = anchor[b, q // size]
        same_document = document[b, kv.clamp(max=context - 1)] == document[b, at]
        return (kv < context) & (kv < at) & same_document

    return predicate


def same_block(features: Features, blocks: Blocks) -> MaskMod:
    """A query attends to every slot of its own block, earlier and later, and to no other block."""
    size, context = blocks.size, features.tokens.shape[1]

    def predicate(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (kv >= context) & ((kv - context) // size == q // size)

    return predicate


def block_mask_mod(features: Features, blocks: Blocks, window: int = 0, causal: bool = False) -> MaskMod:
    """The whole rule: `context_before_anchor` or `same_block`, restricted by the layer's window and causality.

    Args:
        window: keys this many positions or more from the query are masked; 0 is no window.
        causal: mask the slots after the query.
    """
    before, same = context_before_anchor(features, blocks), same_block(features, blocks)
    anchor, size, context = blocks.anchor, blocks.size, features.tokens.shape[1]

    def whole_block(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return before(b, h, q, kv) | same(b, h, q, kv)

    def limited(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        # distance from key to query in tokens: inside a document, row indices differ as positions do
        distance = torch.where(kv < context, anchor[b, q // size] + q % size - kv, q - (kv - context))
        visible = whole_block(b, h, q, kv)
        if causal:
            visible = visible & (distance >= 0)
        if window:
            visible = visible & (distance.abs() < window)
        return visible

    return limited if window or causal else whole_block


def dense_mask(features: Features, blocks: Blocks, window: int = 0, causal: bool = False) -> Tensor:
    """Returns the rule as a bool tensor [B, 1, A*S, T + A*S] for SDPA. Args: see `block_mask_mod`."""
    device = features.tokens.device
    rows, context = features.tokens.shape
    queries = blocks.anchor.shape[1] * blocks.size
    b = torch.arange(rows, device=device)[:, None, None]
    q = torch.arange(queries, device=device)[None, :, None]
    kv = torch.arange(context + queries, device=device)[None, None, :]
    return block_mask_mod(features, blocks, window, causal)(b, torch.zeros_like(b), q, kv)[:, None]


def flex_mask(features: Features, blocks: Blocks, window: int = 0, causal: bool = False) -> BlockMask:
    """Returns the rule as a FlexAttention block mask over the same axes; empty tiles are skipped.

    Anchors are sorted and documents are contiguous. A tile of queries therefore attends only to context between its
    first document's start and its last anchor, and all its queries attend to context between its last document's start
    and its first anchor. A window may exclude the start of a document. The predicates are evaluated only in partly
    visible tiles.

    Args: see `block_mask_mod`.
    """
    context, size = features.tokens.shape[1], blocks.size
    queries = blocks.anchor.shape[1] * size
    device = features.tokens.device
    slot = torch.arange(-(-queries // TILE) * TILE, device=device).clamp(max=queries - 1).view(-1, TILE)
    block = slot // size  # [query tiles, TILE]
    start = (blocks.anchor - features.positions.gather(1, blocks.anchor))[:, block]  # start of the anchor's document
    anchor = blocks.anchor[:, block]  # [B, query tiles, TILE]
    if window:
        start = torch.maximum(start, anchor + slot % size + 1 - window)
    first = torch.arange(0, context + queries, TILE, device=device)  # start of each key tile
    end = first + TILE
    visible = (first < anchor.amax(2)[..., None]) & (end > start.amin(2)[..., None])
    whole = (first >= start.amax(2)[..., None]) & (end <= anchor.amin(2)[..., None])
    own = (first < context + (block.amax(1)[:, None] + 1) * size) & (end > context + block.amin(1)[:, None] * size)
    return BlockMask.from_kv_blocks(
        *_listed((visible | own) & ~whole),
        *_listed(whole),
        BLOCK_SIZE=TILE,
        mask_mod=block_mask_mod(features, blocks, window, causal),
        seq_lengths=(queries, context + queries),
    )


def _listed(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the number of key tiles of each query tile, and their indices, in BlockMask's form."""
    tiles = tiles[:, None]  # one mask for all heads
    order = tiles.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return tiles.sum(-1).to(torch.int32), order.to(torch.int32)
