"""Gradients of one micro batch: blocks, drafter, loss. `loop.py` and `online.py` train with the same function."""

from dataclasses import replace

import torch
from torch import Tensor

from .config import TrainConfig
from .distributed.zero import Learner
from .objective.blocks import Features, sample_blocks
from .objective.loss import compute_loss, use_flex
from .objective.target_head import TargetHead
from .optim.schedule import packing
from .run.cost import visible_pairs


def add_gradients(
    learner: Learner,
    target: TargetHead,
    features: Features,
    config: TrainConfig,
    random: torch.Generator,
    *,
    done: float = 1.0,
    last: bool = True,
    counts: bool = True,
) -> Tensor:
    """Adds the gradients of a micro batch to those of `learner.drafter`.

    Returns the loss's totals and the number of visible pairs: float64 on the device, see `DraftLoss.totals`.

    Args:
        random: samples the anchors; a generator on the CPU.
        done: share of the run that is done.
        last: whether it is the last micro batch of a step in this process.
        counts: whether the micro batch counts; otherwise its gradients and totals are multiplied by zero.
    """
    drafter = learner.drafter
    packed, anchors = packing(config, target.device)
    size, mask = config.drafter.block_size, drafter.config.mask_token_id
    blocks = sample_blocks(features, anchors or config.loss.anchors, size, mask, random, fixed=packed > 0)
    if config.loss.input_noise:
        features = noisy(features, len(drafter.config.target_layer_ids), config.loss.input_noise, random)
    flex = use_flex(config.run.attention, target.device)
    parts = blocks.split(config.optim.splits or 1)
    filled = torch.stack([part.valid.any() for part in parts]).tolist() if len(parts) > 1 else [True]
    totals = []
    for k, part in enumerate(parts):
        part = part if filled[k] else parts[0]  # every process makes the same number of passes
        result = compute_loss(drafter, target, features, part, config, flex, learner.run, done)
        factor = counts and filled[k]
        learner.backward(result.weighted_sum if factor else 0 * result.weighted_sum, last and k == len(parts) - 1)
        pairs = visible_pairs(part, drafter.config)[None].double()
        totals.append(torch.cat([result.totals(), pairs]) * factor)
    return torch.stack(totals).sum(0)


def noisy(features: Features, taps: int, share: float, random: torch.Generator) -> Features:
    """Returns features with normal noise on each of the `taps` hidden states, relative to its root mean square.

    Args:
        random: a generator on the CPU, which gives the seed.
    """
    hidden = features.hidden.unflatten(-1, (taps, -1)).float()
    seed = int(torch.randint(2**62, (), generator=random))
    generator = torch.Generator(hidden.device).manual_seed(seed)
    noise = torch.randn(hidden.shape, device=hidden.device, generator=generator)
    scale = share * hidden.square().mean(-1, keepdim=True).sqrt()
    return replace(features, hidden=(hidden + scale * noise).flatten(-2).to(features.hidden.dtype))
