"""Sampling without a sort, in Triton: one program samples one row's token.

Probabilities are integers, in units of 2^-42 of the largest one. Sums of integers do not depend on their order, so
the edges of top-k and top-p are found by a search for the mass at a value and above, over the row or over its few
candidates, with the same result. The token is sampled by the inverse CDF in the order of the ids, as in the definition.
For a sampled draft, its distribution is subtracted from a few of the numbers.
"""

# mypy: disable-error-code="no-untyped-def"
import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import next_power_of_two, pdl

BLOCK = 4096  # columns at a time
TILE = 512  # columns or candidates at a time where each is compared with several values
PIVOTS = 16  # each iteration of the search finds four bits of a value
GROUPS = 1024  # groups of columns; their largest logits bound the k-th from below
CANDIDATES = 16384  # maximum candidates that a row packs; a flatter row is searched whole
MAX_VOCAB = (1 << 21) - 1  # so that a sum of probabilities fits in 63 bits
WARPS = 16


@triton.jit
def _scaled(b_x, temperature):
    """Returns logits over temperature, rounded like torch, so that the same ones are tied, with one zero."""
    return tl.div_rn(b_x.to(tl.float32), temperature) + 0.0


@triton.jit
def _values(row_p, temperature, values_p, packed, o_n, n):
    """Returns scaled logits at positions o_n of the candidates, which are all columns until they are packed."""
    if packed:
        b_l = tl.load(values_p + o_n, mask=o_n < n, other=-float("inf"))
    else:
        b_l = _scaled(tl.load(row_p + o_n, mask=o_n < n, other=-float("inf")), temperature)
    return b_l


@triton.jit
def _mass(b_l, top, least):
    """Returns probabilities in units of 2^-42 of the largest; those below `least` of it are zero."""
    b_p = tl.exp(b_l - top)
    return tl.where(b_p >= least, (b_p * 4398046511104.0).to(tl.int64), 0)


@triton.jit
def _ordered(x):
    """Maps floats to integers in the same order, and back: the map is its own inverse."""
    return tl.where(x < 0, x ^ 0x7FFFFFFF, x)


