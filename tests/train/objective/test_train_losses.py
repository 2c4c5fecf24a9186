"""Slot weights and the weighted, frozen-head loss against plain float64 formulas."""

import math

import pytest
import torch
import torch.nn.functional as F
from drafted_blocks import A, B, D, S, V, blocks

from dflash_toolkit.train.config import TrainConfig
from dflash_toolkit.train.objective.blocks import Blocks
from dflash_toolkit.train.objective.loss import DraftLoss, _autocast, decay_weights, dpace_weights, draft_loss
from dflash_toolkit.train.training_options import DrafterOptions, LossOptions


def test_decay_weights_are_the_paper_s() -> None:
    assert decay_weights(4, 7.0).tolist() == pytest.approx([math.exp(-k / 7) for k in range(4)])


@pytest.mark.parametrize("alpha", [0.5, 1.0])  # 1 forgets the losses
def test_dpace_is_the_sum_of_the_chances_to_get_that_far(alpha: float) -> None:
    losses = torch.rand(6, 4) * 3
    supervised = torch.ones(6, 4, dtype=torch.bool)
    supervised[2, 2:] = False
    weights = dpace_weights(losses, supervised, alpha)
    for row in range(6):
        n = int(supervised[row].sum())
        q = [(1 - alpha) * math.exp(-losses[row, i].item()) + alpha for i in range(n)]
        for j in range(n):
            assert weights[row, j].item() == pytest.approx(sum(math.prod(q[: m + 1]) for m in range(j, n)), rel=1e-5)
        assert not weights[row, n:].any()


def test_dpace_counts_nothing_after_the_first_slot_without_a_label() -> None:
    losses = torch.rand(3, 4)
    supervised = torch.tensor([[True, True, False, True], [False, True, True, True], [True, True, True, True]])
    weights = dpace_weights(losses, supervised, alpha=0.5)
    assert (weights > 0).tolist() == [[True, True, False, False], [False] * 4, [True] * 4]
    assert torch.equal(weights[0, :2], dpace_weights(losses[:1, :2], supervised[:1, :2], 0.5)[0])


def test_dpace_weights_carry_no_gradient() -> None:
    losses = torch.rand(5, 6, requires_grad=True)
    assert not dpace_weights(losses, torch.ones(5, 6, dtype=torch.bool), alpha=0.5).requires_grad


@pytest.mark.parametrize(("size", "gamma"), [(16, 7.0), (10, 5.0), (8, 4.0)])
def test_the_default_gamma_is_the_paper_s_for_its_block_sizes(size: int, gamma: float) -> None:
    assert TrainConfig(target="tiny", drafter=DrafterOptions(block_size=size)).gamma == gamma
    assert TrainConfig(target="tiny", loss=LossOptions(gamma=2.5), drafter=DrafterOptions(block_size=size)).gamma == 2.5


def test_the_size_of_the_batch_does_not_scale_the_loss() -> None:
    b, head, hidden = blocks(), torch.randn(V, D), torch.randn(B, A * S, D)
    twice = Blocks(*(torch.cat([getattr(b, name)] * 2) for name in Blocks.__slots__))
    one = draft_loss(hidden, b, head, LossOptions(), 4.0)
    two = draft_loss(hidden.repeat(2, 1, 1), twice, head, LossOptions(), 4.0)
    assert two.loss.item() == pytest.approx(one.loss.item(), rel=1e-5) and two.rows == 2 * one.rows


def test_a_slot_that_no_block_supervises_has_no_accuracy() -> None:
    b = blocks()
    b.supervised[:, :, 4] = False
    accuracy = draft_loss(torch.randn(B, A * S, D), b, torch.randn(V, D), LossOptions(), 4.0).recall[0]
    assert accuracy.isnan().tolist() == [False, False, False, True]


