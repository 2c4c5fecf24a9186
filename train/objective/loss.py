"""One forward pass of the drafter over a batch of blocks, on the code path of decoding, and its loss.

The loss is the weighted sum of the frozen head's losses, normalised by the sum of the slot weights. For a drafter with
a selector (or another head over the candidates of a slot, see `selector.py`) its loss is added, weighted the same way.
"""

import contextlib
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from dflash_toolkit.kernels.loss import TargetStates, frozen_head_loss
from dflash_toolkit.kernels.loss_terms import PLAIN, LogitScale, LossMix
from dflash_toolkit.models.dflash.config import DrafterConfig
from dflash_toolkit.models.dflash.network import Drafter
from dflash_toolkit.models.spec import logit_scale

from ..config import TrainConfig
from ..training_options import LossOptions
from .alignment import alignment_weight, slot_tokens
from .blocks import Blocks, Features, dense_mask, flex_mask
from .selector import Selector, ramp
from .target_head import TargetHead

RECALL = (1, 4, 16)  # the k of recall@k
SUMS = 7  # entries of `DraftLoss.totals` that are not per slot


@dataclass(slots=True)
class DraftLoss:
    """The loss of one step and its acceptance estimates."""

    loss: Tensor  # scalar, differentiable
    recall: Tensor  # [3, S - 1] share of supervised slots whose label is in the top 1, 4, 16; NaN without any
    acceptance_length: Tensor  # scalar, teacher-forced estimate of tau over the step's blocks, with the selector
    rows: int  # R, supervised slots
    weighted_sum: Tensor  # scalar, differentiable; `loss` times `weight_sum`
    weight_sum: Tensor  # scalar
    supervised: Tensor  # [S - 1] number of slots with a label
    blocks: Tensor  # scalar, valid blocks
    slot_overlap: Tensor | None  # [S - 1] mean of sum_v min(p_v, q_v) = 1 - TV; None without a distribution loss
    unary_length: Tensor  # scalar, as acceptance_length, if each slot drafted its largest logit
    oracle_length: Tensor  # the same, if each slot drafted the label if it is a candidate, or among the best 16
    selector_sum: Tensor  # scalar, the selector's loss times `weight_sum`; NaN without a selector
    accepted: Tensor | None = None  # [B, A] drafted tokens that each block accepts; None for summed totals

    @property
    def selector_loss(self) -> Tensor:
        return self.selector_sum / self.weight_sum

    def totals(self) -> Tensor:
        """Returns addends over micro steps and processes, float64 [7 + (4 or 5) * (S - 1)]; see `of_totals`."""
        lengths = (self.acceptance_length, self.unary_length, self.oracle_length)
        accepted = [(length - 1) * self.blocks for length in lengths]
        scalars = (self.weighted_sum, self.weight_sum, self.selector_sum, self.blocks, *accepted)
        sums = torch.stack([scalar.detach().double() for scalar in scalars])
        means = [*self.recall] if self.slot_overlap is None else [*self.recall, self.slot_overlap]
        counts = [torch.where(self.supervised > 0, mean * self.supervised, 0.0).double() for mean in means]
        return torch.cat([sums, self.supervised.double(), *counts])

    @classmethod
    def of_totals(cls, totals: Tensor, slots: int) -> "DraftLoss":
        """Returns the loss of summed `totals`, for blocks of `slots` + 1."""
        weighted, weight, selector, blocks, *accepted = totals[:SUMS]
        supervised, *counts = totals[SUMS:].split(slots)
        means = [count / supervised for count in counts]
        recall, rows = torch.stack(means[: len(RECALL)]), int(supervised.sum())
        overlap = means[-1] if len(means) > len(RECALL) else None
        length, unary, oracle = (1 + count / blocks for count in accepted)
        return cls(
            loss=weighted / weight, recall=recall, acceptance_length=length, rows=rows, weighted_sum=weighted,
            weight_sum=weight, supervised=supervised, blocks=blocks, slot_overlap=overlap, unary_length=unary,
            oracle_length=oracle, selector_sum=selector,
        )  # fmt: skip


def use_flex(attention: str, device: torch.device) -> bool:
    """Whether FlexAttention is used: it skips empty tiles but has no backward on a CPU."""
    return device.type == "cuda" if attention == "auto" else attention == "flex"


Forward = Callable[..., Tensor]  # takes a drafter and the arguments of `_forward`


def runner(config: TrainConfig, device: torch.device) -> Forward:
    """Returns the drafter's forward over a batch of blocks, compiled if the option says so."""
    return _compiled_forward() if compiles(config, device) else _forward


def compiles(config: TrainConfig, device: torch.device) -> bool:
    return config.run.compile == "on" or (config.run.compile == "auto" and device.type == "cuda")


