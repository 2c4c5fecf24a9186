"""Reads request bodies, and runs long work in threads so that it does not block the event loop."""

import asyncio
import re
from collections.abc import Awaitable, Callable, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias, TypeVar

from fastapi import Request

from .protocol import ApiError, Body, clipped
from .unknown import UnknownFields

MAX_BODY = 4 * 1024 * 1024  # bytes
MAX_STRINGS = 65536  # in a body, names included; creating each takes time
MAX_LISTS = 65536  # in a body, objects included
STRING = re.compile(rb'"[^"\\]*+(?:\\.?[^"\\]*+)*+"?', re.DOTALL)  # in JSON; matches at every quote, in linear time
TINY_BODY = 8 * 1024  # bytes; parsed and encoded faster than a thread gets the interpreter lock from a busy loop
SHORT_BODY = 64 * 1024  # bytes; longer bodies have threads of their own and wait only for each other
CLIENT_CLOSED_REQUEST = 499  # nginx's status for a request after its client has left
T = TypeVar("T")
Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]


class ThreadPools:
    """Parses bodies and encodes texts in threads; a short body never waits for a long one.

    Args:
        unknown: checks the fields of bodies.
    """

    def __init__(self, unknown: UnknownFields) -> None:
        self._unknown = unknown
        self._short, self._long = ThreadPoolExecutor(2, "short texts"), ThreadPoolExecutor(2, "long texts")

    async def parsed(self, request: Request, parse: Callable[[bytes], Body]) -> Body:
        """Reads and parses the request's body, and notes its ignored fields for the response's header.

        Raises:
            ApiError: as `parse` and `read_body` do, or the body has a field that is refused.
        """
        raw = await read_body(request)
        if (strings := raw.count(b'"') - raw.count(b'\\"')) > 2 * MAX_STRINGS:
            raise ApiError(400, f"the body has {strings // 2} strings; send at most {MAX_STRINGS}")
        if _brackets(raw) > MAX_LISTS and (lists := _brackets(STRING.sub(b"", raw))) > MAX_LISTS:
            raise ApiError(400, f"the body has {lists} lists and objects; send at most {MAX_LISTS}")
        request.state.size = len(raw)

        def checked() -> tuple[Body, list[str]]:
            body = parse(raw)
            return body, self._unknown.check(body)

        body, request.state.ignored = await self.run(request, checked) if len(raw) > SHORT_BODY else checked()
        return body

    async def run(self, request: Request, work: Callable[[], T]) -> T:
        """Runs `work` for a request that `parsed` has read, in a thread unless its body is tiny.

        Raises:
            ApiError: (499) the client of a long request has left; work that has not started is skipped.
        """
        if request.state.size <= TINY_BODY:
            return work()
        loop = asyncio.get_running_loop()
        if request.state.size <= SHORT_BODY:
            return await loop.run_in_executor(self._short, work)
        done = await unless_disconnected(request.receive, _single(loop.run_in_executor(self._long, work)))
        if done is None:
            raise ApiError(CLIENT_CLOSED_REQUEST, "the client closed the connection")
        return done[0]


def _brackets(raw: bytes) -> int:
    return raw.count(b"[") + raw.count(b"{")


async def _single(work: Awaitable[T]) -> tuple[T]:
    return (await work,)


async def read_body(request: Request) -> bytes:
    """Reads the body.

    Raises:
        ApiError: the body is compressed, or as soon as it is longer than MAX_BODY bytes, or when the client leaves.
    """
    if (coding := request.headers.get("content-encoding", "").lower()) not in ("", "identity"):
        message_415 = f"the body has Content-Encoding {clipped(coding, 50)}; send it without compression"
        raise ApiError(415, message_415, code="unsupported_content_encoding")
    message_413 = f"the request body is longer than {MAX_BODY} bytes; shorten the request or split it"
    too_long = ApiError(413, message_413, code="request_too_large")
    if int(request.headers.get("content-length", 0)) > MAX_BODY:
        raise too_long
    body = bytearray()
    more = True
    while more:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ApiError(CLIENT_CLOSED_REQUEST, "the client closed the connection before it sent the whole request")
        body += message.get("body", b"")
        if len(body) > MAX_BODY:  # a chunked body does not announce its length
            raise too_long
        more = message.get("more_body", False)
    return bytes(body)


async def unless_disconnected(receive: Receive, work: Awaitable[T]) -> T | None:
    """Awaits `work`; cancels it and returns None if the client leaves first."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        leaving.cancel()
        if not working.done():  # its `finally` blocks run
            await asyncio.wait({working})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
