"""CUDA graphs of a runner's passes, which share their memory: they never run at the same time."""

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)
ROUNDING = 32 << 20  # bytes that cutting the scratch into pieces may lose


def buckets_up_to(max_num_seqs: int) -> list[int]:
    """Batch sizes that steps are captured for."""
    return [*(b for b in BUCKETS if b < max_num_seqs), max_num_seqs]


def bucket_of(max_num_seqs: int, rows: int) -> int:
    """Rows that are computed for a batch of `rows`."""
    return next(b for b in buckets_up_to(max_num_seqs) if b >= rows)


class Captures:
    """Captures passes on a stream of its own, always the same: cuBLAS keeps 32 MiB for every stream that it has met.

    Args:
        scratch: bytes that the largest pass takes; the graphs' pool has them before the first pass is captured.
    """

    def __init__(self, device: torch.device, scratch: int = 0) -> None:
        self._device, self._scratch = device, scratch
        self._stream: torch.cuda.Stream | None = None
        self._first: torch.cuda.CUDAGraph | None = None  # holds the pool

    def __call__(self, run: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
        """A graph of what `run` launches, and what it returns; runs it once.

        Whatever is raised on the way, the current stream is what it was and waits for all that was launched.
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
            self._first = self._capture(self._take_scratch, stream, None)[0]
        return self._capture(run, stream, self._first.pool())

    def _capture(
        self, run: Callable[[], Any], stream: torch.cuda.Stream, pool: Any
    ) -> tuple[torch.cuda.CUDAGraph, Any]:
        graph = torch.cuda.CUDAGraph()
        # what other threads do with the device meanwhile is no part of the graph, and no error
        capture = torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local")
        # a capture that fails does not put the current stream back
        with no_collection(), torch.cuda.stream(torch.cuda.current_stream(self._device)), capture:
            result = run()
        return graph, result

    def _take_scratch(self) -> None:
        """Given back at once, to the pool: later captures cut what they need from it."""
        torch.empty(self._scratch + ROUNDING, dtype=torch.uint8, device=self._device)[:1].zero_()


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Rubbish stays for a while.

    It may be another engine: freeing a graph would void a capture, and freeing memory hide what a pass takes.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def to_device(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Values of the host on the device, which is not waited for."""
    return upload(torch.tensor(values, dtype=dtype), device)


def upload(host: Tensor, device: torch.device) -> Tensor:
    """A copy of the host's tensor on the device, which is not waited for."""
    # the allocator of pinned memory keeps it until the copy has run
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


class PinnedBuffers:
    """Host memory that results are copied to: buffers of one size, used again once their results were read.

    There are as many as results were ever on their way at a time, so none is overwritten before it is read.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._free: list[Tensor] = []

    def take(self) -> Tensor:
        """An int64 buffer of `size` that nothing is on its way to."""
        return self._free.pop() if self._free else torch.empty(self._size, dtype=torch.int64, pin_memory=True)

    def give_back(self, buffer: Tensor) -> None:
        self._free.append(buffer)
