"""Local servers with replies that a test defines."""

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from programs import Program

Reply = tuple[int, bytes, dict[str, str]]


@contextlib.contextmanager
def stand_in(answer: Callable[[BaseHTTPRequestHandler, bytes], Reply | None]) -> Iterator[str]:
    """The address of a server that answers a request and its body with a status, a body and headers, or hangs up."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = answer(self, self.rfile.read(int(self.headers.get("Content-Length", 0))))
            if found is None:
                self.connection.close()  # in the middle of the reply
                return
            status, body, headers = found
            self.send_response(status)
            for name, value in ({"Content-Length": len(body)} | headers).items():
                self.send_header(name, str(value))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_HEAD = do_POST = do_GET

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


class Fake:
    """An inference server: `reply` makes the status and body of an answer from the request and its number.

    A status of 0 hangs up.
    """

    def __init__(self) -> None:
        self.reply: Callable[[dict[str, Any], int], tuple[int, Any]] = lambda body, number: (200, whole("fine"))
        self.asked: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.sends: dict[str, str] = {}  # headers
        self.models = ["tiny"]
        self.listing = 200  # the status of the list of models
        self.url = ""

    def answer(self, request: BaseHTTPRequestHandler, content: bytes) -> Reply | None:
        if request.command == "GET":
            status, reply = self.listing, {"data": [{"id": name} for name in self.models]}
        else:
            body = json.loads(content)
            self.asked.append(body)
            self.headers.append(dict(request.headers))
            status, reply = self.reply(body, len(self.asked))
        data = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
        return (status, data, self.sends) if status else None


def whole(text: str, *, ids: list[int] | None = None, reason: str = "stop", count: int | None = None) -> dict[str, Any]:
    """A reply of /v1/completions; the tests' tokens are bytes."""
    written = len(text.encode()) + (reason == "stop")
    choice = {"index": 0, "text": text, "finish_reason": reason} | ({} if ids is None else {"token_ids": ids})
    return {"choices": [choice], "usage": {"completion_tokens": written if count is None else count}}


@pytest.fixture
def fake() -> Iterator[Fake]:
    state = Fake()
    with stand_in(state.answer) as state.url:
        yield state


@pytest.fixture
def command(fake: Fake, dflash_data: Program) -> Program:
    """dflash-data that asks the fake server, one prompt at a time."""

    def argv(*words: Any) -> list[str]:
        return dflash_data.argv(*words[:3], "--endpoint", fake.url, "--batch-size", "1", *words[3:])

    return replace(dflash_data, argv=argv)
