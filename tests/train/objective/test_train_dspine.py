"""DSpine's loss against its plain definition, its schedules, and a run from the first step to a served drafter."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import make_dflash2, make_drafter, make_dspine, make_target
from programs import Program
from torch import Tensor
from training_runs import config, interrupted, losses, random_rows, run_of

from dflash_toolkit import Drafter, SamplingParams, Target, UserError, generate, load_drafter, save_drafter
from dflash_toolkit.kernels import candidates as candidates_module
from dflash_toolkit.kernels.candidates import candidate_logits
from dflash_toolkit.models.dflash.architecture import of_kind
from dflash_toolkit.train.config import TrainConfig
from dflash_toolkit.train.features.source import FeatureSource
from dflash_toolkit.train.loop import train
from dflash_toolkit.train.objective.alignment import alignment_weight, replacement, slot_tokens
from dflash_toolkit.train.objective.blocks import Blocks, Features, sample_blocks
from dflash_toolkit.train.objective.loss import DraftLoss, _forward, compute_loss, decay_weights, masks_of
from dflash_toolkit.train.run.start import load_start
from dflash_toolkit.train.training_options import DrafterOptions, LossOptions, OptimOptions

LOSS = LossOptions().of_kind(of_kind("dspine"))
S, D = 8, 32


def batch(target: Target, drafter: Drafter) -> tuple[Features, Blocks]:
    features = FeatureSource(target, drafter.config.target_layer_ids, 64, final=True)(random_rows(3))
    return features, sample_blocks(features, 5, S, 299, torch.Generator().manual_seed(0))


def loss_of(target: Target, drafter: Drafter, done: float = 0.5, **options: Any) -> DraftLoss:
    asked = TrainConfig(target="tiny", loss=replace(LOSS, **options))
    return compute_loss(drafter, target, *batch(target, drafter), asked, flex=False, done=done)


def gradients(drafter: Drafter, loss: Tensor) -> dict[str, Tensor]:
    drafter.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in drafter.named_parameters() if p.grad is not None}


def defined(target: Target, drafter: Drafter) -> Tensor:
    """The contract's sum without replaced blocks, slot by slot over all logits."""
    features, blocks = batch(target, drafter)
    head, (rows, count) = target.head_weight, blocks.anchor.shape
    tokens = torch.cat([blocks.inputs[:, :, :1], blocks.labels[:, :, 1:]], dim=2)
    weights, codes = decay_weights(S - 1, 4.0), drafter.get_buffer("transfer_codes")
    context = drafter.context_kv(features.hidden, features.positions)
    none = torch.zeros(rows, count, dtype=torch.bool)
    mask = torch.zeros(rows, 1, count * S, features.tokens.shape[1] + count * S, dtype=torch.bool)
    for b in range(rows):
        for a in range(count):
            for j in range(S):
                mask[b, 0, a * S + j, : blocks.anchor[b, a]] = True
                start = features.tokens.shape[1] + a * S
                mask[b, 0, a * S + j, start : start + j + 1] = True
    embedded, positions = target.embed(blocks.inputs.flatten(1)), blocks.positions.flatten(1)
    states = drafter(embedded, positions, context, {"full_attention": mask}, tokens.flatten(1), none)
    states = states.view(rows, count, S, -1)
    teacher = target.head(features.final).softmax(-1)
    total, align, weight, cross = torch.zeros(()), torch.zeros(()), 0.0, 0.0
    chooser = drafter.config.architecture.chooser(drafter, head)
    for b, a, j in blocks.supervised.nonzero().tolist():
        w, label = float(weights[j - 1]), int(blocks.labels[b, a, j])
        state, p = states[b, a, j], teacher[b, blocks.anchor[b, a] + j - 1]
        logits = head @ state[:D]
        ce, l1 = -logits.log_softmax(0)[label], (logits.softmax(0) - p).abs().sum()
        best = logits.topk(16).indices
        h, before = state[D : 2 * D], codes[tokens[b, a, j - 1]] * 32**0.5
        injection: Any = drafter.injection
        scores = head[best] @ drafter.norm(injection.write(3, h, injection.feature(3, h), before))
        among = p[best] / p[best].sum()
        pairs = 0.9 * (scores.softmax(0) - among).abs().sum() * (p[best].sum() > 1e-4)
        if label in best.tolist():
            pairs = pairs - 0.1 * scores.log_softmax(0)[best.tolist().index(label)]
        total, weight, cross = total + w * (0.1 * ce + 0.9 * l1 + pairs), weight + w, cross + w * float(ce.detach())
        align = align + w * state[-1]
    assert chooser is not None
    return (total + 0.5 * cross / weight * align) / weight


def test_loss_and_gradients_follow_the_contract(target: Target) -> None:
    drafter = make_dspine(target).train()
    found = loss_of(target, drafter, gamma=4.0)
    expected = defined(target, drafter)
    assert float(found.loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-4)
    ours, theirs = gradients(drafter, found.loss), gradients(drafter, expected)
    assert ours.keys() == theirs.keys() == dict(drafter.named_parameters()).keys()
    for name, gradient in theirs.items():
        assert gradient.any() and (ours[name] - gradient).norm() <= 2e-3 * gradient.norm(), name


def test_chunks_leave_loss_and_gradients_as_they_are(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = make_dspine(target).train()
    whole = loss_of(target, drafter, done=0.1)
    expected = gradients(drafter, whole.loss)
    monkeypatch.setattr(candidates_module, "ROWS", 7)
    chunked = loss_of(target, drafter, done=0.1, head_rows=5)
    assert float(chunked.loss) == pytest.approx(float(whole.loss), rel=1e-6)
    for name, gradient in gradients(drafter, chunked.loss).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-6)


