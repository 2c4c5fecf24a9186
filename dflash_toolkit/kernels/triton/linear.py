"""y = x W^T for 1 to 128 rows of x, in Triton. Reading the weight takes most of the time, so it is read once.

The weight tile is the M side of the matrix instruction and the tokens, padded to 16, 32, 64 or 128, are its N side
(y^T = W x^T): sixteen rows then cost as much as one. Only (N, K) determines the order of an output's sum over K, in one
or a few splits, so results are batch-invariant. The rows of an fp8 head may also be in fp8; then no logits are stored.
"""

# mypy: disable-error-code="no-untyped-def"
import torch
import triton
import triton.language as tl
from torch import Tensor

from ..features import features_of
from ..formats import Activation, Weight, is_row_scaled
from ..launch import MAX_ROWS, next_power_of_two, padded, pdl
from ..loss_terms import PLAIN, LogitScale
from .argmax import merge_lse, merge_top, ordered, reduce_argmax, scale_logits, tile_key
from .fp8 import stored_parts
from .pdl import start_next, wait_for_previous
from .tile import FORMATS, MULTIPROCESSORS, SHARED_BYTES, Tile, accumulate, activate, fitted, store_tile

LSE_WARPS = 8  # warps of the widest tiles, which hold the logits' exponentials next to the sums
SWIGLU_BLOCK = 1024  # columns per program of SwiGLU after cuBLAS; with 512, 256 rows of 12288 take 3 us longer


