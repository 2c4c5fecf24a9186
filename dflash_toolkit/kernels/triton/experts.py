"""A mixture of experts, in Triton: routes rows to experts and multiplies each expert's two matrices with its rows.

As in `linear`, weights are streamed and the rows are the N side of the matrix instruction. A few rows are all
multiplied by every expert that any of them needs, as sixteen rows cost as much as one, and unneeded products are not
stored. More rows are first gathered by expert. Only (N, K) determines the order of an output's sum over K. The outputs
of a row's experts are stored separately, and the next norm adds them in the row's own order. So results are
batch-invariant.
"""

# mypy: disable-error-code="no-untyped-def"
import torch
import triton
import triton.language as tl
from torch import Tensor

from ..clamped import ClampedExperts
from ..features import features_of
from ..formats import (
    BLOCK,
    FP8_MAX,
    LEAST,
    MXFP4,
    Activation,
    GroupedInt4,
    Operand,
    QuantizedRows,
    Weight,
    format_of,
    parts,
    values_of,
)
from ..launch import MAX_ROWS, next_power_of_two, padded, pdl
from ..routing import SigmoidRouting
from .fp8 import of_fp8, quantize_rows, rows_dtype, stored_parts
from .fp8_blocks import QUANTIZED_IN_LOOP, quantize, quantize_groups
from .int4 import accumulate_int4, fitted_tile, sizes_of
from .mxfp4 import accumulate_mxfp4, words_of
from .pdl import start_next, wait_for_previous
from .tile import FORMATS, SHARED_BYTES, Tile, accumulate, fitted, store_tile

# maximum rows without gathering: products of 64 rows of an expert, or 32 in FP8, nearly all zero, take longer
FEW_ROWS, FEW_ROWS_NARROW = 32, 16
FEW_PAIRS = 8  # maximum pairs of a row and an expert with smaller tiles of MXFP4 weights, for more programs
SHORT = 1024  # fewer columns than this are a short loop
STEP_ROWS = 256  # maximum rows of a step; more are a prompt's
LONG = 2048  # maximum rows of an expert per program