def test_candidate_logits_have_the_gradient_of_products() -> None:
    hidden, head = torch.randn(3, 4, D, requires_grad=True), torch.randn(50, D)
    candidates, weights = torch.randint(50, (3, 4, 6)), torch.randn(3, 4, 6)
    found = candidate_logits(hidden, head, candidates)
    expected = (F.embedding(candidates, head) @ hidden[..., None])[..., 0]
    torch.testing.assert_close(found, expected)
    (ours,) = torch.autograd.grad((found * weights).sum(), hidden)
    (theirs,) = torch.autograd.grad((expected * weights).sum(), hidden)
    torch.testing.assert_close(ours, theirs)


def test_a_compiled_forward_is_one_graph(target: Target) -> None:
    drafter = make_dspine(target)
    features, blocks = batch(target, drafter)
    given = (features.hidden, features.positions, target.embed(blocks.inputs.flatten(1)), blocks.positions.flatten(1),
             masks_of(drafter.config, features, blocks, flex=False), *slot_tokens(blocks, 0.1))  # fmt: skip
    with torch.no_grad():
        compiled = torch.compile(_forward, backend="eager", fullgraph=True)(drafter, *given)
        assert torch.equal(compiled, _forward(drafter, *given))


def test_replacement_and_alignment_follow_their_schedules(target: Target) -> None:
    shares = (0, 0.1, 1 / 6, 0.25, 1 / 3, 1)
    assert [replacement(done) for done in shares] == pytest.approx([0.5, 0.5, 0.5, 0.25, 0, 0])
    assert [alignment_weight(done) for done in (0, 0.02, 0.04, 1)] == pytest.approx([0, 0.25, 0.5, 0.5])
    features = FeatureSource(target, (1, 3), 64)(random_rows(40))
    blocks = sample_blocks(features, 20, S, 299, torch.Generator().manual_seed(0))
    tokens, replaced = slot_tokens(blocks, 0.1)
    assert 0.4 < replaced.float().mean() < 0.6 and not slot_tokens(blocks, 0.4)[1].any()
    assert not torch.equal(slot_tokens(blocks, 0.11)[1], replaced)
    parts = [slot_tokens(part, 0.1)[1] for part in blocks.split(2)]
    assert torch.equal(torch.cat(parts, dim=1)[:, :20], replaced)
    assert torch.equal(tokens.view(blocks.labels.shape)[:, :, 0], blocks.inputs[:, :, 0])
    assert torch.equal(tokens.view(blocks.labels.shape)[:, :, 1:], blocks.labels[:, :, 1:])


def test_given_loss_terms_replace_those_of_the_kind() -> None:
    assert (LOSS.ce, LOSS.tv, LOSS.weights) == (0.1, 1.8, "decay")
    given = LossOptions(kl=0.5)
    assert given.of_kind(of_kind("dspine")).kl == 0.5
    given = LossOptions(ce=0.5)
    assert given.of_kind(of_kind("dspine")) == given and given.of_kind(of_kind("dflash2")) == given


def test_dspine_learns_and_resumes_exactly(tmp_path: Any) -> None:
    found = []
    for part in ("whole", "halves"):
        for steps in (6,) if part == "whole" else (3, 6):
            target = make_target()
            optim = OptimOptions(optimizer="adamw", steps=6, batch_size=4, learning_rate=3e-3)
            asked = replace(config(), loss=replace(LOSS, anchors=6), optim=optim)
            asked = replace(asked, run=replace(asked.run, save_every=1))
            run = run_of(asked, target, random_rows(10), tmp_path / part)
            run = replace(run, drafter=make_dspine(target))
            if steps == 3:
                with interrupted(3), pytest.raises(KeyboardInterrupt):
                    train(run)
            else:
                train(run)
        found.append((losses(run.work / "metrics.jsonl"), torch.load(run.work / "state.pt")["drafter"]))
    (curve, whole), (resumed, halves) = found
    assert resumed == curve and curve[-1] < curve[1] and all(map(math.isfinite, curve))
    assert all(torch.equal(halves[name], weight) for name, weight in whole.items())
    assert torch.equal(whole["transfer_codes"], make_dspine(make_target()).get_buffer("transfer_codes"))


def test_a_plain_drafter_starts_a_dspine_run(target: Target, tmp_path: Any) -> None:
    save_drafter(make_drafter(target), tmp_path / "plain")
    save_drafter(make_dflash2(target), tmp_path / "dflash2")
    options = DrafterOptions(kind="dspine", mask_token_id=299)
    start = load_start(str(tmp_path / "plain"), target.config, options, ["kind"], tmp_path / "out", 0)
    assert "gets parts of DSpine, which have no effect yet: transfer_rank 32, message_size 512" in start.changed[0]
    assert "causal attention inside the block (layers [0, 1]) is trained" in start.changed[1]
    assert not start.drafter.get_buffer("transfer_ready"), "the target's head is not loaded yet"
    with pytest.raises(UserError, match="cannot get parts of DSpine: no kind of drafter has all of"):
        load_start(str(tmp_path / "dflash2"), target.config, options, ["kind"], tmp_path / "out", 0)


def test_a_trained_dspine_drafter_loads_and_drafts(short_run: Program) -> None:
    short_run("drafter.kind=dspine", "drafter.message_size=8", "optim.steps=6", "run.evaluate_runtime=reference")
    lines = [line for line in short_run.metrics() if "selector_loss" in line]
    assert len(lines) == 6 and all(line["selector_loss"] > 0 for line in lines)
    drafter, target = load_drafter(str(short_run.output)).float(), make_target()
    assert drafter.config.architecture.kind == "dspine" and drafter.get_buffer("transfer_ready")
    params = SamplingParams(max_tokens=12)
    assert generate(target, drafter, [5, 9], params).tokens == generate(target, None, [5, 9], params).tokens
