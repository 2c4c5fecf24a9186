"""The selector in the engine: its weights, and its drafts in a step's graph."""

from dataclasses import dataclass

from torch import Tensor

from ...kernels.formats import Weight
from ...kernels.loss_terms import LogitScale
from ...kernels.ops import Ops
from ..drafting import Draft, slots_of


@dataclass(slots=True)
class PairWeights:
    """The weights that score pairs of tokens."""

    projection: Tensor  # [r, D], of the final hidden states
    predecessors: Tensor  # [V, r]
    successors: Tensor  # [V, r]

    def parameter_views(self) -> dict[str, Tensor]:
        names = ("hidden_projection.weight", "predecessor_codebook", "successor_codebook")
        return dict(zip(names, (self.projection, self.predecessors, self.successors), strict=True))

    def head(self, weight: Weight, count: int, scale: LogitScale, ops: Ops) -> "PairHead":
        return PairHead(weight, self, count, scale, ops)


@dataclass(frozen=True, slots=True)
class PairHead:
    """Chooses among every slot's best tokens the one that scores best after the one chosen before it."""

    weight: Weight  # [V, D]
    pairs: PairWeights
    count: int  # C, scored tokens per slot
    scale: LogitScale
    ops: Ops

    def draft(self, hidden: Tensor, last: Tensor, block: int) -> Draft:
        state, unary, candidates = self._slots(hidden, block)
        return Draft(self.ops.walk(state, unary, candidates, self.pairs.predecessors, self.pairs.successors, last))

    def sample(self, hidden: Tensor, last: Tensor, temperature: Tensor, uniform: Tensor) -> Draft:
        state, unary, candidates = self._slots(hidden, uniform.shape[1] + 1)
        pairs = self.pairs.predecessors, self.pairs.successors
        tokens, q = self.ops.sampled_walk(state, unary, candidates, *pairs, last, temperature, uniform)
        return Draft(tokens, candidates=candidates, q=q)

    def children(
        self, hidden: Tensor, last: Tensor, block: int, calibration: Tensor, width: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        state, unary, candidates = self._slots(hidden, block)
        pairs = state, self.pairs.predecessors, self.pairs.successors, last
        return *self.ops.draft_children(unary, unary[..., 0], candidates, calibration, width, pairs), candidates

    def _slots(self, hidden: Tensor, block: int) -> tuple[Tensor, Tensor, Tensor]:
        """Returns states [B, block - 1, r], and logits and tokens [B, block - 1, C] of the best."""
        state = self.ops.linear(hidden, self.pairs.projection)
        unary, candidates = self.ops.linear_top(hidden, self.weight, self.count)
        self.scale.apply_(unary)  # keeps their order
        return slots_of(state, block), slots_of(unary, block), slots_of(candidates, block)
