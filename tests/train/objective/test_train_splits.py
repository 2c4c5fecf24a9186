"""Blocks of a micro step in several passes: each pass is small, and the update is that of one pass over all blocks."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import LONG_RUN, make_dflash2, make_drafter, make_target
from torch import Tensor
from training_runs import config, losses, random_rows, run_of

from dflash_toolkit.train.config import TrainConfig
from dflash_toolkit.train.features.source import FeatureSource
from dflash_toolkit.train.gradients import noisy
from dflash_toolkit.train.loop import train
from dflash_toolkit.train.objective.blocks import Features, sample_blocks
from dflash_toolkit.train.objective.loss import compute_loss
from dflash_toolkit.train.training_options import LossOptions, OptimOptions


def test_parts_hold_every_block_once_and_have_one_shape() -> None:
    target = make_target()
    features = FeatureSource(target, (1, 3), 64)(random_rows(3))
    blocks = sample_blocks(features, 7, 8, 299, torch.Generator().manual_seed(0))
    parts = blocks.split(3)
    assert [part.anchor.shape[1] for part in parts] == [3, 3, 3]
    for name in ("anchor", "valid", "inputs", "positions", "labels", "supervised"):
        whole = torch.cat([getattr(part, name) for part in parts], dim=1)
        assert torch.equal(whole[:, :7], getattr(blocks, name)) and not whole[:, 7:].any()
    assert all(torch.equal(one.anchor, two.anchor) for one, two in zip(blocks.split(1), [blocks], strict=True))


@pytest.mark.sampled
@pytest.mark.filterwarnings("ignore:In CPU autocast")
@pytest.mark.parametrize("loss", [LossOptions(), LossOptions(ce=0.5, kl=0.5, weights="decay")], ids=["ce", "kl"])
@pytest.mark.parametrize("packed", [{}, {"pack_tokens": 128, "pack_blocks": 30}], ids=["rows", "packed"])
def test_splits_leave_the_update_as_it_is(loss: LossOptions, packed: dict[str, Any], tmp_path: Path) -> None:
    """With packed rows the last passes have no valid block."""
    target, found = make_target(), {}
    target.model.double()  # in fp32 AdamW turns the rounding of small gradients into steps
    for splits in (None, 2, *[4] * LONG_RUN, 9):
        optim = OptimOptions(optimizer="adamw", epochs=2, batch_size=4, learning_rate=3e-3, splits=splits, **packed)
        asked = replace(config(), loss=replace(loss, anchors=6), optim=optim)
        run = run_of(asked, target, random_rows(10), tmp_path / str(splits))
        run = replace(run, drafter=make_dflash2(target).double())
        train(run)
        found[splits] = losses(run.work / "metrics.jsonl"), torch.load(run.work / "state.pt")["drafter"]
    curve, weights = found.pop(None)
    for other, moved in found.values():
        assert other == pytest.approx(curve, rel=1e-6) and len(curve) > 4
        for name, weight in weights.items():
            assert (moved[name] - weight).norm() <= 1e-5 * weight.norm(), name


def test_each_pass_keeps_the_activations_of_its_own_blocks() -> None:
    target = make_target()
    drafter = make_drafter(target).train()
    features = FeatureSource(target, drafter.config.target_layer_ids, 64)(random_rows(3))
    blocks = sample_blocks(features, 16, 8, 299, torch.Generator().manual_seed(0))
    kept: list[int] = []
    for splits in (1, 4):
        sizes: list[int] = []

        def keep(tensor: Tensor, sizes: list[int] = sizes) -> Tensor:
            sizes.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            part = blocks.split(splits)[0]
            compute_loss(drafter, target, features, part, TrainConfig(target="tiny"), flex=False)
        kept.append(sum(sizes))
    assert kept[1] < 0.6 * kept[0]


def test_input_noise_is_relative_and_follows_its_generator(tmp_path: Path) -> None:
    hidden = torch.cat([torch.randn(2, 64, 100), 50 * torch.randn(2, 64, 100)], dim=2)
    flags, ids = torch.ones(2, 64, dtype=torch.bool), torch.zeros(2, 64, dtype=torch.long)
    features = Features(ids, hidden, flags, ids, ids)
    once, again, other = (
        noisy(features, 2, 0.1, torch.Generator().manual_seed(seed)).hidden - hidden for seed in (0, 0, 1)
    )
    assert torch.equal(once, again) and not torch.equal(once, other)
    assert once[..., :100].std().item() == pytest.approx(0.1, rel=0.1)
    assert once[..., 100:].std().item() == pytest.approx(5, rel=0.1)
    found = []
    for noise in (0.0, 0.5):
        asked = replace(config(), loss=LossOptions(anchors=4, input_noise=noise))
        run = run_of(asked, make_target(), random_rows(4), tmp_path / str(noise))
        train(run)
        found.append(losses(run.work / "metrics.jsonl")[0])
    assert found[0] != found[1], "training reads the option"
