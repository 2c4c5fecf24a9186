"""Rows and learning rate of each step: functions of the seed and the step alone, so nothing has to be saved."""

import bisect
import functools
import math
import sys
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from dflash_toolkit.config import UserError

from ..config import TrainConfig
from ..data_options import PACKS
from ..run.resume_point import ResumePoint
from ..training_options import PACK_TOKENS


def rng_for(seed: int, stream: int, index: int) -> torch.Generator:
    """Returns the generator of (seed, stream, index). Streams: 1 data order, 2 anchors, 3 dealing rows to lanes."""
    # hashed to 32 bits: the generator ignores the other bits of a seed
    return torch.Generator().manual_seed(zlib.crc32(f"{seed}/{stream}/{index}".encode()))


# ---- rows of a micro batch -------------------------------------------------------------------------------------
#
# The `group` micro batches of a step come from as many lanes: micro batch `turn` is the next one of lane
# `turn % group`. Each lane has its own rows, so a process with the same lanes at every step computes and keeps the same
# rows in every epoch. A lane passes over its rows once per epoch, in a new order, without waiting for the others. If a
# run ends by epochs, a finished lane is empty for some micro batches before the last.

Part = tuple[int, int, int]  # a part of a run: its group, its epochs (0: no limit), and the micro batches done


class _Lane:
    """The micro batches of a lane's rows, epoch by epoch.

    Args:
        rows: ascending.
        seen: how often each row was seen before.
        first, last: range of epochs, `last` excluded; 0 is endless. An epoch contains the rows that were seen no more
            often than its number, so each row is seen once per epoch, whatever was done before.
        order: (epoch, n) -> a permutation of n.
        cut: rows in an epoch's order -> the ends of the micro batches.
    """

    def __init__(
        self, rows: np.ndarray, seen: np.ndarray, first: int, last: int,
        order: Callable[[int, int], np.ndarray], cut: Callable[[np.ndarray], list[int]],
    ) -> None:  # fmt: skip
        self.rows, self._seen, self._first, self._last = rows, seen, first, last
        self._order, self._cut = order, cut
        self._ends: list[int] = []  # micro batches at the end of each epoch, computed as needed
        self._taken: list[int] = []  # rows, likewise
        self._kept: dict[int, tuple[np.ndarray, list[int]]] = {}

    def at(self, position: int) -> np.ndarray:
        """Returns the rows of a micro batch; none after the lane's end."""
        place = self._find(position)
        if place is None:
            return self.rows[:0]
        epoch, within = place
        order, cuts = self._epoch(epoch)
        return order[cuts[within - 1] if within else 0 : cuts[within]]

    def total(self) -> int:
        """Micro batches of all epochs."""
        while self._grow():
            pass
        return self._ends[-1] if self._ends else 0

    def taken(self, position: int) -> int:
        """Returns the number of rows in the first `position` micro batches."""
        place = self._find(position)
        if place is None:
            return self._taken[-1] if self._taken else 0
        epoch, within = place
        return (self._taken[epoch - 1] if epoch else 0) + (self._epoch(epoch)[1][within - 1] if within else 0)

    def seen(self, position: int) -> np.ndarray:
        """Returns how often each row was seen in the first `position` micro batches."""
        counts, place = self._seen.copy(), self._find(position)
        for epoch in range(len(self._ends) if place is None else place[0]):
            counts[self._seen <= self._first + epoch] += 1
        if place is not None:
            epoch, within = place
            order, cuts = self._epoch(epoch)
            counts[np.searchsorted(self.rows, order[: cuts[within - 1] if within else 0])] += 1
        return counts

    def _find(self, position: int) -> tuple[int, int] | None:
        """Returns the epoch, counted from the first, and the place in it; None after the lane's end."""
        while not self._ends or self._ends[-1] <= position:
            if not self._grow():
                return None
        epoch = bisect.bisect_right(self._ends, position)
        return epoch, position - (self._ends[epoch - 1] if epoch else 0)

    def _grow(self) -> bool:
        done = len(self._ends)
        if not len(self.rows) or (self._last and self._first + done >= self._last):
            return False
        order, cuts = self._epoch(done)
        self._ends.append((self._ends[-1] if done else 0) + len(cuts))
        self._taken.append((self._taken[-1] if done else 0) + len(order))
        return True

    def _epoch(self, epoch: int) -> tuple[np.ndarray, list[int]]:
        if epoch not in self._kept:
            rows = self.rows[self._seen <= self._first + epoch]
            order = rows[self._order(self._first + epoch, len(rows))]
            self._kept = dict([*self._kept.items()][-1:])  # readahead crosses from one epoch to the next
            self._kept[epoch] = order, self._cut(order)
        return self._kept[epoch]


