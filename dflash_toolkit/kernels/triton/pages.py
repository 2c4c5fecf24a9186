"""Keys and values as attention reads them from the pages of a cache, in the dtype of the model or in fp8."""

# mypy: disable-error-code="no-untyped-def"
from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import padded
from ..paged import PagedKV
from .fp8 import of_bits


@triton.jit
def load_heads(cache_p, scales_p, o_slot, m_t, i_g, slots, G, H, HEAD: tl.constexpr, EVEN_H: tl.constexpr):
    """Loads the keys, transposed [HEAD, KEYS], and the values [KEYS, HEAD] of some slots and a KV head."""
    o_h = tl.arange(0, HEAD)
    p_v = slots.to(tl.int64) * G * H
    p_kv = cache_p + (o_slot * G + i_g) * H
    if EVEN_H:
        b_k = tl.load(p_kv[None, :] + o_h[:, None], mask=m_t[None, :], other=0.0)
        b_v = tl.load(p_kv[:, None] + p_v + o_h[None, :], mask=m_t[:, None], other=0.0)
    else:
        m_h = o_h < H
        b_k = tl.load(p_kv[None, :] + o_h[:, None], mask=m_t[None, :] & m_h[:, None], other=0.0)
        b_v = tl.load(p_kv[:, None] + p_v + o_h[None, :], mask=m_t[:, None] & m_h[None, :], other=0.0)
    if cache_p.dtype.element_ty.is_uint8():
        p_scale = scales_p + i_g.to(tl.int64) * slots + o_slot
        dtype = scales_p.dtype.element_ty
        b_k = of_bits(b_k, dtype) * tl.load(p_scale, mask=m_t, other=0.0)[None, :]
        b_v = of_bits(b_v, dtype) * tl.load(p_scale + slots.to(tl.int64) * G, mask=m_t, other=0.0)[:, None]
    return b_k, b_v


def stored_heads(q: Tensor, kv: PagedKV) -> tuple[Tensor, Tensor]:
    """Returns the cache and its scales as `load_heads` takes them: fp8 as uint8, and q if there are none."""
    return (kv.cache, q) if kv.scales is None else (kv.cache.view(torch.uint8), kv.scales)


@triton.jit
def _read_pages_kernel(
    cache_p, scales_p, pages_p, out_p, G, H, slots,
    HEAD: tl.constexpr, PAGE: tl.constexpr, EVEN_H: tl.constexpr,
):  # fmt: skip
    """Writes the keys and values of a page and a KV head in the dtype of the model; program (page, KV head)."""
    i_p, i_g = tl.program_id(0).to(tl.int64), tl.program_id(1)
    o_t, o_h = tl.arange(0, PAGE), tl.arange(0, HEAD)
    page = tl.load(pages_p + i_p).to(tl.int64)
    b_k, b_v = load_heads(cache_p, scales_p, page * PAGE + o_t, o_t < PAGE, i_g, slots, G, H, HEAD, EVEN_H)
    p_out = out_p + ((i_p * PAGE + o_t) * G + i_g) * H
    m_h = o_h < H
    tl.store(p_out[None, :] + o_h[:, None], b_k, mask=m_h[:, None])
    p_out += tl.num_programs(0).to(tl.int64) * PAGE * G * H
    tl.store(p_out[:, None] + o_h[None, :], b_v, mask=m_h[None, :])


def read_pages(kv: PagedKV) -> PagedKV:
    """Returns the pages of one request, of an fp8 cache, in a cache of their own in the dtype of the model."""
    assert kv.scales is not None and len(kv.lengths) == 1
    (_, slots, groups, width), count = kv.cache.shape, kv.table.shape[1]
    cache = torch.empty(2, count * kv.size, groups, width, dtype=kv.scales.dtype, device=kv.scales.device)
    head = padded(width)
    _read_pages_kernel[(count, groups)](
        kv.cache.view(torch.uint8), kv.scales, kv.table, cache, groups, width, slots,
        HEAD=head, PAGE=kv.size, EVEN_H=head == width,
    )  # fmt: skip
    table = torch.arange(count, dtype=torch.int32, device=cache.device)[None]
    cache.new_zeros(1)  # a launch that begins after these have ended: attention reads pages and table before its wait
    return replace(kv, cache=cache, table=table, scales=None)
