"""The injection in the engine: its weights, its part of a step between the layers, and the choice by pairs."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ...kernels.formats import Weight
from ...kernels.loss_terms import LogitScale
from ...kernels.ops import Ops
from ..drafting import Draft, slots_of
from .architecture import PAIR_ROWS
from .injection import EPSILON


@dataclass(slots=True)
class InjectionWeights:
    """The weights of all layers. R: rank; m: size of a message."""

    readouts: Tensor  # [L, R, D]
    writes: Tensor  # [L, D, m]
    projection: Tensor  # [3 m, R], of features: to receivers, gates and messages
    bias: Tensor  # [m]
    codes: Tensor  # [V, R]
    ready: Tensor  # bool
    ones: Tensor  # [R]

    def parameter_views(self) -> dict[str, Tensor]:
        receivers, gates, messages = self.projection.chunk(3)
        found = {
            "transfer_codes": self.codes, "transfer_ready": self.ready, "injection.bias": self.bias,
            "injection.receiver_gate.weight": receivers, "injection.predecessor_gate.weight": gates,
            "injection.message.weight": messages,
        }  # fmt: skip
        for i, (readout, write) in enumerate(zip(self.readouts, self.writes, strict=True)):
            found |= {f"injection.readouts.{i}.weight": readout, f"injection.writes.{i}.weight": write}
        return found

    def sent_by(self, tokens: Tensor, ops: Ops) -> Tensor:
        """Returns gates and messages [N, 2 m] of tokens [N]."""
        features = F.embedding(tokens, self.codes) * math.sqrt(self.codes.shape[1])
        return ops.linear_many_rows(features, self.projection[len(self.bias) :])

    def project(self, layer: int, x: Tensor, ops: Ops) -> Tensor:
        """Returns the parts of rows [M, D] as receivers, gates and messages, [M, 3 m]."""
        _, features = ops.add_rms_norm(ops.linear(x, self.readouts[layer]), None, self.ones, EPSILON)
        return ops.linear(features, self.projection)

    def inject(
        self, layer: int, x: Tensor, anchors: Tensor, norm: Tensor, eps: float, ops: Ops
    ) -> tuple[Tensor, Tensor]:
        """See `BetweenWeights.inject`; `anchors` is what `sent_by` returns for the anchors' tokens."""
        return self._write(layer, x, self.project(layer, x, ops), anchors, norm, eps, ops)

    def _write(
        self, layer: int, x: Tensor, projected: Tensor, anchors: Tensor, norm: Tensor, eps: float, ops: Ops
    ) -> tuple[Tensor, Tensor]:
        messages = ops.slot_messages(projected, anchors, self.bias, len(x) // len(anchors))
        return ops.inject_rms_norm(x, ops.linear_split_k(messages, self.writes[layer]), norm, eps)

    def head(
        self, weight: Weight, rows: Tensor, norm: Tensor, eps: float, count: int, scale: LogitScale, ops: Ops
    ) -> "InjectionHead":
        """See `BetweenWeights.head`."""
        return InjectionHead(self, weight, rows, norm, eps, count, scale, ops)


@dataclass(frozen=True, slots=True)
class InjectionHead:
    """Chooses among every slot's best tokens the one that scores best after the token chosen before it."""

    injection: InjectionWeights
    weight: Weight  # [V, D]
    rows: Tensor  # [V, D] in 16 bits
    norm: Tensor  # [D]
    eps: float
    count: int  # C
    scale: LogitScale
    ops: Ops

    def draft(self, hidden: Tensor, last: Tensor, block: int) -> Draft:
        candidates, scores = self._pairs(hidden, last, block)
        return Draft(self.ops.walk_pairs(scores, candidates))

    def sample(self, hidden: Tensor, last: Tensor, temperature: Tensor, uniform: Tensor) -> Draft:
        candidates, scores = self._pairs(hidden, last, uniform.shape[1] + 1)
        tokens, q = self.ops.sampled_walk_pairs(scores, candidates, temperature, uniform)
        return Draft(tokens, candidates=candidates, q=q)

    def children(
        self, hidden: Tensor, last: Tensor, block: int, calibration: Tensor, width: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        candidates, scores = self._pairs(hidden, last, block)
        batch, slots, count = candidates.shape
        # the families of a slot are those of independent requests, whose softmax is over the candidates
        own = scores.permute(0, 3, 1, 2).reshape(batch * count, slots, count)
        tokens = candidates[:, None].expand(-1, count, -1, -1).reshape(own.shape)
        values, ranks = self.ops.draft_children(own, own.logsumexp(-1), tokens, calibration, width)
        values, ranks = (part.view(batch, count, slots, width).transpose(1, 2).contiguous() for part in (values, ranks))
        return values, ranks, candidates

    def _pairs(self, x: Tensor, last: Tensor, block: int) -> tuple[Tensor, Tensor]:
        """Returns the candidates [B, K, C], and their scores after each candidate before, fp32 [B, K, C, C'].

        Args:
            x: [B * block, D], the output of the last layer.
        """
        injection, ops, layer = self.injection, self.ops, len(self.injection.readouts) - 1
        projected, anchors = injection.project(layer, x, ops), injection.sent_by(last, ops)
        _, normed = injection._write(layer, x, projected, anchors, self.norm, self.eps, ops)
        candidates = slots_of(ops.linear_top(normed, self.weight, self.count)[1], block).contiguous()
        before = torch.cat([last[:, None, None].expand_as(candidates[:, :1]), candidates[:, :-1]], dim=1)
        together = max(1, PAIR_ROWS // before[0].numel())
        parts = (rows.split(together * size) for rows, size in ((x, block), (projected, block), (before, 1)))
        scores = []
        for own, sent, tokens, chosen in zip(*parts, candidates.split(together), strict=True):
            messages = ops.pair_messages(sent, injection.sent_by(tokens.flatten(), ops), injection.bias, block)
            written = ops.linear_many_rows(messages, injection.writes[layer])
            scores.append(ops.pair_scores(own, written, self.norm, self.eps, self.rows, chosen, block))
        found = torch.cat(scores) if len(scores) > 1 else scores[0]
        self.scale.apply_(found.view(-1, self.count))
        return candidates, found
