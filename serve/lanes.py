"""Request bodies, and threads for the long ones."""

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from fastapi import Request

from .protocol import ApiError

MAX_BODY = 4 * 1024 * 1024  # bytes
MOST_STRINGS = 65536  # in a body, names too; each is an object that takes time to make
TINY_BODY = 8 * 1024  # bytes; read and encoded in less time than a thread gets the interpreter from a busy loop
SHORT_BODY = 64 * 1024  # bytes; what is longer waits for others like it, and nobody else for it
CLIENT_CLOSED_REQUEST = 499  # nginx's status for an answer that nobody waits for
T = TypeVar("T")


class Lanes:
    """Threads that read bodies and encode texts: those of long bodies never keep a short one waiting."""

    def __init__(self) -> None:
        self._short, self._long = ThreadPoolExecutor(2, "short texts"), ThreadPoolExecutor(2, "long texts")

    async def parsed(self, request: Request, parse: Callable[[bytes], T]) -> T:
        """What `parse` makes of the request's body. Raises ApiError, as `parse` and `read_body` do."""
        raw = await read_body(request)
        if (strings := raw.count(b'"') - raw.count(b'\\"')) > 2 * MOST_STRINGS:
            raise ApiError(400, f"the body holds {strings // 2} strings; at most {MOST_STRINGS} are read")
        request.state.size = len(raw)
        return await self.run(request, lambda: parse(raw)) if len(raw) > SHORT_BODY else parse(raw)

    async def run(self, request: Request, work: Callable[[], T]) -> T:
        """The result of `work`, for a request that `parsed` has read; done in a thread, unless it is tiny.

        Raises:
            ApiError: (499) the client of a long one has left; work that had not begun is not done.
        """
        if request.state.size <= TINY_BODY:
            return work()
        loop = asyncio.get_running_loop()
        if request.state.size <= SHORT_BODY:
            return await loop.run_in_executor(self._short, work)
        done = await unless_disconnected(request, _single(loop.run_in_executor(self._long, work)))
        if done is None:
            raise ApiError(CLIENT_CLOSED_REQUEST, "the client left")
        return done[0]


async def _single(work: Awaitable[T]) -> tuple[T]:
    return (await work,)


async def read_body(request: Request) -> bytes:
    """The request body. Raises ApiError as soon as it is longer than MAX_BODY bytes, or when the client leaves."""
    too_long = ApiError(413, f"the request body is longer than {MAX_BODY} bytes", code="request_too_large")
    if int(request.headers.get("content-length", 0)) > MAX_BODY:
        raise too_long
    body = bytearray()
    more = True
    while more:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ApiError(CLIENT_CLOSED_REQUEST, "the client left before it had sent its request")
        body += message.get("body", b"")
        if len(body) > MAX_BODY:  # a chunked body does not announce its length
            raise too_long
        more = message.get("more_body", False)
    return bytes(body)


async def unless_disconnected(request: Request, work: Awaitable[T]) -> T | None:
    """The result of `work`, or None when the client left first; `work` is then cancelled."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        leaving.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
