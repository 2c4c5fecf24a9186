"""One forward and loss of the drafter over a batch of blocks: the code path that decoding takes too."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from dflash_toolkit.models.dflash.network import Drafter
from dflash_toolkit.models.target import Target

from ..config import TrainConfig
from .blocks import Blocks, Features, dense_mask, flex_mask
from .losses import DraftLoss, draft_loss


def use_flex(attention: str, device: torch.device) -> bool:
    """FlexAttention skips empty tiles but has no backward on a CPU."""
    return device.type == "cuda" if attention == "auto" else attention == "flex"


Run = Callable[..., Tensor]  # of a drafter and what `_run` takes


def runner(config: TrainConfig, device: torch.device) -> Run:
    """The drafter's forward over a batch of blocks, compiled where the option says so."""
    return _compiled_run() if compiles(config, device) else _run


def compiles(config: TrainConfig, device: torch.device) -> bool:
    return config.run.compile == "on" or (config.run.compile == "auto" and device.type == "cuda")


def compute_loss(
    drafter: Drafter, target: Target, features: Features, blocks: Blocks, config: TrainConfig, flex: bool,
    run: Run | None = None,
) -> DraftLoss:  # fmt: skip
    """One forward of the drafter over a batch of blocks, and its loss. The same code path as decoding's two calls."""
    run = run or runner(config, target.device)
    mask = flex_mask(features, blocks) if flex else dense_mask(features, blocks)
    embedded = target.embed(blocks.inputs.flatten(1))
    with _autocast(target.device, target.dtype):
        hidden = run(
            drafter, features.hidden.to(target.dtype), features.positions, embedded, blocks.positions.flatten(1), mask
        )
        return draft_loss(hidden, blocks, target.head_weight, config.loss, config.gamma, features.final)


def _run(
    drafter: Drafter, features: Tensor, context: Tensor, embedded: Tensor, positions: Tensor, mask: Tensor | BlockMask
) -> Tensor:
    return drafter(embedded, positions, drafter.context_kv(features, context), mask)


@functools.cache
def _compiled_run() -> Run:
    return torch.compile(_run)


def _autocast(device: torch.device, dtype: torch.dtype) -> contextlib.AbstractContextManager[Any]:
    # fp32 master weights, bf16 compute; CPUs mostly lack bf16 units and compute in fp32
    if device.type == "cuda":
        return torch.autocast("cuda", dtype=torch.bfloat16)
    if dtype != torch.float32:  # somebody asked for it, and the features are in it
        return torch.autocast(device.type, dtype=dtype)
    return contextlib.nullcontext()
