"""The splits of attention along the keys, and the kernels that merge their states."""

# mypy: disable-error-code="no-untyped-def"
import triton
import triton.language as tl
from torch import Tensor

from ..launch import next_power_of_two, pdl
from ..paged import PagedKV
from ..tree import TreeRows
from .pdl import start_next, wait_for_previous

MARGIN = tl.constexpr(128)  # a request has one split if its context ends so many positions before the first cut
MIDDLE = tl.constexpr(4)  # short splits that a middle one is as long as; they cover as many keys as the short ones
MERGE_SPLITS = 16  # splits that are merged at a time


@triton.jit
def _split_start(i_s, SHORT: tl.constexpr, SHORT_SPLITS: tl.constexpr, LONG: tl.constexpr):
    short = tl.minimum(i_s, SHORT_SPLITS)
    middle = tl.minimum(i_s - short, SHORT_SPLITS // MIDDLE)
    return (short + middle * MIDDLE) * SHORT + (i_s - short - middle) * LONG


@triton.jit
def _split_of(position, SHORT: tl.constexpr, SHORT_SPLITS: tl.constexpr, LONG: tl.constexpr):
    """Returns the split of a position."""
    count: tl.constexpr = SHORT_SPLITS // MIDDLE
    short = tl.minimum(position // SHORT, SHORT_SPLITS)
    past = tl.maximum(position - SHORT * SHORT_SPLITS, 0)
    middle = tl.minimum(past // (MIDDLE * SHORT), count)
    return short + middle + tl.maximum(past - count * MIDDLE * SHORT, 0) // LONG


@triton.jit
def _end(length, count, i_r, GROUP, ROWS: tl.constexpr, CAUSAL: tl.constexpr):
    """Returns the end of the keys that any row of the tile may see; `count`: number of rows that are tokens."""
    end = length + count
    if CAUSAL:
        end = tl.minimum(end, length + ((i_r + 1) * ROWS - 1) // GROUP + 1)
    return end


@triton.jit
def _window_start(position, WINDOW: tl.constexpr, KEYS: tl.constexpr):
    """Returns the first of KEYS keys that contain the start of the window, or chunk, of a row at this position."""
    begin = position // -WINDOW * -WINDOW if WINDOW < 0 else tl.maximum(position - (WINDOW - 1), 0)
    return begin // KEYS * KEYS


@triton.jit
def _in_window(distance, position, WINDOW: tl.constexpr):
    """Returns whether keys at distances from rows at positions are in their window, or chunk; see `PagedKV`."""
    return distance <= position % -WINDOW if WINDOW < 0 else tl.abs(distance) < WINDOW


@triton.jit
def _with_sink(b_l, b_m, sinks_p, head):
    """Adds the sink of each head to the sums of rows with the maxima b_m, see `PagedKV`."""
    if sinks_p is not None:
        sink = tl.load(sinks_p + head).to(tl.float32) * 1.4426950408889634  # LOG2_E, see `_pairs` in rope.py
        b_l += tl.exp2(sink - b_m)
    return b_l


@triton.jit
def _load_state(m_p, l_p, acc_p, o_part, o_h, m_part, HEAD: tl.constexpr):
    """Loads the state of some splits; a missing one is loaded as the neutral state."""
    part_m = tl.load(m_p + o_part, mask=m_part, other=-float("inf"))
    part_l = tl.load(l_p + o_part, mask=m_part, other=0.0)
    return part_m, part_l, tl.load(acc_p + o_part[:, None] * HEAD + o_h[None, :], mask=m_part[:, None], other=0.0)


@triton.jit(do_not_specialize=["S", "TILES", "SPLITS", "paired"])
def _merge_kernel(
    m_p, l_p, acc_p, lengths_p, counts_p, depths_p, sinks_p, out_p, S, G, H, GROUP, TILES, SPLITS, paired,
    HEAD: tl.constexpr, ROWS: tl.constexpr, SHORT: tl.constexpr, SHORT_SPLITS: tl.constexpr, LONG: tl.constexpr,
    MERGE_SPLITS: tl.constexpr, COUNTED: tl.constexpr, CAUSAL: tl.constexpr, PATHS: tl.constexpr, WINDOW: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Merges the splits of one row of a tile, first in pairs, then MERGE_SPLITS at a time.

    paired: the first of two splits already has the state of both. With PATHS, a tile's keys, only if both end before
    the last whole tile of the context, which is `depths` before the row.
    """
    i_x, i_row = tl.program_id(0), tl.program_id(1)
    i_r, i_g = i_x % TILES, (i_x // TILES) % G
    i_b = (i_x // TILES // G).to(tl.int64)
    slot = (i_r * ROWS + i_row) // GROUP
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    o_h, o_s = tl.arange(0, HEAD), 2 * tl.arange(0, MERGE_SPLITS // 2)
    count = S
    if COUNTED:  # this and the lengths are older than the pass: see `pdl`
        count = tl.load(counts_p + i_b)
    length = tl.load(lengths_p + i_b)
    end = _end(length, count, i_r, GROUP, ROWS, CAUSAL)
    if PATHS > 0:
        joined = (end - 1 - tl.load(depths_p + i_b)) // PATHS * PATHS
    if PDL:
        tl.extra.cuda.gdc_wait()
    if slot >= S:
        return
    top = -float("inf")
    b_l = 0.0
    b_acc = tl.zeros([HEAD], dtype=tl.float32)
    first = 0
    if WINDOW != 0:  # the splits before the window have no states
        begin = _window_start(length + tl.minimum(slot, count - 1), WINDOW, 1)
        first = _split_of(begin, SHORT, SHORT_SPLITS, LONG) // MERGE_SPLITS * MERGE_SPLITS
    while _split_start(first, SHORT, SHORT_SPLITS, LONG) < end:
        m_0 = _split_start(first + o_s, SHORT, SHORT_SPLITS, LONG) < end
        m_1 = _split_start(first + o_s + 1, SHORT, SHORT_SPLITS, LONG) < end
        if WINDOW != 0:
            stop_0 = _split_start(first + o_s + 1, SHORT, SHORT_SPLITS, LONG)
            stop_1 = _split_start(first + o_s + 2, SHORT, SHORT_SPLITS, LONG)
            m_1 = m_1 & (stop_1 > begin)
        if paired:
            apart = o_s < 0
            if PATHS > 0:
                apart = _split_start(first + o_s + 2, SHORT, SHORT_SPLITS, LONG) > joined
            m_1 = m_1 & apart
            if WINDOW != 0:
                stop_0 = tl.where(apart, stop_0, stop_1)
        if WINDOW != 0:
            m_0 = m_0 & (stop_0 > begin)
        o_part = (i_x * SPLITS + first + o_s).to(tl.int64) * ROWS + i_row
        top_0, l_0, acc_0 = _load_state(m_p, l_p, acc_p, o_part, o_h, m_0, HEAD)
        top_1, l_1, acc_1 = _load_state(m_p, l_p, acc_p, o_part + ROWS, o_h, m_1, HEAD)
        part_m = tl.maximum(top_0, top_1)
        base = tl.where(part_m == -float("inf"), 0.0, part_m)
        e_0, e_1 = tl.exp2(top_0 - base), tl.exp2(top_1 - base)
        part_l = tl.fma(l_1, e_1, l_0 * e_0)  # written out, so that a program with both splits rounds the same way
        part_acc = tl.fma(acc_1, tl.broadcast_to(e_1[:, None], acc_1.shape), acc_0 * e_0[:, None])
        higher = tl.maximum(top, tl.max(part_m, axis=0))
        base = tl.where(higher == -float("inf"), 0.0, higher)
        old, new = tl.exp2(top - base), tl.exp2(part_m - base)
        b_l = b_l * old + tl.sum(part_l * new, axis=0)
        b_acc = b_acc * old + tl.sum(part_acc * new[:, None], axis=0)
        top = higher
        first += MERGE_SPLITS
    head = i_g * GROUP + (i_r * ROWS + i_row) % GROUP
    b_l = _with_sink(b_l, top, sinks_p, head)
    p_out = out_p + ((i_b * S + slot) * G * GROUP + head) * H + o_h
    tl.store(p_out, (b_acc / b_l).to(out_p.dtype.element_ty), mask=o_h < H)


def merge_warps(head: int) -> int:
    """Returns the warps of a program of the merge; with one, heads of 512 would spill registers."""
    return 1 if head <= 256 else 4


def merge_rows(
    states: tuple[Tensor, Tensor, Tensor],
    kv: PagedKV,
    rows: TreeRows,
    out: Tensor,
    pairs: bool,
    cuts: dict[str, int],
    paths: int = 0,
) -> Tensor:
    """Merges the splits of every row, as of a request of one token, into `out` [M, N H].

    Args:
        states: m and l [M * G, splits, N / G], acc [M * G, splits, N / G, padded H].
        paths: as `PATHS` of the kernel.
    """
    (programs, splits, group, head), at, width = states[2].shape, rows.positions, kv.cache.shape[3]
    _merge_kernel[(programs, group)](
        *states, at, at, rows.depths, kv.sinks, out, 1, programs // len(out), width, group, 1, splits, int(pairs),
        HEAD=head, ROWS=group, MERGE_SPLITS=MERGE_SPLITS, COUNTED=False, CAUSAL=False, PATHS=paths,
        WINDOW=kv.window, num_warps=merge_warps(head), **cuts, **pdl(out),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["S", "TILES", "SPLITS"])
def _merge_far_kernel(
    m_p, l_p, acc_p, lengths_p, counts_p, starts_p, requests_p, sinks_p, out_p, S, G, H, GROUP, TILES, SPLITS,
    HEAD: tl.constexpr, ROWS: tl.constexpr, FAR: tl.constexpr, MOST: tl.constexpr, RAGGED: tl.constexpr,
    COUNTED: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Merges the splits of a row and a KV head, at most MOST. Rows with one split are already in `out`."""
    i_m, i_g = (tl.program_id(0) // G).to(tl.int64), tl.program_id(0) % G
    o_s, o_h = tl.arange(0, MOST), tl.arange(0, HEAD)
    wait_for_previous(PDL)
    start_next(PDL)
    if RAGGED:
        request = tl.load(requests_p + i_m)
        if request < 0:  # padding
            return
        place = i_m - tl.load(starts_p + request)
    else:
        request, place = i_m // S, i_m % S
    length = tl.load(lengths_p + request)
    if length + MARGIN <= FAR:
        return
    end = length + S
    if RAGGED or CAUSAL:
        end = length + place + 1  # ancestors come before a node
    if COUNTED:
        end = tl.minimum(end, length + tl.load(counts_p + request))
    m_s = o_s * FAR < end
    if WINDOW != 0:  # that of the request's first row, as rows of trees have other positions
        m_s = m_s & ((o_s + 1) * FAR > _window_start(length, WINDOW, 1))
    for head in range(0, GROUP):
        if RAGGED:
            o_part = ((i_m * G + i_g) * SPLITS + o_s) * GROUP + head
        else:
            row = place * GROUP + head
            o_part = (((request * G + i_g) * TILES + row // ROWS) * SPLITS + o_s) * ROWS + row % ROWS
        b_m = tl.load(m_p + o_part, mask=m_s, other=-float("inf"))
        b_l = tl.load(l_p + o_part, mask=m_s, other=0.0)
        b_acc = tl.load(acc_p + o_part[:, None] * HEAD + o_h[None, :], mask=m_s[:, None], other=0.0)
        top = tl.max(b_m, axis=0)
        b_e = tl.exp2(b_m - tl.where(top == -float("inf"), 0.0, top))
        b_out = tl.sum(b_acc * b_e[:, None], axis=0)
        b_out = b_out / _with_sink(tl.sum(b_l * b_e, axis=0), top, sinks_p, i_g * GROUP + head)
        p_out = out_p + ((i_m * G + i_g) * GROUP + head) * H + o_h
        tl.store(p_out, b_out.to(out_p.dtype.element_ty), mask=o_h < H)


def merge_far(
    states: tuple[Tensor, Tensor, Tensor],
    kv: PagedKV,
    out: Tensor,
    far: int,
    *,
    rows: int,
    causal: bool,
    counts: Tensor | None,
    ragged: TreeRows | None,
) -> None:
    """Merges splits of `far` keys into the rows of `out` [M, N H] that have several.

    Args:
        states: m, l and acc as `attention.py` stores them.
        rows: of a request, and the rows of a tile as `ROWS` of its states, unless `ragged`.
    """
    (_, splits, size, head), (_, _, groups, width) = states[2].shape, kv.cache.shape
    group = out.shape[1] // (groups * width)
    given = kv.lengths
    starts, requests = (given, given) if ragged is None else (ragged.starts, ragged.requests)
    _merge_far_kernel[(len(out) * groups,)](
        *states, given, given if counts is None else counts, starts, requests, kv.sinks, out,
        rows, groups, width, group, -(-rows * group // size), splits,
        HEAD=head, ROWS=size, FAR=far, MOST=max(2, next_power_of_two(splits)), RAGGED=ragged is not None,
        COUNTED=counts is not None, CAUSAL=causal, WINDOW=kv.window, num_warps=1, **pdl(out),
    )  # fmt: skip
