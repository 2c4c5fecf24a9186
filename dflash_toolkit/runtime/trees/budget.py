"""Chooses the rows of a step and the length of its block from promised tokens and measured times.

A row is the anchor of a request or a node of a draft tree. A step of M rows verifies the M - B most likely nodes of its
B requests. Engines that verify trees use this module first, then `BlockChooser`. A promise is the number of drafted
tokens that the drafter's calibrated probabilities expect to be accepted.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ...kernels.tree import MOST_NODES
from ..draft_length import BlockChooser
from ..exact import EXACT_BATCH, EXACT_ROWS
from ..request import StepShape
from ..step_costs import Explorer, StepCosts, patience
from ..timing import Shape, Times

ROWS = (16, 32, 48, 64, 96, 128, 160, 192, 256)
NODES = np.array([0.0, *np.geomspace(1 / 16, MOST_NODES, 64)])  # nodes of a request for which promises are stored


def row_buckets(batch: int) -> tuple[int, ...]:
    """Returns the numbers of rows to choose from for a batch: more than one per request, at most those of the largest
    trees.

    For up to EXACT_BATCH requests, the bits of a row do not depend on the number of rows.
    """
    most = EXACT_ROWS if batch <= EXACT_BATCH else ROWS[-1]
    return tuple(rows for rows in ROWS if batch < rows <= min(most, MOST_NODES * batch))


def rows_of_trees(batch: int, nodes: int) -> tuple[int, ...]:
    """Returns the row buckets for trees of `nodes` nodes: up to the first one that has room for all of them."""
    buckets, all_of_them = row_buckets(batch), batch * (nodes + 1)
    return tuple(rows for rows, fewer in zip(buckets, (0, *buckets), strict=False) if fewer < all_of_them)


def key_of(shape: StepShape, batch: int) -> Shape:
    """Returns the key of a step in `Times`."""
    return (batch, shape.rows, shape.block) if shape.rows else (batch, shape.block)


# ---- times -----------------------------------------------------------------------------------------------------------


def tree_shapes(batches: Iterable[int], blocks: Sequence[int], nodes: int = MOST_NODES - 1) -> list[Shape]:
    """Returns the steps over trees to measure: all numbers of rows with the longest block, and the smallest with every
    other block. `completed` derives the rest."""
    drafted, found = [block for block in blocks if block > 1], list[Shape]()
    for batch in batches:
        if drafted and (rows := rows_of_trees(batch, nodes)):
            found += [(batch, each, max(drafted)) for each in rows]
            found += [(batch, rows[0], block) for block in drafted if block != max(drafted)]
    return found


def completed(times: Times, batches: Iterable[int], blocks: Sequence[int]) -> Times:
    """Returns the measured times and the times of all other steps over trees.

    Drafting and verifying run one after the other, so the cost of more rows and the savings of a shorter block add up.
    """
    found, longest = dict(times), max(blocks)
    for batch in batches:
        for rows, block in itertools.product(row_buckets(batch), blocks):
            if block > 1 and (batch, rows, longest) in times:
                least = row_buckets(batch)[0]
                saved = times[batch, least, longest] - times[batch, least, block]
                found.setdefault((batch, rows, block), times[batch, rows, longest] - saved)
    return found


# ---- promises --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Promise:
    """The expected accepted tokens of a step, for every number of rows that it could verify."""

    requests: int  # requests in the step
    batch: int  # computed rows of the batch
    accepted: Sequence[Sequence[float]]  # `expected_accepted` of every block up to the drafted one


# ---- the choice ------------------------------------------------------------------------------------------------------


class _Expected:
    """Expected accepted tokens per request, averaged over steps: for every block, of a chain and of trees of NODES.

    A step reports blocks up to its own length. A longer block keeps its last known ratio to the next shorter one;
    without one it promises no more than the shorter block.
    """

    KEEP, PAUSED = 0.7, 0.5  # weight of earlier steps; the same after steps that drafted nothing

    def __init__(self, blocks: Sequence[int]) -> None:
        shape = len(blocks), 1 + len(NODES)
        self._seen = 0
        self._own, self._before = np.zeros(shape), np.zeros(shape)  # sums of every block, and of the next shorter one

    def observe(self, promise: Promise, paused: bool) -> None:
        accepted, count = np.array(promise.accepted) / promise.requests, len(promise.accepted)
        now = np.concatenate([accepted[:, :1], accepted[:, 1:] @ _spread(promise.batch, promise.requests)], axis=1)
        keep = np.where(np.arange(count) < self._seen, self.PAUSED if paused else self.KEEP, 0.0)[:, None]
        before = np.concatenate([np.ones((1, now.shape[1])), now[:-1]])
        self._own[:count] = keep * self._own[:count] + (1 - keep) * now
        self._before[:count] = keep * self._before[:count] + (1 - keep) * before
        self._seen = max(self._seen, count)

    def __bool__(self) -> bool:
        return self._seen > 0

    def __call__(self, batch: int, requests: int) -> np.ndarray:
        """Returns expected tokens [blocks, 1 + row buckets] per request of a batch."""
        more = np.divide(self._own, self._before, out=np.ones_like(self._own), where=self._before > 0)
        now = more.cumprod(axis=0)
        return np.concatenate([now[:, :1], now[:, 1:] @ _gathered(batch, requests)], axis=1)


@lru_cache(256)
def _spread(batch: int, requests: int) -> np.ndarray:
    """Returns [row buckets, NODES], which interpolates values per number of rows to values per NODES of a request."""
    x = np.maximum(np.array([0, *row_buckets(batch)]) - batch, 0) / requests
    return np.array([np.interp(NODES, x, one) for one in np.eye(len(x))[1:]]).reshape(-1, len(NODES))


@lru_cache(256)
def _gathered(batch: int, requests: int) -> np.ndarray:
    """Returns [NODES, row buckets], the inverse interpolation."""
    x = (np.array(row_buckets(batch)) - batch) / requests
    return np.array([np.interp(x, NODES, one) for one in np.eye(len(NODES))])


class BudgetChooser:
    """Picks the step that promises the most tokens per second: plain decoding, chains of one length, or trees.

    Chains and trees are compared with the same calibrated probabilities. Without trees, `BlockChooser` chooses the
    length of blocks, as past acceptance predicts it better. The choice changes only for a clear gain, except to plain
    decoding, which is tried from time to time while steps are observed and its time is not known. Unknown choices
    are tried from time to time: short drafts during plain decoding, and the next longer block if trees can be deeper.
    Steps over chains do not report what drafts promise. So a step over trees, with the longest block and the most
    promising number of rows, runs between them: soon at first, then more rarely. The first drafts are as long as
    possible, and the next step waits for their result. Where no choice would pay even if all drafts were accepted, none
    is tried.

    Args:
        blocks: lengths to choose from; 1 is plain decoding.
        costs: from the times of every batch and block, and of steps over trees, see `completed`.
        bucket: returns the number of rows that are computed for a batch.
    """

    GAIN, PROBE = BlockChooser.GAIN, BlockChooser.PROBE
    FIRST_PROBE, LAST_PROBE = BlockChooser.FIRST_PROBE, BlockChooser.LAST_PROBE
    FIRST_LOOK, LAST_LOOK = 2, 16  # steps over chains before one over trees; doubles up to LAST_LOOK per request

    def __init__(self, blocks: Sequence[int], costs: StepCosts, bucket: Callable[[int], int]) -> None:
        self._drafted = sorted(block for block in blocks if block > 1)
        self._costs, self._bucket, self._explore = costs, bucket, Explorer(costs)
        self._expected = _Expected(self._drafted)
        self._priced: dict[int, tuple[list[StepShape], np.ndarray, list[Shape]]] = {}  # by batch
        self._current = StepShape(1)
        self._steps, self._next_probe = 0, self.FIRST_PROBE
        self._chains, self._next_look = 0, self.FIRST_LOOK  # steps over chains in a row, and the limit

    def observe(self, promise: Promise) -> None:
        """Adds the promise of a drafted step, when it is read. Ignores a step with NaN in its drafts."""
        if np.isfinite(promise.accepted).all():
            self._expected.observe(promise, paused=self._current.block == 1)

    def promises(self, requests: int, tokens: int = 0) -> dict[StepShape, float]:
        """Returns the promised tokens per second of all choices, with so many tokens in the cache of the batch."""
        batch = self._bucket(requests)
        shapes, at, keys = self._choices(batch)
        plain, *seconds = self._costs.seconds([(batch, 1), *keys], tokens)
        rates = requests * (1 + self._expected(batch, requests).ravel()[at]) / seconds
        return {StepShape(1): requests / plain, **dict(zip(shapes, rates.tolist(), strict=True))}

    def _choices(self, batch: int) -> tuple[list[StepShape], np.ndarray, list[Shape]]:
        """Returns the steps with drafts that have a time, their indices in `_Expected`, and their keys in `Times`."""
        if batch not in self._priced:
            every = [StepShape(block, rows) for block in self._drafted for rows in (0, *row_buckets(batch))]
            priced = [i for i, shape in enumerate(every) if key_of(shape, batch) in self._costs]
            keys = [key_of(every[i], batch) for i in priced]
            self._priced[batch] = [every[i] for i in priced], np.array(priced, dtype=int), keys
        return self._priced[batch]

    def _pays(self, requests: int, tokens: int) -> bool:
        """Returns whether some drafts are faster than plain decoding if all of them are accepted."""
        batch = self._bucket(requests)
        shapes, _, keys = self._choices(batch)
        plain, *seconds = self._costs.seconds([(batch, 1), *keys], tokens)
        most = [min(shape.rows or math.inf, requests * shape.block) for shape in shapes]
        return any(n / each > self.GAIN * requests / plain for n, each in zip(most, seconds, strict=True))

    def __call__(
        self, requests: int, untried: int = 0, awaited: bool = False, chains: bool = True, tokens: int = 0
    ) -> StepShape:
        """Returns the shape of the next step.

        Args:
            requests: number of requests in the batch, >= 1.
            untried: number of requests without a verified draft so far.
            awaited: whether a step with drafts is in flight.
            chains: whether drafts without trees may be chosen.
            tokens: in the cache of the batch.
        """
        if not self._pays(requests, tokens):
            return StepShape(1)
        if not self._expected:
            return StepShape(1) if awaited else self._try(self._drafted[-1], requests)
        found = self.promises(requests, tokens)
        if not chains:
            found = {shape: rate for shape, rate in found.items() if shape.rows or shape.block == 1}
        batch, best, current = self._bucket(requests), max(found, key=found.__getitem__), self._current
        if current not in found or best.block == 1 or found[best] > self.GAIN * found[current]:
            self._current = best
            if best.block != current.block:
                self._steps, self._next_probe = 0, self.FIRST_PROBE
            if current.rows or current.block == 1:
                self._next_look = self.FIRST_LOOK
        if self._current.block > 1:
            rates = {key_of(shape, batch): found[shape] for shape in (self._current, StepShape(1))}
            if self._explore(rates, key_of(self._current, batch), tokens) == (batch, 1):
                return StepShape(1)
        if self._current.block > 1 and not self._current.rows:  # chains
            return self._looked(requests, found)
        self._chains = 0
        return self._probed(requests, untried, tokens) or self._current

    def _looked(self, requests: int, found: dict[StepShape, float]) -> StepShape:
        """Returns the current chains, or a step over trees that reports all promises."""
        self._chains += 1
        most = self.LAST_LOOK * requests  # the batch may have been larger before
        trees = [shape for shape in found if shape.rows and shape.block == self._drafted[-1]]
        look = max(trees, key=found.__getitem__, default=self._current)
        if self._chains < min(self._next_look, most) * patience(found[self._current] / found[look] - 1, 0.5):
            return self._current
        self._chains, self._next_look = 0, min(2 * self._next_look, most)
        return look

    def _probed(self, requests: int, untried: int, tokens: int) -> StepShape | None:
        """Returns a step that tries an unknown choice, if one is due."""
        current = self._current
        if current.block == self._drafted[-1]:
            return None
        self._steps += 1
        soon = self.FIRST_PROBE * requests // untried if untried and current.block == 1 else self._next_probe
        probe, rarer = None, 1.0
        if current.block == 1:
            short = [block for block in self._drafted if block <= self.PROBE]
            probe = self._try(short[-1] if short else self._drafted[0], requests)
            batch = self._bucket(requests)
            tried, plain = self._costs.seconds([key_of(probe, batch), (batch, 1)], tokens)
            rarer = patience(tried / plain - 1)
        if self._steps < min(soon, self._next_probe) * rarer:
            return None
        self._steps, self._next_probe = 0, min(2 * self._next_probe, self.LAST_PROBE)
        if probe is not None:
            return probe
        longer = StepShape(next(block for block in self._drafted if block > current.block), current.rows)
        return longer if key_of(longer, self._bucket(requests)) in self._costs else None

    def _try(self, block: int, requests: int) -> StepShape:
        """Returns a step of that block, over trees if possible, with the fewest rows that give every request a node."""
        batch = self._bucket(requests)
        trees = [StepShape(block, rows) for rows in row_buckets(batch)]
        trees = [choice for choice in trees if choice.rows >= 2 * batch] or trees[-1:]
        return next((choice for choice in trees if key_of(choice, batch) in self._costs), StepShape(block))
