"""The loss through the frozen head: per-row losses and the gradient of the hidden states without full logits.

On a GPU the logits of a chunk are in the head's dtype in a reused buffer, and a kernel replaces them by their gradient.
Elsewhere the definition runs, plain torch in fp32. The most probable tokens of a row come from the same logits.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .loss_terms import CROSS_ENTROPY, PLAIN, LogitScale, LossMix, RowTerms
from .ops import ops_for


@dataclass(slots=True)
class RowLoss:
    """Per-row result of the frozen head."""

    loss: Tensor  # [R] the mix, nats, fp32, differentiable with respect to the hidden states
    terms: RowTerms  # without gradient
    candidates: Tensor | None = None  # [R, C] long, the tokens of the largest logits; None unless requested
    unary: Tensor | None = None  # [R, C] fp32, their logits, differentiable like the loss
    teacher: Tensor | None = None  # [R, C] fp32, the target's log-probabilities of them; None without its distribution

    @property
    def rank(self) -> Tensor:
        """The number of tokens that the drafter ranks before the label, int32 [R]."""
        return self.terms.rank

    @property
    def correct(self) -> Tensor:
        """Whether the argmax is the label, bool [R]."""
        return self.terms.rank == 0


@dataclass(frozen=True, slots=True)
class TargetStates:
    """The target's prediction for each row, as the hidden states before the head."""

    hidden: Tensor  # [N, D] after the target's final norm
    at: Tensor  # [R] long, the state that predicts the token of each row; rows may share one
    scale: LogitScale = PLAIN  # applied after its head


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
        best: "_Best | None",
    ) -> tuple[Tensor | None, ...]:
        terms = RowTerms.empty(len(hidden), mix.distribution, hidden.device)
        # the head has no gradient, so the same pass computes d_hidden, except for the row's incoming factor
        d_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        states = states if mix.distribution else None
        _chunks(hidden, weight, bias, labels, chunk, mix, states, scale, terms, d_hidden, best)
        candidates, unary = (best.tokens, best.logits) if best else (None, None)
        if unary is not None:
            ctx.slope = scale.apply_(unary, d_hidden is not None)
        ctx.save_for_backward(d_hidden, weight if best else None, candidates)
        outputs = (candidates, terms.cross_entropy, terms.rank, terms.kl, terms.acceptance)
        ctx.mark_non_differentiable(*(t for t in outputs if t is not None))
        return mix.value(terms), unary, *outputs

    @staticmethod
    def backward(  # type: ignore[no-untyped-def]
        ctx, d_loss: Tensor, d_unary: Tensor | None, *_: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        d_hidden, weight, candidates = ctx.saved_tensors
        found = d_hidden * d_loss[:, None]
        if candidates is not None and d_unary is not None:
            # adds the weighted sum of the candidates' rows of the head, without copying the rows
            factors = (d_unary * ctx.slope).to(weight.dtype)
            found = found + F.embedding_bag(candidates, weight, mode="sum", per_sample_weights=factors)
        return found.to(d_hidden.dtype), *[None] * 8


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
    best: "_Best | None",
) -> None:
    """Fills `terms`, `d_hidden` and `best`, a chunk of rows at a time."""
    ops = ops_for(hidden.device)
    head = _Head(weight, bias, min(chunk, len(hidden)))
    target_head, target, at = head, None, None
    if states is not None:
        shared = _Shared(states, chunk)
        target_head = _Head(weight, bias, shared.most)
    for number, start in enumerate(range(0, len(hidden), chunk)):
        rows = slice(start, start + chunk)
        logits = head(hidden[rows])
        if best is not None:
            best.take(logits, labels[rows], rows)
        slope = scale.apply_(logits, d_hidden is not None)
        if states is not None:
            needed, at = shared.of(number, rows)
            target = target_head(states.hidden[needed])
            states.scale.apply_(target)
            if best is not None:
                best.take_teacher(target, at, rows)
        ops.row_loss_(logits, labels[rows], terms[rows], mix, d_hidden is not None, target, at)
        if d_hidden is not None:
            if scale != PLAIN:
                logits *= slope
            d_hidden[rows] = (logits.to(weight.dtype) @ weight).to(hidden.dtype)


class _Best:
    """The tokens of the `count` largest logits of each row, and these logits, in fp32.

    Args:
        inject: the label replaces the last token if it is not among them.
    """

    def __init__(self, rows: int, count: int, inject: bool, device: torch.device) -> None:
        self.tokens = torch.empty(rows, count, dtype=torch.long, device=device)
        self.logits, self.teacher = torch.empty(2, rows, count, dtype=torch.float32, device=device)
        self._inject = inject

    def take(self, logits: Tensor, labels: Tensor, rows: slice) -> None:
        values, tokens = ops_for(logits.device).row_top(logits, self.tokens.shape[1])
        if self._inject:
            left_out = (tokens != labels[:, None]).all(1)
            tokens[:, -1] = torch.where(left_out, labels, tokens[:, -1])
            values[:, -1] = torch.where(left_out, logits.gather(1, labels[:, None])[:, 0], values[:, -1])
        self.tokens[rows], self.logits[rows] = tokens, values

    def take_teacher(self, target: Tensor, at: Tensor, rows: slice) -> None:
        """Keeps the target's log-probabilities of the tokens: `target` [U, V] are its logits, row `at` for each."""
        whole = torch.cat([piece.float().logsumexp(1) for piece in target.split(LogitScale.PIECE)])
        self.teacher[rows] = target[at[:, None], self.tokens[rows]].float() - whole[at][:, None]


class _Head:
    """Computes the logits of up to `rows` rows in one buffer: in the weight's dtype on a GPU, else fp32."""

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
    """The target's states that each chunk needs, without duplicates.

    Blocks overlap and are sorted by anchor, so a chunk needs fewer predictions of the target than it has rows (a third
    with three blocks for every 16 tokens and 15 slots). The counts of all chunks are copied to the host at once, so
    that the chunks run without waiting.
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
        """Returns the states [U] that chunk `number` needs, and the index of each of its `rows` among them."""
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
    candidates: int = 0,
    inject: bool = False,
) -> RowLoss:
    """Computes the loss of hidden states under a frozen LM head, without holding all logits.

    Args:
        hidden: [R, D], rows that count (slot 0 and unsupervised slots already dropped).
        weight: [V, D], frozen; it gets no gradient.
        labels: [R] token ids.
        chunk: number of rows with logits in memory at a time.
        mix: the weights of the losses.
        states: the target's predictions for the same rows; only the distribution losses need them.
        scale: applied after the drafter's head.
        bias: [V], the head's.
        candidates: number of most probable tokens of each row to return with their logits.
        inject: the label replaces the last candidate if it is not among them.

    Returns:
        `RowLoss`. The caller applies the weights of rows, so they may depend on the losses (D-PACE).

    Raises:
        ValueError: a distribution loss without `states`.
    """
    if mix.distribution and states is None:
        raise ValueError("kl, tv, lk and lk_hybrid compare with the target's distribution; pass states")
    best = _Best(len(hidden), candidates, inject, hidden.device) if candidates else None
    loss, unary, tokens, *terms = _FrozenHeadLoss.apply(hidden, weight, labels, chunk, mix, states, scale, bias, best)
    teacher = best.teacher if best and mix.distribution else None
    return RowLoss(loss, RowTerms(*terms), tokens, unary, teacher)
