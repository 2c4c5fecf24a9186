"""Keeps a bounded sample of what was served, to train on and to measure on.

The sample is a weighted reservoir (Efraimidis and Spirakis, 2006) with forward decay (Cormode et al., 2009): a record
gets one random priority when it comes, the records with the smallest priorities stay, and newer records and records
with low acceptance have smaller ones. Nothing is written to disk.
"""

import heapq
import itertools
import math
import random
import zlib
from array import array
from collections.abc import Collection, Sequence

from ..online import Record

HELD_OUT = 0.1  # share of the prompts that is never trained on
HELD_OUT_MEMORY = 0.25  # their share of the memory: a comparison of versions needs some records
ANCHORS = 0.2  # share of a sample from the anchor records
RECENT = 2000  # records after which the weight of a record has halved


class Reservoir:
    """A weighted sample of records within `limit` bytes."""

    def __init__(self, limit: int, dice: random.Random, recent: int = RECENT) -> None:
        self._limit, self._dice, self._decay = limit, dice, math.log(2) / recent
        self._heap: list[tuple[float, int, Record]] = []  # the largest priority first, which leaves first
        self._count = itertools.count()
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def records(self) -> list[Record]:
        """All records, oldest first."""
        return [record for _, _, record in sorted(self._heap, key=lambda entry: entry[1])]

    def add(self, record: Record, weight: float) -> None:
        """Adds a record, and removes records until the rest fits; it may remove the new one."""
        number = next(self._count)
        uniform = 1.0 - self._dice.random()  # in (0, 1]
        priority = math.log(max(-math.log(uniform), 1e-300)) - math.log(weight) - self._decay * number
        heapq.heappush(self._heap, (-priority, number, record))
        self.nbytes += size_of(record)
        while self.nbytes > self._limit:
            self.nbytes -= size_of(heapq.heappop(self._heap)[2])

    def discard(self, records: Collection[Record]) -> None:
        """Removes records."""
        self._heap = [entry for entry in self._heap if entry[2] not in records]
        heapq.heapify(self._heap)
        self.nbytes = sum(size_of(record) for _, _, record in self._heap)

    def clear(self) -> None:
        """Removes all records."""
        self._heap, self.nbytes = [], 0

    def sample(self, count: int) -> list[Record]:
        """Returns `count` different records, or all of them if there are fewer."""
        return [entry[2] for entry in self._dice.sample(self._heap, min(count, len(self._heap)))]


class ReplayBuffer:
    """The records of recent traffic: most of them to train on, a tenth of the prompts to measure on.

    A prompt is on one side for ever, by a hash of its tokens, so a repeated question is never on both.

    Args:
        limit: bytes of all records together, the anchors not included.
        anchors: records of the drafter's own training, which a sample contains too, so that it forgets nothing.
        seed: of the choices.
    """

    def __init__(self, limit: int, anchors: Sequence[Record] = (), *, seed: int = 0) -> None:
        dice = self._dice = random.Random(seed)
        held = int(HELD_OUT_MEMORY * limit)
        self._anchors = list(anchors)
        self._training, self._held_out = Reservoir(limit - held, dice), Reservoir(held, dice)
        self.added = 0  # records so far

    @property
    def nbytes(self) -> int:
        return self._training.nbytes + self._held_out.nbytes

    def __len__(self) -> int:
        return len(self._training) + len(self._held_out)

    def add(self, record: Record, acceptance_length: float) -> None:
        """Adds a record; one that cannot be trained on is skipped.

        Args:
            acceptance_length: tokens per step when it was decoded; a record with fewer has a larger weight.
        """
        if not record.usable:
            return
        self.added += 1
        side = self._held_out if is_held_out(record) else self._training
        side.add(record, 1.0 / max(acceptance_length, 1.0))

    def discard(self, records: Sequence[Record]) -> None:
        """Removes records that cannot be trained on."""
        self._training.discard(frozenset(records))

    def clear(self) -> None:
        """Removes all records, also the anchors."""
        self._anchors = []
        self._training.clear()
        self._held_out.clear()

    def sample(self, count: int) -> list[Record]:
        """Returns up to `count` records to train on, a share of `ANCHORS` from the anchors."""
        own = self._training.sample(count - min(round(ANCHORS * count), len(self._anchors)))
        return own + self._dice.sample(self._anchors, min(count - len(own), round(ANCHORS * count), len(self._anchors)))

    @property
    def held_out(self) -> list[Record]:
        """The records to measure on, oldest first."""
        return self._held_out.records


def size_of(record: Record) -> int:
    """Returns the bytes of a record's taps and tokens."""
    return record.taps.nbytes + 8 * len(record.tokens)


def is_held_out(record: Record) -> bool:
    """Returns whether a record is only measured on; it depends on the tokens of its first prompt alone."""
    prompt = min((start for start, _ in record.supervised), default=len(record.tokens))
    digest = zlib.crc32(array("q", record.tokens[:prompt]).tobytes())
    return digest < HELD_OUT * 2**32
