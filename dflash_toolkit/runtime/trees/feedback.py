"""Refits the calibration of a drafter to the accepted and rejected nodes of verified trees.

The device returns calibrated probabilities of paths. The drafter's own probabilities are computed from them with the
calibration that the step used.
"""

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np

from ...calibration import EXTREME, Calibration

LEAST_SLOPE = 0.05  # with a smaller slope, the drafter's own odds cannot be recovered


@dataclass(frozen=True, slots=True)
class NodeOutcomes:
    """Outcomes of a step: of the n nodes with an accepted parent, and summed over all nodes of each of B requests."""

    slots: np.ndarray  # int64 [n], 1..K
    odds: np.ndarray  # fp64 [n], the drafter's log-odds of the node after its parent
    accepted: np.ndarray  # bool [n]
    promised: np.ndarray  # fp64 [B], sums of path probabilities of the verified nodes, without discounts
    accepted_nodes: np.ndarray  # int64 [B], nodes that were accepted


def node_outcomes(
    starts: np.ndarray,
    parents: np.ndarray,
    depths: np.ndarray,
    log_probs: np.ndarray,
    path: np.ndarray,
    counts: np.ndarray,
    calibration: Calibration,
    discounts: np.ndarray | None = None,
) -> NodeOutcomes:
    """Returns the outcomes of a step. Skips requests with NaN in their drafts.

    Args:
        starts, parents, depths, log_probs: fields of its `TreeRows`, [B + 1], [M], [M], [M].
        path, counts: results of `accept_trees`, [B, P] and [B].
        calibration: calibration of its trees.
        discounts: fp [B], added to the log-probabilities of the first slot.
    """
    batch, every = len(counts), int(starts[-1])  # the rest is padding
    parents, depths = parents[:every].astype(np.int64), depths[:every].astype(np.int64)
    paths = log_probs[:every].astype(np.float64)
    paths = np.where(np.isnan(paths), -np.inf, paths)
    of = np.repeat(np.arange(batch), np.diff(starts))
    if discounts is not None:
        paths = paths - np.where(depths > 0, discounts.astype(np.float64)[of], 0.0)
    accepted = np.zeros(every, dtype=bool)
    accepted[path[np.arange(path.shape[1]) < counts[:, None]]] = True  # anchors too
    found = (depths > 0) & accepted[parents] & np.isfinite(paths[parents])
    p = np.clip(np.exp(paths[found] - paths[parents][found]), EXTREME, 1 - EXTREME)
    slots = depths[found]
    odds = (np.log(p) - np.log1p(-p) - np.array(calibration.bias)[slots - 1]) / calibration.slope
    promised = np.bincount(of, np.where(depths > 0, np.exp(paths), 0.0), batch)
    return NodeOutcomes(slots, odds, accepted[found], promised, np.maximum(counts - 1, 0))


class CalibrationFeed:
    """Fits the calibration to recent outcomes.

    It refits a window of outcomes in its own thread, often at first and then more rarely. Decoding continues, and the
    result is used a fixed number of steps later, so that runs are reproducible. Every fit is regularised towards the
    previous one.

    Args:
        start: the drafter's own calibration, `DrafterConfig.calibration`.
        window: number of newest outcomes that are kept.

    Attributes:
        calibration: calibration for the next step; a new object after each fit.
    """

    FIRST, LAST = 64, 65536  # outcomes between two fits; doubles
    AFTER = 2  # steps that a fit may take

    def __init__(self, start: Calibration, window: int = 8192) -> None:
        self.calibration = start
        self._window, self._pairs, self._held = window, deque[NodeOutcomes](), 0
        self._new, self._wanted = 0, self.FIRST  # outcomes since the last fit began; number that starts the next one
        self._taken = 0  # steps since it began
        self._fit: Future[Calibration] | None = None
        self._thread = ThreadPoolExecutor(1, "calibration")

    def observe(self, step: NodeOutcomes) -> None:
        """Adds the outcomes of the next step, in order."""
        if len(step.slots):
            self._pairs.append(step)
            self._held += len(step.slots)
            self._new += len(step.slots)
        while len(self._pairs) > 1 and self._held - len(self._pairs[0].slots) >= self._window:
            self._held -= len(self._pairs.popleft().slots)
        self._taken += 1
        if self._fit is not None and self._taken >= self.AFTER:
            self.calibration, self._fit = self._fit.result(), None
        elif self._fit is None and self._new >= self._wanted:
            self._new, self._taken, self._wanted = 0, 0, min(2 * self._wanted, self.LAST)
            self._fit = self._thread.submit(_fitted, self.calibration, list(self._pairs))


def _fitted(before: Calibration, steps: list[NodeOutcomes]) -> Calibration:
    slots, odds, accepted = (
        np.concatenate([getattr(step, name) for step in steps]) for name in ("slots", "odds", "accepted")
    )
    found = before.refit_odds(odds, slots, accepted)
    return replace(found, slope=max(found.slope, LEAST_SLOPE))
