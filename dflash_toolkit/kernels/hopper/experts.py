"""The two GEMMs of a mixture of experts in FP8, each as a persistent kernel that streams its weights (Gluon).

A tile is some rows of one expert, adjacent after `sort_rows`. An item of work is a tile and 256 rows of the expert's
matrix: two blocks of 128, of gates and of the same ups or one after the other. Program i has the items i,
i + programs, ...: one warp loads weights, one loads rows, eight compute. Items take equally long, as the weights of an
expert's further tiles are in L2.

Sums have the instructions and the order of `triton/experts.py`, and the first GEMM quantizes its activated rows by the
rule of `fp8_blocks.py`, so results are batch-invariant and have the same bits as with few rows.
"""

# mypy: disable-error-code="no-untyped-def"
from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..features import features_of
from ..formats import BLOCK, FP8_MAX, LEAST, Operand, QuantizedRows, Weight, format_of, parts, values_of
from ..launch import MAX_ROWS, padded
from ..triton.fp8_blocks import quantize_groups
from .grid import async_sees_memory, grid_launch, grid_wait
from .pipeline import WARPS, programs_of
from .sort_rows import SortedRows, sort_rows

SIDE = gl.constexpr(BLOCK)  # rows and columns of a block of weights, which share a scale
LARGEST, SMALLEST = gl.constexpr(FP8_MAX), gl.constexpr(LEAST)
MOST_ROWS = 2048  # maximum rows, as every program of `sort_rows` reads the experts of all rows
SHARED_BYTES = 225 * 1024  # bytes of the ring buffer and of a tile that is transposed
LEAST_ROWS = 16  # with 8, the kernel for few rows took as long


class Cut(NamedTuple):
    """How the work is cut; results do not depend on it."""

    rows: int  # of a tile
    slots: int  # of the ring buffer
    per_multiprocessor: int = 1  # programs


