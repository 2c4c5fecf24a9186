"""Losses of stored logits and their gradient, in place, in Triton: one program per row.

Cross-entropy alone reads the row once for the loss and once more for the gradient. The distribution losses read the
drafter's and the target's row together: once for both softmax normalisers, once for KL and acceptance (TV's gradient
needs the whole row's overlap before it can be written), once for the gradient.

Rounding: logits are read in their dtype and everything is fp32 after that; the gradient is rounded to the logits' dtype
once, when it is stored. Every lane keeps its own running sum, so the vocabulary's size fixes the order of
summation; other rows do not change it.
"""

# mypy: disable-error-code="no-untyped-def"
import triton
import triton.language as tl
from torch import Tensor

from ..launch import next_power_of_two
from ..loss_terms import LEAST_ACCEPTANCE, LossMix, RowTerms

BLOCK = 4096  # columns at a time
BLOCK_TWO = 2048  # the same, of two rows


@triton.jit
def _add_to_softmax(b_top, b_total, b_x):
    """Adds one value to every lane's running maximum and sum of exponentials."""
    b_new = tl.maximum(b_top, b_x)
    b_safe = tl.where(b_new == -float("inf"), 0.0, b_new)  # a lane without values
    return b_new, b_total * tl.exp(b_top - b_safe) + tl.exp(b_x - b_safe)


@triton.jit
def _log_sum_exp(b_top, b_total):
    top = tl.max(b_top, axis=0)
    return top + tl.log(tl.sum(b_total * tl.exp(b_top - top), axis=0))


