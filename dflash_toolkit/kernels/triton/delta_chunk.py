"""Gated delta nets over a prompt, in Triton: 64 rows at a time in products of matrices (Yang et al., arXiv 2412.06464).

Within 64 rows every row's correction depends on the rows before it. The inverse of this triangular system needs no
state, so all chunks are solved at once. Then one program of a head's values goes from chunk to chunk with the state in
fp32. Values that are rounded to the rows' dtype depend only on a row's place in its chunk and on the rows before it. So
the bits depend neither on where a prompt is cut, at multiples of 64 rows, nor on the number of other rows.
"""

# mypy: disable-error-code="no-untyped-def"
import torch
import triton
import triton.language as tl
from torch import Tensor

from ..delta import DeltaMemory
from ..features import features_of
from ..launch import next_power_of_two, padded, pdl
from .delta import _sigmoid, _softplus, gate_sums

CHUNK: tl.constexpr = tl.constexpr(64)  # rows of a triangular system
PART: tl.constexpr = tl.constexpr(16)  # rows of a chunk that are solved one after another
ROWS = 32  # rows of a program of the convolution
COLUMNS = 64  # columns of a head's values in a program that goes from chunk to chunk
FEWER_COLUMNS = 32  # of GPUs without Hopper's products, which read operands from registers and would spill them


@triton.jit
def _chunk_input(qkv_p, window_p, o_at, known, S, C, stride_qkv, m_c, TAPS: tl.constexpr):
    """Loads inputs at places o_at of a chunk of a prompt; below 0 from the window, if the prompt has one."""
    b_before = tl.load(window_p + (o_at + TAPS - 1) * C, mask=(o_at < 0) & (o_at > -TAPS) & known & m_c, other=0.0)
    b_x = tl.load(qkv_p + o_at * stride_qkv, mask=(o_at >= 0) & (o_at < S) & m_c, other=0.0)
    return tl.where(o_at < 0, b_before, b_x)


