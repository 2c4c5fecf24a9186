"""The fp8 values of the kernels, and GEMMs in fp8 above MAX_ROWS rows: a kernel quantizes rows and cuBLAS multiplies.

Half the bytes and twice the rate of bf16. Used for drafts, which need not be exact, and for FP8 targets.

Triton has no type for fp8 on GPUs that do not multiply it. There, kernels read weights as uint8, and quantize rows to
values of fp8 in fp16; products are in fp16, with sums in fp32.
"""

# mypy: disable-error-code="no-untyped-def"
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from ..features import features_of
from ..formats import FP8_MAX, RowScaledFp8, Weight, format_of, parts
from ..launch import next_power_of_two, pdl
from .pdl import start_next, wait_for_previous

MAX_WIDTH = 32768  # columns of a row, which one program holds


@triton.jit
def to_fp8(b_x, FORMAT: tl.constexpr):
    """Rounds fp32 values in the range of fp8 to the nearest of fp8, ties to even; see `rows_dtype` for FORMAT."""
    if FORMAT.is_fp8e4nv():
        b_y = b_x.to(FORMAT)
    else:
        # the last bit of 1.5 * 2**(e + 20) is the last of fp8's bits of a value from 2**e on, with 2**-6 as the least
        b_power = tl.maximum(b_x.to(tl.int32, bitcast=True) & 0x7F800000, 0x3C800000)
        b_shift = (b_power + 0x0A400000).to(tl.float32, bitcast=True)
        b_y = ((b_x + b_shift) - b_shift).to(FORMAT)
    return b_y


@triton.jit
def of_fp8(b_x):
    """Converts fp8 bits, uint8, to their values in fp16; NaN becomes 480. Returns values of other types unchanged."""
    if b_x.dtype.is_uint8():
        b_wide = b_x.to(tl.int8, bitcast=True).to(tl.int16)
        b_half = (b_wide << 7) & -0x4001  # the sign, a zero, the exponent and the mantissa
        b_x = b_half.to(tl.float16, bitcast=True) * 256.0
    return b_x


@triton.jit
def of_bits(b_x, DTYPE: tl.constexpr):
    """Converts bits of fp8, uint8, to their values in another dtype; NaN becomes 480.

    In bf16 by moving bits of four values at a time, as instructions that convert to bf16 take longer than the rest of
    attention.
    """
    if DTYPE.is_bf16():
        b_moved = tl.inline_asm_elementwise(
            """{
            .reg .b32 low, high, low_sign, high_sign;
            prmt.b32 low, $2, 0, 0x1404;
            prmt.b32 high, $2, 0, 0x3424;
            and.b32 low_sign, low, 0x80008000;
            and.b32 high_sign, high, 0x80008000;
            shr.u32 low, low, 4;
            shr.u32 high, high, 4;
            lop3.b32 $0, low, 0x07F007F0, low_sign, 0xEA;
            lop3.b32 $1, high, 0x07F007F0, high_sign, 0xEA;
            }""",
            "=r,=r,r", [b_x], dtype=tl.bfloat16, is_pure=True, pack=4,
        )  # fmt: skip
        b_y = b_moved * 1.329227995784916e36  # 2**120, the difference of the exponents' biases
    else:
        b_y = of_fp8(b_x).to(DTYPE)
    return b_y


@triton.jit
def to_bits(b_x):
    """Rounds fp32 values in the range of fp8 to the bits of fp8, uint8, without instructions for fp8."""
    b_half = (to_fp8(b_x, tl.float16) * 0.00390625).to(tl.int16, bitcast=True)  # the inverse of `of_fp8`
    return (((b_half >> 8) & 0x80) | ((b_half >> 7) & 0x7F)).to(tl.uint8)


def rows_dtype(device: torch.device) -> torch.dtype:
    """Returns the dtype of rows that are quantized to fp8; fp16 has all its values."""
    return torch.float8_e4m3fn if features_of(device).fp8_products else torch.float16


def stored_parts(weight: Weight) -> tuple[Tensor, Tensor | None]:
    """Returns `formats.parts` as kernels take them: where Triton has no fp8 type, fp8 values as uint8."""
    data, scale = parts(weight)
    if data.dtype == torch.float8_e4m3fn and not features_of(data.device).fp8_products:
        data = data.view(torch.uint8)
    return data, scale


@triton.jit(do_not_specialize=["M"])
def _round_kernel(x_p, data_p, scale_p, M, K, FP8_MAX: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    i_m = tl.program_id(0).to(tl.int64)
    o_k = tl.arange(0, BLOCK)
    mask = o_k < K
    wait_for_previous(PDL)
    b_x = tl.load(x_p + i_m * K + o_k, mask=mask, other=0.0).to(tl.float32)
    start_next(PDL)
    scale = tl.maximum(tl.max(tl.abs(b_x), axis=0), 1e-12) / FP8_MAX
    # a quotient that rounds up must not exceed the format's maximum, as the next value is NaN
    b_y = tl.clamp(b_x / scale, -FP8_MAX, FP8_MAX)
    tl.store(data_p + i_m * K + o_k, to_fp8(b_y, data_p.dtype.element_ty), mask=mask)
    tl.store(scale_p + i_m, scale)


def quantize_rows(x: Tensor) -> RowScaledFp8:
    """Quantizes rows [M, K] to fp8, each by its own largest value, like `RowScaledFp8.of`, in one pass over memory."""
    m, k = x.shape
    data = torch.empty(m, k, dtype=rows_dtype(x.device), device=x.device)
    scale = torch.empty(m, dtype=torch.float32, device=x.device)
    _round_kernel[(m,)](
        x, data, scale, m, k,
        FP8_MAX=FP8_MAX, BLOCK=next_power_of_two(k), num_warps=8 if k > 2048 else 4, **pdl(x),
    )  # fmt: skip
    return RowScaledFp8(data, scale)


def multiplies(x: Tensor, weight: Weight) -> bool:
    """Returns whether `scaled_linear` supports these: row-scaled fp8 weights, bf16 rows, cuBLAS's sizes and GPUs."""
    aligned = x.shape[1] % 16 == 0 and len(weight) % 16 == 0 and x.shape[1] <= MAX_WIDTH
    known = format_of(weight).row_scales and features_of(x.device).cublas_fp8_rows
    return x.dtype == torch.bfloat16 and aligned and known


def scaled_linear(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """Quantizes x [M, K], multiplies it with weight [N, K] transposed and adds bias [N]; returns bf16 [M, N]."""
    return multiply_quantized(quantize_rows(x), weight, x.dtype, bias)


def multiply_quantized(rows: RowScaledFp8, weight: Weight, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """Computes `scaled_linear` for rows that `quantize_rows` has quantized from `dtype`."""
    each, (data, scale) = F.ScalingType.RowWise, parts(weight)
    assert scale is not None, "which `multiplies`"
    return F.scaled_mm(
        rows.data, data.t(), rows.scale[:, None], each, scale.view(1, -1), each,
        bias=bias, output_dtype=dtype, use_fast_accum=True,
    )  # fmt: skip