@triton.jit(do_not_specialize=["V"])
def _row_loss_kernel(
    logits_p, labels_p, target_p, at_p, cross_entropy_p, rank_p, kl_p, acceptance_p, V, stride, stride_target,
    w_ce, w_kl, w_tv, w_lk, w_hybrid, eta, least, inverse_t,
    BLOCK: tl.constexpr, GRADIENT: tl.constexpr, DISTRIBUTION: tl.constexpr, TEMPERED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    p_row = logits_p + row * stride
    o_v = tl.arange(0, BLOCK)
    label = tl.load(labels_p + row)
    at_label = tl.load(p_row + label).to(tl.float32)
    b_top = tl.full([BLOCK], -float("inf"), dtype=tl.float32)
    b_total = tl.zeros([BLOCK], dtype=tl.float32)
    b_before = tl.zeros([BLOCK], dtype=tl.int32)
    if DISTRIBUTION:
        p_target = target_p + tl.load(at_p + row) * stride_target
        b_top_p = tl.full([BLOCK], -float("inf"), dtype=tl.float32)
        b_total_p = tl.zeros([BLOCK], dtype=tl.float32)
    if TEMPERED:
        b_top_q = tl.full([BLOCK], -float("inf"), dtype=tl.float32)
        b_total_q = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, V, BLOCK):
        mask = start + o_v < V
        b_x = tl.load(p_row + start + o_v, mask=mask, other=-float("inf")).to(tl.float32)
        # the first of equal logits comes first, as in argmax; a NaN comes before everything
        b_after = (b_x < at_label) | ((b_x == at_label) & (start + o_v >= label))
        b_before += tl.where(mask & (b_after == 0), 1, 0)
        b_top, b_total = _add_to_softmax(b_top, b_total, b_x)
        if DISTRIBUTION:
            b_z = tl.load(p_target + start + o_v, mask=mask, other=-float("inf")).to(tl.float32)
            b_top_p, b_total_p = _add_to_softmax(b_top_p, b_total_p, b_z * inverse_t)
        if TEMPERED:
            b_top_q, b_total_q = _add_to_softmax(b_top_q, b_total_q, b_x * inverse_t)
    normaliser = _log_sum_exp(b_top, b_total)
    tl.store(cross_entropy_p + row, normaliser - at_label)
    tl.store(rank_p + row, tl.sum(b_before, axis=0))

    if DISTRIBUTION:
        normaliser_p = _log_sum_exp(b_top_p, b_total_p)
        normaliser_q = normaliser
        if TEMPERED:
            normaliser_q = _log_sum_exp(b_top_q, b_total_q)
        b_kl = tl.zeros([BLOCK], dtype=tl.float32)
        b_least = tl.zeros([BLOCK], dtype=tl.float32)
        b_reach = tl.zeros([BLOCK], dtype=tl.float32)
        for start in range(0, V, BLOCK):
            mask = start + o_v < V
            b_x = tl.load(p_row + start + o_v, mask=mask, other=-float("inf")).to(tl.float32)
            b_z = tl.load(p_target + start + o_v, mask=mask, other=-float("inf")).to(tl.float32)
            b_log_q = b_x * inverse_t - normaliser_q
            b_log_p = b_z * inverse_t - normaliser_p
            b_q, b_p = tl.exp(b_log_q), tl.exp(b_log_p)
            b_kl += tl.where(b_p > 0, b_p * (b_log_p - b_log_q), 0.0)
            b_least += tl.minimum(b_p, b_q)
            b_reach += tl.where(b_q < b_p, b_q, 0.0)
        acceptance = tl.minimum(tl.sum(b_least, axis=0), 1.0)
        reach = tl.sum(b_reach, axis=0)
        tl.store(kl_p + row, tl.sum(b_kl, axis=0))
        tl.store(acceptance_p + row, acceptance)
        share = tl.exp(-eta * acceptance)
        s_kl = (w_kl + w_hybrid * share) * inverse_t
        s_tv = (w_tv + w_lk / tl.maximum(acceptance, least) + w_hybrid * (1 - share)) * inverse_t

    if GRADIENT:
        for start in range(0, V, BLOCK):
            mask = start + o_v < V
            b_x = tl.load(p_row + start + o_v, mask=mask, other=0.0).to(tl.float32)
            b_g = w_ce * (tl.exp(b_x - normaliser) - tl.where(start + o_v == label, 1.0, 0.0))
            if DISTRIBUTION:
                b_z = tl.load(p_target + start + o_v, mask=mask, other=0.0).to(tl.float32)
                b_q = tl.exp(b_x * inverse_t - normaliser_q)
                b_p = tl.exp(b_z * inverse_t - normaliser_p)
                b_g += s_kl * (b_q - b_p) + s_tv * b_q * (reach - tl.where(b_q < b_p, 1.0, 0.0))
            tl.store(p_row + start + o_v, b_g.to(logits_p.dtype.element_ty), mask=mask)


def row_loss_(
    logits: Tensor,
    labels: Tensor,
    terms: RowTerms,
    mix: LossMix,
    gradient: bool,
    target: Tensor | None = None,
    at: Tensor | None = None,
) -> None:
    """Writes losses and label ranks of logits [R, V] to `terms`.

    With `gradient` the logits become d loss / d logits (the table in `LossMix`), rounded to their dtype.

    Args:
        labels: [R] long.
        terms: contiguous; kl and acceptance only where `mix` needs the target's distribution.
        target: [U, V] logits of the target, rounded to their dtype.
        at: [R] long, the row of `target` that belongs to each row.
    """
    rows, vocabulary = logits.shape
    two = mix.distribution
    block = min(BLOCK_TWO if two else BLOCK, next_power_of_two(vocabulary))
    _row_loss_kernel[(rows,)](
        logits, labels, target, at, terms.cross_entropy, terms.rank, terms.kl, terms.acceptance,
        vocabulary, logits.stride(0), target.stride(0) if two and target is not None else 0,
        mix.ce, mix.kl, mix.tv, mix.lk, mix.lk_hybrid, mix.ETA, LEAST_ACCEPTANCE, 1 / mix.temperature,
        BLOCK=block, GRADIENT=gradient, DISTRIBUTION=two, TEMPERED=two and mix.temperature != 1.0, num_warps=8,
    )  # fmt: skip
