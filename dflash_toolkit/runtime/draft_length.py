"""Chooses how long a block to draft, from step times and each request's recent acceptance."""

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from .request import Request
from .step_costs import Explorer, StepCosts, patience
from .timing import Shape

SIZES = (1, 2, 4, 8, 16)


def block_sizes(longest: int) -> tuple[int, ...]:
    """Returns the block lengths to choose from: 1 is plain decoding, the drafter's own is the longest."""
    return (*(s for s in SIZES if s < longest), longest)


class BlockChooser:
    """Picks the block length that is expected to give the batch the most tokens per second.

    A block of S commits (1 - a^S) / (1 - a) tokens on average when every drafted token is accepted with conditional
    probability a (Leviathan et al. 2023, equation 1). The choice changes only for a clear gain, but for any to
    plain decoding. A batch decodes plainly without probes where drafts would not pay even if all were accepted, as
    in large batches on GPUs with few FLOP/s. While steps are observed, lengths of unknown time are tried from time
    to time.

    A batch in plain decoding drafts one short block from time to time, to find out whether drafting pays again. Probes
    are frequent at first, as the start of an answer predicts little about the rest, and then rarer; they are more
    frequent if many requests had no draft yet. The first draft is also a probe, and the next one waits for its result.
    """

    GAIN = 1.02
    PROBE = 4  # the longest probe, if there are such short blocks
    DOUBTFUL = 0.3  # acceptance at which drafts begin to pay; a probe has the best length for it
    FIRST_PROBE, LAST_PROBE = 8, 128  # plain steps between two probes; doubles

    def __init__(self, sizes: Sequence[int], costs: StepCosts, bucket: Callable[[int], int]) -> None:
        self._sizes, self._costs, self._bucket = tuple(sizes), costs, bucket
        self._explore = Explorer(costs)
        self._current = self._sizes[-1]
        short = [size for size in self._sizes if 1 < size <= self.PROBE]
        self._probes = short or [size for size in self._sizes if size > 1][:1]
        self._plain_steps, self._next_probe = 0, self.FIRST_PROBE

    def __call__(self, requests: Sequence[Request]) -> int:
        bucket, tokens = self._bucket(len(requests)), sum(request.length for request in requests)
        shapes = [(bucket, size) for size in self._sizes]
        seconds = dict(zip(self._sizes, self._costs.seconds(shapes, tokens), strict=True))
        if all(size / seconds[size] <= self.GAIN / seconds[1] for size in self._sizes):
            return 1
        expected = expected_tokens([request.acceptance.rate for request in requests], max(self._sizes))
        promised = {size: expected[size - 1] / seconds[size] for size in self._sizes}  # tokens per second
        best = max(self._sizes, key=promised.__getitem__)
        if best == 1 or promised[best] > self.GAIN * promised[self._current]:
            self._current = best
        if self._current > 1:
            self._plain_steps, self._next_probe = 0, self.FIRST_PROBE
            if any(request.acceptance.known for request in requests):
                rates: dict[Shape, float] = {(bucket, size): rate for size, rate in promised.items()}
                return self._explore(rates, (bucket, self._current), tokens)[1]
            awaited = any(block > 1 for request in requests for block in request.blocks_in_flight)
            return 1 if awaited else self._try(seconds)
        self._plain_steps += 1
        untried = sum(not request.acceptance.tried for request in requests)
        soon = self.FIRST_PROBE * len(requests) // untried if untried else self._next_probe
        probe = self._try(seconds)
        if self._plain_steps < min(soon, self._next_probe) * patience(seconds[probe] / seconds[1] - 1):
            return 1
        self._plain_steps, self._next_probe = 0, min(2 * self._next_probe, self.LAST_PROBE)
        return probe

    def _try(self, seconds: Mapping[int, float]) -> int:
        expected = expected_tokens([self.DOUBTFUL], self._probes[-1])
        return max(self._probes, key=lambda size: expected[size - 1] / seconds[size])


def break_even(seconds: Mapping[int, float]) -> float:
    """Returns the tokens per step of the longest block from which some block is faster than plain decoding.

    Every drafted token is accepted with the same probability, see `BlockChooser`. Infinite if no block can be faster.

    Args:
        seconds: of a step, by the length of its block; 1 is plain decoding.
    """
    for rate in np.linspace(0.0, 1.0, 101):
        expected = expected_tokens([rate], max(seconds))
        if any(expected[size - 1] / each > 1.0 / seconds[1] for size, each in seconds.items() if size > 1):
            return expected[-1]
    return math.inf


def expected_tokens(rates: Sequence[float], longest: int) -> list[float]:
    """Returns the tokens that requests commit together on average, bonus tokens included, for blocks of 1..longest."""
    return (np.clip(rates, 0.0, 1.0)[:, None] ** np.arange(longest)).sum(axis=0).cumsum().tolist()
