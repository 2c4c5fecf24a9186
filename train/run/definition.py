"""Inputs and outcome of a training run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash_toolkit.models.dflash.network import Drafter
from dflash_toolkit.models.target import Target

from ..config import TrainConfig
from ..responses.rows import Row
from .held_out import Evaluation, HeldOutPrompt

WORK = "work"  # directory in the output for responses, metrics and resume point


@dataclass(frozen=True, slots=True)
class Export:
    """A drafter that a run exports."""

    role: str  # exported; or best or last, in a subdirectory
    step: int
    evaluation: Evaluation | None  # None without held-out prompts
    without_selector: Evaluation | None = None  # if the drafter is exported with a selector


@dataclass(frozen=True, slots=True)
class Run:
    """A drafter to train, its data, and the directory for its files; the same on every process."""

    config: TrainConfig
    target: Target
    drafter: Drafter  # fp32, on the target's device; on the CPU with run.offload_target
    rows: Sequence[Row]  # with at least one anchor each
    held_out: Sequence[HeldOutPrompt]  # decoded to measure acceptance: some during training, the others at the end
    work: Path  # directory of the resume point and the metrics
    fingerprint: dict[str, Any]  # must stay the same when a run resumes
    export: Callable[[Drafter, Export], None]  # called by the first process
    record: dict[str, Any] | None = None  # configuration that W&B shows (default: the fingerprint)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended. Only the first process knows the exports."""

    steps: int
    elapsed_s: float  # training alone
    exported: Export | None = None
    other: Export | None = None  # the one of best and last that is not exported, if they differ
    warnings: list[str] = field(default_factory=list)
    followed: Evaluation | None = None  # the last measurement during training

    @property
    def earlier(self) -> bool:
        """Whether the exported drafter is not the last one."""
        return self.other is not None and self.other.role == "last"
