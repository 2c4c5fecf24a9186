"""Walks through the slots of a block by scores of pairs of tokens, in Triton: one program per request.

DFlash 2 computes the scores on the way from two tables; those of DSpine are given.
"""

# mypy: disable-error-code="no-untyped-def"
import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import next_power_of_two, pdl


@triton.jit
def _slot(
    state_p, unary_p, candidates_p, predecessors_p, successors_p, k, K, C, R, C_BLOCK: tl.constexpr,
    R_BLOCK: tl.constexpr,
):  # fmt: skip
    """Loads the scores and candidates of slot k, one slot ahead, as they do not depend on choices."""
    o_c, o_r = tl.arange(0, C_BLOCK), tl.arange(0, R_BLOCK)
    m_c, m_r = (o_c < C) & (k < K), o_r < R
    b_ids = tl.load(candidates_p + k * C + o_c, mask=m_c, other=0)
    b_unary = tl.load(unary_p + k * C + o_c, mask=m_c, other=-float("inf"))
    b_state = tl.load(state_p + k * R + o_r, mask=m_r & (k < K), other=0.0).to(tl.float32)
    o_book = b_ids[:, None] * R + o_r[None, :]
    m_book = m_c[:, None] & m_r[None, :]
    b_successors = tl.load(successors_p + o_book, mask=m_book, other=0.0)
    b_predecessors = tl.load(predecessors_p + o_book, mask=m_book, other=0.0)
    return b_ids, b_unary, b_state, b_successors, b_predecessors


@triton.jit
def _best(b_score, o_c, C, C_BLOCK: tl.constexpr):
    """Returns the place of the best score, the first among equal ones, and that score."""
    best = tl.max(b_score, axis=0)
    # rows without a request may hold NaN; they also get a candidate
    chosen = tl.min(tl.where((b_score == best) & (o_c < C), o_c, C_BLOCK), axis=0)
    return tl.where(chosen == C_BLOCK, 0, chosen), best


@triton.jit
def _sampled(b_score, best, chosen, o_c, C, temperature, greedy, uniform, q_p, C_BLOCK: tl.constexpr):
    """Returns a place sampled from the softmax of the scores over the temperature, which is stored at q_p."""
    b_q = tl.exp((b_score - best) / temperature)
    b_q = tl.where(greedy, (o_c == chosen).to(tl.float32), b_q / tl.sum(b_q, axis=0))
    tl.store(q_p + o_c, b_q, mask=o_c < C)
    b_mass = tl.cumsum(b_q.to(tl.float64), axis=0)
    threshold = uniform * tl.max(b_mass, axis=0)
    return tl.minimum(tl.min(tl.where(b_mass > threshold, o_c, C_BLOCK), axis=0), C - 1)


