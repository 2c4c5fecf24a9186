"""The head and its argmax in one persistent kernel (Gluon); it stores no logits and streams weights without a pause."""

# mypy: disable-error-code="no-untyped-def"
import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..launch import padded
from ..triton.argmax import reduce_argmax
from .grid import grid_launch, grid_wait
from .pipeline import BLOCK_N, WARPS, accumulate, block_k, blocks_of, make_rings, programs_of, slots_of, stream, wide_of


@gluon.jit
def _best(b_acc, best_p, index_p, tile, M, T: gl.constexpr, BLOCK_N: gl.constexpr):
    """Stores every row's largest logit of a finished tile [BLOCK_N, T] and its column to best, index [tiles, M]."""
    layout: gl.constexpr = b_acc.type.layout
    o_n = tile * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(1, layout))
    o_m = gl.arange(0, T, gl.SliceLayout(0, layout))
    b_acc = b_acc.to(gl.bfloat16).to(gl.float32)  # rounded as stored logits would be
    b_best = gl.max(b_acc, axis=0)
    b_index = gl.min(gl.where(b_acc == b_best[None, :], o_n[:, None], 2**31 - 1), axis=0)
    gl.store(best_p + tile * M + o_m, b_best, mask=o_m < M)
    gl.store(index_p + tile * M + o_m, b_index, mask=o_m < M)


@gluon.jit
def _compute(
    rings, best_p, index_p, M, TILES: gl.constexpr, K: gl.constexpr, WIDE: gl.constexpr,
    T: gl.constexpr, SLOTS: gl.constexpr, ROW_SLOTS: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
):  # fmt: skip
    """The warps that compute."""
    w_done, x_done = gl.to_tensor(0), gl.to_tensor(0)
    grid_wait()
    for item in range(gl.program_id(0), TILES // WIDE, gl.num_programs(0)):
        b_0, b_1, b_2, w_done, x_done = accumulate(
            rings, w_done, x_done, K // BLOCK_K, WIDE, T, SLOTS, ROW_SLOTS, BLOCK_N, BLOCK_K
        )
        _best(b_0, best_p, index_p, item * WIDE, M, T, BLOCK_N)
        if WIDE > 1:
            _best(b_1, best_p, index_p, item * WIDE + 1, M, T, BLOCK_N)
        if WIDE > 2:
            _best(b_2, best_p, index_p, item * WIDE + 2, M, T, BLOCK_N)
    grid_launch()


@gluon.jit
def _stream_weights(
    w_d, rings, TILES: gl.constexpr, K: gl.constexpr, WIDE: gl.constexpr,
    SLOTS: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
):  # fmt: skip
    stream(w_d, rings[0], rings[1], rings[2], gl.to_tensor(0), TILES, 1, K, WIDE, True, SLOTS, BLOCK_N, BLOCK_K)


@gluon.jit
def _stream_rows(
    x_d, rings, TILES: gl.constexpr, K: gl.constexpr, WIDE: gl.constexpr,
    ROW_SLOTS: gl.constexpr, T: gl.constexpr, BLOCK_K: gl.constexpr,
):  # fmt: skip
    grid_wait()
    stream(x_d, rings[3], rings[4], rings[5], gl.to_tensor(0), TILES, 1, K, WIDE, False, ROW_SLOTS, T, BLOCK_K)


@gluon.jit(do_not_specialize=["M"])
def head_kernel(
    w_d, x_d, best_p, index_p, M, TILES: gl.constexpr, K: gl.constexpr, WIDE: gl.constexpr, T: gl.constexpr,
    SLOTS: gl.constexpr, ROW_SLOTS: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
):  # fmt: skip
    """Computes the largest logit and its column among BLOCK_N columns: best, index [TILES, M]."""
    rings = make_rings(w_d, x_d, T, SLOTS, ROW_SLOTS, BLOCK_N, BLOCK_K)
    gl.warp_specialize(
        [
            (_compute, (
                rings, best_p, index_p, M, TILES, K, WIDE, T, SLOTS, ROW_SLOTS, BLOCK_N, BLOCK_K,
            )),
            (_stream_weights, (w_d, rings, TILES, K, WIDE, SLOTS, BLOCK_N, BLOCK_K)),
            (_stream_rows, (x_d, rings, TILES, K, WIDE, ROW_SLOTS, T, BLOCK_K)),
        ],
        [1, 1],
        [40, 40],
    )  # fmt: skip


def launch_head(x: Tensor, weight: Tensor) -> Tensor:
    """Computes `linear_argmax` of x [M, K] and weight [N, K]. Needs `fits`."""
    (m, k), n = x.shape, len(weight)
    programs = programs_of(x.device.index)
    rows = padded(m)
    tiles, slots = n // BLOCK_N, slots_of(rows)
    best = torch.empty(tiles, m, dtype=torch.float32, device=x.device)
    index = torch.empty(tiles, m, dtype=torch.int32, device=x.device)
    head_kernel[(min(programs, tiles),)](
        blocks_of(weight, BLOCK_N), blocks_of(x, rows), best, index, m,
        TILES=tiles, K=k, WIDE=wide_of(tiles, 1, rows, programs), T=rows,
        SLOTS=slots.weights, ROW_SLOTS=slots.rows, BLOCK_N=BLOCK_N, BLOCK_K=block_k(weight),
        num_warps=WARPS, launch_pdl=True,
    )  # fmt: skip
    return reduce_argmax(best, index)
