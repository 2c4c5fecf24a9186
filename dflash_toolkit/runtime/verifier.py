"""The target at work: it runs over prompts and blocks, and commits what a draft has of its own choices."""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.tree import TreeRows, Trees
from .batch_state import BatchState
from .proposer import Draft
from .stack import Rows, Stack
from .weights import TargetWeights


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a step commits."""

    path: Tensor  # int64 [B, S], the first `counts` are committed: drafted tokens, then one of the target's own
    counts: Tensor  # int32 [B], 0 where a row is inactive
    next: Tensor  # int64 [B], the token that the next block begins with


class Verifier:
    """Runs the target.

    Args:
        taps: layers whose outputs are a drafter's features; none without one.
        forced: int32 [steps, R], drafted tokens to accept at each step whatever they are (synthetic acceptance); they
            are cut to the block.
    """

    def __init__(
        self, weights: TargetWeights, stack: Stack, taps: tuple[int, ...] = (), forced: Tensor | None = None
    ) -> None:
        self.weights, self.stack, self._taps, self.forced = weights, stack, taps, forced
        self.steps = torch.zeros(1, dtype=torch.int64, device=weights.embedding.device)  # of `forced`, done

    def forward(self, ids: Tensor, rows: Rows) -> tuple[Tensor, Tensor | None]:
        """Normed hidden states [M, D] of ids [M], and the features [M, K * D] of a drafter."""
        features, taps = None, {}
        if self._taps:
            width = self.weights.spec.hidden_size
            features = torch.empty(len(ids), len(self._taps) * width, dtype=self.dtype, device=ids.device)
            taps = dict(zip(self._taps, features.split(width, dim=1), strict=True))
        return self.stack.forward(F.embedding(ids, self.weights.embedding), rows, taps), features

    @property
    def dtype(self) -> torch.dtype:
        return self.weights.embedding.dtype

    def read(self, draft: Draft, last: Tensor, rows: Rows) -> tuple[Tensor, Tensor | None]:
        """Run over a draft behind the last committed tokens [B]: states [B, S, D] and features, see `forward`."""
        assert draft.parents is None, "chains only"
        ids = torch.cat([last[:, None], draft.tokens], dim=1)
        hidden, features = self.forward(ids.flatten(), rows)
        return hidden.unflatten(0, ids.shape), features

    def read_trees(
        self, trees: Trees, tree: TreeRows, rows: Rows, *, chains: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Run over rows of trees behind the contexts of `rows`: states [M, D] and features, see `forward`.

        Args:
            chains: whether no node has a sibling.
        """
        states = None if rows.states is None else replace(rows.states, counts=tree.starts.diff())
        return self.forward(tree.tokens, replace(rows, tree=tree, paths=trees.paths, chains=chains, states=states))

    def commit(self, draft: Tensor, choice: Tensor, state: BatchState) -> Verdict:
        """Judge drafts [B, S - 1] by the choices [B, S], for the first rows of the batch, whose state it advances."""
        batch, block = choice.shape
        last, forced = state.last_token[:batch], self._forced_now(batch, block)
        counts, path = self.stack.ops.accept(draft, choice, state.active[:batch], state.lengths[:batch], last, forced)
        state.stay(counts)
        return Verdict(path, counts, last)

    def commit_trees(
        self, tree: TreeRows, choice: Tensor, state: BatchState, lengths: Tensor, block: int, *, chains: bool = False
    ) -> tuple[Verdict, Tensor]:
        """Judge trees by the choices [M], for the first requests of the batch, whose state and pages it advances.

        Args:
            lengths: int32 [B], those before the anchors, which do not change.
            block: tokens that a request commits at most, S.
            chains: whether no node has a sibling; then all rows stand at their positions already.

        Returns:
            The verdict, and the rows of the path that was taken, int64 [B, S]; behind its last that again.
        """
        batch, ops = len(lengths), self.stack.ops
        last, forced = state.last_token[:batch], self._forced_now(batch, block)
        counts, tokens, path = ops.accept_trees(
            tree, choice, state.active[:batch], state.lengths[:batch], last, block, forced
        )
        state.stay(counts)
        if not chains:
            pages = state.page_table[:batch], state.page_size
            ops.move_rows_(self.stack.cache, tree, path, counts, lengths, *pages)
        return Verdict(tokens, counts, last), path

    def _forced_now(self, batch: int, block: int) -> Tensor | None:
        if self.forced is None:
            return None
        now = self.forced.index_select(0, self.steps)[0, :batch].clamp(max=block - 1)
        self.steps.add_(1).remainder_(len(self.forced))
        return now
