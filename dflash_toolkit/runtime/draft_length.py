"""Chooses how long a block to draft, from measured step times and each request's recent acceptance."""

from collections.abc import Callable, Sequence

from .request import Request
from .timing import Times

SIZES = (1, 2, 4, 8, 16)


def block_sizes(longest: int) -> tuple[int, ...]:
    """Returns the block lengths to choose from: 1 is plain decoding, the drafter's own is the longest."""
    return (*(s for s in SIZES if s < longest), longest)


class BlockChooser:
    """Picks the block length that is expected to give the batch the most tokens per second.

    A block of S commits (1 - a^S) / (1 - a) tokens on average when every drafted token is accepted with conditional
    probability a (Leviathan et al. 2023, equation 1). The choice changes only for a clear gain. A batch decodes plainly
    without probes where drafts would not pay even if all were accepted, as in large batches on GPUs with few FLOP/s.

    A batch in plain decoding drafts one short block from time to time, to find out whether drafting pays again. Probes
    are frequent at first, as the start of an answer predicts little about the rest, and then rarer; they are more
    frequent if many requests had no draft yet. The first draft is also a probe, and the next one waits for its result.
    """

    GAIN = 1.02
    PROBE = 4  # the longest probe, if there are such short blocks
    DOUBTFUL = 0.3  # acceptance at which drafts begin to pay; a probe has the best length for it
    FIRST_PROBE, LAST_PROBE = 8, 128  # plain steps between two probes; doubles

    def __init__(self, sizes: Sequence[int], times: Times, bucket: Callable[[int], int]) -> None:
        self._sizes, self._times, self._bucket = tuple(sizes), times, bucket
        self._current = self._sizes[-1]
        short = [size for size in self._sizes if 1 < size <= self.PROBE]
        self._probes = short or [size for size in self._sizes if size > 1][:1]
        self._plain_steps, self._next_probe = 0, self.FIRST_PROBE

    def __call__(self, requests: Sequence[Request]) -> int:
        bucket = self._bucket(len(requests))
        plain = self.GAIN / self._times[bucket, 1]
        if all(size / self._times[bucket, size] <= plain for size in self._sizes if size > 1):
            return 1
        rates = [request.acceptance.rate for request in requests]

        def promise(size: int, rates: Sequence[float]) -> float:
            """Returns tokens per second."""
            return sum(expected_tokens(rate, size) for rate in rates) / self._times[bucket, size]

        promised = {size: promise(size, rates) for size in self._sizes}
        best = max(self._sizes, key=promised.__getitem__)
        if promised[best] > self.GAIN * promised[self._current]:
            self._current = best
        if self._current > 1:
            self._plain_steps, self._next_probe = 0, self.FIRST_PROBE
            if any(request.acceptance.known for request in requests):
                return self._current
            awaited = any(block > 1 for request in requests for block in request.blocks_in_flight)
            return 1 if awaited else self._try(promise)
        self._plain_steps += 1
        untried = sum(not request.acceptance.tried for request in requests)
        soon = self.FIRST_PROBE * len(requests) // untried if untried else self._next_probe
        if self._plain_steps < min(soon, self._next_probe):
            return 1
        self._plain_steps, self._next_probe = 0, min(2 * self._next_probe, self.LAST_PROBE)
        return self._try(promise)

    def _try(self, promise: Callable[[int, Sequence[float]], float]) -> int:
        return max(self._probes, key=lambda size: promise(size, [self.DOUBTFUL]))


def expected_tokens(rate: float, block: int) -> float:
    """Returns the tokens that a block commits on average, the bonus token included."""
    rate = min(max(rate, 0.0), 1.0)
    return float(block) if rate > 1.0 - 1e-9 else (1.0 - rate**block) / (1.0 - rate)
