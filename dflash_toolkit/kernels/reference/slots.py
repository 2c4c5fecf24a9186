"""Plain torch definitions of DSpine's operations between the slots of blocks, written for reading.

Rows are those of B blocks: row b * block + s is slot s. The anchor is slot 0, and K = block - 1 others follow it.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def slot_messages(projected: Tensor, anchors: Tensor, bias: Tensor, block: int) -> Tensor:
    """Returns the gated message to every row from the slot before it, [B * block, m]; 0 to the anchors.

    It is sigmoid(receiver + gate + bias) * message, with gate and message of the slot before, in fp32.

    Args:
        projected: [B * block, 3 m], of each row: its part as a receiver, as a gate and as a message.
        anchors: [B, 2 m], gate and message of each anchor's token, for slot 1.
        bias: [m].
    """
    m = len(bias)
    rows = projected.unflatten(0, (-1, block))
    before = torch.cat([anchors[:, None], rows[:, 1:-1, m:]], dim=1)
    sent = _gated(rows[:, 1:, :m], before, bias)
    return F.pad(sent, (0, 0, 1, 0)).flatten(0, 1)


def pair_messages(projected: Tensor, predecessors: Tensor, bias: Tensor, block: int) -> Tensor:
    """Returns the message to slots 1..K from each of C tokens that may be before them, [B * K * C, m].

    Args:
        projected: see `slot_messages`; only the receivers are read.
        predecessors: [B * K * C, 2 m], gates and messages of the tokens.
    """
    m = len(bias)
    receivers = projected.unflatten(0, (-1, block))[:, 1:, None, :m]  # [B, K, 1, m]
    return _gated(receivers, predecessors.view(*receivers.shape[:2], -1, 2 * m), bias).flatten(0, 2)


def _gated(receivers: Tensor, before: Tensor, bias: Tensor) -> Tensor:
    gates, messages = before.float().chunk(2, dim=-1)
    return (torch.sigmoid(receivers.float() + gates + bias.float()) * messages).to(before.dtype)


def inject_rms_norm(x: Tensor, partial_sums: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Returns x [M, D] + |x| / sqrt(D) * the sum of partial_sums [P, M, D], and its RMSNorm with `weight` [D]."""
    total = _injected(x, partial_sums.float().sum(0))
    return total, _normed(total, weight, eps)


def pair_scores(
    x: Tensor, written: Tensor, weight: Tensor, eps: float, head: Tensor, candidates: Tensor, block: int
) -> Tensor:
    """Returns the products of each candidate with its slot's state after each candidate before: fp32 [B, K, C, C'].

    [b, k, c, a] is candidate c of slot k + 1 after candidate a of slot k; with k = 0 all a are the anchor.

    Args:
        x: [B * block, D], the states before the injection.
        written: [B * K * C', D], the injections after each candidate of the slot before.
        weight, eps: of the final norm.
        head: [V, D].
        candidates: int64 [B, K, C].
    """
    rows = x.unflatten(0, (-1, block))[:, 1:, None]  # [B, K, 1, D]
    refined = _normed(_injected(rows, written.view(*rows.shape[:2], -1, rows.shape[-1]).float()), weight, eps)
    return F.embedding(candidates, head).float() @ refined.to(head.dtype).float().mT


def _injected(x: Tensor, written: Tensor) -> Tensor:
    length = torch.linalg.vector_norm(x.float(), dim=-1, keepdim=True) / math.sqrt(x.shape[-1])
    return (x.float() + length * written).to(x.dtype)


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype) * weight
