"""Middleware: gives every request an id and a log line, and refuses new answers while the server drains."""

import json
import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable, MutableMapping
from datetime import UTC, datetime
from typing import Any

from dflash_toolkit.runtime.connection import request_name

from .errors import error_response
from .protocol import ApiError
from .state import ServerState
from .unknown import HEADER

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Scope]]
Send = Callable[[Scope], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
REQUEST_ID = re.compile(rb"[\w.:-]{1,128}")
POLLED = frozenset({"/metrics", "/health", "/ready"})  # polled every few seconds; logging them would hide the others
log = logging.getLogger("dflash_toolkit.access")


class Access:
    """ASGI middleware.

    Every response carries `x-request-id`: the client's own, if it sent a plain one. A header lists the ignored fields
    of a body. The access line contains no query, header or text of a request. Successful requests to the routes in
    `POLLED` are not logged.
    """

    def __init__(self, app: App, state: ServerState, responded: Callable[[int], None] = lambda status: None) -> None:
        self._app, self._state, self._responded = app, state, responded

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        sent = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
        number = sent if REQUEST_ID.fullmatch(sent) else secrets.token_hex(8).encode()
        scope.setdefault("state", {})["request_id"] = number.decode()
        request_name.set(number.decode())
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if path.endswith("/") and path.strip("/"):  # a slash at the end changes nothing
            scope["path"], path = scope["path"].rstrip("/"), path.rstrip("/")
        began, status = time.perf_counter(), 0

        async def sending(message: Scope) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", number)]
                if ignored := scope["state"].get("ignored"):
                    message["headers"].append((HEADER, ", ".join(ignored).encode()))
            await send(message)

        try:
            if self._state.draining and scope["method"] == "POST":
                error = ApiError(503, "the server is shutting down", code="server_shutting_down")
                refusal = error_response(error, path)
                refusal.headers["connection"] = "close"
                await refusal(scope, receive, sending)
            else:
                await self._app(scope, receive, sending)
        finally:
            self._responded(status or 499)  # the client closed the connection
            if log.isEnabledFor(logging.INFO) and not (status == 200 and path in POLLED):
                client = scope.get("client")
                log.info(
                    "request",
                    extra={
                        "request_id": number.decode(),
                        "client": client[0] if client else "-",
                        "method": scope["method"],
                        "path": scope["path"][:200],
                        "status": status,
                        "seconds": round(time.perf_counter() - began, 4),
                    },
                )


FIELDS = ("request_id", "client", "method", "path", "status", "seconds")


class JsonLines(logging.Formatter):
    """Formats a record as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {name: getattr(record, name) for name in FIELDS if hasattr(record, name)}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


class PlainLines(logging.Formatter):
    """Formats a record as one line of text."""

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created).isoformat(sep=" ", timespec="milliseconds")
        fields = " ".join(json.dumps(str(getattr(record, name)))[1:-1] for name in FIELDS if hasattr(record, name))
        line = f"{when} {record.levelname.lower()} {fields or record.getMessage()}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def set_up_logs(as_json: bool, access: bool) -> None:
    """Sends the project's and uvicorn's log to stderr. A line that cannot be written (a full disk) is dropped."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if as_json else PlainLines())
    handler.handleError = lambda record: None  # type: ignore[method-assign]
    for name in ("dflash_toolkit", "uvicorn", "asyncio"):
        logger = logging.getLogger(name)
        logger.handlers[:], logger.propagate = [handler], False
        logger.setLevel(logging.WARNING)
    log.setLevel(logging.INFO if access else logging.WARNING)
