"""The loss through the frozen head: per-row losses and the gradient of the hidden states without full logits.

On a GPU the logits of a chunk are in the head's dtype in a reused buffer, which a kernel turns into their gradient in
place; else plain torch in fp32, which is the definition.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .mix import CROSS_ENTROPY, PLAIN, LogitScale, LossMix, RowTerms
from .ops import ops_for


@dataclass(slots=True)
class RowLoss:
    """Per-row result of the frozen head."""

    loss: Tensor  # [R] the mix, nats, fp32, differentiable with respect to the hidden states
    terms: RowTerms  # without gradient

    @property
    def rank(self) -> Tensor:
        """[R] int32, how many tokens the drafter puts before the label."""
        return self.terms.rank

    @property
    def correct(self) -> Tensor:
        """[R] bool, whether the argmax is the label."""
        return self.terms.rank == 0


@dataclass(frozen=True, slots=True)
class TargetStates:
    """The target's prediction for each row, as the hidden states that the head makes logits of."""

    hidden: Tensor  # [N, D] after the target's final norm
    at: Tensor  # [R] long, which of the N predicts the token of a row; many rows may share one
    scale: LogitScale = PLAIN  # behind its head


class _FrozenHeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        chunk: int,
        mix: LossMix,
        states: TargetStates | None,
        scale: LogitScale,
        bias: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        terms = RowTerms.empty(len(hidden), mix.distribution, hidden.device)
        # the head has no gradient, so d_hidden can be made in the same pass, up to the row's incoming factor
        d_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        states = states if mix.distribution else None
        _chunks(hidden, weight, bias, labels, chunk, mix, states, scale, terms, d_hidden)
        ctx.save_for_backward(d_hidden)
        outputs = (terms.cross_entropy, terms.rank, terms.kl, terms.acceptance)
        ctx.mark_non_differentiable(*(t for t in outputs if t is not None))
        return mix.value(terms), *outputs

    @staticmethod
    def backward(ctx, d_loss: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[no-untyped-def]
        (d_hidden,) = ctx.saved_tensors
        return (d_hidden * d_loss[:, None]).to(d_hidden.dtype), None, None, None, None, None, None, None


def _chunks(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    chunk: int,
    mix: LossMix,
    states: TargetStates | None,
    scale: LogitScale,
    terms: RowTerms,
    d_hidden: Tensor | None,
) -> None:
    """Fill `terms` and `d_hidden`, a chunk of rows at a time."""
    ops = ops_for(hidden.device)
    head = _Head(weight, bias, min(chunk, len(hidden)))
    target_head, target, at = head, None, None
    if states is not None:
        shared = _Shared(states, chunk)
        target_head = _Head(weight, bias, shared.most)
    for number, start in enumerate(range(0, len(hidden), chunk)):
        rows = slice(start, start + chunk)
        logits = head(hidden[rows])
        slope = scale.apply_(logits, d_hidden is not None)
        if states is not None:
            needed, at = shared.of(number, rows)
            target = target_head(states.hidden[needed])
            states.scale.apply_(target)
        ops.row_loss_(logits, labels[rows], terms[rows], mix, d_hidden is not None, target, at)
        if d_hidden is not None:
            if scale != PLAIN:
                logits *= slope
            d_hidden[rows] = (logits.to(weight.dtype) @ weight).to(hidden.dtype)


class _Head:
    """Logits of up to so many rows, in one buffer: in the weight's dtype on a GPU, else fp32."""

    def __init__(self, weight: Tensor, bias: Tensor | None, rows: int) -> None:
        self._weight, self._bias = weight, bias
        self._buffer = None
        if weight.is_cuda:
            self._buffer = torch.empty(rows, len(weight), dtype=weight.dtype, device=weight.device)

    def __call__(self, hidden: Tensor) -> Tensor:
        hidden = hidden.to(self._weight.dtype)
        if self._buffer is None:
            return F.linear(hidden, self._weight, self._bias).float()
        out = self._buffer[: len(hidden)]
        if self._bias is not None:
            return torch.addmm(self._bias, hidden, self._weight.T, out=out)
        return torch.mm(hidden, self._weight.T, out=out)


class _Shared:
    """The target's states that each chunk needs, each once.

    Blocks overlap and are sorted by anchor, so a chunk of rows needs fewer predictions of the target than it has rows
    (with three blocks for every 16 tokens and 15 slots, a third). The counts come to the host once for all
    chunks, so that the chunks run without waiting.
    """

    def __init__(self, states: TargetStates, chunk: int) -> None:
        rows, n = len(states.at), len(states.hidden)
        chunks = -(-rows // chunk)
        device = states.at.device
        keys, self._inverse = torch.unique(
            torch.arange(rows, device=device) // chunk * n + states.at, return_inverse=True
        )
        self._needed = keys % max(n, 1)
        self._bounds = torch.searchsorted(keys, torch.arange(chunks + 1, device=device) * n).tolist()
        self.most = max((b - a for a, b in zip(self._bounds, self._bounds[1:], strict=False)), default=0)

    def of(self, number: int, rows: slice) -> tuple[Tensor, Tensor]:
        """Which states [U] chunk `number` needs, and which of those each of its `rows` takes."""
        first, end = self._bounds[number : number + 2]
        return self._needed[first:end], self._inverse[rows] - first


def frozen_head_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    chunk: int = 512,
    mix: LossMix = CROSS_ENTROPY,
    states: TargetStates | None = None,
    scale: LogitScale = PLAIN,
    bias: Tensor | None = None,
) -> RowLoss:
    """The loss of rows of hidden states under a frozen LM head, without ever holding the full logits.

    Args:
        hidden: [R, D], rows that count (slot 0 and unsupervised slots already dropped).
        weight: [V, D], frozen; it gets no gradient.
        labels: [R] token ids.
        chunk: rows whose logits exist at one time.
        mix: which losses, and how much of each.
        states: the target's predictions for the same rows; only the distribution losses need them.
        scale: what stands behind the drafter's head.
        bias: [V], the head's.

    Returns:
        `RowLoss`; weights are applied by the caller, so they may depend on the losses themselves (D-PACE).

    Raises:
        ValueError: a distribution loss without `states`.
    """
    if mix.distribution and states is None:
        raise ValueError("kl, tv, lk and lk_hybrid compare with the target's distribution: give its states")
    loss, *terms = _FrozenHeadLoss.apply(hidden, weight, labels, chunk, mix, states, scale, bias)
    return RowLoss(loss, RowTerms(*terms))