def cut_for(rows: int, top: int, experts: int) -> Cut:
    """Returns tiles of the rows of an expert when all are chosen equally often; of 64 only if it has more than 48.

    From a sweep on an H200 with the experts of Qwen3.6-35B-A3B, and routing that is even and uneven.
    """
    each = -(-rows * top // experts)
    tile = 64 if each > 48 else min(32, padded(each))
    programs = 2 if tile == 16 else 1
    transposed = (4 if rows <= MAX_ROWS else 1) * BLOCK * tile  # bytes; tiles in 16 bits in parts
    return Cut(tile, (SHARED_BYTES // programs - transposed) // (BLOCK * (2 * BLOCK + tile)), programs)


def experts_fit(x: Operand, gate_up: Weight, down: Weight) -> bool:
    """Returns whether `launch_experts` supports these: block-scaled FP8 on Hopper, bf16 rows, and whole items."""
    values, (_, d, width) = values_of(x), parts(down)[0].shape
    return (
        features_of(values.device).hopper
        and format_of(gate_up).groups_rows
        and values.dtype == torch.bfloat16
        and LEAST_ROWS <= len(x) <= MOST_ROWS
        and d % (2 * BLOCK) == 0
        and width % BLOCK == 0
    )


@gluon.jit
def _item(tile_p, item, ITEMS: gl.constexpr):
    """Returns an item's expert, first pair, number of pairs, and 256 rows of the matrix."""
    p_tile = tile_p + 3 * (item // ITEMS)
    return gl.load(p_tile), gl.load(p_tile + 1), gl.load(p_tile + 2), item % ITEMS


@gluon.jit
def _make_ring(w_d, x_d, T: gl.constexpr, SLOTS: gl.constexpr):
    """Allocates a ring buffer; a slot has two blocks of weights and one of rows. Returns them and their barriers."""
    w_s = gl.allocate_shared_memory(w_d.dtype, [2 * SLOTS, SIDE, SIDE], w_d.layout)
    x_s = gl.allocate_shared_memory(x_d.dtype, [SLOTS, T, SIDE], x_d.layout)
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SLOTS):
        mbarrier.init(full.index(i), count=2)  # the warps that load weights and rows
        mbarrier.init(free.index(i), count=1)
    return w_s, x_s, full, free


@gluon.jit
def _stream_weights(
    w_d, ring, tile_p, count_p, N: gl.constexpr, K: gl.constexpr, FIRST: gl.constexpr, OTHER: gl.constexpr,
    ITEMS: gl.constexpr, SLOTS: gl.constexpr, SWIGLU: gl.constexpr,
):  # fmt: skip
    """The warp that loads weights. The second GEMM's begins before the first GEMM has ended."""
    w_s, full, free = ring[0], ring[2], ring[3]
    if SWIGLU:  # the previous launch writes the tiles
        grid_wait()
    done = gl.to_tensor(0)
    for item in range(gl.program_id(0), gl.load(count_p) * ITEMS, gl.num_programs(0)):
        expert, _first, _rows, i_n = _item(tile_p, item, ITEMS)
        row = expert * N + i_n * FIRST
        for step in range(0, K // SIDE):
            slot = done % SLOTS
            mbarrier.wait(free.index(slot), (done // SLOTS + 1) % 2)
            mbarrier.expect(full.index(slot), 2 * SIDE * SIDE)
            tma.async_copy_global_to_shared(w_d, [row, step * SIDE], full.index(slot), w_s.index(2 * slot))
            tma.async_copy_global_to_shared(w_d, [row + OTHER, step * SIDE], full.index(slot), w_s.index(2 * slot + 1))
            done += 1


@gluon.jit
def _stream_rows(
    x_d, ring, tile_p, count_p, K: gl.constexpr, T: gl.constexpr, ITEMS: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """The warp that loads rows. Rows after the last one of a tile are other experts', and their products unused."""
    x_s, full, free = ring[1], ring[2], ring[3]
    grid_wait()
    async_sees_memory()
    done = gl.to_tensor(0)
    for item in range(gl.program_id(0), gl.load(count_p) * ITEMS, gl.num_programs(0)):
        _expert, first, _rows, _i_n = _item(tile_p, item, ITEMS)
        for step in range(0, K // SIDE):
            slot = done % SLOTS
            mbarrier.wait(free.index(slot), (done // SLOTS + 1) % 2)
            mbarrier.expect(full.index(slot), T * SIDE)
            tma.async_copy_global_to_shared(x_d, [first, step * SIDE], full.index(slot), x_s.index(slot))
            done += 1


@gluon.jit
def _store_activated(b_gate, b_up, data_p, scale_p, first, rows, i_n, WIDTH: gl.constexpr, T: gl.constexpr):
    """Stores silu(gate) * up, quantized, of 128 columns: data [P, WIDTH] and scale [P, WIDTH / 128]."""
    layout: gl.constexpr = b_gate.type.layout
    wide: gl.constexpr = gl.BlockedLayout([8, 1], [16, 2], [1, gl.num_warps()], [0, 1])
    # casts like separate GEMMs would
    gate, up = b_gate.to(gl.bfloat16).to(gl.float32), b_up.to(gl.bfloat16).to(gl.float32)
    silu = (gate / (1.0 + gl.exp(-gate))).to(gl.bfloat16).to(gl.float32)
    b_out = (silu * up).to(gl.bfloat16).to(gl.float32)
    b_most = gl.maximum(gl.max(gl.abs(b_out), axis=0), SMALLEST)
    b_factor = gl.div_rn(gl.full([T], LARGEST, gl.float32, gl.SliceLayout(0, layout)), b_most)
    b_scale = gl.div_rn(b_most, gl.full([T], LARGEST, gl.float32, gl.SliceLayout(0, layout)))
    b_out = gl.minimum(gl.maximum(b_out * b_factor[None, :], -LARGEST), LARGEST).to(gl.float8e4nv)
    b_out = gl.convert_layout(b_out, wide)
    o_t = gl.arange(0, T, gl.SliceLayout(0, wide))
    o_n = i_n * SIDE + gl.arange(0, SIDE, gl.SliceLayout(1, wide))
    gl.store(data_p + (first + o_t)[None, :] * WIDTH + o_n[:, None], b_out, mask=(o_t < rows)[None, :])
    o_t = gl.arange(0, T, gl.SliceLayout(0, layout))
    gl.store(scale_p + (first + o_t) * (WIDTH // SIDE) + i_n, b_scale, mask=o_t < rows)


@gluon.jit
def _store_weighted(
    b_acc, b_weight, p_pair, rows, out_p, i_n, M, N: gl.constexpr, TOP: gl.constexpr, T: gl.constexpr
):  # fmt: skip
    """Stores 128 weighted columns of a tile's pairs to out [TOP, M, N]."""
    wide: gl.constexpr = gl.BlockedLayout([8, 1], [16, 2], [1, gl.num_warps()], [0, 1])
    b_out = gl.convert_layout((b_acc * b_weight[None, :]).to(out_p.dtype.element_ty), wide)
    o_t = gl.arange(0, T, gl.SliceLayout(0, wide))
    b_pair = gl.load(p_pair + o_t, mask=o_t < rows, other=0)  # again: not in registers during the products
    o_row = (b_pair % TOP * M + b_pair // TOP).to(gl.int64)
    o_n = i_n * SIDE + gl.arange(0, SIDE, gl.SliceLayout(1, wide))
    gl.store(out_p + o_row[None, :] * N + o_n[:, None], b_out, mask=(o_t < rows)[None, :])


@gluon.jit
def _scales(expert, first, rows, i_n, o_t, N: gl.constexpr, FIRST: gl.constexpr, STEPS: gl.constexpr):
    """Returns where the scales of an item's rows, of which the last one repeats, and of its first block begin."""
    return (first + gl.minimum(o_t, rows - 1)) * STEPS, (expert * (N // SIDE) + i_n * (FIRST // SIDE)) * STEPS


@gluon.jit
def _compute(
    ring, tile_p, count_p, x_scale_p, w_scale_p, pair_p, weight_p, out_p, out_scale_p, M,
    N: gl.constexpr, K: gl.constexpr, FIRST: gl.constexpr, OTHER: gl.constexpr, ITEMS: gl.constexpr,
    TOP: gl.constexpr, T: gl.constexpr, SLOTS: gl.constexpr, SWIGLU: gl.constexpr,
):  # fmt: skip
    """The warps that compute. Scales are loaded a step before they are needed, also those of the next item."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, T, 32])
    steps: gl.constexpr = K // SIDE
    o_t = gl.arange(0, T, gl.SliceLayout(0, layout))
    w_s, x_s, full, free = ring
    grid_wait()
    grid_launch()
    last = gl.load(count_p) * ITEMS - 1
    expert, first, rows, i_n = _item(tile_p, gl.minimum(gl.program_id(0), last), ITEMS)
    between: gl.constexpr = OTHER // SIDE * steps  # from the scales of an item's first block to those of the other
    o_x, o_0 = _scales(expert, first, rows, i_n, o_t, N, FIRST, steps)
    now, now_0, now_1 = gl.load(x_scale_p + o_x), gl.load(w_scale_p + o_0), gl.load(w_scale_p + o_0 + between)
    done = gl.to_tensor(0)
    for item in range(gl.program_id(0), last + 1, gl.num_programs(0)):
        n_expert, n_first, n_rows, n_n = _item(tile_p, gl.minimum(item + gl.num_programs(0), last), ITEMS)
        n_x, n_0 = _scales(n_expert, n_first, n_rows, n_n, o_t, N, FIRST, steps)
        if not SWIGLU:
            b_pair = gl.load(pair_p + first + gl.minimum(o_t, rows - 1))
            b_weight = gl.load(weight_p + b_pair)
        zeros = gl.zeros([SIDE, T], gl.float32, layout)
        b_0, b_1 = zeros, zeros
        for step in range(0, steps):
            ends = step + 1 == steps
            at_x, at_0 = gl.where(ends, n_x, o_x + step + 1), gl.where(ends, n_0, o_0 + step + 1)
            then = gl.load(x_scale_p + at_x)
            then_0, then_1 = gl.load(w_scale_p + at_0), gl.load(w_scale_p + at_0 + between)
            slot = done % SLOTS
            mbarrier.wait(full.index(slot), done // SLOTS % 2)
            b_x = x_s.index(slot).permute((1, 0))
            d_0 = warpgroup_mma(w_s.index(2 * slot), b_x, zeros, use_acc=False, is_async=True)
            d_1 = warpgroup_mma(w_s.index(2 * slot + 1), b_x, zeros, use_acc=False, is_async=True)
            d_0, d_1 = warpgroup_mma_wait(0, [d_0, d_1])
            mbarrier.arrive(free.index(slot), count=1)
            b_0 = b_0 + d_0 * (now * now_0)[None, :]
            b_1 = b_1 + d_1 * (now * now_1)[None, :]
            now, now_0, now_1 = then, then_0, then_1
            done += 1
        if SWIGLU:
            _store_activated(b_0, b_1, out_p, out_scale_p, first, rows, i_n, N // 2, T)
        else:
            _store_weighted(b_0, b_weight, pair_p + first, rows, out_p, 2 * i_n, M, N, TOP, T)
            _store_weighted(b_1, b_weight, pair_p + first, rows, out_p, 2 * i_n + 1, M, N, TOP, T)
        first, rows, i_n, o_x, o_0 = n_first, n_rows, n_n, n_x, n_0


@gluon.jit(do_not_specialize=["M"])
def hopper_experts_kernel(
    w_d, x_d, tile_p, count_p, x_scale_p, w_scale_p, pair_p, weight_p, out_p, out_scale_p, M,
    N: gl.constexpr, K: gl.constexpr, TOP: gl.constexpr, T: gl.constexpr, SLOTS: gl.constexpr, SWIGLU: gl.constexpr,
):  # fmt: skip
    """Multiplies sorted rows x [P, K] with w [E, N, K].

    SWIGLU: w has all gates, then all ups; stores out fp8 [P, N / 2] and its scales [P, N / 256]. Else stores out
    [TOP, M, N], weighted.
    """
    first: gl.constexpr = SIDE if SWIGLU else 2 * SIDE  # rows between the first blocks of items
    other: gl.constexpr = N // 2 if SWIGLU else SIDE  # rows between the two blocks of an item
    items: gl.constexpr = N // (2 * SIDE)
    ring = _make_ring(w_d, x_d, T, SLOTS)
    gl.warp_specialize(
        [
            (_compute, (
                ring, tile_p, count_p, x_scale_p, w_scale_p, pair_p, weight_p, out_p, out_scale_p, M,
                N, K, first, other, items, TOP, T, SLOTS, SWIGLU,
            )),
            (_stream_weights, (w_d, ring, tile_p, count_p, N, K, first, other, items, SLOTS, SWIGLU)),
            (_stream_rows, (x_d, ring, tile_p, count_p, K, T, items, SLOTS)),
        ],
        [1, 1],
        [40, 40],
    )  # fmt: skip


def _blocks(matrix: Tensor, rows: int) -> TensorDescriptor:
    block = [rows, BLOCK]
    return TensorDescriptor.from_tensor(matrix, block, gl.NVMMASharedLayout.get_default_for(block, gl.float8e4nv))


def _multiply_tiles(
    rows: SortedRows, matrices: Weight, weights: Tensor, top: int, out: Tensor, out_scale: Tensor, cut: Cut,
    *, swiglu: bool,
) -> None:  # fmt: skip
    """One GEMM of all experts [E, N, K] with their rows."""
    data, scale = parts(matrices)
    _, n, k = data.shape
    limit = {"maxnreg": 80} if cut.per_multiprocessor > 1 else {}
    hopper_experts_kernel[(cut.per_multiprocessor * programs_of(data.device.index),)](
        _blocks(data.flatten(0, 1), BLOCK), _blocks(rows.data, cut.rows), rows.tiles, rows.total,
        rows.scale, scale, rows.pairs, weights, out, out_scale, len(weights),
        N=n, K=k, TOP=top, T=cut.rows, SLOTS=cut.slots, SWIGLU=swiglu,
        num_warps=WARPS, launch_pdl=True, **limit,
    )  # fmt: skip


def launch_experts(
    x: Operand, gate_up: Weight, down: Weight, weights: Tensor, experts: Tensor, cut: Cut | None = None
) -> Tensor:
    """Computes `experts_mlp`. Needs `experts_fit`."""
    (rows, top), (count, d, width), values = experts.shape, parts(down)[0].shape, values_of(x)
    cut = cut or cut_for(rows, top, count)
    data, scale = (x.data, x.scale) if isinstance(x, QuantizedRows) else quantize_groups(values)
    ordered = sort_rows(data, scale, experts, count, cut.rows)
    active = data.new_empty(rows * top, width), scale.new_empty(rows * top, width // BLOCK)
    _multiply_tiles(ordered, gate_up, weights, top, *active, cut, swiglu=True)
    out = values.new_empty(top, rows, d, dtype=torch.float32 if rows <= MAX_ROWS else values.dtype)
    _multiply_tiles(ordered._replace(data=active[0], scale=active[1]), down, weights, top, out, out, cut, swiglu=False)
    return out
