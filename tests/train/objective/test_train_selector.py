"""The selector's loss against its plain definition in float64, what its metrics say, and what it can learn."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from conftest import make_dflash2
from drafted_blocks import blocks as sampled
from torch import Tensor

from dflash_toolkit import Target
from dflash_toolkit.kernels.loss_terms import PLAIN, LogitScale
from dflash_toolkit.models.dflash2.selector import CandidateSelector
from dflash_toolkit.train.features.source import FeatureSource
from dflash_toolkit.train.objective.blocks import Blocks, sample_blocks
from dflash_toolkit.train.objective.loss import DraftLoss, dpace_weights, draft_loss, masks_of
from dflash_toolkit.train.objective.selector import Selector, ramp
from dflash_toolkit.train.responses.rows import Row
from dflash_toolkit.train.training_options import LossOptions

D, V, R, C = 8, 37, 5, 6
SCALE = LogitScale(0.8, 3.0)


def selector_of(dtype: torch.dtype = torch.float32) -> CandidateSelector:
    made, g = CandidateSelector(D, V, R), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(generator=g)
    return made.to(dtype)


def defined(
    hidden: Tensor, head: Tensor, selector: CandidateSelector, blocks: Blocks, scale: LogitScale, options: LossOptions
) -> Tensor:
    """Base loss + the selector's, slot by slot over all logits; the slots' weights are those of D-PACE."""
    n, size = len(blocks.anchor) * blocks.anchor.shape[1], blocks.size
    logits = scale.multiplier * (hidden.view(n, size, -1) @ head.T)
    if scale.cap:
        logits = scale.cap * torch.tanh(logits / scale.cap)
    labels, inputs = blocks.labels.view(n, size), blocks.inputs.view(n, size)
    base = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(n, size)
    supervised = blocks.supervised.view(n, size)
    weights = dpace_weights(base[:, 1:], supervised[:, 1:], options.alpha).double()
    total = (weights * base[:, 1:]).sum()
    for b, t in supervised.nonzero().tolist():
        label, before = int(labels[b, t]), int(labels[b, t - 1] if t > 1 else inputs[b, 0])
        best = logits[b, t].argsort(descending=True)[:C].tolist()
        if label not in best:
            if options.gold == "skip":
                continue
            best[-1] = label
        state = selector.hidden_projection(hidden.view(n, size, -1)[b, t])
        pairs = selector.successor_codebook[best] @ (selector.predecessor_codebook[before] * state)
        scores = logits[b, t][best] + pairs
        total = total - options.selector * weights[b, t - 1] * scores.log_softmax(0)[best.index(label)]
    return total / weights.sum()


@pytest.mark.parametrize("gold", ["skip", "inject"])
@pytest.mark.parametrize("scale", [PLAIN, SCALE], ids=["plain", "scaled"])
def test_loss_and_gradients_are_those_of_the_definition(gold: str, scale: LogitScale) -> None:
    found, blocks = sampled(), sampled(seed=1)
    blocks = replace(blocks, inputs=found.labels)  # the anchor is another token than the labels say
    g = torch.Generator().manual_seed(2)
    hidden = torch.randn(2, 15, D, generator=g)
    head = torch.randn(V, D, generator=g)
    options = LossOptions(gold=gold, selector=0.7, head_rows=5)
    leaves, losses = [], []
    for dtype in (torch.float64, torch.float32):
        leaf, selector = hidden.to(dtype).requires_grad_(), selector_of(dtype)
        if dtype == torch.float64:
            loss = defined(leaf, head.double(), selector, blocks, scale, options)
        else:
            loss = draft_loss(leaf, blocks, head, options, 4.0, scale=scale, selector=Selector(selector, C)).loss
        loss.backward()
        losses.append(loss.double())
        leaves.append([leaf, *selector.parameters()])
    assert losses[1].item() == pytest.approx(losses[0].item(), rel=1e-5)
    for theirs, ours in zip(*leaves, strict=True):
        assert ours.grad is not None and theirs.grad is not None and theirs.grad.abs().max() > 1e-3
        torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=1e-4, atol=1e-6)


def test_selector_gold_and_weight_scale_its_loss() -> None:
    blocks, hidden, head = sampled(), torch.randn(2, 15, D), torch.randn(V, D)

    def of(share: float = 1.0, **options: object) -> DraftLoss:
        selector = Selector(selector_of(), C, share)
        return draft_loss(hidden, blocks, head, LossOptions(**options), 4.0, selector=selector)  # type: ignore[arg-type]

    base = draft_loss(hidden, blocks, head, LossOptions(), 4.0)
    skipped, injected = of(), of(gold="inject")
    assert base.selector_loss.isnan() and injected.selector_loss > skipped.selector_loss > 0
    for found, much in ((skipped, 1.0), (of(share=0.25), 0.25), (of(selector=0.5), 0.5), (of(share=0.0), 0.0)):
        assert found.weight_sum == base.weight_sum, "the same denominator"
        torch.testing.assert_close(found.loss, base.loss + much * skipped.selector_loss)
    assert injected.oracle_length == skipped.oracle_length, "an injected token is no candidate"
    assert injected.acceptance_length <= injected.oracle_length
    assert [ramp(done) for done in (0.0, 0.0005, 0.001, 1.0)] == [0.0, 0.5, 1.0, 1.0]


def test_totals_include_the_selectors_loss_and_lengths() -> None:
    blocks, hidden, head = sampled(), torch.randn(2, 15, D), torch.randn(V, D)
    for selector in (None, Selector(selector_of(), C)):
        found = draft_loss(hidden, blocks, head, LossOptions(), 4.0, selector=selector)
        again = DraftLoss.of_totals(found.totals() * 2, 4)
        for name in ("selector_loss", "acceptance_length", "unary_length", "oracle_length", "loss"):
            torch.testing.assert_close(getattr(again, name).float(), getattr(found, name).detach(), equal_nan=True)


@torch.no_grad()
def test_lengths_follow_the_tokens_that_would_be_drafted(target: Target) -> None:
    """The walk, each slot's best, and the right one among the candidates, block by block as decoding chooses."""
    drafter = make_dflash2(target, selector_top_k=40)
    tokens = torch.randint(0, 250, (60,), generator=torch.Generator().manual_seed(3)).tolist()
    features = FeatureSource(target, drafter.config.target_layer_ids, 100)([Row(0, 20, tokens)])
    blocks = sample_blocks(features, 12, 8, drafter.config.mask_token_id, torch.Generator())
    context = drafter.context_kv(features.hidden, features.positions)
    masks = masks_of(drafter.config, features, blocks, False)
    hidden = drafter(target.embed(blocks.inputs.flatten(1)), blocks.positions.flatten(1), context, masks)
    logits = target.head(hidden).view(12, 8, -1)[:, 1:]
    own = [
        drafter.choose(h[1:], row, int(ids[0]))
        for h, row, ids in zip(hidden.view(12, 8, -1), logits, blocks.inputs[0], strict=True)
    ]
    walked, unary, best = torch.stack(own), logits.argmax(-1), logits.topk(40).indices
    assert (walked != unary).any(1).all()
    # answers that the walk drafts right at first, so that there is something to count
    labels = torch.where(torch.arange(7) < torch.arange(12)[:, None] % 5, walked, best[..., 7])
    blocks = replace(blocks, labels=torch.cat([blocks.labels[:, :, :1], labels[None]], dim=2))

    def length(right: Tensor) -> float:
        accepted = (right & blocks.supervised[0, :, 1:]).long().cumprod(-1).sum(-1)
        return 1 + float(accepted.double().mean())

    selector = Selector(drafter.candidate_selector, 40)  # type: ignore[arg-type]
    found = draft_loss(hidden, blocks, target.head_weight, LossOptions(), 4.0, selector=selector)
    oracle = (best == labels[..., None]).any(-1)
    lengths = (length(walked == labels), length(unary == labels), length(oracle))
    assert lengths[1] < lengths[0] < lengths[2]
    assert (found.acceptance_length, found.unary_length, found.oracle_length) == pytest.approx(lengths)


