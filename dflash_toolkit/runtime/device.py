"""The interface between the scheduler and the device. `runner.py` implements it; tests use a table of tokens."""

import math
from collections.abc import Sequence
from typing import Any, Protocol

from .prefill_job import PrefillJob, PrefillLimits
from .request import Committed, Request, StepShape


class PrefillPass(Protocol):
    """Chunks of prompts on their way through the layers, in slices. Steps may run between two slices.

    Attributes:
        done: whether all of it is launched; then the newest pass is this one, see `Device.add`.
        scores: the pending scores that a single job's `scores` asks for.
    """

    done: bool
    scores: Any | None

    def run(self, seconds: float = math.inf, least: int = 1) -> float:
        """Launches slices for up to `seconds`, but at least `least`. Returns the estimated seconds that they take.

        The chunks' keys and values are written to their pages, and their recurrent states are updated.
        """

    def drop(self, index: int) -> None:
        """Writes the rest of one of several chunks to the null block, as its request has lost its pages."""


class Device(Protocol):
    """Computes prefills and steps. It knows rows, pages and slots of states, not queues."""

    depth: int  # steps that may be in flight when a result is read
    prefill_limits: PrefillLimits  # limits of a batch
    pages_per_request: int  # maximum, overshoot included

    @property
    def step_s(self) -> float:
        """Seconds of a recent decoding step; 0 if unknown."""

    def start_prefill(self, jobs: Sequence[PrefillJob]) -> PrefillPass:
        """Returns a pass of one chunk, or of chunks of several requests within `prefill_limits`.

        Only `PrefillPass.run` launches it. `add` finds a chunk's last state by its index here.
        """

    def copy_states(self, source: int, target: int, rows: int = 0) -> None:
        """Copies the recurrent states of slot `source` to slot `target`.

        Args:
            rows: the copy also has this many rows of the newest block of the source, which may be rejected ones. The
                source has those before this block.
        """

    def add(self, row: int, request: Request, place: int = 0) -> Any | None:
        """Puts a prefilled request into the batch; returns the pending first token if it has none yet.

        Args:
            place: index of its chunk in the newest pass.
        """

    def move(self, source: int, target: int) -> None:
        """Moves row `source` to row `target`, which is free."""

    def remove(self, row: int) -> None:
        """Frees a row."""

    def set_pages(self, row: int, pages: Sequence[int]) -> None:
        """Sets the pages of a request in the batch."""

    def clean(self, pages: Sequence[int]) -> None:
        """Removes NaN from free pages."""

    def check(self) -> None:
        """Uses the device once. Raises the error that a failed device raises at every use."""

    def decode(self, requests: Sequence[Request], shape: StepShape) -> Any:
        """Launches one step of rows 0..len(requests) - 1; returns its pending result."""

    def read(self, pending: Any) -> list[Committed]:
        """Waits for a result and returns what each of its rows committed."""