@triton.jit(do_not_specialize=["K", "C"])
def _walk_kernel(
    state_p, unary_p, candidates_p, predecessors_p, successors_p, anchors_p, temperature_p, uniform_p, out_p, q_p,
    K, C, R, stride_state, stride_unary, stride_candidates, stride_uniform,
    C_BLOCK: tl.constexpr, R_BLOCK: tl.constexpr, SAMPLED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    i_b = tl.program_id(0).to(tl.int64)
    state_p += i_b * stride_state
    unary_p += i_b * stride_unary
    candidates_p += i_b * stride_candidates
    o_c, o_r = tl.arange(0, C_BLOCK), tl.arange(0, R_BLOCK)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    anchor = tl.load(anchors_p + i_b)
    if SAMPLED:
        temperature = tl.load(temperature_p + i_b)
        greedy = temperature == 0.0
        temperature = tl.where(greedy, 1.0, temperature)
    b_last = tl.load(predecessors_p + anchor * R + o_r, mask=o_r < R, other=0.0).to(tl.float32)
    b_ids, b_unary, b_state, b_successors, b_predecessors = _slot(
        state_p, unary_p, candidates_p, predecessors_p, successors_p, 0, K, C, R, C_BLOCK, R_BLOCK
    )
    for k in range(K):
        n_ids, n_unary, n_state, n_successors, n_predecessors = _slot(
            state_p, unary_p, candidates_p, predecessors_p, successors_p, k + 1, K, C, R, C_BLOCK, R_BLOCK
        )
        b_query = b_last * b_state
        b_score = b_unary + tl.sum(b_successors.to(tl.float32) * b_query[None, :], axis=1)
        b_score = tl.where(o_c < C, b_score, -float("inf"))
        chosen, best = _best(b_score, o_c, C, C_BLOCK)
        if SAMPLED:
            uniform = tl.load(uniform_p + i_b * stride_uniform + k)
            chosen = _sampled(
                b_score, best, chosen, o_c, C, temperature, greedy, uniform, q_p + (i_b * K + k) * C, C_BLOCK
            )
        tl.store(out_p + i_b * K + k, tl.sum(tl.where(o_c == chosen, b_ids, 0), axis=0))
        b_last = tl.sum(tl.where((o_c == chosen)[:, None], b_predecessors.to(tl.float32), 0.0), axis=0)
        b_ids, b_unary, b_state = n_ids, n_unary, n_state
        b_successors, b_predecessors = n_successors, n_predecessors


def walk(
    state: Tensor, unary: Tensor, candidates: Tensor, predecessors: Tensor, successors: Tensor, anchors: Tensor
) -> Tensor:
    """Returns tokens int64 [B, K] of K slots, each the best candidate after the previous token; see the reference."""
    return _launch(state, unary, candidates, predecessors, successors, anchors, None, None)[0]


def sampled_walk(
    state: Tensor,
    unary: Tensor,
    candidates: Tensor,
    predecessors: Tensor,
    successors: Tensor,
    anchors: Tensor,
    temperature: Tensor,
    uniform: Tensor,
) -> tuple[Tensor, Tensor]:
    """Does the same as `walk`, but samples tokens; also returns their distributions fp32 [B, K, C]."""
    return _launch(state, unary, candidates, predecessors, successors, anchors, temperature, uniform)


def _launch(
    state: Tensor, unary: Tensor, candidates: Tensor, predecessors: Tensor, successors: Tensor, anchors: Tensor,
    temperature: Tensor | None, uniform: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    (batch, slots, count), rank = candidates.shape, state.shape[2]
    out = torch.empty(batch, slots, dtype=torch.int64, device=state.device)
    q = unary if uniform is None else torch.empty(batch, slots, count, dtype=torch.float32, device=state.device)
    _walk_kernel[(batch,)](
        state, unary, candidates, predecessors, successors, anchors, unary if temperature is None else temperature,
        unary if uniform is None else uniform, out, q, slots, count, rank,
        state.stride(0), unary.stride(0), candidates.stride(0), 0 if uniform is None else uniform.stride(0),
        C_BLOCK=next_power_of_two(count), R_BLOCK=next_power_of_two(rank), SAMPLED=uniform is not None, **pdl(state),
    )  # fmt: skip
    return out, q


@triton.jit(do_not_specialize=["K", "C"])
def _walk_pairs_kernel(
    scores_p, candidates_p, temperature_p, uniform_p, out_p, q_p, K, C,
    C_BLOCK: tl.constexpr, SAMPLED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    i_b = tl.program_id(0).to(tl.int64)
    o_c = tl.arange(0, C_BLOCK)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if SAMPLED:
        temperature = tl.load(temperature_p + i_b)
        greedy = temperature == 0.0
        temperature = tl.where(greedy, 1.0, temperature)
    chosen = 0
    for k in range(K):
        i_k = i_b * K + k
        b_score = tl.load(scores_p + (i_k * C + o_c) * C + chosen, mask=o_c < C, other=-float("inf"))
        chosen, best = _best(b_score, o_c, C, C_BLOCK)
        if SAMPLED:
            uniform = tl.load(uniform_p + i_k)
            chosen = _sampled(b_score, best, chosen, o_c, C, temperature, greedy, uniform, q_p + i_k * C, C_BLOCK)
        tl.store(out_p + i_k, tl.load(candidates_p + i_k * C + chosen))


def walk_pairs(scores: Tensor, candidates: Tensor) -> Tensor:
    """Returns tokens int64 [B, K], each the best candidate after the previous token; see the reference."""
    return _launch_pairs(scores, candidates, None, None)[0]


def sampled_walk_pairs(
    scores: Tensor, candidates: Tensor, temperature: Tensor, uniform: Tensor
) -> tuple[Tensor, Tensor]:
    """Does the same as `walk_pairs`, but samples tokens; also returns their distributions fp32 [B, K, C]."""
    return _launch_pairs(scores, candidates, temperature, uniform.contiguous())


def _launch_pairs(
    scores: Tensor, candidates: Tensor, temperature: Tensor | None, uniform: Tensor | None
) -> tuple[Tensor, Tensor]:
    assert scores.is_contiguous() and candidates.is_contiguous()
    batch, slots, count = candidates.shape
    out = torch.empty(batch, slots, dtype=torch.int64, device=scores.device)
    q = scores if uniform is None else torch.empty(batch, slots, count, dtype=torch.float32, device=scores.device)
    _walk_pairs_kernel[(batch,)](
        scores, candidates, scores if temperature is None else temperature, scores if uniform is None else uniform,
        out, q, slots, count, C_BLOCK=next_power_of_two(count), SAMPLED=uniform is not None, num_warps=1, **pdl(scores),
    )  # fmt: skip
    return out, q
