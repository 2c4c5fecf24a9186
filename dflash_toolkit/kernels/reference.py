"""Plain torch definitions of the project's own operations, written for reading. They handle tensors, not models."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .clamped import ClampedExperts
from .formats import (
    Activation,
    Operand,
    RowScaledFp8,
    Weight,
    cast_fp8,
    dequantized,
    format_of,
    is_row_scaled,
    values_of,
)
from .loss_terms import LossMix, RowTerms
from .paged import store_heads
from .reference_attention import block_attention as block_attention
from .reference_attention import chain_attention as chain_attention
from .reference_attention import slots_of as slots_of
from .reference_attention import tree_attention as tree_attention
from .reference_delta import delta_chunk as delta_chunk
from .reference_delta import delta_inputs as delta_inputs
from .reference_delta import delta_rule as delta_rule
from .reference_delta import fold_ as fold_
from .reference_delta import keep_path_ as keep_path_
from .reference_delta import tree_delta_inputs as tree_delta_inputs
from .reference_delta import tree_delta_rule as tree_delta_rule
from .reference_slots import inject_rms_norm as inject_rms_norm
from .reference_slots import linear_many_rows as linear_many_rows
from .reference_slots import pair_messages as pair_messages
from .reference_slots import pair_scores as pair_scores
from .reference_slots import slot_messages as slot_messages
from .reference_tree import accept_trees as accept_trees
from .reference_tree import cut_trees as cut_trees
from .reference_tree import draft_children as draft_children
from .reference_tree import expected_accepted as expected_accepted
from .reference_tree import grow_trees as grow_trees
from .reference_tree import linear_top_lse as linear_top_lse
from .reference_tree import move_rows_ as move_rows_
from .reference_tree import pack_tree_results as pack_tree_results
from .routing import SigmoidRouting


def filtered_probabilities(
    logits: Tensor, *, temperature: float, top_p: float = 1.0, top_k: int = 0, min_p: float = 0.0
) -> Tensor:
    """Returns the distribution that tokens are sampled from, in fp32.

    Filters run in the order of Hugging Face `generate`: temperature, top-k, top-p, min-p. All tokens tied at the k-th
    logit stay; among tokens tied at the edge of top-p, those with the lower ids stay.

    Args:
        logits: [..., V].
        temperature: > 0.
        top_p: keeps the smallest set of tokens with a mass of at least top_p; 1 keeps all.
        top_k: 0 keeps all.
        min_p: removes tokens below min_p times the largest probability; 0 keeps all.

    Returns:
        Probabilities [..., V] that sum to 1.
    """
    scores = logits.float() / temperature
    if 0 < top_k < scores.shape[-1]:
        kth = scores.topk(top_k, dim=-1).values[..., -1:]
        scores = scores.masked_fill(scores < kth, -torch.inf)
    if top_p < 1.0:
        # stable, so that the choice among tied tokens does not depend on the number of rows
        ordered, order = scores.sort(dim=-1, descending=True, stable=True)
        mass = ordered.softmax(-1)
        mass_before = mass.cumsum(-1) - mass
        ordered = ordered.masked_fill(mass_before >= top_p, -torch.inf)
        scores = torch.empty_like(scores).scatter(-1, order, ordered)
    probabilities = scores.softmax(-1)
    if min_p > 0.0:
        floor = min_p * probabilities.amax(-1, keepdim=True)
        probabilities = probabilities.masked_fill(probabilities < floor, 0.0)
        probabilities = probabilities / probabilities.sum(-1, keepdim=True)
    return probabilities


def penalized(
    logits: Tensor,
    seen: Tensor,
    counts: Tensor,
    bias: Tensor,
    repetition: Tensor | float,
    presence: Tensor | float,
    frequency: Tensor | float,
) -> Tensor:
    """Applies penalties and bias to logits [..., V], in fp32. Neutral values leave the logits unchanged.

    Args:
        seen: bool [..., V], tokens of the prompt or the answer; repetition divides their positive logits and
            multiplies their negative ones (Keskar et al. 2019, section 4.1).
        counts: integers [..., V], of tokens in the answer; presence is subtracted once, frequency once per count.
        bias: [..., V], added.
    """
    logits = logits.float()
    logits = torch.where(seen, torch.where(logits > 0, logits / repetition, logits * repetition), logits)
    return logits - presence * (counts > 0) - frequency * counts + bias


def mask_logits_(logits: Tensor, masks: Tensor, at: Tensor) -> None:
    """Sets logits [M, V] of tokens that a row's mask does not allow to -inf.

    Args:
        masks: int32 [N, words] of at least V bits: token v is bit v % 32, from the lowest, of word v // 32.
        at: int32 [M], the mask of each row; rows with -1 do not change.
    """
    bits = masks[at.long().clamp(min=0), :, None] >> torch.arange(32, device=masks.device, dtype=masks.dtype)
    allowed = (bits & 1).flatten(1)[:, : logits.shape[1]].bool()
    logits.masked_fill_(~allowed & (at >= 0)[:, None], -torch.inf)


def choose(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """Inverse-CDF sampling: the first token with a cumulative mass above `uniform`.

    Args:
        probabilities: [M, V].
        uniform: [M] in [0, 1).

    Returns:
        Token ids [M], each with probability > 0.
    """
    cdf = probabilities.double().cumsum(-1)
    threshold = uniform.double() * cdf[:, -1]
    return torch.searchsorted(cdf, threshold[:, None], right=True)[:, 0].clamp_(max=probabilities.shape[-1] - 1)


def draw(scores: Tensor, temperature: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Samples a draft of every row from q, the softmax of its candidates' scores over the temperature.

    Args:
        scores: fp32 [M, C].
        temperature: fp32 [M]; at 0, q is a point mass on the largest score, the first of tied ones.
        uniform: fp64 [M], as in `choose`.

    Returns:
        Places int64 [M] among the candidates, and q, fp32 [M, C].
    """
    greedy = (temperature == 0.0)[:, None]
    best = scores.argmax(-1, keepdim=True)
    q = (scores / torch.where(greedy, 1.0, temperature[:, None])).softmax(-1)
    q = torch.where(greedy, torch.zeros_like(q).scatter(1, best, 1.0), q)
    return choose(q, uniform), q


