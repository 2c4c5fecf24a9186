"""Which rows a step takes and how fast it learns: functions of the seed and the step alone, so nothing is saved."""

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

from ..config import PACK_TOKENS, TrainConfig
from ..run.state import ResumePoint


def rng_for(seed: int, stream: int, index: int) -> torch.Generator:
    """A generator of its own for every (stream, index) of a seed: 1 is the data order, 2 the anchors, 3 who
    gets which rows."""
    # hashed to 32 bits: the generator ignores the rest of a seed
    return torch.Generator().manual_seed(zlib.crc32(f"{seed}/{stream}/{index}".encode()))


# ---- which rows a micro batch takes ----------------------------------------------------------------------------
#
# The micro batches of a step, `group` of them, come from as many lanes: micro batch `turn` is the next one of lane
# `turn % group`. Each lane has rows of its own, so a process that takes the same lanes at every step meets, computes
# and keeps the same rows in every epoch. A lane goes through its rows once an epoch, in a fresh order, and does not
# wait for the others. Where a run ends by epochs a lane that is through is empty, some micro batches before the last.

Part = tuple[int, int, int]  # of a run: its group, its epochs (0: it ends otherwise), and the micro batches done


class _Lane:
    """The micro batches of some rows, epoch by epoch.

    Args:
        rows: ascending.
        seen: how often each of them was seen before.
        first, last: epochs to go through, `last` not included; 0 is endless. An epoch is of the rows that were seen no
            more often than its number: each is seen once in every epoch, whatever was done before.
        order: a permutation of so many, of an epoch.
        cut: rows in an epoch's order -> where each micro batch ends.
    """

    def __init__(
        self, rows: np.ndarray, seen: np.ndarray, first: int, last: int,
        order: Callable[[int, int], np.ndarray], cut: Callable[[np.ndarray], list[int]],
    ) -> None:  # fmt: skip
        self.rows, self._seen, self._first, self._last = rows, seen, first, last
        self._order, self._cut = order, cut
        self._ends: list[int] = []  # micro batches at the end of each epoch, as far as anybody asked
        self._taken: list[int] = []  # rows, likewise
        self._kept: dict[int, tuple[np.ndarray, list[int]]] = {}

    def at(self, position: int) -> np.ndarray:
        """Rows of a micro batch; none where the lane is through."""
        place = self._find(position)
        if place is None:
            return self.rows[:0]
        epoch, within = place
        order, cuts = self._epoch(epoch)
        return order[cuts[within - 1] if within else 0 : cuts[within]]

    def total(self) -> int:
        """Micro batches of all its epochs."""
        while self._grow():
            pass
        return self._ends[-1] if self._ends else 0

    def taken(self, position: int) -> int:
        """Rows of so many micro batches."""
        place = self._find(position)
        if place is None:
            return self._taken[-1] if self._taken else 0
        epoch, within = place
        return (self._taken[epoch - 1] if epoch else 0) + (self._epoch(epoch)[1][within - 1] if within else 0)

    def seen(self, position: int) -> np.ndarray:
        """How often each row was seen once so many micro batches are done."""
        counts, place = self._seen.copy(), self._find(position)
        for epoch in range(len(self._ends) if place is None else place[0]):
            counts[self._seen <= self._first + epoch] += 1
        if place is not None:
            epoch, within = place
            order, cuts = self._epoch(epoch)
            counts[np.searchsorted(self.rows, order[: cuts[within - 1] if within else 0])] += 1
        return counts

    def _find(self, position: int) -> tuple[int, int] | None:
        """Epoch, from the first, and place in it; None where the lane is through."""
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
            self._kept = dict([*self._kept.items()][-1:])  # reading ahead goes from one epoch to the next
            self._kept[epoch] = order, self._cut(order)
        return self._kept[epoch]


class _Lanes:
    """What `Schedule` and `PackedSchedule` share: rows dealt to lanes, and the lanes' micro batches in turn.

    A run that goes on with another group, or with other epochs, deals anew: what was seen is counted from `history`,
    and the rest of the epoch that a row is in comes first, so that every row is seen once an epoch all the same.
    """

    def __init__(
        self, lengths: np.ndarray, cut: Callable[[np.ndarray], list[int]], epochs: int, steps: int, seed: int,
        group: int, history: Sequence[Part],
    ) -> None:  # fmt: skip
        self._lengths, self._cut, self._seed, self._group = lengths, cut, seed, group
        self._epochs = 0 if steps else epochs
        before = list(history)
        if before and before[-1][:2] == (group, self._epochs):
            before.pop()  # this goes on
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
        """Row indices of micro batch `turn`, 0-based; none where its lane is through."""
        lane, position = self._place(turn)
        return lane.at(position).tolist()

    def spare(self, turn: int) -> list[int]:
        """Rows that stand in where there are none: some that the same process meets anyway, if it has any."""
        lane, _ = self._place(turn)
        return lane.at(0).tolist() or [0]

    def rows_of(self, rank: int, world: int) -> list[int]:
        """The rows that a process meets, ascending."""
        return np.sort(np.concatenate([lane.rows for lane in self._lanes[rank::world]])).tolist()

    def epoch(self, turn: int) -> float:
        """How often the rows were seen, on the mean, when `turn` micro batches are done."""
        done = turn - self._start
        taken = sum(lane.taken(len(range(i, done, self._group))) for i, lane in enumerate(self._lanes))
        return (self._seen_before + taken) / len(self._lengths)

    def history(self, turn: int) -> list[Part]:
        """What a schedule must be given to go on when `turn` micro batches are done."""
        return [*self._before, (self._group, self._epochs, turn - self._start)]

    @functools.cached_property
    def per_epoch(self) -> int:
        """Micro batches of an epoch of all rows, about."""
        empty = np.zeros(len(self._lengths), dtype=np.int64)
        return sum(lane.total() for lane in self._deal(self._group, 1, empty))

    def _place(self, turn: int) -> tuple[_Lane, int]:
        position, lane = divmod(turn - self._start, self._group)
        return self._lanes[lane], position

    def _deal(self, group: int, epochs: int, seen: np.ndarray) -> list[_Lane]:
        """Lanes of as many rows, give or take one, and as many tokens, give or take a row, in what remains of the
        epoch and as a whole: rows of about one length go to one lane each."""
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
    """Which rows a micro batch takes: a function of the seed and its turn alone, every row once an epoch.

    Args:
        rows: how many there are.
        steps: micro batches; 0 goes by epochs.
        group: micro batches of an optimiser step, of all processes together.
        history: what was done before with another group or other epochs (`history` of those schedules).
    """

    def __init__(
        self, rows: int, batch_size: int, epochs: int, steps: int, seed: int, group: int = 1,
        history: Sequence[Part] = (),
    ) -> None:  # fmt: skip
        def cut(order: np.ndarray) -> list[int]:
            return [min(start + batch_size, len(order)) for start in range(0, len(order), batch_size)]

        super().__init__(np.ones(rows, dtype=np.int64), cut, epochs, steps, seed, group, history)


class PackedSchedule(_Lanes):
    """Which rows a micro batch packs into one, so that each has the same shape and little of it is empty.

    Args:
        lengths: tokens of every row, as they will be packed.
        room: tokens of a pack; a longer row is alone, and cut by whoever packs it.
        steps, group, history: as `Schedule` has them.
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
    """The schedule of a run.

    Args:
        lengths: tokens of every row.
        point: where it goes on from.
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
