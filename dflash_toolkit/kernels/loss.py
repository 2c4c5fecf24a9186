"""Definition of the loss through the frozen head, in plain torch: per-row cross-entropy without full logits."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(slots=True)
class RowLoss:
    """Per-row result of the frozen head."""

    loss: Tensor  # [R] cross-entropy in nats, fp32, differentiable with respect to the hidden states
    correct: Tensor  # [R] bool, whether the argmax is the label


class _FrozenHeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int) -> tuple[Tensor, Tensor]:  # type: ignore[no-untyped-def]
        loss = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        correct = torch.empty(len(hidden), dtype=torch.bool, device=hidden.device)
        # the head has no gradient, so d_hidden can be made in the same pass, up to the row's incoming factor
        d_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        for start in range(0, len(hidden), chunk):
            rows = slice(start, start + chunk)
            logits = (hidden[rows].to(weight.dtype) @ weight.T).float()  # [chunk, V], the only logits that ever exist
            target = labels[rows, None]
            log_normaliser = logits.logsumexp(-1, keepdim=True)
            loss[rows] = (log_normaliser - logits.gather(-1, target))[:, 0]
            correct[rows] = logits.argmax(-1) == labels[rows]
            if d_hidden is not None:
                d_logits = logits.sub_(log_normaliser).exp_()
                d_logits.scatter_add_(-1, target, torch.full_like(target, -1.0, dtype=torch.float32))
                d_hidden[rows] = (d_logits.to(weight.dtype) @ weight).to(hidden.dtype)
        ctx.save_for_backward(d_hidden)
        ctx.mark_non_differentiable(correct)
        return loss, correct

    @staticmethod
    def backward(ctx, d_loss: Tensor, _: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[no-untyped-def]
        (d_hidden,) = ctx.saved_tensors
        return (d_hidden * d_loss[:, None]).to(d_hidden.dtype), None, None, None


def frozen_head_loss(hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int = 512) -> RowLoss:
    """Cross-entropy of a frozen LM head without ever holding the full logits.

    Args:
        hidden: [R, D], rows that count (slot 0 and unsupervised slots already dropped).
        weight: [V, D], frozen; it gets no gradient.
        labels: [R] token ids.
        chunk: rows whose logits exist at one time.

    Returns:
        `RowLoss`; weights are applied by the caller, so they may depend on the losses themselves (D-PACE).
    """
    return RowLoss(*_FrozenHeadLoss.apply(hidden, weight, labels, chunk))
