"""The largest logits of stored rows, in Triton: one program a row, which is read once.

A lane keeps the largest of the logits that pass through it. The largest of the row are in the lanes with the largest
ones, so the second look is at as many lanes as logits are wanted.
"""

# mypy: disable-error-code="no-untyped-def"
import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import next_power_of_two

LANES = 2048  # columns at a time


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
    """The `count` largest logits of each row of [R, V], fp32 [R, count], and their columns; see the reference."""
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
