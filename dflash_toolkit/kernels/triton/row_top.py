"""The largest logits of stored rows, in Triton: one program per row, which is read once, or per tile of a row.

A lane keeps the largest of its logits. The `count` largest logits of a row are in the `count` lanes with the largest
maxima, so only these are read again. With tiles, the columns of a row may arrive in parts.
"""

# mypy: disable-error-code="no-untyped-def"
import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import next_power_of_two, pdl
from ..loss_terms import PLAIN, LogitScale
from .argmax import merge_lse, merge_top, ordered, scale_logits, tile_key
from .pdl import start_next, wait_for_previous

LANES = 2048  # columns at a time
TILE = 8192  # columns of a program if there are few rows; a 16-bit value leaves 13 bits of int32 for the column
TILE_LANES = 1024  # lanes of a tile; a thread loads 16 bytes at a time


@triton.jit(do_not_specialize=["V"])
def _row_top_kernel(
    logits_p, values_p, columns_p, V, stride,
    COUNT: tl.constexpr, C_BLOCK: tl.constexpr, LANES: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    p_row = logits_p + row * stride
    o_lane, o_c = tl.arange(0, LANES), tl.arange(0, C_BLOCK)
    b_top = tl.full([LANES], -float("inf"), dtype=tl.float32)
    for start in range(0, V, LANES):
        b_x = tl.load(p_row + start + o_lane, mask=start + o_lane < V, other=-float("inf")).to(tl.float32)
        b_top = tl.where(b_x > b_top, b_x, b_top)  # a NaN is never larger
    b_lanes = tl.zeros([C_BLOCK], dtype=tl.int32)
    for i in range(COUNT):
        best = tl.max(b_top, axis=0)
        lane = tl.min(tl.where(b_top == best, o_lane, LANES), axis=0)
        b_lanes = tl.where(o_c == i, lane, b_lanes)
        b_top = tl.where(o_lane == lane, -float("inf"), b_top)

    o_v = b_lanes[:, None] + tl.arange(0, PIECES)[None, :] * LANES
    b_x = tl.load(p_row + o_v, mask=(o_c < COUNT)[:, None] & (o_v < V), other=-float("inf")).to(tl.float32)
    b_x = tl.where(b_x == b_x, b_x, -float("inf"))
    b_values = tl.zeros([C_BLOCK], dtype=tl.float32)
    b_columns = tl.zeros([C_BLOCK], dtype=tl.int32)
    for i in range(COUNT):
        best = tl.max(tl.max(b_x, axis=1), axis=0)
        column = tl.min(tl.min(tl.where(b_x == best, o_v, V), axis=1), axis=0)
        b_values = tl.where(o_c == i, best, b_values)
        b_columns = tl.where(o_c == i, column, b_columns)
        b_x = tl.where(o_v == column, -float("inf"), b_x)
    tl.store(values_p + row * COUNT + o_c, b_values, mask=o_c < COUNT)
    tl.store(columns_p + row * COUNT + o_c, b_columns.to(tl.int64), mask=o_c < COUNT)


def row_top(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Returns the `count` largest logits of each row of [R, V], fp32 [R, count], and their columns."""
    rows, vocabulary = logits.shape
    values = torch.empty(rows, count, dtype=torch.float32, device=logits.device)
    columns = torch.empty(rows, count, dtype=torch.int64, device=logits.device)
    lanes = min(LANES, next_power_of_two(vocabulary))
    _row_top_kernel[(rows,)](
        logits, values, columns, vocabulary, logits.stride(0),
        COUNT=count, C_BLOCK=next_power_of_two(count), LANES=lanes,
        PIECES=next_power_of_two(-(-vocabulary // lanes)), num_warps=4,
    )  # fmt: skip
    return values, columns


@triton.jit(do_not_specialize=["M", "first"])
def _tile_top_kernel(
    logits_p, keys_p, counts_p, tops_p, sums_p, M, V, stride, first, multiplier, cap,
    COUNT: tl.constexpr, C_BLOCK: tl.constexpr, TILE: tl.constexpr, LANES: tl.constexpr, WIDE: tl.constexpr,
    LSE: tl.constexpr, CAPPED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Computes the largest of TILE columns of a row as keys, largest first: keys [tiles, COUNT, M], counts [tiles].

    The logits [M, V] are a part of all columns, from tile `first` on. A tile with fewer than COUNT columns is filled
    with values below every key.

    LSE: also computes the largest logit after `multiplier` (and the cap) and the sum of exponentials relative to it,
    tops, sums [tiles, M].
    """
    i_m, i_t = tl.program_id(0), tl.program_id(1)
    tile = first + i_t
    p_tile, rest = logits_p + i_m.to(tl.int64) * stride + i_t * TILE, V - i_t * TILE
    o_lane, o_c = tl.arange(0, LANES), tl.arange(0, C_BLOCK)
    lowest = tl.full([], -(2**63), dtype=tl.int64) if WIDE else tl.full([], -(2**31), dtype=tl.int32)
    b_most = tl.full([LANES], -float("inf"), dtype=tl.float32)
    b_column = o_lane
    wait_for_previous(PDL)
    for start in tl.static_range(0, TILE, LANES):
        b_x = tl.load(p_tile + start + o_lane, mask=start + o_lane < rest, other=-float("inf")).to(tl.float32)
        larger = b_x > b_most  # false for NaN and for later tied values
        b_column = tl.where(larger, start + o_lane, b_column)
        b_most = tl.where(larger, b_x, b_most)
    start_next(PDL)
    if LSE:
        most = scale_logits(tl.max(b_most, axis=0), multiplier, cap, CAPPED)
        base = tl.where(most == -float("inf"), 0.0, most)
        b_sum = tl.zeros([LANES], dtype=tl.float32)
        for start in tl.static_range(0, TILE, LANES):
            b_x = tl.load(p_tile + start + o_lane, mask=start + o_lane < rest, other=-float("inf"))
            b_exp = tl.exp(scale_logits(b_x, multiplier, cap, CAPPED) - base)
            b_sum += tl.where(start + o_lane < rest, b_exp, 0.0)
        tl.store(tops_p + tile * M + i_m, most)
        tl.store(sums_p + tile * M + i_m, tl.sum(b_sum, axis=0))
    b_top = tl.where(o_lane < rest, tile_key(ordered(b_most), tile * TILE, b_column, TILE, WIDE), lowest)
    b_lane = tl.zeros([C_BLOCK], dtype=tl.int32)
    for i in range(COUNT):
        top = tl.max(b_top, axis=0)
        lane = LANES - 1 - (top & (LANES - 1)).to(tl.int32)  # a key's lowest bits are the inverted bits of its column
        b_lane = tl.where(o_c == i, lane, b_lane)
        b_top = tl.where(b_top == top, lowest, b_top)

    o_n = b_lane[:, None] + tl.arange(0, TILE // LANES)[None, :] * LANES
    mask = (o_c < COUNT)[:, None] & (o_n < rest)
    b_x = tl.load(p_tile + o_n, mask=mask, other=-float("inf"))
    b_key = tl.where(mask, tile_key(ordered(b_x), tile * TILE, o_n, TILE, WIDE), lowest)
    b_key = tl.reshape(b_key, [C_BLOCK * (TILE // LANES)])
    b_found = tl.zeros([C_BLOCK], dtype=b_key.dtype)
    for i in range(COUNT):
        top = tl.max(b_key, axis=0)
        b_found = tl.where(o_c == i, top, b_found)
        b_key = tl.where(b_key == top, lowest, b_key)
    tl.store(keys_p + (tile.to(tl.int64) * COUNT + o_c) * M + i_m, b_found, mask=o_c < COUNT)
    tl.store(counts_p + tile, COUNT, mask=i_m == 0)


class PartTops:
    """The `count` largest logits of each row. Its `columns` come in parts of whole tiles.

    Args:
        dtype: dtype of the logits.
        scale: scale of the logits; if given, the log-sum-exp is also computed.
    """

    def __init__(
        self, rows: int, columns: int, count: int, dtype: torch.dtype, device: torch.device, scale: LogitScale | None
    ) -> None:
        tiles, self._scale = -(-columns // TILE), scale
        number = torch.int64 if dtype == torch.float32 else torch.int32
        self._keys = torch.empty(tiles, count, rows, dtype=number, device=device)
        self._counts = torch.empty(tiles, dtype=torch.int32, device=device)
        self._tops, self._sums = torch.empty(2, tiles, rows, dtype=torch.float32, device=device)

    def take(self, logits: Tensor, start: int) -> None:
        """Adds the part [M, V] from column `start` on, a multiple of TILE. The caller may then free it."""
        (rows, columns), count = logits.shape, self._keys.shape[1]
        scale = self._scale or PLAIN
        _tile_top_kernel[(rows, -(-columns // TILE))](
            logits, self._keys, self._counts, self._tops, self._sums, rows, columns, logits.stride(0), start // TILE,
            scale.multiplier, scale.cap or 1.0,
            COUNT=count, C_BLOCK=next_power_of_two(count), TILE=TILE, LANES=TILE_LANES,
            WIDE=self._keys.dtype == torch.int64, LSE=self._scale is not None, CAPPED=scale.cap is not None,
            num_warps=4, **pdl(logits),
        )  # fmt: skip

    def merged(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Returns logits fp32 [M, count], columns int64 [M, count] and the log-sum-exp fp32 [M] after the scale."""
        values, ids = merge_top(self._keys, self._counts, TILE)
        if self._scale is None:
            return values, ids, None
        self._scale.apply_(values)
        return values, ids, merge_lse(self._tops, self._sums)
