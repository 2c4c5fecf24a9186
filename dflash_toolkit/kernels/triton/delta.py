"""Gated delta nets of a decoding step, in Triton: committed rows of the last block are replayed before the new ones.

Old and new rows go through the same instructions, so a state has the same bits as with one row at a time. A program of
the short convolution owns its channels of the memory, so programs never read each other's writes. It passes on the
replayed rows, and the delta rule reads only the state, of which each program owns a part.
"""

# mypy: disable-error-code="no-untyped-def"
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from ..delta import DeltaMemory
from ..features import features_of
from ..formats import BLOCK, FP8_MAX, LEAST, Operand, QuantizedRows
from ..launch import next_power_of_two, pdl
from ..tree import TreeRows
from .delta_row import delta_row, key_parts, load_parts, load_state, output_of, store_state, updated
from .fp8_blocks import empty_rows, quantize
from .pdl import start_next, wait_for_previous

CHANNELS = 128  # channels of a program of the convolution
COLUMNS = 16  # columns of a head's values in a program of the delta rule: one warp, which needs no barriers
REGISTERS = 128  # of a thread of the delta rule on Hopper, so that 16 programs fit on a multiprocessor


@triton.jit
def _softplus(x):
    """Returns log(1 + exp(x)), accurate even if 1 + exp(x) is rounded."""
    b_e = tl.exp(tl.minimum(x, 20.0))
    b_u = 1.0 + b_e
    b_small = b_u == 1.0
    b_log = tl.where(b_small, b_e, tl.log(b_u) * (b_e / tl.where(b_small, 1.0, b_u - 1.0)))
    return tl.where(x > 20.0, x, b_log)


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def gate_sums(p_ba, mask, N, stride_part, PARTS: tl.constexpr, FORMAT: tl.constexpr):
    """Adds up the partial sums of beta and of the decay, rounded to a format."""
    b_b = tl.load(p_ba, mask=mask, other=0.0).to(tl.float32)
    b_a = tl.load(p_ba + N, mask=mask, other=0.0).to(tl.float32)
    for _ in tl.static_range(PARTS - 1):  # in order, so that the result does not depend on scheduling
        p_ba += stride_part
        b_b += tl.load(p_ba, mask=mask, other=0.0).to(tl.float32)
        b_a += tl.load(p_ba + N, mask=mask, other=0.0).to(tl.float32)
    return b_b.to(FORMAT).to(tl.float32), b_a.to(FORMAT).to(tl.float32)


@triton.jit
def gates_of(p_ba, mask, a_log_p, dt_p, o_n, N, stride_part, PARTS: tl.constexpr, FORMAT: tl.constexpr):
    """Returns decay factors and beta of rows, fp32 [rows, heads]."""
    b_b, b_a = gate_sums(p_ba, mask, N, stride_part, PARTS, FORMAT)
    b_rate = tl.exp(tl.load(a_log_p + o_n, mask=o_n < N, other=0.0).to(tl.float32))
    b_dt = tl.load(dt_p + o_n, mask=o_n < N, other=0.0).to(tl.float32)
    return tl.exp(-b_rate[None, :] * _softplus(b_a + b_dt[None, :])), _sigmoid(b_b).to(FORMAT).to(tl.float32)


@triton.jit
def activated(b_acc, FORMAT: tl.constexpr):
    """Returns the activation of a convolution. Its sums are rounded to a format first."""
    b_y = b_acc.to(FORMAT).to(tl.float32)
    return (b_y * _sigmoid(b_y)).to(FORMAT)


