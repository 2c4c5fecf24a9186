"""Several rows in one: which rows a step takes, so that every step has the same shape and little of it is empty."""

import functools
import zlib
from collections.abc import Sequence

import torch


class PackedSchedule:
    """Which rows a step packs together: a fresh permutation per epoch, a function of the seed and the step alone.

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
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self._seed}/1/{epoch}".encode()))
        packs: list[list[int]] = []
        left = 0
        for i in torch.randperm(len(self._lengths), generator=generator).tolist():
            if not packs or self._lengths[i] > left:
                packs.append([])
                left = self._room
            packs[-1].append(i)
            left -= self._lengths[i]
        return packs
