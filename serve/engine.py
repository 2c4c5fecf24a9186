"""The seam between HTTP and decoding: one request at a time, in the order of arrival, on one worker thread.

This is the part that a batched runtime replaces. The server uses the names of `Engine` below and nothing else of
the model, so a replacement offers the same four and may run as many requests together as it likes.
"""

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from dflash_toolkit.decode import FinishReason, SamplingParams, Step, stream
from dflash_toolkit.drafter import Drafter
from dflash_toolkit.target import Target


class EngineClosedError(Exception):
    """The server is shutting down; the answer will not be finished."""


@dataclass(frozen=True, slots=True)
class Progress:
    """What one call of the model added to an answer."""

    tokens: tuple[int, ...]  # the stop token included
    step: Step | None  # None: the prefill, which verifies nothing
    finish_reason: FinishReason | None


class Engine:
    """Decodes prompts with a target and, unless it is None, a drafter on the same device.

    Attributes:
        tokenizer: the target's.
        context_limit: prompt and answer together, in tokens.
        vocabulary: prompt ids must be below this.
    """

    def __init__(self, target: Target, drafter: Drafter | None) -> None:
        self.tokenizer: Any = target.tokenizer
        self.context_limit = target.context_limit
        self.vocabulary = target.embedding.num_embeddings
        self._target, self._drafter = target, drafter
        self._closed = threading.Event()
        # one thread, so its queue is the order of requests and the model never runs twice at once
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="decode")

    async def decode(self, prompt_ids: list[int], params: SamplingParams) -> AsyncGenerator[Progress]:
        """Decode one prompt, yielding after every call of the model until one carries a `finish_reason`.

        Decoding does not wait for the consumer, so a client that reads slowly holds up nobody. A consumer that
        leaves (`aclose`, or its task is cancelled) stops it at the next step, or before it began.

        Raises:
            EngineClosedError: `close` was called before the answer was finished.
            Exception: whatever the model raised.
        """
        loop = asyncio.get_running_loop()
        news: asyncio.Queue[Progress | Exception] = asyncio.Queue()
        abandoned = threading.Event()

        def tell(item: Progress | Exception) -> None:
            loop.call_soon_threadsafe(news.put_nowait, item)

        job = self._worker.submit(self._run, prompt_ids, params, tell, abandoned)
        try:
            while True:
                item = await news.get()
                if isinstance(item, Exception):
                    raise item
                yield item
                if item.finish_reason is not None:
                    return
        finally:
            abandoned.set()
            job.cancel()  # does nothing to a job that has begun

    def close(self) -> None:
        """End every answer, running or queued, with EngineClosedError at the next step."""
        self._closed.set()

    def _run(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        tell: Callable[[Progress | Exception], None],
        abandoned: threading.Event,
    ) -> None:
        """In the worker thread, from the first step to the last: `stream` is bound to the thread that runs it."""
        told = 0
        try:
            if self._closed.is_set():
                raise EngineClosedError
            for generation in stream(self._target, self._drafter, prompt_ids, params):
                if abandoned.is_set():
                    return
                if self._closed.is_set():
                    raise EngineClosedError
                step = generation.steps[-1] if generation.steps else None
                tell(Progress(tuple(generation.tokens[told:]), step, generation.finish_reason))
                told = len(generation.tokens)
        except Exception as error:  # it belongs to whoever waits for this answer
            tell(error)
