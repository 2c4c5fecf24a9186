"""Causal attention of long chunks of prompts in Gluon for sm_90, for the inputs that `attention.py` supports.

A program has two warpgroups of 64 rows, which share the tiles of keys and values that a third one loads; so it reads
half the bytes of the L2 cache that two programs of `attention.py` read. A warpgroup scores two tiles at a time. Its
softmax runs while the matrix units add up the values of the two tiles before, and while they work for the other
warpgroup (from FlashAttention-3, arXiv 2407.08608).

A row's keys are summed in one split, in pairs of tiles at fixed positions. So its bits do not depend on where a prompt
is cut into chunks of this kernel, or on other prompts of a pass.
"""

# mypy: disable-error-code="no-untyped-def"

import math

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

from ..launch import LOG2_E, multiprocessors, next_power_of_two
from ..paged import PagedKV
from . import attention
from .tiles import KEYS, ROWS, _slot

SIDES = gl.constexpr(2)  # warpgroups that compute
STAGES = gl.constexpr(3)  # pairs of tiles of keys and of values in shared memory
PAIR = gl.constexpr(2 * KEYS.value)  # keys
LEAST_BUSY = 0.75  # share of the multiprocessors' time, if all tiles take equally long


@gluon.jit
def _softmax(b_0, b_1, b_m, b_l, o_pos, first, end, full, scale):
    """Returns the probabilities of two tiles, the state of the rows and the factor of the sums so far."""
    if first + PAIR > full:
        o_t = first + gl.arange(0, KEYS, gl.SliceLayout(0, b_0.type.layout))
        b_0 = gl.where((o_t < end)[None, :] & (o_t[None, :] <= o_pos[:, None]), b_0, -float("inf"))
        o_t += KEYS
        b_1 = gl.where((o_t < end)[None, :] & (o_t[None, :] <= o_pos[:, None]), b_1, -float("inf"))
    top = gl.maximum(b_m, gl.max(gl.maximum(b_0, b_1), axis=1) * scale)
    base = gl.where(top == -float("inf"), 0.0, top)
    p_0 = gl.exp2(gl.fma(b_0, scale, -base[:, None]))
    p_1 = gl.exp2(gl.fma(b_1, scale, -base[:, None]))
    old = gl.exp2(b_m - base)
    return p_0, p_1, top, gl.fma(b_l, old, gl.sum(p_0 + p_1, axis=1)), old


