"""The client of an engine, for asyncio: any number of tasks wait for their answers. Without torch.

Every event loop has its own connection to the engine's socket. The engine cancels the requests of a connection that
closes.
"""

import asyncio
import contextlib
import socket
import tempfile
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Unpack

from ..sampling import GrammarError, SamplingParams
from .connection import CompileQueueError, Connection, EngineClosedError, PreparedRequest, Responses
from .request import Origin
from .wire import Compiled, Compiling, Info, Ping, Replaced, ReplaceWeights, RollBack, SaveDrafter, Stats

if TYPE_CHECKING:
    from .engine import Engine


R = TypeVar("R")
COMPILE_S = 60.0  # to try a grammar
COMPILE_QUEUE_S = 60.0  # before that


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
        self._connections: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Connection]
        self._connections = weakref.WeakKeyDictionary()

    @property
    def broken(self) -> Exception | None:
        return self._broken

    def request(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        **origin: Unpack[Origin],
    ) -> PreparedRequest:
        """Returns a checked request for `decode`.

        Raises:
            EngineClosedError: the engine is closed or has failed.
            PromptError, BiasError, UserError: see `Capacity.check`.
        """
        self._check()
        prompt = list(prompt_ids)
        self.info.capacity.check(prompt, params)
        return PreparedRequest(prompt, params, params.seed, **origin)

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

    async def _reply(self, connection: Connection, future: "asyncio.Future[R]") -> R:
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

    def _connection(self) -> Connection:
        loop = asyncio.get_running_loop()
        found = self._connections.get(loop)
        if found is None or found.channel.gone:
            try:
                found = self._connections[loop] = Connection(self.path, self._lost)
            except OSError as error:
                self._broken = self._broken or error
                raise self._closed_error() from error
        return found

    def _lost(self, connection: Connection, reason: str) -> EngineClosedError:
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
