"""Attention of the rows of a few requests' draft trees over their pages, in Triton.

The context is read for up to 64 queries of a request at once, as for a block (`attention.py`), up to the last whole
tile of keys. After it, rows see different keys, so every row is computed alone, over the rest of the context and the
nodes on its path, each at the place in a tile that its position determines. So a row has the same tiles, splits, order
and bits as the same token in a plain step. For more than 8 requests, which do not need equal bits,
`attention.masked_attention` is faster.
`hopper/tree_attention.py` can replace both kernels.
"""

# mypy: disable-error-code="no-untyped-def"
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..features import features_of
from ..launch import keys_are_split, multiprocessors, padded, pdl
from ..paged import PagedKV
from ..tree import TreeRows
from . import attention
from .attention import _scores, _split_state
from .merge import _in_window, _split_of, _split_start, _window_start, merge_rows
from .pages import load_heads, stored_heads


@triton.jit(do_not_specialize=["TILES", "SPLITS"])
def _prefix_kernel(
    q_p, cache_p, scales_p, lengths_p, starts_p, depths_p, pages_p, m_p, l_p, acc_p,
    G, H, GROUP, TILES, width, slots, scale, cap, SPLITS,
    HEAD: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, PAGE: tl.constexpr,
    SHORT: tl.constexpr, SHORT_SPLITS: tl.constexpr, LONG: tl.constexpr,
    WINDOW: tl.constexpr, EVEN_H: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Computes the states of a tile of a request's queries over split i_s of the context's whole tiles of keys.

    The state of head h of group g of row r over split s is at ((r * G + g) * SPLITS + s) * GROUP + h.
    """
    i_x, i_s = tl.program_id(0), tl.program_id(1)  # i_x = (request * G + KV head) * TILES + tile
    i_r, i_g = i_x % TILES, (i_x // TILES) % G
    i_b = (i_x // TILES // G).to(tl.int64)
    o_row = i_r * ROWS + tl.arange(0, ROWS)  # the heads of a row are adjacent
    o_h = tl.arange(0, HEAD)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    length = tl.load(lengths_p + i_b)
    first = tl.load(starts_p + i_b)
    count = tl.load(starts_p + i_b + 1) - first
    end = length // KEYS * KEYS
    start = _split_start(i_s, SHORT, SHORT_SPLITS, LONG)
    if WINDOW != 0:
        start = tl.maximum(start, _window_start(length, WINDOW, KEYS))
        end = tl.minimum(end, _split_start(i_s + 1, SHORT, SHORT_SPLITS, LONG))
    if (start >= end) | (i_r * ROWS >= count * GROUP):
        return
    m_row = o_row < count * GROUP
    o_m = first.to(tl.int64) + o_row // GROUP
    b_q = tl.load(
        q_p + ((o_m * G + i_g) * GROUP + o_row % GROUP)[:, None] * H + o_h[None, :],
        mask=m_row[:, None] & (o_h < H)[None, :], other=0.0,
    )  # fmt: skip
    o_pos = length + tl.load(depths_p + o_m, mask=m_row, other=0)
    b_m, b_l, b_acc = _split_state(
        b_q, o_pos, None, cache_p, scales_p, pages_p + i_b * width, i_g, start,
        _split_start(i_s + 1, SHORT, SHORT_SPLITS, LONG), end, scale, cap, slots, G, H,
        HEAD, ROWS, KEYS, PAGE, False, WINDOW, EVEN_H,
    )  # fmt: skip
    o_part = ((o_m * G + i_g) * SPLITS + i_s) * GROUP + o_row % GROUP
    tl.store(m_p + o_part, b_m, mask=m_row)
    tl.store(l_p + o_part, b_l, mask=m_row)
    tl.store(acc_p + o_part[:, None] * HEAD + o_h[None, :], b_acc, mask=m_row[:, None])


@triton.jit(do_not_specialize=["SPLITS", "stride_paths", "P"])
def _tail_kernel(
    q_p, cache_p, scales_p, lengths_p, starts_p, requests_p, depths_p, paths_p, pages_p, m_p, l_p, acc_p,
    G, H, GROUP, width, slots, scale, cap, SPLITS, stride_paths, P,
    HEAD: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, PAGE: tl.constexpr,
    SHORT: tl.constexpr, SHORT_SPLITS: tl.constexpr, LONG: tl.constexpr,
    WINDOW: tl.constexpr, EVEN_H: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Computes the rest of one row: its states in the split where the whole tiles end, and in later ones.

    Padding gets the state of a value of zero.
    """
    i_x, i_t = tl.program_id(0), tl.program_id(1)  # i_x = row * G + KV head
    i_m, i_g = (i_x // G).to(tl.int64), i_x % G
    o_row, o_h = tl.arange(0, ROWS), tl.arange(0, HEAD)  # the tile of a plain step: the heads of a row, and nothing
    m_row, m_h = o_row < GROUP, o_h < H
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    request = tl.load(requests_p + i_m)
    real = request >= 0
    i_b = tl.maximum(request, 0).to(tl.int64)
    length = tl.load(lengths_p + i_b)
    position = length + tl.load(depths_p + i_m)
    end = tl.where(real, position + 1, 0)
    first = length // KEYS * KEYS
    i_s = tl.where(real, _split_of(first, SHORT, SHORT_SPLITS, LONG) + i_t, 0)
    begin = _split_start(i_s, SHORT, SHORT_SPLITS, LONG)
    start = tl.maximum(first, begin)
    if (i_t > 0) & (start >= end):
        return
    stop = tl.minimum(_split_start(i_s + 1, SHORT, SHORT_SPLITS, LONG), end)
    o_q = (i_x.to(tl.int64) * GROUP + o_row)[:, None] * H + o_h[None, :]
    b_q = tl.load(q_p + o_q, mask=m_row[:, None] & m_h[None, :], other=0.0)
    o_part = (i_x.to(tl.int64) * SPLITS + i_s) * GROUP + o_row
    p_acc = acc_p + o_part[:, None] * HEAD + o_h[None, :]
    if WINDOW != 0:
        begin = tl.maximum(begin, _window_start(length, WINDOW, KEYS))
    m_before = m_row & real & (start > begin)
    b_m = tl.load(m_p + o_part, mask=m_before, other=-float("inf"))
    b_l = tl.load(l_p + o_part, mask=m_before, other=0.0)
    b_acc = tl.load(p_acc, mask=m_before[:, None], other=0.0)
    p_path = paths_p + i_b * stride_paths + (i_m - tl.load(starts_p + i_b)) * P
    p_pages = pages_p + i_b * width
    for at in range(start, stop, KEYS):
        o_t = at + tl.arange(0, KEYS)
        m_t = o_t < end
        o_at = tl.where(
            o_t < length, o_t, length + tl.load(p_path + (o_t - length), mask=m_t & (o_t >= length), other=0)
        )
        b_slot = tl.load(p_pages + o_at // PAGE, mask=m_t, other=0).to(tl.int64) * PAGE + o_at % PAGE
        b_k, b_v = load_heads(cache_p, scales_p, b_slot, m_t, i_g, slots, G, H, HEAD, EVEN_H)
        b_s = _scores(b_q, b_k, scale, cap)  # the same as `_split_state` from here on
        visible = m_t[None, :]
        if WINDOW != 0:
            visible = visible & _in_window(position - o_t, position, WINDOW)[None, :]
        b_s = tl.where(visible, b_s, -float("inf"))
        top = tl.maximum(b_m, tl.max(b_s, axis=1))
        base = tl.where(top == -float("inf"), 0.0, top)
        b_p = tl.exp2(b_s - base[:, None])
        old = tl.exp2(b_m - base)
        b_l = b_l * old + tl.sum(b_p, axis=1)
        b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc * old[:, None], input_precision="ieee")
        b_m = top
    b_m, b_l = tl.where(real, b_m, 0.0), tl.where(real, b_l, 1.0)
    tl.store(m_p + o_part, b_m, mask=m_row)
    tl.store(l_p + o_part, b_l, mask=m_row)
    tl.store(p_acc, b_acc, mask=m_row[:, None])


def tree_attention(
    q: Tensor,
    kv: PagedKV,
    rows: TreeRows,
    paths: Tensor,
    hopper: Callable[..., None] | None = None,
) -> Tensor:
    """Returns the attention [M, N H] of queries [M, N, H] over the pages in cache [2, slots, G, H]; see the reference.

    Supports as many requests as have split keys. `hopper` replaces the first two kernels.
    """
    (m, heads, width), (_, slots, groups, _) = q.shape, kv.cache.shape
    lengths, batch, group = kv.lengths, len(kv.lengths), heads // groups
    assert keys_are_split(batch, batch)
    longest = min(paths.shape[1], m - batch + 1)  # rows of a request
    tiles = -(-longest * group // attention.ROWS)
    cuts = {"SHORT": attention.SHORT.value, "SHORT_SPLITS": attention.SHORT_SPLITS.value, "LONG": attention.LONG.value}
    splits = attention.splits_of(kv.table.shape[1] * kv.size)
    tails = 2 + max(0, paths.shape[2] - 2) // cuts["SHORT"]  # maximum splits of a path
    head, keys = padded(width), attention.CUTS[0][0]
    # the same as `block_attention` with as many rows
    used = batch * groups * -(-m * group // (batch * attention.ROWS))
    pairs = hopper is not None and attention.FEW * used > multiprocessors(q.device.index)
    out = torch.empty(m, heads * width, dtype=q.dtype, device=q.device)
    b_m, b_l = (torch.empty(m * groups, splits, group, dtype=torch.float32, device=q.device) for _ in range(2))
    b_acc = torch.empty(m * groups, splits, group, head, dtype=torch.float32, device=q.device)
    if hopper is not None:
        hopper(
            q, kv, rows, paths, (b_m, b_l, b_acc), splits, tails, tiles, cuts, pairs=pairs,
        )  # fmt: skip
    else:
        features = features_of(q.device)
        keys, stages = attention.cut_for(width, q.element_size(), features.shared_memory)
        shared = {
            "HEAD": head, "ROWS": attention.ROWS, "KEYS": min(keys, kv.size), "PAGE": kv.size, "WINDOW": kv.window,
            "EVEN_H": head == width, "num_warps": attention.warps_for(head), **cuts, **pdl(q),
        }  # fmt: skip
        (scale, cap), stored = attention.scale_of(kv), stored_heads(q, kv)
        _prefix_kernel[(batch * groups * tiles, splits)](
            q, *stored, lengths, rows.starts, rows.depths, kv.table, b_m, b_l, b_acc,
            groups, width, group, tiles, kv.table.stride(0), slots, scale, cap, splits, num_stages=stages, **shared,
        )  # fmt: skip
        _tail_kernel[(m * groups, tails)](
            q, *stored, lengths, rows.starts, rows.requests, rows.depths, paths, kv.table, b_m, b_l, b_acc,
            groups, width, group, kv.table.stride(0), slots, scale, cap, splits, paths.stride(0), paths.stride(1),
            # without the asynchronous products of Hopper, operands that are not stored first would spill
            num_stages=1 if features.hopper else min(stages, 2), **shared,
        )  # fmt: skip
    return merge_rows((b_m, b_l, b_acc), kv, rows, out, pairs, cuts, min(keys, kv.size))
