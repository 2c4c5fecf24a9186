"""The formula of a step's FLOPs against PyTorch's own counter, and the visible pairs against the mask."""

from collections.abc import Callable

import pytest
import torch
from conftest import VOCAB, make_dflash2, make_drafter, make_target
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from dflash_toolkit import Drafter, Target
from dflash_toolkit.train.config import TrainConfig
from dflash_toolkit.train.features.source import FeatureSource
from dflash_toolkit.train.objective.blocks import sample_blocks
from dflash_toolkit.train.objective.loss import compute_loss, masks_of
from dflash_toolkit.train.responses.rows import Row
from dflash_toolkit.train.run.cost import drafter_step_flops, visible_pairs
from dflash_toolkit.train.training_options import LossOptions


@pytest.mark.parametrize("make", [make_drafter, make_dflash2])
def test_step_flops_equal_the_count_of_pytorch(make: Callable[[Target], Drafter]) -> None:
    target = make_target()
    drafter = make(target)
    rows = [Row(i, 4, torch.randint(0, 250, (n,)).tolist()) for i, n in enumerate((30, 30))]
    features = FeatureSource(target, drafter.config.target_layer_ids, 64)(rows)
    blocks = sample_blocks(features, 6, 8, 299, torch.Generator().manual_seed(0))
    config = TrainConfig(target="tiny", loss=LossOptions(weights="decay"))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):  # computes hidden pairs too
        loss = compute_loss(drafter, target, features, blocks, config, flex=False)
        loss.loss.backward()
    slots = blocks.inputs.numel()
    pairs = slots * (30 + slots // 2) * drafter.config.num_layers
    counted = drafter_step_flops(drafter.config, features.tokens.numel(), slots, pairs, loss.rows, VOCAB)
    shape = drafter.config
    idle = blocks.inputs[:, :, 1:].numel() - loss.rows  # slots without a label, which the selector goes over
    counted += 6 * idle * shape.selector_rank * (shape.hidden_size + shape.selector_top_k)
    assert counted == counter.get_total_flops()


@pytest.mark.parametrize("window", [2, 6, 20, 100])
@pytest.mark.parametrize("causal", [False, True, None])
def test_the_pairs_are_those_that_the_masks_show(window: int, causal: bool | None) -> None:
    target = make_target()
    kinds = ("sliding_attention", "full_attention", "sliding_attention")
    shape = make_drafter(target, layers=3, layer_types=kinds, sliding_window=window, is_causal=causal).config
    rows = [Row(i, 4, torch.randint(0, 250, (n,)).tolist()) for i, n in enumerate((30, 7, 41))]
    for packed in (0, 128):
        features = FeatureSource(target, (1, 2), 64, 1, packed)(rows)
        blocks = sample_blocks(features, 20, 8, 299, torch.Generator().manual_seed(0), fixed=bool(packed))
        masks = masks_of(shape, features, blocks, flex=False)
        seen = {kind: mask[:, 0].unflatten(1, (-1, blocks.size))[blocks.valid].sum() for kind, mask in masks.items()}
        assert visible_pairs(blocks, shape) == 2 * seen[kinds[0]] + seen[kinds[1]]
