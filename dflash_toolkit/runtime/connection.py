"""A connection to an engine's process, for one event loop: sends requests and receives their answers."""

import asyncio
import contextlib
import itertools
import socket
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from ..generation import FinishReason, PromptLogprobs, Step, TokenLogprobs
from ..sampling import SamplingParams
from .wire import (
    Ask,
    Cancel,
    Channel,
    Compile,
    Compiled,
    Compiling,
    Item,
    Lost,
    Pong,
    Replaced,
    ReplaceWeights,
    RollBack,
    SaveDrafter,
    Stats,
    Update,
)  # fmt: skip

request_name: ContextVar[str] = ContextVar("request_name", default="")  # name of new requests in logs


class EngineClosedError(Exception):
    """The engine is shutting down or has failed; the answer will not be finished.

    Attributes:
        code: "server_shutting_down", "engine_failed", or "engine_restarting" if another engine will start.
    """

    def __init__(self, failed: bool = False, restarts: bool = False) -> None:
        message, self.code = "the server is shutting down", "server_shutting_down"
        if failed and restarts:
            message, self.code = "the engine has ended and is restarting; try again later", "engine_restarting"
        elif failed:
            message, self.code = "the engine has failed; restart the server", "engine_failed"
        super().__init__(message)


class RequestFailedError(Exception):
    """The engine could not finish this request; others continue."""


class CompileQueueError(Exception):
    """A grammar is not compiled now, as others are.

    Attributes:
        full: too many wait; otherwise it has waited too long.
    """

    def __init__(self, message: str, full: bool) -> None:
        super().__init__(message)
        self.full = full


@dataclass(frozen=True, slots=True)
class Progress:
    """The tokens that one step added to an answer."""

    tokens: tuple[int, ...]  # the stop token included
    step: Step | None  # None: the prefill, which verifies nothing
    finish_reason: FinishReason | None
    logprobs: tuple[TokenLogprobs, ...] = ()  # one a token, if the request asked for them
    cached_tokens: int = 0  # prompt tokens from a prefix hit
    prompt_logprobs: PromptLogprobs | None = None  # with the first token, if the request asked for them
    versions: tuple[int, int] = (0, 0)  # target and drafter: how often their weights were replaced


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request that was checked and is not sent yet."""

    prompt_ids: list[int]
    params: SamplingParams  # its seed is ignored
    seed: int
    key: str = ""
    priority: int = 0
    cache_salt: str = ""
    store: bool = True

    def with_seed(self, seed: int) -> "PreparedRequest":
        """Returns a request for another answer to the same prompt."""
        return replace(self, seed=seed)


class Responses:
    """The progress of some requests: an asynchronous iterator of (number of the request, progress).

    It ends when every request has a `finish_reason` or was cancelled. The end of the `with` block cancels the rest.
    Decoding does not wait for the iterating task.

    Raises, while iterating:
        EngineClosedError: the engine was closed or has failed before the end.
        RequestFailedError: the engine could not finish one of them.
    """

    def __init__(self, connection: "Connection", requests: Sequence[PreparedRequest]) -> None:
        self.requests = requests
        self._connection, self._open = connection, set(range(len(requests)))
        self._first = connection.send(self, requests)
        self._came: deque[tuple[int, Progress] | Exception] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def put(self, item: tuple[int, Progress] | Exception) -> None:
        """Adds the next item, in the event loop's thread."""
        self._came.append(item)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def put_from_elsewhere(self, error: Exception) -> None:
        """Adds an error as the next item, from any thread."""
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            self._connection.loop.call_soon_threadsafe(self.put, error)

    def cancel(self, *numbers: int) -> None:
        """Cancels requests; they make no further progress."""
        self._open.difference_update(numbers)
        if numbers:
            self._came = deque(item for item in self._came if isinstance(item, Exception) or item[0] in self._open)
            self._connection.cancel([self._first + number for number in numbers])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel(*self._open)

    def __aiter__(self) -> Self:
        return self

    @property
    def ready(self) -> bool:
        """Whether the next item has arrived."""
        return bool(self._came)

    async def __anext__(self) -> tuple[int, Progress]:
        while self._open:
            if not self._came:
                self._waiter = self._connection.loop.create_future()
                await self._waiter
                continue
            item = self._came.popleft()
            if isinstance(item, Exception):
                raise item
            number, progress = item
            if number in self._open:
                if progress.finish_reason is not None:
                    self._open.remove(number)
                return item
        raise StopAsyncIteration