def accept_or_resample(
    p: Tensor, draft: Tensor, candidates: Tensor, q: Tensor, uniform: Tensor, acceptance: Tensor
) -> Tensor:
    """Returns the target's tokens for sampled drafts: speculative sampling (Leviathan et al. 2023, Algorithm 1).

    A draft d is accepted with probability min(1, p(d) / q(d)). Otherwise the token is sampled from max(p - q, 0), which
    excludes rejected drafts. If d is distributed as q, the token is distributed as p.

    Args:
        p: fp32 [M, V], the target's filtered distribution.
        draft: int64 [M]; -1: nothing was drafted, and the token is sampled from p.
        candidates: int64 [M, C], the tokens of q, each once.
        q: fp32 [M, C].
        uniform: fp64 [M] in [0, 1), random number for sampling.
        acceptance: fp64 [M] in [0, 1), independent random number for acceptance.

    Returns:
        int64 [M]; the draft if it is accepted, otherwise another token.
    """
    q = torch.where((draft >= 0)[:, None], q, 0.0)
    rest = p.scatter_add(1, candidates, -q).clamp_(min=0.0)
    nothing = ~(rest > 0.0).any(-1)  # p equals q up to rounding, so no other token can be sampled
    of_p = p.gather(1, draft.clamp(min=0)[:, None])[:, 0].double()
    of_q = torch.where(candidates == draft[:, None], q, 0.0).sum(-1).double()
    taken = (draft >= 0) & ((acceptance * of_q < of_p) | nothing)
    return torch.where(taken, draft, choose(rest, uniform))


def scored_tokens(logits: Tensor, tokens: Tensor, best: int) -> Tensor:
    """Returns log-probabilities of given tokens, and the target's most probable tokens at their positions.

    Args:
        logits: [M, V].
        tokens: int64 [M].
        best: tokens reported with each; at most V.

    Returns:
        fp64 [M, 2 + 2 * best]: the token's log-probability and its rank, which also counts tied tokens; the ids of the
        most probable tokens, then their log-probabilities.
    """
    logprobs = logits.float().log_softmax(-1)
    chosen = logprobs.gather(1, tokens[:, None])
    rank = (logprobs >= chosen).sum(1, keepdim=True)
    values, ids = logprobs.topk(min(best, logits.shape[1]))
    return torch.cat([part.double() for part in (chosen, rank, ids, values)], dim=1)


def accepted_prefix(draft: Tensor, choice: Tensor) -> Tensor:
    """Returns the number of drafted tokens that equal the target's choices before the first mismatch.

    The same rule serves greedy and sampled verification: `choice[i]` is the target's token at that position, the argmax
    or a sample from its distribution p. A draft d is then accepted with probability p(d), and after a rejection the
    choice is distributed as p without d. This is speculative sampling with a point mass as proposal (Leviathan et al.
    2023, Algorithm 1 with q = 1 at d). For sampled drafts, `accept_or_resample` makes the choices.

    Args:
        draft: [M, S - 1] proposed tokens.
        choice: [M, S] or [M, S - 1]; the target's tokens, `choice[:, i]` at the position of `draft[:, i]`.

    Returns:
        Counts [M] in 0..S-1.
    """
    return (draft == choice[:, : draft.shape[1]]).long().cumprod(dim=1).sum(dim=1)


# ---- the decoding step: M = B * S rows, S consecutive positions of each of B requests -----------------


