"""The uniform number of a sampled token depends on (seed, position) only, in any arithmetic."""

from collections.abc import Iterable, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_vocabulary import chi_square

from dflash_toolkit.kernels.reference import position_uniform
from dflash_toolkit.sampling import int64_seed


def splitmix(seed: int, position: int, stream: int) -> float:
    """The same draw in plain integers of any size."""
    mask = (1 << 64) - 1
    z = seed * 0x9E3779B97F4A7C15 + position * 0xD1342543DE82EF95 + 0x632BE59BD9B4E019
    z = (z + stream * 0xD6E8FEB86659FD93) & mask
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z = ((z ^ (z >> shift)) * factor) & mask
    return ((z ^ (z >> 31)) >> 11) / (1 << 53)


def uniforms(seeds: Iterable[int], positions: Iterable[int], stream: int = 0) -> torch.Tensor:
    return position_uniform(torch.tensor([int64_seed(s) for s in seeds]), torch.tensor(list(positions)), stream)


N = 20000


@pytest.mark.parametrize(
    ("seeds", "positions"),
    [
        ([7] * N, range(N)),
        (range(N), [7] * N),
        (range(N), range(N)),
        ([s * 1_000_003 for s in range(N)], [50 - s % 50 for s in range(N)]),
    ],
    ids=["positions", "seeds", "diagonal", "sparse"],
)
def test_position_uniform_is_uniform_and_independent(seeds: Sequence[int], positions: Sequence[int]) -> None:
    draws = uniforms(seeds, positions)
    assert draws.min() >= 0.0 and draws.max() < 1.0
    cells = (draws * 16).long()
    statistic, limit = chi_square(cells.bincount(minlength=16), torch.full((16,), 1 / 16))
    assert statistic < limit
    pairs = cells[:-1] * 16 + cells[1:]
    statistic, limit = chi_square(pairs.bincount(minlength=256), torch.full((256,), 1 / 256))
    assert statistic < limit


@pytest.mark.parametrize("shift", [0, 1])
def test_random_streams_and_positions_are_independent(shift: int) -> None:
    each = [(uniforms([7] * N, range(shift * stream, N + shift * stream), stream) * 6).long() for stream in range(3)]
    cells = each[0] * 36 + each[1] * 6 + each[2]
    statistic, limit = chi_square(cells.bincount(minlength=216), torch.full((216,), 1 / 216))
    assert statistic < limit


@given(st.integers(-(2**70), 2**70), st.integers(0, 2**31), st.integers(0, 2))
def test_position_uniform_is_splitmix_for_any_integer_seed(seed: int, position: int, stream: int) -> None:
    assert uniforms([seed], [position], stream).item() == splitmix(seed, position, stream)
