"""The operations on a GPU, and the choice of a kernel for a dtype and a shape.

| operation | up to MAX_ROWS rows | more |
|---|---|---|
| linear, split-K, SwiGLU | Triton; sums do not depend on the row count | cuBLAS; fp8 weights quantize the rows |
| the same, targets in fp8 | Triton, with rows in fp8 | cuBLAS if it has them (blocks: on Hopper), else Triton |
| the same, targets in INT4 | Triton | Triton; above 256 rows cuBLAS, with slices of the weight dequantized |
| argmax of a head | Triton; above 64 rows streamed (Gluon, Hopper); fp8 quantizes the rows | cuBLAS; fp8: Triton |
| top logits of a head, log-sum-exp | Triton; fp8 quantizes the rows | cuBLAS, TOP_COLUMNS columns at a time |
| post-attention of a dense layer, with convolutions | one persistent launch (Gluon, Hopper, bf16) | the rows above |
| messages and pairs of slots | Triton | Triton; sums do not depend on the row count |
| experts | Triton: up to 32 rows all with every expert, more gathered by expert | the same, partial sums rounded |
| experts in fp8 | the same up to 16 rows; more sorted by expert and streamed (Gluon, Hopper) | the same |
| experts in MXFP4 | Triton, gathered above 16 rows; values are made in registers | the same |
| attention, also of trees | Gluon on Hopper, else Triton | the same; FlashAttention, if installed, for one chunk |
| delta rule of a prompt | Triton, in chunks; in fp32 row by row | the same |

Where torch has no fp8 products, more rows are multiplied with the dequantized weights of a drafter, and in Triton with
those of a target.

Up to MAX_ROWS rows the choice depends only on device, dtype and weights, so that results are batch-invariant; the two
kernels of the head return the same bits.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from . import flash
from .clamped import ClampedExperts
from .delta import DeltaMemory
from .features import features_of
from .formats import Activation, Format, Operand, RowScaledFp8, Weight, dequantized, format_of, parts, values_of
from .formats.dense import Dense
from .formats.fp8_block import Fp8Block
from .formats.fp8_row import Fp8Row
from .formats.int4 import Int4
from .hopper import attention as hopper_attention
from .hopper import prefill as hopper_prefill
from .hopper import tree_attention as hopper_tree_attention
from .hopper.conv_layer import conv_layer_fits as fuses_conv_post_attention
from .hopper.conv_layer import launch_conv_layer as fused_conv_post_attention
from .hopper.experts import experts_fit, launch_experts
from .hopper.head import launch_head
from .hopper.layer import launch_layer as fused_post_attention
from .hopper.pipeline import fits
from .launch import LONGEST_SPLIT, MAX_ROWS, keys_are_split
from .loss_terms import LogitScale
from .ops import Reference
from .paged import PagedKV
from .tree import TreeRows
from .triton import attention, delta, fp8_blocks, int4
from .triton import delta_chunk as chunked
from .triton import experts as grouped
from .triton import linear as gemm
from .triton.accept import accept
from .triton.convolution import block_conv, conv_add_rms_norm
from .triton.delta import delta_inputs, delta_rule, fold_, gated_rms_norm, gated_rms_norm_quantized
from .triton.fp8 import multiplies, multiply_quantized, quantize_rows, scaled_linear
from .triton.layer_inputs import gate_layer_input, layer_inputs
from .triton.mask import mask_logits_
from .triton.norm import add_rms_norm, add_rms_norm_quantized, norm_queries_keys
from .triton.pages import read_pages
from .triton.rope import context_write, gate_heads, rope_write
from .triton.row_loss import row_loss_
from .triton.row_top import TILE, PartTops, row_top
from .triton.sample import rejection_sample, sample
from .triton.slots import inject_rms_norm, linear_many_rows, pair_messages, pair_scores, slot_messages
from .triton.tree_accept import accept_trees, move_rows_
from .triton.tree_attention import tree_attention as _tree_attention
from .triton.tree_build import cut_trees, draft_children, grow_trees
from .triton.tree_delta import keep_path_, tree_delta_inputs, tree_delta_rule
from .triton.tree_results import expected_accepted, pack_tree_results
from .triton.walk import sampled_walk, sampled_walk_pairs, walk, walk_pairs

TILED_HEAD = 64  # rows up to which a bf16 head is faster tile by tile than streamed
QUANTIZED_ROWS = 256  # rows in fp8 that are multiplied with a head in fp8 at a time, if its sums are long
LONG_SUM = 2048  # columns of a long sum; with 4096, two passes of 128 rows are 20 % slower than 256, with 896 faster
CHUNK = 512  # rows from which attention of one request first reads an fp8 cache into 16 bits, for all its tiles
TOP_COLUMNS = 8 * TILE  # columns with logits in memory at a time: 32 MiB for 256 rows, which fit into L2


class Gemms(Protocol):
    """The kernels of a weight format."""

    def linear(self, x: Any, weight: Any, bias: Tensor | None = None) -> Tensor: ...

    def linear_split_k(self, x: Any, weight: Any, bias: Tensor | None = None) -> Tensor: ...

    def linear_swiglu(self, x: Any, weight: Any, activation: Activation = "silu") -> Tensor: ...


GEMMS: dict[type[Format], Gemms] = {Dense: gemm, Fp8Row: gemm, Fp8Block: fp8_blocks, Int4: int4}


def _kernels(weight: Weight) -> tuple[Gemms, Format]:
    form = format_of(weight)
    return GEMMS[type(form)], form


def linear(x: Operand, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """Multiplies x [M, K] with weight [N, K] transposed and adds bias [N]; returns [M, N] in x's dtype."""
    values = values_of(x)
    if by_cublas(values, weight):
        return _cublas_linear(x, weight, bias)
    kernels, form = _kernels(weight)
    return kernels.linear(form.operand(x), weight, bias)


