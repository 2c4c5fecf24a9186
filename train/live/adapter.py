"""Keeps the drafter of a running engine fresh: trains on what it serves, and swaps in versions that are better.

The caller steps the engine and calls `work` in between, in one thread. Answers do not change, only their speed.
"""

import bisect
import copy
import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from dflash_toolkit.acceptance import prompt_length_group
from dflash_toolkit.config import UserError
from dflash_toolkit.models.dflash.network import Drafter
from dflash_toolkit.runtime.capture import Served

from ..objective.target_head import TargetHead
from ..online import OnlineTrainer, Record
from ..run.held_out import Evaluation
from ..run.resume_point import host_copy
from .promotion import LiveAcceptance, Promotion, Rollback
from .replay import ReplayBuffer

LONGEST = 8
MOST = 64  # records of a step
LEAST_HELD_OUT = 8  # records for a look
LOOK, LOOK_ON_CPU = 64, 16  # newest held-out records that versions are compared on
PAYS, ALWAYS = 1.3, 3.0  # tokens per step from which a first version may be, and is, faster than plain decoding
log = logging.getLogger(__name__)


class Source(Protocol):
    """Requests that wait for a trainer, see `Capture`."""

    def take(self) -> list[Served]: ...


class Serving(Protocol):
    """An `Engine`, or the link of `process.py` to one."""

    drafter_version: int

    @property
    def break_even(self) -> float: ...

    def start_capture(self, limit: int) -> Source: ...

    def load_drafter(self, drafter: Drafter) -> None: ...

    def stop_drafting(self) -> None: ...


@dataclass(slots=True)
class Version:
    """A drafter that is or was served."""

    number: int  # the engine's `drafter_version`
    drafter: Drafter  # fp32
    state: dict[str, Any]  # state of the trainer when it was promoted
    learnt_from: int  # requests in the buffer until then
    held_out: float | None  # tokens per step on the held-out records; None for the first version
    plain: bool = False  # the engine decoded without it, as it was untrained
    live: LiveAcceptance = field(default_factory=LiveAcceptance)
    walked: dict[Record, tuple[int, int]] = field(default_factory=dict)  # tokens and steps of held-out records


