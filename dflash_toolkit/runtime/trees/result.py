"""The result of a step over draft trees, on the host."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...calibration import Calibration
from ...draft_tree import offered_along
from ...generation import Offered
from ..request import StepShape
from .budget import Promise, row_buckets
from .feedback import NodeOutcomes, node_outcomes


@dataclass(frozen=True, slots=True)
class StepTrees:
    """The trees of a step of B requests and M rows."""

    starts: np.ndarray  # [B + 1]
    tokens: np.ndarray  # [M]
    parents: np.ndarray  # [M], rows of the step
    log_probs: np.ndarray  # fp32 [M], log-probabilities of paths
    path: np.ndarray  # [B, S], rows of the step that were accepted
    discounts: np.ndarray  # fp64 [B], added to the log-probabilities of the first slot

    def offered(self, request: int, count: int) -> Offered:
        """Returns the candidates of a request's tree along the first `count` rows of its path."""
        start, end = self.starts[request : request + 2].tolist()
        paths = self.log_probs[start:end].astype(np.float64)
        paths[1:] -= self.discounts[request]
        own = self.path[request, :count] - start
        return offered_along(
            own.tolist(), self.tokens[start:end].tolist(), (self.parents[start:end] - start).tolist(), paths.tolist()
        )


@dataclass(frozen=True, slots=True)
class TreeStepResult:
    """The result of a step over trees."""

    answers: list[list[int]]  # per request: tokens committed, depth of its tree, whether one of its states was not
    # finite, and S tokens with -1 after each state that was not finite
    outcomes: NodeOutcomes
    promise: Promise
    nodes: np.ndarray  # int64 [S - 1], verified nodes by depth
    trees: StepTrees

    @staticmethod
    def size(batch: int, shape: StepShape, promised: int) -> int:
        """Returns the number of values that `parse` reads; `promised`: number of block lengths with a promise."""
        return batch * (4 + 2 * shape.block) + 1 + 4 * shape.rows + promised * (1 + len(row_buckets(batch)))

    @classmethod
    def parse(
        cls,
        values: Tensor,
        requests: int,
        batch: int,
        shape: StepShape,
        calibration: Calibration,
        discounts: Sequence[float],
    ) -> "TreeStepResult":
        """Reads the values of a step.

        Args:
            values: int64, see `Ops.pack_tree_results`.
            requests: requests of the first rows of the batch.
            calibration, discounts: the values that the step used.
        """
        block, rows = shape
        sizes = [batch * (3 + block), batch * block, batch + 1, *[rows] * 4]
        answers, path, starts, tokens, parents, depths, bits, promise = values.split([*sizes, len(values) - sum(sizes)])
        answers, path = answers.view(batch, 3 + block), path.view(batch, block)
        log_probs, expected = (part.int().view(torch.float32).numpy() for part in (bits, promise))
        padded = np.zeros(batch)
        padded[: len(discounts)] = discounts
        outcomes = node_outcomes(
            starts.numpy(), parents.numpy(), depths.numpy(), log_probs, path.numpy(),
            answers[:, 0].numpy(), calibration, padded,
        )  # fmt: skip
        accepted = expected.reshape(-1, 1 + len(row_buckets(batch))).tolist()
        nodes = np.bincount(depths.numpy()[: int(starts[-1])], minlength=block)[1:]
        trees = StepTrees(starts.numpy(), tokens.numpy(), parents.numpy(), log_probs, path.numpy(), padded)
        return cls(answers[:requests].tolist(), outcomes, Promise(requests, batch, accepted), nodes, trees)

    def offered(self) -> list[Offered]:
        """Returns the candidates of each request's tree at the positions of its committed tokens, see `Step`."""
        return [self.trees.offered(i, answer[0]) for i, answer in enumerate(self.answers)]
