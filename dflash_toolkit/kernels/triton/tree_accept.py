"""The walk through verified draft trees, and the move of accepted rows, in Triton."""

# mypy: disable-error-code="no-untyped-def"
import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import next_power_of_two, pdl
from ..tree import MOST_NODES, TreeRows

BLOCK = 512  # elements of a token's keys or values that a program moves


@triton.jit(do_not_specialize=["P"])
def _accept_trees_kernel(
    starts_p, parents_p, row_tokens_p, choice_p, active_p, lengths_p, last_p, forced_p, counts_p, tokens_p, path_p, P,
    R_BLOCK: tl.constexpr, P_BLOCK: tl.constexpr, FORCED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Computes the walk of one request."""
    i_b = tl.program_id(0).to(tl.int64)
    o_p = tl.arange(0, P_BLOCK)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    at = tl.load(starts_p + i_b)
    o_r = at + tl.arange(0, R_BLOCK)
    m_r = o_r < tl.load(starts_p + i_b + 1)
    b_parent = tl.load(parents_p + o_r, mask=m_r, other=-1)
    b_token = tl.load(row_tokens_p + o_r, mask=m_r, other=0)
    b_choice = tl.load(choice_p + o_r, mask=m_r, other=0)
    b_parent = tl.where(b_parent == o_r, -1, b_parent)  # an anchor is no node's child
    steps = P
    if FORCED:
        steps = tl.load(forced_p + i_b)
    b_path = tl.zeros([P_BLOCK], dtype=tl.int32) + at
    token = tl.sum(tl.where(o_r == at, b_choice, 0), axis=0)
    b_tokens = tl.zeros([P_BLOCK], dtype=tl.int64) + token
    n = 0
    more = True
    while more:
        follows = b_parent == at
        if not FORCED:
            follows = follows & (b_token == token)
        child = tl.min(tl.where(follows, o_r, 0x7FFFFFFF), axis=0)
        more = (child != 0x7FFFFFFF) & (n < steps) & (n < P - 1)
        if more:
            taken = tl.sum(tl.where(o_r == child, b_token, 0), axis=0)
            token = tl.sum(tl.where(o_r == child, b_choice, 0), axis=0)
            at = child
            b_tokens = tl.where(o_p == n, taken, tl.where(o_p > n, token, b_tokens))
            n += 1
            b_path = tl.where(o_p >= n, at, b_path)
    active = tl.load(active_p + i_b) != 0
    count = tl.where(active, n + 1, 0)
    tl.store(counts_p + i_b, count)
    tl.store(lengths_p + i_b, tl.load(lengths_p + i_b) + count)
    tl.store(last_p + i_b, token, mask=active)
    tl.store(tokens_p + i_b * P + o_p, b_tokens, mask=o_p < P)
    tl.store(path_p + i_b * P + o_p, b_path.to(tl.int64), mask=o_p < P)


@triton.jit(do_not_specialize=["P"])
def _move_rows_kernel(
    cache_p, row_slots_p, path_p, counts_p, lengths_p, pages_p, P, numbers, width, stride_side, stride_slot, stride,
    P_BLOCK: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Moves some elements of the keys or values of one layer and request; reads all before it writes any.

    Program (layer and side, request, piece). The anchor is already in its place.
    """
    i_l, i_b = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    o_n = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    o_d = 1 + tl.arange(0, P_BLOCK)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    count = tl.load(counts_p + i_b)
    if count <= 1:
        return
    m_d = o_d < count
    b_row = tl.load(path_p + i_b * P + o_d, mask=m_d, other=0)
    b_from = tl.load(row_slots_p + b_row, mask=m_d, other=0).to(tl.int64)
    o_at = tl.load(lengths_p + i_b) + o_d
    b_to = tl.load(pages_p + i_b * width + o_at // PAGE, mask=m_d, other=0).to(tl.int64) * PAGE + o_at % PAGE
    mask = (m_d & (b_from != b_to))[:, None] & (o_n < numbers)[None, :]
    p_side = cache_p + i_l * stride_side + o_n[None, :] * stride
    b_kept = tl.load(p_side + b_from[:, None] * stride_slot, mask=mask)
    tl.debug_barrier()
    tl.store(p_side + b_to[:, None] * stride_slot, b_kept, mask=mask)


def accept_trees(
    rows: TreeRows,
    choice: Tensor,
    active: Tensor,
    lengths: Tensor,
    last_token: Tensor,
    depth: int,
    forced: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns counts int32 [B], tokens and rows int64 [B, depth] of the walks by choice [M]; advances the state.

    See the reference. Trees have at most MOST_NODES nodes.
    """
    batch, longest = len(lengths), min(MOST_NODES, len(choice) - len(lengths)) + 1
    counts = torch.empty(batch, dtype=torch.int32, device=choice.device)
    tokens, path = (torch.empty(batch, depth, dtype=torch.int64, device=choice.device) for _ in range(2))
    _accept_trees_kernel[(batch,)](
        rows.starts, rows.parents, rows.tokens, choice, active, lengths, last_token,
        choice if forced is None else forced, counts, tokens, path, depth,
        R_BLOCK=next_power_of_two(longest), P_BLOCK=next_power_of_two(depth), FORCED=forced is not None,
        num_warps=1, **pdl(choice),
    )  # fmt: skip
    return counts, tokens, path


def move_rows_(
    cache: Tensor,
    rows: TreeRows,
    path: Tensor,
    counts: Tensor,
    lengths: Tensor,
    page_table: Tensor,
    page_size: int,
) -> None:
    """Moves accepted rows' keys and values in cache [L, 2, slots, G, H] to their positions; see the reference."""
    if cache.element_size() == 1:  # fp8, which Triton does not load on every GPU
        cache = cache.view(torch.uint8)
    heads = cache.view(*cache.shape[:3], -1)
    layers, sides, _, numbers = heads.shape
    batch, depth = path.shape
    block = min(BLOCK, next_power_of_two(numbers))
    _move_rows_kernel[(layers * sides, batch, -(-numbers // block))](
        heads, rows.slots, path, counts, lengths, page_table, depth, numbers, page_table.stride(0),
        *heads.stride()[1:], P_BLOCK=next_power_of_two(max(1, depth - 1)), PAGE=page_size, BLOCK=block,
        num_warps=4, **pdl(cache),
    )  # fmt: skip
