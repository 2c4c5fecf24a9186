"""Draft trees of all requests of a batch, in Triton: children, growth, and the cut to the rows of a pass.

Nodes are compared exactly: by the path's sum in fp32, in the order of its nodes, then by an integer that holds depth,
parent and order. So trees equal those of the definition.
"""

# mypy: disable-error-code="no-untyped-def"
import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import next_power_of_two, pdl
from ..tree import MOST_NODES, TreeRows, Trees
from .argmax import ordered

EXTREME = tl.constexpr(1e-6)  # probabilities this close to 0 or 1 count as this
# fields packed with a path in 64 bits: 6 of depth, 7 of the parent's place, 4 of order, 6 of the parent's candidate
DEEPEST, FARTHEST, LAST = tl.constexpr(63), tl.constexpr(127), tl.constexpr(15)
PADDED = tl.constexpr(256)  # rows without a node that are filled at once
CANDIDATES = 64


@triton.jit
def _store_children(
    b_log, p_values, p_ranks, slope, bias, C, W: tl.constexpr, C_BLOCK: tl.constexpr,
):  # fmt: skip
    """Stores the W best of C candidates with these log-probabilities, calibrated."""
    o_c = tl.arange(0, C_BLOCK)
    b_p = tl.exp(b_log.to(tl.float64))
    b_p = tl.where(b_p < EXTREME, EXTREME, tl.where(b_p > 1 - EXTREME, 1 - EXTREME, b_p))
    b_z = slope * tl.log(b_p / (1 - b_p)) + bias
    b_value = (tl.where(b_z < 0, b_z, 0.0) - tl.log(1 + tl.exp(-tl.abs(b_z)))).to(tl.float32)
    b_value = tl.where((o_c < C) & (b_value == b_value), b_value, -float("inf"))
    before = (b_value[None, :] > b_value[:, None]) | (
        (b_value[None, :] == b_value[:, None]) & (o_c[None, :] < o_c[:, None])
    )
    b_at = tl.sum(before.to(tl.int32), axis=1)
    kept = (o_c < C) & (b_at < W)
    tl.store(p_values + b_at, b_value, mask=kept)
    tl.store(p_ranks + b_at, o_c, mask=kept)


