"""The engine behind an asynchronous interface: one thread steps it, any number of tasks wait for their answers."""

import asyncio
import contextlib
import functools
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch

from ..generation import FinishReason, Step, TokenLogprobs
from ..sampling import SamplingParams
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


class Responses:
    """What some requests get, as it comes: an asynchronous iterator of (number of the request, progress).

    It ends when every request has a `finish_reason` or was cancelled. The end of the `with` block cancels those that
    are left. Decoding does not wait for whoever iterates.

    Raises, while iterating:
        EngineClosedError: the engine was closed before that, or is `broken`.
        Exception: whatever broke the engine.
    """

    def __init__(self, engine: "AsyncEngine", requests: Sequence[Request]) -> None:
        self.requests, self._engine, self._open = requests, engine, set(range(len(requests)))
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[tuple[int, Progress] | Exception] = asyncio.Queue()

    def put(self, item: tuple[int, Progress] | Exception) -> None:
        """The next item; from any thread."""
        with contextlib.suppress(RuntimeError):  # of a loop that is closed: nobody listens
            self._loop.call_soon_threadsafe(self._queue.put_nowait, item)

    def cancel(self, *numbers: int) -> None:
        """Take these requests out of the batch; nothing more is said of them."""
        self._open.difference_update(numbers)
        self._engine.cancel([self.requests[number] for number in numbers])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel(*self._open)
        self._engine.listeners.discard(self)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> tuple[int, Progress]:
        while self._open:
            item = await self._queue.get()
            if isinstance(item, Exception):
                raise item
            number, progress = item
            if number in self._open:
                if progress.finish_reason is not None:
                    self._open.remove(number)
                return item
        raise StopAsyncIteration


class AsyncEngine:
    """Decodes for many tasks at once; requests come into the running batch and leave it at every step.

    Args:
        tokenizer: the target's, for whoever has text.
    """

    def __init__(self, engine: Engine, tokenizer: Any = None) -> None:
        self.engine, self.tokenizer = engine, tokenizer
        self.broken: Exception | None = None  # why no request can be served any more
        self.listeners: set[Responses] = set()  # only tasks touch it
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()  # what the thread is to do first
        self._waiting: dict[Request, Responses] = {}  # only the thread touches it
        self._closed = self._prepared = False
        self._entry = threading.Lock()  # nothing is put into the inbox once the thread has left
        self._left = self._closing = False
        self._thread = threading.Thread(target=self._run, name="decode", daemon=True)
        self._thread.start()

    def request(self, prompt_ids: Sequence[int], params: SamplingParams) -> Request:
        """A request for `decode`. Raises EngineClosedError where none is served, else what `Engine.request` does."""
        if self._closing or self.broken is not None:
            raise self._closed_error()
        return self.engine.request(prompt_ids, params)

    def decode(self, requests: Sequence[Request]) -> Responses:
        """Queue requests, and what they get: `with engine.decode(requests) as responses: async for ... in responses`.

        Raises:
            EngineClosedError: `close` was called, or the engine is `broken`.
        """
        responses = Responses(self, requests)
        if not self._ask(lambda: self._submit(responses)):
            raise self._closed_error()
        self.listeners.add(responses)
        return responses

    def cancel(self, requests: Sequence[Request]) -> None:
        """Take requests out of the batch, those of them that are not finished."""
        if requests:
            self._ask(lambda: self._discard(requests))

    def close(self) -> None:
        """End every answer, running or queued, with EngineClosedError now, and the thread after the step under way."""
        self._closing = True
        self._ask(self._close)
        for responses in tuple(self.listeners):  # the thread would only tell them when its step is over
            responses.put(self._closed_error())

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

    def _submit(self, responses: Responses) -> None:
        if self._closed:
            responses.put(self._closed_error())
            return
        for number, request in enumerate(responses.requests):
            request.on_progress = functools.partial(self._on_progress, responses, number)
            self._waiting[request] = responses
            self.engine.scheduler.add(request)

    def _on_progress(self, responses: Responses, number: int, request: Request, step: Step | None) -> None:
        generation = request.generation
        tokens = tuple(generation.tokens) if step is None else step.tokens
        logprobs = tuple(generation.logprobs[len(generation.tokens) - len(tokens) :])
        responses.put((number, Progress(tokens, step, generation.finish_reason, logprobs)))
        if request.finished:
            self._waiting.pop(request, None)

    def _discard(self, requests: Sequence[Request]) -> None:
        self._cancel([request for request in requests if self._waiting.pop(request, None) is not None])

    def _close(self) -> None:
        self._closed = True
        self._cancel(self._put_all(EngineClosedError()))

    def _break(self, error: Exception) -> None:
        """Whoever waits gets the error; later requests are served if the device still answers."""
        log.error("a step failed", exc_info=error)
        self._cancel(self._put_all(error))
        self._check()

    def _put_all(self, error: Exception) -> list[Request]:
        """Nobody waits any more; who did."""
        lost, self._waiting = self._waiting, {}
        for responses in set(lost.values()):
            responses.put(error)
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
        self._put_all(self._closed_error())

    def _closed_error(self) -> EngineClosedError:
        return EngineClosedError(failed=self.broken is not None)
