"""The listening socket and uvicorn on it."""

import socket
from collections.abc import Callable
from typing import Any

import uvicorn

from dflash_toolkit.config import UserError

GRACE_S = 5  # seconds that open answers get to end once the server is told to stop


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one. Clients that come before the server runs wait in its backlog.

    Raises:
        UserError: the host cannot be resolved or is not ours, or the port is taken or not allowed.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family)
    except (socket.gaierror, UnicodeError) as error:
        raise UserError(f"host {host!r} cannot be resolved; give a name or address of this machine") from error
    except OSError as error:
        # create_server adds its own words to strerror
        reason = (error.strerror or str(error)).partition(" (while")[0]
        raise UserError(f"cannot listen on {host} port {port} ({reason}); give another --host or --port") from error


def url_of(listener: socket.socket) -> str:
    """The address clients use, e.g. http://127.0.0.1:8000."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if listener.family == socket.AF_INET6 else f"http://{host}:{port}"


class Server(uvicorn.Server):
    """Serves an ASGI app; calls `ready` once requests are accepted and `stop` before it waits for open answers."""

    def __init__(self, app: Any, ready: Callable[[], None], stop: Callable[[], None]) -> None:
        super().__init__(
            uvicorn.Config(
                app, log_level="warning", access_log=False, lifespan="off", timeout_graceful_shutdown=GRACE_S
            )
        )
        self._ready, self._stop = ready, stop

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._stop()
        await super().shutdown(sockets)