@triton.jit(do_not_specialize=["S", "batch", "windows", "memories"])
def _delta_inputs_kernel(
    qkv_p, ba_p, w_p, a_log_p, dt_p, window_p, inputs_p, gates_p, slots_p, stay_p, counts_p, starts_p,
    mixed_p, out_gates_p, S, MOST, C, N, stride_qkv, stride_ba, stride_part, blocks, batch, windows, memories,
    PARTS: tl.constexpr, TAPS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr,
    CHAINS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Each layer has `batch` requests, and so many slots of windows and of inputs of blocks."""
    i_l, i_r = tl.program_id(0) // batch, tl.program_id(0) % batch
    i_b, i_c = tl.program_id(0).to(tl.int64), tl.program_id(1)
    o_r = tl.arange(0, ROWS)
    slot = tl.load(slots_p + i_r).to(tl.int64)  # older than the pass, see `pdl`
    window, slot = slot + i_l * windows, slot + i_l * memories
    stay, count = tl.load(stay_p + i_r), tl.load(counts_p + i_r)
    first = tl.load(starts_p + i_b).to(tl.int64) if CHAINS else i_b * S
    w_p += i_l * C * TAPS
    wait_for_previous(PDL)
    start_next(PDL)
    o_out = i_b * (MOST + S) + o_r
    m_old, m_new, m_all = o_r < stay, o_r < count, o_r < stay + count
    if i_c < blocks:
        o_c = i_c * BLOCK + tl.arange(0, BLOCK)
        m_c = (o_c < C)[None, :]
        p_qkv = qkv_p + first * stride_qkv + o_c[None, :]
        p_window = window_p + window * (TAPS - 1) * C + o_c[None, :]
        p_inputs = inputs_p + slot * MOST * C + o_c[None, :]
        b_acc = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
        for tap in tl.static_range(TAPS):
            b_x = _input(
                p_qkv, p_window, p_inputs, o_r - (TAPS - 1) + tap, stay, stay + count, C, stride_qkv, m_c, TAPS
            )
            b_acc += (
                b_x.to(tl.float32) * tl.load(w_p + o_c * TAPS + tap, mask=o_c < C, other=0.0).to(tl.float32)[None, :]
            )
        p_out = mixed_p + o_out[:, None] * C + o_c[None, :]
        tl.store(p_out, activated(b_acc, mixed_p.dtype.element_ty), mask=m_all[:, None] & m_c)
        o_w = tl.arange(0, ROWS)  # more rows than in the window
        b_window = _input(p_qkv, p_window, p_inputs, stay - (TAPS - 1) + o_w, stay, stay, C, stride_qkv, m_c, TAPS)
        b_new = tl.load(p_qkv + o_r.to(tl.int64)[:, None] * stride_qkv, mask=m_new[:, None] & m_c, other=0.0)
        tl.debug_barrier()  # before overwriting values that other threads read
        tl.store(p_window + o_w[:, None] * C, b_window, mask=(o_w < TAPS - 1)[:, None] & m_c)
        tl.store(p_inputs + o_r[:, None] * C, b_new, mask=m_new[:, None] & m_c)
    else:
        o_n = tl.arange(0, HEADS)
        m_n = (o_n < N)[None, :]
        p_ba = ba_p + (first + o_r)[:, None] * stride_ba + o_n[None, :]
        b_decay, b_beta = gates_of(
            p_ba, m_new[:, None] & m_n, a_log_p, dt_p, o_n, N, stride_part, PARTS, mixed_p.dtype.element_ty
        )
        p_kept = gates_p + (slot * MOST + o_r)[:, None] * 2 * N + o_n[None, :]
        b_old_decay = tl.load(p_kept, mask=m_old[:, None] & m_n, other=0.0)
        b_old_beta = tl.load(p_kept + N, mask=m_old[:, None] & m_n, other=0.0)
        p_gates = out_gates_p + o_out[:, None] * 2 * N + o_n[None, :]
        tl.store(p_gates, b_old_decay, mask=m_old[:, None] & m_n)
        tl.store(p_gates + N, b_old_beta, mask=m_old[:, None] & m_n)
        tl.store(p_gates + stay * 2 * N, b_decay, mask=m_new[:, None] & m_n)
        tl.store(p_gates + stay * 2 * N + N, b_beta, mask=m_new[:, None] & m_n)
        tl.debug_barrier()
        tl.store(p_kept, b_decay, mask=m_new[:, None] & m_n)
        tl.store(p_kept + N, b_beta, mask=m_new[:, None] & m_n)


@triton.jit
def _input(qkv_p, window_p, inputs_p, o_at, stay, end, C, stride_qkv, m_c, TAPS: tl.constexpr):
    """Loads inputs at places o_at: below 0 from the window, below `stay` from the last block, then new ones."""
    o_at = o_at.to(tl.int64)[:, None]
    before, old = o_at < 0, (o_at >= 0) & (o_at < stay)
    b_x = tl.load(window_p + (o_at + TAPS - 1) * C, mask=before & (o_at > -TAPS) & m_c, other=0.0)
    b_old = tl.load(inputs_p + o_at * C, mask=old & m_c, other=0.0)
    b_new = tl.load(qkv_p + (o_at - stay) * stride_qkv, mask=(o_at >= stay) & (o_at < end) & m_c, other=0.0)
    return tl.where(before, b_x, tl.where(old, b_old, b_new))


@triton.jit(do_not_specialize=["S", "M", "batch", "states"])
def _delta_rule_kernel(
    mixed_p, gates_p, state_p, slots_p, stay_p, counts_p, starts_p, out_p, S, M, MOST, C, N, G, scale, batch, states,
    H_K: tl.constexpr, H_V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, CHUNK: tl.constexpr,
    CHAINS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Computes the delta rule of one request and a part of a head.

    CHUNK: all rows are committed, and stay_p has the number of rows of earlier chunks. CHAINS: a request's rows begin
    at starts_p, not at every S. The parts of a head are adjacent in the grid, so they read whole rows of its state.
    Each layer has `batch` requests and `states` slots.
    """
    i_l, i_r = tl.program_id(2) // batch, tl.program_id(2) % batch
    i_v, i_n, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    o_parts, o_v = key_parts(BLOCK_K), i_v * BLOCK_V + tl.arange(0, BLOCK_V)
    m_v = o_v < H_V
    slot = tl.load(slots_p + i_r).to(tl.int64) + i_l * states  # these and the state are older than the pass, see `pdl`
    stay, count = tl.load(stay_p + i_r), tl.load(counts_p + i_r)
    p_state = state_p + (slot * N + i_n) * H_K * H_V
    mixed_p += i_b * (MOST + S) * C
    gates_p += i_b * (MOST + S) * 2 * N + i_n
    first = tl.load(starts_p + i_b).to(tl.int64) if CHAINS else i_b * S
    out_p += i_n * H_V
    p_out = out_p + first * N * H_V
    i_g = i_n // (N // G)
    known = stay + count > 0
    if CHUNK:
        known &= stay > 0
        stay *= 0
    end = stay + count
    p_q, p_k, p_v = mixed_p + i_g * H_K, mixed_p + (G + i_g) * H_K, mixed_p + 2 * G * H_K + i_n * H_V
    b_state = load_state(p_state + o_v[None, :], o_parts, m_v[None, :] & known, H_K, H_V, "evict_first")
    wait_for_previous(PDL)
    start_next(PDL)
    b_k, b_v, decay, beta = delta_row(p_k, p_v, gates_p, 0, end > 0, o_parts, o_v, C, N, H_K, H_V)  # one row ahead
    b_q = load_parts(p_q + stay * C, o_parts, count > 0, H_K)
    for row in range(stay):
        n_k, n_v, n_decay, n_beta = delta_row(p_k, p_v, gates_p, row + 1, row + 1 < end, o_parts, o_v, C, N, H_K, H_V)
        b_state = updated(b_state, b_k, b_v, decay, beta)
        b_k, b_v, decay, beta = n_k, n_v, n_decay, n_beta
    if stay > 0:
        store_state(p_state + o_v[None, :], b_state, o_parts, m_v[None, :], H_K, H_V)
    for row in range(stay, end):
        n_k, n_v, n_decay, n_beta = delta_row(p_k, p_v, gates_p, row + 1, row + 1 < end, o_parts, o_v, C, N, H_K, H_V)
        n_q = load_parts(p_q + (row + 1) * C, o_parts, row + 1 < end, H_K)
        b_state = updated(b_state, b_k, b_v, decay, beta)
        b_out = output_of(b_state, b_q, scale).to(out_p.dtype.element_ty)
        tl.store(p_out + (row - stay) * N * H_V + o_v, b_out, mask=m_v)
        b_q, b_k, b_v, decay, beta = n_q, n_k, n_v, n_decay, n_beta
    if CHUNK:
        store_state(p_state + o_v[None, :], b_state, o_parts, m_v[None, :] & (end > 0), H_K, H_V)
    b_none = tl.zeros([BLOCK_V], dtype=out_p.dtype.element_ty)
    if CHAINS:  # the programs share the rows after all chains
        for row in range(tl.load(starts_p + tl.num_programs(2)) + i_b, M, tl.num_programs(2)):
            tl.store(out_p + row * N * H_V + o_v, b_none, mask=m_v)
    else:
        for row in range(count, S):
            tl.store(p_out + row * N * H_V + o_v, b_none, mask=m_v)


@triton.jit(do_not_specialize=["M", "SCALE_M", "SCALE_N"])
def _gated_rms_norm_kernel(
    x_p, gate_p, w_p, out_p, data_p, scale_p, M, N, H, stride_gate, SCALE_M, SCALE_N, eps,
    HEADS: tl.constexpr, BLOCK: tl.constexpr, QUANTIZE: tl.constexpr, FP8_MAX: tl.constexpr, LEAST: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    i_m = tl.program_id(0).to(tl.int64)
    o_n, o_h = tl.program_id(1) * HEADS + tl.arange(0, HEADS), tl.arange(0, BLOCK)
    o_x = o_n[:, None] * H + o_h[None, :]
    mask = (o_n < N)[:, None] & (o_h < H)[None, :]
    b_w = tl.load(w_p + o_h, mask=o_h < H, other=0.0)  # weights do not depend on other kernels
    wait_for_previous(PDL)
    b_x = tl.load(x_p + i_m * N * H + o_x, mask=mask, other=0.0)
    b_gate = tl.load(gate_p + i_m * stride_gate + o_x, mask=mask, other=0.0).to(tl.float32)
    start_next(PDL)
    b_wide = b_x.to(tl.float32)
    b_scale = tl.rsqrt(tl.sum(b_wide * b_wide, axis=1) / H + eps)
    b_y = ((b_wide * b_scale[:, None]).to(b_x.dtype) * b_w[None, :]).to(b_x.dtype).to(tl.float32)
    b_out = (b_y * b_gate * _sigmoid(b_gate)).to(b_x.dtype)
    tl.store(out_p + i_m * N * H + o_x, b_out, mask=mask)
    if QUANTIZE:  # a head is a group
        b_q, b_scale = quantize(b_out, 1, data_p.dtype.element_ty, FP8_MAX, LEAST)
        tl.store(data_p + i_m * N * H + o_x, b_q, mask=mask)
        tl.store(scale_p + i_m * SCALE_M + o_n * SCALE_N, b_scale, mask=o_n < N)


def delta_inputs(
    qkv: Tensor,
    ba: Tensor,
    weight: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    memory: DeltaMemory,
    slots: Tensor,
    stay: Tensor,
    counts: Tensor,
    chains: TreeRows | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns mixed rows [B, R, C] and gates fp32 [B, R, 2, N], committed old ones, then new; see the reference."""
    return _launch_inputs(qkv, ba, weight, a_log, dt_bias, memory, slots, stay, counts, chains)


def fold_(memory: DeltaMemory, weights: Tensor, slots: Tensor, stay: Tensor, counts: Tensor) -> None:
    """Adds the committed rows of the last block to the states and windows of all layers; see the reference."""
    layers, heads = len(weights), memory.gates.shape[3]
    # there are no new rows, so nothing is read from these
    qkv, ba, rate = weights.new_empty(0, weights.shape[1]), weights.new_empty(1, 0, 2 * heads), weights[0, 0]
    parts = _launch_inputs(qkv, ba, weights[0], rate, rate, memory, slots, stay, counts, layers=layers)
    _launch_rule(*parts, memory.state, memory.rows, slots, stay, counts, layers=layers)


def _launch_inputs(
    qkv: Tensor,
    ba: Tensor,
    weight: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    memory: DeltaMemory,
    slots: Tensor,
    stay: Tensor,
    counts: Tensor,
    chains: TreeRows | None = None,
    *,
    layers: int = 1,
) -> tuple[Tensor, Tensor]:
    batch, (channels, taps), heads, most = len(slots), weight.shape, memory.gates.shape[3], memory.rows
    block, every = len(qkv) // batch if chains is None else most, layers * batch
    mixed = torch.empty(every, most + block, channels, dtype=qkv.dtype, device=qkv.device)
    gates = torch.empty(every, most + block, 2, heads, dtype=torch.float32, device=qkv.device)
    blocks = -(-channels // CHANNELS)
    _delta_inputs_kernel[(every, blocks + 1)](
        qkv, ba, weight, a_log, dt_bias, memory.window, memory.inputs, memory.gates, slots, stay, counts,
        slots if chains is None else chains.starts, mixed, gates, block, most, channels, heads, qkv.stride(0),
        ba.stride(1), ba.stride(0), blocks, batch, len(memory.window) // layers, len(memory.inputs) // layers,
        PARTS=len(ba), TAPS=taps,
        ROWS=next_power_of_two(max(most + block, taps - 1)), BLOCK=CHANNELS,
        HEADS=next_power_of_two(heads), CHAINS=chains is not None, **pdl(qkv),
    )  # fmt: skip
    return mixed, gates


def delta_rule(
    mixed: Tensor,
    gates: Tensor,
    memory: DeltaMemory,
    slots: Tensor,
    stay: Tensor,
    counts: Tensor,
    chains: TreeRows | None = None,
) -> Tensor:
    """Returns the outputs [M, N H_v] of a block's rows; advances the state to its beginning. See the reference."""
    return _launch_rule(mixed, gates, memory.state, memory.rows, slots, stay, counts, chains)


def _launch_rule(
    mixed: Tensor,
    gates: Tensor,
    state: Tensor,
    most: int,
    slots: Tensor,
    stay: Tensor,
    counts: Tensor,
    chains: TreeRows | None = None,
    *,
    chunk: bool = False,
    layers: int = 1,
) -> Tensor:
    batch, rows, channels = mixed.shape
    heads, width_k, width_v = state.shape[1:]
    groups, block = (channels - heads * width_v) // (2 * width_k), rows - most
    m = batch * block if chains is None else len(chains.requests)
    out = torch.empty(m, heads * width_v, dtype=mixed.dtype, device=mixed.device)
    columns = min(COLUMNS, next_power_of_two(width_v))
    registers = {"maxnreg": REGISTERS} if features_of(mixed.device).hopper and not chunk else {}
    _delta_rule_kernel[(-(-width_v // columns), heads, batch)](
        mixed, gates, state, slots, stay, counts, slots if chains is None else chains.starts, out, block, m, most,
        channels, heads, groups, width_k**-0.5, batch // layers, len(state) // layers, H_K=width_k, H_V=width_v,
        BLOCK_K=max(4, next_power_of_two(width_k)), BLOCK_V=columns, CHUNK=chunk, CHAINS=chains is not None,
        num_warps=2 if chunk else 1, enable_fp_fusion=False, **registers, **pdl(mixed),
    )  # fmt: skip
    return out


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
    batch, taps, at = len(slots), weight.shape[1], slots.long()
    known = (starts > 0)[:, None, None]
    window = torch.where(known, memory.window[at], 0.0)
    sequence = torch.cat([window, qkv.unflatten(0, (batch, -1))], dim=1)  # [B, T - 1 + S, C]
    rows = sequence.shape[1] - taps + 1
    total = sequence[:, :rows].float() * weight[:, 0].float()
    for tap in range(1, taps):
        total += sequence[:, tap : tap + rows].float() * weight[:, tap].float()
    mixed = F.silu(total.to(qkv.dtype))
    b, a = ba.float().sum(0).to(qkv.dtype).float().chunk(2, dim=1)
    decay = (-a_log.float().exp() * F.softplus(a + dt_bias.float())).exp()
    gates = torch.stack([decay, b.sigmoid().to(qkv.dtype).float()], dim=1).unflatten(0, (batch, -1))
    last = counts.long()[:, None] + torch.arange(taps - 1, device=qkv.device)
    memory.window.index_copy_(0, at, sequence.gather(1, last[..., None].expand(-1, -1, sequence.shape[2])))
    return _launch_rule(mixed, gates, memory.state, 0, slots, starts, counts, chunk=True)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Returns the RMSNorm of every head of x [M, N H] by weight [H], times silu(gate [M, N H]); gate may be columns."""
    return _launch_gated(x, gate, weight, eps, None)


def gated_rms_norm_quantized(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Operand:
    """Computes `gated_rms_norm`; also quantizes rows of heads as wide as a group, for the next GEMM."""
    if len(weight) != BLOCK:
        return _launch_gated(x, gate, weight, eps, None)
    m, k = x.shape
    quantized = empty_rows(m, k, x.device)
    return QuantizedRows(_launch_gated(x, gate, weight, eps, quantized), *quantized)


def _launch_gated(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, quantized: tuple[Tensor, Tensor] | None
) -> Tensor:
    (m, n), width = x.shape, len(weight)
    out, heads, block = torch.empty_like(x), n // width, next_power_of_two(width)
    tile = max(1, min(1024 // block, next_power_of_two(heads)))
    _gated_rms_norm_kernel[(m, -(-heads // tile))](
        x, gate, weight, out, *(quantized or (x, x)), m, heads, width, gate.stride(0),
        *(quantized or (x, x))[1].stride(), eps,
        HEADS=tile, BLOCK=block, QUANTIZE=quantized is not None, FP8_MAX=FP8_MAX, LEAST=LEAST, **pdl(x),
    )  # fmt: skip
    return out
