"""Tests that need a CUDA device: the flex mask's forward and backward, bf16 training and decoding."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import MASK, make_dflash2, make_drafter, make_target

from dflash_toolkit import SamplingParams, Target, generate
from dflash_toolkit.kernels import loss as head_loss
from dflash_toolkit.kernels.loss import TargetStates, frozen_head_loss
from dflash_toolkit.kernels.loss_terms import CROSS_ENTROPY, LogitScale, LossMix
from dflash_toolkit.models.dflash.network import Drafter
from dflash_toolkit.train.config import TrainConfig
from dflash_toolkit.train.features.gpu_memory import memory_use
from dflash_toolkit.train.features.source import FeatureSource
from dflash_toolkit.train.loop import train
from dflash_toolkit.train.objective.blocks import sample_blocks
from dflash_toolkit.train.objective.loss import compute_loss, draft_loss, masks_of
from dflash_toolkit.train.responses.rows import Row
from dflash_toolkit.train.run.definition import Run
from dflash_toolkit.train.run.held_out import HeldOut, HeldOutPrompt
from dflash_toolkit.train.training_options import DrafterOptions, LossOptions, OptimOptions, RunOptions

pytestmark = pytest.mark.gpu


def on_gpu(dtype: torch.dtype) -> Target:
    tiny = make_target()
    return Target(tiny.model.to("cuda", dtype), tiny.tokenizer, tiny.name)


def rows_of(*lengths: int) -> list[Row]:
    return [Row(i, 9, torch.randint(0, 250, (n,)).tolist()) for i, n in enumerate(lengths)]


SLIDING = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 24}
SIGHTS = pytest.mark.parametrize("sight", [{}, SLIDING, SLIDING | {"is_causal": None}], ids=["full", "mixed", "causal"])


@SIGHTS
def test_flex_attention_equals_the_dense_mask_forward_and_backward(sight: dict[str, Any]) -> None:
    target = on_gpu(torch.float32)
    # flex kernels want a head dimension of at least 16
    drafter = make_drafter(target, head_dim=16, **sight).cuda()
    features = FeatureSource(target, drafter.config.target_layer_ids, 200, 128)(rows_of(97, 130, 61))
    blocks = sample_blocks(features, 12, 8, MASK, torch.Generator().manual_seed(0))
    results = []
    for flex in (False, True):
        drafter.zero_grad()
        context = drafter.context_kv(features.hidden, features.positions)
        masks = masks_of(drafter.config, features, blocks, flex)
        hidden = drafter(target.embed(blocks.inputs.flatten(1)), blocks.positions.flatten(1), context, masks)
        loss = draft_loss(hidden, blocks, target.head_weight, LossOptions(), 4.0).loss
        loss.backward()
        results.append((loss.item(), [p.grad.clone() for p in drafter.parameters()]))
    (dense, dense_grads), (flex, flex_grads) = results
    # TF32-free fp32 on both sides: what differs is the order of sums
    assert math.isclose(dense, flex, rel_tol=1e-3)
    for a, b in zip(dense_grads, flex_grads, strict=True):
        assert torch.allclose(a, b, rtol=2e-2, atol=2e-3 * a.abs().max().item())


@SIGHTS
def test_packed_compiled_steps_equal_the_dense_mask_at_every_step(sight: dict[str, Any]) -> None:
    """Anchors and documents change from step to step; a compiled mask must not remember the first ones."""
    target = on_gpu(torch.float32)
    drafter = make_drafter(target, head_dim=16, **sight).cuda()
    source = FeatureSource(target, drafter.config.target_layer_ids, 200, packed=640)
    fast = TrainConfig(target="tiny")
    plain = replace(fast, run=RunOptions(compile="off"))
    for step in range(4):
        lengths = torch.randint(40, 200, (3,)).tolist()
        rows = [Row(10 * step + i, 9 + step, torch.randint(0, 250, (n,)).tolist()) for i, n in enumerate(lengths)]
        features = source(rows)
        blocks = sample_blocks(features, 64, 8, MASK, torch.Generator().manual_seed(step), fixed=True)
        found = []
        for config, flex in ((plain, False), (fast, True)):
            drafter.zero_grad()
            loss = compute_loss(drafter, target, features, blocks, config, flex).loss
            loss.backward()
            found.append((loss.item(), torch.cat([p.grad.flatten() for p in drafter.parameters()])))
        (dense, dense_grad), (flexed, flexed_grad) = found
        assert math.isclose(dense, flexed, rel_tol=2e-3), step
        assert (dense_grad - flexed_grad).norm() <= 0.03 * dense_grad.norm(), step


@pytest.mark.parametrize("pack", [0, 128])
def test_a_drafter_trained_in_bf16_is_accepted(pack: int, tmp_path) -> None:
    target = on_gpu(torch.bfloat16)
    prompt = list(range(30, 50))
    answer = generate(target, None, prompt, SamplingParams(max_tokens=64, ignore_eos=True)).tokens
    drafter = make_drafter(target, head_dim=16).cuda().train()
    optim = OptimOptions(optimizer="adamw", steps=400, batch_size=1, learning_rate=3e-3, pack_tokens=pack)
    config = TrainConfig(
        target="tiny", drafter=DrafterOptions(block_size=8), loss=LossOptions(anchors=64), optim=optim, device="cuda"
    )
    exported: list[Drafter] = []
    rows = [Row(0, len(prompt), prompt + answer)]
    train(Run(config, target, drafter, rows, [], tmp_path, {}, lambda trained, export: exported.append(trained)))
    served = exported[-1].to(torch.bfloat16).eval()
    result = generate(target, served, prompt, SamplingParams(max_tokens=64, ignore_eos=True))
    assert result.acceptance_length > 5.0


def test_greedy_bf16_drafting_differs_only_at_near_ties() -> None:
    target = on_gpu(torch.bfloat16)
    drafter = make_drafter(target).to("cuda", torch.bfloat16)
    for seed in range(8):
        prompt = torch.randint(0, 250, (24,), generator=torch.Generator().manual_seed(seed)).tolist()
        params = SamplingParams(max_tokens=48, ignore_eos=True)
        plain, drafted = (generate(target, d, prompt, params).tokens for d in (None, drafter))
        at = next((i for i, (a, b) in enumerate(zip(plain, drafted, strict=True)) if a != b), None)
        if at is not None:
            ids = torch.tensor([prompt + plain[:at]], device="cuda")
            logits = target.forward(ids, logits="last").logits
            log_p = logits[0, 0].float().log_softmax(-1)
            assert abs(log_p[plain[at]] - log_p[drafted[at]]) <= 0.2


MIX = LossMix(0.3, 0.7, 1.1, 0.2, 0.5, temperature=0.8)


def head_batch(rows: int, width: int, vocab: int, states: int) -> tuple[torch.Tensor, ...]:
    """A drafter near its target under a head as sharp as a real one, all bf16."""
    weight = (3 * torch.randn(vocab, width) / width**0.5).cuda().bfloat16()
    final, at = torch.randn(states, width).cuda().bfloat16(), torch.randint(states, (rows,)).sort().values.cuda()
    hidden = (final[at] + 0.3 * torch.randn(rows, width).cuda()).bfloat16()
    return hidden, weight, torch.randint(vocab, (rows,)).cuda(), final, at


@pytest.mark.parametrize("mix", [CROSS_ENTROPY, MIX], ids=["ce", "mix"])
def test_the_fused_head_errs_at_most_twice_as_bf16_autograd(mix: LossMix) -> None:
    hidden, weight, labels, final, at = head_batch(700, 896, 151_936, 90)
    upstream = torch.rand(700, device="cuda") * (torch.arange(700, device="cuda") % 3 != 1)

    def plain(hidden: torch.Tensor, weight: torch.Tensor, final: torch.Tensor, wide: torch.dtype) -> tuple:
        leaf = hidden.clone().requires_grad_()
        logits = (leaf @ weight.T).to(wide)
        log_q, log_p = ((x / mix.temperature).log_softmax(-1) for x in (logits, (final @ weight.T).to(wide)[at]))
        kl = (log_p.exp() * (log_p - log_q)).sum(-1)
        overlap = torch.minimum(log_p.exp(), log_q.exp()).sum(-1)
        share = torch.exp(-3 * overlap.detach())
        loss = mix.ce * torch.nn.functional.cross_entropy(logits, labels, reduction="none") + mix.kl * kl
        loss = loss + mix.tv * (1 - overlap) - mix.lk * overlap.log()
        loss = loss + mix.lk_hybrid * (share * kl + (1 - share) * (1 - overlap))
        loss.backward(upstream.to(wide))
        return loss.detach().double(), leaf.grad.double()

    parts = [slice(i, i + 100) for i in range(0, 700, 100)]  # float64 logits of all rows would fill the memory
    everything = (labels, at, upstream)
    truth, rounded = [], []
    for part in parts:
        labels, at, upstream = (t[part] for t in everything)
        truth.append(plain(hidden[part].double(), weight.double(), final.double(), torch.float64))
        rounded.append(plain(hidden[part], weight, final, torch.float32))
    labels, at, upstream = everything
    leaf = hidden.clone().requires_grad_()
    rows = frozen_head_loss(leaf, weight, labels, 256, mix, TargetStates(final, at))
    rows.loss.backward(upstream)
    assert not leaf.grad[upstream == 0].any() and leaf.grad.isfinite().all()
    for got, i in ((rows.loss.detach().double(), 0), (leaf.grad.double(), 1)):
        true, reference = torch.cat([t[i] for t in truth]), torch.cat([r[i] for r in rounded])
        error, allowed = (got - true).norm() / true.norm(), 2 * (reference - true).norm() / true.norm()
        assert error <= max(allowed, 1e-3) and error < 0.1


def test_a_capped_head_with_a_bias_errs_no_more_than_bf16_does() -> None:
    hidden, weight, labels, _, _ = head_batch(300, 64, 5000, 10)
    bias = torch.randn(5000, device="cuda").to(weight.dtype)
    leaf, exact = hidden.clone().requires_grad_(), hidden.double().requires_grad_()
    rows = frozen_head_loss(leaf, weight, labels, 128, scale=LogitScale(0.8, 5.0), bias=bias)
    rows.loss.sum().backward()
    logits = 5 * torch.tanh((exact @ weight.double().T + bias.double()) * 0.8 / 5)
    loss = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    loss.sum().backward()
    for got, true in ((rows.loss.detach(), loss.detach()), (leaf.grad, exact.grad)):
        assert (got.double() - true).norm() < 0.02 * true.norm()


def test_candidates_and_their_gradient_err_no_more_than_bf16_does() -> None:
    hidden, weight, labels, _, _ = head_batch(300, 64, 5000, 10)
    scale, pull = LogitScale(0.8, 5.0), torch.randn(300, 16, device="cuda")
    leaf, exact = hidden.clone().requires_grad_(), hidden.double().requires_grad_()
    rows = frozen_head_loss(leaf, weight, labels, 128, scale=scale, candidates=16, inject=True)
    assert rows.candidates is not None and rows.unary is not None and rows.unary.dtype == torch.float32
    assert (rows.candidates == labels[:, None]).any(1).all()
    (rows.unary * pull).sum().backward()
    logits = 5 * torch.tanh((exact @ weight.double().T) * 0.8 / 5)
    unary = logits.gather(1, rows.candidates)
    (unary * pull).sum().backward()
    kept = rows.candidates[:, :15]
    assert (logits.gather(1, kept).amin(1) >= logits.topk(16).values[:, -1] - 0.1).all(), "the best, up to rounding"
    for got, true in ((rows.unary.detach(), unary.detach()), (leaf.grad, exact.grad)):
        assert (got.double() - true).norm() < 0.02 * true.norm()


def test_the_chunks_of_the_head_never_wait_for_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, labels, final, at = head_batch(700, 64, 5000, 90)
    frozen_head_loss(hidden.requires_grad_(), weight, labels, 128, MIX, TargetStates(final, at))  # compiles

    class Watched(head_loss._Shared):
        def __init__(self, *arguments: object) -> None:
            super().__init__(*arguments)  # which waits, once for all chunks
            torch.cuda.set_sync_debug_mode("error")

    monkeypatch.setattr(head_loss, "_Shared", Watched)
    try:
        frozen_head_loss(hidden, weight, labels, 128, MIX, TargetStates(final, at))
        assert torch.cuda.get_sync_debug_mode() == 2
        frozen_head_loss(hidden, weight, labels, 128)
        rows = frozen_head_loss(hidden, weight, labels, 128, candidates=16, inject=True)
        (rows.loss.sum() + rows.unary.sum()).backward()  # type: ignore[union-attr]
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_bf16_step_with_a_distribution_loss_is_finite_and_lowers_it() -> None:
    target = on_gpu(torch.bfloat16)
    drafter = make_drafter(target, head_dim=16).cuda().train()
    source = FeatureSource(target, drafter.config.target_layer_ids, 200, packed=384, final=True)
    features = source(rows_of(97, 130, 61))
    blocks = sample_blocks(features, 128, 8, MASK, torch.Generator().manual_seed(0), fixed=True)
    config = TrainConfig(target="tiny", loss=LossOptions(ce=0.1, tv=0.9, head_rows=256))
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=3e-3)
    losses = []
    for _ in range(30):
        result = compute_loss(drafter, target, features, blocks, config, flex=True)
        result.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(result.loss.item())
    assert losses[-1] < 0.85 * losses[0]


@pytest.mark.parametrize("compiled", ["off", "on"])
def test_bf16_steps_of_dflash_2_are_those_of_fp32_but_for_rounding(compiled: str) -> None:
    found = []
    for dtype, compile_ in ((torch.float32, "off"), (torch.bfloat16, compiled)):
        torch.manual_seed(0)
        target = on_gpu(dtype)
        drafter = make_dflash2(target, head_dim=16).cuda().train()
        source = FeatureSource(target, drafter.config.target_layer_ids, 200, packed=384)
        features = source(rows_of(97, 130, 61))
        blocks = sample_blocks(features, 128, 8, MASK, torch.Generator().manual_seed(0), fixed=True)
        config = TrainConfig(target="tiny", run=RunOptions(compile=compile_), loss=LossOptions(head_rows=256))
        result = compute_loss(drafter, target, features, blocks, config, flex=True)
        result.loss.backward()
        found.append((result.selector_loss.item(), [p.grad for p in drafter.parameters()]))
    (exact, exact_grads), (loss, grads) = found
    assert loss == pytest.approx(exact, rel=0.05)
    ours, theirs = (torch.cat([grad.flatten() for grad in each]) for each in (grads, exact_grads))
    assert (ours - theirs).norm() < 0.2 * theirs.norm()  # a CPU's bf16 is off by 0.13
    for (name, _), mine, right in zip(drafter.named_parameters(), grads, exact_grads, strict=True):
        assert (mine - right).norm() < 0.6 * right.norm(), name  # there 0.39 at most, of a norm's few numbers


def test_a_bf16_step_of_dflash_2_lowers_both_losses() -> None:
    target = on_gpu(torch.bfloat16)
    drafter = make_dflash2(target, head_dim=16).cuda().train()
    features = FeatureSource(target, drafter.config.target_layer_ids, 200, packed=384)(rows_of(97, 130, 61))
    blocks = sample_blocks(features, 128, 8, MASK, torch.Generator().manual_seed(0), fixed=True)
    config = TrainConfig(target="tiny", loss=LossOptions(head_rows=256, gold="inject"))
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=3e-3)
    losses = []
    for _ in range(30):
        result = compute_loss(drafter, target, features, blocks, config, flex=True)
        result.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append((result.loss.item(), result.selector_loss.item()))
    assert all(last < 0.85 * first for first, last in zip(losses[0], losses[-1], strict=True))


def test_compiled_passes_sum_to_the_whole_step() -> None:
    target = on_gpu(torch.float32)
    drafter = make_dflash2(target, head_dim=16).cuda().train()
    features = FeatureSource(target, drafter.config.target_layer_ids, 200, packed=640)(rows_of(97, 130, 61))
    blocks = sample_blocks(features, 64, 8, MASK, torch.Generator().manual_seed(0), fixed=True)
    found = []
    for parts in (1, 4):
        drafter.zero_grad()
        for part in blocks.split(parts):
            compute_loss(drafter, target, features, part, TrainConfig(target="tiny"), flex=True).weighted_sum.backward()
        found.append(torch.cat([p.grad.flatten() for p in drafter.parameters()]))
    assert (found[0] - found[1]).norm() <= 0.03 * found[0].norm()


def test_an_offloaded_target_leaves_the_gpu_before_the_drafter_comes(tmp_path: Path) -> None:
    target = on_gpu(torch.bfloat16)
    drafter = make_drafter(target, head_dim=16).train()
    config = TrainConfig(
        target="tiny", drafter=DrafterOptions(block_size=8), optim=OptimOptions(steps=3, pack_tokens=128, splits=2),
        run=RunOptions(features="disk", offload_target=True), device="cuda",
    )  # fmt: skip
    exported: list[Drafter] = []
    train(Run(config, target, drafter, rows_of(60, 70), [], tmp_path, {}, lambda trained, _: exported.append(trained)))
    assert {p.device.type for p in target.layers.parameters()} == {"cpu"} and target.device.type == "cuda"
    assert exported[0].device.type == "cuda"


def test_the_engine_for_held_out_prompts_frees_its_memory() -> None:
    prompts = [HeldOutPrompt(list(range(20 + i, 40 + i)), "file") for i in range(4)]
    found, reserved = [], []
    for reserve in (0.0, 1e15):
        target = on_gpu(torch.bfloat16)
        drafter = make_drafter(target, head_dim=16, block_size=4).cuda()
        held_out = HeldOut(target, drafter.config, prompts, RunOptions(evaluate_tokens=8), reserve)
        for _ in range(2):
            found.append(held_out(drafter))
            memory_use(target.device)  # releases what the allocator keeps
            reserved.append(torch.cuda.memory_reserved())
        assert bool(held_out.engine_bytes) == bool(reserve)
    assert all(each == found[0] for each in found)
    assert reserved[3] < reserved[1] and abs(reserved[3] - reserved[2]) < 64 * 2**20
