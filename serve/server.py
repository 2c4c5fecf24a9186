"""Binds the listening socket and runs uvicorn on it."""

import asyncio
import contextlib
import os
import resource
import socket
import ssl
import stat
import time
from collections.abc import Callable, Generator
from typing import Any

import anyio
import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from dflash_toolkit.config import UserError

from .state import Count

MAX_OPEN_FILES = 65536
SPARE_FILES = 64  # open files other than connections
PROBE_S = (0.005, 1.0)  # first and longest pause between probes of a client that has closed its sending side
MAX_HEADER = 64 * 1024  # bytes; the parser copies an unfinished header again whenever more of it arrives
CLOSED = 7  # TCP_CLOSE in Linux's tcp_info
TICK_S = 0.1  # pause between looks for a second Ctrl-C
GRACE_S = 5  # seconds that open answers get to send an error when they are aborted


def bind(host: str, port: int, several: bool = False) -> socket.socket:
    """Binds a TCP socket; port 0 takes a free one. Clients are refused until the server listens on it.

    Args:
        several: other processes will share the address, see `share_address`.

    Raises:
        UserError: the host cannot be resolved or is not this machine's, or the port is in use or not allowed.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (socket.gaierror, UnicodeError) as error:
        raise UserError(f"--host {host!r} cannot be resolved; give a name or address of this machine") from error
    bound = socket.socket(family, kind, protocol)
    try:
        _set(bound)
        bound.bind(address)
        if several:  # not earlier: with SO_REUSEPORT the first bind would succeed although another server has the port
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


def share_address(bound: socket.socket) -> socket.socket:
    """Creates a socket with the same address for another process; the system distributes connections.

    A Unix socket is duplicated instead: the first process to accept a connection gets it.
    """
    if bound.family == socket.AF_UNIX:
        return bound.dup()
    other = socket.socket(bound.family, bound.type, bound.proto)
    _set(other, socket.SO_REUSEPORT)
    other.bind(bound.getsockname())
    return other


def _set(listener: socket.socket, *more: int) -> None:
    """Sets options of a listener and its connections: a client that vanishes is noticed within two minutes."""
    for option in (socket.SO_REUSEADDR, socket.SO_KEEPALIVE, *more):
        listener.setsockopt(socket.SOL_SOCKET, option, 1)
    for name, value in (("KEEPIDLE", 60), ("KEEPINTVL", 10), ("KEEPCNT", 6), ("USER_TIMEOUT", 120_000)):  # s, s, , ms
        if hasattr(socket, f"TCP_{name}"):
            listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_{name}"), value)


def bind_path(path: str) -> socket.socket:
    """Binds a Unix socket, and replaces one that an ended server has left there. Raises UserError."""
    bound = socket.socket(socket.AF_UNIX)
    try:
        if os.path.exists(path) and stat.S_ISSOCK(os.stat(path).st_mode):
            try:
                bound.connect(path)
            except OSError:
                os.unlink(path)
            else:
                raise OSError("another server listens on it")
            bound.close()
            bound = socket.socket(socket.AF_UNIX)
        bound.bind(path)
    except OSError as error:
        bound.close()
        raise UserError(f"--uds {path}: cannot listen ({error.strerror or error}); give another path") from error
    return bound


def check_certificate(certificate: str, key: str) -> None:
    """Raises UserError if TLS cannot use the files."""

    def password() -> str:
        raise UserError(f"ssl_keyfile {key}: the key is encrypted; give one without a password")

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password)
    except OSError as error:  # OpenSSL does not say which of the files is at fault
        said = f"ssl_certfile {certificate} and ssl_keyfile {key}: cannot be used ({error.strerror or error})"
        raise UserError(f"{said}; give a certificate and its key as PEM files") from error


def url_of(bound: socket.socket, https: bool = False) -> str:
    """Returns the address for clients, e.g. http://127.0.0.1:8000."""
    if bound.family == socket.AF_UNIX:
        return f"unix:{bound.getsockname()}"
    host, port = bound.getsockname()[:2]
    shown = f"[{host}]" if bound.family == socket.AF_INET6 else host
    return f"{'https' if https else 'http'}://{shown}:{port}"


