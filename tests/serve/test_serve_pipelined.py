"""Raw connections with several requests: an error of the server never lands inside an answer."""

import json
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest
from live_server import LATE_S, gated, make_engine, serving, wait_until

from dflash_toolkit import Target
from dflash_toolkit.serve.server import Connection

LONG = {"model": "org/tiny", "prompt": [1], "max_tokens": 50, "ignore_eos": True, "temperature": 0}
LATE_BODY = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{"
PIPELINED = {
    "late body": (LATE_BODY, b"408"),
    "late header": (b"GET /version HTTP/1.1\r\nHo", b"408"),
    "no HTTP": (b"\0\0\r\n\r\n", b"400"),
    "broken chunk": (b"POST /tokenize HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n", b"400"),
    "long header": (b"GET /version HTTP/1.1\r\nX: " + b"a" * 65536, b"431"),
}


def post(**more: object) -> bytes:
    body = json.dumps(LONG | more).encode()
    return b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)


def address(url: str) -> tuple[str, int]:
    host, port = url.removeprefix("http://").split(":")
    return host, int(port)


@contextmanager
def connected(url: str) -> Iterator[socket.socket]:
    with socket.create_connection(address(url), LATE_S) as client:
        yield client


@pytest.mark.parametrize("name", PIPELINED)
@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.sampled
def test_error_follows_the_open_answer(
    target: Target, monkeypatch: pytest.MonkeyPatch, name: str, streamed: bool
) -> None:
    sent, status = PIPELINED[name]
    engine = make_engine(target, None)
    with gated(engine, 2) as gate, serving(engine) as url, connected(url) as client:
        client.sendall(post(stream=streamed))
        gate.wait()
        monkeypatch.setattr(Connection, "client_timeout_s", 0.2)
        begin = client.recv(1) if streamed else b""
        for part in (sent[:-1], sent[-1:]):
            client.sendall(part)
            time.sleep(0.3)
        gate.open()
        first, second = (begin + client.makefile("rb").read()).split(b"HTTP/1.1 ")[1:]
    assert first.startswith(b"200") and second.startswith(status)
    if streamed:
        assert first.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    else:
        assert json.loads(first.partition(b"\r\n\r\n")[2])["usage"]["completion_tokens"] == 50


def test_pipelined_body_may_come_after_the_first_answer(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, body = make_engine(target, None), b'{"prompt":"a"}'
    header = b"POST /tokenize HTTP/1.1\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body)
    with gated(engine, 2) as gate, serving(engine) as url, connected(url) as client:
        client.sendall(post(stream=True))
        gate.wait()
        monkeypatch.setattr(Connection, "client_timeout_s", 0.2)
        client.sendall(header)
        time.sleep(0.4)
        monkeypatch.undo()
        gate.open()
        got = b""
        while b"[DONE]" not in got:
            got += client.recv(4096)
        client.sendall(body)
        assert b'"count":1' in client.makefile("rb").read()


def test_client_that_left_a_pipelined_answer_frees_its_row(target: Target) -> None:
    engine = make_engine(target, None)
    with gated(engine, 2) as gate, serving(engine) as url:
        with connected(url) as client:
            client.sendall(post(stream=True, max_tokens=500) + LATE_BODY)
            gate.wait()
        wait_until(lambda: "dflash_requests_open 0.0" in httpx.get(f"{url}/metrics", timeout=LATE_S).text)


def test_half_closed_pipelining_client_gets_all_answers(target: Target) -> None:
    engine = make_engine(target, None)
    with gated(engine, 2) as gate, serving(engine) as url, connected(url) as client:
        client.sendall(post(stream=True) + post(stream=True))
        client.shutdown(socket.SHUT_WR)
        gate.wait()
        time.sleep(0.1)  # the server sends probes
        gate.open()
        got = client.makefile("rb").read()
    answers = got.split(b"HTTP/1.1 200 OK\r\n")[1:]
    assert len(answers) == 2 and b"100 Continue" not in answers[0][: answers[0].rindex(b"[DONE]")]
    assert all(b"data: [DONE]\n\n\r\n0\r\n\r\n" in answer for answer in answers)
