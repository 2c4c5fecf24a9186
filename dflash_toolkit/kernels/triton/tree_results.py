"""The results of a step over draft trees, in Triton: expected acceptance, and one row of integers for the host."""

# mypy: disable-error-code="no-untyped-def"
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import next_power_of_two, pdl
from ..tree import MOST_NODES, TreeRows, Trees
from .pdl import start_next, wait_for_previous

SLOTS = tl.constexpr(64)  # slots of a block, more than the depth of trees
MOST_SUMMED = 512  # maximum nodes of a warp
COPIED = tl.constexpr(256)  # values that a program copies at once


@triton.jit(do_not_specialize=["blocks", "B", "K"])
def _expected_accepted_kernel(
    depths_p, log_probs_p, values_p, ranks_p, limits_p, out_p, blocks, B, K,
    N: tl.constexpr, W: tl.constexpr, Q: tl.constexpr, ROWS: tl.constexpr, BUCKETS: tl.constexpr,
    B_BLOCK: tl.constexpr, N_BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Computes one sum of a block: that of chains, or that of the most probable nodes for one of ROWS row counts.

    Bit S - 2 of `blocks` represents a block of S. Nodes are not sorted: a binary search finds the probability of the
    last node with a row, and equal nodes count as often as rows are left.
    """
    i_s, i_r = tl.program_id(0), tl.program_id(1)
    o_s = tl.arange(0, SLOTS)
    b_before = tl.cumsum(((blocks.to(tl.int64) >> o_s.to(tl.int64)) & 1).to(tl.int32), axis=0)
    block = 2 + tl.sum((b_before <= i_s).to(tl.int32), axis=0)
    wait_for_previous(PDL)
    start_next(PDL)
    if i_r == 0:
        o_b = tl.arange(0, B_BLOCK)
        m_b = o_b < B
        b_limit = tl.load(limits_p + o_b, mask=m_b, other=0)
        b_path, b_sum = tl.zeros([B_BLOCK], dtype=tl.float32), tl.zeros([B_BLOCK], dtype=tl.float32)
        b_rank = tl.zeros([B_BLOCK], dtype=tl.int32)
        for slot in range(tl.minimum(block - 1, K)):
            o_x = ((o_b * K + slot) * Q + b_rank) * W
            b_path += tl.load(values_p + o_x, mask=m_b, other=0.0)
            b_sum += tl.where(slot < b_limit, tl.exp(b_path), 0.0)
            if Q > 1:  # children of the best candidate of the previous slot
                b_rank = tl.load(ranks_p + o_x, mask=m_b, other=0)
        total = tl.sum(b_sum, axis=0)
    else:
        wanted = -B
        for i in tl.static_range(BUCKETS):
            wanted += tl.where(i_r == i + 1, ROWS[i], 0)
        o_x = tl.arange(0, B_BLOCK * N_BLOCK)
        i_b, i_n = o_x // N_BLOCK, o_x % N_BLOCK
        there = (i_b < B) & (i_n < N)
        b_depth = tl.load(depths_p + i_b * N + i_n, mask=there, other=0)
        there = (b_depth > 0) & (b_depth < block)
        b_log = tl.load(log_probs_p + i_b * N + i_n, mask=there, other=-float("inf"))
        b_p = tl.where(there, tl.exp(b_log), 0.0)
        b_bits = b_p.to(tl.int32, bitcast=True)  # in the order of probabilities, as none is negative
        low, high = wanted * 0, wanted * 0 + 0x3F800000  # the bits of 1
        for _ in range(30):
            middle = (low + high + 1) >> 1
            enough = tl.sum((b_bits >= middle).to(tl.int32), axis=0) >= wanted
            low, high = tl.where(enough, middle, low), tl.where(enough, high, middle - 1)
        left = wanted - tl.sum((b_bits > low).to(tl.int32), axis=0)
        total = tl.sum(tl.where(b_bits > low, b_p, 0.0), axis=0) + left * low.to(tl.float32, bitcast=True)
    tl.store(out_p + i_s * (1 + BUCKETS) + i_r, total)


@triton.jit
def _nonfinite_rows_kernel(hidden_p, nonfinite_p, D, stride, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Stores whether a row's norm is not finite, as 0 or 1."""
    i_m = tl.program_id(0).to(tl.int64)
    o_d = tl.arange(0, BLOCK)
    wait_for_previous(PDL)
    b_x = tl.load(hidden_p + i_m * stride + o_d, mask=o_d < D, other=0.0).to(tl.float32)
    start_next(PDL)
    total = tl.sum(b_x * b_x, axis=0)
    tl.store(nonfinite_p + i_m, tl.where(total < float("inf"), 0, 1))  # also 1 for NaN


@triton.jit(do_not_specialize=["B", "M", "S", "sums"])
def _pack_results_kernel(
    starts_p, row_tokens_p, parents_p, depths_p, log_probs_p, nonfinite_p, tokens_p, counts_p, path_p, expected_p,
    out_p, B, M, S, sums,
    R_BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Packs the result of one request; the last program copies the fields of the whole batch.

    Blocks do not depend on sizes: every variant would take time to compile.
    """
    i_b = tl.program_id(0)
    path_out_p = out_p + B * (3 + S)
    rest_p = path_out_p + B * S
    wait_for_previous(PDL)
    start_next(PDL)
    if i_b < B:
        start = tl.load(starts_p + i_b)
        o_r, o_s = start + tl.arange(0, R_BLOCK), tl.arange(0, SLOTS)
        m_r, m_s = o_r < tl.load(starts_p + i_b + 1), o_s < S
        b_path = tl.load(path_p + i_b * S + o_s, mask=m_s, other=0)
        b_token = tl.load(tokens_p + i_b * S + o_s, mask=m_s, other=0)
        b_nonfinite = tl.load(nonfinite_p + b_path, mask=m_s, other=0)
        answer_p = out_p + i_b * (3 + S)
        tl.store(answer_p, tl.load(counts_p + i_b).to(tl.int64))
        tl.store(answer_p + 1, tl.max(tl.load(depths_p + o_r, mask=m_r, other=0), axis=0).to(tl.int64))
        tl.store(answer_p + 2, tl.max(tl.load(nonfinite_p + o_r, mask=m_r, other=0), axis=0).to(tl.int64))
        tl.store(answer_p + 3 + o_s, tl.where(b_nonfinite > 0, -1, b_token), mask=m_s)
        tl.store(path_out_p + i_b * S + o_s, b_path, mask=m_s)
    else:
        fields_p, sums_p = rest_p + B + 1, rest_p + B + 1 + 4 * M
        for first in range(0, B + 1, COPIED):
            o_b = first + tl.arange(0, COPIED)
            b_start = tl.load(starts_p + o_b, mask=o_b <= B, other=0)
            tl.store(rest_p + o_b, b_start.to(tl.int64), mask=o_b <= B)
        for first in range(0, M, COPIED):
            o_m = first + tl.arange(0, COPIED)
            m_m = o_m < M
            b_log = tl.load(log_probs_p + o_m, mask=m_m, other=0.0)
            tl.store(fields_p + o_m, tl.load(row_tokens_p + o_m, mask=m_m, other=0), mask=m_m)
            tl.store(fields_p + M + o_m, tl.load(parents_p + o_m, mask=m_m, other=0).to(tl.int64), mask=m_m)
            tl.store(fields_p + 2 * M + o_m, tl.load(depths_p + o_m, mask=m_m, other=0).to(tl.int64), mask=m_m)
            tl.store(fields_p + 3 * M + o_m, b_log.to(tl.int32, bitcast=True).to(tl.int64), mask=m_m)
        for first in range(0, sums, COPIED):
            o_p = first + tl.arange(0, COPIED)
            b_expected = tl.load(expected_p + o_p, mask=o_p < sums, other=0.0)
            tl.store(sums_p + o_p, b_expected.to(tl.int32, bitcast=True).to(tl.int64), mask=o_p < sums)


def expected_accepted(
    trees: Trees, values: Tensor, ranks: Tensor, limits: Tensor, blocks: Sequence[int], rows: Sequence[int]
) -> Tensor:
    """Returns sums of path probabilities over a batch, fp32 [blocks, 1 + rows]; blocks ascend. See the reference."""
    (batch, nodes), (slots, families, width) = trees.depths.shape, values.shape[1:]
    assert [*blocks] == sorted({*blocks}) and blocks[0] > 1 and blocks[-1] <= SLOTS.value
    out = torch.empty(len(blocks), 1 + len(rows), dtype=torch.float32, device=values.device)
    b_block, n_block = next_power_of_two(batch), next_power_of_two(nodes)
    _expected_accepted_kernel[out.shape](
        trees.depths, trees.log_probs, values, ranks, limits, out, sum(1 << block - 2 for block in blocks), batch,
        slots, N=nodes, W=width, Q=families, ROWS=(*rows,), BUCKETS=len(rows), B_BLOCK=b_block, N_BLOCK=n_block,
        num_warps=max(1, min(8, b_block * n_block // MOST_SUMMED)), **pdl(values),
    )  # fmt: skip
    return out


def pack_tree_results(
    rows: TreeRows, hidden: Tensor, tokens: Tensor, counts: Tensor, path: Tensor, expected: Tensor
) -> Tensor:
    """Returns a step's result, int64 in one dimension; see the reference. Trees have at most MOST_NODES nodes."""
    (batch, depth), (m, width), device = path.shape, hidden.shape, path.device
    assert depth <= SLOTS.value and hidden.dtype != torch.float64 and hidden.stride(1) == 1
    nonfinite = torch.empty(m, dtype=torch.int32, device=device)
    block = next_power_of_two(width)
    _nonfinite_rows_kernel[(m,)](
        hidden, nonfinite, width, hidden.stride(0), BLOCK=block, num_warps=max(1, min(8, block // 512)), **pdl(hidden)
    )
    size = batch * (4 + 2 * depth) + 1 + 4 * m + expected.numel()
    out = torch.empty(size, dtype=torch.int64, device=device)
    _pack_results_kernel[(batch + 1,)](
        rows.starts, rows.tokens, rows.parents, rows.depths, rows.log_probs, nonfinite, tokens, counts, path, expected,
        out, batch, m, depth, expected.numel(), R_BLOCK=next_power_of_two(MOST_NODES + 1), num_warps=2, **pdl(hidden),
    )  # fmt: skip
    return out
