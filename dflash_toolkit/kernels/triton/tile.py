"""How a GEMM is cut into tiles, and what becomes of a tile's sums."""

# mypy: disable-error-code="no-untyped-def"
from dataclasses import dataclass

import triton
import triton.language as tl

MULTIPROCESSORS = 132  # of an H200


@dataclass(frozen=True, slots=True)
class Tile:
    """How a GEMM is cut. Splits are part of the result's rounding; the rest is speed."""

    block_n: int  # weight rows a program; at least 64, so that every tile uses the same matrix instruction
    block_k: int
    stages: int
    warps: int
    splits: int = 1


@triton.jit
def store_tile(
    b_acc, bias_p, out_p, o_n, o_m, m_m, M, N, i_n, i_s,
    T: tl.constexpr, BLOCK_N: tl.constexpr, BIAS: tl.constexpr, SWIGLU: tl.constexpr,
):  # fmt: skip
    """Write the sums [BLOCK_N, T] of tile i_n and split i_s to out [splits, M, N] (SWIGLU: [M, N / 2])."""
    if SWIGLU:
        gate, up = tl.split(tl.permute(tl.reshape(b_acc, (BLOCK_N // 2, 2, T)), (0, 2, 1)))
        # cast as separate GEMMs would cast them
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
