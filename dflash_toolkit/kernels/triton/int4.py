"""y = x W^T with W in INT4 and the rows in 16 bits or fp32, in Triton, see formats/int4.py.

Tiles are arranged as in `linear.py`. The numbers of an int16 are columns of the four quarters of a block, so each
quarter is one product and no number moves between threads. The matrix instructions multiply q - zero, which 16 bits
hold exactly; the sums of a group are scaled in fp32. Only (N, K) and the group determine the order of a sum.

More than TILED_ROWS rows are multiplied by cuBLAS, with the weight dequantized in slices.
"""

# mypy: disable-error-code="no-untyped-def"
import torch
import triton
import triton.language as tl
from torch import Tensor

from ..features import features_of
from ..formats import Activation, GroupedInt4
from ..formats.int4 import SLICE
from ..launch import MAX_ROWS, padded, pdl
from .linear import swiglu
from .pdl import start_next, wait_for_previous
from .tile import LEAST_STAGES, MULTIPROCESSORS, ROOM_BYTES, SHARED_BYTES, Tile, store_tile

DEQUANTIZED_ROWS = 16  # rows of a program that dequantizes
BLOCK_N = 64  # weight rows per program
# most rows of a weight's tiles: with 256 rows of Qwen3-8B they take 11 to 21 % less than slices on an H200, with 512
# rows longer
TILED_ROWS = 256
MOST_SIDE = 64  # rows per program; the sums of a group of 128 rows would not stay in registers
MOST_STAGES = 6
PROGRAMS = 3  # of a multiprocessor, for which few rows leave shared memory


