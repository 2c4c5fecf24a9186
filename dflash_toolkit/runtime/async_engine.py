"""The engine behind an asynchronous interface: one thread steps it, any number of tasks wait for their answers."""

import asyncio
import contextlib
import logging
import queue
import threading
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass

import torch

from ..decode import FinishReason, SamplingParams, Step, TokenLogprobs
from .engine import Engine
from .request import Request

log = logging.getLogger(__name__)


class EngineClosedError(Exception):
    """The engine is shutting down, or its device has failed; the answer will not be finished.

    Attributes:
        code: "server_shutting_down" or "engine_failed", for programs.
    """

    def __init__(self, failed: bool = False) -> None:
        super().__init__("the engine has failed; restart the server" if failed else "the server is shutting down")
        self.code = "engine_failed" if failed else "server_shutting_down"


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
        self.broken: Exception | None = None  # why no request can be served any more
        self._entry = threading.Lock()  # nothing is put into the inbox once the thread has left
        self._left = self._closing = False
        self._listeners: set[Callable[[Progress | Exception], None]] = set()  # to whom `decode` listens
        self._thread = threading.Thread(target=self._run, name="decode", daemon=True)
        self._thread.start()

    async def decode(self, prompt_ids: list[int], params: SamplingParams) -> AsyncGenerator[Progress]:
        """Decode one prompt, yielding after every step of it until one carries a `finish_reason`.

        Decoding does not wait for the consumer. A consumer that leaves (`aclose`, or its task is cancelled) takes
        its request out of the batch.

        Raises:
            EngineClosedError: `close` was called before the answer was finished, or the engine is `broken`.
            UserError: the request cannot be decoded, see `Engine.submit`.
            Exception: whatever broke the engine.
        """
        loop = asyncio.get_running_loop()
        news: asyncio.Queue[Progress | Exception] = asyncio.Queue()
        mine: list[Request] = []

        def tell(item: Progress | Exception) -> None:
            with contextlib.suppress(RuntimeError):  # of a loop that is closed: nobody listens
                loop.call_soon_threadsafe(news.put_nowait, item)

        if not self._ask(lambda: self._submit(prompt_ids, params, tell, mine)):
            raise self._closed_error()
        self._listeners.add(tell)
        try:
            while True:
                item = await news.get()
                if isinstance(item, Exception):
                    raise item
                yield item
                if item.finish_reason is not None:
                    return
        finally:
            self._listeners.discard(tell)
            self._ask(lambda: self._forget(mine))

    def check(self, prompt_ids: list[int], params: SamplingParams) -> None:
        """Raises what `decode` would at once: UserError for the request, EngineClosedError for the engine."""
        if self._closing or self.broken is not None:
            raise self._closed_error()
        self.engine.request(prompt_ids, params)

    def close(self) -> None:
        """End every answer, running or queued, with EngineClosedError now, and the thread after the step under way."""
        self._closing = True
        self._ask(self._close)
        for tell in tuple(self._listeners):  # the thread would only tell them when its step is over
            tell(self._closed_error())

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait until the thread has ended; whether it has within `timeout_s` seconds."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _ask(self, call: Callable[[], None]) -> bool:
        """Have the thread do something; False if it has left."""
        with self._entry:
            if not self._left:
                self._inbox.put(call)
            return not self._left

    # ---- in the thread -----------------------------------------------------------------------------------

    def _run(self) -> None:
        if (device := self.engine.runner.device).type == "cuda":
            torch.cuda.set_device(device)  # every thread has its own
        while not self._closed:
            try:
                self._do_inbox(wait=self.engine.scheduler.idle and not self._prepare())
                self.engine.step()
            except Exception as error:
                self._break(error)
        with self._entry:
            self._left = True
        self._do_inbox(wait=False)

    def _prepare(self) -> bool:
        """Use a pause to get ready for more; whether there may be more to do."""
        if self._prepared:
            return False
        try:
            self._prepared = not self.engine.prepare()
        except Exception as error:
            log.warning("steps are captured when a batch first needs them, as one could not be now: %s", error)
            self._prepared = True
            self._check()
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
            tell(self._closed_error())
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
        self._cancel([request for request in mine if self._waiting.pop(request, None) is not None])

    def _close(self) -> None:
        self._closed = True
        self._cancel(self._tell_all(EngineClosedError()))

    def _break(self, error: Exception) -> None:
        """Whoever waits gets the error; later requests are served if the device still answers."""
        log.error("a step failed", exc_info=error)
        self._cancel(self._tell_all(error))
        self._check()

    def _tell_all(self, error: Exception) -> list[Request]:
        """Nobody waits any more; who did."""
        lost, self._waiting = self._waiting, {}
        for tell in lost.values():
            tell(error)
        return list(lost)

    def _cancel(self, requests: list[Request]) -> None:
        try:
            for request in requests:
                self.engine.cancel(request)
        except Exception as failure:
            self._give_up(failure)

    def _check(self) -> None:
        """Notice a device that has failed: requests that hold no row are cancelled without asking it."""
        try:
            self.engine.runner.check()
        except Exception as failure:
            self._give_up(failure)

    def _give_up(self, failure: Exception) -> None:
        log.error("the device does not answer any more", exc_info=failure)
        self.broken, self._closed = failure, True
        self.engine.scheduler.abandon()
        self._tell_all(self._closed_error())

    def _closed_error(self) -> EngineClosedError:
        return EngineClosedError(failed=self.broken is not None)