class Adapter:
    """Trains the drafter of an engine on its traffic.

    Args:
        engine: with a drafter and `EngineOptions(keep_taps=True)`.
        trainer: of that drafter.
        memory: bytes of captured records, in host memory.
        batch: least records of a step. More are added while they fit into a pack.
        every: steps until the first look at the held-out records. The gap grows by as many with each promotion and
            doubles after a look without one, up to LONGEST * every.
        anchors: records of the drafter's own training, see `ReplayBuffer`.
        fresh: the drafter is untrained, so the engine decodes without it until a version is faster.

    Attributes:
        versions: all served versions that are kept: the current one, and the one before it.
        promotions, rollbacks: how often they happened.
    """

    def __init__(
        self, engine: Serving, trainer: OnlineTrainer, *, memory: int = 1 << 30, batch: int = 8, every: int = 20,
        anchors: Sequence[Record] = (), fresh: bool = False, seed: int = 0,
    ) -> None:  # fmt: skip
        self._engine, self._trainer, self._batch, self._every = engine, trainer, batch, every
        self._gap, self._looked = every, 0  # steps until the next look, and at the last one
        self._capture = engine.start_capture(memory // 4)
        self.buffer = ReplayBuffer(memory - memory // 4, anchors, seed=seed)
        self._look = LOOK_ON_CPU if trainer.drafter.device.type == "cpu" else LOOK
        self._promotion, self._rollback = Promotion(), Rollback()
        first = Version(engine.drafter_version, *self._saved(), 0, None, plain=fresh)
        if fresh:
            engine.stop_drafting()
        self.versions = [first]
        self.promotions = self.rollbacks = 0

    @property
    def served(self) -> Version:
        return self.versions[-1]

    def work(self) -> bool:
        """Does a piece of work: takes what was served, may roll back, trains one step, may promote.

        A step is undone if its gradient is not a number: training continues from the served version, without the
        records of that step.

        Returns:
            False if there are too few records for a step.
        """
        if (taken := self._capture.take()) and self._take(taken):
            self._may_roll_back()
        records = self._sample()
        if len(records) < self._batch:
            return False
        try:
            found = self._trainer.step(records)
        except (UserError, ValueError) as error:
            log.error("the drafter's training continues from the served version: %s", error)
            self.buffer.discard(records)
            self._trainer.load_state_dict(copy.deepcopy(self.served.state))
            self._looked = self._trainer.steps
            return True
        hopeless = self.served.plain and found["acceptance_length"] < PAYS
        if self._trainer.steps >= self._looked + self._gap and not hopeless:
            self._may_promote()
        return True

    def _sample(self) -> list[Record]:
        """Returns records for a step: `batch`, or as many as fill a pack."""
        found = self.buffer.sample(max(self._batch, MOST))
        tokens, room = list(itertools.accumulate(len(record.tokens) for record in found)), self._trainer.pack_tokens
        return found[: max(self._batch, bisect.bisect_right(tokens, room))]

    def _take(self, taken: Sequence[Served]) -> bool:
        """Adds served requests to the buffer; returns whether any was decoded by the newest version."""
        for served in taken:
            end, kind = len(served.tokens), f"{served.key}/{prompt_length_group(served.prompt_tokens)}"
            try:
                record = Record(served.tokens, served.taps, [(served.prompt_tokens, end)], kind)
                self.buffer.add(record.cut(self._trainer.longest), served.committed / served.steps)
            except (ValueError, ArithmeticError) as error:
                log.error("a request is not learned from: %s", error)
            for version in self.versions:
                if version.number == served.drafter_version:
                    version.live.add(kind, served.committed, served.steps)
        return any(served.drafter_version == self.served.number for served in taken)

    def _may_promote(self) -> None:
        held = self.buffer.held_out[-self._look :]
        if len(held) < LEAST_HELD_OUT:
            return
        candidate = self._trainer.held_out(held)
        plain = self.served.plain
        now = replace(candidate, steps=candidate.tokens) if plain else self._served_on(held)
        self._looked, self._gap = self._trainer.steps, min(2 * self._gap, LONGEST * self._every)
        pays = not plain or candidate.tau >= min(max(self._engine.break_even, PAYS), ALWAYS)
        if self._promotion.judge(candidate, now) and pays:
            self._gap = min((self.promotions + 2) * self._every, LONGEST * self._every)
            drafter, state = self._saved()
            self._engine.load_drafter(drafter)
            new = Version(self._engine.drafter_version, drafter, state, self.buffer.added, candidate.tau)
            self.versions = [self.served, new]
            new.walked = dict(zip(held, zip(candidate.tokens, candidate.steps, strict=True), strict=True))
            self._rollback = Rollback()
            self.promotions += 1

    def _served_on(self, held: Sequence[Record]) -> Evaluation:
        """Evaluates the served drafter; records of the look before are not computed again."""
        version = self.served
        new = [record for record in held if record not in version.walked]
        found = self._trainer.held_out(new, version.drafter)
        walked = version.walked | dict(zip(new, zip(found.tokens, found.steps, strict=True), strict=True))
        version.walked = {record: walked[record] for record in held}
        tokens, steps = zip(*version.walked.values(), strict=True)
        return Evaluation(found.step, tuple(record.source for record in held), tokens, steps)

    def _may_roll_back(self) -> None:
        if len(self.versions) == 2 and self._rollback.judge(self.versions[1].live, self.versions[0].live):
            self.roll_back()

    def roll_back(self) -> None:
        """Serves the version before the current one again, if it is kept, and trains on from there."""
        if len(self.versions) == 2:
            old, _ = self.versions
            self._engine.load_drafter(old.drafter)
            if old.plain:
                self._engine.stop_drafting()
            self._trainer.load_state_dict(copy.deepcopy(old.state))
            self._looked, self._gap = self._trainer.steps, self._every
            old.number, self.versions = self._engine.drafter_version, [old]
            self.rollbacks += 1

    def use_target(self, target_head: TargetHead) -> None:
        """Learns for a new target: records, live acceptance and the version before are about the old one."""
        self._trainer.use_target(target_head)
        self.buffer.clear()
        self.versions = [self.served]
        self.served.live, self.served.walked = LiveAcceptance(), {}
        self._promotion, self._rollback = Promotion(), Rollback()
        self._looked, self._gap = self._trainer.steps, self._every

    def _saved(self) -> tuple[Drafter, dict[str, Any]]:
        """Returns copies of the trainer's drafter, on its device, and of its state, in host memory."""
        drafter = copy.deepcopy(self._trainer.drafter).eval()
        return drafter, host_copy(self._trainer.state_dict(), drafter.device)
