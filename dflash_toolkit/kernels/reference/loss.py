"""Defines the loss of rows of logits and its gradient."""

import torch
from torch import Tensor

from ..loss_terms import LossMix, RowTerms


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
