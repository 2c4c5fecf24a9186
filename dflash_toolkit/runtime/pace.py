"""Measures how fast a GPU computes prompts and decoding steps, so that prompts can take turns with steps."""

import contextlib
import statistics
from collections import deque
from collections.abc import Iterator

import torch

from ..kernels.features import features_of

LEAST_ROWS = 256  # least rows of a pass that is measured; fewer rows take as long as reading the weights
MOST_AHEAD = 2  # slices of prompts in flight, so that a new request does not wait for more of them
NEWEST = 5  # measurements that count
FLOPS = 2e12  # per second and multiprocessor, until a pass was measured
Measured = tuple[torch.cuda.Event, torch.cuda.Event, float]  # begin, end, floating-point operations


class Pace:
    """Times slices of prompts and steps with events, without waiting for the device. On a CPU it measures nothing.

    Attributes:
        step_s: seconds of a decoding step, the median of the newest; 0 before any was measured.
        rate: seconds of a floating-point operation in a prompt, the most of the newest slices: attention takes longer
            for an operation than products, and a slice must not take longer than expected. 0 on a CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self.rate = 1 / (FLOPS * features_of(device).multiprocessors) if self._on_gpu else 0.0
        self._rates, self._steps = deque[float](maxlen=NEWEST), deque[float](maxlen=NEWEST)
        self._slices = deque[Measured]()
        self._ended: torch.cuda.Event | None = None  # end of the newest step, while nothing else was launched or read
        self.step_s = 0.0

    def seconds(self, operations: float) -> float:
        """Returns the estimated time of this many floating-point operations in a prompt."""
        return operations * self.rate

    @contextlib.contextmanager
    def slice(self, operations: float, rows: int) -> Iterator[None]:
        """Times a slice. Waits first if more than MOST_AHEAD slices are in flight."""
        if not self._on_gpu:
            yield
            return
        self._ended = None
        while len(self._slices) >= MOST_AHEAD:
            self._slices[0][1].synchronize()
            self._read()
        self._read()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        yield
        end.record()
        self._slices.append((begin, end, operations if rows >= LEAST_ROWS else 0.0))

    def _read(self) -> None:
        """Reads the slices that are complete. Slices of few rows do not count."""
        while self._slices and self._slices[0][1].query():
            begin, end, operations = self._slices.popleft()
            if operations:
                self._rates.append(begin.elapsed_time(end) / 1000 / operations)
                self.rate = max(self._rates)

    # ---- steps -----------------------------------------------------------------------------------------

    def begin_step(self) -> torch.cuda.Event:
        """Returns the begin of a step that is about to be launched.

        If the previous step is in flight, it is that one's end: then it counts if the device waits for the host.
        """
        began, self._ended = self._ended, None
        if began is None:
            began = torch.cuda.Event(enable_timing=True)
            began.record()
        return began

    def end_step(self, done: torch.cuda.Event | None) -> None:
        """Notes the end of the launched step."""
        self._ended = done

    def read_step(self, done: torch.cuda.Event) -> None:
        """Notes that the result of a step was read: from now on the device may wait for requests."""
        if done is self._ended:
            self._ended = None

    def seconds_of_step(self, began: torch.cuda.Event, done: torch.cuda.Event) -> float:
        """Returns the seconds of a step that has ended."""
        seconds = began.elapsed_time(done) / 1000
        self._steps.append(seconds)
        self.step_s = statistics.median(self._steps)
        return seconds
