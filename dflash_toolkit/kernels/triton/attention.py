"""Attention of a block over its request's pages, split along the keys, in Triton.

One kernel serves causal verification and non-causal drafting. The query heads of a KV head and the slots of the block
form tiles of 64 rows, whatever the block length, and keys are cut at fixed positions; so a row's result depends on
its own query, its position and the cache, not on the block length, a batch of up to 8 or the other rows, bit for bit.
Requests may differ in their number of rows (`TreeRows`): the rows are a chain of draft tokens or a tree. The keys of a
tree are in the order of its nodes, and a row sees its ancestors. Masked keys contribute exact zeros, and a split that
a row does not reach merges as an exact no-op; so keys before a window are not read. Sinks are added to the sum at the
end. `hopper/attention.py` can replace the first kernel.
"""

# mypy: disable-error-code="no-untyped-def"
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..features import features_of
from ..launch import LOG2_E, LONGEST_SPLIT, MOST_FAR, far_keys, keys_are_split, multiprocessors, padded, pdl
from ..paged import PagedKV
from ..tree import TreeRows
from .merge import (
    MARGIN,
    MERGE_SPLITS,
    MIDDLE,
    _end,
    _in_window,
    _merge_kernel,
    _split_start,
    _window_start,
    _with_sink,
    merge_far,
    merge_rows,
    merge_warps,
)
from .pages import load_heads, stored_heads
from .tile import SHARED_BYTES

ROWS = 64  # rows of a tile: the smallest number that the Hopper instructions accept
# keys loaded at a time (or a page if that is shorter: a load touches one page only) and loads ahead, the best first
CUTS = ((64, 3), (64, 2), (32, 2))
LEAST_CUTS = ((16, 2), (16, 1))  # for wide heads
# the first splits are short, so that a short context fills the device; later ones long, so that merging stays cheap;
# in between, MIDDLE short ones long
SHORT, SHORT_SPLITS, LONG = tl.constexpr(128), tl.constexpr(16), tl.constexpr(1024)
FEW = 4  # splits of every tile; if these fill the device, a program computes two


def shared_bytes(width: int, itemsize: int, keys: int, stages: int) -> int:
    """Returns the maximum shared memory of the first kernel, as compiled by Triton 3.7 for sm_80 to sm_120."""
    head = padded(width)
    loads, queries = 2 * keys * head * itemsize, ROWS * head * itemsize
    if itemsize == 2 or stages == 1:
        return stages * loads + queries + 576  # the last for depths, of trees with a window, and barriers of sm_100
    return (stages - 1) * loads + queries + ROWS * keys * itemsize + 1024


def cut_for(width: int, itemsize: int, shared: int) -> tuple[int, int]:
    """Returns keys at a time and loads ahead for heads of `width`, on a GPU with `shared` bytes of shared memory.

    With less than SHARED_BYTES, two programs share a multiprocessor if one of CUTS allows it, see `fitted`.

    Raises:
        ValueError: no choice fits.
    """
    half = shared // 2 if shared < SHARED_BYTES else 0  # less is stored without asynchronous products
    for cuts, room in ((CUTS, half), (CUTS + LEAST_CUTS, shared)):
        for cut in cuts:
            if shared_bytes(width, itemsize, *cut) <= room:
                return cut
    least = min(shared_bytes(width, itemsize, *cut) for cut in LEAST_CUTS)
    raise ValueError(f"{-(-least // 1024)} KiB of shared memory for a thread block, and it has {shared >> 10}")


def warps_for(head: int) -> int:
    """Returns the warps of a program; with four, heads of 256 would spill registers."""
    return 4 if head <= 128 else 8


def scale_of(kv: PagedKV) -> tuple[float, float | None]:
    """Returns the factor of scores in powers of two, and their cap; with a cap the factor is that of the exponent."""
    scale = kv.score_factor * LOG2_E
    return (scale, None) if not kv.soft_cap else (2 * scale / kv.soft_cap, kv.soft_cap * LOG2_E)