def test_the_walk_learns_a_pair_that_the_best_of_each_slot_cannot() -> None:
    """5 is followed by 1 2 and 6 by 3 4; the hidden states alone cannot decide which."""
    chains = torch.tensor([[[5, 1, 2], [6, 3, 4]]])
    supervised = torch.tensor([False, True, True]).expand(1, 2, 3)
    fill, valid = torch.zeros(1, 2, dtype=torch.long), torch.ones(1, 2, dtype=torch.bool)
    blocks = Blocks(fill, valid, chains * ~supervised, chains, chains * supervised, supervised)
    selector = CandidateSelector(D, V, R)
    torch.nn.init.normal_(selector.predecessor_codebook)
    selector.init_weights()
    hidden, head = torch.randn(1, 3, D, requires_grad=True), torch.randn(V, D)
    optimizer = torch.optim.Adam([hidden, *selector.parameters()], lr=0.05)
    losses = []
    for _ in range(60):
        found = draft_loss(hidden.repeat(1, 2, 1), blocks, head, LossOptions(), 4.0, selector=Selector(selector, C))
        losses.append(found.selector_loss.item())
        optimizer.zero_grad()
        found.loss.backward()
        optimizer.step()
    assert found.unary_length <= 2 and found.acceptance_length == found.oracle_length == 3
    assert losses[-1] < 0.1 < losses[0]
