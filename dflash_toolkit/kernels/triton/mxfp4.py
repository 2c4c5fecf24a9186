"""Sums of products with MXFP4 weights. Registers hold the values; `Mxfp4Weight` defines their order.

The four values of a 16-bit word are columns of the four groups of a block, so the values of a group are a part of the
product with one scale per row, and no value moves between threads. In bf16 about three instructions make two values:
the bits of a value, moved to those of bf16, are the value times 2**-126, and a multiplication by the scale makes it
normal again. All products are exact.
"""

# mypy: disable-error-code="no-untyped-def"
import triton
import triton.language as tl

WORDS = tl.constexpr(32)  # of a block; also the columns of a group
SIGN = tl.constexpr(0x8000)  # in bf16
STEPS = tl.constexpr(0x01C0)  # the lower bits of the exponent and the highest of the mantissa in bf16
FACTORS = tl.constexpr(0x7F807F80)  # the exponents of two numbers in bf16
ADDED = tl.constexpr(66)  # to scales in memory; in bf16, values are 2**(126 - ADDED) times too small at first


@triton.jit
def words_of(K):
    """Returns the words of a row of K columns."""
    return (K + 4 * WORDS - 1) // (4 * WORDS) * WORDS


@triton.jit
def _value(b_steps, b_signs, b_scale, GROUP: tl.constexpr):
    """Returns fp32 values of the STEPS and SIGN bits of int32, with the scales of four groups, int32 [BLOCK_N]."""
    b_exponent = ((b_scale >> (8 * GROUP)) & 0xFF) - ADDED
    b_factor = tl.where(b_exponent == 0, 0x400000, b_exponent << 23).to(tl.float32, bitcast=True)[:, None]
    b_small = (((b_steps & STEPS) | (b_signs & SIGN)) << 16).to(tl.float32, bitcast=True)
    return b_small * 8.507059173023462e37 * b_factor  # 2**126, the difference of the exponents' biases


@triton.jit
def unpack(b_w, b_scale, DTYPE: tl.constexpr):
    """Returns the values of the four groups, of words [BLOCK_N, WORDS] and scales, four to an int32, [BLOCK_N]."""
    if DTYPE.is_bf16():
        # the factors of the groups 0 and 2, and of 1 and 3
        b_even, b_odd = ((b_scale << 7) & FACTORS)[:, None], ((b_scale >> 1) & FACTORS)[:, None]
        b_parts = tl.inline_asm_elementwise(
            """{
            .reg .b32 bits, sign, none, factor;
            .reg .b16 f0, f1, f2, f3;
            mov.b32 none, 0x80008000;
            mov.b32 {f0, f2}, $5;
            mov.b32 {f1, f3}, $7;
            and.b32 bits, $4, 0x81C081C0;
            mov.b32 factor, {f0, f0};
            fma.rn.bf16x2 $0, bits, factor, none;
            shl.b32 sign, $4, 5;
            and.b32 sign, sign, 0x80008000;
            shl.b32 bits, $4, 3;
            lop3.b32 bits, bits, 0x01C001C0, sign, 0xEA;
            mov.b32 factor, {f1, f1};
            fma.rn.bf16x2 $1, bits, factor, none;
            shl.b32 bits, $4, 6;
            and.b32 bits, bits, 0x81C081C0;
            mov.b32 factor, {f2, f2};
            fma.rn.bf16x2 $2, bits, factor, none;
            shl.b32 sign, $4, 1;
            and.b32 sign, sign, 0x80008000;
            shr.u32 bits, $4, 5;
            lop3.b32 bits, bits, 0x01C001C0, sign, 0xEA;
            mov.b32 factor, {f3, f3};
            fma.rn.bf16x2 $3, bits, factor, none;
            }""",
            "=&r,=&r,=&r,=&r,r,r,r,r,r", [b_w, b_even, b_odd], dtype=(tl.bfloat16,) * 4, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        b_wide = b_w.to(tl.int32)
        b_parts = (
            _value(b_wide, b_wide, b_scale, 0).to(DTYPE), _value(b_wide << 3, b_wide << 5, b_scale, 1).to(DTYPE),
            _value(b_wide << 6, b_wide << 6, b_scale, 2).to(DTYPE),
            _value(b_wide >> 5, b_wide << 1, b_scale, 3).to(DTYPE),
        )  # fmt: skip
    return b_parts


@triton.jit
def accumulate_mxfp4(
    x_p, w_p, scale_p, o_n, o_m, m_m, N, K, T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN_N: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """Returns the product [BLOCK_N, T] over all K columns of words w [N, words_of(K)] and scales [K / 128, N].

    Blocks of 128 columns are added one after the other, BLOCK_K / 128 of them in an iteration of the loop.
    """
    BLOCK: tl.constexpr = 4 * WORDS
    # one product of a block needs more registers than four; both add the same columns in the same order
    JOINED: tl.constexpr = x_p.dtype.element_ty.is_bf16() and T <= 16
    o_w, o_k = tl.arange(0, WORDS), tl.arange(0, BLOCK if JOINED else WORDS)
    p_w = w_p + o_n[:, None].to(tl.int64) * words_of(K) + o_w[None, :]
    p_scale = scale_p + o_n
    p_x = x_p + o_m[None, :].to(tl.int64) * K + o_k[:, None]
    b_acc = tl.zeros([BLOCK_N, T], dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        for k in tl.static_range(0, BLOCK_K, BLOCK):
            m_n = o_n < N
            if not EVEN_K:  # whole groups may be missing, and the second of two blocks
                m_n = m_n & (start + k < K)
            if EVEN_N and (EVEN_K or k == 0):
                b_w = tl.load(p_w + k // 4, eviction_policy="evict_first")
                b_scale = tl.load(p_scale + k // BLOCK * N)
            else:
                b_w = tl.load(p_w + k // 4, mask=m_n[:, None], other=0, eviction_policy="evict_first")
                b_scale = tl.load(p_scale + k // BLOCK * N, mask=m_n, other=0)
            b_parts = unpack(b_w, b_scale, x_p.dtype.element_ty)
            if JOINED:  # no value moves: the parts become columns in registers
                b_all = tl.join(tl.join(b_parts[0], b_parts[2]), tl.join(b_parts[1], b_parts[3]))
                b_all = tl.reshape(tl.permute(b_all, (0, 2, 3, 1)), (BLOCK_N, BLOCK))
                m_x = m_m[None, :] if EVEN_K else m_m[None, :] & (start + k + o_k < K)[:, None]
                b_x = tl.load(p_x + k, mask=m_x, other=0.0, eviction_policy="evict_last")
                b_acc = tl.dot(b_all, b_x, b_acc, input_precision="ieee")
            else:
                for i in tl.static_range(4):
                    m_x = m_m[None, :] if EVEN_K else m_m[None, :] & (start + k + i * WORDS < K)
                    b_x = tl.load(p_x + (k + i * WORDS), mask=m_x, other=0.0, eviction_policy="evict_last")
                    b_acc = tl.dot(b_parts[i], b_x, b_acc, input_precision="ieee")
        p_w += BLOCK_K // 4
        p_scale += BLOCK_K // BLOCK * N
        p_x += BLOCK_K
    if x_p.dtype.element_ty.is_bf16():
        b_acc *= 1152921504606846976.0  # 2**(126 - ADDED)
    return b_acc
