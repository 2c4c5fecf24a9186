"""y = x W^T with W in fp8, scaled by blocks of 128 by 128, and the rows in fp8, scaled by groups of 128 columns.

The matrix instructions sum 128 columns; the sum is scaled and added in fp32, block after block. Tiles are arranged as
in `linear.py`, several of them if the rows do not fit into one. Up to MAX_ROWS rows only (N, K) determines the splits;
with equal splits, every number of rows gives the same bits. Every program quantizes the rows that it loads if they are
few, as a separate launch takes longer; more rows are quantized once, by the same rule. If a whole row has one scale
(FP8_CHANNEL), sums are scaled at their end. On Hopper, cuBLAS also has these GEMMs, for many rows.
"""

# mypy: disable-error-code="no-untyped-def"
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from ..features import KNOWN, Features, features_of
from ..formats import (
    BLOCK,
    FP8_MAX,
    LEAST,
    Activation,
    BlockScaledFp8,
    Operand,
    QuantizedRows,
    Weight,
    format_of,
    parts,
    values_of,
)
from ..launch import MAX_ROWS, padded, pdl
from .fp8 import of_fp8, quantize_rows, rows_dtype, stored_parts, to_fp8
from .pdl import start_next, wait_for_previous
from .tile import MULTIPROCESSORS, RESERVED_BYTES, Tile, activate, fitted, store_tile

# maximum rows that every program quantizes itself; with 32, this took longer than a separate launch for 64
# (results/step_qwen3_8_27b_fp8_h100.json)
QUANTIZED_IN_LOOP = 16
MEASURED = KNOWN["sm_90"]  # the tiles were measured on it
GROUPS = 8  # groups that a program of the separate launch quantizes
SIDE = 4  # cuBLAS requires multiples of this many rows and groups of columns


@triton.jit
def quantize(b_x, axis: tl.constexpr, FORMAT: tl.constexpr, FP8_MAX: tl.constexpr, LEAST: tl.constexpr):
    """Quantizes groups of 128 values along an axis to fp8 in a FORMAT of `to_fp8`; returns them and their scales."""
    b_x = b_x.to(tl.float32)
    b_most = tl.maximum(tl.max(tl.abs(b_x), axis=axis), LEAST)
    # divides like torch, so that rows quantized elsewhere have the same bits
    b_y = b_x * tl.expand_dims(tl.div_rn(FP8_MAX, b_most), axis)
    return to_fp8(tl.clamp(b_y, -FP8_MAX, FP8_MAX), FORMAT), tl.div_rn(b_most, FP8_MAX)


