"""The attention kernel of `attention.py` in Gluon for sm_90, for bf16 heads of 64 or 128 and pages of whole tiles.

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
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language import debug_barrier

from ..features import features_of
from ..launch import LOG2_E
from ..paged import PagedKV
from ..tree import TreeRows
from .grid import grid_launch, grid_wait

ROWS = gl.constexpr(64)  # rows of a tile and of the matrix instruction
KEYS = gl.constexpr(64)
STAGES = gl.constexpr(3)  # tiles of keys and of values in shared memory: two programs still fit a multiprocessor


@gluon.jit
def _split_start(i_s, SHORT: gl.constexpr, SHORT_SPLITS: gl.constexpr, LONG: gl.constexpr):
    return gl.where(i_s < SHORT_SPLITS, i_s * SHORT, SHORT_SPLITS * SHORT + (i_s - SHORT_SPLITS) * LONG)


@gluon.jit
def _prefetch_descriptor():
    """Prefetches the kernel's first argument, `cache_d`, so that the first load does not wait for it."""
    gl.inline_asm_elementwise(
        "prefetch.param.tensormap [hopper_attention_kernel_param_0]; mov.u32 $0, 0;",
        "=r", [], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _expect(bar, i, wanted, HEAD: gl.constexpr):
    mbarrier.expect(bar.index(i % STAGES), KEYS * HEAD * 2, pred=wanted)


@gluon.jit
def _load(cache_d, ring, bar, i, slot, column, wanted):
    """Starts the load of the program's tile i of keys or of values: KEYS slots of a KV head."""
    tma.async_copy_global_to_shared(cache_d, [slot, column], bar.index(i % STAGES), ring.index(i % STAGES), pred=wanted)


@gluon.jit
def _wait(bar, before, i, tiles):
    """Waits for tile i of a split, or for its last tile if i is larger. `before`: tiles of earlier splits."""
    i = before + gl.minimum(i, tiles - 1)
    mbarrier.wait(bar.index(i % STAGES), i // STAGES % 2)


@gluon.jit
def _slot(p_pages, position, columns, PAGE: gl.constexpr):
    """Returns the cache slot of a position, or any slot if the position is after the end of the page table."""
    return gl.load(p_pages + gl.minimum(position // PAGE, columns - 1)) * PAGE + position % PAGE


@gluon.jit
def _tiles(start, stop, end):
    """Returns the number of tiles of the split start..stop before `end`; 0 if it begins after `end`."""
    return gl.maximum(gl.minimum(stop, end) - start + KEYS - 1, 0) // KEYS


@gluon.jit
def _softmax(b_s, b_m, b_l, o_pos, tree, first, end, full, scale, CAUSAL: gl.constexpr, WINDOW: gl.constexpr):
    """Returns a tile's probabilities, the state of its rows and the factor of the sums so far.

    The fused multiplications are written out, so that all compiled copies of this function round the same way.
    """
    if WINDOW > 0 or first + KEYS > full:
        o_t = first + gl.arange(0, KEYS, gl.SliceLayout(0, b_s.type.layout))
        visible = (o_t < end)[None, :]
        if tree is not None:
            ancestors, length, p_depths = tree
            o_place = o_t - length
            bits = gl.minimum(gl.maximum(o_place - 1, 0), 63).to(gl.int64)  # the anchor's place has no node
            visible = visible & ((o_place <= 0)[None, :] | ((ancestors[:, None] >> bits[None, :]) & 1 != 0))
            if WINDOW > 0:
                depths = gl.load(p_depths + o_place, mask=(o_place > 0) & (o_t < end), other=0)
                o_t = gl.where(o_place > 0, length + depths, o_t)
        if CAUSAL:
            visible = visible & (o_t[None, :] <= o_pos[:, None])
        if WINDOW > 0:
            visible = visible & (gl.abs(o_pos[:, None] - o_t[None, :]) < WINDOW)
        b_s = gl.where(visible, b_s, -float("inf"))
    top = gl.maximum(b_m, gl.max(b_s, axis=1) * scale)
    base = gl.where(top == -float("inf"), 0.0, top)
    b_p = gl.exp2(gl.fma(b_s, scale, -base[:, None]))
    old = gl.exp2(b_m - base)
    return b_p, top, gl.fma(b_l, old, gl.sum(b_p, axis=1)), old


@gluon.jit
def _expect_first(k_bar, v_bar, tiles, HEAD: gl.constexpr):
    """Announces the bytes of the first of `tiles` tiles to their barriers, before their loads start."""
    for i in gl.static_range(STAGES):
        _expect(k_bar, i, i < tiles, HEAD)
        _expect(v_bar, i, i < tiles, HEAD)
    debug_barrier()


@gluon.jit
def _load_first(cache_d, k_s, v_s, k_bar, v_bar, places, slots, column, first, tiles):
    """Starts the loads of tiles first..tiles - 1 that are among the STAGES first ones, which are at `places`."""
    for i in gl.static_range(STAGES):
        wanted = (first <= i) & (i < tiles)
        _load(cache_d, k_s, k_bar, i, places[i], column, wanted)
        _load(cache_d, v_s, v_bar, i, slots + places[i], column, wanted)


@gluon.jit
def _state(
    cache_d, q_s, k_s, v_s, k_bar, v_bar, p_pages, columns, slots, column,
    start, before, tiles, loads, values, slot, next_slot, o_pos, tree, end, full, scale,
    HEAD: gl.constexpr, PAGE: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """Returns the softmax state of a tile's rows over a split's keys, and the places of the three tiles after its
    second one. The loads of its first three tiles have started.

    Args:
        before: tiles of the program's split before it.
        loads: tiles to load, those of the program's second split included.
        values, slot, next_slot: places of the tiles 2, 3 and 4, if they are loaded.
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
    b_k = k_s.index(before % STAGES)
    b_s = warpgroup_mma(q_s, b_k.permute((1, 0)), zeros, use_acc=False, is_async=True)
    b_s = warpgroup_mma_wait(0, [b_s])
    debug_barrier()  # all warps have read the keys of tile 0
    _expect(k_bar, before + 3, loads > 3, HEAD)
    debug_barrier()
    _load(cache_d, k_s, k_bar, before + 3, slot, column, loads > 3)
    _wait(k_bar, before, 1, tiles)
    for i in range(0, tiles - 1):
        b_k = k_s.index((before + i + 1) % STAGES)
        b_next = warpgroup_mma(q_s, b_k.permute((1, 0)), zeros, use_acc=False, is_async=True)
        done = gl.maximum(i - 1, 0)  # the probabilities of tile -1 are zero
        _wait(v_bar, before, done, tiles)
        b_acc = warpgroup_mma(b_p, v_s.index((before + done) % STAGES), b_out, is_async=True)
        b_new, b_m, b_l, old = _softmax(
            b_s, b_m, b_l, o_pos, tree, start + i * KEYS, end, full, scale, CAUSAL, WINDOW
        )  # fmt: skip
        _wait(k_bar, before, i + 2, tiles)  # here, so that the compiler does not move the next line up
        b_s, b_out = warpgroup_mma_wait(0, [b_next, b_acc])
        b_out = b_out * gl.convert_layout(old, gl.SliceLayout(1, o_layout))[:, None]
        b_p = gl.convert_layout(b_new.to(gl.bfloat16), p_layout)
        debug_barrier()  # all warps have read keys i + 1 and values i - 1
        k_wanted, v_wanted = i + 4 < loads, (i > 0) & (i + 2 < loads)
        _expect(k_bar, before + i + 4, k_wanted, HEAD)
        _expect(v_bar, before + i + 2, v_wanted, HEAD)
        debug_barrier()
        _load(cache_d, k_s, k_bar, before + i + 4, next_slot, column, k_wanted)
        _load(cache_d, v_s, v_bar, before + i + 2, slots + values, column, v_wanted)
        values, slot, next_slot = slot, next_slot, _slot(p_pages, start + (i + 5) * KEYS, columns, PAGE)
    i = tiles - 1
    b_v = v_s.index((before + i) % STAGES)
    _wait(v_bar, before, i, tiles)
    if start + tiles * KEYS > end:  # unwritten slots may hold NaN, which a probability of zero does not hide
        o_t = start + i * KEYS + gl.arange(0, KEYS, gl.SliceLayout(1, wide))
        b_v.store(gl.where((o_t < end)[:, None], b_v.load(wide), 0.0))
        fence_async_shared()
        debug_barrier()
    done = gl.maximum(i - 1, 0)
    _wait(v_bar, before, done, tiles)  # loads may arrive in another order
    b_acc = warpgroup_mma(b_p, v_s.index((before + done) % STAGES), b_out, is_async=True)
    b_new, b_m, b_l, old = _softmax(b_s, b_m, b_l, o_pos, tree, start + i * KEYS, end, full, scale, CAUSAL, WINDOW)
    _wait(v_bar, before, i, tiles)  # also for the compiler
    b_out = warpgroup_mma_wait(0, [b_acc]) * gl.convert_layout(old, gl.SliceLayout(1, o_layout))[:, None]
    b_p = gl.convert_layout(b_new.to(gl.bfloat16), p_layout)
    b_acc = warpgroup_mma(b_p, b_v, b_out, is_async=True)
    return b_m, b_l, warpgroup_mma_wait(0, [b_acc]), values, slot, next_slot


@gluon.jit
def _load_second(cache_d, v_s, v_bar, tiles, second, slots, values, slot, column, HEAD: gl.constexpr):
    """Starts the loads of the values of tiles 1 and 2 of a program's second split, from the places `values` and `slot`.

    The first split, of `tiles` tiles, has started the other loads that `_state` expects.
    """
    debug_barrier()  # all warps have read the values of the first split
    _expect(v_bar, tiles + 1, second > 1, HEAD)
    _expect(v_bar, tiles + 2, second > 2, HEAD)
    debug_barrier()
    _load(cache_d, v_s, v_bar, tiles + 1, slots + values, column, second > 1)
    _load(cache_d, v_s, v_bar, tiles + 2, slots + slot, column, second > 2)


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


@gluon.jit(do_not_specialize=["S", "columns", "SPLITS"])
def hopper_attention_kernel(
    cache_d, q_p, lengths_p, counts_p, starts_p, depths_p, ancestors_p, pages_p, out_p, m_p, l_p, acc_p,
    S, columns, stride_pages, slots, scale, SPLITS,
    G: gl.constexpr, GROUP: gl.constexpr, HEAD: gl.constexpr, PAGE: gl.constexpr,
    SHORT: gl.constexpr, SHORT_SPLITS: gl.constexpr, LONG: gl.constexpr, WHOLE: gl.constexpr, PAIRS: gl.constexpr,
    RAGGED: gl.constexpr, TREE: gl.constexpr, COUNTED: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """Computes program (tile, request * G + KV head, split); the rest is as in `_attention_kernel`.

    PAIRS: a program has two splits; their merged state is stored as that of the first.
    cache_d: boxes [KEYS, HEAD] of the cache viewed as [2 slots, G HEAD]: all keys, then all values.
    """
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD, 16])
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD, HEAD // 8], [4, 1], [1, 0])
    i_r, i_x, i_s = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    i_b, i_g = (i_x // G).to(gl.int64), i_x % G
    if RAGGED:
        if i_x + G >= gl.num_programs(1):
            if i_s == 0:
                grid_launch()
                grid_wait()
                _pad(out_p, m_p, l_p, acc_p, gl.load(starts_p + i_b), S, i_r, i_g, SPLITS, G, GROUP, HEAD, WHOLE)
            return
        if i_r > 0:  # every request has a first row
            heads = (gl.load(starts_p + i_b + 1) - gl.load(starts_p + i_b)) * GROUP
            if i_r * ROWS >= heads:
                return
    q_s = gl.allocate_shared_memory(gl.bfloat16, [ROWS, HEAD], cache_d.layout)
    k_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, KEYS, HEAD], cache_d.layout)
    v_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, KEYS, HEAD], cache_d.layout)
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
    _expect_first(k_bar, v_bar, loads, HEAD)
    places = (slot_0, slot_1, slot_2)
    _load_first(cache_d, k_s, v_s, k_bar, v_bar, places, slots, column, 0, old)
    grid_wait()
    _load_first(cache_d, k_s, v_s, k_bar, v_bar, places, slots, column, old, loads)

    o_row = i_r * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, wide))  # slot-major: a slot's heads are adjacent
    o_slot = o_row // GROUP
    o_q = ((row.to(gl.int64) + o_slot) * G + i_g) * GROUP + o_row % GROUP
    o_h = gl.arange(0, HEAD, gl.SliceLayout(0, wide))
    q_s.store(gl.load(q_p + o_q[:, None] * HEAD + o_h[None, :], mask=(o_slot < count)[:, None], other=0.0))
    fence_async_shared()
    debug_barrier()

    o_slot = (i_r * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, s_layout))) // GROUP
    if TREE:
        o_pos = length + gl.load(depths_p + row + o_slot, mask=o_slot < count, other=0)
        tree = (gl.load(ancestors_p + row + o_slot, mask=o_slot < count, other=0), length, depths_p + row)
    else:
        o_pos, tree = length + o_slot, None
    rows: gl.constexpr = gl.SliceLayout(1, o_layout)
    o_tile = gl.arange(0, ROWS, rows)
    o_slot = (i_r * ROWS + o_tile) // GROUP
    o_h = gl.arange(0, HEAD, gl.SliceLayout(0, o_layout))
    m_row = o_slot < count
    b_m, b_l, b_out, slot_2, slot_3, slot_4 = _state(
        cache_d, q_s, k_s, v_s, k_bar, v_bar, p_pages, columns, slots, column,
        start, 0, tiles, loads, slot_2, slot_3, slot_4, o_pos, tree, end, full, scale, HEAD, PAGE, CAUSAL, WINDOW,
    )  # fmt: skip
    if PAIRS and second > 0:  # PAIRS: Triton 3.6 fails on a branch that is never taken, unless it is a constexpr
        _load_second(cache_d, v_s, v_bar, tiles, second, slots, slot_2, slot_3, column, HEAD)
        slot_5 = _slot(p_pages, stop + 4 * KEYS, columns, PAGE)
        m_1, l_1, b_1, _2, _3, _4 = _state(
            cache_d, q_s, k_s, v_s, k_bar, v_bar, p_pages, columns, slots, column,
            stop, tiles, second, second, slot_3, slot_4, slot_5, o_pos, tree, end, full, scale,
            HEAD, PAGE, CAUSAL, WINDOW,
        )  # fmt: skip
        e_0, e_1, b_m, b_l = _fold(b_m, b_l, m_1, l_1)
        e_0, e_1 = gl.convert_layout(e_0, rows)[:, None], gl.convert_layout(e_1, rows)[:, None]
        b_out = gl.fma(b_1, e_1, b_out * e_0)
    b_m, b_l = gl.convert_layout(b_m, rows), gl.convert_layout(b_l, rows)
    o_head, o_x = (i_r * ROWS + o_tile) % GROUP, (row.to(gl.int64) + o_slot) * G + i_g
    if WHOLE:
        o_q = o_x * GROUP + o_head
        b_out = b_out / gl.where(m_row, b_l, 1.0)[:, None]
        gl.store(out_p + o_q[:, None] * HEAD + o_h[None, :], b_out.to(gl.bfloat16), mask=m_row[:, None])
    else:
        if RAGGED:
            o_part = (o_x * SPLITS + i_s) * GROUP + o_head
        else:
            o_part = ((i_x * gl.num_programs(0) + i_r) * SPLITS + i_s).to(gl.int64) * ROWS + o_tile
        gl.store(m_p + o_part, b_m, mask=m_row)
        gl.store(l_p + o_part, b_l, mask=m_row)
        gl.store(acc_p + o_part[:, None] * HEAD + o_h[None, :], b_out, mask=m_row[:, None])


def fits(q: Tensor, kv: PagedKV) -> bool:
    """Returns whether the kernel can run this: a Hopper GPU, bf16, heads of 64 or 128, pages of whole tiles."""
    return (
        features_of(q.device).hopper
        and q.dtype == kv.cache.dtype == torch.bfloat16
        and q.shape[2] in (64, 128)
        and kv.size % KEYS.value == 0
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
    box = [KEYS.value, width]
    layout = gl.NVMMASharedLayout.get_default_for(box, gl.bfloat16)
    hopper_attention_kernel[(-(-block * group // ROWS.value), requests * groups, programs)](
        TensorDescriptor.from_tensor(kv.cache.view(2 * slots, groups * width), box, layout),
        q, lengths, lengths if counts is None else counts, *of_rows, kv.table, out, *states,
        block if rows is None else m, kv.table.shape[1], kv.table.stride(0), slots,
        width**-0.5 * LOG2_E, splits,
        G=groups, GROUP=group, HEAD=width, PAGE=kv.size, WHOLE=whole, PAIRS=pairs, RAGGED=rows is not None,
        TREE=rows is not None and not causal, COUNTED=counts is not None, CAUSAL=causal, WINDOW=kv.window, **cuts,
        num_warps=4, launch_pdl=True,
    )  # fmt: skip