@triton.jit(do_not_specialize=["K", "C", "stride_lse"])
def _children_kernel(
    unary_p, lse_p, candidates_p, calibration_p, state_p, predecessors_p, successors_p, anchors_p, values_p, ranks_p,
    K, C, R, stride_unary, stride_lse, stride_candidates, stride_state,
    W: tl.constexpr, C_BLOCK: tl.constexpr, R_BLOCK: tl.constexpr, PAIRS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Computes one slot of a request. PAIRS: after each candidate of the previous slot, by the scores of the walk."""
    i_x = tl.program_id(0).to(tl.int64)
    i_b, k = i_x // K, i_x % K
    o_c = tl.arange(0, C_BLOCK)
    m_c = o_c < C
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    slope, bias = tl.load(calibration_p), tl.load(calibration_p + 1 + k)
    b_unary = tl.load(unary_p + i_b * stride_unary + k * C + o_c, mask=m_c, other=-float("inf"))
    if PAIRS:
        o_r = tl.arange(0, R_BLOCK)
        m_r = o_r < R
        p_ids = candidates_p + i_b * stride_candidates + k * C
        b_ids = tl.load(p_ids + o_c, mask=m_c, other=0)
        b_state = tl.load(state_p + i_b * stride_state + k * R + o_r, mask=m_r, other=0.0).to(tl.float32)
        p_successors = successors_p + b_ids[:, None] * R + o_r[None, :]
        b_successors = tl.load(p_successors, mask=m_c[:, None] & m_r[None, :], other=0.0).to(tl.float32)
        anchor = tl.load(anchors_p + i_b)
        for i in range(C):
            before = tl.load(p_ids - C + i, mask=k > 0, other=0)
            before = tl.where(k > 0, before, anchor)
            b_query = tl.load(predecessors_p + before * R + o_r, mask=m_r, other=0.0).to(tl.float32) * b_state
            b_score = b_unary + tl.sum(b_successors * b_query[None, :], axis=1)
            top = tl.max(tl.where(m_c, b_score, -float("inf")), axis=0)
            total = tl.sum(tl.where(m_c, tl.exp(b_score - top), 0.0), axis=0)
            o_out = (i_x * C + i) * W
            _store_children(
                b_score - top - tl.log(total), values_p + o_out, ranks_p + o_out, slope, bias, C, W, C_BLOCK
            )
    else:
        lse = tl.load(lse_p + i_b * stride_lse + k)
        _store_children(b_unary - lse, values_p + i_x * W, ranks_p + i_x * W, slope, bias, C, W, C_BLOCK)


@triton.jit
def _key(path, depth, parent, order, before):
    """Returns an int64 key that is larger for earlier nodes; `before` never decides."""
    low = ((DEEPEST - depth) << 17) | ((FARTHEST - parent) << 10) | ((LAST - order) << 6) | before
    return (ordered(path).to(tl.int64) << 32) | low.to(tl.int64)


@triton.jit
def _path_of(order):
    """Inverts `ordered`: returns the float."""
    return tl.where(order < 0, order ^ 0x7FFFFFFF, order).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["K", "C"])
def _grow_kernel(
    values_p, ranks_p, candidates_p, limits_p, tokens_p, parents_p, depths_p, log_probs_p, paths_p, ancestors_p,
    K, C, stride_candidates,
    N: tl.constexpr, W: tl.constexpr, Q: tl.constexpr, N_BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grows the tree of one request, node by node.

    The candidates for the next node are the first child and the next sibling of every node in the tree. When a node is
    added, its sibling replaces it among the candidates, and its child is appended.
    """
    i_b = tl.program_id(0).to(tl.int64)
    o_n = tl.arange(0, N_BLOCK)
    none = tl.full([], -(2**63), dtype=tl.int64)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    limit = tl.minimum(tl.load(limits_p + i_b), K)
    values_p += i_b * K * Q * W
    ranks_p += i_b * K * Q * W
    candidates_p += i_b * stride_candidates
    tokens_p += i_b * N
    parents_p += i_b * N
    depths_p += i_b * N
    log_probs_p += i_b * N
    zero = limit * 0
    b_next = tl.where((o_n == 0) & (limit > 0), _key(tl.load(values_p), zero + 1, zero, zero, zero), none)
    b_log = tl.zeros([N_BLOCK], dtype=tl.float32)
    b_depth = tl.zeros([N_BLOCK], dtype=tl.int32)
    b_above = tl.zeros([N_BLOCK], dtype=tl.int64)  # bit j: node j is on the path, or is the node itself
    for i in range(N):
        best = tl.max(b_next, axis=0)
        found = best != none
        low = tl.where(found, best & 0x7FFFFFFF, 0).to(tl.int32)
        depth, parent = DEEPEST - (low >> 17), FARTHEST - ((low >> 10) & FARTHEST)
        order, before = LAST - ((low >> 6) & LAST), low & 63
        depth, parent, order = tl.where(found, depth, 1), tl.where(found, parent, 0), tl.where(found, order, 0)
        path = _path_of((best >> 32).to(tl.int32))
        o_family = ((depth - 1) * Q + before) * W
        rank = tl.load(ranks_p + o_family + order, mask=found, other=0)
        own = rank * 0
        if Q > 1:
            own = rank
        sibling = tl.load(values_p + o_family + order + 1, mask=found & (order + 1 < W), other=0.0)
        deeper = found & (depth < limit)
        child = tl.load(values_p + (depth * Q + own) * W, mask=deeper, other=0.0)
        above = tl.sum(tl.where(o_n == parent - 1, b_log, 0.0), axis=0)
        b_sibling = tl.where(found & (order + 1 < W), _key(above + sibling, depth, parent, order + 1, before), none)
        b_child = tl.where(deeper, _key(path + child, depth + 1, parent * 0 + i + 1, parent * 0, own), none)
        b_next = tl.where(b_next == best, b_sibling, b_next)
        b_next = tl.where(o_n == i + 1, b_child, b_next)
        on_path = tl.sum(tl.where(o_n == parent - 1, b_above, 0), axis=0) | (tl.full([], 1, dtype=tl.int64) << i)
        b_log = tl.where(o_n == i, path, b_log)
        b_depth = tl.where((o_n == i) & found, depth, b_depth)
        b_above = tl.where((o_n == i) & found, on_path, b_above)
        token = tl.load(candidates_p + (depth - 1) * C + rank, mask=found, other=0)
        tl.store(tokens_p + i, token)
        tl.store(parents_p + i, parent)
        tl.store(depths_p + i, tl.where(found, depth, 0))
        tl.store(log_probs_p + i, tl.where(found, path, -float("inf")))
    tl.store(ancestors_p + i_b * N + o_n, b_above, mask=o_n < N)
    paths_p += i_b * (N + 1) * (K + 1)
    tl.store(paths_p + (o_n + 1) * (K + 1), tl.zeros([N_BLOCK], dtype=tl.int32), mask=o_n < N)
    tl.store(paths_p, zero)
    on_path = ((b_above[:, None] >> o_n.to(tl.int64)[None, :]) & 1) != 0
    p_paths = paths_p + (o_n + 1)[:, None] * (K + 1) + b_depth[None, :]
    tl.store(p_paths, tl.broadcast_to((o_n + 1)[None, :], (N_BLOCK, N_BLOCK)), mask=on_path & (o_n < N)[:, None])


@triton.jit
def _largest(log_probs_p, depths_p, o_x, B, N, N_BLOCK: tl.constexpr):
    """Returns the two sort keys of nodes o_x = request * N_BLOCK + number: larger first, then lower first."""
    i_b, i_n = o_x // N_BLOCK, o_x % N_BLOCK
    there = (i_b < B) & (i_n < N)
    there = there & (tl.load(depths_p + i_b * N + i_n, mask=there, other=0) > 0)
    b_log = tl.load(log_probs_p + i_b * N + i_n, mask=there, other=0.0)
    return tl.where(there, ordered(b_log).to(tl.int64), -(2**31) - 1), i_n * B + i_b


@triton.jit(do_not_specialize=["B", "N", "M"])
def _cut_kernel(
    tokens_p, parents_p, depths_p, log_probs_p, ancestors_p, last_p, lengths_p, pages_p,
    starts_p, requests_p, row_parents_p, row_depths_p, row_tokens_p, positions_p, slots_p, row_log_probs_p,
    row_ancestors_p, B, N, M, width,
    B_BLOCK: tl.constexpr, N_BLOCK: tl.constexpr, PAGE: tl.constexpr, ROUNDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Computes the cut in one program: two binary searches for the last node that is kept, then every row."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    o_x = tl.arange(0, B_BLOCK * N_BLOCK)
    b_order, b_tie = _largest(log_probs_p, depths_p, o_x, B, N, N_BLOCK)
    nodes = tl.sum((b_order >= -(2**31)).to(tl.int32), axis=0)
    wanted = tl.minimum(M - B, nodes)
    low, high = tl.full([], -(2**31), dtype=tl.int64), tl.full([], 1, dtype=tl.int64)  # log-probabilities are at most 0
    for _ in range(32):
        middle = (low + high + 1) >> 1
        enough = tl.sum((b_order >= middle).to(tl.int32), axis=0) >= wanted
        low, high = tl.where(enough, middle, low), tl.where(enough, high, middle - 1)
    edge = low
    wanted -= tl.sum((b_order > edge).to(tl.int32), axis=0)
    first, last = wanted * 0, wanted * 0 + B_BLOCK * N_BLOCK - 1
    for _ in range(ROUNDS):
        half = (first + last) >> 1
        enough = tl.sum(((b_order == edge) & (b_tie <= half)).to(tl.int32), axis=0) >= wanted
        first, last = tl.where(enough, first, half + 1), tl.where(enough, half, last)

    o_b, o_n = tl.arange(0, B_BLOCK), tl.arange(0, N_BLOCK)
    m_b = o_b < B
    b_order, b_tie = _largest(log_probs_p, depths_p, o_b[:, None] * N_BLOCK + o_n[None, :], B, N, N_BLOCK)
    kept = (b_order > edge) | ((b_order == edge) & (b_tie <= first))
    b_count = tl.where(m_b, 1 + tl.sum(kept.to(tl.int32), axis=1), 0)
    b_start = tl.cumsum(b_count, axis=0) - b_count
    b_length = tl.load(lengths_p + o_b, mask=m_b, other=0)
    tl.store(starts_p + o_b, b_start, mask=m_b)
    total = tl.sum(b_count, axis=0)
    tl.store(starts_p + B, total)
    p_pages = pages_p + o_b.to(tl.int64) * width
    b_page = tl.load(p_pages + b_length // PAGE, mask=m_b, other=0)
    tl.store(requests_p + b_start, o_b, mask=m_b)
    tl.store(row_parents_p + b_start, b_start, mask=m_b)
    tl.store(row_depths_p + b_start, b_start * 0, mask=m_b)
    tl.store(row_tokens_p + b_start, tl.load(last_p + o_b, mask=m_b, other=0), mask=m_b)
    tl.store(positions_p + b_start, b_length, mask=m_b)
    tl.store(slots_p + b_start, b_page * PAGE + b_length % PAGE, mask=m_b)
    tl.store(row_log_probs_p + b_start, b_start.to(tl.float32) * 0, mask=m_b)
    tl.store(row_ancestors_p + b_start, b_start.to(tl.int64) * 0, mask=m_b)

    o_row = b_start[:, None] + 1 + o_n[None, :]
    o_node = o_b[:, None] * N + o_n[None, :]
    b_depth = tl.load(depths_p + o_node, mask=kept, other=0)
    b_at = b_length[:, None] + 1 + o_n[None, :]
    b_page = tl.load(p_pages[:, None] + b_at // PAGE, mask=kept, other=0)
    tl.store(requests_p + o_row, tl.broadcast_to(o_b[:, None], (B_BLOCK, N_BLOCK)), mask=kept)
    tl.store(row_parents_p + o_row, b_start[:, None] + tl.load(parents_p + o_node, mask=kept, other=0), mask=kept)
    tl.store(row_depths_p + o_row, b_depth, mask=kept)
    tl.store(row_tokens_p + o_row, tl.load(tokens_p + o_node, mask=kept, other=0), mask=kept)
    tl.store(positions_p + o_row, b_length[:, None] + b_depth, mask=kept)
    tl.store(slots_p + o_row, b_page * PAGE + b_at % PAGE, mask=kept)
    tl.store(row_log_probs_p + o_row, tl.load(log_probs_p + o_node, mask=kept, other=0.0), mask=kept)
    tl.store(row_ancestors_p + o_row, tl.load(ancestors_p + o_node, mask=kept, other=0), mask=kept)

    for first in range(0, M, PADDED):
        o_m = first + tl.arange(0, PADDED)
        rest = (o_m >= total) & (o_m < M)
        tl.store(requests_p + o_m, o_m * 0 - 1, mask=rest)
        tl.store(row_parents_p + o_m, o_m, mask=rest)
        tl.store(row_depths_p + o_m, o_m * 0, mask=rest)
        tl.store(row_tokens_p + o_m, o_m.to(tl.int64) * 0, mask=rest)
        tl.store(positions_p + o_m, o_m * 0, mask=rest)
        tl.store(slots_p + o_m, o_m * 0, mask=rest)
        tl.store(row_log_probs_p + o_m, o_m.to(tl.float32) * 0, mask=rest)
        tl.store(row_ancestors_p + o_m, o_m.to(tl.int64) * 0, mask=rest)


def draft_children(
    unary: Tensor,
    lse: Tensor,
    candidates: Tensor,
    calibration: Tensor,
    width: int,
    pairs: tuple[Tensor, Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns calibrated log-probabilities fp32 [B, K, Q, W] of every slot's best candidates, and their indices."""
    batch, slots, count = candidates.shape
    assert width <= min(count, LAST.value + 1) and count <= CANDIDATES and slots <= DEEPEST.value
    shape = (batch, slots, 1 if pairs is None else count, width)
    values = torch.empty(shape, dtype=torch.float32, device=unary.device)
    ranks = torch.empty(shape, dtype=torch.int32, device=unary.device)
    state, predecessors, successors, anchors = (unary, unary, unary, candidates) if pairs is None else pairs
    rank = 1 if pairs is None else state.shape[2]
    _children_kernel[(batch * slots,)](
        unary, lse, candidates, calibration, state, predecessors, successors, anchors, values, ranks,
        slots, count, rank, unary.stride(0), lse.stride(0), candidates.stride(0), state.stride(0),
        W=width, C_BLOCK=next_power_of_two(count), R_BLOCK=next_power_of_two(rank), PAIRS=pairs is not None,
        num_warps=1 if pairs is None else 4, **pdl(unary),
    )  # fmt: skip
    return values, ranks


def grow_trees(values: Tensor, ranks: Tensor, candidates: Tensor, limits: Tensor, nodes: int) -> Trees:
    """Returns for each request the tree of the `nodes` most probable paths, at most MOST_NODES; see the reference."""
    batch, slots, families, width = values.shape
    assert nodes <= MOST_NODES
    device = values.device
    tokens, ancestors = (torch.empty(batch, nodes, dtype=torch.int64, device=device) for _ in range(2))
    parents, depths = (torch.empty(batch, nodes, dtype=torch.int32, device=device) for _ in range(2))
    log_probs = torch.empty(batch, nodes, dtype=torch.float32, device=device)
    paths = torch.empty(batch, nodes + 1, slots + 1, dtype=torch.int32, device=device)
    _grow_kernel[(batch,)](
        values, ranks, candidates, limits, tokens, parents, depths, log_probs, paths, ancestors,
        slots, candidates.shape[2], candidates.stride(0), N=nodes, W=width, Q=families,
        N_BLOCK=next_power_of_two(nodes), num_warps=1, **pdl(values),
    )  # fmt: skip
    return Trees(tokens, parents, depths, log_probs, paths, ancestors)


def cut_trees(
    trees: Trees, last_token: Tensor, lengths: Tensor, page_table: Tensor, page_size: int, rows: int
) -> TreeRows:
    """Returns the anchors of all requests and the most probable nodes, `rows` together; see the reference."""
    batch, nodes = trees.depths.shape
    device = lengths.device
    assert rows >= batch
    starts = torch.empty(batch + 1, dtype=torch.int32, device=device)
    requests, parents, depths, positions, slots = torch.empty(5, rows, dtype=torch.int32, device=device)
    tokens, ancestors = torch.empty(2, rows, dtype=torch.int64, device=device)
    log_probs = torch.empty(rows, dtype=torch.float32, device=device)
    b_block, n_block = next_power_of_two(batch), next_power_of_two(nodes)
    _cut_kernel[(1,)](
        trees.tokens, trees.parents, trees.depths, trees.log_probs, trees.ancestors, last_token, lengths, page_table,
        starts, requests, parents, depths, tokens, positions, slots, log_probs, ancestors,
        batch, nodes, rows, page_table.stride(0),
        B_BLOCK=b_block, N_BLOCK=n_block, PAGE=page_size,
        ROUNDS=(b_block * n_block).bit_length(), num_warps=max(4, min(16, b_block * n_block // 256)), **pdl(lengths),
    )  # fmt: skip
    return TreeRows(starts, requests, parents, depths, tokens, positions, slots, log_probs, ancestors)
