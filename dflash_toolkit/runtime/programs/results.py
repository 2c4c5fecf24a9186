"""Results of prefills and steps on their way to the host."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ...calibration import Calibration
from ...generation import TokenLogprobs
from ..graphs import PinnedBuffers, download
from ..request import Request, StepShape
from ..sampler import unpack_logprobs
from ..timing import Shape

WantedLogprobs = dict[int, tuple[int, int]]  # row -> its index in the log-probabilities, its SamplingParams.logprobs


@dataclass(frozen=True, slots=True)
class TreesInFlight:
    """Data that is needed to read the result of a step over draft trees."""

    requests: Sequence[Request]  # requests of the first rows
    batch: int
    shape: StepShape
    calibration: Calibration
    discounts: Sequence[float]


class TimedStep(NamedTuple):
    """A step that is timed: its time is reported when its result is read."""

    began: torch.cuda.Event
    key: Shape
    tokens: int  # in the cache of the batch


@dataclass(frozen=True, slots=True)
class PendingResult:
    """The result of some rows, on its way to the host."""

    tokens: Tensor  # int64 [rows, 1 + S] on the host: number of committed tokens, then the tokens
    logprobs: Tensor | None  # fp64 [F, S, ...], see `Sampler.choose`
    wanted: WantedLogprobs
    done: torch.cuda.Event | None
    buffer: Tensor | None = None  # the pinned memory of `tokens`, given back after reading
    scored: list[Tensor] | None = None  # with a first token: the prompt's scores, if the request asks for them
    trees: TreesInFlight | None = None  # given for a step over trees; its `tokens` are flat, see `TreeProgram`
    timed: TimedStep | None = None

    def wait(self) -> None:
        if self.done is not None:
            self.done.synchronize()

    def logprobs_of(self, row: int, count: int) -> list[TokenLogprobs] | None:
        """Returns those of the first `count` tokens of a row, or None if the request did not ask for them."""
        if self.logprobs is None or row not in self.wanted:
            return None
        index, top = self.wanted[row]
        return unpack_logprobs(self.logprobs[index, :count], top)


class Results:
    """Sends results to the host.

    Args:
        size: int64 values of the largest result.
    """

    def __init__(self, device: torch.device, size: int) -> None:
        self._on_gpu, self.buffers = device.type == "cuda", PinnedBuffers(size)

    def send(
        self,
        tokens: Tensor,
        logprobs: Tensor | None,
        wanted: WantedLogprobs,
        *,
        scored: list[Tensor] | None = None,
        trees: TreesInFlight | None = None,
    ) -> PendingResult:
        """Starts the copies to the host and returns the pending result."""
        if not self._on_gpu:
            return PendingResult(tokens, logprobs, wanted, None, scored=scored, trees=trees)
        buffer = self.buffers.take()
        # contiguous, as the host would otherwise wait for the copy
        host = buffer[: tokens.numel()].view(tokens.shape).copy_(tokens, non_blocking=True)
        logprobs = None if logprobs is None else download(logprobs)
        done = torch.cuda.Event(enable_timing=True)
        done.record()
        return PendingResult(host, logprobs, wanted, done, buffer, scored, trees)

    def give_back(self, pending: PendingResult) -> None:
        """Frees the pinned memory of a result that was read."""
        if pending.buffer is not None:
            self.buffers.give_back(pending.buffer)
