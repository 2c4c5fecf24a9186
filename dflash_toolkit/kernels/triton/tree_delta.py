"""Gated delta nets over the rows of draft trees, in Triton.

A row goes through the instructions of `delta_row.py` after the rows of its path, so it has the bits of the same token
in a plain step. States of nodes are not stored: a program starts from the state before the anchor and computes the path
to a leaf. Rows that several paths share are computed once for each, with the same bits.
"""

# mypy: disable-error-code="no-untyped-def"
import torch
import triton
import triton.language as tl
from torch import Tensor

from ..delta import DeltaMemory, TreeInputs
from ..launch import next_power_of_two, pdl
from ..tree import TreeRows
from .delta import COLUMNS, activated, gates_of
from .delta_row import delta_row, key_parts, load_parts, load_state, output_of, updated
from .pdl import start_next, wait_for_previous

CHANNELS = 64  # channels of a program of the convolution
ROWS = 16  # rows of it
KEPT = 1024  # channels of a program that keeps the rows of a path
PROGRAMS = 4096  # programs of the delta rule that fill a device; a program of fewer takes more leaves


@triton.jit(do_not_specialize=["M", "stride_paths", "P"])
def _tree_inputs_kernel(
    qkv_p, ba_p, w_p, a_log_p, dt_p, window_p, slots_p, starts_p, requests_p, depths_p, paths_p,
    mixed_p, kept_p, gates_p, M, C, N, stride_qkv, stride_ba, stride_part, blocks, stride_paths, P,
    PARTS: tl.constexpr, TAPS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    i_m, i_c = tl.program_id(0), tl.program_id(1)
    o_m = i_m * ROWS + tl.arange(0, ROWS)
    wait_for_previous(PDL)
    start_next(PDL)
    b_request = tl.load(requests_p + o_m, mask=o_m < M, other=-1)
    m_row = b_request >= 0
    if i_c < blocks:
        o_c = i_c * BLOCK + tl.arange(0, BLOCK)
        m_c = (o_c < C)[None, :]
        o_b = tl.maximum(b_request, 0)
        b_first = tl.load(starts_p + o_b)
        b_depth = tl.load(depths_p + o_m, mask=m_row, other=0)
        p_path = paths_p + o_b.to(tl.int64) * stride_paths + (o_m - b_first) * P
        o_window = tl.load(slots_p + o_b).to(tl.int64) * (TAPS - 1) + TAPS - 1
        b_acc = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
        for tap in tl.static_range(TAPS):
            b_at = b_depth - (TAPS - 1) + tap
            m_new, m_old = m_row & (b_at >= 0), m_row & (b_at < 0)
            b_row = (b_first + tl.load(p_path + b_at, mask=m_new, other=0)).to(tl.int64)
            p_new = qkv_p + b_row[:, None] * stride_qkv + o_c[None, :]
            p_old = window_p + (o_window + b_at)[:, None] * C + o_c[None, :]
            b_new = tl.load(p_new, mask=m_new[:, None] & m_c, other=0.0)
            b_x = tl.where(m_new[:, None], b_new, tl.load(p_old, mask=m_old[:, None] & m_c, other=0.0))
            b_acc += (
                b_x.to(tl.float32) * tl.load(w_p + o_c * TAPS + tap, mask=o_c < C, other=0.0).to(tl.float32)[None, :]
            )
        p_out = mixed_p + o_m.to(tl.int64)[:, None] * C + o_c[None, :]
        tl.store(p_out, activated(b_acc, mixed_p.dtype.element_ty), mask=m_row[:, None] & m_c)
        p_kept = kept_p + o_m.to(tl.int64)[:, None] * C + o_c[None, :]
        tl.store(p_kept, b_x, mask=m_row[:, None] & m_c)  # of the last tap: the row's own input
    else:
        o_n = tl.arange(0, HEADS)
        mask = m_row[:, None] & (o_n < N)[None, :]
        p_ba = ba_p + o_m[:, None] * stride_ba + o_n[None, :]
        b_decay, b_beta = gates_of(p_ba, mask, a_log_p, dt_p, o_n, N, stride_part, PARTS, mixed_p.dtype.element_ty)
        p_gates = gates_p + o_m[:, None] * 2 * N + o_n[None, :]
        tl.store(p_gates, b_decay, mask=mask)
        tl.store(p_gates + N, b_beta, mask=mask)


@triton.jit(do_not_specialize=["M", "stride_paths", "P", "programs"])
def _tree_rule_kernel(
    mixed_p, gates_p, state_p, slots_p, starts_p, parents_p, depths_p, paths_p, out_p,
    M, C, N, G, scale, stride_paths, P, programs,
    H_K: tl.constexpr, H_V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, PLACES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Computes a part of a head for every `programs`-th leaf of a request. Rows after all trees get zeros."""
    i_v, i_n, i_x = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i_b, i_p = i_x // programs, i_x % programs
    o_parts, o_v = key_parts(BLOCK_K), i_v * BLOCK_V + tl.arange(0, BLOCK_V)
    m_v = o_v < H_V
    slot = tl.load(slots_p + i_b).to(tl.int64)  # older than the pass, see `pdl`
    p_state = state_p + (slot * N + i_n) * H_K * H_V
    p_q, p_v = mixed_p + i_n // (N // G) * H_K, mixed_p + 2 * G * H_K + i_n * H_V
    p_k = p_q + G * H_K
    gates_p += i_n
    out_p += i_n * H_V
    wait_for_previous(PDL)
    start_next(PDL)
    first = tl.load(starts_p + i_b)
    count = tl.load(starts_p + i_b + 1) - first
    o_r = tl.arange(0, PLACES)
    m_r = o_r < count
    b_parent = tl.load(parents_p + first + o_r, mask=m_r, other=0) - first
    m_child = (b_parent[None, :] == o_r[:, None]) & m_r[None, :] & (o_r > 0)[None, :]  # an anchor is its own parent
    m_leaf = m_r & (tl.max(m_child.to(tl.int32), axis=1) == 0)
    m_leaf &= (tl.cumsum(m_leaf.to(tl.int32), axis=0) - 1) % programs == i_p
    leaf = tl.min(tl.where(m_leaf, o_r, PLACES), axis=0)
    while leaf < PLACES:
        depth = tl.load(depths_p + first + leaf)
        p_path = paths_p + i_b.to(tl.int64) * stride_paths + leaf * P
        b_state = load_state(p_state + o_v[None, :], o_parts, m_v[None, :], H_K, H_V, "")
        row = first  # the anchor's
        b_q = load_parts(p_q + row * C, o_parts, depth >= 0, H_K)
        b_k, b_v, decay, beta = delta_row(p_k, p_v, gates_p, row, depth >= 0, o_parts, o_v, C, N, H_K, H_V)
        for at in range(1, depth + 2):
            following = first + tl.load(p_path + at, mask=at <= depth, other=0)
            n_q = load_parts(p_q + following * C, o_parts, at <= depth, H_K)
            n_k, n_v, n_decay, n_beta = delta_row(
                p_k, p_v, gates_p, following, at <= depth, o_parts, o_v, C, N, H_K, H_V
            )
            b_state = updated(b_state, b_k, b_v, decay, beta)
            b_out = output_of(b_state, b_q, scale).to(out_p.dtype.element_ty)
            tl.store(out_p + row * N * H_V + o_v, b_out, mask=m_v)
            row, b_q, b_k, b_v, decay, beta = following, n_q, n_k, n_v, n_decay, n_beta
        leaf = tl.min(tl.where(m_leaf & (o_r > leaf), o_r, PLACES), axis=0)
    b_none = tl.zeros([BLOCK_V], dtype=out_p.dtype.element_ty)
    for row in range(tl.load(starts_p + tl.num_programs(2) // programs) + i_x, M, tl.num_programs(2)):
        tl.store(out_p + row * N * H_V + o_v, b_none, mask=m_v)


@triton.jit(do_not_specialize=["M", "P", "batch", "memories"])
def _keep_path_kernel(
    inputs_p, gates_p, kept_inputs_p, kept_gates_p, slots_p, path_p, counts_p,
    M, P, MOST, C, N, batch, memories, blocks,
    P_BLOCK: tl.constexpr, BLOCK: tl.constexpr, GATES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Each layer has M rows, `batch` requests and `memories` slots."""
    i_l, i_b, i_c = tl.program_id(0) // batch, tl.program_id(0) % batch, tl.program_id(1)
    o_p = tl.arange(0, P_BLOCK)
    wait_for_previous(PDL)
    start_next(PDL)
    m_p = (o_p < tl.load(counts_p + i_b))[:, None]
    b_row = (i_l.to(tl.int64) * M + tl.load(path_p + i_b * P + o_p, mask=o_p < P, other=0))[:, None]
    o_kept = ((tl.load(slots_p + i_b).to(tl.int64) + i_l * memories) * MOST + o_p)[:, None]
    if i_c < blocks:
        o_c = (i_c * BLOCK + tl.arange(0, BLOCK))[None, :]
        m_c = m_p & (o_c < C)
        tl.store(kept_inputs_p + o_kept * C + o_c, tl.load(inputs_p + b_row * C + o_c, mask=m_c), mask=m_c)
    else:
        o_n = tl.arange(0, GATES)[None, :]
        m_n = m_p & (o_n < 2 * N)
        tl.store(kept_gates_p + o_kept * 2 * N + o_n, tl.load(gates_p + b_row * 2 * N + o_n, mask=m_n), mask=m_n)


def tree_delta_inputs(
    qkv: Tensor,
    ba: Tensor,
    weight: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    memory: DeltaMemory,
    slots: Tensor,
    tree: TreeRows,
    paths: Tensor,
    kept: TreeInputs,
) -> Tensor:
    """Returns mixed rows [M, C] of trees, and keeps their inputs and gates; see the reference."""
    (channels, taps), heads, m = weight.shape, len(a_log), len(qkv)
    mixed = torch.empty(m, channels, dtype=qkv.dtype, device=qkv.device)
    blocks = -(-channels // CHANNELS)
    _tree_inputs_kernel[(-(-m // ROWS), blocks + 1)](
        qkv, ba, weight, a_log, dt_bias, memory.window, slots, tree.starts, tree.requests, tree.depths, paths, mixed,
        kept.inputs, kept.gates, m, channels, heads, qkv.stride(0), ba.stride(1), ba.stride(0), blocks,
        paths.stride(0), paths.stride(1), PARTS=len(ba), TAPS=taps, ROWS=ROWS,
        BLOCK=CHANNELS, HEADS=next_power_of_two(heads), **pdl(qkv),
    )  # fmt: skip
    return mixed


def tree_delta_rule(
    mixed: Tensor, gates: Tensor, memory: DeltaMemory, slots: Tensor, tree: TreeRows, paths: Tensor
) -> Tensor:
    """Returns the outputs [M, N H_v] of rows of trees; see the reference."""
    (m, channels), (heads, width_k, width_v), batch = mixed.shape, memory.state.shape[1:], len(slots)
    groups = (channels - heads * width_v) // (2 * width_k)
    out = torch.empty(m, heads * width_v, dtype=mixed.dtype, device=mixed.device)
    columns = min(COLUMNS, next_power_of_two(width_v))
    parts, places = -(-width_v // columns), min(paths.shape[1], m - batch + 1)
    programs = max(1, min(places, PROGRAMS // (parts * heads * batch)))
    _tree_rule_kernel[(parts, heads, batch * programs)](
        mixed, gates, memory.state, slots, tree.starts, tree.parents, tree.depths, paths, out, m, channels, heads,
        groups, width_k**-0.5, paths.stride(0), paths.stride(1), programs, H_K=width_k, H_V=width_v,
        BLOCK_K=max(4, next_power_of_two(width_k)), BLOCK_V=columns, PLACES=next_power_of_two(places), num_warps=1,
        enable_fp_fusion=False, **pdl(mixed),
    )  # fmt: skip
    return out


def keep_path_(memory: DeltaMemory, kept: TreeInputs, slots: Tensor, path: Tensor, counts: Tensor) -> None:
    """Stores the accepted rows' inputs and gates as those of the last block, in all layers; see the reference."""
    (layers, m, channels), heads, (batch, depth) = kept.inputs.shape, kept.gates.shape[3], path.shape
    blocks = -(-channels // KEPT)
    _keep_path_kernel[(layers * batch, blocks + 1)](
        kept.inputs, kept.gates, memory.inputs, memory.gates, slots, path, counts, m, depth, memory.rows, channels,
        heads, batch, len(memory.inputs) // layers, blocks, P_BLOCK=next_power_of_two(depth), BLOCK=KEPT,
        GATES=next_power_of_two(2 * heads), **pdl(path),
    )  # fmt: skip