def linear_split_k(x: Operand, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """Returns `linear` as split-K partial sums, fp32 [P, M, N]; above MAX_ROWS rows as one, in x's dtype."""
    values = values_of(x)
    if by_cublas(values, weight):
        return _cublas_linear(x, weight, bias)[None]
    kernels, form = _kernels(weight)
    return kernels.linear_split_k(form.operand(x), weight, bias)


def linear_swiglu(x: Operand, weight: Weight, activation: Activation = "silu") -> Tensor:
    """Returns activation(gate) * up, [M, I], where weight [2 * I, K] holds the rows gate 0, up 0, gate 1, up 1, ...

    A format with `halves` holds all gates, then all ups.
    """
    values = values_of(x)
    if by_cublas(values, weight):
        return gemm.swiglu(_cublas_linear(x, weight), activation, halves=format_of(weight).halves)
    kernels, form = _kernels(weight)
    return kernels.linear_swiglu(form.operand(x), weight, activation)


def linear_swiglu_quantized(x: Operand, weight: Weight, activation: Activation = "silu") -> Operand:
    """Computes `linear_swiglu`; also quantizes more rows than MAX_ROWS for the next GEMM of a target in fp8 blocks."""
    if by_cublas(values_of(x), weight) and fp8_blocks.multiplies(values_of(x), weight):
        return fp8_blocks.swiglu(_cublas_linear(x, weight), activation)
    return linear_swiglu(x, weight, activation)


def by_cublas(x: Tensor, weight: Weight) -> bool:
    """Returns whether cuBLAS multiplies these; its choice of an algorithm depends on the number of rows."""
    if len(x) <= MAX_ROWS or isinstance(format_of(weight), Int4):  # its kernels call cuBLAS
        return False
    return not format_of(weight).quantizes_rows or multiplies(x, weight) or fp8_blocks.multiplies(x, weight)


def _cublas_linear(x: Operand, weight: Weight, bias: Tensor | None = None) -> Tensor:
    values = values_of(x)
    if multiplies(values, weight):
        return scaled_linear(values, weight, bias)
    if fp8_blocks.multiplies(values, weight):
        return fp8_blocks.scaled_linear(x, weight, bias)
    return F.linear(values, dequantized(weight, values.dtype), bias)


def linear_argmax(x: Tensor, weight: Weight) -> Tensor:
    """Returns the column with the largest logit of every row, int64 [M]; the lowest of tied columns."""
    if _kernels(weight)[0] is not gemm:
        return linear(x, weight).argmax(-1)
    if multiplies(x, weight):
        most = QUANTIZED_ROWS if x.shape[1] >= LONG_SUM else MAX_ROWS
        tile = gemm.tile_of_quantized(min(len(x), most), features_of(x.device).shared_memory)
        found = [gemm.launch_argmax(quantize_rows(part), weight, tile) for part in x.split(most)]
        return found[0] if len(found) == 1 else torch.cat(found)
    data, scale = parts(weight)
    if len(x) > MAX_ROWS and scale is not None:  # a whole head in 16 bits may not fit into memory
        return torch.cat([gemm.linear_argmax(part, weight) for part in x.split(MAX_ROWS)])
    if len(x) > MAX_ROWS:
        return _cublas_linear(x, weight).argmax(-1)
    if len(x) > TILED_HEAD and scale is None and fits(x, [weight]):
        return launch_head(x, data)
    return gemm.linear_argmax(x, weight)


def linear_top(x: Tensor, weight: Weight, count: int) -> tuple[Tensor, Tensor]:
    """Returns the `count` largest logits of every row, fp32 [M, count], and their columns, int64 [M, count]."""
    if _kernels(weight)[0] is not gemm:  # rare for heads; all logits are in memory
        ordered = linear(x, weight).sort(dim=-1, descending=True, stable=True)
        return ordered.values[:, :count].float(), ordered.indices[:, :count]
    if len(x) > MAX_ROWS:
        return _top_by_parts(x, weight, count)[:2]
    if multiplies(x, weight):
        tile = gemm.tile_of_quantized(len(x), features_of(x.device).shared_memory)
        return gemm.launch_top(quantize_rows(x), weight, count, x.dtype, tile)[:2]
    return gemm.linear_top(x, weight, count)


def linear_top_lse(x: Tensor, weight: Weight, count: int, scale: LogitScale) -> tuple[Tensor, Tensor, Tensor]:
    """Returns `linear_top` of logits after `scale`, and the log-sum-exp of all logits, fp32 [M].

    A block-scaled FP8 head has all logits in memory at once.
    """
    if _kernels(weight)[0] is not gemm:
        logits = linear(x, weight)
        ordered = logits.sort(dim=-1, descending=True, stable=True)
        values, every = ordered.values[:, :count].float().contiguous(), logits.float()
        scale.apply_(values)
        scale.apply_(every)
        return values, ordered.indices[:, :count], every.logsumexp(-1)
    if len(x) > MAX_ROWS:
        values, ids, lse = _top_by_parts(x, weight, count, scale)
    elif multiplies(x, weight):
        tile = gemm.tile_of_quantized(len(x), features_of(x.device).shared_memory)
        values, ids, lse = gemm.launch_top(quantize_rows(x), weight, count, x.dtype, tile, scale)
    else:
        return gemm.linear_top_lse(x, weight, count, scale)
    assert lse is not None
    return values, ids, lse


def _top_by_parts(
    x: Tensor, weight: Weight, count: int, scale: LogitScale | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Computes `linear_top`, or with a scale `linear_top_lse`, from the logits of TOP_COLUMNS columns at a time."""
    rows = quantize_rows(x) if multiplies(x, weight) else x
    tops = PartTops(len(x), len(weight), count, x.dtype, x.device, scale)
    for i, part in enumerate(weight.split(TOP_COLUMNS)):
        tops.take(_logits(rows, part, x.dtype), i * TOP_COLUMNS)  # frees each part before the next
    return tops.merged()


def _logits(rows: Tensor | RowScaledFp8, weight: Weight, dtype: torch.dtype) -> Tensor:
    if isinstance(rows, RowScaledFp8):
        return multiply_quantized(rows, weight, dtype)
    return F.linear(rows, dequantized(weight, dtype))


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
    if clamped is None and not weighted_inputs and activation == "silu" and experts_fit(x, gate_up, down):
        return launch_experts(x, gate_up, down, weights, experts)
    return grouped.experts_mlp(x, gate_up, down, weights, experts, clamped, activation, weighted_inputs)


def fuses_post_attention(x: Tensor, weights: Sequence[Weight | None]) -> bool:
    """Returns whether the persistent kernel supports the stream x [M, D] and these matrices of a layer."""
    return all(weight is None or _kernels(weight)[0] is gemm for weight in weights) and fits(x, weights)


def block_attention(q: Tensor, kv: PagedKV, *, causal: bool, counts: Tensor | None = None) -> Tensor:
    """Returns the attention [M, N H] of q [M, N, H] over the pages in cache [2, slots, G, H]; see the reference."""
    if kv.scales is not None and counts is None and len(kv.lengths) == 1 and len(q) >= CHUNK:
        kv = read_pages(kv)
    if counts is None and flash.fits(q, kv, causal=causal):
        return flash.launch(q, kv)
    if causal and len(q) > LONGEST_SPLIT * len(kv.lengths) and hopper_prefill.fits(q, kv):
        return hopper_prefill.launch(q, kv, counts)
    hopper = hopper_attention.launch if hopper_attention.fits(q, kv) else None
    return attention.block_attention(q, kv, causal=causal, counts=counts, hopper=hopper)


def tree_attention(q: Tensor, kv: PagedKV, rows: TreeRows, paths: Tensor) -> Tensor:
    """Returns the attention [M, N H] of rows of trees over the pages in cache [2, slots, G, H]; see the reference."""
    fits, batch = hopper_attention.fits(q, kv), len(kv.lengths)
    if keys_are_split(batch, batch):
        return _tree_attention(q, kv, rows, paths, hopper_tree_attention.launch if fits else None)
    return attention.masked_attention(q, kv, rows, paths.shape[1], hopper_attention.launch if fits else None)


def chain_attention(q: Tensor, kv: PagedKV, rows: TreeRows, longest: int) -> Tensor:
    """Returns the attention [M, N H] of rows of chains over the pages in cache [2, slots, G, H]; see the reference."""
    if longest > LONGEST_SPLIT and hopper_prefill.fits(q, kv):
        return hopper_prefill.launch(q, kv, starts=rows.starts)
    hopper = hopper_attention.launch if hopper_attention.fits(q, kv) else None
    return attention.chain_attention(q, kv, rows, longest, hopper)


def delta_chunk(
    qkv: Tensor,
    ba: Tensor,
    weight: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    memory: DeltaMemory,
    slots: Tensor,
    starts: Tensor,
    counts: Tensor,
) -> Tensor:
    """Returns the outputs [M, N H_v] of rows of prompts and updates the memory; see the reference.

    Computes chunks of 64 rows, so the bits do not depend on where a prompt is cut, at multiples of 64.
    """
    if qkv.dtype == torch.float32:
        return delta.delta_chunk(qkv, ba, weight, a_log, dt_bias, memory, slots, starts, counts)
    parts = chunked.chunk_inputs(qkv, ba, weight, a_log, dt_bias, memory, slots, starts, counts)
    return chunked.chunk_rule(*parts, memory.state, slots, starts, counts)


class Gpu(Reference):
    """The operations with their kernels; an operation without one runs its definition."""

    linear = staticmethod(linear)
    linear_split_k = staticmethod(linear_split_k)
    linear_swiglu = staticmethod(linear_swiglu)
    linear_swiglu_quantized = staticmethod(linear_swiglu_quantized)
    linear_argmax = staticmethod(linear_argmax)
    linear_top = staticmethod(linear_top)
    linear_top_lse = staticmethod(linear_top_lse)
    walk = staticmethod(walk)
    sampled_walk = staticmethod(sampled_walk)
    walk_pairs = staticmethod(walk_pairs)
    sampled_walk_pairs = staticmethod(sampled_walk_pairs)
    slot_messages = staticmethod(slot_messages)
    pair_messages = staticmethod(pair_messages)
    inject_rms_norm = staticmethod(inject_rms_norm)
    pair_scores = staticmethod(pair_scores)
    linear_many_rows = staticmethod(linear_many_rows)
    block_conv = staticmethod(block_conv)
    add_rms_norm = staticmethod(add_rms_norm)
    add_rms_norm_quantized = staticmethod(add_rms_norm_quantized)
    conv_add_rms_norm = staticmethod(conv_add_rms_norm)
    fuses_post_attention = staticmethod(fuses_post_attention)
    fused_post_attention = staticmethod(fused_post_attention)
    fuses_conv_post_attention = staticmethod(fuses_conv_post_attention)
    fused_conv_post_attention = staticmethod(fused_conv_post_attention)
    top_experts = staticmethod(grouped.top_experts)
    experts_mlp = staticmethod(experts_mlp)
    layer_inputs = staticmethod(layer_inputs)
    gate_layer_input = staticmethod(gate_layer_input)
    norm_queries_keys = staticmethod(norm_queries_keys)
    rope_write = staticmethod(rope_write)
    gate_heads = staticmethod(gate_heads)
    block_attention = staticmethod(block_attention)
    context_write = staticmethod(context_write)
    accept = staticmethod(accept)
    draft_children = staticmethod(draft_children)
    grow_trees = staticmethod(grow_trees)
    cut_trees = staticmethod(cut_trees)
    expected_accepted = staticmethod(expected_accepted)
    tree_attention = staticmethod(tree_attention)
    chain_attention = staticmethod(chain_attention)
    accept_trees = staticmethod(accept_trees)
    move_rows_ = staticmethod(move_rows_)
    pack_tree_results = staticmethod(pack_tree_results)
    mask_logits_ = staticmethod(mask_logits_)
    sample = staticmethod(sample)
    rejection_sample = staticmethod(rejection_sample)
    delta_inputs = staticmethod(delta_inputs)
    delta_rule = staticmethod(delta_rule)
    delta_chunk = staticmethod(delta_chunk)
    fold_ = staticmethod(fold_)
    tree_delta_inputs = staticmethod(tree_delta_inputs)
    tree_delta_rule = staticmethod(tree_delta_rule)
    keep_path_ = staticmethod(keep_path_)
    gated_rms_norm = staticmethod(gated_rms_norm)
    gated_rms_norm_quantized = staticmethod(gated_rms_norm_quantized)
    row_top = staticmethod(row_top)
    row_loss_ = staticmethod(row_loss_)
