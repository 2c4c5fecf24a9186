"""The injection of DSpine: after every layer, each slot gets a message from the slot before it.

A slot's feature is a readout of its hidden state, in the space of the token codes: what the slot is about to predict.
The message is a gated function of the feature of the slot before, or of the anchor token's code at slot 1.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..dflash.config import DrafterConfig

EPSILON = 1e-12  # added to mean squares


@dataclass(frozen=True, kw_only=True, slots=True)
class DSpineConfig(DrafterConfig):
    """The configuration of a drafter with injections."""

    transfer_rank: int = 0  # R, size of codes and features
    message_size: int = 0  # M
    refine_top_k: int = 0  # C, scored best tokens per slot


@dataclass(frozen=True, slots=True)
class Predecessors:
    """The codes of tokens before slots."""

    anchors: Tensor  # [B, A, R]
    block_size: int
    true: Tensor | None  # [B, A, S, R] of all tokens, in training
    replaced: Tensor | None  # [B, A], see `Between.begin`


class Injection(nn.Module):
    """The weights of all layers. Parameter names are those of the checkpoint. R: rank; M: size of a message."""

    REPLACED_LAYERS = 3  # the first layers, which read the true tokens of replaced blocks

    def __init__(self, hidden_size: int, layers: int, rank: int, message_size: int) -> None:
        super().__init__()
        self.rank = rank
        self.readouts = nn.ModuleList(nn.Linear(hidden_size, rank, bias=False) for _ in range(layers))
        self.writes = nn.ModuleList(nn.Linear(message_size, hidden_size, bias=False) for _ in range(layers))
        self.message = nn.Linear(rank, message_size, bias=False)
        self.receiver_gate = nn.Linear(rank, message_size, bias=False)
        self.predecessor_gate = nn.Linear(rank, message_size, bias=False)
        self.bias = nn.Parameter(torch.empty(message_size))

    @torch.no_grad()
    def init_weights(self) -> None:
        """Initialises the messages to zero: the drafter then equals its causal backbone, bit for bit."""
        self.predecessor_gate.weight.zero_()
        for write in self.writes:
            write.weight.zero_()  # type: ignore[operator]

    def code(self, codes: Tensor, tokens: Tensor) -> Tensor:
        """Returns the codes of tokens, of the length of features."""
        return F.embedding(tokens, codes) * math.sqrt(self.rank)

    def feature(self, layer: int, x: Tensor) -> Tensor:
        """Returns what rows x [..., D] are about to predict: fp32 [..., R] of length sqrt(R)."""
        wide = self.readouts[layer](x).float()
        return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPSILON)

    def write(self, layer: int, x: Tensor, feature: Tensor, before: Tensor) -> Tensor:
        """Returns rows x [..., D] with the messages of their predecessors [..., R] added, given their own features."""
        feature, before = feature.to(x.dtype), before.to(x.dtype)
        gate = torch.sigmoid(self.receiver_gate(feature) + self.predecessor_gate(before) + self.bias)
        written = self.writes[layer](gate * self.message(before))
        length = torch.linalg.vector_norm(x.float(), dim=-1, keepdim=True) / math.sqrt(x.shape[-1])
        return x + (length * written.float()).to(x.dtype)

    def begin(
        self, fixed: Mapping[str, Tensor], tokens: Tensor, block_size: int, replaced: Tensor | None
    ) -> Predecessors:
        """Implements `Between.begin`."""
        blocks, codes = tokens.unflatten(1, (-1, block_size)), fixed["transfer_codes"]
        if replaced is None:
            return Predecessors(self.code(codes, blocks[:, :, 0]), block_size, None, None)
        true = self.code(codes, blocks)
        return Predecessors(true[:, :, 0], block_size, true, replaced)

    def forward(self, layer: int, x: Tensor, begun: Predecessors | Tensor) -> tuple[Tensor, Tensor | None]:
        """Implements `Between.__call__`. The loss is 1 - the cosine of a row's new feature and its token's code.

        Args:
            begun: or the predecessors of single rows [..., D] themselves, [..., R].
        """
        if isinstance(begun, Tensor):
            return self.write(layer, x, self.feature(layer, x), begun), None
        rows = x.unflatten(1, (-1, begun.block_size))  # [B, A, S, D]
        feature = self.feature(layer, rows)
        before = torch.cat([begun.anchors[:, :, None].to(feature.dtype), feature[:, :, 1:-1]], dim=2)
        if begun.true is not None and begun.replaced is not None and layer < self.REPLACED_LAYERS:
            before = torch.where(begun.replaced[:, :, None, None], begun.true[:, :, :-1].to(before.dtype), before)
        # a zero predecessor sends a zero message, so the anchor's slot stays as it is
        x = self.write(layer, rows, feature, F.pad(before, (0, 0, 1, 0))).flatten(1, 2)
        if begun.true is None:
            return x, None
        cosine = (self.feature(layer, x) * begun.true.flatten(1, 2)).mean(-1)
        return x, 1 - cosine