@pytest.mark.parametrize("kind", ["decay", "dpace"])
def test_loss_and_gradient_are_weighted_means_over_slots(kind: str) -> None:
    b = blocks()
    head = torch.randn(V, D)
    hidden = torch.randn(B, A * S, D, requires_grad=True)
    result = draft_loss(hidden, b, head, LossOptions(weights=kind, head_rows=3), gamma=2.0)
    result.loss.backward()

    exact = hidden.detach().double().requires_grad_()
    logits = exact @ head.double().T
    ce = F.cross_entropy(logits.flatten(0, 1), b.labels.flatten(), reduction="none").view(B, A, S)[:, :, 1:]
    supervised = b.supervised[:, :, 1:]
    if kind == "decay":
        weights = decay_weights(S - 1, 2.0).double().expand(B, A, -1) * supervised
    else:
        weights = dpace_weights(ce, supervised, 0.5).double()
    expected = (weights * ce).sum() / weights.sum()
    expected.backward()
    assert result.loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert torch.allclose(hidden.grad.double(), exact.grad, atol=1e-6)
    assert result.rows == int(supervised.sum())
    assert not hidden.grad.view(B, A, S, D)[:, :, 0].any(), "the anchor slot's output is discarded"


def test_acceptance_length_ends_at_the_first_wrong_slot() -> None:
    b = blocks()
    head = torch.eye(V)
    hidden = F.one_hot(b.labels, V).float() * 9  # every slot right
    hidden[0, 0, 2] = -hidden[0, 0, 2]  # wrong at slot 2: one accepted
    result = draft_loss(hidden.view(B, A * S, V), b, head, LossOptions(), 4.0)
    # blocks of row 0 accept 1, 2 (cut by its end) and 4; of row 1 4, 4 and none that is valid
    assert result.acceptance_length.item() == pytest.approx(1 + (1 + 2 + 4 + 4 + 4) / 5)
    assert result.recall[0].tolist() == pytest.approx([1.0, 4 / 5, 1.0, 1.0])


def test_totals_of_micro_steps_add_up_to_the_step() -> None:
    b = blocks()
    found = [draft_loss(torch.randn(B, A * S, D), b, torch.randn(V, D), LossOptions(), 4.0) for _ in range(2)]
    same = DraftLoss.of_totals(found[0].totals(), S - 1)
    for name in ("loss", "recall", "acceptance_length", "rows", "supervised", "blocks"):
        value = torch.as_tensor(getattr(found[0], name)).double()
        torch.testing.assert_close(torch.as_tensor(getattr(same, name)).double(), value, rtol=1e-6, atol=1e-6)
    both = DraftLoss.of_totals(found[0].totals() + found[1].totals(), S - 1)
    mean = (found[0].acceptance_length + found[1].acceptance_length) / 2
    assert both.acceptance_length.item() == pytest.approx(mean.item()), "as many blocks in each"
    loss = sum(one.weighted_sum for one in found) / sum(one.weight_sum for one in found)
    assert both.rows == 2 * found[0].rows and both.loss.item() == pytest.approx(loss.item(), rel=1e-5)


def test_slot_accuracy_ignores_micro_steps_without_labels() -> None:
    b, without = blocks(), blocks()
    without.supervised[:, :, 4] = False
    head, hidden = torch.randn(V, D), torch.randn(B, A * S, D)
    full, part = (draft_loss(hidden, each, head, LossOptions(), 4.0) for each in (b, without))
    both = DraftLoss.of_totals(full.totals() + part.totals(), S - 1)
    assert both.recall[:, 3].tolist() == pytest.approx(full.recall[:, 3].tolist(), rel=1e-6)


def test_without_a_selector_the_oracle_drafts_any_of_the_best_16() -> None:
    b = blocks()
    logits = 9.0 * F.one_hot(b.labels, V).float()
    order = (b.labels[:, :, 1:, None] + torch.arange(1, 17)) % V  # 15 or 16 tokens above the label
    for slot, better in ((1, 15), (2, 16)):
        above = F.one_hot(order[:, :, slot - 1, :better], V).sum(-2).float()
        logits[:, :, slot] += 20 * above
    result = draft_loss(logits.view(B, A * S, V), b, torch.eye(V), LossOptions(), 4.0)
    assert result.unary_length.item() == 1
    assert result.oracle_length.item() == 2, "rank 15 counts, rank 16 does not"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cpu_computes_in_the_dtype_of_the_target(dtype: torch.dtype) -> None:
    with _autocast(torch.device("cpu"), dtype):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == dtype


def test_a_batch_without_supervision_is_an_error() -> None:
    b = blocks()
    b.supervised[:] = False
    with pytest.raises(ValueError, match="no supervised slot"):
        draft_loss(torch.randn(B, A * S, D), b, torch.randn(V, D), LossOptions(), 4.0)
