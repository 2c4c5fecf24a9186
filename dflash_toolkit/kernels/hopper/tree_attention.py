"""The kernels of `triton/tree_attention.py` in Gluon for sm_90, for the inputs that `hopper/attention.py` supports.

The whole tiles of the context are loaded as for a block. The remaining keys of each row are gathered, one at a time, to
the places of a plain step, and multiplied by the same instructions; so a row has the same bits as in a plain step.
"""

# mypy: disable-error-code="no-untyped-def"

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language import debug_barrier

from ..launch import LOG2_E
from ..paged import PagedKV
from ..tree import TreeRows
from ..triton.merge import MIDDLE
from .attention import _fold, _in_window, _softmax, _split_start, _state, _window_start
from .grid import grid_launch, grid_wait
from .tiles import (
    KEYS,
    ROWS,
    STAGES,
    _expect_first,
    _load_first,
    _load_second,
    _ring,
    _slot,
    _tiles,
    boxes,
    in_bf16,
)


@gluon.jit
def _prefetch_descriptor():
    """Prefetches the kernel's first argument, `cache_d`, so that the first load does not wait for it."""
    gl.inline_asm_elementwise(
        "prefetch.param.tensormap [hopper_prefix_kernel_param_0]; mov.u32 $0, 0;",
        "=r", [], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit(do_not_specialize=["columns", "SPLITS"])
def hopper_prefix_kernel(
    cache_d, scales_d, q_p, lengths_p, starts_p, depths_p, pages_p, m_p, l_p, acc_p,
    columns, stride_pages, slots, scale, SPLITS,
    G: gl.constexpr, GROUP: gl.constexpr, HEAD: gl.constexpr, PAGE: gl.constexpr,
    SHORT: gl.constexpr, SHORT_SPLITS: gl.constexpr, LONG: gl.constexpr, PAIRS: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """Computes program (tile, request * G + KV head, split); the rest is as in `_prefix_kernel`.

    PAIRS: a program has two splits. If no path reaches into them, their merged state is stored as that of the first;
    otherwise each is stored.

    Everything except the queries is older than this pass and is loaded before the wait, see `hopper/attention.py`.
    """
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD, 16])
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD, HEAD // 8], [4, 1], [1, 0])
    queries: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, HEAD], gl.bfloat16)
    BYTES: gl.constexpr = 2 * HEAD if scales_d is None else HEAD + 2
    i_r, i_x, i_s = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    i_b, i_g = (i_x // G).to(gl.int64), i_x % G
    cache_d = cache_d, scales_d
    q_s = gl.allocate_shared_memory(gl.bfloat16, [ROWS, HEAD], queries)
    k_s = _ring(cache_d, i_g * slots, HEAD)
    v_s = _ring(cache_d, (i_g + G - 1) * slots, HEAD)
    k_bar = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_bar = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(k_bar.index(i), count=1)
        mbarrier.init(v_bar.index(i), count=1)
    fence_async_shared()
    debug_barrier()
    _prefetch_descriptor()

    column = i_g * HEAD
    p_pages = pages_p + i_b * stride_pages
    if PAIRS:
        i_s = 2 * i_s
    start = _split_start(i_s, SHORT, SHORT_SPLITS, LONG)
    stop = _split_start(i_s + 1, SHORT, SHORT_SPLITS, LONG)
    grid_launch()
    length = gl.load(lengths_p + i_b)
    shifted = 0  # 1: the first split of a pair is before the window
    if WINDOW != 0:
        if PAIRS:
            shifted = (_window_start(length, WINDOW) >= stop).to(gl.int32)
        start, stop = _in_window(start, stop, length, i_s, SHORT, SHORT_SPLITS, LONG, PAIRS, WINDOW)
    row = gl.load(starts_p + i_b)
    heads = (gl.load(starts_p + i_b + 1) - row) * GROUP
    slot_0 = _slot(p_pages, start, columns, PAGE)
    slot_1 = _slot(p_pages, start + KEYS, columns, PAGE)
    slot_2 = _slot(p_pages, start + 2 * KEYS, columns, PAGE)
    slot_3 = _slot(p_pages, start + 3 * KEYS, columns, PAGE)
    slot_4 = _slot(p_pages, start + 4 * KEYS, columns, PAGE)
    end = length // KEYS * KEYS
    tiles = _tiles(start, stop, end)
    if (tiles == 0) | (i_r * ROWS >= heads):
        return
    second = 0  # tiles of the second split
    if PAIRS:
        after = _split_start(i_s + 2, SHORT, SHORT_SPLITS, LONG)
        second = _tiles(stop, after, end)
    loads = tiles + second
    _expect_first(k_bar, v_bar, loads, BYTES)
    _load_first(cache_d, k_s, v_s, k_bar, v_bar, (slot_0, slot_1, slot_2), slots, column, 0, loads)
    grid_wait()

    o_row = i_r * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, wide))  # the heads of a row are adjacent
    o_q = ((row + o_row // GROUP).to(gl.int64) * G + i_g) * GROUP + o_row % GROUP
    o_h = gl.arange(0, HEAD, gl.SliceLayout(0, wide))
    b_q = gl.load(q_p + o_q[:, None] * HEAD + o_h[None, :], mask=(o_row < heads)[:, None], other=0.0)
    q_s.store(b_q)
    fence_async_shared()
    debug_barrier()

    o_row = i_r * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, s_layout))
    o_pos = length + gl.load(depths_p + row + o_row // GROUP, mask=o_row < heads, other=0)
    b_m, b_l, b_out, slot_2, slot_3, slot_4 = _state(
        cache_d, q_s, k_s, v_s, k_bar, v_bar, p_pages, columns, slots, column,
        start, 0, tiles, loads, slot_2, slot_3, slot_4, o_pos, None, end, end, scale,
        HEAD, PAGE, BYTES, False, WINDOW,
    )  # fmt: skip
    rows: gl.constexpr = gl.SliceLayout(1, o_layout)
    o_row = i_r * ROWS + gl.arange(0, ROWS, rows)
    o_h = gl.arange(0, HEAD, gl.SliceLayout(0, o_layout))
    o_part = (((row + o_row // GROUP).to(gl.int64) * G + i_g) * SPLITS + i_s) * GROUP + o_row % GROUP
    if PAIRS and second > 0:  # PAIRS: Triton 3.6 fails on a branch that is never taken, unless it is a constexpr
        _load_second(cache_d, v_s, v_bar, tiles, second, slots, slot_2, slot_3, column, BYTES)
        slot_5 = _slot(p_pages, stop + 4 * KEYS, columns, PAGE)
        if scales_d is not None:  # conversions need its registers
            gl.store(acc_p + o_part[:, None] * HEAD + o_h[None, :], b_out, mask=(o_row < heads)[:, None])
        m_1, l_1, b_1, _2, _3, _4 = _state(
            cache_d, q_s, k_s, v_s, k_bar, v_bar, p_pages, columns, slots, column,
            stop, tiles, second, second, slot_3, slot_4, slot_5, o_pos, None, end, end, scale,
            HEAD, PAGE, BYTES, False, WINDOW,
        )  # fmt: skip
        if scales_d is not None:
            p_acc = acc_p + o_part[:, None] * HEAD + o_h[None, :]
            b_out = gl.load(p_acc, mask=(o_row < heads)[:, None], other=0.0)
        if end >= after:
            e_0, e_1, b_m, b_l = _fold(b_m, b_l, m_1, l_1)
            e_0, e_1 = gl.convert_layout(e_0, rows)[:, None], gl.convert_layout(e_1, rows)[:, None]
            b_out = gl.fma(b_1, e_1, b_out * e_0)
        else:
            gl.store(m_p + o_part + GROUP, gl.convert_layout(m_1, rows), mask=o_row < heads)
            gl.store(l_p + o_part + GROUP, gl.convert_layout(l_1, rows), mask=o_row < heads)
            gl.store(acc_p + (o_part + GROUP)[:, None] * HEAD + o_h[None, :], b_1, mask=(o_row < heads)[:, None])
    if WINDOW != 0 and PAIRS:
        o_part = o_part + gl.where(after > end, shifted * GROUP, 0)
    gl.store(m_p + o_part, gl.convert_layout(b_m, rows), mask=o_row < heads)
    gl.store(l_p + o_part, gl.convert_layout(b_l, rows), mask=o_row < heads)
    gl.store(acc_p + o_part[:, None] * HEAD + o_h[None, :], b_out, mask=(o_row < heads)[:, None])


@gluon.jit
def _split_of(position, SHORT: gl.constexpr, SHORT_SPLITS: gl.constexpr, LONG: gl.constexpr):
    count: gl.constexpr = SHORT_SPLITS // MIDDLE
    short = gl.minimum(position // SHORT, SHORT_SPLITS)
    past = gl.maximum(position - SHORT * SHORT_SPLITS, 0)
    middle = gl.minimum(past // (MIDDLE * SHORT), count)
    return short + middle + gl.maximum(past - count * MIDDLE * SHORT, 0) // LONG


@gluon.jit(do_not_specialize=["SPLITS", "stride_paths", "P"])
def hopper_tail_kernel(
    q_p, cache_p, scales_p, lengths_p, starts_p, requests_p, depths_p, paths_p, pages_p, m_p, l_p, acc_p,
    stride_pages, slots, scale, SPLITS, stride_paths, P,
    G: gl.constexpr, GROUP: gl.constexpr, HEAD: gl.constexpr, PAGE: gl.constexpr,
    SHORT: gl.constexpr, SHORT_SPLITS: gl.constexpr, LONG: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """Computes program (row * G + KV head, split, from the end of the whole tiles on), as `_tail_kernel` does."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD, HEAD // 8], [4, 1], [1, 0])
    shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, HEAD], gl.bfloat16)
    q_s = gl.allocate_shared_memory(gl.bfloat16, [ROWS, HEAD], shared)
    k_s = gl.allocate_shared_memory(gl.bfloat16, [KEYS, HEAD], shared)
    v_s = gl.allocate_shared_memory(gl.bfloat16, [KEYS, HEAD], shared)
    i_x, i_t = gl.program_id(0), gl.program_id(1)
    i_m, i_g = (i_x // G).to(gl.int64), i_x % G
    grid_wait()
    grid_launch()
    request = gl.load(requests_p + i_m)
    real = request >= 0
    i_b = gl.maximum(request, 0).to(gl.int64)
    length = gl.load(lengths_p + i_b)
    position = length + gl.load(depths_p + i_m)
    end = gl.where(real, position + 1, 0)
    first = length // KEYS * KEYS
    i_s = gl.where(real, _split_of(first, SHORT, SHORT_SPLITS, LONG) + i_t, 0)
    begin = _split_start(i_s, SHORT, SHORT_SPLITS, LONG)
    start = gl.maximum(first, begin)
    if (i_t > 0) & (start >= end):
        return
    stop = gl.minimum(_split_start(i_s + 1, SHORT, SHORT_SPLITS, LONG), end)
    tiles = gl.maximum(stop - start + KEYS - 1, 0) // KEYS
    p_path = paths_p + i_b * stride_paths + (i_m - gl.load(starts_p + i_b)) * P
    p_pages = pages_p + i_b * stride_pages

    o_row = gl.arange(0, ROWS, gl.SliceLayout(1, wide))
    o_h = gl.arange(0, HEAD, gl.SliceLayout(0, wide))
    o_q = (i_x.to(gl.int64) * GROUP + o_row)[:, None] * HEAD + o_h[None, :]
    b_q = gl.load(q_p + o_q, mask=(o_row < GROUP)[:, None], other=0.0)
    q_s.store(b_q)

    p_head = cache_p + i_g * HEAD
    part = (i_x.to(gl.int64) * SPLITS + i_s) * GROUP
    if WINDOW != 0:
        begin = gl.maximum(begin, _window_start(length, WINDOW))
    before = real & (start > begin)
    o_s = gl.arange(0, ROWS, gl.SliceLayout(1, s_layout))
    b_m = gl.load(m_p + part + o_s, mask=(o_s < GROUP) & before, other=-float("inf"))
    b_l = gl.load(l_p + part + o_s, mask=(o_s < GROUP) & before, other=0.0)
    o_pos = gl.zeros([ROWS], gl.int32, gl.SliceLayout(1, s_layout)) + position
    rows: gl.constexpr = gl.SliceLayout(1, o_layout)
    o_row = gl.arange(0, ROWS, rows)
    m_row = o_row < GROUP
    o_out = o_row[:, None] * HEAD + gl.arange(0, HEAD, gl.SliceLayout(0, o_layout))[None, :]
    b_out = gl.load(acc_p + part * HEAD + o_out, mask=(m_row & before)[:, None], other=0.0)
    zeros = gl.zeros([ROWS, KEYS], gl.float32, s_layout)
    for i in range(0, tiles):
        at = start + i * KEYS
        o_t = at + gl.arange(0, KEYS, gl.SliceLayout(1, wide))
        m_t = o_t < end
        places = gl.load(p_path + (o_t - length), mask=m_t & (o_t >= length), other=0)
        o_at = gl.where(o_t < length, o_t, length + places)
        pages = gl.load(p_pages + o_at // PAGE, mask=m_t, other=0)
        o_place = pages * PAGE + o_at % PAGE
        o_v = (o_place + slots).to(gl.int64)[:, None] * (G * HEAD) + o_h[None, :]
        o_k = o_place.to(gl.int64)[:, None] * (G * HEAD) + o_h[None, :]
        b_k = gl.load(p_head + o_k, mask=m_t[:, None], other=0)
        b_v = gl.load(p_head + o_v, mask=m_t[:, None], other=0)
        if scales_p is not None:
            o_scale = i_g.to(gl.int64) * slots + o_place
            b_k = in_bf16(b_k, gl.load(scales_p + o_scale, mask=m_t, other=0.0)[:, None])
            o_scale = (i_g + G).to(gl.int64) * slots + o_place
            b_v = in_bf16(b_v, gl.load(scales_p + o_scale, mask=m_t, other=0.0)[:, None])
        debug_barrier()  # all warps have read the previous tile
        k_s.store(b_k)
        v_s.store(b_v)
        fence_async_shared()
        debug_barrier()
        b_s = warpgroup_mma(q_s, k_s.permute((1, 0)), zeros, use_acc=False, is_async=True)
        b_s = warpgroup_mma_wait(0, [b_s])
        b_new, b_m, b_l, old = _softmax(b_s, b_m, b_l, o_pos, None, at, end, end, scale, False, WINDOW)
        b_out = b_out * gl.convert_layout(old, rows)[:, None]
        b_p = gl.convert_layout(b_new.to(gl.bfloat16), p_layout)
        b_acc = warpgroup_mma(b_p, v_s, b_out, is_async=True)
        b_out = warpgroup_mma_wait(0, [b_acc])
    b_m, b_l = gl.where(real, gl.convert_layout(b_m, rows), 0.0), gl.where(real, gl.convert_layout(b_l, rows), 1.0)
    gl.store(m_p + part + o_row, b_m, mask=m_row)
    gl.store(l_p + part + o_row, b_l, mask=m_row)
    gl.store(acc_p + part * HEAD + o_out, b_out, mask=m_row[:, None])


def launch(
    q: Tensor,
    kv: PagedKV,
    rows: TreeRows,
    paths: Tensor,
    states: tuple[Tensor, Tensor, Tensor],
    splits: int,
    tails: int,
    tiles: int,
    cuts: dict[str, int],
    *,
    pairs: bool,
) -> None:
    """Writes each split's state to `states` for the merge. Needs `attention.fits`.

    Args:
        states: m and l [M * G, splits, N / G], acc [M * G, splits, N / G, H], fp32.
        tails: maximum splits of a row after the last whole tile of its context.
        tiles: number of tiles of ROWS queries of a request and a KV head.
        pairs: as for `attention.launch`, before the last whole tile of a request's context.
    """
    assert cuts["SHORT_SPLITS"] % 2 == 0, "the splits of a pair are of one kind"
    programs = -(-splits // 2) if pairs else splits
    (_, slots, groups, width), batch = kv.cache.shape, len(kv.lengths)
    group = q.shape[1] // groups
    scale = kv.score_factor * LOG2_E
    shape = {"G": groups, "GROUP": group, "HEAD": width, "PAGE": kv.size, "WINDOW": kv.window, **cuts}
    hopper_prefix_kernel[(tiles, batch * groups, programs)](
        *boxes(kv), q, kv.lengths, rows.starts, rows.depths, kv.table, *states,
        kv.table.shape[1], kv.table.stride(0), slots, scale, splits,
        **shape, PAIRS=pairs, num_warps=4, launch_pdl=True,
    )  # fmt: skip
    cache = kv.cache if kv.scales is None else kv.cache.view(torch.uint8)
    hopper_tail_kernel[(len(q) * groups, tails)](
        q, cache, kv.scales, kv.lengths, rows.starts, rows.requests, rows.depths, paths, kv.table, *states,
        kv.table.stride(0), slots, scale, splits, paths.stride(0), paths.stride(1),
        **shape, num_warps=4, launch_pdl=True,
    )  # fmt: skip
