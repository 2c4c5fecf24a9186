"""95 % bootstrap intervals of figures over requests.

Requests are resampled with replacement, and every figure is computed for each resample. A figure is a ratio of sums
over requests, so one matrix product gives the sums of all resamples.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist
from typing import Any

import numpy as np

from ...acceptance import verdicts
from ...generation import Generation

RESAMPLES, SEED, CONFIDENCE = 2000, 0, 0.95
AT_ONCE = 4_000_000  # maximum weights in memory

Interval = tuple[float, float]  # low, high
Array = np.ndarray[Any, np.dtype[np.float64]]


def resampled_sums(figures: Array) -> Array:
    """Returns the sums [RESAMPLES, F] of figures [requests, F] over seeded resamples of the requests."""
    count, rng = len(figures), np.random.default_rng(SEED)
    at_once = max(1, AT_ONCE // count)
    even = np.full(count, 1 / count)
    sizes = [min(at_once, RESAMPLES - start) for start in range(0, RESAMPLES, at_once)]
    return np.concatenate([rng.multinomial(count, even, size) @ figures for size in sizes])


def interval(replicates: Array, requests: int) -> Interval | None:
    """Returns the percentile interval of a figure's values [RESAMPLES]; None without values or below two requests.

    The percentiles are widened for few requests by Student's t, as the plain ones are too narrow (Hesterberg 2015,
    "What Teachers Should Know About the Bootstrap", section 5.3).
    """
    values = replicates[np.isfinite(replicates)]
    if requests < 2 or not len(values):
        return None
    tail = NormalDist().cdf(
        -math.sqrt(requests / (requests - 1)) * student_quantile(1 - (1 - CONFIDENCE) / 2, requests - 1)
    )
    low, high = np.quantile(values, [tail, 1 - tail])
    return float(low), float(high)


def student_quantile(p: float, freedom: int) -> float:
    """Returns the quantile of Student's t, within 1 % from 3 degrees of freedom (Abramowitz and Stegun 26.7.5)."""
    if freedom <= 2:  # exact
        return math.tan(math.pi * (p - 0.5)) if freedom == 1 else (2 * p - 1) * math.sqrt(2 / (4 * p * (1 - p)))
    z = NormalDist().inv_cdf(p)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + sum(term / freedom**power for power, term in enumerate(terms, 1))


def intervals(
    drafted: Sequence[Generation], plain: Sequence[Generation], block_size: int, begins: Sequence[bool] | None = None
) -> dict[str, Interval | tuple[Interval | None, ...] | None]:
    """Returns intervals of the figures of `Acceptance` and of the speed-up, by their names in reports.

    Args:
        plain: plain answers to the same requests in the same order, or empty.
        block_size: S; two figures have S - 1 intervals, one per slot.
        begins: whether each request begins a conversation (default: all do); its turns are resampled together.
    """
    requests = columns(drafted, plain, block_size, begins)
    found: dict[str, Interval | tuple[Interval | None, ...] | None]
    found = dict.fromkeys(("plain_tokens_per_second", "speedup"))
    return found | intervals_of(figures(resampled_sums(requests), block_size, bool(plain)), len(requests))


def intervals_of(
    replicates: Mapping[str, Array], requests: int
) -> dict[str, Interval | tuple[Interval | None, ...] | None]:
    """Returns the interval of each of `figures`, or one per slot."""
    return {
        name: interval(values, requests) if values.ndim == 1 else tuple(interval(slot, requests) for slot in values)
        for name, values in replicates.items()
    }


def columns(
    drafted: Sequence[Generation], plain: Sequence[Generation], block_size: int, begins: Sequence[bool] | None = None
) -> Array:
    """Returns the sums for `figures` of each conversation [conversations, F]. Arguments as for `intervals`."""
    slots = block_size - 1
    parts = [_speed(drafted), _taus(drafted), np.array([_slots(g, slots) for g in drafted]).reshape(-1, 3 * slots)]
    parts += [_speed(plain)] if plain else []
    found = np.concatenate(parts, axis=1)
    return found if begins is None else np.add.reduceat(found, np.flatnonzero(begins))


def figures(sums: Array, block_size: int, plain: bool) -> dict[str, Array]:
    """Returns figures by their names in reports from sums [N, F] of `columns`: [N], or [S - 1, N] for slots.

    Args:
        plain: whether there are plain answers.
    """
    slots = block_size - 1
    tokens, steps, seconds, taus, counted = sums[:, :5].T
    judged, reached, accepted = sums[:, 5 : 5 + 3 * slots].reshape(-1, 3, slots).transpose(1, 2, 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        found = {
            "tau_pooled": tokens / steps,
            "tau_mean": taus / counted,
            "accepted_per_position": accepted / judged,
            "accepted_given_previous": accepted / reached,
            "tokens_per_second": tokens / seconds,
        }
        if plain:
            found["plain_tokens_per_second"] = sums[:, -3] / sums[:, -1]
            found["speedup"] = found["tokens_per_second"] / found["plain_tokens_per_second"]
    return found


def _speed(generations: Sequence[Generation]) -> Array:
    """Returns the tokens committed by steps, the steps and their seconds [requests, 3]."""
    return np.array([(sum(len(s.tokens) for s in g.steps), len(g.steps), g.decode_s) for g in generations])


def _taus(generations: Sequence[Generation]) -> Array:
    """Returns each answer's own tau, and whether it has one [requests, 2]."""
    return np.array([(g.acceptance_length or 0.0, 1.0) if g.steps else (0.0, 0.0) for g in generations])


def _slots(generation: Generation, slots: int) -> Array:
    """Counts the steps that judged, reached and accepted each slot [3, slots], as `Acceptance` does."""
    found = np.array(verdicts(generation)).reshape(-1, 2)
    drafted, accepted, slot = found[:, :1], found[:, 1:], np.arange(1, slots + 1)
    judged = drafted >= slot
    return np.stack([judged.sum(0), (judged & (accepted >= slot - 1)).sum(0), (judged & (accepted >= slot)).sum(0)])