class _Lanes:
    """Base of `Schedule` and `PackedSchedule`: rows dealt to lanes, and the lanes' micro batches in turn.

    A run that continues with another group or other epochs deals its rows again. `history` counts how often each row
    was seen, and the rest of a row's epoch comes first, so every row is still seen once per epoch.
    """

    def __init__(
        self, lengths: np.ndarray, cut: Callable[[np.ndarray], list[int]], epochs: int, steps: int, seed: int,
        group: int, history: Sequence[Part],
    ) -> None:  # fmt: skip
        self._lengths, self._cut, self._seed, self._group = lengths, cut, seed, group
        self._epochs = 0 if steps else epochs
        before = list(history)
        if before and before[-1][:2] == (group, self._epochs):
            before.pop()  # the last part is still running
        seen = np.zeros(len(lengths), dtype=np.int64)
        for old, end, done in before:
            lanes = self._deal(old, end, seen)
            for i, lane in enumerate(lanes):
                seen[lane.rows] = lane.seen(len(range(i, done, old)))
        self._before = [(old, end, done) for old, end, done in before]
        self._start = sum(done for _, _, done in before)
        self._seen_before = int(seen.sum())
        self._lanes = self._deal(group, self._epochs, seen)
        self.total = steps or self._start + group * max(lane.total() for lane in self._lanes)

    def indices(self, turn: int) -> list[int]:
        """Returns the row indices of micro batch `turn`, 0-based; none after its lane's end."""
        lane, position = self._place(turn)
        return lane.at(position).tolist()

    def spare(self, turn: int) -> list[int]:
        """Returns rows to compute after a lane's end, from the same process's lanes if it has any rows."""
        lane, _ = self._place(turn)
        return lane.at(0).tolist() or [0]

    def rows_of(self, rank: int, world: int) -> list[int]:
        """Returns the rows of a process, ascending."""
        return np.sort(np.concatenate([lane.rows for lane in self._lanes[rank::world]])).tolist()

    def epoch(self, turn: int) -> float:
        """Returns the mean number of times that rows were seen after `turn` micro batches."""
        done = turn - self._start
        taken = sum(lane.taken(len(range(i, done, self._group))) for i, lane in enumerate(self._lanes))
        return (self._seen_before + taken) / len(self._lengths)

    def history(self, turn: int) -> list[Part]:
        """Returns the `history` with which a schedule continues after `turn` micro batches."""
        return [*self._before, (self._group, self._epochs, turn - self._start)]

    @functools.cached_property
    def per_epoch(self) -> int:
        """Approximate number of micro batches in an epoch of all rows."""
        empty = np.zeros(len(self._lengths), dtype=np.int64)
        return sum(lane.total() for lane in self._deal(self._group, 1, empty))

    def _place(self, turn: int) -> tuple[_Lane, int]:
        position, lane = divmod(turn - self._start, self._group)
        return self._lanes[lane], position

    def _deal(self, group: int, epochs: int, seen: np.ndarray) -> list[_Lane]:
        """Deals rows to lanes, rows of similar length to different lanes.

        Lanes differ by at most one row, and by about one row's tokens, in the rest of the epoch and in total.
        """
        dealt = np.arange(len(seen))
        if group > 1:
            dealt = torch.randperm(len(seen), generator=rng_for(self._seed, 3, group)).numpy()
            dealt = dealt[np.lexsort((-self._lengths[dealt], seen[dealt]))]
        lanes = []
        for i in range(group):
            rows = np.sort(dealt[i::group])
            order = functools.partial(self._permutation, group, i)
            lanes.append(_Lane(rows, seen[rows], int(seen.min(initial=0)), epochs, order, self._cut))
        return lanes

    def _permutation(self, group: int, lane: int, epoch: int, count: int) -> np.ndarray:
        return torch.randperm(count, generator=rng_for(self._seed, 1, epoch * group + lane)).numpy()


class Schedule(_Lanes):
    """Rows of unpacked micro batches: a function of the seed and the turn, with every row once per epoch.

    Args:
        rows: number of rows.
        steps: micro batches; 0 goes by epochs.
        group: micro batches of an optimiser step, over all processes.
        history: earlier parts of the run with another group or other epochs (their schedules' `history`).
    """

    def __init__(
        self, rows: int, batch_size: int, epochs: int, steps: int, seed: int, group: int = 1,
        history: Sequence[Part] = (),
    ) -> None:  # fmt: skip
        def cut(order: np.ndarray) -> list[int]:
            return [min(start + batch_size, len(order)) for start in range(0, len(order), batch_size)]

        super().__init__(np.ones(rows, dtype=np.int64), cut, epochs, steps, seed, group, history)


