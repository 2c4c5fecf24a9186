"""Tiles of keys and values in shared memory, for the attention kernels in Gluon for sm_90.

TMA loads them from the pages of a cache, STAGES tiles ahead. Tiles of an fp8 cache are converted when they are used.
"""

# mypy: disable-error-code="no-untyped-def"

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language import debug_barrier

from ..paged import PagedKV

ROWS = gl.constexpr(64)  # rows of a tile and of the matrix instruction
KEYS = gl.constexpr(64)
STAGES = gl.constexpr(3)  # tiles of keys and of values in shared memory: two programs still fit a multiprocessor


@gluon.jit
def _ring(cache_d, first, HEAD: gl.constexpr):
    """Allocates shared memory for STAGES tiles of keys or of values, and in fp8 for their scales and a tile in bf16.

    first: index of the KV head's first scale among all scales.
    """
    tiles_d, scales_d = cache_d
    tiles = gl.allocate_shared_memory(tiles_d.dtype, [STAGES, KEYS, HEAD], tiles_d.layout)
    if scales_d is None:
        return (tiles,)
    else:
        scales = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 1, KEYS], scales_d.layout)
        layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, HEAD], gl.bfloat16)
        converted = gl.allocate_shared_memory(gl.bfloat16, [KEYS, HEAD], layout)
        return tiles, scales, converted, first


@gluon.jit
def _expect(bar, i, wanted, BYTES: gl.constexpr):
    """BYTES: of a key, and its scale."""
    mbarrier.expect(bar.index(i % STAGES), KEYS * BYTES, pred=wanted)


@gluon.jit
def _load(cache_d, ring, bar, i, slot, column, wanted):
    """Starts the load of the program's tile i of keys or of values: KEYS slots of a KV head."""
    tiles_d, scales_d = cache_d
    at, bar = i % STAGES, bar.index(i % STAGES)
    tma.async_copy_global_to_shared(tiles_d, [slot, column], bar, ring[0].index(at), pred=wanted)
    if scales_d is not None:
        tma.async_copy_global_to_shared(scales_d, [0, ring[3] + slot], bar, ring[1].index(at), pred=wanted)


@gluon.jit
def in_bf16(b_x, b_scale):
    """Converts bits of fp8, uint8, to bf16 and multiplies them by scales in bf16.

    As `of_bits` in triton/fp8.py; `power` holds 2**120 twice.
    """
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 low, high, low_sign, high_sign, power;
        mov.b32 power, 0x7B807B80;
        prmt.b32 low, $2, 0, 0x1404;
        prmt.b32 high, $2, 0, 0x3424;
        and.b32 low_sign, low, 0x80008000;
        and.b32 high_sign, high, 0x80008000;
        shr.u32 low, low, 4;
        shr.u32 high, high, 4;
        lop3.b32 low, low, 0x07F007F0, low_sign, 0xEA;
        lop3.b32 high, high, 0x07F007F0, high_sign, 0xEA;
        mul.rn.bf16x2 low, low, power;
        mul.rn.bf16x2 high, high, power;
        mul.rn.bf16x2 $0, low, $3;
        mul.rn.bf16x2 $1, high, $4;
        }""",
        "=r,=r,r,r,r", [b_x, b_scale], dtype=gl.bfloat16, is_pure=True, pack=4,
    )  # fmt: skip


@gluon.jit
def _tile(ring, i, at, end, HEAD: gl.constexpr, BYTES: gl.constexpr, CLEAN: gl.constexpr):
    """Returns the program's tile i as products take it, after it has come; converts it if it is in fp8.

    CLEAN: converts the keys or values from position `end` on to zeros; the tile begins at position `at`.
    """
    found = ring[0].index(i % STAGES)
    if BYTES != 2 * HEAD:
        wide: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD, HEAD // 8], [4, 1], [1, 0])
        b_x = in_bf16(found.load(wide), ring[1].index(i % STAGES).permute((1, 0)).load(wide))
        if CLEAN:
            o_t = at + gl.arange(0, KEYS, gl.SliceLayout(1, wide))
            b_x = gl.where((o_t < end)[:, None], b_x, 0.0)
        ring[2].store(b_x)
        fence_async_shared()
        debug_barrier()
        found = ring[2]
    return found


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
def _expect_first(k_bar, v_bar, tiles, BYTES: gl.constexpr):
    """Announces the bytes of the first of `tiles` tiles to their barriers, before their loads start."""
    for i in gl.static_range(STAGES):
        _expect(k_bar, i, i < tiles, BYTES)
        _expect(v_bar, i, i < tiles, BYTES)
    debug_barrier()


@gluon.jit
def _load_first(cache_d, k_s, v_s, k_bar, v_bar, places, slots, column, first, tiles):
    """Starts the loads of tiles first..tiles - 1 that are among the STAGES first ones, which are at `places`."""
    for i in gl.static_range(STAGES):
        wanted = (first <= i) & (i < tiles)
        _load(cache_d, k_s, k_bar, i, places[i], column, wanted)
        _load(cache_d, v_s, v_bar, i, slots + places[i], column, wanted)


@gluon.jit
def _load_second(cache_d, v_s, v_bar, tiles, second, slots, values, slot, column, BYTES: gl.constexpr):
    """Starts the loads of the values of tiles 1 and 2 of a program's second split, from the places `values` and `slot`.

    The first split, of `tiles` tiles, has started the other loads that `_state` expects.
    """
    debug_barrier()  # all warps have read the values of the first split
    _expect(v_bar, tiles + 1, second > 1, BYTES)
    _expect(v_bar, tiles + 2, second > 2, BYTES)
    debug_barrier()
    _load(cache_d, v_s, v_bar, tiles + 1, slots + values, column, second > 1)
    _load(cache_d, v_s, v_bar, tiles + 2, slots + slot, column, second > 2)


def boxes(kv: PagedKV) -> tuple[TensorDescriptor, TensorDescriptor | None]:
    """Returns `cache_d` and `scales_d` of the kernel."""
    _, slots, groups, width = kv.cache.shape
    cache, element = (kv.cache, gl.bfloat16) if kv.scales is None else (kv.cache.view(torch.uint8), gl.uint8)
    box = [KEYS.value, width]
    layout = gl.NVMMASharedLayout.get_default_for(box, element)
    tiles = TensorDescriptor.from_tensor(cache.view(2 * slots, groups * width), box, layout)
    if kv.scales is None:
        return tiles, None
    line = [1, KEYS.value]
    layout = gl.NVMMASharedLayout.get_default_for(line, gl.bfloat16)
    return tiles, TensorDescriptor.from_tensor(kv.scales.view(1, -1), line, layout)
