"""The tiles of the GEMMs fit into the shared memory of every GPU and change no result."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from dflash_toolkit.kernels.features import KNOWN
from dflash_toolkit.kernels.formats import BLOCK
from dflash_toolkit.kernels.launch import padded
from dflash_toolkit.kernels.triton.experts import experts_tile
from dflash_toolkit.kernels.triton.fp8_blocks import QUANTIZED_IN_LOOP
from dflash_toolkit.kernels.triton.linear import tile_for, tile_of_quantized
from dflash_toolkit.kernels.triton.tile import LEAST_STAGES, ROOM_BYTES, SHARED_BYTES, Tile

SIZES = sorted({card.shared_memory for card in KNOWN.values()})
KINDS = ("linear", "split_k", "swiglu", "argmax")
# Qwen2.5-0.5B, Qwen3-8B, the 27B hybrid; and columns that are no multiple of any tile
SHAPES = ((1152, 896), (896, 4864), (6144, 4096), (4096, 12288), (151936, 4096), (34816, 5120), (100, 4500), (64, 20))
ROWS = (1, 16, 17, 32, 33, 64, 65, 128)
ROUTES = ((8, 128, 2048), (8, 128, 768), (10, 512, 2048), (2, 4, 100))  # experts of a row, experts, columns


def gemms(shared: int) -> Iterator[tuple[Tile, Tile, int]]:
    """Yields the tile, that of sm_90, and the bytes of one of its columns, for every GEMM."""
    for kind, (n, k), rows in itertools.product(KINDS, SHAPES, ROWS):
        for weight, row in ((2, 2), (4, 4), (1, 2)):
            how = kind, n, k, rows, weight == 1, row == 4
            tile, measured = tile_for(*how, shared), tile_for(*how)
            yield tile, measured, tile.block_n * weight + padded(rows) * row
    for rows in (*ROWS, 129, 256):
        tile = tile_of_quantized(rows, shared)
        yield tile, tile_of_quantized(rows, SHARED_BYTES), tile.block_n + padded(rows)
    for rows, (top, experts, k) in itertools.product((*ROWS, 129, 256, 512, 8192), ROUTES):
        for size, fp8_rows in ((2, 0), (4, 0), (2, 1), (2, 2)):  # bytes; GPUs without FP8 products have rows in fp16
            how: dict[str, Any] = {"fp32": size == 4, "fp8": fp8_rows > 0, "row_bytes": fp8_rows}
            (tile, taken), measured = (
                experts_tile(rows, top, experts, k, shared=shared, **how),
                experts_tile(rows, top, experts, k, **how),
            )
            assert taken == measured[1] and (not fp8_rows or tile.block_k == BLOCK), "a block has one scale"
            row = size if rows <= QUANTIZED_IN_LOOP or not fp8_rows else fp8_rows
            yield tile, measured[0], tile.block_n * (1 if fp8_rows else size) + taken * row


@pytest.mark.parametrize("shared", SIZES)
def test_tiles_fit_the_shared_memory_of_every_gpu(shared: int) -> None:
    for tile, measured, column_bytes in gemms(shared):
        assert tile.stages * tile.block_k * column_bytes <= shared - ROOM_BYTES, tile
        assert tile.stages >= LEAST_STAGES, "a program loads while it multiplies"
        assert measured.block_k % tile.block_k == 0
        same = [(each.block_n, each.warps, each.splits) for each in (tile, measured)]
        assert same[0] == same[1], "only columns and stages differ"


def test_two_programs_share_a_multiprocessor_of_99_kib() -> None:
    """Programs there keep one stage less in shared memory, as products are not asynchronous."""
    for tile, _, column_bytes in gemms(99 << 10):
        two = 2 * ((tile.stages - 1) * tile.block_k * column_bytes + 1024) <= 100 << 10
        assert two or tile.stages == LEAST_STAGES


# of sm_90: block_n, block_k, stages for 16, 64 and 128 rows, warps, splits
MEASURED = {
    ("linear", 1152, 896, "bf16"): (64, 128, (6, 6, 4), 4, 1),
    ("linear", 1152, 896, "fp8"): (64, 128, (3, 3, 3), 4, 1),
    ("linear", 1152, 896, "fp32"): (64, 64, (6, 6, 4), 4, 1),
    ("linear", 6144, 4096, "bf16"): (64, 128, (6, 6, 4), 4, 1),
    ("linear", 6144, 4096, "fp8"): (64, 128, (3, 3, 3), 4, 1),
    ("linear", 6144, 4096, "fp32"): (64, 64, (6, 6, 4), 4, 1),
    ("split_k", 896, 4864, "bf16"): (64, 128, (5, 5, 4), 4, 8),
    ("split_k", 896, 4864, "fp8"): (64, 128, (3, 3, 3), 4, 8),
    ("split_k", 896, 4864, "fp32"): (64, 64, (5, 5, 4), 4, 8),
    ("split_k", 4096, 12288, "bf16"): (64, 128, (5, 5, 4), 4, 2),
    ("split_k", 4096, 12288, "fp8"): (64, 128, (3, 3, 3), 4, 4),
    ("split_k", 4096, 12288, "fp32"): (64, 64, (5, 5, 4), 4, 2),
    ("swiglu", 24576, 4096, "bf16"): (64, 128, (3, 3, 3), 4, 1),
    ("swiglu", 24576, 4096, "fp8"): (64, 128, (3, 3, 3), 4, 1),
    ("swiglu", 24576, 4096, "fp32"): (64, 64, (3, 3, 3), 4, 1),
    ("argmax", 151936, 4096, "bf16"): (128, 128, (4, 4, 3), 8, 1),
    ("argmax", 151936, 4096, "fp8"): (128, 128, (3, 3, 3), 4, 1),
    ("argmax", 151936, 4096, "fp32"): (128, 64, (4, 4, 3), 8, 1),
}
MEASURED_QUANTIZED = {16: (128, 128, 4, 4), 64: (128, 128, 3, 4), 128: (128, 128, 3, 4), 256: (128, 128, 4, 8)}
# rows, fp8: tile of the experts of Qwen3-30B-A3B
MEASURED_EXPERTS = {
    (16, False): (64, 128, 3, 4), (512, False): (128, 64, 4, 8), (8192, False): (128, 64, 4, 8),
    (16, True): (64, 128, 4, 4), (512, True): (128, 128, 4, 8), (8192, True): (128, 128, 4, 8),
}  # fmt: skip


def test_the_tiles_of_sm_90_are_those_measured() -> None:
    for (kind, n, k, dtype), (block_n, block_k, stages, warps, splits) in MEASURED.items():
        for rows, count in zip((16, 64, 128), stages, strict=True):
            found = tile_for(kind, n, k, rows, dtype == "fp8", dtype == "fp32")
            assert found == Tile(block_n, block_k, count, warps, splits)
    for rows, tile in MEASURED_QUANTIZED.items():
        assert tile_of_quantized(rows) == Tile(*tile)
    for (rows, fp8), tile in MEASURED_EXPERTS.items():
        assert experts_tile(rows, 8, 128, 2048, fp8=fp8)[0] == Tile(*tile)
