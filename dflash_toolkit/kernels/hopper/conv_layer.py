"""The kernel of `layer.py` for a layer of DFlash 2, with a convolution before and after each of the two sub-layers.

One more GEMM before each sub-layer computes the coefficients of both; it streams through the same ring buffers. Between
the GEMMs a program handles one row, as for the norms. A convolution reads earlier rows of its block, which other
programs have written, so there are four more barriers.
"""

# mypy: disable-error-code="no-untyped-def"
import functools
from collections.abc import Sequence

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ..formats import Weight, is_row_scaled, parts
from ..launch import next_power_of_two, padded
from ..triton.fp8 import quantize_rows
from .grid import async_sees_memory, grid_launch, grid_wait, join
from .layer import _cast, _gemm, even_splits_of, splits_of
from .pipeline import (
    BLOCK_N,
    WARPS,
    block_k,
    blocks_of,
    fits,
    make_rings,
    programs_of,
    slots_of,
    stream,
    wide_of,
)

BARRIERS = 9  # grid barriers of a layer


@gluon.constexpr_function
def row_layout(group, warps):
    """Returns the layout of a row [groups, channels of a group]."""
    each = min(group, 8)
    lanes = min(group // each, 32)
    return gl.BlockedLayout([1, each], [32 // lanes, lanes], [warps, 1], [1, 0])


@gluon.jit
def _groups(GROUP: gl.constexpr, BLOCK_C: gl.constexpr):
    return gl.arange(0, BLOCK_C, gl.SliceLayout(1, row_layout(GROUP, gl.num_warps())))


@gluon.jit
def _channels(GROUP: gl.constexpr, BLOCK_C: gl.constexpr):
    o_g = gl.arange(0, GROUP, gl.SliceLayout(0, row_layout(GROUP, gl.num_warps())))
    return _groups(GROUP, BLOCK_C)[:, None] * GROUP + o_g[None, :]


@gluon.jit
def _tap(
    base_p, own_p, stride_split, stride_row, i_m, tau,
    D: gl.constexpr, SPLITS: gl.constexpr, GROUP: gl.constexpr, BLOCK_C: gl.constexpr,
):  # fmt: skip
    """Returns the coefficients of a row's channels for the row `tau` before it, [BLOCK_C, GROUP]."""
    o_c, o_d = _groups(GROUP, BLOCK_C), _channels(GROUP, BLOCK_C)
    slim: gl.constexpr = o_c.type.layout
    b_own = gl.zeros([BLOCK_C], gl.float32, slim)
    for i in gl.static_range(SPLITS):
        p_own = own_p + i * stride_split + i_m * stride_row + tau * (D // GROUP)
        b_own += gl.load(p_own + o_c, mask=o_c < D // GROUP, other=0.0)
    return gl.load(base_p + tau * D + o_d, mask=o_d < D, other=0.0).to(gl.float32) + b_own[:, None]


@gluon.jit
def _row(x_p, w_p, M, D: gl.constexpr, GROUP: gl.constexpr, BLOCK_C: gl.constexpr):
    """Loads this program's row of the residual stream and the norm's weight before they are needed."""
    i_m = gl.num_programs(0) - 1 - gl.program_id(0)  # the last programs have the fewest tiles
    o_d = _channels(GROUP, BLOCK_C)
    mask = (o_d < D) & (i_m < M)
    return gl.load(x_p + i_m * D + o_d, mask=mask, other=0.0), gl.load(w_p + o_d, mask=mask, other=0.0)


@gluon.jit
def _leave(
    b_x, b_w, part_p, scale_p, base_p, own_p, stride_split, stride_row, sum_p, wide_p, h_p, M, block, eps,
    D: gl.constexpr, SPLITS: gl.constexpr, OWN_SPLITS: gl.constexpr, TAPS: gl.constexpr, GROUP: gl.constexpr,
    BLOCK_C: gl.constexpr, SCALED: gl.constexpr, NARROW: gl.constexpr,
):  # fmt: skip
    """Computes one row: the convolution of the partial sums, the residual stream, its norm.

    SCALED: the sums are multiplied by the scales of the rows [M]. NARROW: the norm is also stored to h, in fp8.
    """
    i_m = gl.num_programs(0) - 1 - gl.program_id(0)
    if i_m < M:
        o_d = _channels(GROUP, BLOCK_C)
        mask = o_d < D
        layout: gl.constexpr = o_d.type.layout
        b_y = gl.zeros([BLOCK_C, GROUP], gl.float32, layout)
        for tau in gl.static_range(TAPS):
            there = mask & (i_m % block >= tau)
            b_sum = gl.zeros([BLOCK_C, GROUP], gl.float32, layout)
            for i in gl.static_range(SPLITS):
                b_sum += gl.load(part_p + (i * M + i_m - tau) * D + o_d, mask=there, other=0.0)
            if SCALED:
                b_sum *= gl.load(scale_p + gl.maximum(i_m - tau, 0))
            b_y += _tap(base_p, own_p, stride_split, stride_row, i_m, tau, D, OWN_SPLITS, GROUP, BLOCK_C) * b_sum
        b_x = (b_x.to(gl.float32) + b_y.to(b_x.dtype).to(gl.float32)).to(b_x.dtype)
        gl.store(sum_p + i_m * D + o_d, b_x, mask=mask)
        b_wide = b_x.to(gl.float32)
        scale = gl.rsqrt(gl.sum(gl.sum(b_wide * b_wide, axis=1), axis=0) / D + eps)
        b_h = (b_wide * scale).to(b_x.dtype) * b_w
        gl.store(wide_p + i_m * D + o_d, b_h, mask=mask)
        if NARROW:
            gl.store(h_p + i_m * D + o_d, _cast(b_h, h_p.dtype.element_ty), mask=mask)


@gluon.jit
def _enter(
    wide_p, base_p, own_p, stride_split, stride_row, inside_p, M, block,
    D: gl.constexpr, OWN_SPLITS: gl.constexpr, TAPS: gl.constexpr, GROUP: gl.constexpr, BLOCK_C: gl.constexpr,
):  # fmt: skip
    """Computes one row of a sub-layer's input: the convolution of normed rows."""
    i_m = gl.num_programs(0) - 1 - gl.program_id(0)
    if i_m < M:
        o_d = _channels(GROUP, BLOCK_C)
        layout: gl.constexpr = o_d.type.layout
        b_y = gl.zeros([BLOCK_C, GROUP], gl.float32, layout)
        for tau in gl.static_range(TAPS):
            there = (o_d < D) & (i_m % block >= tau)
            b_u = gl.load(wide_p + (i_m - tau) * D + o_d, mask=there, other=0.0).to(gl.float32)
            b_y += _tap(base_p, own_p, stride_split, stride_row, i_m, tau, D, OWN_SPLITS, GROUP, BLOCK_C) * b_u
        b_y = _cast(b_y.to(wide_p.dtype.element_ty), inside_p.dtype.element_ty)
        gl.store(inside_p + i_m * D + o_d, b_y, mask=o_d < D)


@gluon.jit
def _compute(
    rings, ready, scales, x_p, post_p, next_p, part_p, sum_p, wide_p, h_p, inside_p, act_p, qkv_p, sync_p,
    after_p, mixer_base_p, own_p, ffn_base_p, next_own_p, next_base_p, M, block, split_after, row_after, eps,
    D: gl.constexpr, A: gl.constexpr, FFN: gl.constexpr, QKV: gl.constexpr,
    TAPS: gl.constexpr, GROUP: gl.constexpr, BLOCK_C: gl.constexpr, OWN_TILES: gl.constexpr,
    AFTER_SPLITS: gl.constexpr, OWN_SPLITS: gl.constexpr,
    O_SPLITS: gl.constexpr, DOWN_SPLITS: gl.constexpr, QKV_SPLITS: gl.constexpr,
    GATE_WIDE: gl.constexpr, QKV_WIDE: gl.constexpr,
    T: gl.constexpr, SLOTS: gl.constexpr, ROW_SLOTS: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    SCALED: gl.constexpr, BARRIERS: gl.constexpr,
):  # fmt: skip
    """The warps that compute; `ready` signals for five GEMMs that all programs have written their inputs."""
    o_tiles: gl.constexpr = D // BLOCK_N
    own_width: gl.constexpr = OWN_TILES * BLOCK_N
    side: gl.constexpr = TAPS * (D // GROUP)  # a row's coefficients after a sub-layer follow those before it
    grid_wait()
    if gl.program_id(0) == 0:  # no program passes barrier 0 before this one arrives
        for i in gl.static_range(1, BARRIERS):
            gl.store(sync_p + i, 0)
    w_done, x_done = _gemm(
        rings, gl.to_tensor(0), gl.to_tensor(0), scales[1], part_p, M, o_tiles, O_SPLITS, A, 1,
        False, SCALED, T, SLOTS, ROW_SLOTS, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    b_x, b_w = _row(x_p, post_p, M, D, GROUP, BLOCK_C)
    join(sync_p, False)
    _leave(
        b_x, b_w, part_p, scales[0], mixer_base_p, after_p, split_after, row_after, sum_p, wide_p, h_p,
        M, block, eps, D, O_SPLITS, AFTER_SPLITS, TAPS, GROUP, BLOCK_C, SCALED, SCALED,
    )  # fmt: skip
    join(sync_p + 1, True)
    mbarrier.arrive(ready.index(0), count=1)
    if gl.program_id(0) == 0:  # no program waits at it any more
        gl.store(sync_p, 0)
    w_done, x_done = _gemm(
        rings, w_done, x_done, scales[2], own_p, M, OWN_TILES, OWN_SPLITS, D, 1,
        False, SCALED, T, SLOTS, ROW_SLOTS, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    join(sync_p + 2, False)
    _enter(
        wide_p, ffn_base_p, own_p, M * own_width, own_width, inside_p, M, block,
        D, OWN_SPLITS, TAPS, GROUP, BLOCK_C,
    )  # fmt: skip
    join(sync_p + 3, True)
    mbarrier.arrive(ready.index(1), count=1)
    w_done, x_done = _gemm(
        rings, w_done, x_done, scales[3], act_p, M, 2 * FFN // BLOCK_N, 1, D, GATE_WIDE,
        True, SCALED, T, SLOTS, ROW_SLOTS, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    join(sync_p + 4, True)
    mbarrier.arrive(ready.index(2), count=1)
    w_done, x_done = _gemm(
        rings, w_done, x_done, scales[4], part_p, M, o_tiles, DOWN_SPLITS, FFN, 1,
        False, SCALED, T, SLOTS, ROW_SLOTS, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    b_x, b_w = _row(sum_p, next_p, M, D, GROUP, BLOCK_C)  # as this program stored it
    join(sync_p + 5, False)
    grid_launch()
    _leave(
        b_x, b_w, part_p, part_p, ffn_base_p + TAPS * D, own_p + side, M * own_width, own_width, sum_p, wide_p, h_p,
        M, block, eps, D, DOWN_SPLITS, OWN_SPLITS, TAPS, GROUP, BLOCK_C, False, SCALED and QKV > 0,
    )  # fmt: skip
    if QKV > 0:
        join(sync_p + 6, True)
        mbarrier.arrive(ready.index(3), count=1)
        w_done, x_done = _gemm(
            rings, w_done, x_done, scales[5], next_own_p, M, OWN_TILES, OWN_SPLITS, D, 1,
            False, SCALED, T, SLOTS, ROW_SLOTS, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        join(sync_p + 7, False)
        _enter(
            wide_p, next_base_p, next_own_p, M * own_width, own_width, inside_p, M, block,
            D, OWN_SPLITS, TAPS, GROUP, BLOCK_C,
        )  # fmt: skip
        join(sync_p + 8, True)
        mbarrier.arrive(ready.index(4), count=1)
        _gemm(
            rings, w_done, x_done, scales[6], qkv_p, M, QKV // BLOCK_N, QKV_SPLITS, D, QKV_WIDE,
            False, SCALED, T, SLOTS, ROW_SLOTS, BLOCK_N, BLOCK_K,
        )  # fmt: skip


@gluon.jit
def _stream_weights(
    o_d, own_d, gate_up_d, down_d, next_own_d, qkv_d, rings,
    D: gl.constexpr, A: gl.constexpr, FFN: gl.constexpr, QKV: gl.constexpr, OWN_TILES: gl.constexpr,
    OWN_SPLITS: gl.constexpr, O_SPLITS: gl.constexpr, DOWN_SPLITS: gl.constexpr, QKV_SPLITS: gl.constexpr,
    GATE_WIDE: gl.constexpr, QKV_WIDE: gl.constexpr,
    SLOTS: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
):  # fmt: skip
    """The warp that loads weights."""
    w_s, full, free = rings[0], rings[1], rings[2]
    o_tiles: gl.constexpr = D // BLOCK_N
    done = stream(o_d, w_s, full, free, gl.to_tensor(0), o_tiles, O_SPLITS, A, 1, True, SLOTS, BLOCK_N, BLOCK_K)
    done = stream(own_d, w_s, full, free, done, OWN_TILES, OWN_SPLITS, D, 1, True, SLOTS, BLOCK_N, BLOCK_K)
    done = stream(gate_up_d, w_s, full, free, done, 2 * FFN // BLOCK_N, 1, D, GATE_WIDE, True, SLOTS, BLOCK_N, BLOCK_K)
    done = stream(down_d, w_s, full, free, done, o_tiles, DOWN_SPLITS, FFN, 1, True, SLOTS, BLOCK_N, BLOCK_K)
    if QKV > 0:
        done = stream(next_own_d, w_s, full, free, done, OWN_TILES, OWN_SPLITS, D, 1, True, SLOTS, BLOCK_N, BLOCK_K)
        stream(
            qkv_d, w_s, full, free, done, QKV // BLOCK_N, QKV_SPLITS, D, QKV_WIDE,
            True, SLOTS, BLOCK_N, BLOCK_K,
        )  # fmt: skip


@gluon.jit
def _stream_rows(
    a_d, h_d, inside_d, act_d, rings, ready,
    D: gl.constexpr, A: gl.constexpr, FFN: gl.constexpr, QKV: gl.constexpr, OWN_TILES: gl.constexpr,
    OWN_SPLITS: gl.constexpr, O_SPLITS: gl.constexpr, DOWN_SPLITS: gl.constexpr, QKV_SPLITS: gl.constexpr,
    GATE_WIDE: gl.constexpr, QKV_WIDE: gl.constexpr,
    T: gl.constexpr, ROW_SLOTS: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
):  # fmt: skip
    """The warp that loads the rows of a GEMM, after all programs have written them."""
    x_s, full, free = rings[3], rings[4], rings[5]
    o_tiles: gl.constexpr = D // BLOCK_N
    grid_wait()
    done = stream(a_d, x_s, full, free, gl.to_tensor(0), o_tiles, O_SPLITS, A, 1, False, ROW_SLOTS, T, BLOCK_K)
    mbarrier.wait(ready.index(0), 0)
    async_sees_memory()
    done = stream(h_d, x_s, full, free, done, OWN_TILES, OWN_SPLITS, D, 1, False, ROW_SLOTS, T, BLOCK_K)
    mbarrier.wait(ready.index(1), 0)
    async_sees_memory()
    done = stream(inside_d, x_s, full, free, done, 2 * FFN // BLOCK_N, 1, D, GATE_WIDE, False, ROW_SLOTS, T, BLOCK_K)
    mbarrier.wait(ready.index(2), 0)
    async_sees_memory()
    done = stream(act_d, x_s, full, free, done, o_tiles, DOWN_SPLITS, FFN, 1, False, ROW_SLOTS, T, BLOCK_K)
    if QKV > 0:
        mbarrier.wait(ready.index(3), 0)
        async_sees_memory()
        done = stream(h_d, x_s, full, free, done, OWN_TILES, OWN_SPLITS, D, 1, False, ROW_SLOTS, T, BLOCK_K)
        mbarrier.wait(ready.index(4), 0)
        async_sees_memory()
        stream(
            inside_d, x_s, full, free, done, QKV // BLOCK_N, QKV_SPLITS, D, QKV_WIDE,
            False, ROW_SLOTS, T, BLOCK_K,
        )  # fmt: skip


@gluon.jit(do_not_specialize=["M", "block", "split_after", "row_after"])
def conv_layer_kernel(
    o_d, own_d, gate_up_d, down_d, next_own_d, qkv_d, a_d, h_d, inside_d, act_d,
    a_scale_p, o_scale_p, own_scale_p, gate_up_scale_p, down_scale_p, next_own_scale_p, qkv_scale_p,
    x_p, post_p, next_p, part_p, sum_p, wide_p, h_p, inside_p, act_p, qkv_p, sync_p,
    after_p, mixer_base_p, own_p, ffn_base_p, next_own_p, next_base_p,
    M, block, split_after, row_after, eps,
    D: gl.constexpr, A: gl.constexpr, FFN: gl.constexpr, QKV: gl.constexpr,
    TAPS: gl.constexpr, GROUP: gl.constexpr, BLOCK_C: gl.constexpr, OWN_TILES: gl.constexpr,
    AFTER_SPLITS: gl.constexpr, OWN_SPLITS: gl.constexpr,
    O_SPLITS: gl.constexpr, DOWN_SPLITS: gl.constexpr, QKV_SPLITS: gl.constexpr,
    GATE_WIDE: gl.constexpr, QKV_WIDE: gl.constexpr,
    T: gl.constexpr, SLOTS: gl.constexpr, ROW_SLOTS: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    SCALED: gl.constexpr, BARRIERS: gl.constexpr,
):  # fmt: skip
    """Computes sum [M, D] and its norm wide [M, D] from a [M, A] and the residual stream x [M, D].

    QKV > 0: also computes partial sums of the next layer's coefficients next_own, fp32
    [OWN_SPLITS, M, OWN_TILES * BLOCK_N], and of its qkv, fp32 [QKV_SPLITS, M, QKV].
    """
    scales = (
        a_scale_p, o_scale_p, own_scale_p, gate_up_scale_p, down_scale_p, next_own_scale_p, qkv_scale_p,
    )  # fmt: skip
    rings = make_rings(o_d, a_d, T, SLOTS, ROW_SLOTS, BLOCK_N, BLOCK_K)
    # one barrier each, as in `layer_kernel`
    ready = gl.allocate_shared_memory(gl.int64, [5, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(5):
        mbarrier.init(ready.index(i), count=1)
    gl.warp_specialize(
        [
            (_compute, (
                rings, ready, scales, x_p, post_p, next_p, part_p, sum_p, wide_p, h_p, inside_p, act_p, qkv_p, sync_p,
                after_p, mixer_base_p, own_p, ffn_base_p, next_own_p, next_base_p, M, block, split_after, row_after,
                eps, D, A, FFN, QKV, TAPS, GROUP, BLOCK_C, OWN_TILES, AFTER_SPLITS, OWN_SPLITS, O_SPLITS, DOWN_SPLITS,
                QKV_SPLITS, GATE_WIDE, QKV_WIDE, T, SLOTS, ROW_SLOTS, BLOCK_N, BLOCK_K, SCALED, BARRIERS,
            )),
            (_stream_weights, (
                o_d, own_d, gate_up_d, down_d, next_own_d, qkv_d, rings, D, A, FFN, QKV, OWN_TILES,
                OWN_SPLITS, O_SPLITS, DOWN_SPLITS, QKV_SPLITS, GATE_WIDE, QKV_WIDE, SLOTS, BLOCK_N, BLOCK_K,
            )),
            (_stream_rows, (
                a_d, h_d, inside_d, act_d, rings, ready, D, A, FFN, QKV, OWN_TILES,
                OWN_SPLITS, O_SPLITS, DOWN_SPLITS, QKV_SPLITS, GATE_WIDE, QKV_WIDE, T, ROW_SLOTS, BLOCK_N, BLOCK_K,
            )),
        ],
        [1, 1],  # warps that load weights, and rows
        [40, 40],  # their registers
    )  # fmt: skip


@functools.cache
def _barriers(device: int) -> Tensor:
    """Returns counters like those of `layer.py`."""
    return torch.zeros(BARRIERS, dtype=torch.int32, device=torch.device("cuda", device))


def conv_layer_fits(
    x: Tensor, weights: Sequence[Weight | None], convolutions: Sequence[tuple[Tensor, Weight] | None]
) -> bool:
    """Returns whether these matrices can stream, see `fits`, and a program can hold a row of these convolutions.

    In bf16, the last tile of coefficients is padded with zeros; in fp8, its scales would not be.
    """
    there = [conv for conv in convolutions if conv is not None]
    group = 2 * there[0][0].shape[1] * x.shape[1] // len(there[0][1])
    whole = all(len(matrix) % BLOCK_N == 0 for _, matrix in there if is_row_scaled(matrix))
    same_format = {is_row_scaled(matrix) for _, matrix in there} == {is_row_scaled(m) for m in weights if m is not None}
    return fits(x, weights) and whole and same_format and group == next_power_of_two(group) and group <= 256


def launch_conv_layer(
    x: Tensor,
    a: Tensor,
    after: Tensor,
    base: Tensor,
    o: Weight,
    post_norm: Tensor,
    ffn: tuple[Tensor, Weight],
    gate_up: Weight,
    down: Weight,
    norm: Tensor,
    following: tuple[Tensor, Weight] | None,
    qkv: Weight | None,
    eps: float,
    block: int,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Computes `fused_conv_post_attention`, as `launch_layer` does without convolutions. Needs `conv_layer_fits`."""
    (m, d), width, width_ffn = x.shape, a.shape[1], len(gate_up) // 2
    device, k, quantized = x.device.index, block_k(o), is_row_scaled(o)
    programs = programs_of(device)
    o_splits, down_splits = splits_of(d, width, k, programs), splits_of(d, width_ffn, k, programs)
    qkv_splits = 1 if qkv is None else even_splits_of(len(qkv), d, k, programs)
    ffn_base, projection = ffn
    taps, side = ffn_base.shape[1], len(projection) // 2
    own_tiles, own_splits = -(-2 * side // BLOCK_N), even_splits_of(2 * side, d, k, programs)
    rows = padded(m)
    slots = slots_of(rows)
    operand = quantize_rows(a) if quantized else a
    dtype = torch.float8_e4m3fn if quantized else x.dtype

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=x.device)

    total, wide, inside = torch.empty_like(x), torch.empty_like(x), new(m, d, dtype=dtype)
    narrow = new(m, d, dtype=dtype) if quantized else wide
    sums, active = new(max(o_splits, down_splits), m, d), new(m, width_ffn, dtype=dtype)
    own = new(own_splits, m, own_tiles * BLOCK_N)
    next_base, next_projection = ffn if following is None else following
    next_own = own if following is None else torch.empty_like(own)
    out = None if qkv is None else new(qkv_splits, m, len(qkv))
    last = o if qkv is None else qkv
    matrices = (o, projection, gate_up, down, next_projection, last)
    scales = (x if scale is None else scale for _, scale in map(parts, (operand, *matrices)))
    conv_layer_kernel[(programs,)](
        *(blocks_of(matrix, BLOCK_N) for matrix in matrices),
        *(blocks_of(each, rows) for each in (operand, narrow, inside, active)),
        *scales,
        x, post_norm, norm, sums, total, wide, narrow, inside, active, sums if out is None else out, _barriers(device),
        after, base, own, ffn_base, next_own, next_base, m, block, after.stride(0), after.stride(1), eps,
        D=d, A=width, FFN=width_ffn, QKV=0 if qkv is None else len(qkv), TAPS=taps, GROUP=taps * d // side,
        BLOCK_C=next_power_of_two(side // taps), OWN_TILES=own_tiles, AFTER_SPLITS=len(after), OWN_SPLITS=own_splits,
        O_SPLITS=o_splits, DOWN_SPLITS=down_splits, QKV_SPLITS=qkv_splits,
        GATE_WIDE=wide_of(len(gate_up) // BLOCK_N, 1, rows, programs),
        QKV_WIDE=1 if qkv is None else wide_of(len(qkv) // BLOCK_N, qkv_splits, rows, programs),
        T=rows, SLOTS=slots.weights, ROW_SLOTS=slots.rows, BLOCK_N=BLOCK_N, BLOCK_K=k, SCALED=quantized,
        BARRIERS=BARRIERS, num_warps=WARPS, launch_pdl=True,
    )  # fmt: skip
    return total, wide, out, None if following is None else next_own[:, :, side : 2 * side]
