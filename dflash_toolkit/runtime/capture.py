"""Collects finished requests with the taps of their tokens, for a trainer. Off unless `Engine.start_capture` is called.

The device copies taps to pinned host memory in the order of its work, and nothing waits for the copy.
"""

import logging
from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from .request import Request
from .tap_cache import TapCache

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Served:
    """A finished request."""

    tokens: list[int]  # n, of prompt and answer
    prompt_tokens: int
    taps: Tensor  # [n - 1, K*D] on the host
    committed: int  # tokens that verification steps committed
    steps: int  # verification steps
    key: str  # API key
    drafter_version: int  # when it finished


class Capture:
    """Finished requests that wait for a trainer.

    Args:
        limit: bytes of waiting taps; requests that find no room are skipped, and serving continues.

    Attributes:
        skipped: number of skipped requests.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._waiting: deque[tuple[Served, torch.cuda.Event | None]] = deque()
        self.nbytes = self.skipped = 0

    def add(self, request: Request, cache: TapCache, version: int) -> None:
        """Starts to copy the taps of a finished request, which still holds its pages. Never raises."""
        try:
            size = cache.nbytes(request.length)
            if not request.store or not request.generation.steps:
                return
            if self.nbytes + size > self._limit:
                self.skipped += 1
                return
            taps, done = cache.read(request.pages, request.length), None
            if cache.on_gpu:
                done = torch.cuda.Event()
                done.record()
        except Exception:
            self.skipped += 1
            log.exception("the taps of a request were not captured")
            return
        steps = request.generation.steps
        committed = sum(len(step.tokens) for step in steps)
        tokens, prompt = request.prompt_ids + request.tokens, len(request.prompt_ids)
        served = Served(tokens, prompt, taps, committed, len(steps), request.key, version)
        self._waiting.append((served, done))
        self.nbytes += size

    def clear(self) -> None:
        """Forgets all requests that wait."""
        self._waiting.clear()
        self.nbytes = 0

    def take(self, most: int | None = None) -> list[Served]:
        """Returns at most `most` requests with taps that have arrived, oldest first, and forgets them."""
        found: list[Served] = []
        while self._waiting and len(found) != most and ((done := self._waiting[0][1]) is None or done.query()):
            served, _ = self._waiting.popleft()
            self.nbytes -= served.taps.nbytes
            found.append(served)
        return found
