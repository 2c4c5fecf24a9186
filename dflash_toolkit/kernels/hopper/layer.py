"""A decoder layer from its attention to the next layer's queries, keys and values, as one persistent kernel (Gluon).

Four GEMMs stream their weights through a ring of shared memory: o, gate and up, down, and the next layer's qkv.
Between them are two norms and five barriers over the whole grid. Weights do not depend on other programs, so the ring
fills with the next GEMM's weights while a program waits, and launches, barriers and norms hardly interrupt the loads.
One program runs on every multiprocessor, all at once; the warp that loads its rows waits at the barriers through
`ready`.

A GEMM's tiles and splits are fixed by its (N, K), and every row count uses the same matrix instruction over K in
the same order, so results are batch-invariant.

With matrices in fp8 the rows are also in fp8. Rows of attention are scaled by their largest value. The others are cast:
rows after a norm are of the order of one (see `LayerWeights.quantized`), and no program has a whole activated row.
"""

# mypy: disable-error-code="no-untyped-def"
import functools

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ..formats import FP8_MAX, Weight, is_row_scaled, parts
from ..launch import next_power_of_two, padded
from ..triton.fp8 import quantize_rows
from .grid import async_sees_memory, grid_launch, grid_wait, join, stamp
from .pipeline import (
    BLOCK_N,
    WARPS,
    accumulate,
    block_k,
    blocks_of,
    layout_of,
    make_rings,
    programs_of,
    slots_of,
    steps_of,
    stream,
    wide_of,
)

FP8_LARGEST = gl.constexpr(FP8_MAX)
BARRIERS = 5  # grid barriers of a layer
PHASES = (  # the phase that ends at each stamp of a trace; a barrier ends when all programs have arrived
    "start", "o", "barrier", "norm", "barrier", "gate and up", "barrier", "down", "barrier", "norm", "barrier", "qkv",
)  # fmt: skip


