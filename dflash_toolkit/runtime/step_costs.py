"""Estimates the seconds of steps, from times that were measured on an empty batch and from steps of requests."""

import math
from collections.abc import Mapping, Sequence

from .timing import Shape, Times


def rows_per_request(shape: Shape) -> int:
    """Returns the rows of a request in a step, rounded up to a power of two."""
    batch, *rows = shape
    each = -(-rows[0] // batch) if len(rows) == 2 else rows[0]
    return 1 << (each - 1).bit_length()


class StepCosts:
    """Seconds of a step: those of an empty batch, and more for every token in the cache of the batch.

    The seconds per token depend on the rows of a request: attention reads keys and values once and multiplies them with
    every row. Until steps are observed, reading a token takes the time of reading as many bytes of weights. Each
    observed step corrects both parts (normalized least mean squares).

    Rows of a mixture of experts choose experts independently when times are measured. Rows of real text are similar and
    read fewer experts. So an observed step also corrects those steps of its batch that were not observed: the nearest
    observed number of rows gives the factor.

    Args:
        times: of an empty batch.
        tokens_per_pass: tokens in a cache of as many bytes as the weights; inf: tokens take no time.
        routes: whether the target has experts.
    """

    FIRST, LATER = 0.7, 0.2  # weight of the error of an observed step, for a shape without and with recent steps
    DRIFT = 0.1  # share of the estimate by which other tokens in the cache make an observed step obsolete
    OFTEN = 2  # steps after which the time of a shape is known

    def __init__(self, times: Times, tokens_per_pass: float = math.inf, routes: bool = False) -> None:
        self._empty, self._unit, self._routes = dict(times), tokens_per_pass, routes
        self._factors: dict[int, dict[int, tuple[Shape, float]]] = {}  # by batch and rows of a request; also measured s
        self._first = min(times.values(), default=0.0) / tokens_per_pass
        self._per_token: dict[int, float] = {}  # by rows of a request
        self._observed: dict[Shape, tuple[int, int]] = {}  # number of recent steps, tokens of the newest

    def __contains__(self, shape: Shape) -> bool:
        return shape in self._empty

    def seconds(self, shapes: Sequence[Shape], tokens: int = 0) -> list[float]:
        """Returns the seconds of steps with so many tokens in the cache of the batch."""
        rows = [rows_per_request(shape) for shape in shapes]
        each = {count: self._seconds_per_token(count) * tokens for count in set(rows)} if tokens else {}
        return [self._of_empty(shape) + each.get(count, 0.0) for shape, count in zip(shapes, rows, strict=True)]

    def _of_empty(self, shape: Shape) -> float:
        """Returns the seconds with an empty cache."""
        seconds, seen = self._empty[shape], self._factors.get(shape[0])
        if seen is None or shape in self._observed:
            return seconds
        nearest, measured = seen[min(seen, key=lambda rows: abs(math.log2(rows / rows_per_request(shape))))]
        return seconds * self._empty[nearest] / measured

    def observe(self, shape: Shape, tokens: int, seconds: float) -> None:
        """Adds an observed step. Ignores one of a shape without a measured time."""
        if shape not in self._empty:
            return
        (expected,) = self.seconds([shape], tokens)
        count, _ = self._observed.get(shape, (0, 0)) if self.known(shape, tokens, once=True) else (0, 0)
        error = min(max(seconds - expected, -0.5 * expected), expected)  # another program may have used the device
        rows, passes = rows_per_request(shape), tokens / self._unit
        error *= (self.LATER if count else self.FIRST) / (1.0 + passes * passes)
        self._per_token[rows] = max(self._seconds_per_token(rows) + error * passes / self._unit, 0.0)
        before, measured = self._of_empty(shape), self._empty[shape]
        self._empty[shape] = max(before + error, 0.1 * before)
        if self._routes and shape not in self._observed:
            self._factors.setdefault(shape[0], {})[rows] = shape, measured
        self._observed[shape] = count + 1, tokens

    def known(self, shape: Shape, tokens: int, *, once: bool = False) -> bool:
        """Returns whether steps of this shape were observed with about so many tokens; True if no steps are observed.

        Args:
            once: a single step suffices.
        """
        if not self._observed:
            return not once
        count, then = self._observed.get(shape, (0, 0))
        if count < (1 if once else self.OFTEN):
            return False
        change = self._seconds_per_token(rows_per_request(shape)) * abs(tokens - then)
        return change <= self.DRIFT * self.seconds([shape], tokens)[0]

    def _seconds_per_token(self, rows: int) -> float:
        """Returns the observed seconds; without any, those of fewer rows, but not more than those of more rows."""
        if rows in self._per_token:
            return self._per_token[rows]
        fewer = [seconds for count, seconds in self._per_token.items() if count < rows]
        more = [seconds for count, seconds in self._per_token.items() if count > rows]
        return min([max([self._first, *fewer]), *more])


def patience(cost: float, usual: float = 0.3) -> float:
    """Returns the factor by which probes are rarer if one costs more steps than usual."""
    return max(1.0, cost / usual)


class Explorer:
    """Finds steps of unknown time to try. Otherwise a wrong time would rule out a shape for good."""

    EVERY = 32  # steps between two that are tried
    HOPE = 1.5  # most that a step may be faster than its estimate

    def __init__(self, costs: StepCosts) -> None:
        self._costs, self._steps = costs, 0

    def __call__(self, promised: Mapping[Shape, float], current: Shape, tokens: int) -> Shape:
        """Returns the current shape, or one to try.

        Args:
            promised: tokens per second of every choice.
        """
        self._steps += 1
        if self._steps < self.EVERY:
            return current
        self._steps = 0
        least = promised[current] / self.HOPE
        hopeful = [shape for shape, rate in promised.items() if rate > least and shape != current]
        unknown = [shape for shape in hopeful if not self._costs.known(shape, tokens)]
        return max(unknown, key=promised.__getitem__, default=current)