@triton.jit
def _inside_best_groups(b_choice, o_e, SIZE, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, GROUP_SIDE: tl.constexpr):
    """Returns choices [BLOCK] with -inf outside of the best groups of SIZE experts, see `SigmoidRouting`."""
    lowest = -float("inf")
    o_g = tl.arange(0, GROUP_SIDE)
    b_total = tl.full([GROUP_SIDE], lowest, dtype=tl.float32)
    for g in tl.static_range(GROUPS):
        b_own = tl.where(o_e // SIZE == g, b_choice, lowest)
        first = tl.max(b_own, axis=0)
        at = tl.min(tl.where(b_own == first, o_e, 1 << 30), axis=0)
        second = tl.max(tl.where(o_e == at, lowest, b_own), axis=0)
        b_total = tl.where(o_g == g, first + tl.where(SIZE > 1, second, 0.0), b_total)
    b_inside = o_e < 0
    for _ in tl.static_range(TOP_GROUPS):
        best = tl.max(b_total, axis=0)
        g = tl.min(tl.where(b_total == best, o_g, GROUP_SIDE), axis=0)
        b_inside = b_inside | (o_e // SIZE == g)
        b_total = tl.where(o_g == g, lowest, b_total)
    return tl.where(b_inside, b_choice, lowest)


@triton.jit(do_not_specialize=["stride_part"])
def _top_experts_kernel(
    part_p, correction_p, scales_p, weight_p, expert_p, E, stride_part, stride_row, scale,
    PARTS: tl.constexpr, TOP: tl.constexpr, SIDE: tl.constexpr, BLOCK: tl.constexpr, FORMAT: tl.constexpr,
    NORMALIZED: tl.constexpr, SHARED: tl.constexpr, SIGMOID: tl.constexpr, GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr, GROUP_SIDE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Computes weights and experts [M, TOP + SHARED] from logits [PARTS, M, E], or E + 1 with a gate of SHARED ones."""
    i_m = tl.program_id(0).to(tl.int64)
    o_e, o_k = tl.arange(0, BLOCK), tl.arange(0, SIDE)
    b_logits = tl.zeros([BLOCK], dtype=tl.float32)
    gate = tl.full((), 0.0, tl.float32)
    wait_for_previous(PDL)
    for i in tl.static_range(PARTS):  # in order, as everywhere
        p_row = part_p + i * stride_part + i_m * stride_row
        b_logits += tl.load(p_row + o_e, mask=o_e < E, other=0.0).to(tl.float32)
        if SHARED > 0 and not SIGMOID:
            gate += tl.load(p_row + E).to(tl.float32)
    start_next(PDL)
    b_logits = tl.where(o_e < E, b_logits.to(FORMAT).to(tl.float32), -float("inf"))
    if SIGMOID:
        b_p = 1.0 / (1.0 + tl.exp(-b_logits))
        total = tl.sum(b_p, axis=0)
        b_choice = b_logits
        if correction_p is not None:
            b_choice = b_p + tl.load(correction_p + o_e, mask=o_e < E, other=0.0)
        b_choice = tl.where(b_choice == b_choice, b_choice, -float("inf"))  # rows with NaN also choose experts
        if GROUPS > TOP_GROUPS:
            b_choice = _inside_best_groups(b_choice, o_e, E // GROUPS, GROUPS, TOP_GROUPS, GROUP_SIDE)
    else:
        b_exp = tl.exp(b_logits - tl.max(b_logits, axis=0))
        total = tl.sum(b_exp, axis=0)
        b_p = b_exp / total
        b_choice = tl.where(b_p == b_p, b_p, 0.0)
    # numbers become integers in the same order; the low bits make the lower of equal experts the larger key
    b_bits = b_choice.to(tl.int32, bitcast=True)
    if SIGMOID:  # negative ones are in the opposite order
        b_bits ^= (b_bits >> 31) & 0x7FFFFFFF
    b_key = (b_bits.to(tl.int64) << 32) + (BLOCK - 1 - o_e)
    taken = tl.full([], -(2**63), dtype=tl.int64)
    b_key = tl.where(o_e < E, b_key, taken)
    b_weight = tl.zeros([SIDE], dtype=tl.float32)
    b_expert = tl.zeros([SIDE], dtype=tl.int32)
    for j in tl.static_range(TOP):
        best = tl.max(b_key, axis=0)
        expert = BLOCK - 1 - (best & 0x7FFFFFFF).to(tl.int32)
        if SIGMOID:
            weight = tl.sum(tl.where(o_e == expert, b_p, 0.0), axis=0)
        else:
            weight = (best >> 32).to(tl.int32).to(tl.float32, bitcast=True)
        b_weight = tl.where(o_k == j, weight, b_weight)
        b_expert = tl.where(o_k == j, expert, b_expert)
        b_key = tl.where(o_e == expert, taken, b_key)
    if NORMALIZED:
        b_weight = b_weight / (tl.sum(b_weight, axis=0) + (1e-20 if SIGMOID else 0.0))
    if SIGMOID:
        b_weight *= scale
    if scales_p is not None:
        b_weight *= tl.load(scales_p + b_expert).to(tl.float32)
    b_weight = tl.where(total == total, b_weight, total)  # the weights of rows with NaN stay NaN
    if SHARED > 0:
        of_shared = 1.0
        if not SIGMOID:
            of_shared = 1.0 / (1.0 + tl.exp(-gate.to(FORMAT).to(tl.float32)))
        b_weight = tl.where(o_k >= TOP, of_shared, b_weight)
        b_expert = tl.where(o_k >= TOP, E + o_k - TOP, b_expert)
    o_out = i_m * (TOP + SHARED) + o_k
    tl.store(weight_p + o_out, b_weight.to(FORMAT).to(tl.float32), mask=o_k < TOP + SHARED)
    tl.store(expert_p + o_out, b_expert, mask=o_k < TOP + SHARED)


@triton.jit(do_not_specialize=["M"])
def _group_rows_kernel(expert_p, pair_p, count_p, M, TOP: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Lists an expert's pairs of a row and a rank in order: pair [E, M], and their number, count [E]."""
    i_e = tl.program_id(0)
    wait_for_previous(PDL)
    start_next(PDL)
    count = 0
    for start in range(0, M * TOP, BLOCK):
        o_p = start + tl.arange(0, BLOCK)
        b_mine = (tl.load(expert_p + o_p, mask=o_p < M * TOP, other=-1) == i_e).to(tl.int32)
        o_out = i_e.to(tl.int64) * M + count + tl.cumsum(b_mine, axis=0) - 1
        tl.store(pair_p + o_out, o_p, mask=b_mine > 0)
        count += tl.sum(b_mine, axis=0)
    tl.store(count_p + i_e, count)


@triton.jit
def _accumulate_blocks(
    x_p, x_scale_p, w_p, w_scale_p, o_n, o_m, m_m, K,
    T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, QUANTIZE: tl.constexpr, BY_ROWS: tl.constexpr,
    FP8_MAX: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    """Computes `accumulate` for a block-scaled fp8 matrix, see `fp8_blocks.py`. QUANTIZE: x has no scales yet. BY_ROWS:
    a block is a whole row."""
    blocks = K // BLOCK_K
    o_k = tl.arange(0, BLOCK_K)
    p_w = w_p + o_n[:, None].to(tl.int64) * K + o_k[None, :]
    p_x = x_p + o_m[None, :] * K + o_k[:, None]
    p_w_scale = w_scale_p + o_n // BLOCK_K * blocks
    p_x_scale = x_scale_p + o_m * blocks
    b_acc = tl.zeros([BLOCK_N, T], dtype=tl.float32)
    for _ in range(0, K, BLOCK_K):
        b_w = of_fp8(tl.load(p_w, eviction_policy="evict_first"))
        b_x = tl.load(p_x, mask=m_m[None, :], other=0.0, eviction_policy="evict_last")
        if BY_ROWS:
            b_acc += tl.dot(b_w, b_x)
        else:
            if QUANTIZE:
                b_x, b_x_scale = quantize(b_x, 0, b_w.dtype, FP8_MAX, LEAST)
            else:
                b_x_scale = tl.load(p_x_scale, mask=m_m, other=0.0)
            b_acc += tl.dot(b_w, b_x) * (b_x_scale[None, :] * tl.load(p_w_scale)[:, None])
            p_w_scale += 1
            p_x_scale += 1
        p_w += BLOCK_K
        p_x += BLOCK_K
    if BY_ROWS:
        b_acc *= tl.load(x_scale_p + o_m, mask=m_m, other=0.0)[None, :] * tl.load(w_scale_p + o_n)[:, None]
    return b_acc


@triton.jit
def _clamped_swiglu(
    b_acc, ALPHA: tl.constexpr, LIMIT: tl.constexpr, BLOCK_N: tl.constexpr, T: tl.constexpr, DTYPE: tl.constexpr
):  # fmt: skip
    """Returns `ClampedExperts.activate` [BLOCK_N / 2, T] of sums [BLOCK_N, T]."""
    gate, up = tl.split(tl.permute(tl.reshape(b_acc.to(DTYPE).to(tl.float32), (BLOCK_N // 2, 2, T)), (0, 2, 1)))
    gate = tl.minimum(gate, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    up = tl.clamp(up, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    return (up + 1.0) * (gate / (1.0 + tl.exp(-ALPHA * gate)))


@triton.jit(do_not_specialize=["M"])
def _experts_kernel(
    x_p, x_scale_p, w_p, w_scale_p, bias_p, expert_p, weight_p, pair_p, count_p, out_p, M, N, K,
    TOP: tl.constexpr, SIDE: tl.constexpr, T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, GATHERED: tl.constexpr, BY_PAIR: tl.constexpr, SWIGLU: tl.constexpr,
    SCALED: tl.constexpr, QUANTIZE: tl.constexpr, BY_ROWS: tl.constexpr, IN_MXFP4: tl.constexpr,
    QUARTER: tl.constexpr, GROUP: tl.constexpr, GELU: tl.constexpr, WEIGHTED_INPUTS: tl.constexpr,
    ALPHA: tl.constexpr, LIMIT: tl.constexpr, FP8_MAX: tl.constexpr, LEAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Multiplies x [M, K] with w [E, N, K] to out [M * TOP, N / 2] if SWIGLU; else x [M * TOP, K] to out [TOP, M, N].

    A program has an expert and BLOCK_N of its rows of w. BY_PAIR: it has a pair's expert, if that pair is the expert's
    first. GATHERED: the last expert starts first, as it may have all rows and then takes longest.
    SCALED: w is in fp8, with scales [E, N / BLOCK_K, K / BLOCK_K]; BY_ROWS: with scales [E, N].
    IN_MXFP4: w is words, see `Mxfp4Weight`. QUARTER: 0, or w is in INT4, see `accumulate_int4`, with
    scales [E, K / GROUP, N]. LIMIT: 0, or that of `ClampedExperts`. WEIGHTED_INPUTS: the weights multiply the sums of
    the first GEMM, as they would its rows; else those of the second.
    """
    i_n, i_e = tl.program_id(0), tl.program_id(2)
    o_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    o_t = tl.arange(0, T)
    wait_for_previous(PDL)
    start_next(PDL)
    expert = i_e
    if GATHERED:
        expert = tl.num_programs(2) - 1 - i_e
        count = tl.load(count_p + expert)
    else:  # all rows, with their pair for this expert, or -1
        if BY_PAIR:
            expert = tl.load(expert_p + i_e)
        o_k = tl.arange(0, SIDE)
        o_pair = o_t[:, None] * TOP + o_k[None, :]
        exists = (o_t < M)[:, None] & (o_k < TOP)[None, :]
        b_mine = exists & (tl.load(expert_p + o_pair, mask=exists, other=-1) == expert)
        b_pair = tl.max(tl.where(b_mine, o_pair, -1), axis=1)
        count = tl.where(tl.max(b_pair, axis=0) >= 0, M, 0)
        if BY_PAIR:
            count = tl.where(tl.min(tl.where(b_mine, o_pair, M * TOP)) == i_e, M, 0)
    o_w = o_n  # gates and ups alternate, so that a thread has both of a pair
    if SWIGLU and LIMIT == 0:
        o_w = (o_n % 2) * (N // 2) + o_n // 2
    words = K // 64 * 16  # of four numbers in INT4; the compiler sees their alignment
    p_w = w_p + expert.to(tl.int64) * N * (words if QUARTER > 0 else words_of(K) if IN_MXFP4 else K)
    if LIMIT > 0:
        b_bias = tl.load(bias_p + expert * N + o_n, mask=o_n < N, other=0.0).to(tl.float32)
    for start in range(tl.program_id(1) * T, count, tl.num_programs(1) * T):
        if GATHERED:
            m_t = start + o_t < count
            b_pair = tl.load(pair_p + expert.to(tl.int64) * M + start + o_t, mask=m_t, other=0)
        else:
            m_t = b_pair >= 0
        o_x = b_pair
        if SWIGLU:
            o_x = b_pair // TOP
        if IN_MXFP4:
            p_scale = w_scale_p + expert.to(tl.int64) * N * (words_of(K) // 32)
            b_acc = accumulate_mxfp4(x_p, p_w, p_scale, o_w, o_x, m_t, N, K, T, BLOCK_N, BLOCK_K, EVEN_N, EVEN_K)
        elif QUARTER > 0:
            p_scale = w_scale_p + expert.to(tl.int64) * N * (K // GROUP if GROUP > 0 else 1)
            b_acc = accumulate_int4(
                x_p, p_w, p_scale, o_w, o_n < N, o_x, m_t, words, N, 0, words, T, BLOCK_N, QUARTER, GROUP, EVEN_N
            )
        elif SCALED:
            scales = N if BY_ROWS else (N // BLOCK_K) * (K // BLOCK_K)
            b_acc = _accumulate_blocks(
                x_p, x_scale_p, p_w, w_scale_p + expert.to(tl.int64) * scales, o_w, o_x, m_t, K,
                T, BLOCK_N, BLOCK_K, QUANTIZE, BY_ROWS, FP8_MAX, LEAST,
            )  # fmt: skip
        else:
            b_acc = accumulate(x_p, p_w, o_w, o_x, m_t, N, K, 0, K, T, BLOCK_N, BLOCK_K, EVEN_N, EVEN_K, False)
        o_out, first = b_pair, tl.full((), 0, tl.int32)
        if LIMIT > 0:
            b_acc += b_bias[:, None]
        if SWIGLU == WEIGHTED_INPUTS:
            b_acc *= tl.load(weight_p + b_pair, mask=m_t, other=0.0)[None, :]
        if SWIGLU and LIMIT > 0:
            b_out = _clamped_swiglu(b_acc, ALPHA, LIMIT, BLOCK_N, T, out_p.dtype.element_ty)
            o_h = i_n * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
            store_tile(b_out, out_p, out_p, o_h, o_out, m_t, M, N // 2, i_n, first, T, BLOCK_N // 2, False, False)
        else:
            if not SWIGLU:
                o_out = b_pair % TOP * M + b_pair // TOP
            store_tile(b_acc, out_p, out_p, o_n, o_out, m_t, M, N, i_n, first, T, BLOCK_N, False, SWIGLU, GELU)


def top_experts(
    partial_sums: Tensor,
    dtype: torch.dtype,
    top_k: int,
    *,
    normalized: bool,
    shared: int,
    sigmoid: SigmoidRouting | None = None,
    scales: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns weights fp32 [M, top_k + shared] and experts int32 for partial sums [P, M, E or E + 1], maybe a view."""
    count, rows, width = partial_sums.shape
    how = SigmoidRouting(partial_sums) if sigmoid is None else sigmoid
    side, block = next_power_of_two(top_k + shared), next_power_of_two(width)
    weights = torch.empty(rows, top_k + shared, dtype=torch.float32, device=partial_sums.device)
    experts = torch.empty(rows, top_k + shared, dtype=torch.int32, device=partial_sums.device)
    _top_experts_kernel[(rows,)](
        partial_sums, how.correction, scales, weights, experts, width - (shared > 0 and sigmoid is None),
        *partial_sums.stride()[:2], how.scale, PARTS=count, TOP=top_k, SIDE=side, BLOCK=block, FORMAT=FORMATS[dtype],
        NORMALIZED=normalized, SHARED=int(shared), SIGMOID=sigmoid is not None, GROUPS=how.groups,
        TOP_GROUPS=how.top_groups, GROUP_SIDE=next_power_of_two(how.groups),
        num_warps=max(1, min(4, block // 128)), **pdl(partial_sums),
    )  # fmt: skip
    return weights, experts


def gathers(rows: int, narrow: bool) -> bool:
    """Returns whether `rows` rows are gathered by expert; `narrow`: with weights in 8 or 4 bits."""
    return rows > (FEW_ROWS_NARROW if narrow else FEW_ROWS)


def experts_tile(
    rows: int, top: int, experts: int, k: int, *,
    fp32: bool = False, fp8: bool = False, mxfp4: bool = False, quarter: int = 0, shared: int = SHARED_BYTES,
    row_bytes: int = 1,
) -> tuple[Tile, int]:  # fmt: skip
    """Returns the tile of the experts' GEMMs with K columns, and the rows of an expert that it multiplies at a time.

    Args:
        quarter: 0, or that of matrices in INT4.
        row_bytes: of a quantized number, see `rows_dtype`.
    """
    # if gathered, twice the rows of an expert when all are chosen equally often; once in a step's short loops
    often = 1 if fp8 and k < SHORT and rows <= STEP_ROWS else 2
    gathered = gathers(rows, fp8 or mxfp4 or quarter > 0)
    taken = min(128, padded(-(-often * rows * top // experts))) if gathered else padded(rows)
    wide = rows > MAX_ROWS and taken >= 64
    if fp8:
        # a block's sums are held next to the total: a wide tile of 128 rows would not stay in registers
        tile, taken = Tile(128, BLOCK, 4, 8) if wide else Tile(64, BLOCK, 4, 4), min(taken, 64)
        return fitted(tile, taken, 1, 2 if rows <= QUANTIZED_IN_LOOP else row_bytes, shared, most_rows=64), taken
    size = 4 if fp32 else 2
    if quarter:
        return fitted_tile(taken, quarter, size, shared)
    if mxfp4:
        taken, small = min(taken, 64), shared < SHARED_BYTES
        if rows * top <= FEW_PAIRS and not (fp32 or small):
            return Tile(64, 2 * BLOCK, 3, 4), taken
        narrow = taken == 64 and small  # 128 rows of both would spill there
        return Tile(64 if narrow else 128, BLOCK, 4 if taken <= 32 else 2 if fp32 else 3, 4), taken
    tile = Tile(128, 64, 4, 8) if wide and not fp32 else Tile(64, min(64 if fp32 else 128, padded(k)), 3, 4)
    return fitted(tile, taken, size, size, shared), taken


def group_rows(experts: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Returns each expert's pairs of a row and its rank, int32 [count, M], and their number, int32 [count].

    Args:
        experts: int32 [M, top].
    """
    rows, top = experts.shape
    pairs, counts = experts.new_empty(count, rows), experts.new_empty(count)
    _group_rows_kernel[(count,)](experts, pairs, counts, rows, TOP=top, BLOCK=1024, **pdl(experts))
    return pairs, counts


def multiply(
    x: Operand,
    matrices: Weight,
    weights: Tensor,
    experts: Tensor,
    groups: tuple[Tensor, Tensor] | None,
    out: Tensor,
    cut: tuple[Tile, int],
    clamped: ClampedExperts | None = None,
    activation: Activation = "silu",
    weighted_inputs: bool = False,
    *,
    swiglu: bool,
) -> Tensor:
    """One GEMM of all experts [E, N, K] with their rows.

    Args:
        x: [M, K] if `swiglu`, else [M * top, K].
        weights, experts: fp32 and int32 [M, top].
        groups: result of `group_rows`; None: every expert multiplies all rows.
        out: [M * top, N / 2] if `swiglu`, else [top, M, N], weighted.
        cut: result of `experts_tile`.
    """
    (rows, top), (tile, taken), values = experts.shape, cut, values_of(x)
    (data, scale), (count, n, k), mxfp4 = stored_parts(matrices), matrices.shape, format_of(matrices) == MXFP4
    numbers = {"QUARTER": 0, "GROUP": 0}
    bias = values if clamped is None else clamped.gate_up_bias if swiglu else clamped.down_bias
    by_rows = format_of(matrices).row_scales
    in_loop = rows <= QUANTIZED_IN_LOOP and not by_rows
    given = given_scale = values
    if by_rows:
        quantized = quantize_rows(values)
        given, given_scale = quantized.data, quantized.scale
    elif mxfp4 and scale is not None:
        data, scale = data.view(torch.int16), scale.view(torch.int32)
    elif isinstance(matrices, GroupedInt4):
        numbers = sizes_of(matrices)
    elif scale is not None and isinstance(x, QuantizedRows):
        given, given_scale, in_loop = x.data, x.scale.contiguous(), False
    elif scale is not None and not in_loop:
        given, given_scale = quantize_groups(values)
    by_pair = groups is None and rows * top <= count
    pairs, counts = groups or (experts, experts)
    grid = (-(-n // tile.block_n), max(1, rows // LONG), rows * top if by_pair else count)
    _experts_kernel[grid](
        given, given_scale, data, data if scale is None else scale, bias, experts, weights, pairs, counts, out,
        rows, n, k, TOP=top, SIDE=next_power_of_two(top), T=taken, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k,
        EVEN_N=n % tile.block_n == 0, EVEN_K=k % tile.block_k == 0, GATHERED=groups is not None, BY_PAIR=by_pair,
        SWIGLU=swiglu, SCALED=scale is not None, QUANTIZE=in_loop, BY_ROWS=by_rows, IN_MXFP4=mxfp4, **numbers,
        GELU=activation == "gelu_tanh", WEIGHTED_INPUTS=weighted_inputs,
        ALPHA=clamped.alpha if clamped else 0.0, LIMIT=clamped.limit if clamped else 0.0, FP8_MAX=FP8_MAX, LEAST=LEAST,
        num_warps=tile.warps, num_stages=tile.stages, **pdl(values),
    )  # fmt: skip
    return out


def experts_mlp(
    x: Operand,
    gate_up: Weight,
    down: Weight,
    weights: Tensor,
    experts: Tensor,
    clamped: ClampedExperts | None = None,
    activation: Activation = "silu",
    weighted_inputs: bool = False,
) -> Tensor:
    """Returns partial sums [k, M, D] of x [M, D], see the reference; in fp32, or in x's dtype above MAX_ROWS rows."""
    (rows, top), (count, d, width), values = experts.shape, down.shape, values_of(x)
    shared, row_bytes = features_of(values.device).shared_memory, rows_dtype(values.device).itemsize
    fp32, mxfp4 = values.dtype == torch.float32, format_of(gate_up) == MXFP4
    fp8, quarters = parts(gate_up)[1] is not None and not mxfp4, (0, 0)
    if isinstance(gate_up, GroupedInt4) and isinstance(down, GroupedInt4):
        fp8, quarters = False, (gate_up.quarter, down.quarter)
    groups = group_rows(experts, count) if gathers(rows, fp8 or mxfp4 or quarters[0] > 0) else None
    first, second = (
        experts_tile(
            rows, top, count, k, fp32=fp32, fp8=fp8, mxfp4=mxfp4, quarter=quarter, shared=shared, row_bytes=row_bytes
        )
        for k, quarter in zip((values.shape[1], width), quarters, strict=True)
    )
    routing = weights, experts, groups
    how = clamped, activation, weighted_inputs
    active = multiply(x, gate_up, *routing, values.new_empty(rows * top, width), first, *how, swiglu=True)
    wide = torch.float32 if rows <= MAX_ROWS else values.dtype
    out = values.new_empty(top, rows, d, dtype=wide)
    return multiply(active, down, *routing, out, second, *how, swiglu=False)
