"""Which rows a step takes and how fast it learns: functions of the seed and the step alone, so nothing is saved."""

import functools
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dflash_toolkit.config import UserError

from .config import PACK_TOKENS, TrainConfig


def draws(seed: int, stream: int, index: int) -> torch.Generator:
    """A generator of its own for every (stream, index) of a seed: 1 is the data order, 2 the anchors."""
    # hashed to 32 bits: the generator ignores the rest of a seed
    return torch.Generator().manual_seed(zlib.crc32(f"{seed}/{stream}/{index}".encode()))


class Schedule:
    """Which rows a step sees: a fresh permutation per epoch, a function of the seed and the step alone."""

    def __init__(self, rows: int, batch_size: int, epochs: int, steps: int, seed: int) -> None:
        self.per_epoch = math.ceil(rows / batch_size)
        self.total = steps or self.per_epoch * epochs
        self._rows, self._batch_size, self._seed = rows, batch_size, seed

    def indices(self, step: int) -> list[int]:
        """Row indices of 0-based `step`."""
        epoch, within = divmod(step, self.per_epoch)
        order = torch.randperm(self._rows, generator=draws(self._seed, 1, epoch))
        return order[within * self._batch_size : (within + 1) * self._batch_size].tolist()


class PackedSchedule:
    """Which rows a step packs into one, so that every step has the same shape and little of it is empty.

    Args:
        lengths: tokens of every row, as they will be packed.
        room: tokens of a pack; a longer row is alone, and cut by whoever packs it.
        steps: 0 goes by epochs.
    """

    def __init__(self, lengths: Sequence[int], room: int, epochs: int, steps: int, seed: int) -> None:
        self._lengths, self._room, self._seed = lengths, room, seed
        self.per_epoch = len(self._packs(0))
        self.total = steps or sum(len(self._packs(epoch)) for epoch in range(epochs))
        self._ends = [self.per_epoch]

    def indices(self, step: int) -> list[int]:
        """Row indices of 0-based `step`."""
        while step >= self._ends[-1]:
            self._ends.append(self._ends[-1] + len(self._packs(len(self._ends))))
        epoch = next(e for e, end in enumerate(self._ends) if step < end)
        return self._packs(epoch)[step - (self._ends[epoch - 1] if epoch else 0)]

    @functools.lru_cache(maxsize=2)  # noqa: B019 - as long-lived as the run
    def _packs(self, epoch: int) -> list[list[int]]:
        generator = draws(self._seed, 1, epoch)
        packs: list[list[int]] = []
        left = 0
        for i in torch.randperm(len(self._lengths), generator=generator).tolist():
            if not packs or self._lengths[i] > left:
                packs.append([])
                left = self._room
            packs[-1].append(i)
            left -= self._lengths[i]
        return packs


def learning_rate_factor(step: int, total: int, warmup: float, decay: float | None = None) -> float:
    """Linear warm-up over `warmup * total` steps, then cosine to zero; `step` is 0-based.

    With `decay` the rate stays at its peak instead until the last `decay * total` steps (warm-up, stable, decay; Hu et
    al. 2024, arXiv 2404.06395), where it falls to zero as 1 - sqrt (Haegele et al. 2024, arXiv 2405.18392).
    """
    ramp = max(1, round(warmup * total))
    if step < ramp:
        return (step + 1) / ramp
    if decay is not None:
        falling = max(1, round(decay * total))
        return 1 - math.sqrt(max(0, step - total + falling) / falling)
    return 0.5 * (1 + math.cos(math.pi * (step - ramp) / max(1, total - ramp)))


@dataclass(frozen=True, slots=True)
class Joint:
    """Where a run was when its plan was changed."""

    step: int
    micro: int
    seconds: float
    rate: float  # share of the peak that the last step had


def joined_factor(step: int, total: int, warmup: float, decay: float | None, since: int, rate: float) -> float:
    """`learning_rate_factor` of a run whose plan was changed behind `since` steps, where its rate was `rate`.

    The rate goes from there to the new plan's in a line of `warmup * total` steps, or as many as are left, and then
    follows the new plan.
    """
    ramp = min(max(1, round(warmup * total)), max(1, total - since))
    there = learning_rate_factor(min(max(step, since + ramp), total), total, warmup, decay)
    return there if step >= since + ramp else rate + (there - rate) * (step - since + 1) / ramp


def packing(config: TrainConfig, device: torch.device) -> tuple[int, int]:
    """Tokens and blocks of a packed row; (0, 0) where sequences stay apart."""
    optim = config.optim
    tokens = optim.pack_tokens
    if tokens is None:
        tokens = PACK_TOKENS if device.type == "cuda" else 0
    if optim.pack_blocks and not tokens:
        raise UserError("optim.pack_blocks is of packed rows: on a CPU give optim.pack_tokens too, or loss.anchors")
    return tokens, (optim.pack_blocks or tokens * 3 // 16) if tokens else 0
