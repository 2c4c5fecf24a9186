"""GEMMs with operands in ring buffers of shared memory, for the persistent Gluon kernels.

A program of such a kernel has a warp that loads weights, one that loads rows, and eight that compute. A ring buffer has
several slots; one barrier of a slot signals that it is full, another that it is free. All warps process the blocks in
the same order: program i has the groups of tiles i, i + programs, ..., each along the whole K of its split, and at
every step the weights of the group's tiles one after the other.

A block is [64 weights or the rows, BLOCK_BYTES]. In fp8 it has twice as many columns as in bf16.
"""

# mypy: disable-error-code="no-untyped-def"
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..features import features_of
from ..formats import Weight, is_row_scaled, parts
from ..launch import MAX_ROWS, multiprocessors

BLOCK_N = 64  # weight rows of a tile and of the matrix instruction
BLOCK_BYTES = gl.constexpr(256)  # bytes of a row of a block
COLUMNS = 128  # columns of a block in bf16; in fp8 the last one may be half empty
WARPS = 8  # warps that compute
SHARED_BYTES = 208 * 1024  # bytes of the rings; the rest is for transposing a tile


class Slots(NamedTuple):
    """The numbers of blocks of weights and of rows that fit; results do not depend on them."""

    weights: int
    rows: int


def slots_of(rows: int) -> Slots:
    """Returns the sizes of the rings for GEMMs of `rows` rows, a power of two."""
    row_slots = 8 if rows < 64 else 4  # with three, a single tile waits for its rows
    return Slots((SHARED_BYTES // BLOCK_BYTES.value - row_slots * rows) // BLOCK_N, row_slots)


def wide_of(tiles: int, splits: int, rows: int, programs: int) -> int:
    """Returns the number of tiles that a program computes at a time, with the same rows, for a GEMM in `splits`.

    A single tile reads as many bytes of rows, from L2, as of weights at 64 rows, and twice as many at 128.
    """
    if rows < 64:
        return 1
    widths = [w for w in (3, 2, 1) if tiles % w == 0]
    return min(widths, key=lambda w: w * -(-tiles * splits // (w * programs)))


def block_k(matrix: Weight) -> int:
    """Returns the columns of a block of this matrix."""
    return BLOCK_BYTES.value // parts(matrix)[0].element_size()


def fits(x: Tensor, matrices: Sequence[Weight | None]) -> bool:
    """Returns whether GEMMs of x [M, K] can stream these matrices, which are all in bf16 or all in fp8.

    They need a Hopper GPU, x in bf16, at most MAX_ROWS rows, and whole tiles.
    """
    return (
        features_of(x.device).hopper
        and x.dtype == torch.bfloat16
        and len(x) <= min(MAX_ROWS, programs_of(x.device.index))
        and len({is_row_scaled(m) for m in matrices if m is not None}) == 1
        and all(len(m) % BLOCK_N == 0 and parts(m)[0].shape[1] % COLUMNS == 0 for m in matrices if m is not None)
    )


def programs_of(device: int) -> int:
    """Returns the number of programs: one on every multiprocessor."""
    return multiprocessors(device)


def blocks_of(matrix: Weight, rows: int) -> TensorDescriptor:
    """Returns a matrix [N, K] in blocks of `rows` rows, for asynchronous loads."""
    block, data = [rows, block_k(matrix)], parts(matrix)[0]
    element = gl.float8e4nv if data.dtype == torch.float8_e4m3fn else gl.bfloat16
    return TensorDescriptor.from_tensor(data, block, gl.NVMMASharedLayout.get_default_for(block, element))


@gluon.constexpr_function
def steps_of(k, splits, block):
    """Returns the number of blocks along K of every split."""
    return -(-k // (block * splits))


@gluon.constexpr_function
def layout_of(rows, block, warps):
    """Returns the layout of a tile's sums [BLOCK_N, rows]; each warpgroup has a part of the rows."""
    sides = warps // 4
    return gl.NVMMADistributedLayout([3, 0], [4, sides], [16, rows // sides, block // 8])  # 32 bytes along K


@gluon.jit
def make_rings(
    w_d, x_d, T: gl.constexpr, SLOTS: gl.constexpr, ROW_SLOTS: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
):  # fmt: skip
    """Allocates the rings of weights and of rows. Returns blocks, full and free barriers of each."""
    w_s = gl.allocate_shared_memory(w_d.dtype, [SLOTS, BLOCK_N, BLOCK_K], w_d.layout)
    x_s = gl.allocate_shared_memory(x_d.dtype, [ROW_SLOTS, T, BLOCK_K], x_d.layout)
    w_full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    w_free = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    x_full = gl.allocate_shared_memory(gl.int64, [ROW_SLOTS, 1], mbarrier.MBarrierLayout())
    x_free = gl.allocate_shared_memory(gl.int64, [ROW_SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SLOTS):
        mbarrier.init(w_full.index(i), count=1)
        mbarrier.init(w_free.index(i), count=1)
    for i in gl.static_range(ROW_SLOTS):
        mbarrier.init(x_full.index(i), count=1)
        mbarrier.init(x_free.index(i), count=1)
    return w_s, w_full, w_free, x_s, x_full, x_free


@gluon.jit
def stream(
    d, ring, full, free, done, TILES: gl.constexpr, SPLITS: gl.constexpr, K: gl.constexpr, WIDE: gl.constexpr,
    WEIGHTS: gl.constexpr, SLOTS: gl.constexpr, BLOCK: gl.constexpr, BLOCK_K: gl.constexpr,
):  # fmt: skip
    """Loads this program's blocks of a GEMM, one by one, when slots of the ring become free.

    WEIGHTS: loads the weights of WIDE tiles in turn at every step along K; else loads the rows, the same for every
    tile. Columns after K in the last split are loaded as zeros.
    """
    groups: gl.constexpr = TILES // WIDE
    iters: gl.constexpr = steps_of(K, SPLITS, BLOCK_K)
    each: gl.constexpr = WIDE if WEIGHTS else 1
    for item in range(gl.program_id(0), groups * SPLITS, gl.num_programs(0)):
        for j in range(0, iters * each):
            k = ((item // groups) * iters + j // each) * BLOCK_K
            n = ((item % groups) * WIDE + j % each) * BLOCK if WEIGHTS else 0
            slot = done % SLOTS
            mbarrier.wait(free.index(slot), (done // SLOTS + 1) % 2)
            mbarrier.expect(full.index(slot), BLOCK * BLOCK_BYTES)
            tma.async_copy_global_to_shared(d, [n, k], full.index(slot), ring.index(slot))
            done += 1
    return done


@gluon.jit
def _multiply(b_acc, rings, b_x, at, SLOTS: gl.constexpr):
    """Adds the product of b_x and block `at` of the ring of weights, and frees the block's slot."""
    w_s, w_full, w_free = rings[0], rings[1], rings[2]
    slot = at % SLOTS
    mbarrier.wait(w_full.index(slot), at // SLOTS % 2)
    b_acc = warpgroup_mma(w_s.index(slot), b_x, b_acc, is_async=True)
    b_acc = warpgroup_mma_wait(0, [b_acc])
    mbarrier.arrive(w_free.index(slot), count=1)
    return b_acc


@gluon.jit
def accumulate(
    rings, w_done, x_done, ITERS: gl.constexpr, WIDE: gl.constexpr, T: gl.constexpr,
    SLOTS: gl.constexpr, ROW_SLOTS: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
):  # fmt: skip
    """Sums a group's tiles [BLOCK_N, T] over ITERS blocks of K, in fp32. Returns three; the first WIDE are used."""
    x_s, x_full, x_free = rings[3], rings[4], rings[5]
    b_0 = gl.zeros([BLOCK_N, T], gl.float32, layout_of(T, BLOCK_K, gl.num_warps()))
    b_1, b_2 = b_0, b_0
    for _step in range(0, ITERS):
        slot = x_done % ROW_SLOTS
        mbarrier.wait(x_full.index(slot), x_done // ROW_SLOTS % 2)
        b_x = x_s.index(slot).permute((1, 0))
        b_0 = _multiply(b_0, rings, b_x, w_done, SLOTS)
        if WIDE > 1:
            b_1 = _multiply(b_1, rings, b_x, w_done + 1, SLOTS)
        if WIDE > 2:
            b_2 = _multiply(b_2, rings, b_x, w_done + 2, SLOTS)
        mbarrier.arrive(x_free.index(slot), count=1)
        w_done += WIDE
        x_done += 1
    return b_0, b_1, b_2, w_done, x_done
