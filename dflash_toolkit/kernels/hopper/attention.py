"""The attention kernel of `attention.py` in Gluon for sm_90, for heads of 64 or 128 and pages of whole tiles.

Queries are in bf16, keys and values in bf16 or fp8. Tiles in fp8 are converted to bf16 in shared memory when they are
used, so attention has the bits that it has over a cache which holds the converted values.

It has the same tiles, cuts along the keys and states of the splits. TMA loads keys and values into shared memory,
STAGES tiles ahead. While the softmax of a tile runs, the matrix units score the next tile and add up the values of the
one before (the idea is from FlashAttention-3, arXiv 2407.08608).

The launch before this one, `rope_write`, writes the queries and the block's keys and values, and starts this one before
its own wait. So data that is loaded before the wait here must be older than the last launch that starts the next one
only after its wait. The norm at the beginning of a pass is such a launch, and earlier passes wrote the lengths, pages,
row tables, and keys and values of the context.
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

from ..features import features_of
from ..launch import LOG2_E
from ..paged import PagedKV
from ..tree import TreeRows
from ..triton.merge import MARGIN, MIDDLE
from .grid import grid_launch, grid_wait
from .tiles import (
    KEYS,
    ROWS,
    STAGES,
    _expect,
    _expect_first,
    _load,
    _load_first,
    _load_second,
    _ring,
    _slot,
    _tile,
    _tiles,
    _wait,
    boxes,
)


@gluon.jit
def _split_start(i_s, SHORT: gl.constexpr, SHORT_SPLITS: gl.constexpr, LONG: gl.constexpr):
    short = gl.minimum(i_s, SHORT_SPLITS)
    middle = gl.minimum(i_s - short, SHORT_SPLITS // MIDDLE)
    return (short + middle * MIDDLE) * SHORT + (i_s - short - middle) * LONG


@gluon.jit
def _prefetch_descriptor():
    """Prefetches the kernel's first argument, `cache_d`, so that the first load does not wait for it."""
    gl.inline_asm_elementwise(
        "prefetch.param.tensormap [hopper_attention_kernel_param_0]; mov.u32 $0, 0;",
        "=r", [], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _softmax(b_s, b_m, b_l, o_pos, tree, first, end, full, scale, CAUSAL: gl.constexpr, WINDOW: gl.constexpr):
    """Returns a tile's probabilities, the state of its rows and the factor of the sums so far.

    The fused multiplications are written out, so that all compiled copies of this function round the same way.
    """
    if WINDOW != 0 or first + KEYS > full:
        o_t = first + gl.arange(0, KEYS, gl.SliceLayout(0, b_s.type.layout))
        visible = (o_t < end)[None, :]
        if tree is not None:
            ancestors, length, p_depths = tree
            o_place = o_t - length
            bits = gl.minimum(gl.maximum(o_place - 1, 0), 63).to(gl.int64)  # the anchor's place has no node
            visible = visible & ((o_place <= 0)[None, :] | ((ancestors[:, None] >> bits[None, :]) & 1 != 0))
            if WINDOW != 0:
                depths = gl.load(p_depths + o_place, mask=(o_place > 0) & (o_t < end), other=0)
                o_t = gl.where(o_place > 0, length + depths, o_t)
        if CAUSAL:
            visible = visible & (o_t[None, :] <= o_pos[:, None])
        if WINDOW != 0:
            distance = o_pos[:, None] - o_t[None, :]
            if WINDOW < 0:
                visible = visible & (distance <= (o_pos % -WINDOW)[:, None])
            else:
                visible = visible & (gl.abs(distance) < WINDOW)
        b_s = gl.where(visible, b_s, -float("inf"))
    top = gl.maximum(b_m, gl.max(b_s, axis=1) * scale)
    base = gl.where(top == -float("inf"), 0.0, top)
    b_p = gl.exp2(gl.fma(b_s, scale, -base[:, None]))
    old = gl.exp2(b_m - base)
    return b_p, top, gl.fma(b_l, old, gl.sum(b_p, axis=1)), old


@gluon.jit
def _state(
    cache_d, q_s, k_s, v_s, k_bar, v_bar, p_pages, columns, slots, column,
    start, before, tiles, loads, values, slot, next_slot, o_pos, tree, end, full, scale,
    HEAD: gl.constexpr, PAGE: gl.constexpr, BYTES: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """Returns the softmax state of a tile's rows over a split's keys, and the places of the three tiles after its
    second one. The loads of its first three tiles have started.

    Args:
        before: tiles of the program's split before it.
        loads: tiles to load, those of the program's second split included.
        values, slot, next_slot: places of the tiles 2, 3 and 4, if they are loaded.
        BYTES: of a key, and its scale.
        tree: as in `triton/attention.py`.
    """
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD, HEAD // 8], [4, 1], [1, 0])
    b_m = gl.full([ROWS], -float("inf"), gl.float32, gl.SliceLayout(1, s_layout))
    b_l = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, s_layout))
    zeros = gl.zeros([ROWS, KEYS], gl.float32, s_layout)
    b_out = gl.zeros([ROWS, HEAD], gl.float32, o_layout)
    b_p = gl.zeros([ROWS, KEYS], gl.bfloat16, p_layout)
    _wait(k_bar, before, 0, tiles)
    b_k = _tile(k_s, before, start, end, HEAD, BYTES, False)
    b_s = warpgroup_mma(q_s, b_k.permute((1, 0)), zeros, use_acc=False, is_async=True)
    b_s = warpgroup_mma_wait(0, [b_s])
    debug_barrier()  # all warps have read the keys of tile 0
    _expect(k_bar, before + 3, loads > 3, BYTES)
    debug_barrier()
    _load(cache_d, k_s, k_bar, before + 3, slot, column, loads > 3)
    _wait(k_bar, before, 1, tiles)
    for i in range(0, tiles - 1):
        done = gl.maximum(i - 1, 0)  # the probabilities of tile -1 are zero
        _wait(v_bar, before, done, tiles)
        b_v = _tile(v_s, before + done, start, end, HEAD, BYTES, False)
        b_acc = warpgroup_mma(b_p, b_v, b_out, is_async=True)
        b_k = _tile(k_s, before + i + 1, start, end, HEAD, BYTES, False)
        b_next = warpgroup_mma(q_s, b_k.permute((1, 0)), zeros, use_acc=False, is_async=True)
        b_new, b_m, b_l, old = _softmax(
            b_s, b_m, b_l, o_pos, tree, start + i * KEYS, end, full, scale, CAUSAL, WINDOW
        )  # fmt: skip
        _wait(k_bar, before, i + 2, tiles)  # here, so that the compiler does not move the next line up
        b_s, b_out = warpgroup_mma_wait(0, [b_next, b_acc])
        b_out = b_out * gl.convert_layout(old, gl.SliceLayout(1, o_layout))[:, None]
        b_p = gl.convert_layout(b_new.to(gl.bfloat16), p_layout)
        debug_barrier()  # all warps have read keys i + 1 and values i - 1
        k_wanted, v_wanted = i + 4 < loads, (i > 0) & (i + 2 < loads)
        _expect(k_bar, before + i + 4, k_wanted, BYTES)
        _expect(v_bar, before + i + 2, v_wanted, BYTES)
        debug_barrier()
        _load(cache_d, k_s, k_bar, before + i + 4, next_slot, column, k_wanted)
        _load(cache_d, v_s, v_bar, before + i + 2, slots + values, column, v_wanted)
        values, slot, next_slot = slot, next_slot, _slot(p_pages, start + (i + 5) * KEYS, columns, PAGE)
    i = tiles - 1
    if BYTES == 2 * HEAD:
        b_v = v_s[0].index((before + i) % STAGES)
        _wait(v_bar, before, i, tiles)
        if start + tiles * KEYS > end:  # unwritten slots may hold NaN, which a probability of zero does not hide
            o_t = start + i * KEYS + gl.arange(0, KEYS, gl.SliceLayout(1, wide))
            b_v.store(gl.where((o_t < end)[:, None], b_v.load(wide), 0.0))
            fence_async_shared()
            debug_barrier()
    done = gl.maximum(i - 1, 0)
    _wait(v_bar, before, done, tiles)  # loads may arrive in another order
    b_acc = warpgroup_mma(
        b_p, _tile(v_s, before + done, start + done * KEYS, end, HEAD, BYTES, True), b_out, is_async=True
    )
    b_new, b_m, b_l, old = _softmax(b_s, b_m, b_l, o_pos, tree, start + i * KEYS, end, full, scale, CAUSAL, WINDOW)
    _wait(v_bar, before, i, tiles)  # also for the compiler
    b_out = warpgroup_mma_wait(0, [b_acc]) * gl.convert_layout(old, gl.SliceLayout(1, o_layout))[:, None]
    b_p = gl.convert_layout(b_new.to(gl.bfloat16), p_layout)
    if BYTES != 2 * HEAD:
        debug_barrier()  # all warps have read the converted values of the tile before
    b_acc = warpgroup_mma(b_p, _tile(v_s, before + i, start + i * KEYS, end, HEAD, BYTES, True), b_out, is_async=True)
    b_out = warpgroup_mma_wait(0, [b_acc])
    return b_m, b_l, b_out, values, slot, next_slot


