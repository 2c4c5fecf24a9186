"""The tiles of a GEMM: their sizes, their sums, and the stores of the sums."""

# mypy: disable-error-code="no-untyped-def"
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from ..launch import MAX_ROWS, padded
from .fp8 import of_fp8

# of an H200; a constant, so that the splits of a sum, and with them its rounding, are the same on every GPU
MULTIPROCESSORS = 132
SHARED_BYTES = 227 * 1024  # limit of a thread block on sm_90, for which tiles were measured
ROOM_BYTES = 3 * 1024  # reserved for the compiler
RESERVED_BYTES = 1024  # shared memory that the driver takes for each program
LEAST_STAGES = 3  # with fewer, a program loads nothing while it waits
FORMATS = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@dataclass(frozen=True, slots=True)
class Tile:
    """The tile sizes of a GEMM. Splits affect the rounding of results; the other fields only the speed."""

    block_n: int  # weight rows per program; at least 64, so that every tile uses the same matrix instruction
    block_k: int
    stages: int
    warps: int
    splits: int = 1


def fitted(tile: Tile, rows: int, weight_bytes: int, row_bytes: int, shared: int, most_rows: int = MAX_ROWS) -> Tile:
    """Returns the tile with fewer columns and stages if it does not fit into the shared memory of a thread block.

    The columns do not depend on `rows`, so that a row's sum has the same order next to any number of others. GPUs with
    less than SHARED_BYTES get as many stages as let two programs share a multiprocessor: their products are not
    asynchronous, so another program has to load meanwhile. Without asynchronous products, a stage less is stored.

    Args:
        weight_bytes, row_bytes: of a number.
        shared: bytes.
        most_rows: of the tiles for other row counts.
    """

    def taken(stages: int, rows: int) -> int:
        return stages * block_k * (tile.block_n * weight_bytes + padded(rows) * row_bytes)

    block_k, stages, room = tile.block_k, tile.stages, shared - ROOM_BYTES
    while taken(LEAST_STAGES, most_rows) > room:
        block_k //= 2
    half = shared // 2 - RESERVED_BYTES if shared < SHARED_BYTES else shared
    while stages > LEAST_STAGES and (taken(stages, rows) > room or taken(stages - 1, rows) > half):
        stages -= 1
    return replace(tile, block_k=block_k, stages=stages)


@triton.jit
def accumulate(
    x_p, w_p, o_n, o_m, m_m, N, K, first, last,
    T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Returns the product [BLOCK_N, T] over K columns first..last. WIDEN: 8-bit weights, 16-bit rows."""
    o_k = first + tl.arange(0, BLOCK_K)
    p_w = w_p + o_n[:, None].to(tl.int64) * K + o_k[None, :]
    p_x = x_p + o_m[None, :] * K + o_k[:, None]
    b_acc = tl.zeros([BLOCK_N, T], dtype=tl.float32)
    for k in range(first, last, BLOCK_K):
        if EVEN_K and EVEN_N:
            b_w = tl.load(p_w, eviction_policy="evict_first")
            b_x = tl.load(p_x, mask=m_m[None, :], other=0.0, eviction_policy="evict_last")
        else:
            m_k = k + tl.arange(0, BLOCK_K) < last
            b_w = tl.load(p_w, mask=(o_n < N)[:, None] & m_k[None, :], other=0.0, eviction_policy="evict_first")
            b_x = tl.load(p_x, mask=m_m[None, :] & m_k[:, None], other=0.0, eviction_policy="evict_last")
        if WIDEN:  # exact in fp16; one instruction converts two values, bf16 needs several
            b_w, b_x = of_fp8(b_w).to(tl.float16), b_x.to(tl.float16)
        b_acc = tl.dot(b_w, b_x, b_acc, input_precision="ieee")  # ieee keeps fp32 from becoming tf32
        p_w += BLOCK_K
        p_x += BLOCK_K
    return b_acc


@triton.jit
def activate(gate, GELU: tl.constexpr):
    """Returns silu of fp32 gates, or with GELU the tanh form of gelu."""
    # x * (1 + tanh(u)) / 2 = x * sigmoid(2 u), with u = sqrt(2 / pi) * (x + 0.044715 * x^3)
    inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate) if GELU else gate
    return gate / (1.0 + tl.exp(-inner))


@triton.jit
def store_tile(
    b_acc, bias_p, out_p, o_n, o_m, m_m, M, N, i_n, i_s,
    T: tl.constexpr, BLOCK_N: tl.constexpr, BIAS: tl.constexpr, SWIGLU: tl.constexpr, GELU: tl.constexpr = False,
):  # fmt: skip
    """Stores the sums [BLOCK_N, T] of tile i_n and split i_s to out [splits, M, N] (SWIGLU: [M, N / 2])."""
    if SWIGLU:
        gate, up = tl.split(tl.permute(tl.reshape(b_acc, (BLOCK_N // 2, 2, T)), (0, 2, 1)))
        # casts like separate GEMMs would
        gate = gate.to(out_p.dtype.element_ty).to(tl.float32)
        up = up.to(out_p.dtype.element_ty).to(tl.float32)
        b_out = activate(gate, GELU).to(out_p.dtype.element_ty).to(tl.float32) * up
        o_h = i_n * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        p_out = out_p + o_m[None, :].to(tl.int64) * (N // 2) + o_h[:, None]
        tl.store(p_out, b_out.to(out_p.dtype.element_ty), mask=m_m[None, :] & (o_h < N // 2)[:, None])
    else:
        if BIAS:
            b_bias = tl.load(bias_p + o_n, mask=o_n < N, other=0.0).to(tl.float32)
            b_acc += tl.where(i_s == 0, b_bias, 0.0)[:, None]
        p_out = out_p + i_s.to(tl.int64) * M * N + o_m[None, :].to(tl.int64) * N + o_n[:, None]
        tl.store(p_out, b_acc.to(out_p.dtype.element_ty), mask=m_m[None, :] & (o_n < N)[:, None])