@triton.jit(do_not_specialize=["S"])
def _chunk_inputs_kernel(
    qkv_p, ba_p, w_p, a_log_p, dt_p, window_p, slots_p, starts_p, counts_p, q_p, k_p, v_p, gates_p,
    S, C, N, G, H_K, H_V, stride_qkv, stride_ba, stride_part, gates_stride,
    PARTS: tl.constexpr, TAPS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Prepares some rows of one head of queries, keys or values; the last programs prepare the gates of all heads."""
    i_r, i_h, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    o_r = i_r * ROWS + tl.arange(0, ROWS)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    count = tl.load(counts_p + i_b)
    known = tl.load(starts_p + i_b) > 0
    m_there, m_row = (o_r < S)[:, None], (o_r < count)[:, None]
    o_row = (i_b * S + o_r)[:, None]
    if i_h < 2 * G + N:
        width = tl.where(i_h < 2 * G, H_K, H_V)
        first = tl.where(i_h < 2 * G, i_h * H_K, 2 * G * H_K + (i_h - 2 * G) * H_V)
        o_h = tl.arange(0, BLOCK)
        m_c = (o_h < width)[None, :]
        p_qkv = qkv_p + i_b * S * stride_qkv + first + o_h[None, :]
        p_window = window_p + tl.load(slots_p + i_b).to(tl.int64) * (TAPS - 1) * C + first + o_h[None, :]
        b_acc = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
        for tap in tl.static_range(TAPS):
            o_at = (o_r - (TAPS - 1) + tap).to(tl.int64)[:, None]
            b_x = _chunk_input(p_qkv, p_window, o_at, known, S, C, stride_qkv, m_c, TAPS)
            b_w = tl.load(w_p + (first + o_h) * TAPS + tap, mask=o_h < width, other=0.0)
            b_acc += b_x.to(tl.float32) * b_w.to(tl.float32)[None, :]
        dtype = q_p.dtype.element_ty
        b_y = b_acc.to(dtype).to(tl.float32)  # as stored between convolution and activation
        b_y = (b_y * _sigmoid(b_y)).to(dtype)
        b_wide = b_y.to(tl.float32)
        b_unit = b_wide * tl.rsqrt(tl.sum(b_wide * b_wide, axis=1) + 1e-6)[:, None]
        b_out = tl.where(m_row, tl.where(i_h < 2 * G, b_unit.to(dtype), b_y), 0.0)
        m_out = m_there & m_c
        if i_h < G:
            tl.store(q_p + (o_row * G + i_h) * H_K + o_h[None, :], b_out, mask=m_out)
        elif i_h < 2 * G:
            tl.store(k_p + (o_row * G + i_h - G) * H_K + o_h[None, :], b_out, mask=m_out)
        else:
            tl.store(v_p + (o_row * N + i_h - 2 * G) * H_V + o_h[None, :], b_out, mask=m_out)
        if i_r == 0:  # only this program reads the window of these channels
            o_w = tl.arange(0, 16)  # more rows than it has
            o_last = (count - (TAPS - 1) + o_w).to(tl.int64)[:, None]
            b_last = _chunk_input(p_qkv, p_window, o_last, known, count, C, stride_qkv, m_c, TAPS)
            tl.debug_barrier()  # before overwriting values that other threads read
            tl.store(p_window + o_w[:, None] * C, b_last, mask=(o_w < TAPS - 1)[:, None] & m_c & (count > 0))
    else:
        o_n = tl.arange(0, HEADS)
        m_n = (o_n < N)[None, :]
        p_ba = ba_p + o_row * stride_ba + o_n[None, :]
        b_b, b_a = gate_sums(p_ba, m_row & m_n, N, stride_part, PARTS, q_p.dtype.element_ty)
        b_rate = tl.exp(tl.load(a_log_p + o_n, mask=o_n < N, other=0.0).to(tl.float32))
        b_dt = tl.load(dt_p + o_n, mask=o_n < N, other=0.0).to(tl.float32)
        b_decay = -b_rate[None, :] * _softplus(b_a + b_dt[None, :])
        b_beta = _sigmoid(b_b).to(q_p.dtype.element_ty).to(tl.float32)
        p_gates = gates_p + o_row * N + o_n[None, :]
        tl.store(p_gates, tl.where(m_row, b_decay, 0.0), mask=m_there & m_n)
        tl.store(p_gates + gates_stride, tl.where(m_row, b_beta, 0.0), mask=m_there & m_n)


@triton.jit
def _inverse(b_a):
    """Returns the inverse of 1 + b_a in fp32; b_a [64, 64] is strictly lower triangular.

    Blocks on the diagonal are inverted by substitution, as powers of b_a would cancel each other for similar keys. Then
    [[A, 0], [C, B]]^-1 = [[A^-1, 0], [-B^-1 C A^-1, B^-1]] joins pairs of blocks.
    """
    PARTS: tl.constexpr = CHUNK // PART
    o_p, o_i, o_c = tl.arange(0, PARTS), tl.arange(0, PART), tl.arange(0, CHUNK)
    m_diagonal = o_p[:, None, None, None] == o_p[None, None, :, None]
    b_parts = tl.reshape(b_a, [PARTS, PART, PARTS, PART])
    b_d = -tl.sum(tl.where(m_diagonal, b_parts, 0.0), axis=2)  # [4, 16, 16]
    for i in range(1, PART):
        m_i = (o_i == i)[None, :, None]
        b_row = tl.sum(tl.where(m_i, b_d, 0.0), axis=1)
        b_row += tl.sum(b_row[:, :, None] * b_d, axis=1)
        b_d = tl.where(m_i, b_row[:, None, :], b_d)
    b_d += tl.where(o_i[None, :, None] == o_i[None, None, :], 1.0, 0.0)
    b_inverse = tl.reshape(tl.where(m_diagonal, b_d[:, :, None, :], 0.0), [CHUNK, CHUNK])
    for level in tl.static_range(2):
        o_row, o_column = (o_c // (PART << level))[:, None], (o_c // (PART << level))[None, :]
        b_joint = tl.where((o_row == o_column + 1) & (o_column % 2 == 0), b_a, 0.0)
        b_joint = tl.dot(b_inverse, b_joint, input_precision="tf32")  # the result is rounded to 16 bits
        b_inverse -= tl.dot(b_joint, b_inverse, input_precision="tf32")
    return b_inverse


@triton.jit(do_not_specialize=["S"])
def _chunk_solve_kernel(
    q_p, k_p, gates_p, solved_p, scores_p, decay_p, S, N, G, H_K, gates_stride, scale,
    BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    i_n, i_t, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    o_c, o_k = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)
    o_t = i_t * CHUNK + o_c
    m_t = o_t < S
    m_k = m_t[:, None] & (o_k < H_K)[None, :]
    o_row = i_b * S + o_t
    o_key = (o_row * G + i_n // (N // G))[:, None] * H_K + o_k[None, :]
    o_own = o_row * N + i_n
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    b_k = tl.load(k_p + o_key, mask=m_k, other=0.0)
    b_decay = tl.cumsum(tl.load(gates_p + o_own, mask=m_t, other=0.0), axis=0)
    b_beta = tl.load(gates_p + gates_stride + o_own, mask=m_t, other=0.0)
    tl.store(decay_p + o_own, b_decay, mask=m_t)
    m_upto, m_before = o_c[:, None] >= o_c[None, :], o_c[:, None] > o_c[None, :]
    b_between = tl.exp(tl.where(m_upto, b_decay[:, None] - b_decay[None, :], float("-inf")))
    b_q = tl.load(q_p + o_key, mask=m_k, other=0.0)
    b_scores = tl.dot(b_q, tl.trans(b_k), input_precision="ieee") * b_between * scale
    o_square = o_own[:, None] * CHUNK + o_c[None, :]
    tl.store(scores_p + o_square, b_scores.to(b_k.dtype), mask=m_t[:, None])
    b_a = tl.dot(b_k, tl.trans(b_k), input_precision="ieee") * b_between * b_beta[:, None]
    b_solved = _inverse(tl.where(m_before, b_a, 0.0)) * b_beta[None, :]
    tl.store(solved_p + o_square, b_solved.to(b_k.dtype), mask=m_t[:, None])


@triton.jit(do_not_specialize=["S"])
def _chunk_rule_kernel(
    q_p, k_p, v_p, solved_p, scores_p, decay_p, state_p, out_p, slots_p, starts_p, counts_p, S, N, G, H_K, H_V, scale,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    i_v, i_n, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    o_c, o_k, o_v = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K), i_v * BLOCK_V + tl.arange(0, BLOCK_V)
    m_k, m_v = o_k < H_K, o_v < H_V
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    slot = tl.load(slots_p + i_b).to(tl.int64)
    p_state = state_p + ((slot * N + i_n) * H_K + o_k)[:, None] * H_V + o_v[None, :]
    m_state = m_k[:, None] & m_v[None, :]
    b_state = tl.load(p_state, mask=m_state & (tl.load(starts_p + i_b) > 0), other=0.0)
    dtype = q_p.dtype.element_ty
    for start in range(0, S, CHUNK):
        o_t = start + o_c
        m_t = o_t < S
        o_row = i_b * S + o_t
        o_key = ((o_row * G + i_n // (N // G)) * H_K)[:, None] + o_k[None, :]
        o_own = o_row * N + i_n
        o_square = o_own[:, None] * CHUNK + o_c[None, :]
        o_values = o_own[:, None] * H_V + o_v[None, :]
        m_rows, m_values = m_t[:, None] & m_k[None, :], m_t[:, None] & m_v[None, :]
        b_decay = tl.load(decay_p + o_own, mask=m_t, other=0.0)
        b_last = tl.load(decay_p + (i_b * S + tl.minimum(start + CHUNK, S) - 1) * N + i_n)
        b_low, b_before = b_state.to(dtype), tl.exp(b_decay)[:, None]
        b_k = tl.load(k_p + o_key, mask=m_rows, other=0.0)
        b_v = tl.load(v_p + o_values, mask=m_values, other=0.0).to(tl.float32)
        b_v -= tl.dot(b_k, b_low, input_precision="ieee") * b_before
        b_solved = tl.load(solved_p + o_square, mask=m_t[:, None], other=0.0)
        b_u = tl.dot(b_solved, b_v.to(dtype), input_precision="ieee")
        b_q = tl.load(q_p + o_key, mask=m_rows, other=0.0)
        b_out = tl.dot(b_q, b_low, input_precision="ieee") * (b_before * scale)
        b_scores = tl.load(scores_p + o_square, mask=m_t[:, None], other=0.0)
        b_out += tl.dot(b_scores, b_u.to(dtype), input_precision="ieee")
        tl.store(out_p + o_values, b_out.to(dtype), mask=m_values)
        b_left = (b_u * tl.exp(b_last - b_decay)[:, None]).to(dtype)
        b_state = b_state * tl.exp(b_last) + tl.dot(tl.trans(b_k), b_left, input_precision="ieee")
    tl.store(p_state, b_state, mask=m_state & (tl.load(counts_p + i_b) > 0))


def chunk_inputs(
    qkv: Tensor,
    ba: Tensor,
    weight: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    memory: DeltaMemory,
    slots: Tensor,
    starts: Tensor,
    counts: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Prepares `chunk_rule` for the rows of a prompt's chunk, which move the memory's window. See `delta_chunk`.

    Returns:
        q, k [B, S, G, H_k], of length 1, and v [B, S, N, H_v], in qkv's dtype; fp32 [2, B, S, N]: the logarithm of
        a row's decay factor, and beta. Padding is zero.
    """
    batch, (channels, taps) = len(slots), weight.shape
    heads, width_k, width_v = memory.state.shape[1:]
    groups, rows = (channels - heads * width_v) // (2 * width_k), len(qkv) // batch
    q, k = (qkv.new_empty(batch, rows, groups, width_k) for _ in range(2))
    v = qkv.new_empty(batch, rows, heads, width_v)
    gates = torch.empty(2, batch, rows, heads, dtype=torch.float32, device=qkv.device)
    _chunk_inputs_kernel[(-(-rows // ROWS), 2 * groups + heads + 1, batch)](
        qkv, ba, weight, a_log, dt_bias, memory.window, slots, starts, counts, q, k, v, gates, rows, channels, heads,
        groups, width_k, width_v, qkv.stride(0), ba.stride(1), ba.stride(0), gates.stride(0),
        PARTS=len(ba), TAPS=taps, ROWS=ROWS,
        BLOCK=next_power_of_two(max(width_k, width_v)), HEADS=next_power_of_two(heads), **pdl(qkv),
    )  # fmt: skip
    return q, k, v, gates


def chunk_rule(
    q: Tensor, k: Tensor, v: Tensor, gates: Tensor, state: Tensor, slots: Tensor, starts: Tensor, counts: Tensor
) -> Tensor:
    """Returns the outputs [M, N H_v] of the rows that `chunk_inputs` has prepared, and updates `state`."""
    batch, rows, groups, width_k = q.shape
    heads, width_v = v.shape[2:]
    solved, scores = (v.new_empty(batch, rows, heads, CHUNK.value) for _ in range(2))
    out, decay = torch.empty_like(v), torch.empty_like(gates[0])
    scale, block_k, hopper = width_k**-0.5, padded(width_k), features_of(q.device).hopper
    _chunk_solve_kernel[(heads, -(-rows // CHUNK.value), batch)](
        q, k, gates, solved, scores, decay, rows, heads, groups, width_k, gates.stride(0), scale,
        BLOCK_K=block_k, num_warps=4 if hopper else 8, **pdl(q),
    )  # fmt: skip
    columns = min(COLUMNS if hopper else FEWER_COLUMNS, padded(width_v))
    _chunk_rule_kernel[(-(-width_v // columns), heads, batch)](
        q, k, v, solved, scores, decay, state, out, slots, starts, counts, rows, heads, groups, width_k, width_v, scale,
        BLOCK_K=block_k, BLOCK_V=columns, num_warps=4 if hopper else 8, num_stages=3 if hopper else 2, **pdl(q),
    )  # fmt: skip
    return out.flatten(0, 1).flatten(1)


def delta_chunk(
    qkv: Tensor,
    ba: Tensor,
    weight: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    memory: DeltaMemory,
    slots: Tensor,
    starts: Tensor,
    counts: Tensor,
) -> Tensor:
    """Returns the outputs [M, N H_v] of committed rows and updates the memory; see the reference."""
    parts = chunk_inputs(qkv, ba, weight, a_log, dt_bias, memory, slots, starts, counts)
    return chunk_rule(*parts, memory.state, slots, starts, counts)
