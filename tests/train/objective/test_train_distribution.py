"""Losses against the target's own distribution: the right position of it, mixes, D-PACE, and that they are learned."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import MASK, make_drafter, make_target
from training_runs import config, run_of

from dflash_toolkit.kernels import loss as head_loss
from dflash_toolkit.kernels.loss import TargetStates, frozen_head_loss
from dflash_toolkit.kernels.loss_terms import LogitScale, LossMix
from dflash_toolkit.models.target import Target
from dflash_toolkit.train.config import TrainConfig
from dflash_toolkit.train.features.source import FeatureSource
from dflash_toolkit.train.features.store import GIB, MemoryStore
from dflash_toolkit.train.loop import train
from dflash_toolkit.train.objective.blocks import Blocks, Features, sample_blocks
from dflash_toolkit.train.objective.loss import DraftLoss, compute_loss, dpace_weights, draft_loss, predicting_states
from dflash_toolkit.train.responses.rows import Row
from dflash_toolkit.train.training_options import LossOptions

KINDS = ("kl", "tv", "lk", "lk_hybrid")
SIZE = 6


@pytest.fixture(scope="module")
def target() -> Target:
    return make_target()


@pytest.fixture(scope="module")
def batch(target: Target) -> tuple[Features, Blocks]:
    g = torch.Generator().manual_seed(3)
    rows = [Row(i, 5, torch.randint(0, 250, (n,), generator=g).tolist()) for i, n in enumerate((31, 17, 24))]
    features = FeatureSource(target, (1, 3, 4), 100, packed=80, final=True)(rows)
    return features, sample_blocks(features, 40, SIZE, MASK, torch.Generator().manual_seed(0))


def options(**values: float | str) -> LossOptions:
    return LossOptions(**({"ce": 0.0, "weights": "decay", "head_rows": 16} | values))  # type: ignore[arg-type]


def as_drafted(features: Features, at: torch.Tensor) -> torch.Tensor:
    """Hidden states of a drafter that is the target, `at` [B, A, S] of its positions."""
    assert features.final is not None
    return features.final.flatten(0, 1)[at.clamp(min=0)].flatten(1, 2)


# ---- which prediction of the target belongs to which slot --------------------------------------------------------


def test_predicting_states_are_one_position_earlier(target: Target) -> None:
    """On the target's own greedy answer the distribution's argmax is the label, at every slot."""
    ids = list(range(40, 48))
    for _ in range(30):
        logits = target.forward(torch.tensor([ids]), logits="last").logits
        assert logits is not None
        ids.append(int(logits[0, 0].argmax()))
    features = FeatureSource(target, (1, 3), 100, packed=90, final=True)([Row(0, 8, ids), Row(1, 8, ids)])
    blocks = sample_blocks(features, 60, SIZE, MASK, torch.Generator())
    assert features.final is not None
    predicted = target.head(features.final.flatten(0, 1)).argmax(-1)
    at = predicting_states(blocks, features.tokens.shape[1])
    assert blocks.supervised.sum() > 200
    assert torch.equal(predicted[at[blocks.supervised]], blocks.labels[blocks.supervised])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shift", [0, -1, 1])
def test_a_drafter_equal_to_the_target_has_no_loss(
    kind: str, shift: int, target: Target, batch: tuple[Features, Blocks]
) -> None:
    features, blocks = batch
    # written out once more, so that a mistake in `predicting_states` shows: slot k is predicted at anchor + k - 1
    index = torch.arange(SIZE) - 1 + shift
    hidden = as_drafted(features, (blocks.anchor[:, :, None] + index).clamp(max=features.tokens.shape[1] - 1))
    result = draft_loss(hidden, blocks, target.head_weight, options(**{kind: 1.0}), 4.0, features.final)
    assert result.slot_overlap is not None
    loses = result.loss > 0.1 and result.slot_overlap.max() < 0.95
    assert loses if shift else result.loss < 1e-4 and result.slot_overlap.min() > 0.9999


def test_states_of_each_row_predict_its_own_tokens(target: Target, batch: tuple[Features, Blocks]) -> None:
    features, blocks = batch
    twice = Blocks(*(torch.cat([getattr(blocks, name)] * 2) for name in Blocks.__slots__))
    index = (blocks.anchor[:, :, None] + torch.arange(SIZE) - 1).clamp(min=0)
    hidden = as_drafted(features, index.clamp(max=features.tokens.shape[1] - 1)).repeat(2, 1, 1)
    assert features.final is not None
    final = features.final.repeat(2, 1, 1)
    result = draft_loss(hidden, twice, target.head_weight, options(kl=1.0), 4.0, final)
    assert result.loss < 1e-4


# ---- mixes, slot weights, and what is reported -------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_a_mix_through_the_head_is_float64_autograd_s(chunk: int) -> None:
    mix = LossMix(0.4, 0.3, 0.6, 0.2, 0.5, temperature=1.5)
    hidden, weight, states = torch.randn(23, 16), torch.randn(301, 16), torch.randn(9, 16)
    labels, at, upstream = torch.randint(301, (23,)), torch.randint(9, (23,)), torch.rand(23)
    upstream[4] = 0.0
    leaf, exact = hidden.clone().requires_grad_(), hidden.double().requires_grad_()
    own, theirs = LogitScale(0.8, 7.0), LogitScale(cap=5.0)
    rows = frozen_head_loss(leaf, weight, labels, chunk, mix, TargetStates(states, at, theirs), own)
    rows.loss.backward(upstream)

    logits = 7 * torch.tanh(exact @ weight.double().T * 0.8 / 7)
    log_q = (logits / 1.5).log_softmax(-1)
    log_p = (5 * torch.tanh(states.double() @ weight.double().T / 5) / 1.5).log_softmax(-1)[at]
    kl, overlap = (log_p.exp() * (log_p - log_q)).sum(-1), torch.minimum(log_p.exp(), log_q.exp()).sum(-1)
    share = torch.exp(-3 * overlap.detach())
    loss = 0.4 * F.cross_entropy(logits, labels, reduction="none") + 0.3 * kl + 0.6 * (1 - overlap)
    loss = loss - 0.2 * overlap.log() + 0.5 * (share * kl + (1 - share) * (1 - overlap))
    loss.backward(upstream.double())
    torch.testing.assert_close(rows.loss.double(), loss, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(leaf.grad.double(), exact.grad, rtol=1e-4, atol=1e-5)
    assert not leaf.grad[4].any() and rows.terms.kl is not None and not rows.terms.kl.requires_grad
    assert torch.equal(rows.rank.long(), (logits > logits.gather(1, labels[:, None])).sum(-1))


def test_a_chunk_makes_each_prediction_of_the_target_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    real = head_loss._Head.__call__
    monkeypatch.setattr(head_loss._Head, "__call__", lambda self, h: (made.append(len(h)), real(self, h))[1])
    at = torch.tensor([3, 3, 4, 3, 5, 0, 0, 0, 4, 5])
    states = TargetStates(torch.randn(6, 4), at)
    frozen_head_loss(torch.randn(10, 4), torch.randn(20, 4), at, 4, LossMix(kl=1.0), states)
    assert made == [4, 2, 4, 2, 2, 2], "rows of the drafter, then the target's that they share"


def test_distribution_losses_without_the_target_s_states_are_an_error(batch: tuple[Features, Blocks]) -> None:
    hidden = as_drafted(batch[0], predicting_states(batch[1], 80))
    with pytest.raises(ValueError, match="pass states"):
        draft_loss(hidden, batch[1], torch.randn(50, 32), options(tv=1.0), 4.0, None)


def test_cross_entropy_alone_needs_no_target_states(batch: tuple[Features, Blocks], target: Target) -> None:
    features, blocks = batch
    hidden = as_drafted(features, predicting_states(blocks, 80))
    found = [draft_loss(hidden, blocks, target.head_weight, LossOptions(), 4.0, f) for f in (features.final, None)]
    assert torch.equal(found[0].loss, found[1].loss) and found[0].slot_overlap is None


@pytest.mark.parametrize("ce", [0.0, 0.5])
def test_dpace_uses_the_overlap_without_cross_entropy(
    ce: float, batch: tuple[Features, Blocks], target: Target
) -> None:
    features, blocks = batch
    assert features.final is not None
    hidden = as_drafted(features, predicting_states(blocks, 80)) + 0.3 * torch.randn(1, 40 * SIZE, 32)
    asked = options(ce=ce, tv=1.0, weights="dpace")
    result = draft_loss(hidden, blocks, target.head_weight, asked, 4.0, features.final)

    q = target.head(hidden.view(40, SIZE, 32)[:, 1:]).double()
    p = target.head(features.final[0][blocks.anchor[0][:, None] + torch.arange(SIZE - 1)]).double().softmax(-1)
    overlap = torch.minimum(p, q.softmax(-1)).sum(-1)
    cross = F.cross_entropy(q.flatten(0, 1), blocks.labels[0, :, 1:].flatten(), reduction="none").view(40, -1)
    supervised = blocks.supervised[0, :, 1:]
    weights = dpace_weights(cross if ce else -overlap.log(), supervised, asked.alpha).double()
    expected = (weights * (ce * cross + 1 - overlap)).sum() / weights.sum()
    assert result.loss.item() == pytest.approx(expected.item(), rel=1e-5)


def test_recall_at_k_is_the_share_of_labels_among_the_first_k(batch: tuple[Features, Blocks]) -> None:
    _, blocks = batch
    ranks = torch.arange(40 * SIZE).view(1, 40, SIZE) % 23  # the label's place, by slot
    vocabulary = int(blocks.labels.max()) + 30
    hidden = torch.zeros(1, 40, SIZE, vocabulary)
    for a in range(40):
        for k in range(1, SIZE):
            others = [t for t in range(vocabulary) if t != blocks.labels[0, a, k]][: int(ranks[0, a, k])]
            hidden[0, a, k, others] = 2.0
            hidden[0, a, k, blocks.labels[0, a, k]] = 1.0
    result = draft_loss(hidden.flatten(1, 2), blocks, torch.eye(vocabulary), LossOptions(), 4.0)
    supervised = blocks.supervised[0, :, 1:]
    for i, top in enumerate((1, 4, 16)):
        inside = (ranks[0, :, 1:] < top) & supervised
        assert result.recall[i].tolist() == pytest.approx((inside.sum(0) / supervised.sum(0)).tolist())


# ---- the target's last hidden state ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_final_is_the_input_of_the_head_which_does_not_run(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = make_target(kind)
    ids = torch.randint(0, 250, (2, 9))
    full = target.forward(ids, taps=(1, 3), logits="all", final=True)
    with monkeypatch.context() as patch:
        patch.setattr(target.model.lm_head, "forward", None)
        without_head = target.forward(ids, taps=(3, 1), final=True)
    assert full.final is not None and without_head.final is not None and without_head.logits is None
    assert torch.equal(target.head(full.final), full.logits) and torch.equal(full.final, without_head.final)
    assert torch.equal(full.features, without_head.features.unflatten(-1, (2, 32)).flip(-2).flatten(-2))
    assert target.forward(ids, taps=(1,)).final is None
    assert not any(module._forward_hooks for module in target.model.modules())


@pytest.mark.parametrize("cache_gb", [0.0, 1.0])
def test_the_final_state_is_stored_after_the_taps(cache_gb: float, target: Target) -> None:
    rows = [Row(i, 3, torch.randint(0, 250, (n,)).tolist()) for i, n in enumerate((12, 7))]
    source = FeatureSource(target, (1, 3), 64, store=MemoryStore(0, int(cache_gb * GIB)), final=True)
    first, again = source(rows), source(rows)
    plain = FeatureSource(target, (1, 3), 64)(rows)
    assert plain.final is None and torch.equal(plain.hidden, first.hidden)
    assert torch.equal(first.hidden, again.hidden) and torch.equal(first.final, again.final)
    for i, row in enumerate(rows):
        last = target.model.model(torch.tensor([row.tokens])).last_hidden_state[0]
        torch.testing.assert_close(first.final[i, : len(row.tokens)], last)
    with pytest.raises(ValueError, match="does not cover tokens"):
        replace(first, final=first.final[:, 1:])


# ---- it is learned -----------------------------------------------------------------------------------------------


def learn(target: Target, batch: tuple[Features, Blocks], loss: LossOptions, steps: int) -> list[DraftLoss]:
    drafter = make_drafter(target, block_size=SIZE).train()
    asked = TrainConfig(target="tiny", loss=loss)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=3e-3)
    results = []
    for _ in range(steps):
        results.append(compute_loss(drafter, target, *batch, asked, flex=False))
        results[-1].loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return results


@pytest.mark.parametrize("kind", [*KINDS, "ce and tv"])
def test_every_loss_falls_and_brings_the_distributions_together(
    kind: str, target: Target, batch: tuple[Features, Blocks]
) -> None:
    mix = {"ce": 0.1, "tv": 0.9} if kind == "ce and tv" else {kind: 1.0}
    results = learn(target, batch, options(**mix, weights="dpace", head_rows=64), steps=16)
    overlaps = [r.slot_overlap.mean().item() for r in results if r.slot_overlap is not None]
    assert results[-1].loss < 0.85 * results[0].loss
    assert 1 - overlaps[-1] < 0.85 * (1 - overlaps[0])


def test_a_run_logs_recall_and_overlap(target: Target, tmp_path: Path) -> None:
    rows = [Row(i, 6, torch.randint(0, 250, (24,)).tolist()) for i in range(4)]
    asked = replace(config(feature_cache_gb=1), loss=options(kl=1.0, anchors=4))
    train(run_of(asked, target, rows, tmp_path))
    for line in map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines()):
        for name in ("slot_accuracy", "recall_at_4", "recall_at_16", "slot_overlap"):
            assert len(line[name]) == 7 and all(v is None or 0 <= v <= 1 for v in line[name]), name
