"""Measures how fast a GPU computes prompts and decoding steps, so that prompts can take turns with steps."""

import contextlib
import statistics
from collections import deque
from collections.abc import Iterator

import torch

from ..kernels.features import features_of

LEAST_ROWS = 256  # of a pass that is measured; fewer rows take as long as reading the weights
MOST_AHEAD = 2  # slices of prompts in flight, so that a new request does not wait for more of them
NEWEST = 5  # measurements, of which the median counts
FLOPS = 2e12  # per second and multiprocessor, until a pass was measured
Measured = tuple[torch.cuda.Event, torch.cuda.Event, float]  # begin, end, floating-point operations (0: a step)


class Pace:
    """Times slices of prompts and steps with events, without waiting for the device. On a CPU it measures nothing.

    Attributes:
        step_s: seconds of a decoding step; 0 before any was measured.
        rate: seconds of a floating-point operation in a prompt; 0 on a CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self.rate = 1 / (FLOPS * features_of(device).multiprocessors) if self._on_gpu else 0.0
        self._rates, self._steps = deque[float](maxlen=NEWEST), deque[float](maxlen=NEWEST)
        self._slices, self._others = deque[Measured](), deque[Measured]()
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
        while len(self._slices) >= MOST_AHEAD:
            self._slices[0][1].synchronize()
            self._read(self._slices)
        with self._between(self._slices, operations if rows >= LEAST_ROWS else -1.0):
            yield

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Times a decoding step."""
        if not self._on_gpu:
            yield
            return
        with self._between(self._others, 0.0):
            yield

    @contextlib.contextmanager
    def _between(self, measured: deque[Measured], operations: float) -> Iterator[None]:
        self._read(measured)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        yield
        end.record()
        measured.append((begin, end, operations))

    def _read(self, measured: deque[Measured]) -> None:
        """Reads the measurements that are complete. A negative number of operations is not read."""
        while measured and measured[0][1].query():
            begin, end, operations = measured.popleft()
            seconds = begin.elapsed_time(end) / 1000
            if operations > 0:
                self._rates.append(seconds / operations)
                self.rate = statistics.median(self._rates)
            elif operations == 0:
                self._steps.append(seconds)
                self.step_s = statistics.median(self._steps)