class PackedSchedule(_Lanes):
    """Rows of packed micro batches, which all have the same shape and little padding.

    Args:
        lengths: tokens of every packed row.
        room: tokens of a pack; a longer row has its own pack, and the caller cuts it.
        steps, group, history: as for `Schedule`.
    """

    def __init__(
        self, lengths: Sequence[int] | np.ndarray, room: int, epochs: int, steps: int, seed: int, group: int = 1,
        history: Sequence[Part] = (),
    ) -> None:  # fmt: skip
        tokens = np.asarray(lengths, dtype=np.int64)

        def cut(order: np.ndarray) -> list[int]:
            ends: list[int] = tokens[order].cumsum().tolist()
            cuts: list[int] = []
            full = room
            while (done := cuts[-1] if cuts else 0) < len(ends):
                cuts.append(max(bisect.bisect_right(ends, full, done), done + 1))
                full = ends[cuts[-1] - 1] + room
            return cuts

        super().__init__(tokens, cut, epochs, steps, seed, group, history)


def make_schedule(
    config: TrainConfig, device: torch.device, lengths: np.ndarray, group: int, point: ResumePoint | None
) -> Schedule | PackedSchedule:
    """Makes the schedule of a run.

    Args:
        lengths: tokens of every row.
        point: the resume point to continue from.
    """
    optim, seed = config.optim, config.run.seed
    tokens, _ = packing(config, device)
    limit = sys.maxsize if optim.minutes else optim.steps * group
    history: list[Part] = []
    if point:
        history = point.history or [(1, 0 if limit else optim.passes, point.micro)]
    if tokens:
        return PackedSchedule(np.minimum(lengths, tokens), tokens, optim.passes, limit, seed, group, history)
    return Schedule(len(lengths), optim.batch_size, optim.passes, limit, seed, group, history)


def learning_rate_factor(step: int, total: int, warmup: float, decay: float | None = None) -> float:
    """Linear warm-up over `warmup * total` steps, then cosine to zero; `step` is 0-based.

    With `decay` the rate stays at its peak until the last `decay * total` steps (warm-up, stable, decay; Hu et al.
    2024, arXiv 2404.06395) and then falls to zero as 1 - sqrt (Haegele et al. 2024, arXiv 2405.18392).
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
    """The point at which a run's plan was changed."""

    step: int
    micro: int
    seconds: float
    rate: float  # share of the peak in the last step


def joined_factor(step: int, total: int, warmup: float, decay: float | None, since: int, rate: float) -> float:
    """`learning_rate_factor` of a run whose plan was changed after `since` steps, at rate `rate`.

    The rate moves linearly from there to the new plan's over `warmup * total` steps, or the steps that are left, and
    then follows the new plan.
    """
    ramp = min(max(1, round(warmup * total)), max(1, total - since))
    there = learning_rate_factor(min(max(step, since + ramp), total), total, warmup, decay)
    return there if step >= since + ramp else rate + (there - rate) * (step - since + 1) / ramp


def packing(config: TrainConfig, device: torch.device) -> tuple[int, int]:
    """Returns tokens and blocks of a packed row; (0, 0) for unpacked rows."""
    optim = config.optim
    tokens = optim.pack_tokens
    if tokens is None:
        longest = config.prompts.row_tokens + -config.prompts.row_tokens % PACKS
        # joined rows are about as long as they may be, so a pack holds a whole number of them
        usual = PACK_TOKENS // longest * longest if config.prompts.join_to else PACK_TOKENS
        tokens = max(usual, longest) if device.type == "cuda" else 0
    elif 0 < tokens < (config.prompts.join_to or 0):
        raise UserError(
            f"optim.pack_tokens is {tokens}, less than a row may have (prompts.join_to is {config.prompts.join_to}); "
            f"raise optim.pack_tokens or lower prompts.join_to"
        )
    if optim.pack_blocks and not tokens:
        raise UserError(
            "optim.pack_blocks needs packed rows; on a CPU give optim.pack_tokens too, or loss.anchors instead"
        )
    return tokens, (optim.pack_blocks or tokens * 3 // 16) if tokens else 0
