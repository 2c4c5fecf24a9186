"""CUDA graphs of a runner's passes, the batch sizes they are captured for, and the host memory of their results."""

import contextlib
import gc
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, *range(64, 256, 32), *range(256, 1025, 64))
CAPTURED_AT_START = 64  # requests; graphs of larger batches are captured later
TREES_AT_START = 32  # requests; the same for steps over trees
CAPTURE_SHARE = 0.02  # most of the time that requests wait for captures, once those of the start are complete
ROUNDING = 32 << 20  # bytes that may be lost when the scratch is cut into pieces
Captured = tuple[torch.cuda.CUDAGraph, Tensor | None]  # a graph and the tensor that its pass returns
Key = TypeVar("Key", bound=Hashable)


def buckets_up_to(max_num_seqs: int) -> list[int]:
    """Returns the batch sizes for which steps are captured."""
    return [*(b for b in BUCKETS if b < max_num_seqs), max_num_seqs]


def bucket_of(max_num_seqs: int, rows: int) -> int:
    """Returns the number of rows that are computed for a batch of `rows`."""
    return next(b for b in buckets_up_to(max_num_seqs) if b >= rows)


class Captures:
    """Captures passes into graphs that share their memory: they never run at the same time.

    All captures use one stream, as cuBLAS keeps 32 MiB for every stream.

    Args:
        scratch: bytes that the largest pass takes; the graphs' pool has them before the first pass is captured.
    """

    def __init__(self, device: torch.device, scratch: int = 0) -> None:
        self._device, self._scratch = device, scratch
        self._stream: torch.cuda.Stream | None = None
        self._first: torch.cuda.CUDAGraph | None = None  # holds the pool

    def __call__(self, run: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
        """Runs a pass once, captures it, and returns the graph and the pass's result.

        If it raises, the current stream is the same as before and waits for everything that was launched.
        """
        current = torch.cuda.current_stream(self._device)
        stream = self._stream = self._stream or torch.cuda.Stream(self._device)
        stream.wait_stream(current)
        try:
            with torch.cuda.stream(stream):  # compiles kernels and creates handles, which a capture must not
                run()
        finally:
            current.wait_stream(stream)
        if self._first is None:
            self._first = self._capture(self._reserve_scratch, stream, None)[0]
        return self._capture(run, stream, self._first.pool())

    def _capture(
        self, run: Callable[[], Any], stream: torch.cuda.Stream, pool: Any
    ) -> tuple[torch.cuda.CUDAGraph, Any]:
        graph = torch.cuda.CUDAGraph()
        # thread_local: other threads may use the device during the capture; their work is not part of the graph
        capture = torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local")
        # a capture that fails does not restore the current stream
        with no_collection(), torch.cuda.stream(torch.cuda.current_stream(self._device)), capture:
            result = run()
        return graph, result

    def _reserve_scratch(self) -> None:
        """Allocates the scratch in the pool and frees it at once: later captures use this memory."""
        torch.empty(self._scratch + ROUNDING, dtype=torch.uint8, device=self._device)[:1].zero_()


class StepGraphs:
    """The captured graphs of decoding steps and of their parts.

    Args:
        advanced: tensors that a step changes; a capture, which runs the step, restores them.
        slots: int32 [2, R], slots of recurrent states. They are zero during a capture, so that no request's states
            change.

    Attributes:
        captured: the graphs, each by the part of a step that it runs.
        started: whether the captures of the start have ended. From now on, parts without a graph are only captured if
            captures take at most CAPTURE_SHARE of the time; otherwise they run without one.
        missed: number of runs without a captured graph.
    """

    def __init__(self, capture: Captures, device: torch.device, advanced: Sequence[Tensor], slots: Tensor) -> None:
        self.capture: Callable[[Callable[[], Any]], tuple[torch.cuda.CUDAGraph, Any]] = capture
        self.captured: dict[Hashable, Captured] = {}
        self._others: dict[Hashable, Captured] = {}
        self.started, self.missed = False, 0
        self._next_capture = 0.0  # time from which a part may be captured that a step needs
        self.advanced, self._slots, self._device = list(advanced), slots, device

    def run(self, part: Key, eager: Callable[[Key], Tensor | None]) -> Tensor | None:
        """Runs a part of a step: replays its graph, or calls `eager` on a CPU or if it may not be captured now."""
        if self._device.type != "cuda":
            return eager(part)
        if part not in self.captured:
            self.missed += 1
            began = time.perf_counter()
            if self.started and began < self._next_capture:
                return eager(part)
            self.graph(part, eager)
            ended = time.perf_counter()
            self._next_capture = ended + (ended - began) / CAPTURE_SHARE
        graph, result = self.captured[part]
        graph.replay()
        return result

    @torch.inference_mode()
    def graph(self, part: Key, eager: Callable[[Key], Tensor | None]) -> Captured:
        """Returns the graph of a part and the tensor that it writes; captures it first if necessary."""
        if part not in self.captured:
            saved = [tensor.clone() for tensor in self.advanced]
            self._slots.zero_()
            try:
                self.captured[part] = self.capture(lambda: eager(part))
            finally:  # the step has also run if its capture failed
                for tensor, value in zip(self.advanced, saved, strict=True):
                    tensor.copy_(value)
        return self.captured[part]

    def exchange(self) -> None:
        """Hides the graphs, and shows those that were hidden before."""
        self.captured, self._others = self._others, self.captured

    @contextlib.contextmanager
    def set_aside(self) -> Iterator[None]:
        """Hides the graphs within the block, and drops those that are captured in it."""
        captured, self.captured = self.captured, {}
        try:
            yield
        finally:
            self.captured = captured


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Stops the garbage collector within the block.

    It might free another engine. Freeing its graphs would invalidate a capture, and freeing its memory would falsify
    the measured memory of a pass.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def to_device(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Copies values of the host to the device without waiting for it."""
    return upload(torch.tensor(values, dtype=dtype), device)


def upload(host: Tensor, device: torch.device) -> Tensor:
    """Copies a tensor of the host to the device without waiting for it."""
    # the allocator of pinned memory keeps the buffer until the copy has run
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


def download(values: Tensor) -> Tensor:
    """Starts a copy of a GPU tensor and returns the pinned memory that it goes to."""
    return torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)


class PinnedBuffers:
    """Host memory that results are copied to: buffers of one size, used again after their results were read.

    There is one buffer for every result in flight, so none is overwritten before it is read.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._free: list[Tensor] = []

    def take(self) -> Tensor:
        """Returns an int64 buffer of `size` values that no copy is writing to."""
        return self._free.pop() if self._free else torch.empty(self._size, dtype=torch.int64, pin_memory=True)

    def give_back(self, buffer: Tensor) -> None:
        self._free.append(buffer)
