"""The client of an engine, for asyncio: any number of tasks wait for their answers. Without torch.

Every event loop has its own connection to the engine's socket. The engine cancels the requests of a connection that
closes.
"""

import asyncio
import contextlib
import itertools
import socket
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

from ..generation import FinishReason, PromptLogprobs, Step, TokenLogprobs
from ..sampling import GrammarError, SamplingParams
from .wire import (
    Ask,
    Cancel,
    Channel,
    Compile,
    Compiled,
    Compiling,
    Info,
    Item,
    Lost,
    Ping,
    Pong,
    Replaced,
    ReplaceWeights,
    RollBack,
    SaveDrafter,
    Stats,
    Update,
)  # fmt: skip

if TYPE_CHECKING:
    from .engine import Engine


R = TypeVar("R")
COMPILE_S = 60.0  # to try a grammar
COMPILE_QUEUE_S = 60.0  # before that
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
    versions: tuple[int, int] = (0, 0)  # of target and drafter: how often their weights were replaced


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

    def __init__(self, connection: "_Connection", requests: Sequence[PreparedRequest]) -> None:
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


class _Connection:
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


class EngineClient:
    """The client of an engine that listens on a Unix socket, for any number of event loops.

    Args:
        path: the socket's path.
        info: the engine's description, which it sent when it was ready.
        tokenizer: the target's, for text prompts.
        again: another engine may listen on the path after this one has failed.

    Attributes:
        broken: the error that every request would get; None while requests can be served.
    """

    def __init__(self, path: Path, info: Info, tokenizer: Any = None, again: bool = False) -> None:
        self.path, self.info, self.tokenizer = path, info, tokenizer
        self._again = again
        self._broken: Exception | None = None
        self._closing = False
        self._connections: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Connection]
        self._connections = weakref.WeakKeyDictionary()

    @property
    def broken(self) -> Exception | None:
        return self._broken

    def request(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        key: str = "",
        priority: int = 0,
        cache_salt: str = "",
        store: bool = True,
    ) -> PreparedRequest:
        """Returns a checked request for `decode`.

        Raises:
            EngineClosedError: the engine is closed or has failed.
            PromptError, BiasError, UserError: see `Capacity.check`.
        """
        self._check()
        prompt = list(prompt_ids)
        self.info.capacity.check(prompt, params)
        return PreparedRequest(prompt, params, params.seed, key, priority, cache_salt, store)

    def decode(self, requests: Sequence[PreparedRequest]) -> Responses:
        """Sends requests: `with engine.decode(requests) as responses: async for ... in responses`.

        Raises:
            EngineClosedError: `close` was called, or the engine has failed.
        """
        self._check()
        return Responses(self._connection(), requests)

    async def compile(self, params: SamplingParams, key: str = "") -> None:
        """Compiles the grammar of future requests, so that `decode` does not wait for it.

        Args:
            key: API key; each may have some grammars at a time.

        Raises:
            EngineClosedError: the engine has failed or ended.
            GrammarError: the grammar cannot be used, or compiles longer than COMPILE_S.
            CompileQueueError: too many other grammars are compiled.
        """
        if params.grammar is None:
            return
        self._check()
        name, waits = params.grammar.name, True
        with self._connection().compile(params, key) as reports:
            while True:
                try:
                    report = await asyncio.wait_for(reports.get(), COMPILE_QUEUE_S if waits else COMPILE_S)
                except TimeoutError as late:
                    if waits:
                        message = f"the {name} has waited {COMPILE_QUEUE_S:.0f} s, as others are compiled"
                        raise CompileQueueError(f"{message}; try again later", full=False) from late
                    message = f"the {name} takes more than {COMPILE_S:.0f} s to compile; simplify it"
                    raise GrammarError(message) from late
                match report:
                    case Compiling(waits=waits):
                        continue
                    case Compiled(error=None):
                        return
                    case Compiled(error=str(error), busy=busy):
                        raise CompileQueueError(error, full=True) if busy else GrammarError(error)
                raise self._closed_error()

    async def ping(self) -> Stats:
        """Returns the engine's counts, between two steps. Raises EngineClosedError."""
        self._check()
        connection = self._connection()
        pong = connection.loop.create_future()
        connection.pongs.append(pong)
        connection.write(Ping())
        return await self._reply(connection, pong)

    async def _reply(self, connection: _Connection, future: "asyncio.Future[R]") -> R:
        try:
            return await future
        except asyncio.CancelledError:
            if connection.channel.gone or self._closing:
                raise self._closed_error() from None
            raise

    async def update_weights(self, folder: str, part: Literal["target", "drafter"]) -> Replaced:
        """Replaces the weights of the engine by those of a directory. Raises EngineClosedError."""
        self._check()
        connection = self._connection()
        return await self._reply(connection, connection.replace(lambda number: ReplaceWeights(number, folder, part)))

    async def roll_back(self) -> str | None:
        """Serves the drafter before the current one; returns why that is impossible, or raises EngineClosedError."""
        self._check()
        connection = self._connection()
        return (await self._reply(connection, connection.replace(RollBack))).error

    async def save_drafter(self, folder: str | None) -> str | None:
        """Writes the served drafter to a directory; returns why that failed, or raises EngineClosedError."""
        self._check()
        connection = self._connection()
        return (await self._reply(connection, connection.replace(lambda number: SaveDrafter(number, folder)))).error

    async def check(self, timeout_s: float) -> None:
        """Raises EngineClosedError unless the engine replies within `timeout_s` seconds."""
        try:
            await asyncio.wait_for(self.ping(), timeout_s)
        except TimeoutError:
            raise EngineClosedError(failed=True) from None

    def close(self) -> None:
        """Ends every answer with EngineClosedError and refuses later requests. From any thread."""
        self._closing = True
        for connection in list(self._connections.values()):
            for responses in {id(r): r for r, _ in connection.waiting.values()}.values():
                responses.put_from_elsewhere(self._closed_error())
            with contextlib.suppress(RuntimeError):  # the event loop is closed
                connection.loop.call_soon_threadsafe(connection.end_compiling)

    def _check(self) -> None:
        if self._again and not self._closing and self._broken is not None:
            self._broken = None  # `_connection` tries to connect to a new engine
            self._connection()
        if self._closing or self.broken is not None:
            raise self._closed_error()

    def _connection(self) -> _Connection:
        loop = asyncio.get_running_loop()
        found = self._connections.get(loop)
        if found is None or found.channel.gone:
            try:
                found = self._connections[loop] = _Connection(self.path, self._lost)
            except OSError as error:
                self._broken = self._broken or error
                raise self._closed_error() from error
        return found

    def _lost(self, connection: _Connection, reason: str) -> EngineClosedError:
        if not self._closing and self._broken is None and self._connections.get(connection.loop) is connection:
            self._broken = RuntimeError(reason)
        return self._closed_error()

    def _closed_error(self) -> EngineClosedError:
        return EngineClosedError(failed=self.broken is not None, restarts=self._again and not self._closing)


class AsyncEngine(EngineClient):
    """An engine in a thread of this process, with the same interface as one in another process.

    Attributes:
        engine: stepped by the thread alone.
    """

    def __init__(self, engine: "Engine", tokenizer: Any = None) -> None:
        from .loop import EngineLoop, info_of

        self.engine = engine
        self._folder = tempfile.TemporaryDirectory(prefix="dflash-")
        self._control, control = socket.socketpair()
        path = Path(self._folder.name) / "engine"
        self._loop = EngineLoop(engine, path, control)
        super().__init__(path, info_of(engine), tokenizer)
        self._thread = threading.Thread(target=self._loop.run, name="decode", daemon=True)
        self._thread.start()

    @property
    def broken(self) -> Exception | None:
        return self._loop.failure or self._broken

    def close(self) -> None:
        """Ends every answer now, and the thread after the current step."""
        super().close()
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)

    def join(self, timeout_s: float | None = None) -> bool:
        """Waits for the thread; returns whether it has ended within `timeout_s` seconds."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()
