"""A step over draft trees: rows go to the nodes that are likeliest to be accepted, over all requests of the batch.

Of every request a tree is grown from what the drafter thinks of its block's slots, as large as may be. As many nodes of
all trees are verified as the step has rows for, the likeliest first, so a request whose drafts promise nothing takes
one row, its anchor's. The target reads an anchor and its nodes behind the request's context, each behind its own path;
the walk from the anchor follows its choices; keys and values of the rows on that path move to their positions.
How many rows a step has is chosen before its trees are grown, see `budget.py`; what earlier trees promised at other
numbers of rows, and which nodes were accepted, is told with the result.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ..calibration import Calibration
from ..kernels.tree import TreeRows, Trees
from .batch_state import BatchState
from .proposer import Proposer
from .verifier import Verifier

ROWS = (16, 32, 48, 64, 96, 128, 160, 192, 256)  # of a step, all requests together


def row_buckets(batch: int, nodes: int) -> tuple[int, ...]:
    """Rows that trees of so many requests are verified in, anchors included; none for a batch without room for any."""
    useful = [rows for rows in ROWS if batch < rows < batch * (nodes + 1)]
    return (*useful, *[rows for rows in ROWS if rows >= batch * (nodes + 1)][:1])


@dataclass(frozen=True, slots=True)
class Judged:
    """What a step says of its drafter: n nodes whose parents were accepted, and what its trees promised."""

    calibration: Calibration  # that the probabilities were made with
    slots: np.ndarray  # int64 [n], 1..S-1
    log_probs: np.ndarray  # fp64 [n], calibrated, of a node whose parent is accepted
    accepted: np.ndarray  # bool [n]
    requests: int
    block: int  # S
    rows: int  # that the step had
    promised: dict[int, float]  # accepted nodes that were expected of the batch with so many rows


class TreeSteps:
    """Decoding steps over trees, for the first requests of a batch.

    Args:
        nodes: of a request's tree at most.
        width: children of a node at most; 1 makes chains, each of its own length.
        slots: S - 1 of the longest block.
    """

    def __init__(
        self, proposer: Proposer, verifier: Verifier, state: BatchState, nodes: int, width: int, slots: int
    ) -> None:
        self._proposer, self._verifier, self._state = proposer, verifier, state
        self.nodes, self.width = nodes, width
        self.calibration = Calibration.cold(slots)
        self._calibration = torch.zeros(1 + slots, dtype=torch.float64, device=state.lengths.device)
        self.calibrate(self.calibration)

    def calibrate(self, calibration: Calibration) -> None:
        """Of the steps from now on, captured ones too."""
        self.calibration = calibration
        self._calibration.copy_(torch.tensor([calibration.slope, *calibration.bias], dtype=torch.float64))

    def told(self, batch: int, block: int, rows: int) -> int:
        """Values that such a step returns."""
        return batch * (3 + block) + 2 * rows + len(row_buckets(batch, self.nodes))

    def __call__(self, batch: int, block: int, rows: int, *, sampled: bool, tokens: Tensor | None = None) -> Tensor:
        """One step of the first `batch` requests, of which none edits its logits or has a grammar.

        Args:
            block: tokens that each commits at most, S: as deep as the trees are, and the anchor.
            rows: M, for the anchors and nodes of all.
            sampled: whether any of them samples.
            tokens: int64 [M or more], read instead of what is drafted.

        Returns:
            int64 [`told`], see `read_told`.
        """
        state, target = self._state, self._verifier.weights
        at = state.rows(batch)
        last = state.last_token[:batch]
        room = state.sampler.ends_at[:batch] - at.lengths - 1  # the bonus token is always committed
        limits = torch.where(state.active[:batch], room.clamp(0, block - 1), 0).int()
        trees = self._proposer.grow(last, at, block, self._calibration[:block], limits, self.nodes, self.width)
        tree = self._proposer.stack.ops.cut_trees(trees, last, at.lengths, at.page_table, at.page_size, rows)
        if tokens is not None:
            tree = replace(tree, tokens=tokens[:rows])
        hidden, features = self._verifier.read_trees(trees, tree, at)
        if sampled:
            requests = tree.requests.clamp(min=0).long()
            choice = state.sampler.choose_each(hidden, target.head, requests, tree.positions)
        else:
            choice = state.sampler.greedy(hidden, target.head)
        verdict, path = self._verifier.commit_trees(tree, choice, state, at.lengths, block)
        if features is not None:
            self._proposer.write_context(features.index_select(0, path.flatten()), at, verdict.counts)
        answers = self._told(tree, hidden, verdict.path, verdict.counts, path)
        return torch.cat([answers.flatten(), *self._judged(trees, tree, verdict.counts, path)])

    def _told(self, tree: TreeRows, hidden: Tensor, tokens: Tensor, counts: Tensor, path: Tensor) -> Tensor:
        """int64 [batch, 3 + S]."""
        wide = torch.promote_types(hidden.dtype, torch.float32)
        broken = ~(torch.linalg.vector_norm(hidden, dim=-1, dtype=wide) < torch.inf)
        owner = tree.requests.clamp(min=0).long()
        none = torch.zeros(len(counts), dtype=torch.int64, device=counts.device)
        depths = none.scatter_reduce(0, owner, tree.depths.long(), "amax")
        spoils = none.scatter_reduce(0, owner, (broken & (tree.requests >= 0)).long(), "amax")
        tokens = torch.where(broken[path], -1, tokens)
        return torch.cat([torch.stack([counts.long(), depths, spoils], dim=1), tokens], dim=1)

    def _judged(self, trees: Trees, tree: TreeRows, counts: Tensor, path: Tensor) -> list[Tensor]:
        """int64 [M], [M] and [buckets]: slots of nodes that were judged, negative where they were rejected, the bits
        of their log-probabilities, and those of what the trees promise at every number of rows."""
        taken = torch.zeros(len(tree.depths), dtype=torch.bool, device=path.device)
        taken.index_fill_(0, path.flatten(), True)
        alive = counts[tree.requests.clamp(min=0).long()] > 0  # of padding nothing is judged, for it has no slot
        slots = torch.where(alive & taken[tree.parents.long()], tree.depths, 0)
        own = tree.log_probs - tree.log_probs[tree.parents.long()]
        sums = trees.log_probs.exp().flatten().sort(descending=True).values.cumsum(0)
        batch = len(counts)
        ends = [min(rows - batch, len(sums)) - 1 for rows in row_buckets(batch, self.nodes)]
        return [torch.where(taken, slots, -slots).long(), _bits(own), *[_bits(sums[end : end + 1]) for end in ends]]


def _bits(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.int32).long()


def read_told(
    told: Tensor, batch: int, block: int, rows: int, nodes: int, calibration: Calibration
) -> tuple[list[list[int]], Judged]:
    """What a step told on the host: of each request how many tokens were committed, how deep its tree was, whether
    something not finite was computed for it, and S tokens, -1 behind such a state."""
    width = 3 + block
    answers, found = told[: batch * width].view(batch, width), told[batch * width :].numpy()
    slots, own, promised = found[:rows], found[rows : 2 * rows], found[2 * rows :]
    judged = slots != 0
    shapes = row_buckets(batch, nodes)
    return answers.tolist(), Judged(
        calibration,
        np.abs(slots[judged]),
        _floats(own[judged]),
        slots[judged] > 0,
        batch,
        block,
        rows,
        dict(zip(shapes, _floats(promised).tolist(), strict=True)),
    )


def _floats(bits: np.ndarray) -> np.ndarray:
    return bits.astype(np.int32).view(np.float32).astype(np.float64)