def linear(x: Operand, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """Multiplies x [M, K] with weight [N, K] transposed and adds bias [N]; returns [M, N] in x's dtype."""
    return format_of(weight).linear(values_of(x), weight, bias)


def linear_split_k(x: Operand, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """Returns `linear` as P split-K partial sums, [P, M, N]; `add_rms_norm` or `rope_write` adds them up.

    P depends on (N, K) only, never on M, so that results are batch-invariant.
    """
    return linear(x, weight, bias)[None]


def linear_swiglu(x: Operand, weight: Weight, activation: Activation = "silu") -> Tensor:
    """Returns activation(gate) * up, [M, I], where weight [2 * I, K] holds the rows gate 0, up 0, gate 1, up 1, ...

    A block-scaled weight holds all gates, then all ups, as a block must not mix them.
    """
    product = linear(x, weight)
    gate, up = product.chunk(2, 1) if format_of(weight).halves else (product[:, 0::2], product[:, 1::2])
    return (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up


def linear_swiglu_quantized(x: Operand, weight: Weight, activation: Activation = "silu") -> Operand:
    """Computes `linear_swiglu`; a kernel may also quantize the result for the next GEMM, of a target in fp8 blocks."""
    return linear_swiglu(x, weight, activation)


def linear_argmax(x: Tensor, weight: Weight) -> Tensor:
    """Returns the column with the largest logit of every row, int64 [M]; the lowest of tied columns."""
    return linear(x, weight).argmax(-1)


def linear_top(x: Tensor, weight: Weight, count: int) -> tuple[Tensor, Tensor]:
    """Returns the `count` largest logits of every row, fp32 [M, count], and their columns, int64 [M, count].

    Larger logits come first; among equal logits in x's dtype, lower columns do.
    """
    found = F.linear(x, dequantized(weight, x.dtype)).sort(dim=-1, descending=True, stable=True)
    return found.values[:, :count].float(), found.indices[:, :count]


def walk(
    state: Tensor, unary: Tensor, candidates: Tensor, predecessors: Tensor, successors: Tensor, anchors: Tensor
) -> Tensor:
    """Returns tokens int64 [B, K] of K slots, chosen one after the other by their score after the previous token.

    A candidate b after token a scores unary(b) + <P[a] * state, Q[b]>, in fp32; among equal scores the first wins.

    Args:
        state: [B, K, r]; may, like `unary` and `candidates`, have the slots of longer blocks.
        unary: fp32 [B, K, C], the logits of the candidates.
        candidates: int64 [B, K, C], tokens.
        predecessors, successors: [V, r], P and Q.
        anchors: int64 [B], the tokens before the first slot.
    """
    return sampled_walk(
        state,
        unary,
        candidates,
        predecessors,
        successors,
        anchors,
        torch.zeros(len(anchors), device=unary.device),
        torch.zeros(candidates.shape[:2], dtype=torch.float64, device=unary.device),
    )[0]


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
    """Does the same as `walk`, but samples each token from the softmax of its slot's scores, see `draw`.

    Args:
        temperature: fp32 [B]; 0 chooses the best.
        uniform: fp64 [B, K].

    Returns:
        Tokens int64 [B, K], and their distributions, fp32 [B, K, C].
    """
    chosen, mass, last = [], [], anchors
    for k in range(candidates.shape[1]):
        query = predecessors[last].float() * state[:, k].float()  # [B, r]
        scores = unary[:, k] + (successors[candidates[:, k]].float() * query[:, None]).sum(-1)
        place, q = draw(scores, temperature, uniform[:, k])
        last = candidates[:, k].gather(1, place[:, None])[:, 0]
        chosen.append(last)
        mass.append(q)
    return torch.stack(chosen, dim=1), torch.stack(mass, dim=1)


def walk_pairs(scores: Tensor, candidates: Tensor) -> Tensor:
    """Returns tokens int64 [B, K], each the best candidate after the token chosen before it.

    Args:
        scores: from `pair_scores`, fp32 [B, K, C, C].
        candidates: int64 [B, K, C].
    """
    none = torch.zeros(len(scores), device=scores.device)
    return sampled_walk_pairs(scores, candidates, none, torch.zeros_like(candidates[..., 0], dtype=torch.float64))[0]


def sampled_walk_pairs(
    scores: Tensor, candidates: Tensor, temperature: Tensor, uniform: Tensor
) -> tuple[Tensor, Tensor]:
    """Does the same as `walk_pairs`, but samples each token from the softmax of its slot's scores, see `draw`.

    Args:
        temperature: fp32 [B]; 0 chooses the best.
        uniform: fp64 [B, K].

    Returns:
        Tokens int64 [B, K], and their distributions, fp32 [B, K, C].
    """
    place, chosen, mass = torch.zeros_like(candidates[:, 0, 0]), list[Tensor](), list[Tensor]()
    for k in range(candidates.shape[1]):
        own = scores[:, k].gather(2, place[:, None, None].expand(-1, scores.shape[2], 1))[..., 0]
        place, q = draw(own, temperature, uniform[:, k])
        chosen.append(candidates[:, k].gather(1, place[:, None])[:, 0])
        mass.append(q)
    return torch.stack(chosen, dim=1), torch.stack(mass, dim=1)


def block_conv(x: Tensor, dynamic: Tensor, base: Tensor, block: int) -> Tensor:
    """Computes a short convolution along the rows of each block, with coefficients that differ by row.

    Row t is the sum over tau < T of (base[tau, c] + dynamic[t, tau, c // g]) * x[t - tau, c]; rows before the first one
    of a block count as zero.

    Args:
        x: [M, D], M / `block` whole blocks one after the other; or its split-K partial sums [P, M, D].
        dynamic: [M, T * (D / g)], T taps of D / g groups of g channels; or its partial sums. They may be columns of a
            wider matrix.
        base: [T, D].

    Returns:
        [M, D], summed in fp32 and rounded once to the dtype of `base`.
    """
    wide, own = (t.float().sum(0) if t.dim() == 3 else t.float() for t in (x, dynamic))
    taps, width = base.shape
    kernel = own.unflatten(1, (taps, -1))
    kernel = base.float() + kernel.repeat_interleave(width // kernel.shape[2], dim=2)  # [M, T, D]
    rows = wide.unflatten(0, (-1, block))
    found = torch.zeros_like(rows)
    for tau in range(taps):
        found = found + kernel[:, tau].view_as(rows) * F.pad(rows, (0, 0, tau, 0))[:, :block]
    return found.flatten(0, 1).to(base.dtype)


def add_rms_norm(
    x: Tensor,
    partial_sums: Tensor | None,
    weight: Tensor | None,
    eps: float,
    tap: Tensor | None = None,
    output_norm: Tensor | None = None,
    scalar: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Adds a sub-layer's output to the residual stream and norms it for the next sub-layer.

    Args:
        x: the residual stream [M, D].
        partial_sums: the sub-layer's output, split along K, [P, M, D]; None adds nothing.
        weight: [D], of the RMSNorm (Zhang and Sennrich 2019): y = x / sqrt(mean(x^2) + eps) * weight, multiplied in
            the dtype of `weight`, which is x's dtype or fp32. None: the next sub-layer has no norm before it.
        tap: a view [M, D] that receives the new residual stream.
        output_norm: [D], of an RMSNorm of the sub-layer's output, rounded to x's dtype, before it is added.
        scalar: [1], multiplies the sum.

    Returns:
        The new residual stream and its norm, both [M, D] in x's dtype; without a `weight` it twice.
    """
    if partial_sums is not None:
        added = partial_sums.float().sum(0)
        if output_norm is not None:
            added = _rms_norm(added.to(x.dtype), output_norm, eps).float()
        x = (x.float() + added).to(x.dtype)
    if scalar is not None:
        x = x * scalar
    if tap is not None:
        tap.copy_(x)
    return x, x if weight is None else _rms_norm(x, weight, eps)


def add_rms_norm_quantized(
    x: Tensor,
    partial_sums: Tensor | None,
    weight: Tensor | None,
    eps: float,
    tap: Tensor | None = None,
    output_norm: Tensor | None = None,
    scalar: Tensor | None = None,
) -> tuple[Tensor, Operand]:
    """`add_rms_norm` for a GEMM that quantizes rows in groups; a kernel may return quantized rows."""
    return add_rms_norm(x, partial_sums, weight, eps, tap, output_norm, scalar)


def conv_add_rms_norm(
    x: Tensor,
    partial_sums: Tensor,
    dynamic: Tensor,
    base: Tensor,
    block: int,
    weight: Tensor,
    eps: float,
    tap: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Applies `block_conv` to a sub-layer's partial sums [P, M, D], then `add_rms_norm`."""
    return add_rms_norm(x, block_conv(partial_sums, dynamic, base, block)[None], weight, eps, tap)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (normed.to(weight.dtype) * weight).to(x.dtype)


def _rotate(x: Tensor, rope: Tensor, positions: Tensor, interleaved: bool = False) -> Tensor:
    """Applies RoPE to the first R of x [M, heads, H]; rope [2, positions, R / 2] has cosines and sines.

    A pair is one number of each half of the R (as in GPT-NeoX), or with `interleaved` two adjacent ones.
    """
    cos, sin = rope[0, positions, None], rope[1, positions, None]  # [M, 1, R / 2]
    half = cos.shape[-1]
    if interleaved:
        (first, second), rest = x[..., : 2 * half].float().unflatten(-1, (-1, 2)).unbind(-1), x[..., 2 * half :]
        turned = torch.stack([first * cos - second * sin, second * cos + first * sin], dim=-1).flatten(-2)
        return torch.cat([turned.to(x.dtype), rest], dim=-1)
    first, second, rest = x.float().split([half, half, x.shape[-1] - 2 * half], dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1).to(x.dtype)


def fuses_post_attention(x: Tensor, weights: Sequence[Weight | None]) -> bool:
    """Returns whether `fused_post_attention` supports the stream x [M, D] and these matrices; the reference does."""
    return True


def fused_post_attention(
    x: Tensor,
    a: Tensor,
    o: Weight,
    post_norm: Tensor,
    gate_up: Weight,
    down: Weight,
    norm: Tensor,
    qkv: Weight | None,
    eps: float,
    tap: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Computes a dense layer after its attention, and the queries, keys and values of the next, without biases.

    Args:
        x: the residual stream [M, D] before the layer.
        a: the layer's attention [M, N * H].
        o, post_norm, gate_up, down: the layer's weights; gate_up as for `linear_swiglu`.
        norm: [D], norm of the next layer, or the final norm.
        qkv: [(N + 2 * G) * H, D] of the next layer; None after the last layer.
        tap: a view [M, D] that receives the layer's output.

    Matrices in fp8 are multiplied with rows in fp8: rows of `a` are scaled by their largest value, others are cast.

    Returns:
        The layer's output and its norm, both [M, D], and the next layer's qkv without its bias, as split-K partial sums
        [P, M, (N + 2 * G) * H] for `rope_write`, or None.
    """

    a = RowScaledFp8.of(a).dense(a.dtype) if is_row_scaled(o) else a
    x, h = add_rms_norm(x, linear_split_k(a, o), post_norm, eps)
    active = linear_swiglu(_operand(h, gate_up), gate_up)
    x, h = add_rms_norm(x, linear_split_k(_operand(active, down), down), norm, eps, tap)
    return x, h, None if qkv is None else linear_split_k(_operand(h, qkv), qkv)


def _operand(rows: Tensor, weight: Weight) -> Tensor:
    return cast_fp8(rows).to(rows.dtype) if is_row_scaled(weight) else rows


def fuses_conv_post_attention(
    x: Tensor, weights: Sequence[Weight | None], convolutions: Sequence[tuple[Tensor, Weight] | None]
) -> bool:
    """Returns whether `fused_conv_post_attention` supports the stream x [M, D] and these; the reference does."""
    return True


def fused_conv_post_attention(
    x: Tensor,
    a: Tensor,
    after: Tensor,
    base: Tensor,
    o: Weight,
    post_norm: Tensor,
    ffn: tuple[Tensor, Weight],
    gate_up: Weight,
    down: Weight,
    norm: Tensor,
    following: tuple[Tensor, Weight] | None,
    qkv: Weight | None,
    eps: float,
    block: int,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Computes `fused_post_attention` of a layer with convolutions around its sub-layers, see `block_conv`.

    Args:
        after: partial sums [P, M, T * (D / g)], the coefficients of the convolution after o.
        base: [T, D], base of that convolution.
        ffn: base [2, T, D] and projection [2 * T * (D / g), D] of the convolutions around the FFN. The projection has
            the rows of the coefficients before it, then those after it.
        following: the same for the next layer's attention; None after the last layer.

    Returns:
        The layer's output and its norm, both [M, D], and the next layer's qkv without bias and `after`, or None twice.
    """
    a = RowScaledFp8.of(a).dense(a.dtype) if is_row_scaled(o) else a
    x, h = conv_add_rms_norm(x, linear_split_k(a, o), after, base, block, post_norm, eps)
    before, after = linear_split_k(_operand(h, ffn[1]), ffn[1]).chunk(2, dim=2)
    inside = _operand(block_conv(h, before, ffn[0][0], block), gate_up)
    active = _operand(linear_swiglu(inside, gate_up), down)
    x, h = conv_add_rms_norm(x, linear_split_k(active, down), after, ffn[0][1], block, norm, eps)
    if following is None or qkv is None:
        return x, h, None, None
    before, after = linear_split_k(_operand(h, following[1]), following[1]).chunk(2, dim=2)
    inside = _operand(block_conv(h, before, following[0][0], block), qkv)
    return x, h, linear_split_k(inside, qkv), after


def top_experts(
    partial_sums: Tensor,
    dtype: torch.dtype,
    top_k: int,
    *,
    normalized: bool,
    shared: int,
    sigmoid: SigmoidRouting | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns the most probable experts of every row and their weights, routed like in transformers.

    Args:
        partial_sums: the router's logits, [P, M, E], or E + 1 with the gate of `shared` experts.
        dtype: dtype of the logits and of the final weights; the softmax is in fp32.
        top_k: experts of a row, at most E.
        normalized: the weights of a row's `top_k` are divided by their sum.
        shared: the experts from E on, the last ones of every row, weighted with the sigmoid of their gate.
        sigmoid: how else the experts and their weights follow from the logits; there is no gate then.

    Returns:
        Weights fp32 [M, top_k + shared] and experts int32 of that shape, most probable first, lower ids first if equal.
        The experts of a row are distinct and valid for any logits.
    """
    logits = partial_sums.float().sum(0).to(dtype)
    gated = shared > 0 and sigmoid is None
    count = logits.shape[1] - gated
    scores = logits[:, :count].float().sigmoid() if sigmoid else logits[:, :count].float().softmax(-1)
    choice = _corrected(scores, sigmoid) if sigmoid else scores
    experts = choice.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = scores.gather(1, experts)
    if normalized:
        weights = weights / (weights.sum(-1, keepdim=True) + (1e-20 if sigmoid else 0.0))
    weights = (weights * sigmoid.scale if sigmoid else weights).to(dtype).float()
    if shared:
        gates = logits[:, count:].sigmoid().float() if gated else torch.ones_like(weights[:, :1])
        numbers = torch.arange(count, count + shared, device=experts.device)
        weights = torch.cat([weights, gates.expand(-1, shared)], dim=1)
        experts = torch.cat([experts, numbers.expand(len(experts), -1)], dim=1)
    return weights, experts.int()


def _corrected(scores: Tensor, how: SigmoidRouting) -> Tensor:
    """Returns scores [M, E] plus the correction, and -inf outside of the best groups."""
    choice = scores + how.correction
    groups = choice.unflatten(1, (how.groups, -1))
    totals = groups.topk(min(2, groups.shape[2]), dim=-1).values.sum(-1)
    best = totals.sort(dim=-1, descending=True, stable=True).indices[:, : how.top_groups]
    inside = torch.zeros_like(totals, dtype=torch.bool).scatter(1, best, True)
    return groups.masked_fill(~inside[..., None], -torch.inf).flatten(1)


def experts_mlp(
    x: Operand,
    gate_up: Weight,
    down: Weight,
    weights: Tensor,
    experts: Tensor,
    clamped: ClampedExperts | None = None,
) -> Tensor:
    """Returns the outputs of each row's experts times their weights.

    Args:
        x: [M, D].
        gate_up: [E, 2 * I, D], the gates of an expert, then its ups.
        down: [E, D, I].
        weights, experts: [M, k], see `top_experts`.
        clamped: biases and the activation, if it is not silu(gate) * up; then gates and ups alternate.

    Returns:
        Partial sums [k, M, D], in the order of each row's experts, for `add_rms_norm`.
    """
    x = values_of(x)
    found = x.new_empty(experts.shape[1], *x.shape)
    for expert in experts.unique().tolist():
        rows, ranks = (experts == expert).nonzero(as_tuple=True)
        first_bias, second_bias = (None, None) if clamped is None else clamped.biases(expert)
        product = linear(x[rows], gate_up[expert], first_bias)
        gate, up = product.chunk(2, dim=-1)
        active = clamped.activate(product) if clamped else F.silu(gate) * up
        output = linear(active, down[expert], second_bias)
        found[ranks, rows] = output * weights[rows, ranks, None].to(x.dtype)
    return found


def rope_write(
    partial_sums: Tensor,
    bias: Tensor | None,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    rope: Tensor,
    lengths: Tensor,
    page_table: Tensor,
    cache: Tensor,
    page_size: int,
    counts: Tensor | None = None,
    *,
    gated: bool = False,
    interleaved: bool = False,
    normed_values: bool = False,
    at: Tensor | None = None,
    scales: Tensor | None = None,
) -> Tensor:
    """Adds up qkv, norms and rotates queries and keys, and writes keys and values to the pages of their positions.

    Args:
        partial_sums: qkv, [P, M, (N + 2 * G) * H], heads of q, then k, then v; their sum is rounded to the
            dtype of the cache, or of the scales if the cache is in fp8.
        bias: [(N + 2 * G) * H], added before that; None adds nothing.
        q_weight, k_weight: [H] per-head RMSNorm weights; None if the architecture has none.
        rope: fp32 [2, positions, R / 2], cosines and sines for the first R numbers of a head.
        lengths: int32 [B]; row b * S + k is at position lengths[b] + k.
        page_table: int32 [B, pages of a request].
        cache: [2, slots, G, H], keys and values of one layer, written in place.
        counts: int32 [B]; rows k >= counts[b] are padding and write to the null block, page 0. None: no padding.
        at: int32 [M], the slots of the rows if they are not those of their positions; the page table is not read.
        interleaved: pairs that turn are adjacent numbers, see `_rotate`.
        normed_values: each head of v is also normed, without weights.
        gated: each head of q is followed by its gate, [P, M, (2 * N + 2 * G) * H]; see `gate_heads`.
        scales: [2, G, slots] of an fp8 cache, written in place.

    Returns:
        Queries [M, N, H] in that dtype.
    """
    groups, width = cache.shape[2:]
    total = partial_sums.float().sum(0)
    qkv = (total if bias is None else total + bias.float()).to(cache.dtype if scales is None else scales.dtype)
    block = len(qkv) // len(lengths)
    positions = lengths[:, None] + torch.arange(block, device=lengths.device)
    q, k, v = qkv.unflatten(1, (-1, width)).split([qkv.shape[1] // width - 2 * groups, groups, groups], dim=1)
    q = q[:, ::2] if gated else q
    q = _rms_norm(q, q_weight, eps) if q_weight is not None else q
    k = _rms_norm(k, k_weight, eps) if k_weight is not None else k
    v = _rms_norm(v, torch.ones_like(v[0, 0], dtype=torch.float32), eps) if normed_values else v
    if at is None:
        slots = slots_of(positions, page_table, page_size)
        if counts is not None:
            slots = torch.where(positions < (lengths + counts)[:, None], slots, positions % page_size)
        at = slots.flatten()
    slots = at.long()
    for side, heads in enumerate((_rotate(k, rope, positions.flatten(), interleaved), v)):
        store_heads(cache[side], None if scales is None else scales[side], slots, heads)
    return _rotate(q, rope, positions.flatten(), interleaved)


def norm_queries_keys(
    partial_sums: Tensor, bias: Tensor | None, q_weight: Tensor, k_weight: Tensor, eps: float, dtype: torch.dtype
) -> Tensor:
    """Adds up qkv and norms the queries of all heads of a row together, and the keys; `rope_write` then norms nothing.

    Args:
        partial_sums: [P, M, (N + 2 * G) * H]; their sum, with bias [(N + 2 * G) * H], is rounded to `dtype`.
        q_weight, k_weight: [N * H] and [G * H], of the RMSNorms.

    Returns:
        [1, M, (N + 2 * G) * H] in `dtype`.
    """
    total = partial_sums.float().sum(0)
    qkv = (total if bias is None else total + bias.float()).to(dtype)
    q, k, v = qkv.split([len(q_weight), *[len(k_weight)] * 2], dim=1)
    return torch.cat([_rms_norm(q, q_weight, eps), _rms_norm(k, k_weight, eps), v], dim=1)[None]


def gate_heads(x: Tensor, partial_sums: Tensor, head_dim: int) -> Tensor:
    """Multiplies attention x [M, N * H] with the sigmoid of the gates in the partial sums of `rope_write`."""
    columns = 2 * x.shape[1]
    gates = partial_sums[..., :columns].float().sum(0).to(x.dtype).unflatten(1, (-1, 2, head_dim))[:, :, 1]
    return x * gates.flatten(1).sigmoid()


def context_write(
    kv: Tensor,
    k_weights: Tensor,
    eps: float,
    rope: Tensor,
    lengths: Tensor,
    counts: Tensor,
    page_table: Tensor,
    cache: Tensor,
    page_size: int,
    scales: Tensor | None = None,
) -> None:
    """Norms, rotates and writes every draft layer's context keys and values of each request's first counts[b] rows.

    Args:
        kv: [M, L * 2 * G * H]: for each layer its keys, then its values.
        k_weights: [L, H].
        lengths, counts: int32 [B]; row b * S + k is position lengths[b] + k and is written if k < counts[b].
        cache: [L, 2, slots, G, H], written in place.
        scales: [L, 2, G, slots] of an fp8 cache, written in place.
    """
    layers, _, _, groups, width = cache.shape
    block = len(kv) // len(lengths)
    steps = torch.arange(block, device=lengths.device)
    positions = lengths[:, None] + steps
    rows = (steps < counts[:, None]).flatten().nonzero()[:, 0]
    slots = slots_of(positions, page_table, page_size).flatten()[rows]
    heads = kv[rows].unflatten(1, (layers, 2, groups, width))
    for layer in range(layers):
        k = _rms_norm(heads[:, layer, 0], k_weights[layer], eps)
        for side, head in enumerate((_rotate(k, rope, positions.flatten()[rows]), heads[:, layer, 1])):
            store_heads(cache[layer, side], None if scales is None else scales[layer, side], slots, head)


def accept(
    draft: Tensor,
    choice: Tensor,
    active: Tensor,
    lengths: Tensor,
    last_token: Tensor,
    forced: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Commits the longest drafted prefix that equals the target's choices, and its choice at the first mismatch.

    Args:
        draft: int64 [B, S - 1], S >= 1.
        choice: int64 [B, S].
        active: bool [B]; other rows commit nothing.
        lengths: int32 [B], advanced in place by the number of committed tokens.
        last_token: int64 [B], replaced in place by the last committed token.
        forced: int32 [B], numbers of drafted tokens to accept, whatever the target chose (synthetic acceptance).

    Returns:
        counts int32 [B], the committed tokens of each row (0 where inactive), and tokens int64 [B, S], of which
        the first `counts` are committed.
    """
    accepted = accepted_prefix(draft, choice) if forced is None else forced.long()
    counts = torch.where(active, accepted + 1, 0).to(lengths.dtype)
    bonus = choice.gather(1, accepted[:, None])  # [B, 1]
    tokens = torch.cat([draft, bonus], dim=1).scatter(1, accepted[:, None], bonus)
    lengths += counts
    last_token.copy_(torch.where(active, bonus[:, 0], last_token))
    return counts, tokens


def sample(logits: Tensor, temperature: Tensor, top_p: Tensor, top_k: Tensor, min_p: Tensor, uniform: Tensor) -> Tensor:
    """Returns every row's token with its own parameters: sampled from `filtered_probabilities`, or the argmax.

    Args:
        logits: [M, V].
        temperature, top_p, min_p: fp32 [M]; temperature 0 chooses the largest logit, the first of tied ones.
        top_k: int64 [M] in 1..V.
        uniform: fp64 [M] in [0, 1), as in `choose`.

    Returns:
        int64 [M]; any token for a row with NaN.
    """
    drawn = choose(_filtered_by_row(logits, temperature, top_p, top_k, min_p), uniform)
    return torch.where(temperature == 0.0, logits.argmax(-1), drawn)


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
    """Does the same as `sample`, but accepts each row's draft or replaces it, see `accept_or_resample`.

    Args:
        draft: int64 [M], the sampled draft of each row; -1: none.
        candidates: int64 [M, C].
        q: fp32 [M, C].
        acceptance: fp64 [M] in [0, 1).
    """
    p = _filtered_by_row(logits, temperature, top_p, top_k, min_p)
    drawn = accept_or_resample(p, draft, candidates, q, uniform, acceptance)
    return torch.where(temperature == 0.0, logits.argmax(-1), drawn)


def _filtered_by_row(logits: Tensor, temperature: Tensor, top_p: Tensor, top_k: Tensor, min_p: Tensor) -> Tensor:
    """Returns `filtered_probabilities` [M, V] with each row's own parameters; meaningless at temperature 0."""
    scores = logits.float() / torch.where(temperature == 0.0, 1.0, temperature)[:, None]
    ordered, order = scores.sort(dim=-1, descending=True, stable=True)
    ordered = ordered.masked_fill(ordered < ordered.gather(1, top_k[:, None] - 1), -torch.inf)
    mass = ordered.softmax(-1)
    outside = (mass.cumsum(-1) - mass >= top_p[:, None]) & (top_p < 1.0)[:, None]
    scores = torch.empty_like(ordered).scatter_(1, order, ordered.masked_fill(outside, -torch.inf))
    probabilities = scores.softmax(-1)
    floor = min_p[:, None] * probabilities.amax(-1, keepdim=True)
    kept = probabilities.masked_fill(probabilities < floor, 0.0)
    return torch.where((min_p > 0.0)[:, None], kept / kept.sum(-1, keepdim=True), probabilities)


# ---- norms of gated delta nets ----------------------------------------------------------------------


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Returns the RMSNorm of every head of x [M, N H] by weight [H], times silu(gate [M, N H]); gate may be columns."""
    normed = _rms_norm(x.unflatten(1, (-1, len(weight))), weight, eps)
    return (normed.flatten(1).float() * F.silu(gate.float())).to(x.dtype)


def gated_rms_norm_quantized(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Operand:
    """`gated_rms_norm` for a GEMM that quantizes rows in groups; a kernel may return quantized rows."""
    return gated_rms_norm(x, gate, weight, eps)


# ---- the loss --------------------------------------------------------------------------------------


def row_top(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Returns the `count` largest logits of each row of [R, V], fp32 [R, count], and their columns, int64 [R, count].

    The largest come first, in any order among tied ones.
    """
    found = logits.topk(count)
    return found.values.float(), found.indices


def row_loss_(
    logits: Tensor,
    labels: Tensor,
    terms: RowTerms,
    mix: LossMix,
    gradient: bool,
    target: Tensor | None = None,
    at: Tensor | None = None,
) -> None:
    """Computes losses of rows of logits, ranks of their labels, and the gradient in place; in at least fp32.

    Args:
        logits: [R, V] of the drafter; with `gradient` they become d loss / d logits, rounded to their dtype once.
        labels: [R] long.
        terms: [R], written; kl and acceptance only where `mix` needs the target's distribution.
        target: [U, V] logits of the target.
        at: [R] long, the row of `target` that belongs to each row.
    """
    x = logits.to(torch.promote_types(logits.dtype, torch.float32))
    label = labels[:, None]
    at_label = x.gather(-1, label)
    normaliser = x.logsumexp(-1, keepdim=True)
    terms.cross_entropy.copy_((normaliser - at_label)[:, 0])
    # the first of equal logits comes first, as in argmax; a NaN comes before everything
    columns = torch.arange(x.shape[1], device=x.device)
    terms.rank.copy_(x.shape[1] - ((x < at_label) | ((x == at_label) & (columns >= label))).sum(-1))
    more = None
    if mix.distribution:
        assert target is not None and at is not None and terms.kl is not None and terms.acceptance is not None
        log_q = (x / mix.temperature).log_softmax(-1)
        log_p = (target.to(x.dtype) / mix.temperature).log_softmax(-1)[at]
        p, q = log_p.exp(), log_q.exp()
        terms.kl.copy_(torch.where(p > 0, p * (log_p - log_q), 0.0).sum(-1))
        terms.acceptance.copy_(torch.minimum(p, q).sum(-1).clamp(max=1.0))
        if gradient:
            below = (q < p).to(x.dtype)
            kl, tv = (slope[:, None] for slope in mix.slopes(terms.acceptance))
            reach = (q * below).sum(-1, keepdim=True)
            more = (kl * (q - p) + tv * q * (reach - below)) / mix.temperature
    if gradient:
        x = x.sub_(normaliser).exp_()
        x.scatter_add_(-1, label, torch.full_like(at_label, -1.0))
        if mix.ce != 1.0:
            x *= mix.ce
        if more is not None:
            x += more
        if x is not logits:
            logits.copy_(x)


TARGET_STREAM, DRAFT_STREAM, ACCEPTANCE_STREAM = range(3)  # independent random numbers at one position


def position_uniform(seed: Tensor, position: Tensor, stream: int = TARGET_STREAM) -> Tensor:
    """Returns a uniform number in [0, 1) that depends only on (seed, position, stream), by the SplitMix64 finaliser.

    Args:
        seed, position: int64, of the same shape.
        stream: its use: the target's own token, a draft, or the acceptance of a draft.

    Returns:
        float64 of that shape.
    """

    def signed(constant: int) -> int:  # int64 multiplication wraps, as the algorithm requires
        constant &= (1 << 64) - 1
        return constant - (1 << 64) if constant >> 63 else constant

    def shifted(z: Tensor, bits: int) -> Tensor:  # >> on int64 copies the sign
        return (z >> bits) & ((1 << (64 - bits)) - 1)

    z = seed * signed(0x9E3779B97F4A7C15) + position * signed(0xD1342543DE82EF95)
    z = z + signed(0x632BE59BD9B4E019 + stream * 0xD6E8FEB86659FD93)
    for bits, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z = (z ^ shifted(z, bits)) * signed(factor)
    return shifted(z ^ shifted(z, 31), 11).double() / (1 << 53)
