"""A decoder layer from its attention to the next layer's queries, keys and values, as one persistent kernel (Gluon).

Four products stream their weights through one ring of shared memory: o, gate and up, down, and the next layer's qkv.
Between them stand two norms and five barriers over the whole grid. Weights depend on no other program, so the ring
keeps filling with the next product's while a program waits: launches, barriers and norms cost little of the time in
which memory could deliver. One program runs on every multiprocessor, all at once.

A product's tiles and splits are fixed by its (N, K), and every row count uses the same matrix instruction over K in
the same order, so a row's result does not depend on how many rows run beside it.
"""

# mypy: disable-error-code="no-untyped-def"
import functools

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .grid import grid_launch, grid_wait, join, stamp, threads_meet
from .launch import next_power_of_two
from .scaled import Matrix, ScaledMatrix

MAX_ROWS = 128
BLOCK_N = 64  # weight rows of a tile: the matrix instruction's
BLOCK_K = 128
SHARED_BYTES = 200 * 1024  # of the ring; some is left for turning a tile
BARRIERS = 5  # of the grid, a layer
PHASES = (  # what ends at each stamp of a trace; a barrier ends when all programs have come to it
    "start", "o", "barrier", "norm", "barrier", "gate and up", "barrier", "down", "barrier", "norm", "barrier", "qkv",
)  # fmt: skip


@gluon.jit
def _blocks(TILES: gl.constexpr, SPLITS: gl.constexpr, ITERS: gl.constexpr):
    """How many blocks of K this program walks through in a product."""
    items = gl.maximum(TILES * SPLITS - gl.program_id(0) + gl.num_programs(0) - 1, 0) // gl.num_programs(0)
    return items * ITERS


