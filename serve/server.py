"""The listening socket and uvicorn on it."""

import asyncio
import math
import socket
from collections.abc import Callable
from typing import Any

import uvicorn

from dflash_toolkit.config import UserError

GRACE_S = 5  # seconds that open answers get to say that they are cut off


def bind(host: str, port: int) -> socket.socket:
    """A socket with its address; port 0 takes a free one. Clients are refused until the server listens on it.

    Raises:
        UserError: the host cannot be resolved or is not ours, or the port is taken or not allowed.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (socket.gaierror, UnicodeError) as error:
        raise UserError(f"host {host!r} cannot be resolved; give a name or address of this machine") from error
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        reason = error.strerror or str(error)
        raise UserError(f"cannot listen on {host} port {port} ({reason}); give another --host or --port") from error
    return bound


def url_of(bound: socket.socket) -> str:
    """The address clients use, e.g. http://127.0.0.1:8000."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if bound.family == socket.AF_INET6 else f"http://{host}:{port}"


class Server(uvicorn.Server):
    """Serves an ASGI app.

    Told to stop, it takes no more connections, lets open answers finish, and after `drain_s` seconds ends the others.

    Args:
        ready: called once requests are accepted.
        drain: called when it is told to stop.
        stop: called when the open answers must end.
    """

    def __init__(
        self,
        app: Any,
        ready: Callable[[], None],
        stop: Callable[[], None],
        drain: Callable[[], None] = lambda: None,
        drain_s: float = 0.0,
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                log_level="warning",
                access_log=False,
                lifespan="off",
                timeout_graceful_shutdown=math.ceil(drain_s) + GRACE_S,
            )
        )
        self._ready, self._drain, self._stop, self._drain_s = ready, drain, stop, drain_s

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._drain()
        ending = asyncio.get_running_loop().call_later(self._drain_s, self._stop)
        await super().shutdown(sockets)
        ending.cancel()
        self._stop()
