"""Sums of products with MXFP4 weights, whose values are made in registers.

Rows [BLOCK_N, BLOCK_K / 4] of 16-bit words become four matrices of as many values, each multiplied with its columns of
the rows. In bf16 three instructions make two values: the bits of a value, moved to those of bf16, are the value times
2**-126, and a multiplication by the group's scale makes it normal again. All products are exact.
"""

# mypy: disable-error-code="no-untyped-def"
import triton
import triton.language as tl

GROUP = tl.constexpr(32)  # columns that share a scale
BITS = tl.constexpr(0x81C0)  # the sign, the lower bits of the exponent and the highest of the mantissa in bf16
DOWN = tl.constexpr(60)  # in bf16 values are 2**-60 times too large, so that 2**126 times a scale is in its range


@triton.jit
def _value(b_bits, b_scale):
    """Returns fp32 values of BITS in int32."""
    b_small = ((b_bits & BITS) << 16).to(tl.float32, bitcast=True)
    return b_small * 8.507059173023462e37 * b_scale  # 2**126, the difference of the exponents' biases


@triton.jit
def unpack(b_w, b_scale, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, DTYPE: tl.constexpr):
    """Returns the four values of words [BLOCK_N, BLOCK_K / 4], with scales [BLOCK_N, BLOCK_K / 32]."""
    groups: tl.constexpr = BLOCK_K // GROUP
    b_scale = b_scale.to(tl.int32)
    if DTYPE.is_bf16():
        b_factor = ((tl.minimum(b_scale, 188) + (126 - DOWN)) << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        b_factor = tl.where(b_scale == 0, 0x400000, b_scale << 23).to(tl.float32, bitcast=True)
    b_factor = tl.broadcast_to(b_factor[:, :, None], (BLOCK_N, groups, GROUP // 4))
    b_factor = tl.reshape(b_factor, (BLOCK_N, BLOCK_K // 4))
    if DTYPE.is_bf16():
        b_parts = tl.inline_asm_elementwise(
            """{
            .reg .b32 bits, sign, low, none;
            mov.b32 none, 0x80008000;
            and.b32 bits, $4, 0x81C081C0;
            fma.rn.bf16x2 $0, bits, $5, none;
            shl.b32 bits, $4, 3;
            and.b32 bits, bits, 0x81C081C0;
            fma.rn.bf16x2 $1, bits, $5, none;
            shl.b32 bits, $4, 6;
            and.b32 bits, bits, 0x81C081C0;
            fma.rn.bf16x2 $2, bits, $5, none;
            shl.b32 sign, $4, 1;
            and.b32 sign, sign, 0x80008000;
            shr.u32 low, $4, 7;
            lop3.b32 sign, low, 0x00400040, sign, 0xEA;
            shr.u32 bits, $4, 3;
            lop3.b32 bits, bits, 0x01800180, sign, 0xEA;
            fma.rn.bf16x2 $3, bits, $5, none;
            }""",
            "=&r,=&r,=&r,=&r,r,r", [b_w, b_factor], dtype=(tl.bfloat16,) * 4, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        b_wide = b_w.to(tl.int32)
        b_last = ((b_wide << 1) & 0x8000) | ((b_wide >> 3) & 0x180) | ((b_wide >> 7) & 0x40)
        b_parts = (
            _value(b_wide, b_factor).to(DTYPE), _value(b_wide << 3, b_factor).to(DTYPE),
            _value(b_wide << 6, b_factor).to(DTYPE), _value(b_last, b_factor).to(DTYPE),
        )  # fmt: skip
    return b_parts


@triton.jit
def scales_of_row(K):
    """Returns the number of scales of K columns, see `Mxfp4Weight`."""
    return (K // GROUP + 15) // 16 * 16


@triton.jit
def accumulate_mxfp4(
    x_p, w_p, scale_p, o_n, o_m, m_m, N, K,
    T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """Returns the product [BLOCK_N, T] over all K columns of words w [N, K / 4] with their scales."""
    o_i, o_g = tl.arange(0, BLOCK_K // 4), tl.arange(0, BLOCK_K // GROUP)
    o_k = o_i // 8 * GROUP + o_i % 8  # columns of the first values of the words
    p_w = w_p + o_n[:, None].to(tl.int64) * (K // GROUP * 8) + o_i[None, :]
    p_scale = scale_p + o_n[:, None].to(tl.int64) * scales_of_row(K) + o_g[None, :]
    p_x = x_p + o_m[None, :] * K + o_k[:, None]
    b_acc = tl.zeros([BLOCK_N, T], dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        m_x = m_m[None, :]
        if EVEN_K and EVEN_N:
            b_w = tl.load(p_w, eviction_policy="evict_first")
            b_scale = tl.load(p_scale)
        else:
            m_n, m_k = (o_n < N)[:, None], o_i // 8 < (K - k) // GROUP
            m_x = m_x & m_k[:, None]
            b_w = tl.load(p_w, mask=m_n & m_k[None, :], other=0, eviction_policy="evict_first")
            b_scale = tl.load(p_scale, mask=m_n, other=0)  # zeros after the last one
        b_parts = unpack(b_w, b_scale, BLOCK_N, BLOCK_K, x_p.dtype.element_ty)
        for i in tl.static_range(4):
            b_x = tl.load(p_x + 8 * i, mask=m_x, other=0.0, eviction_policy="evict_last")
            b_acc = tl.dot(b_parts[i], b_x, b_acc, input_precision="ieee")
        p_w += BLOCK_K // 4
        p_scale += BLOCK_K // GROUP
        p_x += BLOCK_K
    if x_p.dtype.element_ty.is_bf16():
        b_acc *= 1152921504606846976.0  # 2**DOWN
    return b_acc