@gluon.jit
def _load_weight(
    w_d, w_s, w_bar, slot, j, TILES: gl.constexpr, ITERS: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
):  # fmt: skip
    """Ask for the weight of this program's j-th block."""
    item = gl.program_id(0) + (j // ITERS) * gl.num_programs(0)
    k = ((item // TILES) * ITERS + j % ITERS) * BLOCK_K
    mbarrier.expect(w_bar.index(slot), BLOCK_N * BLOCK_K * 2)
    tma.async_copy_global_to_shared(w_d, [(item % TILES) * BLOCK_N, k], w_bar.index(slot), w_s.index(slot))


@gluon.jit
def _load_rows(
    x_d, x_s, x_bar, slot, j, TILES: gl.constexpr, ITERS: gl.constexpr, T: gl.constexpr, BLOCK_K: gl.constexpr
):
    item = gl.program_id(0) + (j // ITERS) * gl.num_programs(0)
    k = ((item // TILES) * ITERS + j % ITERS) * BLOCK_K
    mbarrier.expect(x_bar.index(slot), T * BLOCK_K * 2)
    tma.async_copy_global_to_shared(x_d, [0, k], x_bar.index(slot), x_s.index(slot))


@gluon.jit
def _first_weights(
    w_d, w_s, w_bar, done, room, TILES: gl.constexpr, SPLITS: gl.constexpr, ITERS: gl.constexpr,
    STAGES: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
):  # fmt: skip
    """Ask for a product's first weights as far as `room` slots of the ring, from block `done` on, are free."""
    for j in range(0, gl.minimum(room, _blocks(TILES, SPLITS, ITERS))):
        _load_weight(w_d, w_s, w_bar, (done + j) % STAGES, j, TILES, ITERS, BLOCK_N, BLOCK_K)


@gluon.jit
def _product(
    w_d, x_d, next_d, rings, done, out_p, M,
    TILES: gl.constexpr, SPLITS: gl.constexpr, ITERS: gl.constexpr,
    NEXT_TILES: gl.constexpr, NEXT_SPLITS: gl.constexpr, NEXT_ITERS: gl.constexpr,
    SWIGLU: gl.constexpr, T: gl.constexpr, STAGES: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
):  # fmt: skip
    """One product; its first weights are on their way, and it sends for the first of the next. Returns blocks done.

    SWIGLU: to [M, N / 2] and SPLITS is 1; else to fp32 partial sums [SPLITS, M, N].
    """
    w_s, x_s, w_bar, x_bar = rings
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, T, 16])
    wide: gl.constexpr = gl.BlockedLayout([2, 1], [32, 1], [1, 4], [0, 1])
    half: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [1, 4], [0, 1])
    N: gl.constexpr = TILES * BLOCK_N
    blocks = _blocks(TILES, SPLITS, ITERS)
    ahead = _blocks(NEXT_TILES, NEXT_SPLITS, NEXT_ITERS)
    _first_weights(
        next_d, w_s, w_bar, done + blocks, STAGES - blocks, NEXT_TILES, NEXT_SPLITS, NEXT_ITERS,
        STAGES, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    for j in range(0, gl.minimum(STAGES, blocks)):
        _load_rows(x_d, x_s, x_bar, (done + j) % STAGES, j, TILES, ITERS, T, BLOCK_K)
    for item in range(gl.program_id(0), TILES * SPLITS, gl.num_programs(0)):
        first = (item // gl.num_programs(0)) * ITERS
        b_acc = gl.zeros([BLOCK_N, T], gl.float32, acc_layout)
        for i in range(0, ITERS):
            j = first + i
            slot, phase = (done + j) % STAGES, (done + j) // STAGES % 2
            mbarrier.wait(w_bar.index(slot), phase)
            mbarrier.wait(x_bar.index(slot), phase)
            b_acc = warpgroup_mma(w_s.index(slot), x_s.index(slot).permute((1, 0)), b_acc, is_async=True)
            b_acc = warpgroup_mma_wait(0, [b_acc])
            threads_meet()  # all warps have read the slot
            j += STAGES
            if j < blocks:
                _load_weight(w_d, w_s, w_bar, slot, j, TILES, ITERS, BLOCK_N, BLOCK_K)
                _load_rows(x_d, x_s, x_bar, slot, j, TILES, ITERS, T, BLOCK_K)
            elif j - blocks < ahead:
                _load_weight(next_d, w_s, w_bar, slot, j - blocks, NEXT_TILES, NEXT_ITERS, BLOCK_N, BLOCK_K)
        tile = item % TILES
        if SWIGLU:
            b_out = gl.convert_layout(b_acc.to(out_p.dtype.element_ty), wide)
            pairs = gl.permute(gl.reshape(b_out, [BLOCK_N // 2, 2, T]), (0, 2, 1))
            gate, up = gl.split(pairs)
            gate, up = gate.to(gl.float32), up.to(gl.float32)
            silu = (gate / (1.0 + gl.exp(-gate))).to(out_p.dtype.element_ty).to(gl.float32)
            b_half = gl.convert_layout((silu * up).to(out_p.dtype.element_ty), half)
            o_h = tile * (BLOCK_N // 2) + gl.arange(0, BLOCK_N // 2, gl.SliceLayout(1, half))
            o_m = gl.arange(0, T, gl.SliceLayout(0, half))
            mask = (o_m < M)[None, :] & (o_h < N // 2)[:, None]
            gl.store(out_p + o_m[None, :] * (N // 2) + o_h[:, None], b_half, mask=mask)
        else:
            o_n = tile * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(1, acc_layout))
            o_m = gl.arange(0, T, gl.SliceLayout(0, acc_layout))
            p_out = out_p + (item // TILES) * M * N + o_m[None, :] * N + o_n[:, None]
            gl.store(p_out, b_acc, mask=(o_m < M)[None, :] & (o_n < N)[:, None])
    return done + blocks


@gluon.jit
def _row(x_p, w_p, M, D: gl.constexpr, BLOCK: gl.constexpr):
    """This program's row of the residual stream and the norm's weight, asked for before they are needed."""
    layout: gl.constexpr = gl.BlockedLayout([8], [32], [4], [0])
    i_m = gl.num_programs(0) - 1 - gl.program_id(0)  # the last programs have the fewest tiles
    o_d = gl.arange(0, BLOCK, layout)
    mask = (o_d < D) & (i_m < M)
    return gl.load(x_p + i_m * D + o_d, mask=mask, other=0.0), gl.load(w_p + o_d, mask=mask, other=0.0)


@gluon.jit
def _norm(
    b_x, b_w, part_p, sum_p, h_p, tap_p, stride_tap, M, eps,
    D: gl.constexpr, SPLITS: gl.constexpr, BLOCK: gl.constexpr, TAP: gl.constexpr,
):  # fmt: skip
    """One row of the residual stream: add the partial products, store, norm; like `norm.py`."""
    layout: gl.constexpr = b_x.type.layout
    i_m = gl.num_programs(0) - 1 - gl.program_id(0)
    if i_m < M:
        o_d = gl.arange(0, BLOCK, layout)
        mask = o_d < D
        b_sum = gl.zeros([BLOCK], gl.float32, layout)
        for i in gl.static_range(SPLITS):
            b_sum += gl.load(part_p + (i * M + i_m) * D + o_d, mask=mask, other=0.0)
        b_x = (b_x.to(gl.float32) + b_sum).to(b_x.dtype)
        gl.store(sum_p + i_m * D + o_d, b_x, mask=mask)
        if TAP:
            gl.store(tap_p + i_m * stride_tap + o_d, b_x, mask=mask)
        b_wide = b_x.to(gl.float32)
        scale = gl.rsqrt(gl.sum(b_wide * b_wide, axis=0) / D + eps)
        b_h = (b_wide * scale).to(b_x.dtype) * b_w
        gl.store(h_p + i_m * D + o_d, b_h, mask=mask)


@gluon.jit(do_not_specialize=["M", "stride_tap"])
def layer_kernel(
    o_d, gate_up_d, down_d, qkv_d, a_d, h_d, act_d,
    x_p, post_p, next_p, part_p, sum_p, h_p, act_p, qkv_p, tap_p, sync_p, trace_p,
    M, stride_tap, eps,
    D: gl.constexpr, A: gl.constexpr, FFN: gl.constexpr, QKV: gl.constexpr,
    O_SPLITS: gl.constexpr, DOWN_SPLITS: gl.constexpr, QKV_SPLITS: gl.constexpr, BLOCK_D: gl.constexpr,
    T: gl.constexpr, STAGES: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    TAP: gl.constexpr, BARRIERS: gl.constexpr, PHASES: gl.constexpr,
):  # fmt: skip
    """a [M, A] and the residual stream x [M, D] to sum [M, D] and its norm h [M, D].

    QKV > 0: and to qkv of h as partial sums, fp32 [QKV_SPLITS, M, QKV].
    """
    w_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_N, BLOCK_K], o_d.layout)
    x_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, T, BLOCK_K], a_d.layout)
    w_bar = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    x_bar = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(w_bar.index(i), count=1)
        mbarrier.init(x_bar.index(i), count=1)
    threads_meet()
    rings = (w_s, x_s, w_bar, x_bar)
    o_tiles: gl.constexpr = D // BLOCK_N
    gate_tiles: gl.constexpr = 2 * FFN // BLOCK_N
    qkv_tiles: gl.constexpr = QKV // BLOCK_N
    o_iters: gl.constexpr = A // (BLOCK_K * O_SPLITS)
    down_iters: gl.constexpr = FFN // (BLOCK_K * DOWN_SPLITS)
    qkv_iters: gl.constexpr = D // (BLOCK_K * QKV_SPLITS)
    d_iters: gl.constexpr = D // BLOCK_K

    _first_weights(o_d, w_s, w_bar, 0, STAGES, o_tiles, O_SPLITS, o_iters, STAGES, BLOCK_N, BLOCK_K)
    grid_wait()
    stamp(trace_p, 0, PHASES)
    if gl.program_id(0) == 0:  # nobody passes barrier 0 before this program comes to it
        for i in gl.static_range(1, BARRIERS):
            gl.store(sync_p + i, 0)
    done = _product(
        o_d, a_d, gate_up_d, rings, 0, part_p, M, o_tiles, O_SPLITS, o_iters, gate_tiles, 1, d_iters,
        False, T, STAGES, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    stamp(trace_p, 1, PHASES)
    b_x, b_w = _row(x_p, post_p, M, D, BLOCK_D)
    join(sync_p, False)
    stamp(trace_p, 2, PHASES)
    _norm(b_x, b_w, part_p, sum_p, h_p, tap_p, stride_tap, M, eps, D, O_SPLITS, BLOCK_D, False)
    stamp(trace_p, 3, PHASES)
    join(sync_p + 1, True)
    stamp(trace_p, 4, PHASES)
    if gl.program_id(0) == 0:  # and nobody waits at it any more
        gl.store(sync_p, 0)
    done = _product(
        gate_up_d, h_d, down_d, rings, done, act_p, M, gate_tiles, 1, d_iters, o_tiles, DOWN_SPLITS, down_iters,
        True, T, STAGES, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    stamp(trace_p, 5, PHASES)
    join(sync_p + 2, True)
    stamp(trace_p, 6, PHASES)
    done = _product(
        down_d, act_d, qkv_d, rings, done, part_p, M, o_tiles, DOWN_SPLITS, down_iters,
        qkv_tiles, QKV_SPLITS, qkv_iters, False, T, STAGES, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    stamp(trace_p, 7, PHASES)
    b_x, b_w = _row(sum_p, next_p, M, D, BLOCK_D)  # as this program itself has left it
    join(sync_p + 3, False)
    stamp(trace_p, 8, PHASES)
    grid_launch()
    _norm(b_x, b_w, part_p, sum_p, h_p, tap_p, stride_tap, M, eps, D, DOWN_SPLITS, BLOCK_D, TAP)
    if QKV > 0:
        stamp(trace_p, 9, PHASES)
        join(sync_p + 4, True)
        stamp(trace_p, 10, PHASES)
        _product(
            qkv_d, h_d, qkv_d, rings, done, qkv_p, M, qkv_tiles, QKV_SPLITS, qkv_iters, 0, 1, d_iters,
            False, T, STAGES, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        stamp(trace_p, 11, PHASES)


@functools.cache
def _programs(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def _barriers(device: int) -> Tensor:
    """Counters that every launch leaves as it found them; launches of one device may not overlap."""
    return torch.zeros(BARRIERS, dtype=torch.int32, device=torch.device("cuda", device))


def splits_of(n: int, k: int, programs: int) -> int:
    """Splits of a product that a norm adds up: the most that keep one tile of one split a program."""
    most = max(1, programs // -(-n // BLOCK_N))
    return next(s for s in range(min(most, 8), 0, -1) if k % (s * BLOCK_K) == 0)


def even_splits_of(n: int, k: int, programs: int) -> int:
    """Splits of a product that the next kernel adds up: the fewest that leave the busiest program the fewest blocks."""
    tiles, blocks = -(-n // BLOCK_N), k // BLOCK_K
    return min((s for s in range(1, 9) if blocks % s == 0), key=lambda s: -(-tiles * s // programs) * (blocks // s))


def stages_of(rows: int) -> int:
    """Blocks in flight for products of `rows` rows, a power of two."""
    return SHARED_BYTES // ((BLOCK_N + rows) * BLOCK_K * 2)


def fits(x: Tensor, matrices: list[Matrix | None]) -> bool:
    """Whether the kernel can run this: a Hopper GPU, bf16, at most MAX_ROWS rows, whole tiles."""
    return (
        x.is_cuda
        and torch.cuda.get_device_capability(x.device)[0] == 9
        and x.dtype == torch.bfloat16
        and len(x) <= min(MAX_ROWS, _programs(x.device.index))
        and all(
            not isinstance(m, ScaledMatrix) and m.shape[0] % BLOCK_N == 0 and m.shape[1] % BLOCK_K == 0
            for m in matrices
            if m is not None
        )
    )


def launch_layer(
    x: Tensor,
    a: Tensor,
    o: Tensor,
    post_norm: Tensor,
    gate_up: Tensor,
    down: Tensor,
    norm: Tensor,
    qkv: Tensor | None,
    eps: float,
    tap: Tensor | None = None,
    trace: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """`finish_layer` of the reference in one launch; the matrices are what `fits`.

    Args:
        trace: int64 [programs, len(PHASES)], receives when each program ended each phase, in ns; needs `qkv`.
    """
    (m, d), width, ffn = x.shape, a.shape[1], down.shape[1]
    device = x.device.index
    programs = _programs(device)
    o_splits, down_splits = splits_of(d, width, programs), splits_of(d, ffn, programs)
    qkv_splits = 1 if qkv is None else even_splits_of(len(qkv), d, programs)
    rows = max(16, next_power_of_two(m))

    def weight(matrix: Tensor) -> TensorDescriptor:
        block = [BLOCK_N, BLOCK_K]
        return TensorDescriptor.from_tensor(matrix, block, gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16))

    def operand(matrix: Tensor) -> TensorDescriptor:
        block = [rows, BLOCK_K]
        return TensorDescriptor.from_tensor(matrix, block, gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16))

    parts = torch.empty(max(o_splits, down_splits), m, d, dtype=torch.float32, device=x.device)
    total, normed = torch.empty_like(x), torch.empty_like(x)
    active = torch.empty(m, ffn, dtype=x.dtype, device=x.device)
    out = None if qkv is None else torch.empty(qkv_splits, m, len(qkv), dtype=torch.float32, device=x.device)
    layer_kernel[(programs,)](
        weight(o), weight(gate_up), weight(down), weight(o if qkv is None else qkv),
        operand(a), operand(normed), operand(active),
        x, post_norm, norm, parts, total, normed, active,
        parts if out is None else out, x if tap is None else tap, _barriers(device),
        x if trace is None else trace,
        m, 0 if tap is None else tap.stride(0), eps,
        D=d, A=width, FFN=ffn, QKV=0 if qkv is None else len(qkv), O_SPLITS=o_splits, DOWN_SPLITS=down_splits,
        QKV_SPLITS=qkv_splits, BLOCK_D=next_power_of_two(d), T=rows, STAGES=stages_of(rows),
        BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K, TAP=tap is not None, BARRIERS=BARRIERS,
        PHASES=0 if trace is None else len(PHASES), num_warps=4, launch_pdl=True,
    )  # fmt: skip
    return total, normed, out
