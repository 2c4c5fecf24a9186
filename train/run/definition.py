"""What a training run is given, and what it leaves behind."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash_toolkit.models.dflash.network import Drafter
from dflash_toolkit.models.target import Target

from ..config import TrainConfig
from ..responses.rows import Row
from .held_out import Evaluation, HeldOutPrompt

WORK = "work"  # inside the output directory: responses, metrics, resume point


@dataclass(frozen=True, slots=True)
class Export:
    """A drafter that a run leaves behind."""

    role: str  # exported; best or last, which stand beside it
    step: int
    evaluation: Evaluation | None  # None without held-out prompts
    without_selector: Evaluation | None = None  # of a drafter that is exported with one


@dataclass(frozen=True, slots=True)
class Run:
    """A drafter to train, on what, and where to leave it; the same on every process."""

    config: TrainConfig
    target: Target
    drafter: Drafter  # fp32, on the target's device
    rows: Sequence[Row]  # with at least one anchor each
    held_out: Sequence[HeldOutPrompt]  # decoded to measure acceptance: some while training goes on, all in the end
    work: Path  # directory of the resume point and the metrics
    fingerprint: dict[str, Any]  # what must not change for a resumed run to be the same run
    export: Callable[[Drafter, Export], None]  # called by the first process
    record: dict[str, Any] | None = None  # what W&B shows as the configuration (default: the fingerprint)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended. What is exported is known to the first process."""

    steps: int
    elapsed_s: float  # of training alone
    exported: Export | None = None
    beside: Export | None = None  # the one of best and last that is not exported, where they differ
    warnings: list[str] = field(default_factory=list)

    @property
    def earlier(self) -> bool:
        """Whether what is exported is not the end."""
        return self.beside is not None and self.beside.role == "last"