def splits_of(reach: int) -> int:
    """Returns the number of splits that cover `reach` positions."""
    short, count, long = SHORT.value, SHORT_SPLITS.value, LONG.value
    found, start = 0, 0
    for keys, most in ((short, count), (MIDDLE.value * short, count // MIDDLE.value), (long, reach)):
        found += min(max(0, -(-(reach - start) // keys)), most)
        start += keys * most
    return found


@triton.jit
def _scores(b_q, b_k, scale, cap):
    """Returns the scores of keys, in powers of two, below `cap` if it is not None."""
    b_s = tl.dot(b_q, b_k, input_precision="ieee") * scale  # ieee: keeps fp32 from becoming tf32
    if cap is not None:
        b_s = cap - 2.0 * cap / (tl.exp2(b_s) + 1.0)  # cap * tanh
    return b_s


@triton.jit
def _split_state(
    b_q, o_pos, tree, cache_p, scales_p, p_pages, i_g, start, stop, end, scale, cap, slots, G, H,
    HEAD: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, PAGE: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, EVEN_H: tl.constexpr,
):  # fmt: skip
    """Returns the softmax state of a tile's rows over the keys start..stop; keys from `end` on do not exist.

    tree: None, or for rows of a tree `ancestors`, its request's length, and a pointer to the depths of its places.
    """
    b_m = tl.full([ROWS], -float("inf"), dtype=tl.float32)
    b_l = tl.zeros([ROWS], dtype=tl.float32)
    b_acc = tl.zeros([ROWS, HEAD], dtype=tl.float32)
    page = tl.load(p_pages + start // PAGE)
    for first in range(start, tl.minimum(stop, end), KEYS):
        o_t = first + tl.arange(0, KEYS)
        m_t = o_t < end
        slot = page.to(tl.int64) * PAGE + first % PAGE
        page = tl.load(p_pages + (first + KEYS) // PAGE, mask=first + KEYS < end, other=0)  # for the next iteration
        b_k, b_v = load_heads(cache_p, scales_p, slot + tl.arange(0, KEYS), m_t, i_g, slots, G, H, HEAD, EVEN_H)
        b_s = _scores(b_q, b_k, scale, cap)
        distance = o_pos[:, None] - o_t[None, :]
        visible = m_t[None, :]
        if tree is not None:
            b_ancestors, length, p_depths = tree
            o_place = o_t - length
            bits = tl.minimum(tl.maximum(o_place - 1, 0), 63).to(tl.int64)  # the anchor's place has no node
            visible = visible & ((o_place <= 0)[None, :] | ((b_ancestors[:, None] >> bits[None, :]) & 1 != 0))
            if WINDOW != 0:
                depth = tl.load(p_depths + o_place, mask=m_t & (o_place > 0), other=0)
                distance = o_pos[:, None] - tl.where(o_place > 0, length + depth, o_t)[None, :]
        if CAUSAL:
            visible = visible & (distance >= 0)
        if WINDOW != 0:
            visible = visible & _in_window(distance, o_pos[:, None], WINDOW)
        b_s = tl.where(visible, b_s, -float("inf"))
        top = tl.maximum(b_m, tl.max(b_s, axis=1))
        base = tl.where(top == -float("inf"), 0.0, top)
        b_p = tl.exp2(b_s - base[:, None])
        old = tl.exp2(b_m - base)
        b_l = b_l * old + tl.sum(b_p, axis=1)
        b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc * old[:, None], input_precision="ieee")
        b_m = top
    return b_m, b_l, b_acc


@triton.jit
def _pad(
    out_p, m_p, l_p, acc_p, first, M, i_r, i_g, G, H, GROUP, TILES, SPLITS,
    HEAD: tl.constexpr, ROWS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Fills the rows first..M - 1, which are padding: zeros, or (not WHOLE) the state of a value of zero."""
    o_h = tl.arange(0, HEAD)
    heads = (M - first) * GROUP
    for at in range(i_r * ROWS, heads, TILES * ROWS):
        o_row = at + tl.arange(0, ROWS)
        m_row = o_row < heads
        o_x = (first + o_row // GROUP).to(tl.int64) * G + i_g
        if WHOLE:
            o_out = (o_x * GROUP + o_row % GROUP)[:, None] * H + o_h[None, :]
            zeros = tl.zeros([ROWS, HEAD], dtype=out_p.dtype.element_ty)
            tl.store(out_p + o_out, zeros, mask=m_row[:, None] & (o_h < H)[None, :])
        else:
            o_part = o_x * SPLITS * GROUP + o_row % GROUP
            tl.store(m_p + o_part, tl.zeros([ROWS], dtype=tl.float32), mask=m_row)
            tl.store(l_p + o_part, tl.full([ROWS], 1.0, dtype=tl.float32), mask=m_row)
            zeros = tl.zeros([ROWS, HEAD], dtype=tl.float32)
            tl.store(acc_p + o_part[:, None] * HEAD + o_h[None, :], zeros, mask=m_row[:, None])


@triton.jit(do_not_specialize=["S", "TILES", "SPLITS"])
def _attention_kernel(
    q_p, cache_p, scales_p, lengths_p, counts_p, starts_p, depths_p, ancestors_p, pages_p, sinks_p,
    out_p, m_p, l_p, acc_p, S, G, H, GROUP, TILES, width, slots, scale, cap, SPLITS,
    HEAD: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, PAGE: tl.constexpr,
    SHORT: tl.constexpr, SHORT_SPLITS: tl.constexpr, LONG: tl.constexpr, WHOLE: tl.constexpr, RAGGED: tl.constexpr,
    TREE: tl.constexpr, COUNTED: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, EVEN_H: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Computes a tile over all its keys if WHOLE, else over split i_s, for `_merge_kernel`.

    SHORT == LONG: a request with one split, which ends MARGIN before the first cut, is stored like WHOLE.
    RAGGED: request b has the rows starts[b] to starts[b + 1] - 1, of S together. Padding follows, which the programs of
    one more request fill. The state of head h of KV head g of row r over split s is at
    ((r * G + g) * SPLITS + s) * GROUP + h. TREE: the rows are those of trees.
    """
    i_x, i_s = tl.program_id(0), tl.program_id(1)  # i_x = (request * G + KV head) * TILES + tile
    i_r, i_g = i_x % TILES, (i_x // TILES) % G
    i_b = (i_x // TILES // G).to(tl.int64)
    o_row = i_r * ROWS + tl.arange(0, ROWS)  # slot-major: the heads of a slot are adjacent
    o_slot, o_head = o_row // GROUP, i_g * GROUP + o_row % GROUP
    o_h = tl.arange(0, HEAD)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if RAGGED:
        first = tl.load(starts_p + i_b)
        if (i_b + 1) * G * TILES == tl.num_programs(0):
            if i_s == 0:
                _pad(
                    out_p, m_p, l_p, acc_p, first, S, i_r, i_g, G, H, GROUP, TILES, SPLITS, HEAD, ROWS,
                    WHOLE or SHORT == LONG,
                )  # fmt: skip
            return
        rows = tl.load(starts_p + i_b + 1) - first
    else:
        first, rows = i_b * S, S
    m_row = o_slot < rows
    length = tl.load(lengths_p + i_b)
    count = rows
    if COUNTED:
        count = tl.load(counts_p + i_b)
    end = _end(length, count, i_r, GROUP, ROWS, CAUSAL or TREE)  # ancestors come before a node
    start = _split_start(i_s, SHORT, SHORT_SPLITS, LONG)
    if WINDOW != 0:
        lowest = length
        if not (TREE or (SHORT == LONG and not WHOLE)):  # `_merge_far_kernel` expects the window of the first row
            lowest = length + tl.minimum(i_r * ROWS // GROUP, count - 1)
        start = tl.maximum(start, _window_start(lowest, WINDOW, KEYS))
        if not WHOLE:
            end = tl.minimum(end, _split_start(i_s + 1, SHORT, SHORT_SPLITS, LONG))
    if (start >= end) | (i_r * ROWS >= rows * GROUP):
        return
    o_m = first.to(tl.int64) + o_slot
    o_out = (o_m * G * GROUP + o_head)[:, None] * H + o_h[None, :]
    m_out = m_row[:, None] & (o_h < H)[None, :]
    b_q = tl.load(q_p + o_out, mask=m_out, other=0.0)
    o_pos = length + o_slot
    if WINDOW != 0 and COUNTED:
        o_pos = length + tl.minimum(o_slot, count - 1)  # padding sees what the last token sees
    if TREE:
        o_pos = length + tl.load(depths_p + o_m, mask=m_row, other=0)
        tree = (tl.load(ancestors_p + o_m, mask=m_row, other=0), length, depths_p + first)
    else:
        tree = None
    p_pages = pages_p + i_b * width
    if WHOLE:
        b_m, b_l, b_acc = _split_state(
            b_q, o_pos, tree, cache_p, scales_p, p_pages, i_g, start if WINDOW != 0 else 0, end, end, scale, cap,
            slots, G, H, HEAD, ROWS, KEYS, PAGE, CAUSAL, WINDOW, EVEN_H,
        )  # fmt: skip
        b_l = _with_sink(b_l, b_m, sinks_p, o_head)
        b_out = b_acc / tl.where(m_row, b_l, 1.0)[:, None]
        tl.store(out_p + o_out, b_out.to(out_p.dtype.element_ty), mask=m_out)
    else:
        b_m, b_l, b_acc = _split_state(
            b_q, o_pos, tree, cache_p, scales_p, p_pages, i_g, start, _split_start(i_s + 1, SHORT, SHORT_SPLITS, LONG),
            end, scale, cap, slots, G, H, HEAD, ROWS, KEYS, PAGE, CAUSAL, WINDOW, EVEN_H,
        )  # fmt: skip
        if SHORT == LONG:  # a request with one split is stored at once
            m_one = m_row & (length + MARGIN <= LONG)
            b_out = b_acc / tl.where(m_one, _with_sink(b_l, b_m, sinks_p, o_head), 1.0)[:, None]
            tl.store(out_p + o_out, b_out.to(out_p.dtype.element_ty), mask=m_out & m_one[:, None])
            m_row = m_row & (length + MARGIN > LONG)
        if RAGGED:
            o_part = ((o_m * G + i_g) * SPLITS + i_s) * GROUP + o_row % GROUP
        else:
            o_part = (i_x * SPLITS + i_s).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        tl.store(m_p + o_part, b_m, mask=m_row)
        tl.store(l_p + o_part, b_l, mask=m_row)
        tl.store(acc_p + o_part[:, None] * HEAD + o_h[None, :], b_acc, mask=m_row[:, None])


def block_attention(
    q: Tensor,
    kv: PagedKV,
    *,
    causal: bool,
    counts: Tensor | None = None,
    hopper: Callable[..., None] | None = None,
) -> Tensor:
    """Returns the attention [M, N H] of q [M, N, H] over the pages in cache [2, slots, G, H]; see the reference.

    `hopper` replaces the first kernel. On a GPU, `lengths`, `counts`, `page_table` and the context in the pages are
    read while the previous launch still runs.
    """
    return _attention(q, kv, causal, *_form(q, kv, len(q)), counts, hopper)


def chain_attention(
    q: Tensor,
    kv: PagedKV,
    rows: TreeRows,
    longest: int,
    hopper: Callable[..., None] | None = None,
) -> Tensor:
    """Returns the attention [M, N H] of queries [M, N, H] of chains of up to `longest` rows; see the reference.

    On a GPU, `rows` and the inputs that `block_attention` reads early are read while the previous launch runs.
    """
    ragged = rows, min(longest, len(q) - len(kv.lengths) + 1)
    # packed prompts are long
    return _attention(q, kv, True, *_form(q, kv, longest * len(kv.lengths)), None, hopper, ragged)


def masked_attention(
    q: Tensor,
    kv: PagedKV,
    rows: TreeRows,
    longest: int,
    hopper: Callable[..., None] | None = None,
) -> Tensor:
    """Returns the attention [M, N H] of queries [M, N, H] of trees of up to `longest` rows; see the reference.

    One pass reads the keys in place, with a mask of ancestors, so the order of a row's sum differs from plain decoding.
    Rows do not depend on other requests.
    """
    ragged = rows, min(longest, len(q) - len(kv.lengths) + 1)
    return _attention(q, kv, False, *_form(q, kv, longest), None, hopper, ragged)


def _form(q: Tensor, kv: PagedKV, rows: int) -> tuple[bool, bool, int]:
    """Returns `whole`, `pairs` and `far` of attention of up to `rows` rows."""
    batch = len(kv.lengths)
    far = far_keys(batch, kv.table.shape[1] * kv.size, q.shape[2]) if rows <= LONGEST_SPLIT * batch else 0
    whole = not far and not keys_are_split(rows, batch)
    return whole, FEW * _tiles(q, kv) > multiprocessors(q.device.index), far


def _tiles(q: Tensor, kv: PagedKV) -> int:
    """Returns the number of tiles: each has up to ROWS queries of a request that share a KV head."""
    batch, groups = len(kv.lengths), kv.cache.shape[2]
    return batch * groups * -(-len(q) * q.shape[1] // (batch * groups * ROWS))


def _attention(
    q: Tensor,
    kv: PagedKV,
    causal: bool,
    whole: bool,
    pairs: bool = False,
    far: int = 0,
    counts: Tensor | None = None,
    hopper: Callable[..., None] | None = None,
    ragged: tuple[TreeRows, int] | None = None,
) -> Tensor:
    """Launches attention. `whole`: one program computes all keys of a tile; else one per split, and a kernel merges.

    `pairs`, with `hopper` and unless `whole` or `far`: a program merges two short splits before it stores them, with
    the same bits. `far`: if not 0, all splits have so many keys. `ragged`: the rows, and the maximum of a request;
    unless `causal` they are rows of trees, and `whole` or `far`.
    """
    (m, heads, width), (_, slots, groups, _) = q.shape, kv.cache.shape
    lengths, batch, group = kv.lengths, len(kv.lengths), heads // groups
    rows, block = ragged or (None, m // batch)
    tiles = -(-block * group // ROWS)
    programs = (batch if rows is None else batch + 1) * groups * tiles
    reach = kv.table.shape[1] * kv.size
    splits = 1 if whole else -(-reach // far) if far else splits_of(reach)
    head = padded(width)
    out = torch.empty(m, heads * width, dtype=q.dtype, device=q.device)

    def scratch(*shape: int) -> Tensor:
        return out if whole else torch.empty(shape, dtype=torch.float32, device=q.device)

    parts = (programs, splits, ROWS) if rows is None else (m * groups, splits, group)
    b_m, b_l, b_acc = scratch(*parts), scratch(*parts), scratch(*parts, head)
    cuts = {"SHORT": SHORT.value, "SHORT_SPLITS": SHORT_SPLITS.value, "LONG": LONG.value}
    if far:
        cuts = {"SHORT": far, "SHORT_SPLITS": 2 * MOST_FAR, "LONG": far}  # no middle ones
    shared = {"HEAD": head, **cuts}
    given = lengths if counts is None else counts
    of_rows = (lengths,) * 3 if rows is None else (rows.starts, rows.depths, rows.ancestors)
    pairs = pairs and hopper is not None and not whole and not far
    if hopper is not None:
        hopper(
            q, kv, out, (b_m, b_l, b_acc), splits, cuts,
            causal=causal, whole=whole, pairs=pairs, counts=counts, ragged=ragged,
        )  # fmt: skip
    else:
        keys, stages = cut_for(width, q.element_size(), features_of(q.device).shared_memory)
        _attention_kernel[(programs, splits)](
            q, *stored_heads(q, kv), lengths, given, *of_rows, kv.table, kv.sinks, out, b_m, b_l, b_acc,
            block if rows is None else m, groups, width, group, tiles, kv.table.stride(0), slots,
            *scale_of(kv), splits,
            ROWS=ROWS, KEYS=min(keys, kv.size), PAGE=kv.size, WHOLE=whole, RAGGED=rows is not None,
            TREE=rows is not None and not causal, CAUSAL=causal, WINDOW=kv.window, EVEN_H=head == width,
            COUNTED=counts is not None, num_warps=warps_for(head), num_stages=stages, **shared, **pdl(q),
        )  # fmt: skip
    if whole:
        return out
    if far:
        merge_far(
            (b_m, b_l, b_acc), kv, out, far, rows=block, causal=causal, counts=counts, ragged=rows
        )  # fmt: skip
        return out
    if rows is not None:
        return merge_rows((b_m, b_l, b_acc), kv, rows, out, pairs, cuts)
    _merge_kernel[(programs, min(ROWS, block * group))](
        b_m, b_l, b_acc, lengths, given, lengths, kv.sinks, out,
        block, groups, width, group, tiles, splits, int(pairs),
        ROWS=ROWS, MERGE_SPLITS=MERGE_SPLITS, COUNTED=counts is not None, CAUSAL=causal, PATHS=0,
        WINDOW=kv.window, num_warps=merge_warps(head), **shared, **pdl(q),
    )  # fmt: skip
    return out