def raise_open_files() -> int:
    """Raises the limit on open files as far as possible; returns how many connections fit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return max(1, max(soft, most) - SPARE_FILES)


def _refused(transport: asyncio.Transport) -> bool:
    """Returns whether the client's system has refused data."""
    connection = transport.get_extra_info("socket")
    if connection.family == socket.AF_UNIX or not hasattr(socket, "TCP_INFO"):
        return False  # there a write fails instead
    return bool(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == CLOSED)


class Connection(HttpToolsProtocol):
    """A client's connection; limits the number of connections, the size of a header, and the time to send and read.

    Without limits, idle connections could use every file that the process may open, and `/health` would fail. An error
    of the connection itself is sent after the responses to earlier requests, never inside them.
    """

    limit = 1 << 30  # open connections
    client_timeout_s = 30.0  # each to send a header, to send a body, and to read buffered data
    open = Count()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._header_bytes = 0  # fed to the parser since it last completed a header or a part of a body
        self._running: RequestResponseCycle | None = None  # `cycle` is the newest request, this one has started
        self._incomplete = True  # the client has to send the rest of a request
        self._refusal = b""  # the last response; data that arrives afterwards is ignored
        self._late: asyncio.TimerHandle | None = None
        self._full: asyncio.TimerHandle | None = None
        self._probing: asyncio.TimerHandle | None = None
        self.open.add(1)
        if self.open.total > self.limit:
            self._refuse(b"503 Service Unavailable")
        else:
            self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self.open.add(-1)
        self._stop_waiting()
        if self._running is not None:  # uvicorn informs only the newest
            self._running.disconnected = not self._running.response_complete
            self._running.message_event.set()
        for timer in (self._full, self._probing):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Starts the timeout of a client that reads more slowly than the server sends."""
        super().pause_writing()
        self._full = self.loop.call_later(self.client_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._full is not None:
            self._full.cancel()

    def data_received(self, data: bytes) -> None:
        """Parses data; refuses a header (or trailer) of more than `MAX_HEADER` bytes as soon as they have arrived."""
        left = memoryview(data)
        while left and not self._refusal and not self.transport.is_closing():
            part = left[: MAX_HEADER - self._header_bytes]
            if not part:
                self._refuse(b"431 Request Header Fields Too Large")
                return
            self._header_bytes += len(part)
            left = left[self._parse(part) :]
            if self._offers_upgrade():
                self._parse(self._without_upgrade())

    def _parse(self, data: bytes | memoryview) -> int:
        """Returns how many bytes were parsed: all, or up to the end of a header that offers an upgrade."""
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            return int(upgrade.args[0]) if self._offers_upgrade() else len(data)
        except httptools.HttpParserError:
            self.logger.warning("Invalid HTTP request received.")
            self._refuse(b"400 Bad Request", b"Invalid HTTP request received.")
        return len(data)

    def _offers_upgrade(self) -> bool:
        """Returns whether the client offers another protocol, e.g. HTTP/2, which it may be answered without."""
        return bool(self.parser.should_upgrade()) and self.parser.get_method() != b"CONNECT"

    def _without_upgrade(self) -> bytes:
        """Returns the request's header without its upgrade, for a new parser; the old one would skip the body."""
        version = self.parser.get_http_version().encode()
        head = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, version)]
        head += [b"%s: %s" % (name, value) for name, value in self.headers if name != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        return b"\r\n".join(head) + b"\r\n\r\n"

    def on_message_begin(self) -> None:
        self._incomplete = True
        self._wait()  # the next request of an open connection
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._header_bytes = 0
        self._wait()
        if not self._offers_upgrade():
            super().on_headers_complete()

    def on_chunk_header(self) -> None:
        self._header_bytes = 0

    def on_body(self, body: bytes) -> None:
        self._header_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._header_bytes = 0
        if not self._offers_upgrade():
            self._incomplete = False
            self._stop_waiting()
            super().on_message_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        """Starts the next pipelined request, or sends an error that waited for the response."""
        super().on_response_complete()
        if self._refusal:
            self._close()
        elif self._incomplete:
            self._unset_keepalive_if_required()
            self._wait()

    @property
    def _answers(self) -> bool:
        """Whether a response is open, or a complete request waits for one."""
        running = self._running
        if running is None or running.response_complete:
            return False
        return running is not self.cycle or running.response_started or not running.more_body

    def eof_received(self) -> bool:  # type: ignore[override]
        """Returns whether to keep a connection after its client has closed its sending side; `nc -N` still reads."""
        encrypted = self.transport.get_extra_info("sslcontext") is not None
        if not self._answers or self.scope["http_version"] == "1.0" or encrypted:
            return False
        self._probe(PROBE_S[0])
        return True

    def _probe(self, pause: float) -> None:
        """Sends bytes that every client ignores; if the client is gone, its system refuses them."""
        running = self._running
        if running is None or not self._answers or self.transport.is_closing():
            self.transport.close()
        elif _refused(self.transport):
            self.transport.abort()
        else:
            if not running.response_started:
                self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            elif running.chunked_encoding:  # events: an empty comment
                self.transport.write(b"3\r\n:\n\n\r\n")
            if _refused(self.transport):  # immediate if the client is on this machine
                self.transport.abort()
            else:
                self._probing = self.loop.call_later(pause, self._probe, min(2 * pause, PROBE_S[1]))

    def _wait(self) -> None:
        """Restarts the time for the rest of a request; it does not run while an earlier response is open."""
        self._stop_waiting()
        if self._incomplete and not self._answers and not self.transport.is_closing():
            self._late = self.loop.call_later(self.client_timeout_s, self._time_out)

    def _time_out(self) -> None:
        if self.flow.read_paused:  # the client cannot send
            self._wait()
        else:
            self._refuse(b"408 Request Timeout")

    def _stop_waiting(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _refuse(self, status: bytes, text: bytes = b"") -> None:
        """Sends an error and closes the connection, after the responses to earlier requests."""
        header = b"HTTP/1.1 %s\r\nconnection: close\r\ncontent-length: %d\r\n" % (status, len(text))
        self._refusal = header + (b"content-type: text/plain\r\n\r\n" if text else b"\r\n") + text
        self._close()

    def _close(self) -> None:
        """Sends the error unless responses must end before it."""
        if self.transport.is_closing():
            return
        if self._answers:
            self.flow.resume_reading()  # a close with unread data would lose the answer
        else:
            self.transport.write(self._refusal)
            self.transport.close()


class Server(uvicorn.Server):
    """Serves an ASGI app.

    A server that stops lets running requests finish, and aborts them after `drain_s` seconds. It accepts connections
    until then: the app refuses new answers, and a probe sees that the server is not ready.

    Args:
        ready: called once requests are accepted.
        drain: called when the server begins to stop.
        stop: called when the open answers must end.
        options: options of uvicorn.
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
                timeout_graceful_shutdown=GRACE_S,
                **options,
            )
        )
        self._ready, self._drain, self._stop, self._drain_s = ready, drain, stop, drain_s

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await anyio.sleep(0)  # loads modules that the first answer would otherwise wait for
        await super().startup(sockets)
        self._ready()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield  # `signals.py` handles them

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._drain()
        running, ends = set(self.server_state.tasks), time.monotonic() + self._drain_s
        while running and not self.force_exit and (left := ends - time.monotonic()) > 0:
            _, running = await asyncio.wait(running, timeout=min(left, TICK_S))
        self._stop()
        await super().shutdown(sockets)
