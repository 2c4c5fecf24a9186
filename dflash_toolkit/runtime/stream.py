"""The engine behind an asynchronous interface: one thread steps it, any number of tasks wait for their answers."""

import asyncio
import logging
import queue
import threading
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass

from ..decode import FinishReason, SamplingParams, Step, TokenLogprobs
from .engine import Engine
from .request import Request

log = logging.getLogger(__name__)


class EngineClosedError(Exception):
    """The engine is shutting down; the answer will not be finished."""


@dataclass(frozen=True, slots=True)
class Progress:
    """What one step added to an answer."""

    tokens: tuple[int, ...]  # the stop token included
    step: Step | None  # None: the prefill, which verifies nothing
    finish_reason: FinishReason | None
    logprobs: tuple[TokenLogprobs, ...] = ()  # one a token, if the request asked for them


class AsyncEngine:
    """Decodes for many tasks at once; requests join and leave the running batch at every step."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()  # what the thread is to do first
        self._waiting: dict[Request, Callable[[Progress | Exception], None]] = {}  # only the thread touches it
        self._closed = self._prepared = False
        self._thread = threading.Thread(target=self._run, name="decode", daemon=True)
        self._thread.start()

    async def decode(self, prompt_ids: list[int], params: SamplingParams) -> AsyncGenerator[Progress]:
        """Decode one prompt, yielding after every step of it until one carries a `finish_reason`.

        Decoding does not wait for the consumer. A consumer that leaves (`aclose`, or its task is cancelled) takes
        its request out of the batch.

        Raises:
            EngineClosedError: `close` was called before the answer was finished.
            UserError: the request cannot be decoded, see `Engine.submit`.
            Exception: whatever broke the engine.
        """
        loop = asyncio.get_running_loop()
        news: asyncio.Queue[Progress | Exception] = asyncio.Queue()
        mine: list[Request] = []

        def tell(item: Progress | Exception) -> None:
            loop.call_soon_threadsafe(news.put_nowait, item)

        self._inbox.put(lambda: self._submit(prompt_ids, params, tell, mine))
        try:
            while True:
                item = await news.get()
                if isinstance(item, Exception):
                    raise item
                yield item
                if item.finish_reason is not None:
                    return
        finally:
            self._inbox.put(lambda: self._forget(mine))

    def close(self) -> None:
        """End every answer, running or queued, with EngineClosedError after the step under way."""
        self._inbox.put(self._close)

    # ---- in the thread -----------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            self._do_inbox(wait=self.engine.scheduler.idle and not self._prepare())
            try:
                self.engine.step()
            except Exception as error:
                self._break(error)

    def _prepare(self) -> bool:
        """Use a pause to get ready for more; whether there may be more to do."""
        if self._prepared:
            return False
        try:
            self._prepared = not self.engine.prepare()
        except Exception as error:
            log.warning("steps are captured when a batch first needs them, as one could not be now: %s", error)
            self._prepared = True
        return not self._prepared

    def _do_inbox(self, wait: bool) -> None:
        while True:
            try:
                self._inbox.get(block=wait)()
            except queue.Empty:
                return
            wait = False

    def _submit(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        tell: Callable[[Progress | Exception], None],
        mine: list[Request],
    ) -> None:
        if self._closed:
            tell(EngineClosedError())
            return
        told = 0

        def on_progress(request: Request, step: Step | None) -> None:
            nonlocal told
            generation = request.generation
            fresh, logprobs = tuple(generation.tokens[told:]), tuple(generation.logprobs[told:])
            told = len(generation.tokens)
            tell(Progress(fresh, step, generation.finish_reason, logprobs))
            if request.finished:
                self._waiting.pop(request, None)

        try:
            request = self.engine.submit(prompt_ids, params, on_progress)
        except Exception as error:  # it belongs to whoever asked
            tell(error)
            return
        mine.append(request)
        self._waiting[request] = tell

    def _forget(self, mine: list[Request]) -> None:
        for request in mine:
            if self._waiting.pop(request, None) is not None:
                self.engine.cancel(request)

    def _close(self) -> None:
        self._closed = True
        for request, tell in self._waiting.items():
            tell(EngineClosedError())
            self.engine.cancel(request)
        self._waiting.clear()

    def _break(self, error: Exception) -> None:
        """Whoever waits gets the error; later requests are served if the device still answers."""
        lost, self._waiting = self._waiting, {}
        for tell in lost.values():
            tell(error)
        try:
            for request in lost:
                self.engine.cancel(request)
        except Exception:
            self._closed = True
            self.engine.scheduler.abandon()