@gluon.jit
def _gemm(
    rings, w_done, x_done, scale_p, out_p, M,
    TILES: gl.constexpr, SPLITS: gl.constexpr, K: gl.constexpr, WIDE: gl.constexpr, SWIGLU: gl.constexpr,
    SCALED: gl.constexpr, T: gl.constexpr, SLOTS: gl.constexpr, ROW_SLOTS: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
):  # fmt: skip
    """Computes one GEMM from the rings, WIDE tiles at a time. Returns the numbers of blocks of weights and of rows.

    SWIGLU: stores [M, N / 2], and SPLITS is 1; else stores fp32 partial sums [SPLITS, M, N]. SCALED: times scale [N].
    """
    groups: gl.constexpr = TILES // WIDE
    N: gl.constexpr = TILES * BLOCK_N
    iters: gl.constexpr = steps_of(K, SPLITS, BLOCK_K)
    o_n = gl.arange(0, BLOCK_N, gl.SliceLayout(1, layout_of(T, BLOCK_K, gl.num_warps())))
    for item in range(gl.program_id(0), groups * SPLITS, gl.num_programs(0)):
        tile = (item % groups) * WIDE
        if SCALED:  # loaded long before they are needed, with a mask after the last tile
            p_scale = scale_p + tile * BLOCK_N + o_n
            s_0 = gl.load(p_scale)
            s_1 = gl.load(p_scale + BLOCK_N, mask=o_n < (WIDE - 1) * BLOCK_N, other=0.0)
            s_2 = gl.load(p_scale + 2 * BLOCK_N, mask=o_n < (WIDE - 2) * BLOCK_N, other=0.0)
        b_0, b_1, b_2, w_done, x_done = accumulate(
            rings, w_done, x_done, iters, WIDE, T, SLOTS, ROW_SLOTS, BLOCK_N, BLOCK_K
        )
        if SCALED:
            b_0, b_1, b_2 = b_0 * s_0[:, None], b_1 * s_1[:, None], b_2 * s_2[:, None]
        p_out = out_p + (item // groups) * M * N
        _store(b_0, p_out, tile, M, N, SWIGLU, T, BLOCK_N)
        if WIDE > 1:
            _store(b_1, p_out, tile + 1, M, N, SWIGLU, T, BLOCK_N)
        if WIDE > 2:
            _store(b_2, p_out, tile + 2, M, N, SWIGLU, T, BLOCK_N)
    return w_done, x_done


@gluon.jit
def _cast(b, dtype: gl.constexpr):
    """Casts values to an operand's format; in fp8, values outside its range become its largest."""
    if dtype == gl.float8e4nv:
        b = gl.minimum(gl.maximum(b.to(gl.float32), -FP8_LARGEST), FP8_LARGEST)
    return b.to(dtype)


@gluon.jit
def _store(b_acc, out_p, tile, M, N: gl.constexpr, SWIGLU: gl.constexpr, T: gl.constexpr, BLOCK_N: gl.constexpr):
    """Stores a finished tile [BLOCK_N, T] to its columns of out."""
    if SWIGLU:
        wide: gl.constexpr = gl.BlockedLayout([2, 1], [32, 1], [1, gl.num_warps()], [0, 1])
        half: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [1, gl.num_warps()], [0, 1])
        b_out = gl.convert_layout(b_acc.to(gl.bfloat16), wide)
        gate, up = gl.split(gl.permute(gl.reshape(b_out, [BLOCK_N // 2, 2, T]), (0, 2, 1)))
        gate, up = gate.to(gl.float32), up.to(gl.float32)
        silu = (gate / (1.0 + gl.exp(-gate))).to(gl.bfloat16).to(gl.float32)
        b_half = gl.convert_layout(_cast(silu * up, out_p.dtype.element_ty), half)
        o_h = tile * (BLOCK_N // 2) + gl.arange(0, BLOCK_N // 2, gl.SliceLayout(1, half))
        o_m = gl.arange(0, T, gl.SliceLayout(0, half))
        mask = (o_m < M)[None, :] & (o_h < N // 2)[:, None]
        gl.store(out_p + o_m[None, :] * (N // 2) + o_h[:, None], b_half, mask=mask)
    else:
        o_n = tile * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(1, b_acc.type.layout))
        o_m = gl.arange(0, T, gl.SliceLayout(0, b_acc.type.layout))
        gl.store(out_p + o_m[None, :] * N + o_n[:, None], b_acc, mask=(o_m < M)[None, :] & (o_n < N)[:, None])


@gluon.jit
def _row(x_p, w_p, M, D: gl.constexpr, BLOCK: gl.constexpr):
    """Loads this program's row of the residual stream and the norm's weight before they are needed."""
    layout: gl.constexpr = gl.BlockedLayout([8], [32], [gl.num_warps()], [0])
    i_m = gl.num_programs(0) - 1 - gl.program_id(0)  # the last programs have the fewest tiles
    o_d = gl.arange(0, BLOCK, layout)
    mask = (o_d < D) & (i_m < M)
    return gl.load(x_p + i_m * D + o_d, mask=mask, other=0.0), gl.load(w_p + o_d, mask=mask, other=0.0)


@gluon.jit
def _norm(
    b_x, b_w, part_p, scale_p, sum_p, h_p, tap_p, stride_tap, M, eps,
    D: gl.constexpr, SPLITS: gl.constexpr, BLOCK: gl.constexpr, SCALED: gl.constexpr, TAP: gl.constexpr,
):  # fmt: skip
    """Computes one row of the residual stream: adds the partial sums, stores it, norms it; like `norm.py`.

    SCALED: the sums are multiplied by the scales of the rows [M].
    """
    layout: gl.constexpr = b_x.type.layout
    i_m = gl.num_programs(0) - 1 - gl.program_id(0)
    if i_m < M:
        o_d = gl.arange(0, BLOCK, layout)
        mask = o_d < D
        b_sum = gl.zeros([BLOCK], gl.float32, layout)
        for i in gl.static_range(SPLITS):
            b_sum += gl.load(part_p + (i * M + i_m) * D + o_d, mask=mask, other=0.0)
        if SCALED:
            b_sum *= gl.load(scale_p + i_m)
        b_x = (b_x.to(gl.float32) + b_sum).to(b_x.dtype)
        gl.store(sum_p + i_m * D + o_d, b_x, mask=mask)
        if TAP:
            gl.store(tap_p + i_m * stride_tap + o_d, b_x, mask=mask)
        b_wide = b_x.to(gl.float32)
        scale = gl.rsqrt(gl.sum(b_wide * b_wide, axis=0) / D + eps)
        b_h = (b_wide * scale).to(b_x.dtype) * b_w
        gl.store(h_p + i_m * D + o_d, _cast(b_h, h_p.dtype.element_ty), mask=mask)


@gluon.jit
def _compute(
    rings, ready, scales, x_p, post_p, next_p, part_p, sum_p, h_p, next_h_p, act_p, qkv_p, tap_p, sync_p, trace_p,
    M, stride_tap, eps,
    D: gl.constexpr, A: gl.constexpr, FFN: gl.constexpr, QKV: gl.constexpr,
    O_SPLITS: gl.constexpr, DOWN_SPLITS: gl.constexpr, QKV_SPLITS: gl.constexpr,
    GATE_WIDE: gl.constexpr, QKV_WIDE: gl.constexpr, BLOCK_D: gl.constexpr,
    T: gl.constexpr, SLOTS: gl.constexpr, ROW_SLOTS: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    SCALED: gl.constexpr, TAP: gl.constexpr, BARRIERS: gl.constexpr, PHASES: gl.constexpr,
):  # fmt: skip
    """The warps that compute; `ready` signals for three GEMMs that all programs have written their inputs."""
    o_tiles: gl.constexpr = D // BLOCK_N
    grid_wait()
    stamp(trace_p, 0, PHASES)
    if gl.program_id(0) == 0:  # no program passes barrier 0 before this one arrives
        for i in gl.static_range(1, BARRIERS):
            gl.store(sync_p + i, 0)
    w_done, x_done = _gemm(
        rings, gl.to_tensor(0), gl.to_tensor(0), scales[1], part_p, M, o_tiles, O_SPLITS, A, 1,
        False, SCALED, T, SLOTS, ROW_SLOTS, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    stamp(trace_p, 1, PHASES)
    b_x, b_w = _row(x_p, post_p, M, D, BLOCK_D)
    join(sync_p, False)
    stamp(trace_p, 2, PHASES)
    _norm(b_x, b_w, part_p, scales[0], sum_p, h_p, tap_p, stride_tap, M, eps, D, O_SPLITS, BLOCK_D, SCALED, False)
    stamp(trace_p, 3, PHASES)
    join(sync_p + 1, True)
    mbarrier.arrive(ready.index(0), count=1)
    stamp(trace_p, 4, PHASES)
    if gl.program_id(0) == 0:  # no program waits at it any more
        gl.store(sync_p, 0)
    w_done, x_done = _gemm(
        rings, w_done, x_done, scales[2], act_p, M, 2 * FFN // BLOCK_N, 1, D, GATE_WIDE,
        True, SCALED, T, SLOTS, ROW_SLOTS, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    stamp(trace_p, 5, PHASES)
    join(sync_p + 2, True)
    mbarrier.arrive(ready.index(1), count=1)
    stamp(trace_p, 6, PHASES)
    w_done, x_done = _gemm(
        rings, w_done, x_done, scales[3], part_p, M, o_tiles, DOWN_SPLITS, FFN, 1,
        False, SCALED, T, SLOTS, ROW_SLOTS, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    stamp(trace_p, 7, PHASES)
    b_x, b_w = _row(sum_p, next_p, M, D, BLOCK_D)  # as this program stored it
    join(sync_p + 3, False)
    stamp(trace_p, 8, PHASES)
    grid_launch()
    _norm(b_x, b_w, part_p, part_p, sum_p, next_h_p, tap_p, stride_tap, M, eps, D, DOWN_SPLITS, BLOCK_D, False, TAP)
    if QKV > 0:
        stamp(trace_p, 9, PHASES)
        join(sync_p + 4, True)
        mbarrier.arrive(ready.index(2), count=1)
        stamp(trace_p, 10, PHASES)
        _gemm(
            rings, w_done, x_done, scales[4], qkv_p, M, QKV // BLOCK_N, QKV_SPLITS, D, QKV_WIDE,
            False, SCALED, T, SLOTS, ROW_SLOTS, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        stamp(trace_p, 11, PHASES)


@gluon.jit
def _stream_weights(
    o_d, gate_up_d, down_d, qkv_d, rings,
    D: gl.constexpr, A: gl.constexpr, FFN: gl.constexpr, QKV: gl.constexpr,
    O_SPLITS: gl.constexpr, DOWN_SPLITS: gl.constexpr, QKV_SPLITS: gl.constexpr,
    GATE_WIDE: gl.constexpr, QKV_WIDE: gl.constexpr,
    SLOTS: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
):  # fmt: skip
    """The warp that loads weights."""
    w_s, full, free = rings[0], rings[1], rings[2]
    o_tiles: gl.constexpr = D // BLOCK_N
    done = stream(
        o_d, w_s, full, free, gl.to_tensor(0), o_tiles, O_SPLITS, A, 1,
        True, SLOTS, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    done = stream(gate_up_d, w_s, full, free, done, 2 * FFN // BLOCK_N, 1, D, GATE_WIDE, True, SLOTS, BLOCK_N, BLOCK_K)
    done = stream(
        down_d, w_s, full, free, done, o_tiles, DOWN_SPLITS, FFN, 1,
        True, SLOTS, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    if QKV > 0:
        stream(
            qkv_d, w_s, full, free, done, QKV // BLOCK_N, QKV_SPLITS, D, QKV_WIDE,
            True, SLOTS, BLOCK_N, BLOCK_K,
        )  # fmt: skip


@gluon.jit
def _stream_rows(
    a_d, h_d, act_d, rings, ready,
    D: gl.constexpr, A: gl.constexpr, FFN: gl.constexpr, QKV: gl.constexpr,
    O_SPLITS: gl.constexpr, DOWN_SPLITS: gl.constexpr, QKV_SPLITS: gl.constexpr,
    GATE_WIDE: gl.constexpr, QKV_WIDE: gl.constexpr,
    T: gl.constexpr, ROW_SLOTS: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
):  # fmt: skip
    """The warp that loads the rows of a GEMM, after all programs have written them."""
    x_s, full, free = rings[3], rings[4], rings[5]
    o_tiles: gl.constexpr = D // BLOCK_N
    grid_wait()
    done = stream(
        a_d, x_s, full, free, gl.to_tensor(0), o_tiles, O_SPLITS, A, 1,
        False, ROW_SLOTS, T, BLOCK_K,
    )  # fmt: skip
    mbarrier.wait(ready.index(0), 0)
    async_sees_memory()
    done = stream(h_d, x_s, full, free, done, 2 * FFN // BLOCK_N, 1, D, GATE_WIDE, False, ROW_SLOTS, T, BLOCK_K)
    mbarrier.wait(ready.index(1), 0)
    async_sees_memory()
    done = stream(
        act_d, x_s, full, free, done, o_tiles, DOWN_SPLITS, FFN, 1,
        False, ROW_SLOTS, T, BLOCK_K,
    )  # fmt: skip
    if QKV > 0:
        mbarrier.wait(ready.index(2), 0)
        async_sees_memory()
        stream(
            h_d, x_s, full, free, done, QKV // BLOCK_N, QKV_SPLITS, D, QKV_WIDE,
            False, ROW_SLOTS, T, BLOCK_K,
        )  # fmt: skip


@gluon.jit(do_not_specialize=["M", "stride_tap"])
def layer_kernel(
    o_d, gate_up_d, down_d, qkv_d, a_d, h_d, act_d,
    a_scale_p, o_scale_p, gate_up_scale_p, down_scale_p, qkv_scale_p,
    x_p, post_p, next_p, part_p, sum_p, h_p, next_h_p, act_p, qkv_p, tap_p, sync_p, trace_p,
    M, stride_tap, eps,
    D: gl.constexpr, A: gl.constexpr, FFN: gl.constexpr, QKV: gl.constexpr,
    O_SPLITS: gl.constexpr, DOWN_SPLITS: gl.constexpr, QKV_SPLITS: gl.constexpr,
    GATE_WIDE: gl.constexpr, QKV_WIDE: gl.constexpr, BLOCK_D: gl.constexpr,
    T: gl.constexpr, SLOTS: gl.constexpr, ROW_SLOTS: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    SCALED: gl.constexpr, TAP: gl.constexpr, BARRIERS: gl.constexpr, PHASES: gl.constexpr,
):  # fmt: skip
    """Computes sum [M, D] and its norm next_h [M, D] from a [M, A] and the residual stream x [M, D].

    QKV > 0: next_h is h; also computes partial sums of its qkv, fp32 [QKV_SPLITS, M, QKV].
    """
    scales = (a_scale_p, o_scale_p, gate_up_scale_p, down_scale_p, qkv_scale_p)
    rings = make_rings(o_d, a_d, T, SLOTS, ROW_SLOTS, BLOCK_N, BLOCK_K)
    # one barrier each: a program without tiles may arrive at two before the warp of its rows has read the first
    ready = gl.allocate_shared_memory(gl.int64, [3, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(3):
        mbarrier.init(ready.index(i), count=1)
    gl.warp_specialize(
        [
            (_compute, (
                rings, ready, scales, x_p, post_p, next_p, part_p, sum_p, h_p, next_h_p, act_p, qkv_p, tap_p, sync_p,
                trace_p, M, stride_tap, eps, D, A, FFN, QKV, O_SPLITS, DOWN_SPLITS, QKV_SPLITS, GATE_WIDE, QKV_WIDE,
                BLOCK_D, T, SLOTS, ROW_SLOTS, BLOCK_N, BLOCK_K, SCALED, TAP, BARRIERS, PHASES,
            )),
            (_stream_weights, (
                o_d, gate_up_d, down_d, qkv_d, rings, D, A, FFN, QKV,
                O_SPLITS, DOWN_SPLITS, QKV_SPLITS, GATE_WIDE, QKV_WIDE, SLOTS, BLOCK_N, BLOCK_K,
            )),
            (_stream_rows, (
                a_d, h_d, act_d, rings, ready, D, A, FFN, QKV,
                O_SPLITS, DOWN_SPLITS, QKV_SPLITS, GATE_WIDE, QKV_WIDE, T, ROW_SLOTS, BLOCK_N, BLOCK_K,
            )),
        ],
        [1, 1],  # warps that load weights, and rows
        [40, 40],  # their registers
    )  # fmt: skip


@functools.cache
def _barriers(device: int) -> Tensor:
    """Returns counters; a launch leaves the first at zero and resets the others. A device runs one launch at a time."""
    return torch.zeros(BARRIERS, dtype=torch.int32, device=torch.device("cuda", device))


def splits_of(n: int, k: int, block: int, programs: int) -> int:
    """Returns the splits of a GEMM before a norm: those with the fewest blocks and at most one tile per program."""
    most = max(1, programs // -(-n // BLOCK_N))
    return min(range(1, min(most, 8) + 1), key=lambda s: steps_of(k, s, block))


def even_splits_of(n: int, k: int, block: int, programs: int) -> int:
    """Returns the splits of a GEMM before another kernel: the fewest with the fewest blocks in the busiest program."""
    tiles = -(-n // BLOCK_N)
    return min(range(1, 9), key=lambda s: -(-tiles * s // programs) * steps_of(k, s, block))


def launch_layer(
    x: Tensor,
    a: Tensor,
    o: Weight,
    post_norm: Tensor,
    gate_up: Weight,
    down: Weight,
    norm: Tensor,
    qkv: Weight | None,
    eps: float,
    tap: Tensor | None = None,
    trace: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Computes `fused_post_attention` in one launch, with another to quantize `a` for matrices in fp8. Needs `fits`.

    If `qkv` is in fp8, the returned norm is also in fp8.

    Args:
        trace: int64 [programs, len(PHASES)], receives the end of each phase of each program, in ns; needs `qkv`.
    """
    (m, d), width, ffn = x.shape, a.shape[1], len(gate_up) // 2
    device, block, quantized = x.device.index, block_k(o), is_row_scaled(o)
    programs = programs_of(device)
    o_splits, down_splits = splits_of(d, width, block, programs), splits_of(d, ffn, block, programs)
    qkv_splits = 1 if qkv is None else even_splits_of(len(qkv), d, block, programs)
    rows = padded(m)
    slots = slots_of(rows)
    operand = quantize_rows(a) if quantized else a
    dtype = torch.float8_e4m3fn if quantized else x.dtype

    sums = torch.empty(max(o_splits, down_splits), m, d, dtype=torch.float32, device=x.device)
    total, normed = torch.empty_like(x), torch.empty_like(x, dtype=dtype)
    last = normed if qkv is not None else torch.empty_like(x)
    active = torch.empty(m, ffn, dtype=dtype, device=x.device)
    out = None if qkv is None else torch.empty(qkv_splits, m, len(qkv), dtype=torch.float32, device=x.device)
    matrices = (o, gate_up, down, o if qkv is None else qkv)
    scales = (x if scale is None else scale for _, scale in map(parts, (operand, *matrices)))
    layer_kernel[(programs,)](
        *(blocks_of(matrix, BLOCK_N) for matrix in matrices),
        *(blocks_of(each, rows) for each in (operand, normed, active)),
        *scales,
        x, post_norm, norm, sums, total, normed, last, active,
        sums if out is None else out, x if tap is None else tap, _barriers(device),
        x if trace is None else trace,
        m, 0 if tap is None else tap.stride(0), eps,
        D=d, A=width, FFN=ffn, QKV=0 if qkv is None else len(qkv), O_SPLITS=o_splits, DOWN_SPLITS=down_splits,
        QKV_SPLITS=qkv_splits, GATE_WIDE=wide_of(len(gate_up) // BLOCK_N, 1, rows, programs),
        QKV_WIDE=1 if qkv is None else wide_of(len(qkv) // BLOCK_N, qkv_splits, rows, programs),
        BLOCK_D=next_power_of_two(d), T=rows, SLOTS=slots.weights, ROW_SLOTS=slots.rows,
        BLOCK_N=BLOCK_N, BLOCK_K=block, SCALED=quantized, TAP=tap is not None, BARRIERS=BARRIERS,
        PHASES=0 if trace is None else len(PHASES), num_warps=WARPS, launch_pdl=True,
    )  # fmt: skip
    return total, last, out
