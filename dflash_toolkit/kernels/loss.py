"""The loss through the frozen head: per-row cross-entropy without full logits.

On a GPU the logits of a chunk are bf16 in one reused buffer, which a kernel turns into their gradient in place; else
plain torch in fp32, which is the definition.
"""

import importlib
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
        if hidden.is_cuda:
            _chunks_on_gpu(hidden, weight, labels, chunk, loss, correct, d_hidden)
        else:
            _chunks(hidden, weight, labels, chunk, loss, correct, d_hidden)
        ctx.save_for_backward(d_hidden)
        ctx.mark_non_differentiable(correct)
        return loss, correct

    @staticmethod
    def backward(ctx, d_loss: Tensor, _: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[no-untyped-def]
        (d_hidden,) = ctx.saved_tensors
        return (d_hidden * d_loss[:, None]).to(d_hidden.dtype), None, None, None


def _chunks(
    hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int, loss: Tensor, correct: Tensor, d_hidden: Tensor | None
) -> None:
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


def _chunks_on_gpu(
    hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int, loss: Tensor, correct: Tensor, d_hidden: Tensor | None
) -> None:
    """`_chunks` with the logits rounded to the weight's dtype once and read twice."""
    kernel = importlib.import_module("dflash_toolkit.kernels.cross_entropy")  # Triton is no dependency on a CPU
    buffer = torch.empty(min(chunk, len(hidden)), len(weight), dtype=weight.dtype, device=hidden.device)
    for start in range(0, len(hidden), chunk):
        rows = slice(start, start + chunk)
        logits = buffer[: len(hidden[rows])]
        torch.mm(hidden[rows].to(weight.dtype), weight.T, out=logits)
        kernel.cross_entropy_(logits, labels[rows], loss[rows], correct[rows], gradient=d_hidden is not None)
        if d_hidden is not None:
            d_hidden[rows] = (logits @ weight).to(hidden.dtype)


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
