"""The progress bar of an evaluation."""

from ...generation import Generation
from ...progress import Progress
from .measurement import Measurement


class Meter:
    """A progress bar with finished requests, decoded tokens per second and tau so far."""

    def __init__(self, total: int) -> None:
        self._bar = Progress("evaluating", total, unit="tok")
        self._committed = self._steps = 0
        self._seen = 0  # counted steps of the growing answer

    def kept(self, measurement: Measurement) -> None:
        """Counts a measurement of an earlier run."""
        self._committed += len(measurement.drafted.tokens) - 1
        self._steps += len(measurement.drafted.steps)
        self._bar.advance(1, units=0)

    def __enter__(self) -> "Meter":
        self._bar.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.__exit__()

    def answered(self, drafted: Generation | None) -> None:
        """Counts one finished answer of concurrent requests; None for a plain one."""
        if drafted:
            self._committed += len(drafted.tokens) - 1
            self._steps += len(drafted.steps)
        self._bar.advance(1, units=0, note=f"tau {self._committed / max(self._steps, 1):.2f}")

    def passed(self) -> None:
        """Counts a finished point of a sweep."""
        self._bar.advance(1, units=0)

    def step(self, growing: Generation) -> None:
        """Counts the last step of the drafted answer, or the first token of the prefill."""
        if not growing.steps:
            self._bar.advance(0, units=1)
            return
        new = len(growing.steps[-1].tokens)
        self._committed += new
        self._steps += 1
        self._seen += 1
        self._bar.advance(0, units=new, note=f"tau {self._committed / self._steps:.2f}")

    def finished(self, measurement: Measurement) -> None:
        unseen = measurement.drafted.steps[self._seen :]  # a server may report steps after the answer
        self._committed += sum(len(step.tokens) for step in unseen)
        self._steps += len(unseen)
        self._seen = 0
        note = f"tau {self._committed / self._steps:.2f}" if self._steps else None
        self._bar.advance(1, units=len(measurement.plain.tokens) if measurement.plain else 0, note=note)
