"""The seam between the endpoint and whatever decodes: one async method that yields tokens as they are committed.

This engine runs one request at a time, in order of arrival, on one worker thread over `decode.stream`. A batched
runtime replaces it behind the same method.
"""

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from dflash_toolkit import Drafter, SamplingParams, Target, stream
from dflash_toolkit.decode import FinishReason


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one step (or the prefill) committed, and the request's totals so far."""

    tokens: list[int]
    finish_reason: FinishReason | None
    verify_steps: int = 0
    drafted: int = 0
    accepted: int = 0
    committed: int = 0  # tokens committed by verify steps, without the prefill's


class Engine:
    """A target, its drafter and the thread they run on."""

    def __init__(self, target: Target, drafter: Drafter | None) -> None:
        self.target = target
        self.drafter = drafter
        # one thread: requests wait in its queue first come first served, the event loop stays free
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="decode")

    async def generate(self, prompt_ids: list[int], params: SamplingParams) -> AsyncGenerator[Chunk, None]:
        """Decode one request; closing the iterator stops it at the next step.

        Raises:
            UserError: whatever `decode.stream` refuses.
        """
        loop = asyncio.get_running_loop()
        chunks: asyncio.Queue[Chunk | BaseException] = asyncio.Queue()
        cancelled = threading.Event()

        def publish(item: Chunk | BaseException) -> None:
            loop.call_soon_threadsafe(chunks.put_nowait, item)

        job = self._worker.submit(self._decode, prompt_ids, params, cancelled, publish)
        try:
            while True:
                item = await chunks.get()
                if isinstance(item, BaseException):
                    raise item
                yield item
                if item.finish_reason is not None:
                    return
        finally:
            cancelled.set()
            job.cancel()  # if it is still waiting in the queue

    def _decode(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        cancelled: threading.Event,
        publish: Callable[[Chunk | BaseException], None],
    ) -> None:
        sent = drafted = accepted = committed = 0
        try:
            for generation in stream(self.target, self.drafter, prompt_ids, params):
                if cancelled.is_set():
                    return
                if generation.steps:
                    step = generation.steps[-1]
                    drafted += step.drafted
                    accepted += step.accepted
                    committed += len(step.tokens)
                tokens = generation.tokens[sent:]
                sent += len(tokens)
                steps = len(generation.steps)
                publish(Chunk(tokens, generation.finish_reason, steps, drafted, accepted, committed))
        except BaseException as error:
            publish(error)  # raised where the request is awaited

    def close(self) -> None:
        """Let the worker go; a request in progress ends at its next step because its iterator is closed."""
        self._worker.shutdown(wait=False, cancel_futures=True)
