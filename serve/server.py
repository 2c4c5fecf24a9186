"""The listening socket and uvicorn on it."""

import asyncio
import math
import os
import resource
import socket
import stat
from collections.abc import Callable
from typing import Any

import anyio
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from dflash_toolkit.config import UserError

from .state import Count

MOST_FILES = 65536
SPARE_FILES = 64  # for what is no client's connection
ASKED_S = (0.005, 1.0)  # seconds until a client that has sent all is first asked again whether it listens, and most
CLOSED = 7  # of a TCP connection, in what Linux says of it
GRACE_S = 5  # seconds that open answers get to say that they are cut off


def bind(host: str, port: int, several: bool = False) -> socket.socket:
    """A socket with its address; port 0 takes a free one. Clients are refused until the server listens on it.

    Args:
        several: others are to have the address too, see `beside`.

    Raises:
        UserError: the host cannot be resolved or is not ours, or the port is taken or not allowed.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (socket.gaierror, UnicodeError) as error:
        raise UserError(f"host {host!r} cannot be resolved; give a name or address of this machine") from error
    bound = socket.socket(family, kind, protocol)
    try:
        _set(bound)
        bound.bind(address)
        if several:  # set only now: before, it would have let us in beside another server
            taken = bound.getsockname()
            bound.close()
            bound = socket.socket(family, kind, protocol)
            _set(bound, socket.SO_REUSEPORT)
            bound.bind(taken)
    except OSError as error:
        bound.close()
        reason = error.strerror or str(error)
        raise UserError(f"cannot listen on {host} port {port} ({reason}); give another --host or --port") from error
    return bound


def beside(bound: socket.socket) -> socket.socket:
    """Another socket with a bound one's address, for another process; the system spreads connections over both.

    A Unix socket is shared: whoever is first takes a connection.
    """
    if bound.family == socket.AF_UNIX:
        return bound.dup()
    other = socket.socket(bound.family, bound.type, bound.proto)
    _set(other, socket.SO_REUSEPORT)
    other.bind(bound.getsockname())
    return other


def _set(listener: socket.socket, *more: int) -> None:
    """Its options, which its connections have too: a client that is gone without a word is noticed in two minutes."""
    for option in (socket.SO_REUSEADDR, socket.SO_KEEPALIVE, *more):
        listener.setsockopt(socket.SOL_SOCKET, option, 1)
    for name, value in (("KEEPIDLE", 60), ("KEEPINTVL", 10), ("KEEPCNT", 6), ("USER_TIMEOUT", 120_000)):  # s, s, , ms
        if hasattr(socket, f"TCP_{name}"):
            listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_{name}"), value)


def bind_path(path: str) -> socket.socket:
    """A Unix socket at a path; one that an ended server left there is replaced. Raises UserError."""
    bound = socket.socket(socket.AF_UNIX)
    try:
        if os.path.exists(path) and stat.S_ISSOCK(os.stat(path).st_mode):
            try:
                bound.connect(path)
            except OSError:
                os.unlink(path)
            else:
                raise OSError("another server listens there")
            bound.close()
            bound = socket.socket(socket.AF_UNIX)
        bound.bind(path)
    except OSError as error:
        bound.close()
        raise UserError(f"uds {path}: cannot listen there ({error.strerror or error}); give another path") from error
    return bound


def url_of(bound: socket.socket, https: bool = False) -> str:
    """The address clients use, e.g. http://127.0.0.1:8000."""
    if bound.family == socket.AF_UNIX:
        return f"unix:{bound.getsockname()}"
    host, port = bound.getsockname()[:2]
    shown = f"[{host}]" if bound.family == socket.AF_INET6 else host
    return f"{'https' if https else 'http'}://{shown}:{port}"


