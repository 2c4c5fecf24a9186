"""Runs the target over prompts, blocks and trees, and commits the drafted tokens that equal its own choices."""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.tree import TreeRows, Trees
from .batch_state import BatchState
from .proposer import Draft
from .stack import Rows, Slices, Stack, exhaust
from .weights import TargetWeights


@dataclass(frozen=True, slots=True)
class Verdict:
    """The tokens that a step commits."""

    path: Tensor  # int64 [B, S], the first `counts` tokens are committed: drafted ones, then one of the target
    counts: Tensor  # int32 [B], 0 where a row is inactive
    next: Tensor  # int64 [B], the token that the next block begins with


class Verifier:
    """Runs the target.

    Args:
        taps: layers with outputs that are the drafter's features; empty without a drafter.
        forced: int32 [steps, R], number of drafted tokens to accept at each step (synthetic acceptance), limited by
            the block.
    """

    def __init__(
        self, weights: TargetWeights, stack: Stack, taps: tuple[int, ...] = (), forced: Tensor | None = None
    ) -> None:
        self.weights, self.stack, self._taps, self.forced = weights, stack, taps, forced
        scale, rounds = weights.spec.embedding_scale, weights.spec.rounds_embedding_scale
        self._embedding_scale = float(torch.tensor(scale, dtype=self.dtype)) if rounds else scale
        self.steps = torch.zeros(
            1, dtype=torch.int64, device=weights.embedding.device
        )  # steps of `forced` that were used

    def forward(self, ids: Tensor, rows: Rows) -> tuple[Tensor, Tensor | None]:
        """Returns the normed hidden states [M, D] of ids [M], and the drafter's features [M, K * D]."""
        slices, features = self.slices(ids, rows)
        return exhaust(slices), features

    def slices(self, ids: Tensor, rows: Rows) -> tuple[Slices[Tensor], Tensor | None]:
        """Returns `forward` in slices, see `Stack.slices`; the features are complete after the last one."""
        features, taps = None, {}
        if self._taps:
            width = self.weights.spec.hidden_size
            features = torch.empty(len(ids), len(self._taps) * width, dtype=self.dtype, device=ids.device)
            taps = dict(zip(self._taps, features.split(width, dim=1), strict=True))
        embedded = F.embedding(ids, self.weights.embedding)
        if self._embedding_scale != 1.0:
            embedded *= self._embedding_scale
        inputs, spec = None, self.weights.spec
        if self.weights.inputs is not None:
            inputs = self.weights.inputs.inputs(ids, embedded, spec.rms_norm_eps, self.stack.ops)
        slices = self.stack.slices(embedded, rows, taps, inputs)
        return slices if features is None else self._scaled(slices, features), features

    def _scaled(self, slices: Slices[Tensor], features: Tensor) -> Slices[Tensor]:
        """Multiplies the features by the scale of taps after the last slice."""
        hidden = yield from slices
        if (scale := self.weights.spec.tap_scale) != 1.0:
            features *= scale
        return hidden

    @property
    def dtype(self) -> torch.dtype:
        return self.weights.embedding.dtype

    def read(self, draft: Draft, last: Tensor, rows: Rows) -> tuple[Tensor, Tensor | None]:
        """Runs the last committed tokens [B] and a draft; returns states [B, S, D] and features, see `forward`."""
        assert draft.parents is None, "chains only"
        ids = torch.cat([last[:, None], draft.tokens], dim=1)
        hidden, features = self.forward(ids.flatten(), rows)
        return hidden.unflatten(0, ids.shape), features

    def read_trees(
        self, trees: Trees, tree: TreeRows, rows: Rows, *, chains: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Runs rows of trees, each after its context in `rows`; returns states [M, D] and features, see `forward`.

        Args:
            chains: whether no node has a sibling.
        """
        states = rows.states
        if states is not None and chains:
            states = replace(states, counts=tree.starts.diff())
        elif states is not None:
            self.stack.fold(states)
        return self.forward(tree.tokens, replace(rows, tree=tree, paths=trees.paths, chains=chains, states=states))

    def commit(self, draft: Tensor, choice: Tensor, state: BatchState) -> Verdict:
        """Compares drafts [B, S - 1] with the choices [B, S] of the first rows, and advances the state of the batch."""
        batch, block = choice.shape
        last, forced = state.last_token[:batch], self._forced_now(batch, block)
        counts, path = self.stack.ops.accept(draft, choice, state.active[:batch], state.lengths[:batch], last, forced)
        state.stay(counts)
        return Verdict(path, counts, last)

    def commit_trees(
        self, tree: TreeRows, choice: Tensor, state: BatchState, rows: Rows, block: int, *, chains: bool = False
    ) -> tuple[Verdict, Tensor]:
        """Compares trees with the choices [M] of the first requests, and advances the state and pages of the batch.

        Args:
            rows: those that `read_trees` got; not changed.
            block: S, the most tokens that a request commits.
            chains: whether no node has a sibling; then all rows are already at their positions.

        Returns:
            The verdict, and the rows of the accepted path, int64 [B, S]; its last row is repeated.
        """
        batch, ops = len(rows.lengths), self.stack.ops
        last, forced = state.last_token[:batch], self._forced_now(batch, block)
        counts, tokens, path = ops.accept_trees(
            tree, choice, state.active[:batch], state.lengths[:batch], last, block, forced
        )
        state.stay(counts)
        if not chains:
            pages = state.page_table[:batch], state.page_size
            for cached in self.stack.cached:
                ops.move_rows_(cached, tree, path, counts, rows.lengths, *pages)
            if rows.states is not None:
                self.stack.keep_path(rows.states, path, counts)
        return Verdict(tokens, counts, last), path

    def _forced_now(self, batch: int, block: int) -> Tensor | None:
        if self.forced is None:
            return None
        now = self.forced.index_select(0, self.steps)[0, :batch].clamp(max=block - 1)
        self.steps.add_(1).remainder_(len(self.forced))
        return now