@triton.jit
def split_numbers(b_w, b_zeros, DTYPE: tl.constexpr):
    """Returns the four numbers of every int16, less the zero points of their rows, in DTYPE.

    In bf16, the bits of a number become the mantissa of 128 + q, two at a time; a fused multiply-add with one subtracts
    128 + zero.

    Args:
        b_zeros: tuple of four, one for each number.
    """
    if DTYPE.is_bf16():
        b_parts = tl.inline_asm_elementwise(
            """{
            .reg .b32 number, one;
            mov.b32 one, 0x3F803F80;
            lop3.b32 number, $4, 0x000F000F, 0x43004300, 0xEA;
            fma.rn.bf16x2 $0, number, one, $5;
            shr.u32 number, $4, 4;
            lop3.b32 number, number, 0x000F000F, 0x43004300, 0xEA;
            fma.rn.bf16x2 $1, number, one, $7;
            shr.u32 number, $4, 8;
            lop3.b32 number, number, 0x000F000F, 0x43004300, 0xEA;
            fma.rn.bf16x2 $2, number, one, $9;
            shr.u32 number, $4, 12;
            lop3.b32 number, number, 0x000F000F, 0x43004300, 0xEA;
            fma.rn.bf16x2 $3, number, one, $11;
            }""",
            "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r",
            [b_w, (b_zeros[0] | 0xC300) * 0x10001, (b_zeros[1] | 0xC300) * 0x10001,
             (b_zeros[2] | 0xC300) * 0x10001, (b_zeros[3] | 0xC300) * 0x10001],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        b_parts = (
            ((b_w & 15) - b_zeros[0]).to(DTYPE),
            (((b_w >> 4) & 15) - b_zeros[1]).to(DTYPE),
            (((b_w >> 8) & 15) - b_zeros[2]).to(DTYPE),
            (((b_w >> 12) & 15) - b_zeros[3]).to(DTYPE),
        )
    return b_parts


@triton.jit
def load_scales(scale_p, o_n, m_n, k, stride_group, QUARTER: tl.constexpr, GROUP: tl.constexpr):
    """Returns the scales of rows for the four quarters of the block at column 4 k, with their zero points; see `Int4`.

    GROUP: columns that share a scale, at least QUARTER; 0: all.
    """
    p_scale = scale_p + o_n
    if GROUP > 0:
        p_scale += k // (GROUP // 4) * stride_group
    b_first = tl.load(p_scale, mask=m_n, other=0)
    b_second, b_third, b_fourth = b_first, b_first, b_first
    if GROUP > 0 and GROUP < 4 * QUARTER:
        b_third = tl.load(p_scale + 2 * QUARTER // GROUP * stride_group, mask=m_n, other=0)
        b_fourth = b_third
    if GROUP == QUARTER:
        b_second = tl.load(p_scale + stride_group, mask=m_n, other=0)
        b_fourth = tl.load(p_scale + 3 * stride_group, mask=m_n, other=0)
    return b_first, b_second, b_third, b_fourth


@triton.jit
def _beside(b_left, b_right):
    """Returns two tensors [N, K] as one [N, 2 K]."""
    b_both = tl.permute(tl.join(b_left, b_right), (0, 2, 1))
    return tl.reshape(b_both, (b_left.shape[0], 2 * b_left.shape[1]))


@triton.jit
def accumulate_int4(
    x_p, w_p, scale_p, o_n, m_n, o_m, m_m, WIDTH, stride_group, first, last,
    T: tl.constexpr, BLOCK_N: tl.constexpr, QUARTER: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Returns the product [BLOCK_N, T] of rows o_n of w [N, WIDTH] and o_m of x [M, 4 WIDTH] over a part of WIDTH."""
    groups: tl.constexpr = 4 * QUARTER // GROUP if GROUP > 0 and GROUP < 4 * QUARTER else 1  # of a block
    columns: tl.constexpr = 4 * QUARTER // groups  # of one product
    o_w, o_x = tl.arange(0, QUARTER), tl.arange(0, columns)
    p_w = w_p + o_n[:, None].to(tl.int64) * WIDTH + first + o_w[None, :]
    p_x = x_p + 4 * (o_m[None, :].to(tl.int64) * WIDTH + first) + o_x[:, None]
    m_w = None if EVEN else m_n[:, None]
    b_acc = tl.zeros([BLOCK_N, T], dtype=tl.float32)
    # those of a block are loaded one block ahead: a load that does not lead to a product is not pipelined
    b_next = load_scales(scale_p, o_n, m_n & (first < last), first, stride_group, QUARTER, GROUP)
    for k in range(first, last, QUARTER):
        b_scales, ahead = b_next, k + QUARTER
        b_next = load_scales(scale_p, o_n, m_n & (ahead < last), ahead, stride_group, QUARTER, GROUP)
        b_w = tl.load(p_w, mask=m_w, other=None if EVEN else 0, eviction_policy="evict_first")
        b_own = load_scales(scale_p, o_n, m_n, k, stride_group, QUARTER, GROUP)
        b_zeros = (
            (b_own[0] & 255)[:, None], (b_own[1] & 255)[:, None], (b_own[2] & 255)[:, None], (b_own[3] & 255)[:, None],
        )  # fmt: skip
        b_first, b_second, b_third, b_fourth = split_numbers(b_w, b_zeros, x_p.dtype.element_ty)
        if groups < 4:
            b_first, b_third = _beside(b_first, b_second), _beside(b_third, b_fourth)
        if groups < 2:
            b_first = _beside(b_first, b_third)
        b_parts = b_first, b_second, b_third, b_fourth
        for i in tl.static_range(0, 4, 4 // groups):
            b_x = tl.load(p_x + i * QUARTER, mask=m_m[None, :], other=0.0, eviction_policy="evict_last")
            b_sum = tl.dot(b_parts[i], b_x, input_precision="ieee")
            b_acc += b_sum * (b_scales[i] & -256).to(tl.float32, bitcast=True)[:, None]
        p_w += QUARTER
        p_x += 4 * QUARTER
    return b_acc


@triton.jit(do_not_specialize=["M"])
def _int4_linear_kernel(
    x_p, w_p, scale_p, bias_p, out_p, M, N, WIDTH, stride_group, SPAN,
    T: tl.constexpr, BLOCK_N: tl.constexpr, QUARTER: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr,
    BIAS: tl.constexpr, SWIGLU: tl.constexpr, GELU: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Computes out [splits, M, N] (SWIGLU: [M, N / 2]) of x [M, 4 WIDTH] and w [N, WIDTH]; a split is SPAN of WIDTH."""
    i_n, i_s, i_m = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    o_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    o_m = i_m * T + tl.arange(0, T)
    m_m = o_m < M
    o_w = o_n
    if SWIGLU:  # gates and ups alternate, so that a thread has both of a pair
        o_w = (o_n % 2) * (N // 2) + o_n // 2
    first = i_s * SPAN
    last = tl.minimum(first + SPAN, WIDTH)
    wait_for_previous(PDL)
    b_acc = accumulate_int4(
        x_p, w_p, scale_p, o_w, o_n < N, o_m, m_m, WIDTH, stride_group, first, last, T, BLOCK_N, QUARTER, GROUP, EVEN
    )
    start_next(PDL)
    store_tile(b_acc, bias_p, out_p, o_n, o_m, m_m, M, N, i_n, i_s, T, BLOCK_N, BIAS, SWIGLU, GELU)


@triton.jit
def _dequantize_kernel(
    w_p, scale_p, out_p, N, WIDTH, stride_group,
    BLOCK_N: tl.constexpr, QUARTER: tl.constexpr, GROUP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Computes out [N, 4 WIDTH], the values of w, as `GroupedInt4.dense` does."""
    i_n, i_k = tl.program_id(0), tl.program_id(1)
    o_n, o_k = i_n * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, QUARTER)
    m_n, k = o_n < N, i_k * QUARTER
    p_w = w_p + o_n[:, None].to(tl.int64) * WIDTH + k + o_k[None, :]
    p_out = out_p + 4 * (o_n[:, None].to(tl.int64) * WIDTH + k) + o_k[None, :]
    wait_for_previous(PDL)
    start_next(PDL)
    b_w = tl.load(p_w, mask=m_n[:, None], other=0)
    b_scales = load_scales(scale_p, o_n, m_n, k, stride_group, QUARTER, GROUP)
    for i in tl.static_range(4):
        b_number = ((b_w >> (4 * i)) & 15) - (b_scales[i] & 255)[:, None]
        b_value = b_number.to(tl.float32) * (b_scales[i] & -256).to(tl.float32, bitcast=True)[:, None]
        tl.store(p_out + i * QUARTER, b_value.to(out_p.dtype.element_ty), mask=m_n[:, None])


def fitted_tile(rows: int, quarter: int, row_bytes: int, shared: int, splits: int = 1) -> tuple[Tile, int]:
    """Returns the tile for `rows` rows of `row_bytes` a number, and how many of them fit into it."""
    side, block = min(rows, MOST_SIDE), 4 * quarter

    def taken(side: int) -> int:
        return block * (BLOCK_N // 2 + side * row_bytes)

    while side > 16 and LEAST_STAGES * taken(side) > shared - ROOM_BYTES:
        side //= 2
    stages = max(LEAST_STAGES, min(MOST_STAGES, shared // PROGRAMS // taken(side)))
    return Tile(BLOCK_N, block, stages, 4, splits), side


def tile_for(
    n: int, k: int, rows: int, quarter: int, *, split: bool = False, row_bytes: int = 2, shared: int = SHARED_BYTES
) -> tuple[Tile, int]:
    """Returns the tile for [rows, K] times [N, K], and the rows that it multiplies at a time.

    `split`: sums may be split. `shared`, the shared memory of a thread block in bytes, affects no sum.
    """
    splits = 1
    if split and rows <= MAX_ROWS:  # by (N, K) only: up to three programs for every multiprocessor, but no short split
        while splits < 8 and 2 * splits * -(-n // BLOCK_N) <= 3 * MULTIPROCESSORS and k >= 32 * splits * quarter:
            splits *= 2
    return fitted_tile(min(padded(rows), MAX_ROWS), quarter, row_bytes, shared, splits)


def sizes_of(weight: GroupedInt4) -> dict[str, int]:
    """Returns the block and the group of a weight as arguments of kernels."""
    return {"QUARTER": weight.quarter, "GROUP": 0 if weight.group == weight.shape[-1] else weight.group}


def launch_linear(
    x: Tensor, weight: GroupedInt4, bias: Tensor | None, out: Tensor, cut: tuple[Tile, int],
    activation: Activation | None = None,
) -> None:  # fmt: skip
    """Runs the kernel with a result of `tile_for`; `out` is [splits, M, N], or [M, N / 2] with an `activation`."""
    (m, k), n, (tile, side) = x.shape, len(weight), cut
    span = -(-k // (tile.splits * tile.block_k)) * tile.block_k // 4
    _int4_linear_kernel[(-(-n // tile.block_n), tile.splits, -(-m // side))](
        x, weight.data, weight.scale, x if bias is None else bias, out, m, n, k // 4, weight.scale.stride(1), span,
        T=side, BLOCK_N=tile.block_n, **sizes_of(weight), EVEN=n % tile.block_n == 0, BIAS=bias is not None,
        SWIGLU=activation is not None, GELU=activation == "gelu_tanh", num_warps=tile.warps,
        num_stages=tile.stages, **pdl(x),
    )  # fmt: skip


def _tile(x: Tensor, weight: GroupedInt4, split: bool = False) -> tuple[Tile, int]:
    shared = features_of(x.device).shared_memory
    return tile_for(len(weight), x.shape[1], len(x), weight.quarter, split=split, row_bytes=x.itemsize, shared=shared)


def linear(x: Tensor, weight: GroupedInt4, bias: Tensor | None = None) -> Tensor:
    """Multiplies x [M, K] with weight [N, K] transposed and adds bias [N]; returns [M, N] in x's dtype."""
    if len(x) > TILED_ROWS:
        return _dequantized_linear(x, weight, bias)
    out = x.new_empty(1, len(x), len(weight))
    launch_linear(x, weight, bias, out, _tile(x, weight))
    return out[0]


def linear_split_k(x: Tensor, weight: GroupedInt4, bias: Tensor | None = None) -> Tensor:
    """Returns `linear` as split-K partial sums, fp32 [P, M, N]; above MAX_ROWS rows as one, in x's dtype."""
    if len(x) > MAX_ROWS:
        return linear(x, weight, bias)[None]
    cut = _tile(x, weight, split=True)
    out = x.new_empty(cut[0].splits, len(x), len(weight), dtype=torch.float32)
    launch_linear(x, weight, bias, out, cut)
    return out


def linear_swiglu(x: Tensor, weight: GroupedInt4, activation: Activation = "silu") -> Tensor:
    """Returns activation(gate) * up, [M, I], where weight [2 * I, K] holds all gates, then all ups."""
    if len(x) > TILED_ROWS:
        return swiglu(linear(x, weight), halves=True, activation=activation)
    out = x.new_empty(len(x), len(weight) // 2)
    launch_linear(x, weight, None, out, _tile(x, weight), activation)
    return out


def dequantize(weight: GroupedInt4, out: Tensor) -> Tensor:
    """Writes the values of a weight to out [N, K]."""
    n, k = out.shape
    sizes = sizes_of(weight)
    _dequantize_kernel[(-(-n // DEQUANTIZED_ROWS), k // (4 * sizes["QUARTER"]))](
        weight.data, weight.scale, out, n, k // 4, weight.scale.stride(1),
        BLOCK_N=DEQUANTIZED_ROWS, **sizes, **pdl(out),
    )  # fmt: skip
    return out


def _dequantized_linear(x: Tensor, weight: GroupedInt4, bias: Tensor | None) -> Tensor:
    out, scratch = x.new_empty(len(x), len(weight)), x.new_empty(min(SLICE, len(weight)), x.shape[1])
    for part, columns in zip(weight.split(SLICE), out.split(SLICE, dim=1), strict=True):
        torch.mm(x, dequantize(part, scratch[: len(part)]).T, out=columns)
    return out if bias is None else out.add_(bias)
