"""The largest logits of stored rows: the kernel (interpreted without a GPU) against the definition."""

import math

import pytest
import torch

from dflash_toolkit.kernels import reference as definition
from dflash_toolkit.kernels.triton import row_top as triton_kernel

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def surrounded(values: torch.Tensor) -> torch.Tensor:
    """A view with larger values on all sides, which are not its own."""
    wide = torch.full((len(values) + 2, values.shape[1] + 14), 6e4, dtype=values.dtype, device=DEVICE)
    wide[1:-1, 7:-7] = values.to(DEVICE)
    return wide[1:-1, 7:-7]


@pytest.mark.parametrize(("vocabulary", "count"), [(16, 16), (300, 16), (2048, 3), (2049, 16), (5000, 5)])
def test_top_logits_are_found_at_any_column(vocabulary: int, count: int) -> None:
    rows = torch.stack([torch.randperm(vocabulary) for _ in range(5)]).float()
    rows[0] = torch.arange(vocabulary)  # side by side, after whole tiles
    rows[1] = (torch.arange(vocabulary) % 2048 == 7) * 1000.0 + torch.arange(vocabulary) / vocabulary  # in one lane
    rows[2] = -rows[2] - 1
    logits = surrounded(rows)
    found, expected = triton_kernel.row_top(logits, count), definition.row_top(logits, count)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_tied_logits_are_each_taken_once(dtype: torch.dtype) -> None:
    logits = surrounded(torch.randint(0, 4, (4, 3000)).to(dtype))
    values, columns = triton_kernel.row_top(logits, 16)
    assert torch.equal(values, definition.row_top(logits, 16)[0])
    assert torch.equal(logits.gather(1, columns).float(), values)
    assert all(len(set(row)) == 16 for row in columns.tolist())


def test_diverged_logits_give_valid_columns() -> None:
    rows = torch.randn(4, 2100)
    rows[0], rows[1], rows[2, ::2] = math.nan, -math.inf, math.nan
    values, columns = triton_kernel.row_top(surrounded(rows), 16)
    assert ((columns >= 0) & (columns < 2100)).all()
    assert torch.equal(values[3:].cpu(), rows[3:].topk(16).values) and (columns[2] % 2 == 1).all()