@gluon.jit
def _item(
    turn, requests, G: gl.constexpr, GROUP: gl.constexpr, BATCH: gl.constexpr, COUNTED: gl.constexpr,
):  # fmt: skip
    """Returns this program's item `turn`: its request, first row, number of rows, tile and KV head, the length of its
    context, the end of its keys, and the end of those that the tile sees: 0 if the tile has no rows.

    The longest items come first, and every other round of the programs runs backward, so that all end together. Tile t
    of request b of ragged rows is number starts[b] * GROUP // tile size + b + t; the last tile of a request may be
    empty.
    """
    lengths_p, counts_p, starts_p, B, S, tiles, items = requests
    programs, i = gl.num_programs(0), gl.program_id(0)
    item = turn * programs + gl.where(turn % 2 == 0, i, programs - 1 - i)
    at = gl.maximum(items - 1 - item, 0)
    i_t, i_g = at // G, at % G
    if BATCH == 0:
        i_b, count = i_t // tiles, S
        row, i_r = i_b * S, i_t % tiles
    else:
        o_b = gl.arange(0, BATCH, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
        first = gl.load(starts_p + o_b, mask=o_b <= B, other=0) * GROUP // (SIDES * ROWS) + o_b
        i_b = gl.sum(((o_b <= B) & (first <= i_t)).to(gl.int32), axis=0) - 1
        row = gl.load(starts_p + i_b)
        count = gl.where(i_b < B, gl.load(starts_p + i_b + 1, mask=i_b < B, other=0), S) - row
        i_r = i_t - row * GROUP // (SIDES * ROWS) - i_b
    i_k = gl.minimum(i_b, B - 1)  # B: padding
    length = gl.load(lengths_p + i_k)
    stop = length + count
    if COUNTED:
        stop = length + gl.load(counts_p + i_k)
    end = gl.minimum(stop, length + ((i_r + 1) * SIDES * ROWS - 1) // GROUP + 1)
    end = gl.where((i_b < B) & (item < items) & (i_r * SIDES * ROWS < count * GROUP), end, 0)
    return i_b, row, count, i_r, i_g, length, stop, end


@gluon.jit
def _turns(items):
    return (items + gl.num_programs(0) - 1) // gl.num_programs(0)


@gluon.jit
def _stream(
    cache_d, rings, requests, pages_p, columns, stride_pages, slots,
    G: gl.constexpr, GROUP: gl.constexpr, HEAD: gl.constexpr, PAGE: gl.constexpr, BATCH: gl.constexpr,
    COUNTED: gl.constexpr,
):  # fmt: skip
    """Loads the tiles of keys and values of this program's items, when slots of the rings become free."""
    k_s, k_full, k_free, v_s, v_full, v_free = rings
    done = gl.to_tensor(0)
    for turn in range(0, _turns(requests[6])):
        i_b, _row, _count, _i_r, i_g, _length, _stop, end = _item(turn, requests, G, GROUP, BATCH, COUNTED)
        p_pages = pages_p + gl.minimum(i_b, requests[3] - 1).to(gl.int64) * stride_pages
        column = i_g * HEAD
        slot_0, slot_1 = _slot(p_pages, 0, columns, PAGE), _slot(p_pages, KEYS, columns, PAGE)
        for i in range(0, (end + PAIR - 1) // PAIR):
            at, free = done % STAGES, (done // STAGES + 1) % 2
            next_0 = _slot(p_pages, (2 * i + 2) * KEYS, columns, PAGE)
            next_1 = _slot(p_pages, (2 * i + 3) * KEYS, columns, PAGE)
            mbarrier.wait(k_free.index(at), free)
            mbarrier.expect(k_full.index(at), PAIR * HEAD * 2)
            tma.async_copy_global_to_shared(cache_d, [slot_0, column], k_full.index(at), k_s.index(2 * at))
            tma.async_copy_global_to_shared(cache_d, [slot_1, column], k_full.index(at), k_s.index(2 * at + 1))
            mbarrier.wait(v_free.index(at), free)
            mbarrier.expect(v_full.index(at), PAIR * HEAD * 2)
            tma.async_copy_global_to_shared(cache_d, [slots + slot_0, column], v_full.index(at), v_s.index(2 * at))
            tma.async_copy_global_to_shared(cache_d, [slots + slot_1, column], v_full.index(at), v_s.index(2 * at + 1))
            done += 1
            slot_0, slot_1 = next_0, next_1


@gluon.jit
def _wait(bar, i):
    mbarrier.wait(bar.index(i % STAGES), i // STAGES % 2)


@gluon.jit
def _free(bar, i):
    mbarrier.arrive(bar.index(i % STAGES), count=1)


@gluon.jit
def _score(b_q, k_s, i, zeros):
    """Starts the products of the queries with the keys of pair i."""
    k_0, k_1 = k_s.index(i % STAGES * 2), k_s.index(i % STAGES * 2 + 1)
    b_0 = warpgroup_mma(b_q, k_0.permute((1, 0)), zeros, use_acc=False, is_async=True)
    return b_0, warpgroup_mma(b_q, k_1.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def _add(p_0, p_1, v_s, i, b_out):
    """Starts adding the values of pair i."""
    b_out = warpgroup_mma(p_0, v_s.index(i % STAGES * 2), b_out, is_async=True)
    return warpgroup_mma(p_1, v_s.index(i % STAGES * 2 + 1), b_out, is_async=True)


@gluon.jit
def _attend(
    SIDE: gl.constexpr, rings, clean, requests, q_p, out_p, scale,
    G: gl.constexpr, GROUP: gl.constexpr, HEAD: gl.constexpr, BATCH: gl.constexpr, COUNTED: gl.constexpr,
):  # fmt: skip
    """Computes ROWS rows of every tile of this program; SIDE is the number of the warpgroup.

    clean: a barrier for the warpgroups, for values after the end of a request.
    """
    k_s, k_full, k_free, v_s, v_full, v_free = rings
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD, 16])
    q_layout: gl.constexpr = gl.DotOperandLayout(0, s_layout, 2)
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD, HEAD // 8], [4, 1], [1, 0])
    o_h = gl.arange(0, HEAD, gl.SliceLayout(0, wide))
    done, cleaned = gl.to_tensor(0), gl.to_tensor(0)
    for turn in range(0, _turns(requests[6])):
        i_b, row, count, i_r, i_g, length, stop, end = _item(turn, requests, G, GROUP, BATCH, COUNTED)
        top = (i_r * SIDES + SIDE) * ROWS
        o_row = top + gl.arange(0, ROWS, gl.SliceLayout(1, wide))  # slot-major: a slot's heads are adjacent
        o_q = ((row.to(gl.int64) + o_row // GROUP) * G + i_g) * GROUP + o_row % GROUP
        o_q = o_q[:, None] * HEAD + o_h[None, :]
        m_q = (o_row // GROUP < count)[:, None]
        if end > 0:
            b_q = gl.convert_layout(gl.load(q_p + o_q, mask=m_q, other=0.0), q_layout)
            o_pos = length + (top + gl.arange(0, ROWS, gl.SliceLayout(1, s_layout))) // GROUP
            full = gl.minimum(end, length + top // GROUP + 1)  # a tile that ends by this position needs no mask
            zeros = gl.zeros([ROWS, KEYS], gl.float32, s_layout)
            b_m = gl.full([ROWS], -float("inf"), gl.float32, gl.SliceLayout(1, s_layout))
            b_l = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, s_layout))
            b_out = gl.zeros([ROWS, HEAD], gl.float32, o_layout)
            last = (end + PAIR - 1) // PAIR - 1
            _wait(k_full, done)
            b_0, b_1 = _score(b_q, k_s, done, zeros)
            b_0, b_1 = warpgroup_mma_wait(0, [b_0, b_1])
            _free(k_free, done)
            p_0, p_1, b_m, b_l, old = _softmax(b_0, b_1, b_m, b_l, o_pos, 0, end, full, scale)
            p_0 = gl.convert_layout(p_0.to(gl.bfloat16), p_layout)
            p_1 = gl.convert_layout(p_1.to(gl.bfloat16), p_layout)
            for i in range(0, last):
                keys, values = done + i + 1, done + i
                _wait(k_full, keys)
                _wait(v_full, values)
                s_0, s_1 = _score(b_q, k_s, keys, zeros)
                b_acc = _add(p_0, p_1, v_s, values, b_out)
                b_0, b_1 = warpgroup_mma_wait(2, [s_0, s_1])  # not for the two products with values
                _free(k_free, keys)
                first = (i + 1) * PAIR
                new_0, new_1, b_m, b_l, old = _softmax(b_0, b_1, b_m, b_l, o_pos, first, end, full, scale)
                _wait(v_full, values)  # here, so that the compiler does not move the next line up
                b_out = warpgroup_mma_wait(0, [b_acc])
                _free(v_free, values)
                b_out = b_out * gl.convert_layout(old, gl.SliceLayout(1, o_layout))[:, None]
                p_0 = gl.convert_layout(new_0.to(gl.bfloat16), p_layout)
                p_1 = gl.convert_layout(new_1.to(gl.bfloat16), p_layout)
            done += last
            _wait(v_full, done)
            if (last + 1) * PAIR > stop:  # unwritten slots may hold NaN, which a probability of zero keeps
                if SIDE == 0:
                    for j in gl.static_range(2):
                        b_v = v_s.index(done % STAGES * 2 + j)
                        o_t = last * PAIR + j * KEYS + gl.arange(0, KEYS, gl.SliceLayout(1, wide))
                        b_v.store(gl.where((o_t < stop)[:, None], b_v.load(wide), 0.0))
                    fence_async_shared()
                    debug_barrier()
                mbarrier.arrive(clean, count=1)
                mbarrier.wait(clean, cleaned % 2)
                cleaned += 1
            b_acc = _add(p_0, p_1, v_s, done, b_out)
            b_out = warpgroup_mma_wait(0, [b_acc])
            _free(v_free, done)
            done += 1
            o_out = top + gl.arange(0, ROWS, gl.SliceLayout(1, o_layout))
            m_row = o_out // GROUP < count
            b_out = b_out / gl.where(m_row, gl.convert_layout(b_l, gl.SliceLayout(1, o_layout)), 1.0)[:, None]
            o_x = ((row.to(gl.int64) + o_out // GROUP) * G + i_g) * GROUP + o_out % GROUP
            p_out = out_p + o_x[:, None] * HEAD + gl.arange(0, HEAD, gl.SliceLayout(0, o_layout))[None, :]
            gl.store(p_out, b_out.to(gl.bfloat16), mask=m_row[:, None])
        elif BATCH > 0:  # padding
            gl.store(out_p + o_q, gl.zeros([ROWS, HEAD], gl.bfloat16, wide), mask=m_q & (i_b == requests[3]))


@gluon.jit(do_not_specialize=["B", "S", "tiles", "items", "columns"])
def hopper_prefill_kernel(
    cache_d, q_p, lengths_p, counts_p, starts_p, pages_p, out_p,
    B, S, tiles, items, columns, stride_pages, slots, scale,
    G: gl.constexpr, GROUP: gl.constexpr, HEAD: gl.constexpr, PAGE: gl.constexpr, BATCH: gl.constexpr,
    COUNTED: gl.constexpr,
):  # fmt: skip
    """Computes out [M, N HEAD]: `items` tiles of SIDES * ROWS rows of a request and a KV head.

    BATCH: 0 if each of B requests has S rows, in `tiles` tiles; else a power of two above B: request b has rows
    starts[b] to starts[b + 1] - 1 of S together, and padding follows, which becomes zero.
    cache_d: boxes [KEYS, HEAD] of the cache viewed as [2 slots, G HEAD]: all keys, then all values.
    """
    k_s = gl.allocate_shared_memory(gl.bfloat16, [2 * STAGES, KEYS, HEAD], cache_d.layout)
    v_s = gl.allocate_shared_memory(gl.bfloat16, [2 * STAGES, KEYS, HEAD], cache_d.layout)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    clean = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_free.index(i), count=SIDES)
        mbarrier.init(v_free.index(i), count=SIDES)
    mbarrier.init(clean, count=SIDES)
    fence_async_shared()  # makes the barriers visible to asynchronous loads
    rings = (k_s, k_full, k_free, v_s, v_full, v_free)
    requests = (lengths_p, counts_p, starts_p, B, S, tiles, items)
    gl.warp_specialize(
        [
            (_attend, (0, rings, clean, requests, q_p, out_p, scale, G, GROUP, HEAD, BATCH, COUNTED)),
            (_attend, (1, rings, clean, requests, q_p, out_p, scale, G, GROUP, HEAD, BATCH, COUNTED)),
            (_stream, (
                cache_d, rings, requests, pages_p, columns, stride_pages, slots, G, GROUP, HEAD, PAGE, BATCH, COUNTED,
            )),
        ],
        [4, 1],  # warps of the second side, and warps that load
        [240, 24],  # their registers
    )  # fmt: skip


def fits(q: Tensor, kv: PagedKV) -> bool:
    """Returns whether the kernel can run this and keeps the multiprocessors busy. `attention.py` has windows.

    It has two tiles of half the size on a multiprocessor, so it is faster for 256 and 513 rows of 32 heads on an H200.
    """
    if not kv.plain or not attention.fits(q, kv):
        return False
    groups = kv.cache.shape[2]
    rounds = groups * -(-len(q) * q.shape[1] // (groups * SIDES.value * ROWS.value)) / multiprocessors(q.device.index)
    return rounds >= LEAST_BUSY * math.ceil(rounds)


def launch(q: Tensor, kv: PagedKV, counts: Tensor | None = None, starts: Tensor | None = None) -> Tensor:
    """Returns the causal attention [M, N H] of queries [M, N, H]. Needs `fits`.

    Args:
        counts: int32 [B], the rows of each request that are tokens; None: all.
        starts: int32 [B + 1], the first row of each request, and of the padding; None: each has M / B rows.
    """
    (m, heads, width), (_, slots, groups, _) = q.shape, kv.cache.shape
    batch, group, size = len(kv.lengths), heads // groups, SIDES.value * ROWS.value
    rows = m // batch if starts is None else m
    tiles = -(-rows * group // size)
    items = (batch * tiles if starts is None else m * group // size + batch + 1) * groups
    box = [KEYS.value, width]
    layout = gl.NVMMASharedLayout.get_default_for(box, gl.bfloat16)
    out = torch.empty(m, heads * width, dtype=q.dtype, device=q.device)
    lengths = kv.lengths
    hopper_prefill_kernel[(min(items, multiprocessors(q.device.index)),)](
        TensorDescriptor.from_tensor(kv.cache.view(2 * slots, groups * width), box, layout),
        q, lengths, lengths if counts is None else counts, lengths if starts is None else starts, kv.table, out,
        batch, rows, tiles, items, kv.table.shape[1], kv.table.stride(0), slots, kv.score_factor * LOG2_E,
        G=groups, GROUP=group, HEAD=width, PAGE=kv.size,
        BATCH=0 if starts is None else max(32, next_power_of_two(batch + 1)), COUNTED=counts is not None, num_warps=4,
    )  # fmt: skip
    return out
