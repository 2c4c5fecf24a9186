"""The tiles of a GEMM: their sizes, their sums, and the stores of the sums."""

# mypy: disable-error-code="no-untyped-def"
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .fp8 import of_fp8

MULTIPROCESSORS = 132  # of an H200
SHARED_BYTES = 227 * 1024  # limit of a thread block on sm_90
ROOM_BYTES = 7 * 1024  # reserved for the compiler
FORMATS = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@dataclass(frozen=True, slots=True)
class Tile:
    """The tile sizes of a GEMM. Splits affect the rounding of results; the other fields only the speed."""

    block_n: int  # weight rows per program; at least 64, so that every tile uses the same matrix instruction
    block_k: int
    stages: int
    warps: int
    splits: int = 1


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
def store_tile(
    b_acc, bias_p, out_p, o_n, o_m, m_m, M, N, i_n, i_s,
    T: tl.constexpr, BLOCK_N: tl.constexpr, BIAS: tl.constexpr, SWIGLU: tl.constexpr,
):  # fmt: skip
    """Stores the sums [BLOCK_N, T] of tile i_n and split i_s to out [splits, M, N] (SWIGLU: [M, N / 2])."""
    if SWIGLU:
        gate, up = tl.split(tl.permute(tl.reshape(b_acc, (BLOCK_N // 2, 2, T)), (0, 2, 1)))
        # casts like separate GEMMs would
        gate = gate.to(out_p.dtype.element_ty).to(tl.float32)
        up = up.to(out_p.dtype.element_ty).to(tl.float32)
        b_out = (gate / (1.0 + tl.exp(-gate))).to(out_p.dtype.element_ty).to(tl.float32) * up
        o_h = i_n * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        p_out = out_p + o_m[None, :].to(tl.int64) * (N // 2) + o_h[:, None]
        tl.store(p_out, b_out.to(out_p.dtype.element_ty), mask=m_m[None, :] & (o_h < N // 2)[:, None])
    else:
        if BIAS:
            b_bias = tl.load(bias_p + o_n, mask=o_n < N, other=0.0).to(tl.float32)
            b_acc += tl.where(i_s == 0, b_bias, 0.0)[:, None]
        p_out = out_p + i_s.to(tl.int64) * M * N + o_m[None, :].to(tl.int64) * N + o_n[:, None]
        tl.store(p_out, b_acc.to(out_p.dtype.element_ty), mask=m_m[None, :] & (o_n < N)[:, None])