@triton.jit(do_not_specialize=["M"])
def _group_round_kernel(
    x_p, data_p, scale_p, M, K, SCALE_M, SCALE_K,
    GROUPS: tl.constexpr, BLOCK_K: tl.constexpr, FP8_MAX: tl.constexpr, LEAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Quantizes rows [M, K] to fp8; scales [M, K / BLOCK_K] of the groups have strides SCALE_M and SCALE_K."""
    i_m = tl.program_id(0).to(tl.int64)
    o_g = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    mask = o_g < K // BLOCK_K
    o_k = i_m * K + o_g[:, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    wait_for_previous(PDL)
    b_x = tl.load(x_p + o_k, mask=mask[:, None], other=0.0)
    start_next(PDL)
    b_y, b_scale = quantize(b_x, 1, data_p.dtype.element_ty, FP8_MAX, LEAST)
    tl.store(data_p + o_k, b_y, mask=mask[:, None])
    tl.store(scale_p + i_m * SCALE_M + o_g * SCALE_K, b_scale, mask=mask)


@triton.jit(do_not_specialize=["SCALE_M", "SCALE_K"])
def _swiglu_round_kernel(
    x_p, out_p, data_p, scale_p, width, SCALE_M, SCALE_K,
    GROUPS: tl.constexpr, BLOCK_K: tl.constexpr, GELU: tl.constexpr, FP8_MAX: tl.constexpr, LEAST: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Computes out [M, width] of x [M, 2 * width] with all gates first, and quantizes it."""
    i_m = tl.program_id(0).to(tl.int64)
    o_g = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    o_k = o_g[:, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    mask = o_g < width // BLOCK_K
    p_x = x_p + i_m * 2 * width + o_k
    wait_for_previous(PDL)
    b_gate = tl.load(p_x, mask=mask[:, None], other=0.0).to(tl.float32)
    b_up = tl.load(p_x + width, mask=mask[:, None], other=0.0).to(tl.float32)
    start_next(PDL)
    b_active = activate(b_gate, GELU).to(out_p.dtype.element_ty).to(tl.float32)
    b_out = (b_active * b_up).to(out_p.dtype.element_ty)
    b_y, b_scale = quantize(b_out, 1, data_p.dtype.element_ty, FP8_MAX, LEAST)
    tl.store(out_p + i_m * width + o_k, b_out, mask=mask[:, None])
    tl.store(data_p + i_m * width + o_k, b_y, mask=mask[:, None])
    tl.store(scale_p + i_m * SCALE_M + o_g * SCALE_K, b_scale, mask=mask)


@triton.jit(do_not_specialize=["M"])
def _block_linear_kernel(
    x_p, x_scale_p, w_p, w_scale_p, bias_p, out_p, M, N, K, SPAN,
    T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, QUANTIZE: tl.constexpr,
    BY_ROWS: tl.constexpr, FP8_MAX: tl.constexpr, LEAST: tl.constexpr,
    BIAS: tl.constexpr, SWIGLU: tl.constexpr, GELU: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Computes out [splits, M, N] (SWIGLU: [M, N / 2]) of x [M, K] and w [N, K]; split i begins at column i * SPAN.

    QUANTIZE: x has no scales yet. BY_ROWS: see `BlockScaledFp8`.
    """
    i_m, i_n, i_s = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    o_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    o_m = i_m * T + tl.arange(0, T)
    m_m = o_m < M
    first = i_s * SPAN
    last = tl.minimum(first + SPAN, K)
    o_k = first + tl.arange(0, BLOCK_K)
    blocks = K // BLOCK_K
    o_w = o_n
    if SWIGLU:  # gates and ups alternate, so that a thread has both of a pair
        o_w = (o_n % 2) * (N // 2) + o_n // 2
    p_w = w_p + o_w[:, None].to(tl.int64) * K + o_k[None, :]
    p_x = x_p + o_m[None, :].to(tl.int64) * K + o_k[:, None]
    p_x_scale = x_scale_p + o_m.to(tl.int64) * blocks + first // BLOCK_K
    # all rows of a tile are in one block of scales; gates in one, ups in another
    o_block = i_n * BLOCK_N // (2 * BLOCK_K if SWIGLU else BLOCK_K)
    p_w_scale = w_scale_p + o_block * blocks + first // BLOCK_K
    wait_for_previous(PDL)
    b_acc = tl.zeros([BLOCK_N, T], dtype=tl.float32)
    for _ in range(first, last, BLOCK_K):
        b_w = of_fp8(tl.load(p_w, eviction_policy="evict_first"))
        b_x = tl.load(p_x, mask=m_m[None, :], other=0.0, eviction_policy="evict_last")
        if BY_ROWS:
            b_acc += tl.dot(b_w, b_x)
        else:
            if QUANTIZE:
                b_x, b_x_scale = quantize(b_x, 0, b_w.dtype, FP8_MAX, LEAST)
            else:
                b_x_scale = tl.load(p_x_scale, mask=m_m, other=0.0)
            b_w_scale = tl.load(p_w_scale)
            if SWIGLU:
                b_w_scale = tl.where(o_n % 2 == 0, b_w_scale, tl.load(p_w_scale + N // (2 * BLOCK_K) * blocks))[:, None]
            b_scale = b_x_scale[None, :] * b_w_scale
            b_acc += tl.dot(b_w, b_x) * b_scale
            p_x_scale += 1
            p_w_scale += 1
        p_w += BLOCK_K
        p_x += BLOCK_K
    if BY_ROWS:
        b_acc *= tl.load(x_scale_p + o_m, mask=m_m, other=0.0)[None, :] * tl.load(w_scale_p + o_w)[:, None]
    start_next(PDL)
    store_tile(b_acc, bias_p, out_p, o_n, o_m, m_m, M, N, i_n, i_s, T, BLOCK_N, BIAS, SWIGLU, GELU)


def tile_for(n: int, k: int, rows: int, split: bool = False, card: Features = MEASURED) -> Tile:
    """Returns the tile for [rows, K] times [N, K]; `split`: up to MAX_ROWS rows may have split sums."""
    splits = 1
    if split and rows <= MAX_ROWS:
        # by (N, K) only: up to three programs for every multiprocessor, but no short split
        while splits < 8 and 2 * splits * (n // 64) <= 3 * MULTIPROCESSORS and k >= 8 * splits * BLOCK:
            splits *= 2
    few = rows <= QUANTIZED_IN_LOOP and [_leaves_few(n // 64 * splits, rows, stages, card) for stages in (4, 3)]
    tile = Tile(64, BLOCK, 3 if few == [True, False] else 4, 4, splits)
    if rows > MAX_ROWS:
        tile = Tile(128, BLOCK, 4, 8)
    taken = rows_of_tile(rows, card)
    row_bytes = 4 if rows <= QUANTIZED_IN_LOOP else 1 if card.fp8_products else 2  # 4 if they are not quantized yet
    return fitted(tile, taken, 1, row_bytes, card.shared_memory, most_rows=taken)


def rows_of_tile(rows: int, card: Features) -> int:
    """Returns the rows of a tile.

    A block's sums are held next to the total. Only Hopper's products leave registers for both in wide tiles of 128 rows
    (and sm_100 spills most). Elsewhere, 128 rows in fp8 fit into registers with 64 weight rows; in fp16 they do not fit
    into 99 KiB of shared memory.
    """
    wide = card.hopper or (card.fp8_products and rows <= MAX_ROWS)
    return min(padded(rows), MAX_ROWS if wide else 64)


def _leaves_few(programs: int, rows: int, stages: int, card: Features) -> bool:
    """Returns whether the last programs do not fit next to the others and are so few that memory idles.

    Up to QUANTIZED_IN_LOOP rows, shared memory limits the number of programs, not registers.
    """
    taken = stages * (64 + 2 * padded(rows)) * BLOCK + RESERVED_BYTES  # the compiler may need fewer
    at_once = card.multiprocessors * ((card.shared_memory + RESERVED_BYTES) // taken)
    return programs > at_once and 0 < programs % at_once < card.multiprocessors


def empty_rows(m: int, k: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns buffers for rows [M, K] that are quantized in groups, and for their scales, [M, K / 128].

    They are in the order of cuBLAS if it multiplies so many rows.
    """
    if m > MAX_ROWS and features_of(device).cublas_fp8_blocks and k % (SIDE * BLOCK) == 0:
        return _empty_cublas_rows(m, k, device)
    scale = torch.empty(m, k // BLOCK, dtype=torch.float32, device=device)
    return torch.empty(m, k, dtype=rows_dtype(device), device=device), scale


def _empty_cublas_rows(m: int, k: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns buffers of a multiple of SIDE rows, with the scales column by column.

    From the cuBLAS 13.0 documentation, "Scaling factors layouts".
    """
    m = -(-m // SIDE) * SIDE
    scale = torch.empty(k // BLOCK, m, dtype=torch.float32, device=device).T
    return torch.empty(m, k, dtype=rows_dtype(device), device=device), scale


def quantize_groups(x: Tensor) -> tuple[Tensor, Tensor]:
    """Computes `formats.fp8_block.quantize_groups` in one pass over memory."""
    data = torch.empty_like(x, dtype=rows_dtype(x.device))
    return _quantize(x, data, x.new_empty(len(x), x.shape[1] // BLOCK, dtype=torch.float32))


def _quantize(x: Tensor, data: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Computes `quantize_groups` of x [M, K] into buffers of at least M rows."""
    m, k = x.shape
    _group_round_kernel[(m, -(-k // (GROUPS * BLOCK)))](
        x, data, scale, m, k, *scale.stride(),
        GROUPS=GROUPS, BLOCK_K=BLOCK, FP8_MAX=FP8_MAX, LEAST=LEAST, **pdl(x),
    )  # fmt: skip
    return data, scale


def multiplies(x: Tensor, weight: Weight) -> bool:
    """Returns whether `scaled_linear` supports these: bf16 rows, cuBLAS's sizes for blocks, and its GPUs."""
    aligned = x.shape[1] % (SIDE * BLOCK) == 0  # otherwise cuBLAS's weight scales have gaps
    known = format_of(weight).groups_rows and features_of(x.device).cublas_fp8_blocks
    return x.dtype == torch.bfloat16 and aligned and known


def scaled_linear(x: Operand, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """Computes `linear` of more than MAX_ROWS rows with cuBLAS; its sums depend on the number of rows.

    Scales of weights are stored block row by block row.
    """
    values, (data, scales) = values_of(x), parts(weight)
    assert scales is not None, "which `multiplies`"
    if isinstance(x, QuantizedRows) and x.scale.stride(0) == 1 and len(x.scale) % SIDE == 0:  # see `empty_rows`
        rows, scale = x.data, x.scale
    else:
        m, k = values.shape
        rows, scale = _quantize(values, *_empty_cublas_rows(m, k, values.device))
    out = F.scaled_mm(
        rows, data.t(), scale, F.ScalingType.BlockWise1x128, scales.t(), F.ScalingType.BlockWise128x128,
        output_dtype=values.dtype,
    )[: len(values)]  # fmt: skip
    return out if bias is None else out.add_(bias)


def launch_linear(
    operand: Operand, weight: BlockScaledFp8, bias: Tensor | None, out: Tensor, tile: Tile,
    activation: Activation | None = None,
) -> None:  # fmt: skip
    """Runs the kernel with a given tile; `out` is [splits, M, N], or [M, N / 2] with an activation of gates."""
    x = values_of(operand)
    (m, k), n = x.shape, len(weight)
    span = -(-k // (tile.splits * BLOCK)) * BLOCK
    in_loop = m <= QUANTIZED_IN_LOOP and not weight.by_rows
    rows, scale, data = x, weight.scale, stored_parts(weight)[0]
    if weight.by_rows:
        quantized = quantize_rows(x)
        rows, scale = quantized.data, quantized.scale
    elif isinstance(operand, QuantizedRows):
        rows, scale, in_loop = operand.data, operand.scale.contiguous(), False
    elif not in_loop:
        rows, scale = quantize_groups(x)
    side = rows_of_tile(m, features_of(x.device))
    _block_linear_kernel[(-(-m // side), n // tile.block_n, tile.splits)](
        rows, scale, data, weight.scale, x if bias is None else bias, out, m, n, k, span,
        T=side, BLOCK_N=tile.block_n, BLOCK_K=BLOCK, QUANTIZE=in_loop, BY_ROWS=weight.by_rows,
        FP8_MAX=FP8_MAX, LEAST=LEAST, BIAS=bias is not None, SWIGLU=activation is not None,
        GELU=activation == "gelu_tanh", num_warps=tile.warps, num_stages=tile.stages, **pdl(x),
    )  # fmt: skip


def _tile(x: Operand, weight: BlockScaledFp8, split: bool = False) -> Tile:
    n, k = weight.data.shape
    return tile_for(n, k, len(x), split, features_of(values_of(x).device))


def linear(x: Operand, weight: BlockScaledFp8, bias: Tensor | None = None) -> Tensor:
    """Multiplies x [M, K] with weight [N, K] transposed and adds bias [N]; returns [M, N] in x's dtype."""
    out = values_of(x).new_empty(1, len(x), len(weight))
    launch_linear(x, weight, bias, out, _tile(x, weight))
    return out[0]


def linear_split_k(x: Operand, weight: BlockScaledFp8, bias: Tensor | None = None) -> Tensor:
    """Returns `linear` as split-K partial sums, fp32 [P, M, N]; above MAX_ROWS rows as one, in x's dtype."""
    if len(x) > MAX_ROWS:
        return linear(x, weight, bias)[None]
    tile = _tile(x, weight, split=True)
    out = values_of(x).new_empty(tile.splits, len(x), len(weight), dtype=torch.float32)
    launch_linear(x, weight, bias, out, tile)
    return out


def linear_swiglu(x: Operand, weight: BlockScaledFp8, activation: Activation = "silu") -> Tensor:
    """Returns activation(gate) * up, [M, I], where weight [2 * I, K] holds all gates, then all ups."""
    out = values_of(x).new_empty(len(x), len(weight) // 2)
    launch_linear(x, weight, None, out, _tile(x, weight), activation)
    return out


def swiglu(product: Tensor, activation: Activation = "silu") -> QuantizedRows:
    """Returns activation(gate) * up, [M, I], of a product [M, 2 * I] with all gates first, quantized for the next
    GEMM."""
    m, width = len(product), product.shape[1] // 2
    out, (data, scale) = product.new_empty(m, width), empty_rows(m, width, product.device)
    _swiglu_round_kernel[(m, -(-width // (GROUPS * BLOCK)))](
        product, out, data, scale, width, *scale.stride(),
        GROUPS=GROUPS, BLOCK_K=BLOCK, GELU=activation == "gelu_tanh", FP8_MAX=FP8_MAX, LEAST=LEAST, **pdl(product),
    )  # fmt: skip
    return QuantizedRows(out, data, scale)
