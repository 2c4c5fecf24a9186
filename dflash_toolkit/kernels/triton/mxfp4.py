"""Sums of products with MXFP4 weights. Registers hold the values; `Mxfp4Weight` defines their order.

The four values of a 16-bit word are columns of the four groups of a block, so each group is one product with one scale
per row, and no value moves between threads. In bf16 three instructions make two values: the bits of a value, moved to
those of bf16, are the value times 2**-126, and a multiplication by the scale makes it normal again. All products are
exact.
"""

# mypy: disable-error-code="no-untyped-def"
import triton
import triton.language as tl

WORDS = tl.constexpr(32)  # of a block; also the columns of a group
BITS = tl.constexpr(0x81C0)  # the sign, the lower bits of the exponent and the highest of the mantissa in bf16
ADDED = tl.constexpr(66)  # to scales in memory; in bf16, values are 2**(126 - ADDED) times too small at first


@triton.jit
def words_of(K):
    """Returns the words of a row of K columns."""
    return (K + 4 * WORDS - 1) // (4 * WORDS) * WORDS


@triton.jit
def _factor(b_scale, GROUP: tl.constexpr, DTYPE: tl.constexpr):
    """Returns what values of a group are multiplied with, of the scales of four groups, int32 [BLOCK_N]."""
    b_exponent = (b_scale >> (8 * GROUP)) & 0xFF
    if DTYPE.is_bf16():
        b_factor = (b_exponent << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        b_exponent -= ADDED
        b_factor = tl.where(b_exponent == 0, 0x400000, b_exponent << 23).to(tl.float32, bitcast=True)
    return b_factor[:, None]


@triton.jit
def _value(b_bits, b_factor):
    """Returns fp32 values of BITS in int32."""
    b_small = ((b_bits & BITS) << 16).to(tl.float32, bitcast=True)
    return b_small * 8.507059173023462e37 * b_factor  # 2**126, the difference of the exponents' biases


@triton.jit
def unpack(b_w, b_scale, DTYPE: tl.constexpr):
    """Returns the values of the four groups, of words [BLOCK_N, WORDS] and scales, four to an int32, [BLOCK_N]."""
    b_0, b_1 = _factor(b_scale, 0, DTYPE), _factor(b_scale, 1, DTYPE)
    b_2, b_3 = _factor(b_scale, 2, DTYPE), _factor(b_scale, 3, DTYPE)
    if DTYPE.is_bf16():
        b_parts = tl.inline_asm_elementwise(
            """{
            .reg .b32 bits, sign, low, none;
            mov.b32 none, 0x80008000;
            and.b32 bits, $4, 0x81C081C0;
            fma.rn.bf16x2 $0, bits, $5, none;
            shl.b32 bits, $4, 3;
            and.b32 bits, bits, 0x81C081C0;
            fma.rn.bf16x2 $1, bits, $6, none;
            shl.b32 bits, $4, 6;
            and.b32 bits, bits, 0x81C081C0;
            fma.rn.bf16x2 $2, bits, $7, none;
            shl.b32 sign, $4, 1;
            and.b32 sign, sign, 0x80008000;
            shr.u32 low, $4, 7;
            lop3.b32 sign, low, 0x00400040, sign, 0xEA;
            shr.u32 bits, $4, 3;
            lop3.b32 bits, bits, 0x01800180, sign, 0xEA;
            fma.rn.bf16x2 $3, bits, $8, none;
            }""",
            "=&r,=&r,=&r,=&r,r,r,r,r,r", [b_w, b_0, b_1, b_2, b_3], dtype=(tl.bfloat16,) * 4, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        b_wide = b_w.to(tl.int32)
        b_last = ((b_wide << 1) & 0x8000) | ((b_wide >> 3) & 0x180) | ((b_wide >> 7) & 0x40)
        b_parts = (
            _value(b_wide, b_0).to(DTYPE), _value(b_wide << 3, b_1).to(DTYPE),
            _value(b_wide << 6, b_2).to(DTYPE), _value(b_last, b_3).to(DTYPE),
        )  # fmt: skip
    return b_parts


@triton.jit
def accumulate_mxfp4(
    x_p, w_p, scale_p, o_n, o_m, m_m, N, K, T: tl.constexpr, BLOCK_N: tl.constexpr, EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
):  # fmt: skip
    """Returns the product [BLOCK_N, T] over all K columns of words w [N, words_of(K)] and scales [K / 128, N]."""
    o_k = tl.arange(0, WORDS)
    p_w = w_p + o_n[:, None].to(tl.int64) * words_of(K) + o_k[None, :]
    p_scale = scale_p + o_n
    p_x = x_p + o_m[None, :].to(tl.int64) * K + o_k[:, None]
    m_n = None if EVEN_N else o_n < N
    m_w = None if EVEN_N else (o_n < N)[:, None]
    other = None if EVEN_N else 0
    b_acc = tl.zeros([BLOCK_N, T], dtype=tl.float32)
    for k in range(0, K, 4 * WORDS):
        b_w = tl.load(p_w, mask=m_w, other=other, eviction_policy="evict_first")
        b_parts = unpack(b_w, tl.load(p_scale, mask=m_n, other=other), x_p.dtype.element_ty)
        for i in tl.static_range(4):
            m_x = m_m[None, :]
            if not EVEN_K:  # whole groups may be missing
                m_x = m_x & (k + i * WORDS < K)
            b_x = tl.load(p_x + i * WORDS, mask=m_x, other=0.0, eviction_policy="evict_last")
            b_acc = tl.dot(b_parts[i], b_x, b_acc, input_precision="ieee")
        p_w += WORDS
        p_scale += N
        p_x += 4 * WORDS
    if x_p.dtype.element_ty.is_bf16():
        b_acc *= 1152921504606846976.0  # 2**(126 - ADDED)
    return b_acc
