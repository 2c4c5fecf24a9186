"""Compares two runs of the same requests with paired intervals and tests.

Requests differ in difficulty, so each is compared with itself. Intervals resample pairs with replacement. A p-value
comes from a permutation test that swaps the runs within pairs: the share of swaps with a difference at least as large
as the measured one.
"""

from collections.abc import Sequence

import numpy as np

from ...generation import Generation
from .bootstrap import SEED, Array, Interval, columns, figures, interval, intervals_of, resampled_sums

PERMUTATIONS = 10_000
AT_ONCE = 500  # permutations in memory


def figure_differences(first: Array, second: Array, block_size: int, plain: bool) -> dict[str, Array]:
    """Returns `figures` of the second run minus those of the first."""
    here, there = figures(first, block_size, plain), figures(second, block_size, plain)
    return {name: there[name] - here[name] for name in here}


def difference_intervals(
    first: Array, second: Array, block_size: int, plain: bool
) -> dict[str, Interval | tuple[Interval | None, ...] | None]:
    """Returns intervals of `figure_differences`.

    Args:
        first, second: `columns` of the same requests in the same order.
        plain: whether they have those of plain answers.
    """
    # the fixed seed resamples the same requests of both runs
    drawn = figure_differences(resampled_sums(first), resampled_sums(second), block_size, plain)
    return intervals_of(drawn, len(first))


def tau_over(
    first: Sequence[Generation], second: Sequence[Generation], block_size: int
) -> tuple[float, Interval | None]:
    """Returns the pooled tau of the second answers over that of the first, with its interval.

    Args:
        first, second: answers to the same questions in the same order.
    """
    sums = [columns(answers, [], block_size) for answers in (first, second)]

    def ratio(shorter: Array, longer: Array) -> Array:
        taus = [figures(each, block_size, False)["tau_pooled"] for each in (shorter, longer)]
        return taus[1] / taus[0]

    measured = ratio(*(each.sum(0, keepdims=True) for each in sums))
    return float(measured[0]), interval(ratio(*map(resampled_sums, sums)), len(first))


def p_values(first: Array, second: Array, block_size: int, plain: bool) -> dict[str, float]:
    """Returns two-sided p-values of the figures with one finite value.

    Uses all swaps if there are at most PERMUTATIONS, else that many seeded random ones.
    """
    total, apart = (first + second).sum(0), second - first
    seen = figure_differences(first.sum(0, keepdims=True), second.sum(0, keepdims=True), block_size, plain)
    seen = {name: np.abs(values) for name, values in seen.items() if values.ndim == 1 and np.isfinite(values[0])}
    count, every = 0, 2 ** len(first) <= PERMUTATIONS
    further = dict.fromkeys(seen, 0)
    for signs in _signs(len(first)):
        swung = signs @ apart
        swapped = figure_differences((total - swung) / 2, (total + swung) / 2, block_size, plain)
        for name, values in seen.items():
            # equal up to rounding counts as at least as large; NaN counts too, which is conservative
            further[name] += int(np.sum(~(np.abs(swapped[name]) < values * (1 - 1e-9) - 1e-12)))
        count += len(signs)
    return {name: (n if every else n + 1) / (count if every else count + 1) for name, n in further.items()}


def _signs(requests: int) -> list[Array]:
    """Returns the swaps as signs -1 and 1 [swaps, requests], in parts."""
    if 2**requests <= PERMUTATIONS:
        codes = np.arange(2**requests)
        return [1.0 - 2.0 * ((codes[:, None] >> np.arange(requests)) & 1)]
    rng = np.random.default_rng(SEED)
    return [rng.choice([-1.0, 1.0], (AT_ONCE, requests)) for _ in range(PERMUTATIONS // AT_ONCE)]
