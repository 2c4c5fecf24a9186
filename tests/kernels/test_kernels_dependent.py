"""Launches that may overlap, and what GEMMs ask L2 for before they wait; the kernels' waits: test_kernels_sm90.py."""

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from dflash_toolkit.kernels import launch
from dflash_toolkit.kernels.launch import bytes_ahead, pdl
from dflash_toolkit.kernels.triton.dependent import pieces_ahead
from dflash_toolkit.kernels.weight import BlockScaledFp8

FP8 = torch.float8_e4m3fn
MIB = 1 << 20


@triton.jit
def _pieces(  # type: ignore[no-untyped-def]
    from_p, size_p, N, K, SPAN, AHEAD, WIDTH: tl.constexpr, BLOCK_N: tl.constexpr, HALVES: tl.constexpr
):  # fmt: skip
    i_n, i_s = tl.program_id(0), tl.program_id(1)
    first = i_s * SPAN
    o_from, b_size = pieces_ahead(
        i_n, N, K, first, tl.minimum(first + SPAN, K), AHEAD, WIDTH, BLOCK_N, HALVES
    )  # fmt: skip
    o_out = (i_n * tl.num_programs(1) + i_s) * 2 * BLOCK_N + tl.arange(0, 2 * BLOCK_N)
    tl.store(from_p + o_out, o_from)
    tl.store(size_p + o_out, b_size)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter's")
@pytest.mark.parametrize(
    ("n", "k", "span", "ahead", "width", "halves"),
    [
        (256, 768, 256, 256, 1, False),  # whole splits
        (256, 768, 512, 512, 1, False),  # of which the last is short
        (256, 768, 768, 256, 1, True),
        (200, 256, 128, 256, 2, False),  # more rows of tiles than there are
        (128, 256, 256, 0, 1, False),
    ],
)
def test_programs_ask_for_the_first_bytes_of_their_own_rows(
    n: int, k: int, span: int, ahead: int, width: int, halves: bool
) -> None:
    block_n, splits = 64, -(-k // span)
    tiles = -(-n // block_n)
    starts, sizes = torch.empty(tiles, splits, 128, dtype=torch.int64), torch.empty(tiles, splits, 128).int()
    _pieces[(tiles, splits)](starts, sizes, n, k, span, ahead, WIDTH=width, BLOCK_N=block_n, HALVES=halves)
    asked = torch.zeros(tiles, splits, n * k * width, dtype=torch.bool)
    for tile, split, i in (sizes > 0).nonzero().tolist():
        start, size = int(starts[tile, split, i]), int(sizes[tile, split, i])
        assert start % 16 == 0 and size % 16 == 0 and start + size <= n * k * width
        asked[tile, split, start : start + size] = True
    expected = torch.zeros(tiles, splits, n, k * width, dtype=torch.bool)
    rows = torch.arange(n) if not halves else torch.arange(n).view(2, -1).T.flatten()  # gate 0, up 0, ...
    for tile in range(tiles):
        for split in range(splits):
            first, last = split * span * width, min((split + 1) * span, k) * width
            expected[tile, split, rows[tile * block_n : (tile + 1) * block_n], first : min(first + ahead, last)] = True
    assert torch.equal(asked, expected.flatten(2))


@pytest.mark.parametrize(
    ("n", "splits", "columns", "dtype", "expected"),
    [
        (4096, 4, 1024, FP8, 1024),  # all of a weight that is no larger
        (24576, 1, 4096, FP8, 512),
        (34816, 1, 5120, FP8, 256),
        (151936, 1, 4096, torch.bfloat16, 0),
        (128, 1, 1024, torch.bfloat16, 2048),
        (128, 1, 1000, FP8, 0),  # rows of which not all begin at multiples of 16
    ],
)
def test_what_is_asked_for_is_bounded_over_all_programs(
    n: int, splits: int, columns: int, dtype: torch.dtype, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = torch.empty(n, splits * columns, dtype=dtype, device="meta")
    assert bytes_ahead(weight, n * splits, columns) == 0, "by default nothing"
    monkeypatch.setattr(launch.dependent_launches, "ahead", 16 * MIB)
    assert bytes_ahead(weight, n * splits, columns) == expected
    assert expected * n * splits <= 16 * MIB


def test_a_weight_that_begins_between_is_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch.dependent_launches, "ahead", 16 * MIB)
    whole = BlockScaledFp8.empty(256, 256, torch.empty).data.flatten()
    assert bytes_ahead(whole[: 128 * 256].view(128, 256), 128, 256) == 256
    assert bytes_ahead(whole[8 : 8 + 128 * 256].view(128, 256), 128, 256) == 0


@pytest.mark.parametrize("start", ["off", "late", "early"])
def test_launches_overlap_on_hopper_as_far_as_they_may(start: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class OnGpu:
        is_cuda, device = True, torch.device("cuda", 0)

    monkeypatch.setattr(launch.dependent_launches, "start", start)
    monkeypatch.setattr(launch, "_has_pdl", lambda device: False)
    gpu: torch.Tensor = OnGpu()  # type: ignore[assignment]
    assert pdl(torch.empty(1), early=True) == pdl(gpu, early=True) == {"PDL": 0}
    monkeypatch.setattr(launch, "_has_pdl", lambda device: True)
    told = {early: pdl(gpu, early=early) for early in (False, True)}
    late, early = ({"PDL": kind, "launch_pdl": True} for kind in (launch.LATE, launch.EARLY))
    assert (
        told
        == {
            "off": {False: {"PDL": 0}, True: {"PDL": 0}},
            "late": {False: late, True: late},
            "early": {False: late, True: early},
        }[start]
    )
