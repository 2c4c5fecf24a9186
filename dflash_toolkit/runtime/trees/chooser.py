"""Picks the steps of an engine that verifies draft trees, and keeps the drafter's calibration fitted."""

from collections.abc import Callable, Sequence

from ..programs.tree import TreeProgram
from ..request import Request, StepShape
from ..step_costs import StepCosts
from .budget import BudgetChooser, row_buckets, rows_of_trees
from .feedback import CalibrationFeed
from .result import TreeStepResult


class TreeChooser:
    """Picks the shape of the next step: plain decoding, chains, or trees.

    Args:
        sizes: block lengths that may be drafted. With a single one, every step verifies all nodes.
        costs: of steps, those over trees included.
        bucket: returns the number of rows that are computed for a batch.
        on_gpu: steps have one of the captured numbers of rows.
        report: called with the result of every step over trees.
    """

    def __init__(
        self,
        program: TreeProgram,
        sizes: Sequence[int],
        costs: StepCosts,
        bucket: Callable[[int], int],
        on_gpu: bool,
        report: Callable[[TreeStepResult], object],
    ) -> None:
        self._program, self._longest, self._bucket, self._on_gpu = program, sizes[-1], bucket, on_gpu
        self._report, self._feed = report, CalibrationFeed(program.calibration)
        self._budget = BudgetChooser((1, *program.promised), costs, bucket) if len(sizes) > 1 else None

    def observe(self, requests: Sequence[Request], result: TreeStepResult) -> None:
        """Updates promises, calibration and trust with the result of a step over trees."""
        outcomes = result.outcomes
        for request, promised, accepted in zip(requests, outcomes.promised, outcomes.accepted_nodes, strict=False):
            request.trust.observe(float(promised), int(accepted))
        self._report(result)
        self._feed.observe(outcomes)
        if self._feed.calibration is not self._program.calibration:
            self._program.calibrate(self._feed.calibration)
        if self._budget is not None:
            self._budget.observe(result.promise)

    def available(self, requests: Sequence[Request]) -> bool:
        """Returns whether the next step may be over trees. Grammars would need a mask from the host for every node."""
        return not any(r.matcher for r in requests) and bool(row_buckets(self._bucket(len(requests))))

    def __call__(self, requests: Sequence[Request]) -> StepShape:
        if self._budget is None:
            return self._whole(len(requests))
        untried = sum(request.drafts and not request.acceptance.tried for request in requests)
        awaited = any(size > 1 for request in requests for size in request.blocks_in_flight)
        chains, tokens = all(request.drafts for request in requests), sum(request.length for request in requests)
        return self._budget(len(requests), untried, awaited, chains, tokens)

    def _whole(self, requests: int) -> StepShape:
        """Returns a step over all nodes of all trees, or over as many as fit."""
        needed = requests * (self._program.nodes + 1)
        if not self._on_gpu:
            return StepShape(self._longest, needed)
        rows = row_buckets(self._bucket(requests))
        return StepShape(self._longest, next((each for each in rows if each >= needed), rows[-1]))

    def shapes(self, batch: int) -> list[StepShape]:
        """Returns the shapes of steps over trees that a batch of `batch` computed rows may run."""
        blocks = self._program.blocks if self._budget is not None else (self._longest,)
        nodes = self._program.nodes
        return [StepShape(block, rows) for block in blocks for rows in rows_of_trees(batch, nodes)]