@triton.jit
def _at_least(
    row_p, temperature, values_p, packed, n, b_pivots, top,
    P: tl.constexpr, BLOCK: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """Returns the number of candidates, or their mass, at each of the pivots [P] and above."""
    b_sum = tl.zeros([P, BLOCK], dtype=tl.int64)
    for start in tl.range(0, n, BLOCK, num_stages=3):
        o_n = start + tl.arange(0, BLOCK)
        b_l = _values(row_p, temperature, values_p, packed, o_n, n)[None, :]
        b_w = (o_n < n).to(tl.int64)[None, :] if COUNT else _mass(b_l, top, 0.0)
        b_sum += tl.where(b_l >= b_pivots[:, None], b_w, 0)
    return tl.sum(b_sum, axis=1)


@triton.jit
def _edge(
    row_p, temperature, values_p, packed, n, lowest, top, target,
    P: tl.constexpr, BLOCK: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """Returns the largest value with at least `target` candidates or mass at it and above; `lowest` has as many."""
    o_p = tl.arange(0, P)
    base = _ordered(lowest.to(tl.int32, bitcast=True)).to(tl.int64)
    span = _ordered(top.to(tl.int32, bitcast=True)).to(tl.int64) - base + 1
    while span > 1:
        step = (span + P - 1) // P
        b_keys = tl.minimum(base + o_p.to(tl.int64) * step, 0x7FFFFFFF).to(tl.int32)  # the last is NaN
        b_pivots = _ordered(b_keys).to(tl.float32, bitcast=True)
        b_sum = _at_least(row_p, temperature, values_p, packed, n, b_pivots, top, P, BLOCK, COUNT)
        taken = tl.max(tl.where(b_sum >= target, o_p, 0), axis=0).to(tl.int64) * step
        base += taken
        span = tl.minimum(step, span - taken)
    return _ordered(base.to(tl.int32)).to(tl.float32, bitcast=True)


@triton.jit
def _at_and_above(row_p, temperature, values_p, packed, n, edge, top, TILE: tl.constexpr):
    """Returns the mass of the candidates at or above the edge, and of those above it."""
    b_keys = _ordered(edge.to(tl.int32, bitcast=True)) + tl.arange(0, 2)
    b_pivots = _ordered(b_keys).to(tl.float32, bitcast=True)
    b_sum = _at_least(row_p, temperature, values_p, packed, n, b_pivots, top, 2, TILE, False)
    return tl.max(b_sum, axis=0), tl.min(b_sum, axis=0)


@triton.jit
def _kept(
    row_p, temperature, values_p, packed, start, n, edge, cut, top, least, BLOCK: tl.constexpr, TIES: tl.constexpr
):
    """Returns the mass of the candidates start..start + BLOCK that are at the edge, or of all that stay."""
    o_n = start + tl.arange(0, BLOCK)
    b_l = _values(row_p, temperature, values_p, packed, o_n, n)
    b_in = b_l == edge
    if not TIES:
        b_in = (b_l > edge) | (b_in & (o_n <= cut))
    return tl.where(b_in & (o_n < n), _mass(b_l, top, least), 0)


@triton.jit
def _first_beyond(
    row_p, temperature, values_p, packed, n, edge, cut, top, least, share,
    TILES: tl.constexpr, BLOCK: tl.constexpr, TIES: tl.constexpr,
):  # fmt: skip
    """Returns the first position at which the cumulative mass exceeds `share`, a fraction of all mass without TIES."""
    o_t = tl.arange(0, TILES)
    b_sums = tl.zeros([TILES], dtype=tl.int64)
    for i in range(0, tl.cdiv(n, BLOCK)):
        b_w = _kept(row_p, temperature, values_p, packed, i * BLOCK, n, edge, cut, top, least, BLOCK, TIES)
        b_sums += tl.where(o_t == i, tl.sum(b_w, axis=0), 0)
    if TIES:
        threshold = share
    else:  # a share of 1 also samples a token that stays
        total = tl.sum(b_sums, axis=0)
        threshold = tl.minimum((share * total.to(tl.float64)).to(tl.int64), total - 1)
    tile = tl.sum((tl.cumsum(b_sums, axis=0) <= threshold).to(tl.int32), axis=0)
    before = tl.sum(tl.where(o_t < tile, b_sums, 0), axis=0)
    b_w = _kept(row_p, temperature, values_p, packed, tile * BLOCK, n, edge, cut, top, least, BLOCK, TIES)
    inside = tl.sum((before + tl.cumsum(b_w, axis=0) <= threshold).to(tl.int32), axis=0)
    return tl.minimum(tile * BLOCK + inside, n - 1)


@triton.jit
def _draft_or_rest(
    row_p, temperature, values_p, ids_p, packed, n, edge, cut, top, least, share,
    draft, acceptance, drafted_p, q_p, C, V,
    TILES: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, C_BLOCK: tl.constexpr,
):  # fmt: skip
    """Returns the draft if it is accepted, else a token sampled from the mass that is left after subtracting q."""
    o_t, o_c = tl.arange(0, TILES), tl.arange(0, C_BLOCK)
    b_sums = tl.zeros([TILES], dtype=tl.int64)
    for i in range(0, tl.cdiv(n, BLOCK)):
        b_w = _kept(row_p, temperature, values_p, packed, i * BLOCK, n, edge, cut, top, least, BLOCK, False)
        b_sums += tl.where(o_t == i, tl.sum(b_w, axis=0), 0)
    total = tl.sum(b_sums, axis=0)

    m_c = (o_c < C) & (draft >= 0)
    b_ids = tl.load(drafted_p + o_c, mask=m_c, other=-1).to(tl.int32)
    m_c &= (b_ids >= 0) & (b_ids < V)  # padding rows have any values
    b_q = tl.load(q_p + o_c, mask=m_c, other=0.0).to(tl.float64) * total.to(tl.float64)
    last = tl.load(ids_p + cut, mask=packed & (cut < n), other=cut)  # the id at place `cut`
    b_l = _scaled(tl.load(row_p + b_ids, mask=m_c, other=-float("inf")), temperature)
    b_p = tl.where((b_l > edge) | ((b_l == edge) & (b_ids <= last)), _mass(b_l, top, least), 0)
    b_taken = tl.where(m_c, tl.minimum(b_p, b_q.to(tl.int64)), 0)
    rest = total - tl.sum(b_taken, axis=0)
    b_own = m_c & (b_ids == draft)
    of_p, of_q = tl.sum(tl.where(b_own, b_p, 0), axis=0), tl.sum(tl.where(b_own, b_q, 0.0), axis=0)
    accepted = (draft >= 0) & ((acceptance * of_q < of_p.to(tl.float64)) | (rest <= 0))

    b_at = b_ids  # places of these tokens among the candidates
    if packed:
        b_at = tl.zeros([C_BLOCK], dtype=tl.int32)
        for start in range(0, n, TILE):
            o_n = start + tl.arange(0, TILE)
            b_packed = tl.load(ids_p + o_n, mask=o_n < n, other=0x7FFFFFFF)
            b_at += tl.sum((b_packed[:, None] < b_ids[None, :]).to(tl.int32), axis=0)
    b_here = (b_at // BLOCK)[None, :] == o_t[:, None]
    b_sums -= tl.sum(tl.where(b_here, b_taken[None, :], 0), axis=1)
    threshold = tl.minimum((share * rest.to(tl.float64)).to(tl.int64), rest - 1)
    tile = tl.sum((tl.cumsum(b_sums, axis=0) <= threshold).to(tl.int32), axis=0)
    before = tl.sum(tl.where(o_t < tile, b_sums, 0), axis=0)
    b_w = _kept(row_p, temperature, values_p, packed, tile * BLOCK, n, edge, cut, top, least, BLOCK, False)
    o_n = tile * BLOCK + tl.arange(0, BLOCK)
    for i in range(0, C):
        at = tl.sum(tl.where(o_c == i, b_at, 0), axis=0)
        b_w -= tl.where(o_n == at, tl.sum(tl.where(o_c == i, b_taken, 0), axis=0), 0)
    inside = tl.sum((before + tl.cumsum(b_w, axis=0) <= threshold).to(tl.int32), axis=0)
    token = tl.minimum(tile * BLOCK + inside, n - 1)
    token = tl.load(ids_p + token, mask=packed, other=token)
    return tl.where(accepted, draft, token.to(tl.int64))


@triton.jit
def _pack(row_p, temperature, values_p, ids_p, V, bound, ROOM: tl.constexpr, BLOCK: tl.constexpr):
    """Writes the columns at `bound` and above in the order of their ids, up to ROOM, and counts them."""
    n = 0
    for start in tl.range(0, V, BLOCK, num_stages=3):
        o_v = start + tl.arange(0, BLOCK)
        b_l = _scaled(tl.load(row_p + o_v, mask=o_v < V, other=-float("inf")), temperature)
        b_in = (b_l >= bound) & (o_v < V)
        o_n = n + tl.cumsum(b_in.to(tl.int32), axis=0) - 1
        tl.store(values_p + o_n, b_l, mask=b_in & (o_n < ROOM))
        tl.store(ids_p + o_n, o_v, mask=b_in & (o_n < ROOM))
        n += tl.sum(b_in.to(tl.int32), axis=0)
    tl.debug_barrier()
    return n


@triton.jit
def _bound_of_top_k(
    row_p, temperature, values_p, b_largest, top, top_k,
    PIVOTS: tl.constexpr, TILE: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Returns a lower bound of the k-th largest value, from the largest logits of GROUPS groups of columns."""
    bound = tl.full([], -float("inf"), dtype=tl.float32)
    if top_k <= GROUPS:  # k groups have maxima at or above the k-th one, so at least k columns are
        tl.store(values_p + tl.arange(0, GROUPS), _scaled(b_largest, temperature))
        tl.debug_barrier()
        lowest = _scaled(tl.min(b_largest, axis=0), temperature)
        bound = _edge(row_p, temperature, values_p, True, GROUPS, lowest, top, top_k, PIVOTS, TILE, True)
        tl.debug_barrier()  # before other threads overwrite values that some still read
    return bound


@triton.jit
def _bound_of_top_p(row_p, temperature, values_p, V, top, top_p, TILE: tl.constexpr):
    """Returns the whole mass, and the highest of a few values with top_p of it at or above."""
    o_b = tl.arange(0, 4)
    b_bounds = tl.where(o_b < 3, top - 4.0 * (o_b + 1), -float("inf"))
    b_sum = _at_least(row_p, temperature, values_p, False, V, b_bounds, top, 4, 4 * TILE, False)
    total = tl.max(b_sum, axis=0)
    b_enough = b_sum >= _wanted(top_p, total)
    return total, tl.max(tl.where(b_enough, b_bounds, -float("inf")), axis=0)


@triton.jit
def _wanted(top_p, total):
    """Returns the mass below which tokens are kept."""
    return tl.maximum(tl.ceil(top_p.to(tl.float64) * total.to(tl.float64)).to(tl.int64), 1)


@triton.jit
def _sample_kernel(
    logits_p, temperature_p, top_p_p, top_k_p, min_p_p, uniform_p, values_p, ids_p, out_p, V,
    draft_p, acceptance_p, drafted_p, q_p, C,
    BLOCK: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, PIVOTS: tl.constexpr,
    GROUPS: tl.constexpr, ROOM: tl.constexpr, C_BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    i_m = tl.program_id(0).to(tl.int64)
    row_p = logits_p + i_m * V
    values_p += i_m * ROOM
    ids_p += i_m * ROOM
    if PDL:
        tl.extra.cuda.gdc_wait()
    temperature = tl.load(temperature_p + i_m)
    o_v = tl.arange(0, BLOCK)
    b_top = tl.full([BLOCK], -float("inf"), dtype=tl.float32)
    b_index = o_v
    for start in tl.range(0, V, BLOCK, num_stages=3):
        b_x = tl.load(row_p + start + o_v, mask=start + o_v < V, other=-float("inf")).to(tl.float32)
        b_index = tl.where(b_x > b_top, start + o_v, b_index)
        b_top = tl.where(b_x > b_top, b_x, b_top)  # never true for NaN, here and in all comparisons below
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    largest = tl.max(b_top, axis=0)
    token = tl.min(tl.where(b_top == largest, b_index, V), axis=0)
    greedy = temperature == 0.0
    temperature = tl.where(greedy, 1.0, temperature)
    top = _scaled(largest, temperature)
    if (greedy == 0) & (tl.abs(top) < float("inf")):  # padding rows have any values
        top_p = tl.load(top_p_p + i_m)
        top_k = tl.load(top_k_p + i_m)
        n = tl.zeros([], dtype=tl.int32) + V
        packed = n < 0
        cut = n
        edge = tl.full([], -float("inf"), dtype=tl.float32)
        total = tl.zeros([], dtype=tl.int64)
        if (top_k < V) | (top_p < 1.0):
            if top_k < V:
                b_largest = tl.max(tl.reshape(b_top, (GROUPS, BLOCK // GROUPS)), axis=1)
                edge = _bound_of_top_k(row_p, temperature, values_p, b_largest, top, top_k, PIVOTS, TILE, GROUPS)
            else:
                total, edge = _bound_of_top_p(row_p, temperature, values_p, V, top, top_p, TILE)
            found = _pack(row_p, temperature, values_p, ids_p, V, edge, ROOM, BLOCK)
            packed = found <= ROOM
            n = tl.where(packed, found, n)
            if top_k < V:
                edge = _edge(row_p, temperature, values_p, packed, n, edge, top, top_k, PIVOTS, TILE, True)
                total, _ = _at_and_above(row_p, temperature, values_p, packed, n, edge, top, TILE)
            if top_p < 1.0:
                wanted = _wanted(top_p, total)
                edge = _edge(row_p, temperature, values_p, packed, n, edge, top, wanted, PIVOTS, TILE, False)
                _, above = _at_and_above(row_p, temperature, values_p, packed, n, edge, top, TILE)
                cut = _first_beyond(
                    row_p, temperature, values_p, packed, n, edge, cut, top, 0.0, wanted - above - 1,
                    TILES, BLOCK, True,
                )  # fmt: skip
        least, share = tl.load(min_p_p + i_m), tl.load(uniform_p + i_m)
        if C_BLOCK:
            token = _draft_or_rest(
                row_p, temperature, values_p, ids_p, packed, n, edge, cut, top, least, share,
                tl.load(draft_p + i_m), tl.load(acceptance_p + i_m), drafted_p + i_m * C, q_p + i_m * C, C, V,
                TILES, TILE, BLOCK, C_BLOCK,
            ).to(tl.int32)  # fmt: skip
        else:
            token = _first_beyond(
                row_p, temperature, values_p, packed, n, edge, cut, top, least, share, TILES, BLOCK, False
            )
            token = tl.load(ids_p + token, mask=packed, other=token)
    tl.store(out_p + i_m, token.to(tl.int64))


def sample(logits: Tensor, temperature: Tensor, top_p: Tensor, top_k: Tensor, min_p: Tensor, uniform: Tensor) -> Tensor:
    """Samples a token int64 [M] of every row of logits [M, V]; at temperature 0, that of the largest logit."""
    return _launch(logits, (temperature, top_p, top_k, min_p, uniform), (None, None, None, None), 0)


def rejection_sample(
    logits: Tensor,
    temperature: Tensor,
    top_p: Tensor,
    top_k: Tensor,
    min_p: Tensor,
    uniform: Tensor,
    draft: Tensor,
    candidates: Tensor,
    q: Tensor,
    acceptance: Tensor,
) -> Tensor:
    """Does the same as `sample`, but returns an accepted draft int64 [M], sampled from q [M, C] of candidates."""
    judged = draft, acceptance, candidates.contiguous(), q.contiguous()
    return _launch(logits, (temperature, top_p, top_k, min_p, uniform), judged, q.shape[1])


def _launch(logits: Tensor, how: tuple[Tensor, ...], judged: tuple[Tensor | None, ...], count: int) -> Tensor:
    m, vocab = logits.shape
    if vocab > MAX_VOCAB:
        raise ValueError(f"the vocabulary has {vocab} tokens; sampling supports at most {MAX_VOCAB}")
    block = min(BLOCK, next_power_of_two(vocab))
    room = min(CANDIDATES, next_power_of_two(vocab))
    values = torch.empty(m, room, dtype=torch.float32, device=logits.device)
    ids = torch.empty(m, room, dtype=torch.int32, device=logits.device)
    out = torch.empty(m, dtype=torch.int64, device=logits.device)
    _sample_kernel[(m,)](
        logits.contiguous(), *how, values, ids, out, vocab, *judged, count,
        BLOCK=block, TILE=min(TILE, block), TILES=next_power_of_two(-(-vocab // block)), PIVOTS=PIVOTS,
        GROUPS=min(GROUPS, block, room), ROOM=room, C_BLOCK=next_power_of_two(count) if count else 0,
        num_warps=WARPS, **pdl(logits),
    )  # fmt: skip
    return out
