"""Interfaces of a drafter's way to choose tokens: in training and decoding, in the engine, and the draft itself."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from ..kernels.formats import Weight
from ..kernels.loss_terms import LogitScale
from ..kernels.ops import Ops
from ..kernels.reference import draw

Pick = Callable[[int, Tensor], Tensor]  # maps slot k and its scores [C] to the place of the chosen token


class Between(Protocol):
    """A module that changes the rows of blocks after every layer of the drafter."""

    def init_weights(self) -> None:
        """Initialises without effect; matrices were initialised at random before."""
        ...

    def begin(self, fixed: Mapping[str, Tensor], tokens: Tensor, block_size: int, replaced: Tensor | None) -> Any:
        """Returns what the calls of one pass need.

        Args:
            fixed: the drafter's `fixed_tensors`.
            tokens: [B, Q] of every slot of blocks of `block_size`; only the anchors' are read, unless `replaced`.
            replaced: bool [B, Q / block_size] in training, where `tokens` are the true ones: blocks that read them in
                place of the slots' own predictions.
        """
        ...

    def __call__(self, layer: int, x: Tensor, begun: Any) -> tuple[Tensor, Tensor | None]:
        """Returns the rows [B, Q, D] for the next layer, and in training a loss of each row, fp32 [B, Q]."""
        ...


class TokenSelector(Protocol):
    """A module that chooses among the best tokens of every slot.

    K slots of a block, C candidates of a slot. Logits of candidates are fp32, as the head returns them. The names of
    weights with a row per token end in `_codebook`: AdamW optimises them, not Muon.
    """

    def init_weights(self) -> None:
        """Initialises so that it chooses each slot's best; matrices were initialised at random before."""
        ...

    def __call__(self, hidden: Tensor, unary: Tensor, candidates: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        """Everything that training needs, in one call: weights in shards are gathered for it.

        Args:
            hidden: [B, K, D], final and normed, of the K slots of B blocks; wider if it needs more, see
                `Drafter.forward`.
            unary: logits of the candidates, [B, K, C].
            candidates: token ids [B, K, C].
            before: the true token before each slot, [B, K]; the first is the anchor.

        Returns:
            scores fp32 [B, K, C] of the candidates after the tokens `before`, and the tokens [B, K] of the walk.
        """
        ...

    def losses(self, scores: Tensor, true: Tensor, teacher: Tensor | None) -> Tensor:
        """Returns the loss [R] of R slots.

        Args:
            scores: [R, C] of the candidates.
            true: bool [R, C], marks the candidate that is the label, if any is.
            teacher: fp32 [R, C], the target's log-probabilities of the candidates; None without a loss that needs its
                distribution.
        """
        ...

    def walk_blocks(self, hidden: Tensor, unary: Tensor, candidates: Tensor, anchors: Tensor) -> Tensor:
        """Returns the tokens [B, K] of B blocks after their anchors [B]; other arguments as in a call."""
        ...

    def walk(self, hidden: Tensor, unary: Tensor, candidates: Tensor, anchor: int, pick: Pick = ...) -> Tensor:
        """Returns the tokens [K] of one block, chosen one after the other by their scores; this defines the draft.

        Args:
            hidden: [K, D].
            unary: [K, C].
            candidates: [K, C].
            anchor: the token before the first slot.
            pick: by default the best; ties go to the first.
        """
        ...

    def lattice(self, hidden: Tensor, unary: Tensor, candidates: Tensor, anchor: int) -> Tensor:
        """Returns the scores of every walk at once, fp32 [K, C, C]: [k, b, c] is candidate c of slot k after
        candidate b of slot k - 1; in the first slot, all rows are the scores after the anchor."""
        ...

    def signature(self, hidden: Tensor, signs: Callable[[int], Tensor]) -> dict[str, Tensor]:
        """Returns the outputs for fixed `hidden` [T, D], by place, each [T, n]: an export's record keeps a summary.

        Args:
            signs: returns fixed +1 and -1 [T, rows] for a table of `rows` rows.
        """
        ...


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens for the target to verify after the last committed one."""

    tokens: Tensor  # int64 [B, N]
    parents: Tensor | None = None  # int64 [B, N], for a tree; None: each token follows the one before it
    candidates: Tensor | None = None  # int64 [B, N, C], the tokens of q
    q: Tensor | None = None  # fp32 [B, N, C], the sampled distributions; None: the most probable tokens were drafted


class Head(Protocol):
    """Turns a drafter's blocks into drafts in the engine; captured in a graph, so it must not read values."""

    def draft(self, hidden: Tensor, last: Tensor, block: int) -> Draft:
        """Returns `block` - 1 tokens after `last` [B] from the stack's hidden states [B * block, D]; ignores slot 0."""
        ...

    def sample(self, hidden: Tensor, last: Tensor, temperature: Tensor, uniform: Tensor) -> Draft:
        """Samples a draft at temperatures fp32 [B] (0 drafts the best) with random numbers fp64 [B, block - 1]."""
        ...

    def children(
        self, hidden: Tensor, last: Tensor, block: int, calibration: Tensor, width: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns candidates for trees: values and ranks as `Ops.draft_children`, and candidates [B, block - 1, C]."""
        ...


class BetweenWeights(Protocol):
    """The weights of a `Between` in the engine, which also choose the tokens."""

    def parameter_views(self) -> dict[str, Tensor]:
        """Returns name in the drafter -> the view that the tensor of a checkpoint is copied into."""
        ...

    def sent_by(self, tokens: Tensor, ops: Ops) -> Tensor:
        """Returns what all layers need of the anchor tokens [B], [B, n]."""
        ...

    def inject(
        self, layer: int, x: Tensor, anchors: Tensor, norm: Tensor, eps: float, ops: Ops
    ) -> tuple[Tensor, Tensor]:
        """Returns the rows [B * block, D] for the next layer from a layer's output x, and their norm.

        Args:
            anchors: the result of `sent_by`.
            norm, eps: of the next layer.
        """
        ...

    def head(
        self, weight: Weight, rows: Tensor, norm: Tensor, eps: float, count: int, scale: LogitScale, ops: Ops
    ) -> "Head":
        """Returns the head, which gets the output of the last layer: neither changed by `inject` nor normed.

        Args:
            weight: [V, D], the LM head.
            rows: the same in 16 bits.
            norm, eps: of the final norm.
            count: candidates of a slot.
        """
        ...


class SelectorWeights(Protocol):
    """A selector's weights in the engine."""

    def parameter_views(self) -> dict[str, Tensor]:
        """Returns name in the module -> the view that the tensor of a checkpoint is copied into."""
        ...

    def head(self, weight: Weight, count: int, scale: LogitScale, ops: Ops) -> Head:
        """Returns the head for LM head [V, D], candidates per slot, scale after the head, and operations."""
        ...


Empty = Callable[..., Tensor]  # maps sizes to an empty tensor on the engine's device, in its dtype


def slots_of(part: Tensor, block: int) -> Tensor:
    """Returns the rows [B, block - 1, ...] of the slots that predict, from [B * block, ...]."""
    return part.unflatten(0, (-1, block))[:, 1:]


def sampled(scores: Tensor, candidates: Tensor, temperature: Tensor, uniform: Tensor) -> Draft:
    """Returns a draft for slots that do not depend on each other.

    Args:
        scores: fp32 [B, N, C] of the candidates [B, N, C].
        temperature, uniform: see `Head.sample`.
    """
    each = temperature.repeat_interleave(uniform.shape[1], output_size=uniform.numel())
    places, q = draw(scores.flatten(0, 1), each, uniform.flatten())
    tokens = candidates.gather(2, places.view(*uniform.shape, 1))[..., 0]
    return Draft(tokens, candidates=candidates, q=q.view_as(candidates))
