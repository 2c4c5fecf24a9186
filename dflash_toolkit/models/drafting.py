"""What a drafter's own way of choosing tokens is to the rest: in training and decoding, in the engine, and a draft."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ..kernels.formats import Weight
from ..kernels.loss_terms import LogitScale
from ..kernels.ops import Ops
from ..kernels.reference import draw

Pick = Callable[[int, Tensor], Tensor]  # the place of the token that slot k takes, of k and its scores [C]


class TokenSelector(Protocol):
    """The module that chooses among the best tokens of every slot.

    K slots of a block, C candidates of a slot. Logits of candidates are fp32, as they stand behind the head. Its
    weights whose rows are a token's own end in `_codebook`: AdamW steps them, not Muon.
    """

    def init_weights(self) -> None:
        """So that it chooses each slot's best; matrices were drawn at random before."""
        ...

    def __call__(self, hidden: Tensor, unary: Tensor, candidates: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        """What training asks, in one call: weights in shards are gathered for it.

        Args:
            hidden: [B, K, D], final and normed, of the K slots of B blocks.
            unary: logits of the candidates, [B, K, C].
            candidates: token ids [B, K, C].
            before: the true token before each slot, [B, K]; the first is the anchor.

        Returns:
            scores fp32 [B, K, C] of the candidates behind the tokens `before`, and the tokens [B, K] of the walk.
        """
        ...

    def losses(self, scores: Tensor, true: Tensor) -> Tensor:
        """The loss [R] of R slots of their scores [R, C]; `true` bool [R, C] says which candidate is the label, if any
        is."""
        ...

    def walk_blocks(self, hidden: Tensor, unary: Tensor, candidates: Tensor, anchors: Tensor) -> Tensor:
        """The tokens [B, K] of B blocks behind their anchors [B]; the rest as of a call."""
        ...

    def walk(self, hidden: Tensor, unary: Tensor, candidates: Tensor, anchor: int, pick: Pick = ...) -> Tensor:
        """The tokens [K] of one block, chosen one behind the other, each by its scores; this is what defines it.

        Args:
            hidden: [K, D].
            unary: [K, C].
            candidates: [K, C].
            anchor: the token before the first slot.
            pick: by default the best, of equal ones the first.
        """
        ...

    def lattice(self, hidden: Tensor, unary: Tensor, candidates: Tensor, anchor: int) -> Tensor:
        """The scores of every walk at once, fp32 [K, C, C]: [k, b, c] of candidate c of slot k behind candidate b of
        slot k - 1; all of the first slot's are those behind the anchor."""
        ...

    def signature(self, hidden: Tensor, signs: Callable[[int], Tensor]) -> dict[str, Tensor]:
        """What it computes of fixed `hidden` [T, D], by place, each [T, n]: an export's record keeps a summary.

        Args:
            signs: fixed +1 and -1 [T, rows] for a table of so many rows.
        """
        ...


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens for the target to verify behind the last committed one."""

    tokens: Tensor  # int64 [B, N]
    parents: Tensor | None = None  # int64 [B, N], of a tree; None: each token follows the one before it
    candidates: Tensor | None = None  # int64 [B, N, C], the tokens that q is of
    q: Tensor | None = None  # fp32 [B, N, C], what each was sampled from; None: they are the most probable ones


class Head(Protocol):
    """Which tokens the engine makes of a drafter's blocks; captured in a graph, so without a look at a value."""

    def draft(self, hidden: Tensor, last: Tensor, block: int) -> Draft:
        """`block` - 1 tokens behind `last` [B] of normed hidden states [B * block, D]; slot 0 predicts nothing."""
        ...

    def sample(self, hidden: Tensor, last: Tensor, temperature: Tensor, uniform: Tensor) -> Draft:
        """The same sampled at temperatures fp32 [B], of which 0 drafts the best, by numbers fp64 [B, block - 1]."""
        ...

    def children(
        self, hidden: Tensor, last: Tensor, block: int, calibration: Tensor, width: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What trees are grown of: values and ranks as of `Ops.draft_children`, and candidates [B, block - 1, C]."""
        ...


class SelectorWeights(Protocol):
    """A selector's weights in the engine."""

    def parameter_views(self) -> dict[str, Tensor]:
        """Name in the module -> the view that the tensor of a checkpoint is copied into."""
        ...

    def head(self, weight: Weight, count: int, scale: LogitScale, ops: Ops) -> Head:
        """What drafts with them: LM head [V, D], candidates of a slot, what stands behind the head, operations."""
        ...


Empty = Callable[..., Tensor]  # of sizes, an empty tensor on the engine's device, in its dtype


def slots_of(part: Tensor, block: int) -> Tensor:
    """Rows [B, block - 1, ...] of the slots that predict, of [B * block, ...]."""
    return part.unflatten(0, (-1, block))[:, 1:]


def sampled(scores: Tensor, candidates: Tensor, temperature: Tensor, uniform: Tensor) -> Draft:
    """A draft of slots that do not depend on each other.

    Args:
        scores: fp32 [B, N, C] of the candidates [B, N, C].
        temperature, uniform: see `Head.sample`.
    """
    each = temperature.repeat_interleave(uniform.shape[1], output_size=uniform.numel())
    places, q = draw(scores.flatten(0, 1), each, uniform.flatten())
    tokens = candidates.gather(2, places.view(*uniform.shape, 1))[..., 0]
    return Draft(tokens, candidates=candidates, q=q.view_as(candidates))
