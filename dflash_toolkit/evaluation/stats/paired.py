"""What parts two runs of the same requests, and whether it is more than chance.

Requests differ in how easy they are, and both runs had the same: each is compared with itself. Of an interval, pairs
are drawn anew, with replacement. A p-value is that of a permutation test: were the runs alike, the two of a pair could
as well have been swapped; it is the share of such swaps that part the runs as far as they are, or further.
"""

import numpy as np

from .bootstrap import SEED, Array, Interval, figures, intervals_of, resampled_sums

PERMUTATIONS = 10_000
AT_ONCE = 500  # of them in memory


def parted(first: Array, second: Array, block_size: int, plain: bool) -> dict[str, Array]:
    """How far two runs are apart in each figure: `figures` of the second, less those of the first."""
    here, there = figures(first, block_size, plain), figures(second, block_size, plain)
    return {name: there[name] - here[name] for name in here}


def difference_intervals(
    first: Array, second: Array, block_size: int, plain: bool
) -> dict[str, Interval | tuple[Interval | None, ...] | None]:
    """Intervals of what `parted` says of all requests.

    Args:
        first, second: `columns` of the same requests in the same order.
        plain: whether they have those of plain answers.
    """
    # one seed: what is drawn of the first run is drawn of the second
    drawn = parted(resampled_sums(first), resampled_sums(second), block_size, plain)
    return intervals_of(drawn, len(first))


def p_values(first: Array, second: Array, block_size: int, plain: bool) -> dict[str, float]:
    """Of each figure with one value: two-sided, of all swaps where they are few, else of PERMUTATIONS seeded ones.

    A figure that is no number has none.
    """
    total, apart = (first + second).sum(0), second - first
    seen = parted(first.sum(0, keepdims=True), second.sum(0, keepdims=True), block_size, plain)
    seen = {name: np.abs(values) for name, values in seen.items() if values.ndim == 1 and np.isfinite(values[0])}
    count, every = 0, 2 ** len(first) <= PERMUTATIONS
    further = dict.fromkeys(seen, 0)
    for signs in _signs(len(first)):
        swung = signs @ apart
        swapped = parted((total - swung) / 2, (total + swung) / 2, block_size, plain)
        for name, values in seen.items():
            # what is as far but for rounding counts; so does what is no number, which is the careful side
            further[name] += int(np.sum(~(np.abs(swapped[name]) < values * (1 - 1e-9) - 1e-12)))
        count += len(signs)
    return {name: (n if every else n + 1) / (count if every else count + 1) for name, n in further.items()}


def _signs(requests: int) -> list[Array]:
    """Who is swapped, as -1 and 1 [swaps, requests], in parts."""
    if 2**requests <= PERMUTATIONS:
        codes = np.arange(2**requests)
        return [1.0 - 2.0 * ((codes[:, None] >> np.arange(requests)) & 1)]
    rng = np.random.default_rng(SEED)
    return [rng.choice([-1.0, 1.0], (AT_ONCE, requests)) for _ in range(PERMUTATIONS // AT_ONCE)]
