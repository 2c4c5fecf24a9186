"""Defines the routing and the FFN of a mixture of experts."""

import torch
from torch import Tensor

from ..clamped import ClampedExperts
from ..formats import Activation, Operand, Weight, values_of
from ..routing import SigmoidRouting
from .matmul import activate, linear


def top_experts(
    partial_sums: Tensor,
    dtype: torch.dtype,
    top_k: int,
    *,
    normalized: bool,
    shared: int,
    sigmoid: SigmoidRouting | None = None,
    scales: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns the most probable experts of every row and their weights, routed like in transformers.

    Args:
        partial_sums: the router's logits, [P, M, E], or E + 1 with the gate of `shared` experts.
        dtype: dtype of the logits and of the final weights; the softmax is in fp32.
        top_k: experts of a row, at most E.
        normalized: the weights of a row's `top_k` are divided by their sum.
        shared: the experts from E on, the last ones of every row, weighted with the sigmoid of their gate.
        sigmoid: how else the experts and their weights follow from the logits; there is no gate then.
        scales: [E], multiply the weights after that.

    Returns:
        Weights fp32 [M, top_k + shared] and experts int32 of that shape, most probable first, lower ids first if equal.
        The experts of a row are distinct and valid for any logits.
    """
    logits = partial_sums.float().sum(0).to(dtype)
    gated = shared > 0 and sigmoid is None
    count = logits.shape[1] - gated
    scores = logits[:, :count].float().sigmoid() if sigmoid else logits[:, :count].float().softmax(-1)
    choice = _corrected(logits.float(), scores, sigmoid) if sigmoid else scores
    experts = choice.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = scores.gather(1, experts)
    if normalized:
        weights = weights / (weights.sum(-1, keepdim=True) + (1e-20 if sigmoid else 0.0))
    weights = weights * sigmoid.scale if sigmoid else weights
    weights = (weights if scales is None else weights * scales[experts]).to(dtype).float()
    if shared:
        gates = logits[:, count:].sigmoid().float() if gated else torch.ones_like(weights[:, :1])
        numbers = torch.arange(count, count + shared, device=experts.device)
        weights = torch.cat([weights, gates.expand(-1, shared)], dim=1)
        experts = torch.cat([experts, numbers.expand(len(experts), -1)], dim=1)
    return weights, experts.int()


def _corrected(logits: Tensor, scores: Tensor, how: SigmoidRouting) -> Tensor:
    """Returns scores [M, E] plus the correction, or the logits without one; and -inf outside of the best groups."""
    choice = logits if how.correction is None else scores + how.correction
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
    activation: Activation = "silu",
    weighted_inputs: bool = False,
) -> Tensor:
    """Returns the outputs of each row's experts times their weights.

    Args:
        x: [M, D].
        gate_up: [E, 2 * I, D], the gates of an expert, then its ups.
        down: [E, D, I].
        weights, experts: [M, k], see `top_experts`.
        clamped: biases and what they compute, if it is not activation(gate) * up; then gates and ups alternate.
        weighted_inputs: the weights multiply the rows before the first matrix, not the outputs.

    Returns:
        Partial sums [k, M, D], in the order of each row's experts, for `add_rms_norm`.
    """
    x = values_of(x)
    found = x.new_empty(experts.shape[1], *x.shape)
    for expert in experts.unique().tolist():
        rows, ranks = (experts == expert).nonzero(as_tuple=True)
        first_bias, second_bias = (None, None) if clamped is None else clamped.biases(expert)
        own = weights[rows, ranks, None].to(x.dtype)
        product = linear(x[rows] * own if weighted_inputs else x[rows], gate_up[expert], first_bias)
        gate, up = product.chunk(2, dim=-1)
        active = clamped.activate(product) if clamped else activate(gate, activation) * up
        output = linear(active, down[expert], second_bias)
        found[ranks, rows] = output if weighted_inputs else output * own
    return found
