"""Causal attention of long chunks of prompts in Gluon for sm_90, for the inputs that `attention.py` supports.

A program has two warpgroups of 64 rows, which share the tiles of keys and values that a third one loads; so it reads
half the bytes of the L2 cache that two programs of `attention.py` read. While one warpgroup computes a softmax, the
matrix units work for the other one (from FlashAttention-3, arXiv 2407.08608).

A row has the tiles, instructions and order of `attention.py` with one program for all keys, and so the same bits.
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

from ..launch import LOG2_E, multiprocessors, next_power_of_two
from ..paged import PagedKV
from . import attention
from .attention import KEYS, ROWS, _slot, _softmax

SIDES = gl.constexpr(2)  # warpgroups that compute
STAGES = gl.constexpr(5)  # tiles of keys and of values in shared memory


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
        slot, next_slot = _slot(p_pages, 0, columns, PAGE), _slot(p_pages, KEYS, columns, PAGE)
        for i in range(0, (end + KEYS - 1) // KEYS):
            at, free = done % STAGES, (done // STAGES + 1) % 2
            mbarrier.wait(k_free.index(at), free)
            mbarrier.expect(k_full.index(at), KEYS * HEAD * 2)
            tma.async_copy_global_to_shared(cache_d, [slot, i_g * HEAD], k_full.index(at), k_s.index(at))
            mbarrier.wait(v_free.index(at), free)
            mbarrier.expect(v_full.index(at), KEYS * HEAD * 2)
            tma.async_copy_global_to_shared(cache_d, [slots + slot, i_g * HEAD], v_full.index(at), v_s.index(at))
            done += 1
            slot, next_slot = next_slot, _slot(p_pages, (i + 2) * KEYS, columns, PAGE)


@gluon.jit
def _wait(bar, i):
    mbarrier.wait(bar.index(i % STAGES), i // STAGES % 2)


@gluon.jit
def _free(bar, i):
    mbarrier.arrive(bar.index(i % STAGES), count=1)


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
            b_p = gl.zeros([ROWS, KEYS], gl.bfloat16, p_layout)
            last = (end + KEYS - 1) // KEYS - 1
            _wait(k_full, done)
            b_s = warpgroup_mma(b_q, k_s.index(done % STAGES).permute((1, 0)), zeros, use_acc=False, is_async=True)
            b_s = warpgroup_mma_wait(0, [b_s])
            _free(k_free, done)
            for i in range(0, last):
                keys, values = done + i + 1, done + gl.maximum(i - 1, 0)  # the probabilities of tile -1 are zero
                _wait(k_full, keys)
                b_k = k_s.index(keys % STAGES).permute((1, 0))
                b_next = warpgroup_mma(b_q, b_k, zeros, use_acc=False, is_async=True)
                _wait(v_full, values)
                b_acc = warpgroup_mma(b_p, v_s.index(values % STAGES), b_out, is_async=True)
                b_new, b_m, b_l, old = _softmax(b_s, b_m, b_l, o_pos, None, i * KEYS, end, full, scale, True, 0)
                _wait(v_full, done + i)  # here, so that the compiler does not move the next line up
                b_s, b_out = warpgroup_mma_wait(0, [b_next, b_acc])
                _free(k_free, keys)
                if i > 0:
                    _free(v_free, values)
                b_out = b_out * gl.convert_layout(old, gl.SliceLayout(1, o_layout))[:, None]
                b_p = gl.convert_layout(b_new.to(gl.bfloat16), p_layout)
            values, done = done + gl.maximum(last - 1, 0), done + last
            b_v = v_s.index(done % STAGES)
            _wait(v_full, done)
            if (last + 1) * KEYS > stop:  # unwritten slots may hold NaN, which a probability of zero keeps
                if SIDE == 0:
                    o_t = last * KEYS + gl.arange(0, KEYS, gl.SliceLayout(1, wide))
                    b_v.store(gl.where((o_t < stop)[:, None], b_v.load(wide), 0.0))
                    fence_async_shared()
                    debug_barrier()
                mbarrier.arrive(clean, count=1)
                mbarrier.wait(clean, cleaned % 2)
                cleaned += 1
            _wait(v_full, values)  # loads may arrive in another order
            b_acc = warpgroup_mma(b_p, v_s.index(values % STAGES), b_out, is_async=True)
            b_new, b_m, b_l, old = _softmax(b_s, b_m, b_l, o_pos, None, last * KEYS, end, full, scale, True, 0)
            _wait(v_full, done)  # also for the compiler
            b_out = warpgroup_mma_wait(0, [b_acc]) * gl.convert_layout(old, gl.SliceLayout(1, o_layout))[:, None]
            if last > 0:
                _free(v_free, values)
            b_p = gl.convert_layout(b_new.to(gl.bfloat16), p_layout)
            b_acc = warpgroup_mma(b_p, b_v, b_out, is_async=True)
            b_out = warpgroup_mma_wait(0, [b_acc])
            _free(v_free, done)
            done += 1
            m_row = (top + gl.arange(0, ROWS, gl.SliceLayout(1, o_layout))) // GROUP < count
            b_out = b_out / gl.where(m_row, gl.convert_layout(b_l, gl.SliceLayout(1, o_layout)), 1.0)[:, None]
            gl.store(out_p + o_q, gl.convert_layout(b_out.to(gl.bfloat16), wide), mask=m_q)
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
    k_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, KEYS, HEAD], cache_d.layout)
    v_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, KEYS, HEAD], cache_d.layout)
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


def pays(q: Tensor, kv: PagedKV) -> bool:
    """Returns whether the kernel can run this, and is faster than `attention.py`: on an H200 with this many tiles.

    Both return the same bits. `attention.py` also has windows.
    """
    if not (kv.plain and attention.fits(q, kv)):
        return False
    tiles = len(q) * q.shape[1] // (SIDES.value * ROWS.value)
    return 2 * tiles > 3 * multiprocessors(q.device.index)


def launch(q: Tensor, kv: PagedKV, counts: Tensor | None = None, starts: Tensor | None = None) -> Tensor:
    """Returns the causal attention [M, N H] of queries [M, N, H]. Needs `attention.fits` and a plain cache.

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
        batch, rows, tiles, items, kv.table.shape[1], kv.table.stride(0), slots, width**-0.5 * LOG2_E,
        G=groups, GROUP=group, HEAD=width, PAGE=kv.size,
        BATCH=0 if starts is None else max(32, next_power_of_two(batch + 1)), COUNTED=counts is not None, num_warps=4,
    )  # fmt: skip
    return out