def raise_open_files() -> int:
    """Let this process open as many files as it may; how many connections that leaves room for."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return max(1, max(soft, most) - SPARE_FILES)


def _refused(transport: asyncio.Transport) -> bool:
    """Whether the other side's system refused what it was sent."""
    connection = transport.get_extra_info("socket")
    if connection.family == socket.AF_UNIX or not hasattr(socket, "TCP_INFO"):
        return False  # a write fails there
    return bool(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == CLOSED)


class Connection(HttpToolsProtocol):
    """A client's connection: there is a limited number of them, and of time to send a request and to take an answer.

    Without limits connections that send nothing take every file that the process may open, and `/health` with them.
    """

    limit = 1 << 30  # of open connections
    client_timeout_s = 30.0  # to send a header, and behind it a body; to take what it is sent
    open = Count()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._late: asyncio.TimerHandle | None = None
        self._full: asyncio.TimerHandle | None = None
        self._asked: asyncio.TimerHandle | None = None
        self.open.add(1)
        if self.open.total > self.limit:
            self._refuse(b"503 Service Unavailable")
        else:
            self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self.open.add(-1)
        self._stop_waiting()
        for timer in (self._full, self._asked):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """It takes less than it is sent."""
        super().pause_writing()
        self._full = self.loop.call_later(self.client_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._full is not None:
            self._full.cancel()

    def on_message_begin(self) -> None:
        self._wait()  # the next request of an open connection
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._wait()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._stop_waiting()
        super().on_message_complete()

    def eof_received(self) -> bool:  # type: ignore[override]
        """It has said all that it will: it may be gone, or listen still, as `nc -N` does. Whether to go on."""
        waits = self.cycle is not None and not self.cycle.response_complete and not self.cycle.more_body
        if not waits or self.scope["http_version"] == "1.0" or self.transport.get_extra_info("sslcontext") is not None:
            return False
        self._ask(ASKED_S[0])
        return True

    def _ask(self, pause: float) -> None:
        """Send what every client passes over; the system of one that is gone refuses it, and closes the connection."""
        if self.transport.is_closing() or self.cycle.response_complete:
            self.transport.close()
        elif _refused(self.transport):
            self.transport.abort()
        else:
            if not self.cycle.response_started:
                self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            elif self.cycle.chunked_encoding:  # of events: an empty comment
                self.transport.write(b"3\r\n:\n\n\r\n")
            if _refused(self.transport):  # on the same machine that is known at once
                self.transport.abort()
            else:
                self._asked = self.loop.call_later(pause, self._ask, min(2 * pause, ASKED_S[1]))

    def _wait(self) -> None:
        self._stop_waiting()
        self._late = self.loop.call_later(self.client_timeout_s, self._refuse, b"408 Request Timeout")

    def _stop_waiting(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _refuse(self, status: bytes) -> None:
        if not self.transport.is_closing():
            if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
                self.transport.write(b"HTTP/1.1 " + status + b"\r\nconnection: close\r\ncontent-length: 0\r\n\r\n")
            self.transport.close()


class Server(uvicorn.Server):
    """Serves an ASGI app.

    Told to stop, it takes no more connections, lets open answers finish, and after `drain_s` seconds ends the others.

    Args:
        ready: called once requests are accepted.
        drain: called when it is told to stop.
        stop: called when the open answers must end.
        options: more of uvicorn's.
    """

    def __init__(
        self,
        app: Any,
        ready: Callable[[], None],
        stop: Callable[[], None],
        drain: Callable[[], None] = lambda: None,
        drain_s: float = 0.0,
        **options: Any,
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=Connection,
                log_config=None,
                access_log=False,
                server_header=False,
                lifespan="off",
                timeout_graceful_shutdown=math.ceil(drain_s) + GRACE_S,
                **options,
            )
        )
        self._ready, self._drain, self._stop, self._drain_s = ready, drain, stop, drain_s

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await anyio.sleep(0)  # which loads what the first answer would wait for
        await super().startup(sockets)
        self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._drain()
        ending = asyncio.get_running_loop().call_later(self._drain_s, self._stop)
        await super().shutdown(sockets)
        ending.cancel()
        self._stop()