def compute_loss(
    drafter: Drafter,
    target: TargetHead,
    features: Features,
    blocks: Blocks,
    config: TrainConfig,
    flex: bool,
    forward: Forward | None = None,
    done: float = 1.0,
) -> DraftLoss:
    """Computes one forward pass of the drafter over a batch of blocks, and its loss, on decoding's code path.

    Args:
        done: share of the run that is done, between 0 and 1, which ramps up the selector's loss.
    """
    forward = forward or runner(config, target.device)
    masks = masks_of(drafter.config, features, blocks, flex)
    embedded = target.embed(blocks.inputs.flatten(1)).detach()  # a target that is trained itself is constant here
    between = slot_tokens(blocks, done) if drafter.config.architecture.between_name else ()
    with _autocast(target.device, target.dtype):
        hidden = forward(
            drafter, features.hidden.to(target.dtype), features.positions, embedded, blocks.positions.flatten(1), masks,
            *between,
        )  # fmt: skip
        scales = logit_scale(drafter.config), logit_scale(target.config)
        head = drafter.config.architecture.chooser(drafter, target.head_weight)
        selector = None if head is None else Selector(head, drafter.config.draft_candidates, ramp(done))
        return draft_loss(
            hidden, blocks, target.head_weight, config.loss, config.gamma, features.final, *scales, target.head_bias,
            selector, alignment_weight(done) if between else 0.0,
        )  # fmt: skip


def masks_of(shape: DrafterConfig, features: Features, blocks: Blocks, flex: bool) -> dict[str, Tensor | BlockMask]:
    """Returns the attention masks by layer type; equal types share one."""
    make, masks = flex_mask if flex else dense_mask, dict[str, Tensor | BlockMask]()
    for kind in dict.fromkeys(shape.layer_types):
        layer = shape.layer_types.index(kind)
        masks[kind] = make(features, blocks, shape.window(layer), shape.causal_inside_block(layer))
    return masks


def _forward(
    drafter: Drafter, features: Tensor, context: Tensor, embedded: Tensor, positions: Tensor,
    masks: dict[str, Tensor | BlockMask], tokens: Tensor | None = None, replaced: Tensor | None = None,
) -> Tensor:  # fmt: skip
    return drafter(embedded, positions, drafter.context_kv(features, context), masks, tokens, replaced)


@functools.cache
def _compiled_forward() -> Forward:
    return torch.compile(_forward)


def _autocast(device: torch.device, dtype: torch.dtype) -> contextlib.AbstractContextManager[Any]:
    # fp32 master weights, bf16 compute; most CPUs lack bf16 units and compute in fp32
    if device.type == "cuda":
        return torch.autocast("cuda", dtype=torch.bfloat16)
    if dtype != torch.float32:  # the dtype option was given, and the features have that dtype
        return torch.autocast(device.type, dtype=dtype)
    return contextlib.nullcontext()


