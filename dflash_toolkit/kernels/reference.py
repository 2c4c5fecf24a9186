"""Plain torch definitions of the project's own operations, written for reading. They know tensors, not models."""

from dataclasses import dataclass

import torch
from torch import Tensor


def filtered_probabilities(
    logits: Tensor, *, temperature: float, top_p: float = 1.0, top_k: int = 0, min_p: float = 0.0
) -> Tensor:
    """The distribution a sampler draws from, in fp32.

    The order is that of Hugging Face `generate`: temperature, top-k, top-p, min-p; ties at the k-th logit stay,
    and of tokens tied at the edge of top-p those with the lower ids stay.

    Args:
        logits: [..., V].
        temperature: > 0.
        top_p: smallest set of tokens whose mass reaches top_p stays; 1 keeps all.
        top_k: 0 keeps all.
        min_p: tokens below min_p times the largest probability go; 0 keeps all.

    Returns:
        Probabilities [..., V] that sum to 1.
    """
    scores = logits.float() / temperature
    if 0 < top_k < scores.shape[-1]:
        kth = scores.topk(top_k, dim=-1).values[..., -1:]
        scores = scores.masked_fill(scores < kth, -torch.inf)
    if top_p < 1.0:
        # stable: which tied token stays may not depend on how many rows are filtered at once
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


def choose(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """Inverse-CDF sampling: the first token whose cumulative mass exceeds `uniform`.

    Args:
        probabilities: [M, V].
        uniform: [M] in [0, 1).

    Returns:
        Token ids [M], each with probability > 0.
    """
    cdf = probabilities.double().cumsum(-1)
    threshold = uniform.double() * cdf[:, -1]
    return torch.searchsorted(cdf, threshold[:, None], right=True)[:, 0].clamp_(max=probabilities.shape[-1] - 1)


def accepted_prefix(draft: Tensor, choice: Tensor) -> Tensor:
    """How many drafted tokens equal the target's own choice before the first that does not.

    This one rule serves greedy and sampled verification (contract, "One decoding step"): `choice[i]` is the token
    the target takes at that position, the argmax or a draw from its distribution p. Then a drafted d is accepted
    with probability p(d), and after a rejection the choice is distributed as p with d removed: exactly speculative
    sampling with a point mass as proposal (Leviathan et al. 2023, Algorithm 1 with q = 1 at d).

    Args:
        draft: [M, S - 1] proposed tokens.
        choice: [M, S] or [M, S - 1]; the target's tokens, `choice[:, i]` standing where `draft[:, i]` does.

    Returns:
        Counts [M] in 0..S-1.
    """
    return (draft == choice[:, : draft.shape[1]]).long().cumprod(dim=1).sum(dim=1)


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