def tile_for(
    kind: str, n: int, k: int, rows: int, eight_bits: bool = False, fp32: bool = False, shared: int = SHARED_BYTES
) -> Tile:
    """Returns the tile for [rows, K] times [N, K]; `kind` is linear, split_k, swiglu or argmax.

    `shared`, the shared memory of a thread block in bytes, affects only the speed: it changes no splits.

    The values are from a sweep over tiles, stages, warps, splits, tensor-map loads and weights prefetched before the
    wait, on an H200 with the GEMMs of Qwen3-8B chained as in a step: within 2 % of the best for 16 and 128 rows.
    """
    block_n, warps = (128, 8) if kind == "argmax" else (64, 4)
    block_k = min(64 if fp32 else 128, padded(k))
    splits = 1
    if kind == "split_k":
        # by (N, K) only: a program for every multiprocessor, but no short split
        splits = max(1, min(8, round(MULTIPROCESSORS / -(-n // block_n)), k // 512))
    stages = {"linear": 6, "split_k": 5, "swiglu": 3, "argmax": 4}[kind]
    if eight_bits:  # half the bytes, so more programs and less ahead
        stages, warps = 3, 4
        if splits > 1 and k >= 8 * splits * block_k:
            splits *= 2
    row_bytes = 4 if fp32 else 2
    tile = Tile(block_n, block_k, stages, warps, splits)
    return fitted(tile, rows, 1 if eight_bits else row_bytes, row_bytes, shared)


def tile_of_quantized(rows: int, shared: int = SHARED_BYTES) -> Tile:
    """Returns the tile for the head with rows in fp8, from a sweep with heads of 4096 and 896 columns."""
    tile = Tile(128, 128, 3 if 16 < rows <= MAX_ROWS else 4, 4 if rows <= MAX_ROWS else 8)
    return fitted(tile, rows, 1, 1, shared, most_rows=2 * MAX_ROWS)


@triton.jit(do_not_specialize=["M"])
def _linear_kernel(
    x_p, w_p, scale_p, bias_p, out_p, M, N, K, SPAN,
    T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, SCALED: tl.constexpr,
    BIAS: tl.constexpr, SWIGLU: tl.constexpr, GELU: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Computes out [splits, M, N] (SWIGLU: [M, N / 2]) of x [M, K] and w [N, K]; split i begins at column i * SPAN."""
    i_n, i_s = tl.program_id(0), tl.program_id(1)
    o_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    o_m = tl.arange(0, T)
    m_m = o_m < M
    first = i_s * SPAN
    last = tl.minimum(first + SPAN, K)
    wait_for_previous(PDL)
    b_acc = accumulate(x_p, w_p, o_n, o_m, m_m, N, K, first, last, T, BLOCK_N, BLOCK_K, EVEN_N, EVEN_K, SCALED)
    start_next(PDL)
    if SCALED:
        b_acc *= tl.load(scale_p + o_n, mask=o_n < N, other=0.0)[:, None]
    store_tile(b_acc, bias_p, out_p, o_n, o_m, m_m, M, N, i_n, i_s, T, BLOCK_N, BIAS, SWIGLU, GELU)


@triton.jit(do_not_specialize=["M"])
def _argmax_kernel(
    x_p, w_p, scale_p, best_p, index_p, M, N, K,
    T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, SCALED: tl.constexpr, ROUNDED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Computes the largest logit and its column among BLOCK_N columns: best, index [tiles, M].

    SCALED: the weights are in fp8. ROUNDED: the rows are also in fp8; their scales do not change the argmax.
    """
    i_n = tl.program_id(0)
    o_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    o_m = tl.arange(0, T)
    m_m = o_m < M
    wait_for_previous(PDL)
    widen: tl.constexpr = SCALED and not ROUNDED
    b_acc = accumulate(x_p, w_p, o_n, o_m, m_m, N, K, 0, K, T, BLOCK_N, BLOCK_K, EVEN_N, EVEN_K, widen)
    start_next(PDL)
    if SCALED:
        b_acc *= tl.load(scale_p + o_n, mask=o_n < N, other=0.0)[:, None]
    if not ROUNDED:  # rounds like stored logits, so that ties are the same as in other samplers
        b_acc = b_acc.to(x_p.dtype.element_ty).to(tl.float32)
    b_acc = tl.where((o_n < N)[:, None], b_acc, -float("inf"))
    b_best = tl.max(b_acc, axis=0)
    b_index = tl.minimum(tl.min(tl.where(b_acc == b_best[None, :], o_n[:, None], N), axis=0), N - 1)
    tl.store(best_p + i_n * M + o_m, b_best, mask=m_m)
    tl.store(index_p + i_n * M + o_m, b_index, mask=m_m)


@triton.jit(do_not_specialize=["M"])
def _top_kernel(
    x_p, w_p, scale_p, row_scale_p, keys_p, counts_p, bounds_p, tops_p, sums_p, M, N, K, multiplier, cap,
    T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, COUNT: tl.constexpr, SLOTS: tl.constexpr,
    EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, SCALED: tl.constexpr, ROUNDED: tl.constexpr,
    LOGIT: tl.constexpr, LSE: tl.constexpr, CAPPED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Computes the largest logits among BLOCK_N columns as keys, largest first: keys [tiles, COUNT, M].

    A tile writes only values that may be among the COUNT largest of a row, and their number to counts [tiles]. For each
    residue t % COUNT, bounds [COUNT, M] has the largest value of the finished tiles t. These values have different
    columns, so values below all of them are not needed. The number of written values depends on which tiles have
    finished; the largest COUNT values do not.

    LOGIT: dtype to which logits are rounded. With 16 bits, a value and its column in the tile share one int32.
    LSE: also computes the largest logit after `multiplier` (and the cap) and the sum of exponentials relative to it,
    tops, sums [tiles, M].
    """
    i_n = tl.program_id(0)
    o_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    o_m = tl.arange(0, T)
    m_m = o_m < M
    wait_for_previous(PDL)
    widen: tl.constexpr = SCALED and not ROUNDED
    b_acc = accumulate(x_p, w_p, o_n, o_m, m_m, N, K, 0, K, T, BLOCK_N, BLOCK_K, EVEN_N, EVEN_K, widen)
    start_next(PDL)
    if SCALED:
        b_acc *= tl.load(scale_p + o_n, mask=o_n < N, other=0.0)[:, None]
    if ROUNDED:
        b_acc *= tl.load(row_scale_p + o_m, mask=m_m, other=0.0)[None, :]
    if LSE:
        b_logit = scale_logits(b_acc.to(LOGIT), multiplier, cap, CAPPED)
        b_logit = tl.where((o_n < N)[:, None], b_logit, -float("inf"))
        b_most = tl.max(b_logit, axis=0)
        b_base = tl.where(b_most == -float("inf"), 0.0, b_most)
        tl.store(tops_p + i_n * M + o_m, b_most, mask=m_m)
        tl.store(sums_p + i_n * M + o_m, tl.sum(tl.exp(b_logit - b_base[None, :]), axis=0), mask=m_m)
    b_order = ordered(b_acc.to(LOGIT))
    wide: tl.constexpr = LOGIT.is_fp32()
    b_key = tile_key(b_order, i_n * BLOCK_N, tl.arange(0, BLOCK_N)[:, None], BLOCK_N, wide)
    if wide:
        lowest = tl.full([], -(2**63), dtype=tl.int64)
        of_value = tl.full([], -(2**32), dtype=tl.int64)
    else:
        lowest = tl.full([], -(2**31), dtype=tl.int32)
        of_value = tl.full([], -BLOCK_N, dtype=tl.int32)
    b_key = tl.where((o_n < N)[:, None], b_key, lowest)
    b_top = tl.max(b_key, axis=0)
    o_s = tl.arange(0, SLOTS)[:, None]
    p_bounds, m_bounds = bounds_p + o_s * M + o_m[None, :], (o_s < COUNT) & m_m[None, :]
    b_bounds = tl.load(p_bounds, mask=m_bounds, other=lowest, cache_modifier=".cg")  # not from L1, which may be stale
    b_bound = tl.min(tl.where(o_s < COUNT, b_bounds, -1 - lowest), axis=0)  # the other value is the largest integer
    tl.atomic_max(bounds_p + i_n % COUNT * M + o_m, b_top & of_value, mask=m_m, sem="relaxed")
    keys_p += i_n.to(tl.int64) * COUNT * M + o_m
    n = 0
    more = True
    while more:
        tl.store(keys_p + n * M, b_top, mask=m_m)
        b_key = tl.where(b_key == b_top[None, :], lowest, b_key)
        b_top = tl.max(b_key, axis=0)
        n += 1
        more = (n < COUNT) & (tl.max(((b_top >= b_bound) & m_m).to(tl.int32), axis=0) > 0)
    tl.store(counts_p + i_n, n)


@triton.jit
def _swiglu_kernel(x_p, out_p, width, HALVES: tl.constexpr, GELU: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Computes out [M, width] of x [M, 2 * width], with alternating gates and ups or all gates first, after cuBLAS."""
    i_m = tl.program_id(0).to(tl.int64)
    o_n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = o_n < width
    wait_for_previous(PDL)
    p_x = x_p + i_m * 2 * width
    if HALVES:
        gate = tl.load(p_x + o_n, mask=mask, other=0.0)
        up = tl.load(p_x + width + o_n, mask=mask, other=0.0)
    else:
        o_both = tl.program_id(1) * 2 * BLOCK + tl.arange(0, 2 * BLOCK)
        gate, up = tl.split(tl.reshape(tl.load(p_x + o_both, mask=o_both < 2 * width, other=0.0), (BLOCK, 2)))
    start_next(PDL)
    active = activate(gate.to(tl.float32), GELU).to(out_p.dtype.element_ty).to(tl.float32)
    tl.store(out_p + i_m * width + o_n, (active * up.to(tl.float32)).to(out_p.dtype.element_ty), mask=mask)


def launch_linear(
    x: Tensor, weight: Weight, bias: Tensor | None, out: Tensor, tile: Tile, activation: Activation | None = None
) -> None:
    """Runs the kernel with a given tile; `out` is [splits, M, N], or [M, N / 2] with an activation of gates."""
    (m, k), n = x.shape, len(weight)
    span = -(-k // (tile.splits * tile.block_k)) * tile.block_k
    data, scale = stored_parts(weight)
    _linear_kernel[(-(-n // tile.block_n), tile.splits)](
        x, data, data if scale is None else scale, x if bias is None else bias, out, m, n, k, span,
        T=padded(m), BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, EVEN_N=n % tile.block_n == 0,
        EVEN_K=k % tile.block_k == 0, SCALED=scale is not None, BIAS=bias is not None,
        SWIGLU=activation is not None, GELU=activation == "gelu_tanh",
        num_warps=tile.warps, num_stages=tile.stages, **pdl(x),
    )  # fmt: skip


def _tile(kind: str, x: Tensor, weight: Weight) -> Tile:
    quantized, fp32 = is_row_scaled(weight), x.dtype == torch.float32
    return tile_for(kind, len(weight), x.shape[1], len(x), quantized, fp32, features_of(x.device).shared_memory)


def linear(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """Multiplies x [M, K] with weight [N, K] transposed and adds bias [N]; returns [M, N] in x's dtype."""
    out = torch.empty(1, len(x), len(weight), dtype=x.dtype, device=x.device)
    launch_linear(x, weight, bias, out, _tile("linear", x, weight))
    return out[0]


def linear_split_k(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """Returns `linear` as P split-K partial sums, fp32 [P, M, N]; the first one has bias [N]."""
    tile = _tile("split_k", x, weight)
    out = torch.empty(tile.splits, len(x), len(weight), dtype=torch.float32, device=x.device)
    launch_linear(x, weight, bias, out, tile)
    return out


def linear_swiglu(x: Tensor, weight: Weight, activation: Activation = "silu") -> Tensor:
    """Returns activation(gate) * up, [M, I], where weight [2 * I, K] holds the rows gate 0, up 0, gate 1, up 1, ..."""
    out = torch.empty(len(x), len(weight) // 2, dtype=x.dtype, device=x.device)
    launch_linear(x, weight, None, out, _tile("swiglu", x, weight), activation)
    return out


def swiglu(product: Tensor, activation: Activation = "silu", halves: bool = False) -> Tensor:
    """Returns activation(gate) * up, [M, I], of a contiguous product [M, 2 * I].

    Its columns are gate 0, up 0, gate 1, up 1, ...; `halves`: all gates, then all ups.
    """
    rows, width = len(product), product.shape[1] // 2
    out = torch.empty(rows, width, dtype=product.dtype, device=product.device)
    grid = rows, -(-width // SWIGLU_BLOCK)
    gelu = activation == "gelu_tanh"
    _swiglu_kernel[grid](product, out, width, HALVES=halves, GELU=gelu, BLOCK=SWIGLU_BLOCK, **pdl(product))
    return out


def linear_argmax(x: Tensor, weight: Weight) -> Tensor:
    """Returns the column with the largest logit of every row, int64 [M]; the lowest of tied columns."""
    return launch_argmax(x, weight, _tile("argmax", x, weight))


def launch_argmax(x: Weight, weight: Weight, tile: Tile) -> Tensor:
    """Computes `linear_argmax` with a given tile; rows in fp8 need weights in fp8."""
    rows, (data, scale) = stored_parts(x)[0], stored_parts(weight)
    (m, k), n = rows.shape, len(weight)
    tiles = -(-n // tile.block_n)
    best = torch.empty(tiles, m, dtype=torch.float32, device=rows.device)
    index = torch.empty(tiles, m, dtype=torch.int32, device=rows.device)
    _argmax_kernel[(tiles,)](
        rows, data, data if scale is None else scale, best, index, m, n, k,
        T=padded(m), BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, EVEN_N=n % tile.block_n == 0,
        EVEN_K=k % tile.block_k == 0, SCALED=scale is not None, ROUNDED=is_row_scaled(x),
        num_warps=tile.warps, num_stages=tile.stages, **pdl(rows),
    )  # fmt: skip
    return reduce_argmax(best, index)


def linear_top(x: Tensor, weight: Weight, count: int) -> tuple[Tensor, Tensor]:
    """Returns the `count` largest logits of every row, fp32 [M, count], and their columns; see the reference."""
    return launch_top(x, weight, count, x.dtype, _tile("argmax", x, weight))[:2]


def linear_top_lse(x: Tensor, weight: Weight, count: int, scale: LogitScale) -> tuple[Tensor, Tensor, Tensor]:
    """Returns `linear_top` of logits after `scale`, and the log-sum-exp of all logits, fp32 [M]."""
    values, ids, lse = launch_top(x, weight, count, x.dtype, _tile("argmax", x, weight), scale)
    assert lse is not None
    return values, ids, lse


def launch_top(
    x: Weight, weight: Weight, count: int, dtype: torch.dtype, tile: Tile, scale: LogitScale | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Computes `linear_top`, or with a `scale` `linear_top_lse`, with a given tile and dtype of the logits.

    Rows in fp8 need weights in fp8.
    """
    (rows, row_scale), (data, own_scale) = stored_parts(x), stored_parts(weight)
    (m, k), n = rows.shape, len(weight)
    tiles = -(-n // tile.block_n)
    number = torch.int64 if dtype == torch.float32 else torch.int32
    keys = torch.empty(tiles, count, m, dtype=number, device=rows.device)
    counts = torch.empty(tiles, dtype=torch.int32, device=rows.device)
    bounds = torch.full((count, m), torch.iinfo(number).min, dtype=number, device=rows.device)
    tops, sums, logits, warps = keys, keys, scale or PLAIN, tile.warps
    if scale is not None:
        warps = max(warps, LSE_WARPS) if padded(m) == MAX_ROWS else warps
        tops, sums = (torch.empty(tiles, m, dtype=torch.float32, device=rows.device) for _ in range(2))
    _top_kernel[(tiles,)](
        rows, data, data if own_scale is None else own_scale, data if row_scale is None else row_scale, keys, counts,
        bounds, tops, sums, m, n, k, logits.multiplier, logits.cap or 1.0,
        T=padded(m), BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, COUNT=count,
        SLOTS=next_power_of_two(count), EVEN_N=n % tile.block_n == 0, EVEN_K=k % tile.block_k == 0,
        SCALED=own_scale is not None, ROUNDED=is_row_scaled(x), LOGIT=FORMATS[dtype], LSE=scale is not None,
        CAPPED=logits.cap is not None, num_warps=warps, num_stages=tile.stages, **pdl(rows),
    )  # fmt: skip
    values, ids = merge_top(keys, counts, tile.block_n)
    if scale is None:
        return values, ids, None
    scale.apply_(values)
    return values, ids, merge_lse(tops, sums)