def draft_loss(
    hidden: Tensor,
    blocks: Blocks,
    head_weight: Tensor,
    options: LossOptions,
    gamma: float,
    final: Tensor | None = None,
    scale: LogitScale = PLAIN,
    target_scale: LogitScale = PLAIN,
    bias: Tensor | None = None,
    selector: Selector | None = None,
    alignment: float = 0.0,
) -> DraftLoss:
    """Computes the loss of a batch of blocks.

    Args:
        hidden: [B, A*S, D or more], the result of `Drafter.forward`.
        head_weight: [V, D], the target's head.
        final: [B, T, D] last hidden states of the target, normed; needed only by distribution losses.
        scale: the drafter's factor on the logits, and `target_scale` the target's.
        bias: [V], the head's.
        selector: chooses among the candidates of the slots; None drafts each slot's largest logit.
        alignment: weight of the last column of `hidden`, relative to this pass's mean cross-entropy; 0 without one.

    Raises:
        ValueError: no slot of the batch is supervised, or a distribution loss has no `final`.
    """
    index = blocks.supervised.flatten().nonzero()[:, 0]  # never slot 0, the anchor, whose output is not used
    if not len(index):
        raise ValueError("no supervised slot in this batch")
    mix = LossMix(options.ce, options.kl, options.tv, options.lk, options.lk_hybrid, options.temperature)
    states = None
    if mix.distribution and final is not None:
        states = TargetStates(
            final.flatten(0, 1), predicting_states(blocks, final.shape[1]).flatten()[index], target_scale
        )
    size = head_weight.shape[1]
    chosen, labels = hidden[..., :size].flatten(0, 1).index_select(0, index), blocks.labels.flatten()[index]
    top_k, inject = selector.top_k if selector else 0, options.gold == "inject"
    rows = frozen_head_loss(chosen, head_weight, labels, options.head_rows, mix, states, scale, bias, top_k, inject)

    supervised = blocks.supervised[:, :, 1:]
    slot = index - index // blocks.size - 1  # the same rows among slots 1..S-1

    def grid(values: Tensor) -> Tensor:  # [R] back to [B, A, S - 1], zero where not supervised
        return values.new_zeros(supervised.numel()).index_copy(0, slot, values).view(supervised.shape)

    if options.weights == "dpace":
        # The paper's probability of passing a slot is its token's. Without cross-entropy no term trains that
        # probability, and the overlap is used instead, the acceptance rate of sampled verification (as in D-PARD, by
        # the same authors).
        nll = rows.terms.cross_entropy  # negative log-likelihood
        if options.ce == 0 and rows.terms.acceptance is not None:
            nll = -rows.terms.acceptance.log()
        weights = dpace_weights(grid(nll), supervised, options.alpha)
    else:
        weights = decay_weights(blocks.size - 1, gamma, hidden.device).expand(supervised.shape)
    weights = weights.flatten()[slot]
    weighted_sum, weight_sum = (weights * rows.loss).sum(), weights.sum()

    def accepts(right: Tensor) -> Tensor:
        """Returns the accepted tokens [B, A] of each block if the drafted tokens are `right` [B, A, S - 1]."""
        return (right & supervised).long().cumprod(-1).sum(-1) * blocks.valid

    def length(accepted: Tensor) -> Tensor:
        """Returns the mean tokens per step."""
        return 1 + accepted.sum() / blocks.valid.sum()

    accepted = accepts(grid(rows.correct))
    unary_length = length(accepted)
    selector_sum = weight_sum.new_full((), math.nan)
    if selector:
        chain = selector(hidden, blocks, rows, slot)
        candidate = grid(rows.rank < top_k)  # an injected label is not a candidate
        accepted = accepts((chain.drafted == blocks.labels[:, :, 1:]) & candidate)
        selector_sum = (weights * chain.loss).sum()
        weighted_sum = weighted_sum + options.selector * selector.share * selector_sum

    if alignment:
        cost = hidden[..., -1].flatten().index_select(0, index)
        mean = (weights * rows.terms.cross_entropy).sum() / weight_sum
        weighted_sum = weighted_sum + alignment * mean.detach() * (weights * cost).sum()

    count = supervised.sum((0, 1))
    overlap = rows.terms.acceptance
    return DraftLoss(
        loss=weighted_sum / weight_sum,
        recall=torch.stack([grid(rows.rank < k).sum((0, 1)) / count for k in RECALL]),
        acceptance_length=length(accepted),
        rows=len(index),
        weighted_sum=weighted_sum,
        weight_sum=weight_sum,
        supervised=count,
        blocks=blocks.valid.sum(),
        slot_overlap=None if overlap is None else grid(overlap).sum((0, 1)) / count,
        unary_length=unary_length,
        oracle_length=length(accepts(grid(rows.rank < (top_k or RECALL[-1])))),
        selector_sum=selector_sum,
        accepted=accepted,
    )


def decay_weights(slots: int, gamma: float, device: torch.device | str = "cpu") -> Tensor:
    """w_k = exp(-(k - 1) / gamma) for slots k = 1..`slots` (arXiv 2602.06036 section 4.2)."""
    return torch.exp(-torch.arange(slots, device=device, dtype=torch.float32) / gamma)


def dpace_weights(losses: Tensor, supervised: Tensor, alpha: float) -> Tensor:
    """D-PACE weights (arXiv 2605.18810): the effect of slot j on the expected accepted length.

    q_i = exp(-loss_i), smoothed to (1 - alpha) q_i + alpha; w_j = sum over m >= j of prod_{i <= m} q_i.

    Args:
        losses: [..., S - 1] cross-entropy per slot, or another -log of the probability of passing it; the weights carry
            no gradient.
        supervised: [..., S - 1] bool; a product ends at the first slot without a label.

    Returns:
        [..., S - 1], zero where not supervised.
    """
    q = (1 - alpha) * torch.exp(-losses.detach().float()) + alpha
    reach = (q * supervised).cumprod(-1)  # prod_{i <= m} q_i
    return reach.flip(-1).cumsum(-1).flip(-1) * supervised


def predicting_states(blocks: Blocks, length: int) -> Tensor:
    """Returns which of the target's B * `length` hidden states predicts the token of each slot: indices [B, A, S].

    Slot k has position anchor + k; the target predicts that token one position earlier.
    """
    row = torch.arange(len(blocks.anchor), device=blocks.anchor.device)[:, None, None]
    return row * length + blocks.anchor[:, :, None] + torch.arange(blocks.size, device=row.device) - 1