@gluon.jit
def _window_start(position, WINDOW: gl.constexpr):
    """Returns the first of KEYS keys that contain the start of the window, or chunk, of a row at this position."""
    begin = position // -WINDOW * -WINDOW if WINDOW < 0 else gl.maximum(position - (WINDOW - 1), 0)
    return begin // KEYS * KEYS


@gluon.jit
def _in_window(
    start, stop, position, i_s, SHORT: gl.constexpr, SHORT_SPLITS: gl.constexpr, LONG: gl.constexpr,
    PAIRS: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """Returns a program's first split without keys before the window of a row at this position.

    PAIRS: if the first split is before the window, the program has only the second one, in its place. Otherwise the
    first one keeps two tiles, as the loads of the second one expect.
    """
    begin = gl.maximum(start, _window_start(position, WINDOW))
    if PAIRS:
        before = begin >= stop
        begin = gl.where(before, begin, gl.minimum(begin, stop - 2 * KEYS))
        stop = gl.where(before, _split_start(i_s + 2, SHORT, SHORT_SPLITS, LONG), stop)
    return begin, stop


@gluon.jit
def _fold(m_0, l_0, m_1, l_1):
    """Merges two states, bit for bit like the merge kernel. Returns the factors of their sums, m and l."""
    top = gl.maximum(m_0, m_1)
    base = gl.where(top == -float("inf"), 0.0, top)
    e_0, e_1 = gl.exp2(m_0 - base), gl.exp2(m_1 - base)
    return e_0, e_1, top, gl.fma(l_1, e_1, l_0 * e_0)


@gluon.jit
def _pad(
    out_p, m_p, l_p, acc_p, first, M, i_r, i_g, SPLITS,
    G: gl.constexpr, GROUP: gl.constexpr, HEAD: gl.constexpr, WHOLE: gl.constexpr,
):  # fmt: skip
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD, HEAD // 8], [4, 1], [1, 0])
    rows: gl.constexpr = gl.SliceLayout(1, wide)
    o_h = gl.arange(0, HEAD, gl.SliceLayout(0, wide))
    heads = (M - first) * GROUP
    for at in range(i_r * ROWS, heads, gl.num_programs(0) * ROWS):
        o_row = at + gl.arange(0, ROWS, rows)
        m_row = o_row < heads
        o_x = (first + o_row // GROUP).to(gl.int64) * G + i_g
        if WHOLE:
            o_out = (o_x * GROUP + o_row % GROUP)[:, None] * HEAD + o_h[None, :]
            gl.store(out_p + o_out, gl.zeros([ROWS, HEAD], gl.bfloat16, wide), mask=m_row[:, None])
        else:
            o_part = o_x * SPLITS * GROUP + o_row % GROUP
            gl.store(m_p + o_part, gl.zeros([ROWS], gl.float32, rows), mask=m_row)
            gl.store(l_p + o_part, gl.full([ROWS], 1.0, gl.float32, rows), mask=m_row)
            zeros = gl.zeros([ROWS, HEAD], gl.float32, wide)
            gl.store(acc_p + o_part[:, None] * HEAD + o_h[None, :], zeros, mask=m_row[:, None])


@gluon.jit
def _parts(i_r, i_x, i_s, row, o_tile, SPLITS, G: gl.constexpr, GROUP: gl.constexpr, RAGGED: gl.constexpr):
    """Returns the places of the states of a tile's rows."""
    if RAGGED:
        o_row = i_r * ROWS + o_tile
        o_part = (((row.to(gl.int64) + o_row // GROUP) * G + i_x % G) * SPLITS + i_s) * GROUP + o_row % GROUP
    else:
        o_part = ((i_x * gl.num_programs(0) + i_r) * SPLITS + i_s).to(gl.int64) * ROWS + o_tile
    return o_part


@gluon.jit(do_not_specialize=["S", "columns", "SPLITS"])
def hopper_attention_kernel(
    cache_d, scales_d, q_p, lengths_p, counts_p, starts_p, depths_p, ancestors_p, pages_p, sinks_p,
    out_p, m_p, l_p, acc_p, S, columns, stride_pages, slots, scale, SPLITS,
    G: gl.constexpr, GROUP: gl.constexpr, HEAD: gl.constexpr, PAGE: gl.constexpr,
    SHORT: gl.constexpr, SHORT_SPLITS: gl.constexpr, LONG: gl.constexpr, WHOLE: gl.constexpr, PAIRS: gl.constexpr,
    RAGGED: gl.constexpr, TREE: gl.constexpr, COUNTED: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """Computes program (tile, request * G + KV head, split); the rest is as in `_attention_kernel`.

    PAIRS: a program has two splits; their merged state is stored as that of the first.
    cache_d: boxes [KEYS, HEAD] of the cache viewed as [2 slots, G HEAD]: all keys, then all values; fp8 as uint8.
    scales_d: None, or boxes [1, KEYS] of the scales of an fp8 cache viewed as [1, 2 G slots].
    """
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD, 16])
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD, HEAD // 8], [4, 1], [1, 0])
    queries: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, HEAD], gl.bfloat16)
    BYTES: gl.constexpr = 2 * HEAD if scales_d is None else HEAD + 2
    i_r, i_x, i_s = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    i_b, i_g = (i_x // G).to(gl.int64), i_x % G
    if RAGGED:
        if i_x + G >= gl.num_programs(1):
            if i_s == 0:
                grid_launch()
                grid_wait()
                first = gl.load(starts_p + i_b)
                _pad(out_p, m_p, l_p, acc_p, first, S, i_r, i_g, SPLITS, G, GROUP, HEAD, WHOLE or SHORT == LONG)
            return
        if i_r > 0:  # every request has a first row
            heads = (gl.load(starts_p + i_b + 1) - gl.load(starts_p + i_b)) * GROUP
            if i_r * ROWS >= heads:
                return
    if SHORT == LONG and i_s * LONG >= gl.load(lengths_p + i_b) + MARGIN:  # as most of these programs
        return
    cache_d = cache_d, scales_d
    q_s = gl.allocate_shared_memory(gl.bfloat16, [ROWS, HEAD], queries)
    k_s = _ring(cache_d, i_g * slots, HEAD)
    v_s = _ring(cache_d, (i_g + G - 1) * slots, HEAD)  # a value's slot is `slots` after its key's
    k_bar = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_bar = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(k_bar.index(i), count=1)
        mbarrier.init(v_bar.index(i), count=1)
    fence_async_shared()  # makes the barriers visible to asynchronous loads
    debug_barrier()
    _prefetch_descriptor()

    column = i_g * HEAD
    p_pages = pages_p + i_b * stride_pages
    start, stop = 0, 0x7FFFFFFF
    if not WHOLE:
        if PAIRS:
            i_s = 2 * i_s
        start = _split_start(i_s, SHORT, SHORT_SPLITS, LONG)
        stop = _split_start(i_s + 1, SHORT, SHORT_SPLITS, LONG)
    grid_launch()
    length = gl.load(lengths_p + i_b)
    if RAGGED:
        row = gl.load(starts_p + i_b)
        count = gl.load(starts_p + i_b + 1) - row
    else:
        row, count = i_b * S, S
    if WINDOW != 0:
        tokens = count
        if COUNTED:
            tokens = gl.load(counts_p + i_b)
        lowest = length
        if not (TREE or (SHORT == LONG and not WHOLE)):  # as in `_attention_kernel`
            lowest = length + gl.minimum(i_r * ROWS // GROUP, tokens - 1)
        start, stop = _in_window(start, stop, lowest, i_s, SHORT, SHORT_SPLITS, LONG, PAIRS, WINDOW)
    slot_0 = _slot(p_pages, start, columns, PAGE)  # loaded before the length is known
    slot_1 = _slot(p_pages, start + KEYS, columns, PAGE)
    slot_2 = _slot(p_pages, start + 2 * KEYS, columns, PAGE)
    slot_3 = _slot(p_pages, start + 3 * KEYS, columns, PAGE)
    slot_4 = _slot(p_pages, start + 4 * KEYS, columns, PAGE)
    end = length + count
    if COUNTED:
        end = length + gl.load(counts_p + i_b)
    if CAUSAL or TREE:  # ancestors come before a node
        end = gl.minimum(end, length + ((i_r + 1) * ROWS - 1) // GROUP + 1)
    tiles = _tiles(start, stop, end)
    if tiles == 0:
        return
    second = 0  # tiles of the second split
    if PAIRS:
        second = _tiles(stop, _split_start(i_s + 2, SHORT, SHORT_SPLITS, LONG), end)
    loads = tiles + second
    full = end  # a tile that ends by this position needs no mask
    if CAUSAL:
        full = gl.minimum(end, length + i_r * ROWS // GROUP + 1)
    if TREE:
        full = gl.minimum(end, length + 1)
    old = gl.minimum(gl.maximum(length - start, 0) // KEYS, loads)  # tiles of the context alone
    _expect_first(k_bar, v_bar, loads, BYTES)
    places = (slot_0, slot_1, slot_2)
    _load_first(cache_d, k_s, v_s, k_bar, v_bar, places, slots, column, 0, old)
    grid_wait()
    _load_first(cache_d, k_s, v_s, k_bar, v_bar, places, slots, column, old, loads)

    o_row = i_r * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, wide))  # slot-major: a slot's heads are adjacent
    o_slot = o_row // GROUP
    o_q = ((row.to(gl.int64) + o_slot) * G + i_g) * GROUP + o_row % GROUP
    o_h = gl.arange(0, HEAD, gl.SliceLayout(0, wide))
    b_q = gl.load(q_p + o_q[:, None] * HEAD + o_h[None, :], mask=(o_slot < count)[:, None], other=0.0)
    q_s.store(b_q)
    fence_async_shared()
    debug_barrier()

    o_slot = (i_r * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, s_layout))) // GROUP
    if TREE:
        o_pos = length + gl.load(depths_p + row + o_slot, mask=o_slot < count, other=0)
        tree = (gl.load(ancestors_p + row + o_slot, mask=o_slot < count, other=0), length, depths_p + row)
    else:
        o_pos, tree = length + o_slot, None
        if WINDOW != 0 and COUNTED:
            o_pos = length + gl.minimum(o_slot, tokens - 1)
    rows: gl.constexpr = gl.SliceLayout(1, o_layout)
    o_tile = gl.arange(0, ROWS, rows)
    o_slot = (i_r * ROWS + o_tile) // GROUP
    o_h = gl.arange(0, HEAD, gl.SliceLayout(0, o_layout))
    m_row = o_slot < count
    b_m, b_l, b_out, slot_2, slot_3, slot_4 = _state(
        cache_d, q_s, k_s, v_s, k_bar, v_bar, p_pages, columns, slots, column,
        start, 0, tiles, loads, slot_2, slot_3, slot_4, o_pos, tree, end, full, scale,
        HEAD, PAGE, BYTES, CAUSAL, WINDOW,
    )  # fmt: skip
    if PAIRS and second > 0:  # PAIRS: Triton 3.6 fails on a branch that is never taken, unless it is a constexpr
        _load_second(cache_d, v_s, v_bar, tiles, second, slots, slot_2, slot_3, column, BYTES)
        slot_5 = _slot(p_pages, stop + 4 * KEYS, columns, PAGE)
        if scales_d is not None:  # conversions need its registers
            o_part = _parts(i_r, i_x, i_s, row, o_tile, SPLITS, G, GROUP, RAGGED)
            gl.store(acc_p + o_part[:, None] * HEAD + o_h[None, :], b_out, mask=m_row[:, None])
        m_1, l_1, b_1, _2, _3, _4 = _state(
            cache_d, q_s, k_s, v_s, k_bar, v_bar, p_pages, columns, slots, column,
            stop, tiles, second, second, slot_3, slot_4, slot_5, o_pos, tree, end, full, scale,
            HEAD, PAGE, BYTES, CAUSAL, WINDOW,
        )  # fmt: skip
        if scales_d is not None:
            o_part = _parts(i_r, i_x, i_s, row, o_tile, SPLITS, G, GROUP, RAGGED)
            b_out = gl.load(acc_p + o_part[:, None] * HEAD + o_h[None, :], mask=m_row[:, None], other=0.0)
        e_0, e_1, b_m, b_l = _fold(b_m, b_l, m_1, l_1)
        e_0, e_1 = gl.convert_layout(e_0, rows)[:, None], gl.convert_layout(e_1, rows)[:, None]
        b_out = gl.fma(b_1, e_1, b_out * e_0)
    b_m, b_l = gl.convert_layout(b_m, rows), gl.convert_layout(b_l, rows)
    if not WHOLE:
        o_part = _parts(i_r, i_x, i_s, row, o_tile, SPLITS, G, GROUP, RAGGED)
        m_part = m_row
        if SHORT == LONG:  # a request with one split is stored at once
            m_part, m_row = m_row & (length + MARGIN > LONG), m_row & (length + MARGIN <= LONG)
        gl.store(m_p + o_part, b_m, mask=m_part)
        gl.store(l_p + o_part, b_l, mask=m_part)
        gl.store(acc_p + o_part[:, None] * HEAD + o_h[None, :], b_out, mask=m_part[:, None])
    if WHOLE or SHORT == LONG:
        o_q = ((row.to(gl.int64) + o_slot) * G + i_g) * GROUP + (i_r * ROWS + o_tile) % GROUP
        if sinks_p is not None:
            head = i_g * GROUP + (i_r * ROWS + o_tile) % GROUP
            b_l = b_l + gl.exp2(gl.load(sinks_p + head).to(gl.float32) * 1.4426950408889634 - b_m)
        b_out = b_out / gl.where(m_row, b_l, 1.0)[:, None]
        gl.store(out_p + o_q[:, None] * HEAD + o_h[None, :], b_out.to(gl.bfloat16), mask=m_row[:, None])


def fits(q: Tensor, kv: PagedKV) -> bool:
    """Returns whether the kernel can run this: a Hopper GPU, bf16, heads of 64 or 128, whole tiles a page, no cap."""
    return (
        features_of(q.device).hopper
        and q.dtype == (kv.cache if kv.scales is None else kv.scales).dtype == torch.bfloat16
        and q.shape[2] in (64, 128)
        and kv.size % KEYS.value == 0
        and not kv.soft_cap
        and q.is_contiguous()
        and kv.cache.is_contiguous()
        and kv.cache.data_ptr() % 16 == 0
    )


def launch(
    q: Tensor,
    kv: PagedKV,
    out: Tensor,
    states: tuple[Tensor, Tensor, Tensor],
    splits: int,
    cuts: dict[str, int],
    *,
    causal: bool,
    whole: bool,
    pairs: bool,
    counts: Tensor | None = None,
    ragged: tuple[TreeRows, int] | None = None,
) -> None:
    """Writes attention to `out`, or (not `whole`) each split's state to `states` for the merge. Needs `fits`.

    Args:
        states: m and l [programs, splits, ROWS], acc [programs, splits, ROWS, H], fp32; `ragged` m and l
            [M * G, splits, N / G] and acc [M * G, splits, N / G, H].
        cuts: SHORT, SHORT_SPLITS and LONG, the positions of the splits.
        pairs: a program has two splits; their state is stored in the first one's place.
        ragged: the rows, and the maximum of a request; unless `causal` they are rows of trees.
    """
    (m, heads, width), (_, slots, groups, _) = q.shape, kv.cache.shape
    lengths, batch, group = kv.lengths, len(kv.lengths), heads // groups
    rows, block = ragged or (None, m // batch)
    requests = batch if rows is None else batch + 1
    of_rows = (lengths,) * 3 if rows is None else (rows.starts, rows.depths, rows.ancestors)
    assert cuts["SHORT_SPLITS"] % 2 == 0, "the splits of a pair are of one kind"
    programs = -(-splits // 2) if pairs else splits
    hopper_attention_kernel[(-(-block * group // ROWS.value), requests * groups, programs)](
        *boxes(kv), q, lengths, lengths if counts is None else counts, *of_rows, kv.table, kv.sinks, out, *states,
        block if rows is None else m, kv.table.shape[1], kv.table.stride(0), slots,
        kv.score_factor * LOG2_E, splits,
        G=groups, GROUP=group, HEAD=width, PAGE=kv.size, WHOLE=whole, PAIRS=pairs, RAGGED=rows is not None,
        TREE=rows is not None and not causal, COUNTED=counts is not None, CAUSAL=causal, WINDOW=kv.window, **cuts,
        num_warps=4, launch_pdl=True,
    )  # fmt: skip