class Connection:
    """The connection of one event loop."""

    def __init__(self, path: Path, lost: Any) -> None:
        self.loop = asyncio.get_running_loop()
        self._lost = lost
        connected = socket.socket(socket.AF_UNIX)
        connected.connect(str(path))
        self.channel = Channel(connected)
        self.waiting: dict[int, tuple[Responses, int]] = {}
        self.pongs: list[asyncio.Future[Stats]] = []
        self.replacing: dict[int, asyncio.Future[Replaced]] = {}
        self.compiling: dict[int, asyncio.Queue[Compiling | Compiled | None]] = {}  # None: the engine has closed
        self._next = itertools.count()
        self._writing = False
        self.loop.add_reader(connected, self._read)

    def send(self, responses: Responses, requests: Sequence[PreparedRequest]) -> int:
        """Sends requests; returns the number of the first."""
        numbers = [next(self._next) for _ in requests]
        for place, number in enumerate(numbers):
            self.waiting[number] = responses, place
        for _, group in itertools.groupby(zip(numbers, requests, strict=True), lambda pair: id(pair[1].params)):
            some = list(group)
            one = some[0][1]
            self.write(
                Ask(
                    [number for number, _ in some],
                    [asked.prompt_ids for _, asked in some],
                    [asked.seed for _, asked in some],
                    one.params,
                    one.key,
                    one.priority,
                    request_name.get(),
                    one.cache_salt,
                    one.store,
                )
            )
        return numbers[0]

    @contextlib.contextmanager
    def compile(self, params: SamplingParams, key: str) -> "Iterator[asyncio.Queue[Compiling | Compiled | None]]":
        """Compiles a grammar until the end of the `with` block; yields the reports about it."""
        number = next(self._next)
        reports = self.compiling[number] = asyncio.Queue()
        self.write(Compile(number, params, key))
        try:
            yield reports
        finally:
            if self.compiling.pop(number, None) is not None and not self.channel.gone:
                self.write(Cancel([number]))

    def replace(self, message: Callable[[int], ReplaceWeights | RollBack | SaveDrafter]) -> "asyncio.Future[Replaced]":
        """Asks for other weights; `message` makes the message with a number."""
        number = next(self._next)
        self.replacing[number] = self.loop.create_future()
        self.write(message(number))
        return self.replacing[number]

    def cancel(self, numbers: list[int]) -> None:
        cancelled = [number for number in numbers if self.waiting.pop(number, None) is not None]
        if cancelled and not self.channel.gone:
            self.write(Cancel(cancelled))

    def write(self, message: Any) -> None:
        try:
            self.channel.send(message)
        except OSError:
            self._end()
        self._flush_later()

    def close(self) -> None:
        """Closes the connection, in the loop's thread."""
        if not self.loop.is_closed() and self.channel.fileno() >= 0:
            self.loop.remove_reader(self.channel.socket)
            self.loop.remove_writer(self.channel.socket)
        self.channel.close()

    def _flush_later(self) -> None:
        """Sends the rest when the socket accepts it."""
        pending = self.channel.pending and not self.channel.gone
        if pending and not self._writing:
            self.loop.add_writer(self.channel.socket, self._write)
        elif self._writing and not pending and self.channel.fileno() >= 0:
            self.loop.remove_writer(self.channel.socket)
        self._writing = pending

    def _write(self) -> None:
        try:
            self.channel.flush()
        except OSError:
            self._end()
        self._flush_later()

    def _read(self) -> None:
        for message in self.channel.receive():
            match message:
                case Update(items=items):
                    for item in items:
                        self._deliver(item)
                case Pong(stats=stats):
                    for pong in self.pongs:
                        if not pong.done():
                            pong.set_result(stats)
                    self.pongs.clear()
                case Compiling(number=number) | Compiled(number=number):
                    if number in self.compiling:
                        self.compiling[number].put_nowait(message)
                case Replaced(number=number):
                    if not (waiting := self.replacing.pop(number)).done():
                        waiting.set_result(message)
                case Lost(reason=reason):
                    self._end(reason)
        if self.channel.gone:
            self._end()

    def _deliver(self, item: Item) -> None:
        found = self.waiting.get(item.number)
        if found is None:
            return  # it was cancelled
        responses, number = found
        if item.error is not None or item.finish_reason is not None:
            del self.waiting[item.number]
        if item.error is not None:
            responses.put(RequestFailedError(item.error))
            return
        tokens = tuple(item.tokens)
        step = None if item.drafted < 0 else Step(item.drafted, item.accepted, tokens)
        logprobs = tuple(item.logprobs)
        scores, versions = item.prompt_logprobs, item.versions
        progress = Progress(tokens, step, item.finish_reason, logprobs, item.cached_tokens, scores, versions)
        responses.put((number, progress))

    def _end(self, reason: str = "the engine has ended") -> None:
        """Ends all answers: the engine has closed."""
        self.channel.gone = True
        self.close()
        error = self._lost(self, reason)
        waiting, self.waiting = self.waiting, {}
        for responses in {id(r): r for r, _ in waiting.values()}.values():
            responses.put(error)
        for pong in self.pongs:
            pong.cancel()
        for replaced in self.replacing.values():
            replaced.cancel()
        self.end_compiling()

    def end_compiling(self) -> None:
        """Ends all waiting for grammars: the engine has closed."""
        for reports in self.compiling.values():
            reports.put_nowait(None)
