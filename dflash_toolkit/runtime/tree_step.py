"""A step over draft trees: rows go to the nodes that are likeliest to be accepted, over all requests of the batch.

Of every request a tree is grown from what the drafter thinks of its block's slots, as large as may be. As many nodes of
all trees are verified as the step has rows for, the likeliest first, so a request whose drafts promise nothing takes
one row, its anchor's. The target reads an anchor and its nodes behind the request's context, each behind its own path;
the walk from the anchor follows its choices; keys and values of the rows on that path move to their positions.
How many rows a step has is chosen before its trees are grown, see `budget.py`; what they promised at other numbers of
rows, and which nodes were accepted, is told with the result.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ..calibration import Calibration
from ..draft_tree import offered_along
from ..generation import Offered
from ..kernels.tree import TreeRows, Trees
from .batch_state import BatchState
from .budget import Promise, row_buckets
from .capture import to_device
from .feedback import Judged, judged
from .proposer import Proposer
from .request import StepShape
from .sampler import Mode
from .verifier import Verifier


@dataclass(frozen=True, slots=True)
class Told:
    """What a step over trees says on the host."""

    answers: list[list[int]]  # of each request tokens committed, depth of its tree, whether something was not finite
    # there, and S tokens, -1 behind a state that is not
    judged: Judged
    promise: Promise
    nodes: np.ndarray  # int64 [S - 1], those that were verified, by their depth
    trees: "TreesTold"

    def offered(self) -> list[Offered]:
        """Of each request, what its tree had at the places of its committed tokens, see `Step`."""
        return [self.trees.offered(i, answer[0]) for i, answer in enumerate(self.answers)]


@dataclass(frozen=True, slots=True)
class TreesTold:
    """The trees of a step, on the host: of its B requests and M rows."""

    starts: np.ndarray  # [B + 1]
    tokens: np.ndarray  # [M]
    parents: np.ndarray  # [M], rows of the step
    log_probs: np.ndarray  # fp32 [M], of paths
    path: np.ndarray  # [B, S], rows of the step that were taken
    discounts: np.ndarray  # fp64 [B], that were added to those of the first slot

    def offered(self, request: int, count: int) -> Offered:
        """Along the first rows of its path."""
        start, end = self.starts[request : request + 2].tolist()
        paths = self.log_probs[start:end].astype(np.float64)
        paths[1:] -= self.discounts[request]
        own = self.path[request, :count] - start
        return offered_along(
            own.tolist(), self.tokens[start:end].tolist(), (self.parents[start:end] - start).tolist(), paths.tolist()
        )


class TreeSteps:
    """Decoding steps over trees, for the first requests of a batch.

    Args:
        nodes: of a request's tree at most.
        width: children of a node at most; 1 makes chains, each of its own length.
        blocks: S that may be drafted.
        chains: S of other steps, whose promises are told too.

    Attributes:
        promised: `blocks` and `chains` in order.
    """

    def __init__(
        self,
        proposer: Proposer,
        verifier: Verifier,
        state: BatchState,
        nodes: int,
        width: int,
        blocks: Sequence[int],
        chains: Sequence[int] = (),
    ) -> None:
        self._proposer, self._verifier, self._state = proposer, verifier, state
        self.nodes, self.width, self.blocks = nodes, width, tuple(sorted(blocks))
        self.promised = tuple(sorted((*blocks, *chains)))
        device = state.lengths.device
        self._calibration = torch.zeros(self.blocks[-1], dtype=torch.float64, device=device)
        self._discounts = torch.zeros(len(state.lengths), dtype=torch.float32, device=device)
        self._given = (0.0,) * len(state.lengths)
        self._cold = proposer.weights.config.calibration.of_slots(self.blocks[-1] - 1)
        self.forget()

    def forget(self) -> None:
        """Take the drafter's own calibration again."""
        self.calibrate(self._cold)

    def calibrate(self, calibration: Calibration) -> None:
        """Of the steps from now on, captured ones too."""
        self.calibration = calibration
        values = [calibration.slope, *calibration.bias]
        self._calibration.copy_(to_device(values, torch.float64, self._calibration.device))

    def discount(self, log_probs: Sequence[float]) -> None:
        """Take off so much of the first requests' paths, from the next step on; see `Trust`. -inf: draft nothing."""
        if (given := tuple(log_probs)) != self._given[: len(given)]:
            self._discounts[: len(given)].copy_(to_device(given, torch.float32, self._discounts.device))
            self._given = (*given, *self._given[len(given) :])

    def told(self, batch: int, block: int, rows: int) -> int:
        """Values that such a step returns."""
        drafted = sum(1 < each <= block for each in self.promised)
        return batch * (4 + 2 * block) + 1 + 4 * rows + drafted * (1 + len(row_buckets(batch)))

    def __call__(
        self, batch: int, block: int, rows: int, mode: Mode, tokens: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """One step of the first `batch` requests, of which none has a grammar.

        Args:
            block: tokens that each commits at most, S: as deep as the trees are, and the anchor.
            rows: M, for the anchors and nodes of all.
            mode: the largest of theirs.
            tokens: int64 [M or more], read instead of what is drafted.

        Returns:
            int64 [`told`], see `read`; and in the full mode log-probabilities of the tokens [batch, S] behind the rows
            that were taken, see `Sampler.choose`.
        """
        state, target, ops = self._state, self._verifier.weights, self._proposer.stack.ops
        at = state.rows(batch)
        last = state.last_token[:batch]
        room = state.sampler.ends_at[:batch] - at.lengths - 1  # the bonus token is always committed
        discounts = self._discounts[:batch]
        limits = torch.where(state.active[:batch] & discounts.isfinite(), room.clamp(0, block - 1), 0).int()
        values, ranks, candidates = self._proposer.children(last, at, block, self._calibration[:block], self.width)
        values[:, 0] += discounts[:, None, None]
        trees = ops.grow_trees(values, ranks, candidates, limits, self.nodes)
        tree = ops.cut_trees(trees, last, at.lengths, at.page_table, at.page_size, rows)
        drafted = [each for each in self.promised if 1 < each <= block]
        promise = ops.promise_trees(trees, values, ranks, limits, drafted, row_buckets(batch))
        if tokens is not None:
            tree = replace(tree, tokens=tokens[:rows])
        chains = self.width == 1
        hidden, features = self._verifier.read_trees(trees, tree, at, chains=chains)
        requests, logits = tree.requests.clamp(min=0).long(), None
        if mode == Mode.FULL:
            behind = tree.positions, *_drafted(trees, tree, requests)
            choice, logits = state.sampler.choose_edited(hidden, target.head, requests, *behind)
        elif mode == Mode.SAMPLED:
            choice = state.sampler.choose_each(hidden, target.head, requests, tree.positions)
        else:
            choice = state.sampler.greedy(hidden, target.head)
        verdict, path = self._verifier.commit_trees(tree, choice, state, at.lengths, block, chains=chains)
        if features is not None:
            self._proposer.write_context(features.index_select(0, path.flatten()), at, verdict.counts)
        logprobs = None
        if logits is not None:
            state.sampler.count(slice(0, batch), verdict.path, verdict.counts)
            taken = path.flatten()
            logprobs = state.sampler.logprobs(logits[taken], choice[taken], batch)
        return ops.tell_trees(tree, hidden, verdict.path, verdict.counts, path, promise), logprobs

    def read(
        self,
        told: Tensor,
        requests: int,
        batch: int,
        shape: StepShape,
        calibration: Calibration,
        discounts: Sequence[float],
    ) -> Told:
        """What a step told, on the host.

        Args:
            requests: of which the first rows of the batch are.
            calibration, discounts: that it ran under.
        """
        block, rows = shape
        sizes = [batch * (3 + block), batch * block, batch + 1, *[rows] * 4]
        answers, path, starts, tokens, parents, depths, bits, promise = told.split([*sizes, len(told) - sum(sizes)])
        answers, path = answers.view(batch, 3 + block), path.view(batch, block)
        log_probs, expected = (_floats(part) for part in (bits, promise))
        some = np.zeros(batch)
        some[: len(discounts)] = discounts
        found = judged(
            starts.numpy(), parents.numpy(), depths.numpy(), log_probs, path.numpy(),
            answers[:, 0].numpy(), calibration, some,
        )  # fmt: skip
        accepted = expected.reshape(-1, 1 + len(row_buckets(batch))).tolist()
        nodes = np.bincount(depths.numpy()[: int(starts[-1])], minlength=block)[1:]
        trees = TreesTold(starts.numpy(), tokens.numpy(), parents.numpy(), log_probs, path.numpy(), some)
        return Told(answers[:requests].tolist(), found, Promise(requests, batch, accepted), nodes, trees)


def _drafted(trees: Trees, tree: TreeRows, requests: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens int64 [M, K] on the way from the anchors of `requests` [M] to their rows, and how far it goes, bool."""
    first = tree.starts[requests].long()
    places = torch.arange(len(requests), device=first.device) - first
    paths = trees.paths[requests, places.clamp(max=trees.paths.shape[1] - 1)][:, 1:]
    inside = torch.arange(paths.shape[1], device=first.device) < tree.depths[:, None]
    return tree.tokens[torch.where(inside, first[:, None] + paths, 0)], inside


def _floats(bits: Tensor) -> np.ndarray:
    return bits.int().view(torch.float32).numpy()
