"""What only a CUDA device can show: the flex mask's forward and backward, bf16 training and decoding."""

import math
from dataclasses import replace

import pytest
import torch
from conftest import MASK, make_drafter, make_target

from dflash_toolkit import SamplingParams, Target, generate
from dflash_toolkit.drafter import Drafter
from train.answers import Row
from train.blocks import dense_mask, flex_mask, sample_blocks
from train.config import LossKnobs, OptimKnobs, RunKnobs, TrainConfig
from train.features import FeatureSource
from train.loop import train
from train.losses import draft_loss
from train.step import compute_loss

pytestmark = pytest.mark.gpu


def on_gpu(dtype: torch.dtype) -> Target:
    tiny = make_target()
    return Target(tiny.model.to("cuda", dtype), tiny.tokenizer, tiny.name)


def batch(target: Target, drafter: Drafter) -> tuple:
    rows = [Row(i, 9, torch.randint(0, 250, (n,)).tolist()) for i, n in enumerate((97, 130, 61))]
    features = FeatureSource(target, drafter.config.target_layer_ids, 200, 0.0, 128)(rows)
    return features, sample_blocks(features, 12, 8, MASK, torch.Generator().manual_seed(0))


def test_flex_attention_equals_the_dense_mask_forward_and_backward() -> None:
    target = on_gpu(torch.float32)
    # flex kernels want a head dimension of at least 16
    drafter = make_drafter(target, head_dim=16).cuda()
    features, blocks = batch(target, drafter)
    results = []
    for mask in (dense_mask(features, blocks), flex_mask(features, blocks)):
        drafter.zero_grad()
        context = drafter.context_kv(features.hidden, features.positions)
        hidden = drafter(target.embed(blocks.inputs.flatten(1)), blocks.positions.flatten(1), context, mask)
        loss = draft_loss(hidden, blocks, target.head_weight, LossKnobs(), 4.0).loss
        loss.backward()
        results.append((loss.item(), [p.grad.clone() for p in drafter.parameters()]))
    (dense, dense_grads), (flex, flex_grads) = results
    # TF32-free fp32 on both sides: what differs is the order of sums
    assert math.isclose(dense, flex, rel_tol=1e-3)
    for a, b in zip(dense_grads, flex_grads, strict=True):
        assert torch.allclose(a, b, rtol=2e-2, atol=2e-3 * a.abs().max().item())


def test_packed_compiled_steps_equal_the_dense_mask_at_every_step() -> None:
    """Anchors and documents change from step to step; a compiled mask must not remember the first ones."""
    target = on_gpu(torch.float32)
    drafter = make_drafter(target, head_dim=16).cuda()
    source = FeatureSource(target, drafter.config.target_layer_ids, 200, 0.0, packed=640)
    fast = TrainConfig(target="tiny")
    plain = replace(fast, run=RunKnobs(compile="off"))
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
def test_a_drafter_trained_in_bf16_on_one_answer_is_accepted_when_decoded(pack: int, tmp_path) -> None:
    target = on_gpu(torch.bfloat16)
    prompt = list(range(30, 50))
    answer = generate(target, None, prompt, SamplingParams(max_new_tokens=64, ignore_eos=True)).tokens
    drafter = make_drafter(target, head_dim=16).cuda().train()
    config = TrainConfig(
        target="tiny",
        drafter=TrainConfig(target="tiny").drafter,
        loss=LossKnobs(anchors=64),
        optim=OptimKnobs(optimizer="adamw", steps=400, batch_size=1, learning_rate=3e-3, pack_tokens=pack),
        run=RunKnobs(device="cuda", log_every=50),
    )
    exported: list[Drafter] = []
    train(
        _with_block_size(config, 8), target, drafter, [Row(0, len(prompt), prompt + answer)], [], tmp_path, {},
        lambda trained, tau: exported.append(trained),
    )  # fmt: skip
    served = exported[-1].to(torch.bfloat16).eval()
    result = generate(target, served, prompt, SamplingParams(max_new_tokens=64, ignore_eos=True))
    assert result.acceptance_length > 5.0


def _with_block_size(config: TrainConfig, block_size: int) -> TrainConfig:
    return replace(config, drafter=replace(config.drafter, block_size=block_size))


def test_greedy_bf16_with_a_drafter_differs_from_plain_at_near_ties_only() -> None:
    target = on_gpu(torch.bfloat16)
    drafter = make_drafter(target).to("cuda", torch.bfloat16)
    for seed in range(8):
        prompt = torch.randint(0, 250, (24,), generator=torch.Generator().manual_seed(seed)).tolist()
        params = SamplingParams(max_new_tokens=48, ignore_eos=True)
        plain, drafted = (generate(target, d, prompt, params).tokens for d in (None, drafter))
        at = next((i for i, (a, b) in enumerate(zip(plain, drafted, strict=True)) if a != b), None)
        if at is not None:
            ids = torch.tensor([prompt + plain[:at]], device="cuda")
            logits = target.forward(ids, logits="last").logits
            assert logits is not None
            log_p = logits[0, 0].float().log_softmax(-1)
            assert abs(log_p[plain[at]] - log_p[drafted[at]]) <= 0.2
