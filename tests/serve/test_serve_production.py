"""Limits, API keys, logs, draining and restarts of a server."""

import contextlib
import http.client
import json
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from forked import Command
from live_server import LATE_S, error_of, gated, make_engine, serving, wait_until

from dflash_toolkit import Target, UserError
from dflash_toolkit.serve import access
from dflash_toolkit.serve.keys import VARIABLE, matching, read_keys
from dflash_toolkit.serve.server import Connection, bind, raise_open_files

LONG = {"model": "org/tiny", "prompt": [1], "max_tokens": 50, "ignore_eos": True, "temperature": 0}


def test_idle_or_incomplete_request_gets_408(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Connection, "client_timeout_s", 0.3)
    starts = [
        b"",
        b"GET /health HTTP/1.1\r\nHost",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{",
    ]
    with serving(make_engine(target, None)) as url:
        address = (url.split("/")[2].split(":")[0], int(url.rsplit(":", 1)[1]))
        for start in starts:
            with socket.create_connection(address, LATE_S) as client:
                client.sendall(start)
                assert client.makefile("rb").read().startswith(b"HTTP/1.1 408")


def exchange(url: str, sent: bytes) -> bytes:
    """Sends bytes on a new connection, and returns all that the server answers until it closes the connection."""
    with socket.create_connection((url.split("/")[2].split(":")[0], int(url.rsplit(":", 1)[1])), LATE_S) as client:
        client.sendall(sent)
        return client.makefile("rb").read()


def test_header_over_64_kib_gets_431_before_it_ends(target: Target) -> None:
    begin, limit = b"GET /health HTTP/1.1\r\nConnection: close\r\n", 64 * 1024
    chunks = b"POST /tokenize HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n"
    with serving(make_engine(target, None), api_keys=["key"]) as url:
        for head, line in ((begin, b"X: " + b"a" * limit), (begin, b"X: a\r\n" * limit), (b"GET /", b"a" * limit)):
            assert exchange(url, (head + line)[: limit + 1]).startswith(b"HTTP/1.1 431")
        assert b"HTTP/1.1 431" in exchange(url, (chunks + b"X: a\r\n" * limit)[: 2 * limit + 1]), "trailers"
        for line in (b"X: " + b"a" * (limit - len(begin) - 7), b"X: a\r\n" * 10000):
            assert exchange(url, begin + line + b"\r\n\r\n").startswith(b"HTTP/1.1 200")
        many = (begin.replace(b"close", b"keep-alive") + b"X: " + b"a" * 1000 + b"\r\n\r\n") * 100
        assert exchange(url, many + begin + b"\r\n").count(b"HTTP/1.1 200") == 101


@pytest.mark.parametrize("protocol", ["h2c", "websocket"])
def test_upgrade_is_ignored_and_the_body_is_kept(
    target: Target, caplog: pytest.LogCaptureFixture, protocol: str
) -> None:
    body = json.dumps({"prompt": "hello"}).encode()
    start = f"POST /tokenize HTTP/1.1\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: {protocol}\r\n".encode()
    start += b"HTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA\r\nHost: x\r\n"
    whole = start + b"Content-Length: %d\r\n\r\n" % len(body) + body
    chunked = start + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    last = b"GET /health HTTP/1.1\r\nConnection: close, Upgrade\r\nUpgrade: h2c\r\n\r\n"
    with serving(make_engine(target, None)) as url:
        got = exchange(url, whole + chunked + last)
        address = (url.split("/")[2].split(":")[0], int(url.rsplit(":", 1)[1]))
        with socket.create_connection(address, LATE_S) as client:  # the body after its header, as Java sends it
            cut = len(whole) - len(body)
            client.sendall(whole[:cut])
            wait_until(lambda: httpx.get(f"{url}/health").status_code == 200)
            client.sendall(whole[cut:] + last)
            parts = client.makefile("rb").read()
        assert exchange(url, b"CONNECT x:80 HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.1 400")
    assert got.count(b"HTTP/1.1 200") == 3 and got.count(b'"tokens":[') == 2
    assert parts.count(b"HTTP/1.1 200") == 2 and parts.count(b'"tokens":[') == 1
    assert not [record for record in caplog.records if "pgrade" in record.getMessage()]


@pytest.mark.parametrize("streamed", [False, True])
def test_half_closed_client_gets_its_answer(target: Target, streamed: bool) -> None:
    engine = make_engine(target, None)
    body = json.dumps(LONG | {"stream": streamed}).encode()
    request = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    request += b"Content-Length: %d\r\n\r\n" % len(body)
    with gated(engine, 1) as gate, serving(engine) as url:
        address = (url.split("/")[2].split(":")[0], int(url.rsplit(":", 1)[1]))
        with socket.create_connection(address, LATE_S) as client:
            client.sendall(request + body)
            client.shutdown(socket.SHUT_WR)
            gate.wait()
            if streamed:
                assert client.recv(4096)  # the response has begun
            time.sleep(0.1)  # the server sends probes
            gate.open()
            got = client.makefile("rb").read()
    if streamed:
        assert b"\r\n3\r\n:\n\n\r\n" in b"\r\n" + got and got.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    else:
        probes, answer = got.split(b"HTTP/1.1 200 OK\r\n")
        assert probes and not probes.replace(b"HTTP/1.1 100 Continue\r\n\r\n", b"")
        assert b'"completion_tokens":50' in answer


def test_connections_over_the_limit_get_503_until_one_closes(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(make_engine(target, None)) as url:
        address = (url.split("/")[2].split(":")[0], int(url.rsplit(":", 1)[1]))
        monkeypatch.setattr(Connection, "limit", Connection.open.total + 2)
        with contextlib.ExitStack() as stack:

            def filled() -> bool:  # connections of other servers of this process may end
                stack.enter_context(socket.create_connection(address, LATE_S))
                return Connection.open.total >= Connection.limit

            wait_until(filled)
            with socket.create_connection(address, LATE_S) as third:
                assert third.makefile("rb").read().startswith(b"HTTP/1.1 503")
        wait_until(lambda: httpx.get(f"{url}/health", timeout=LATE_S).status_code == 200)


def test_open_file_limit_is_raised_and_leaves_spare_files() -> None:
    import resource

    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, before[0]), before[1]))
        most = raise_open_files()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > most
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_full_queue_gets_429_with_retry_after(target: Target) -> None:
    engine = make_engine(target, None, max_num_seqs=1)
    with gated(engine, 1) as gate, serving(engine, max_queue=1) as url:
        post = lambda body: httpx.post(f"{url}/v1/completions", json=body, timeout=LATE_S)  # noqa: E731
        kept: list[Any] = []
        thread = threading.Thread(target=lambda: kept.append(post(LONG | {"n": 2})))
        thread.start()
        gate.wait()
        refused = post(LONG)
        assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
        assert error_of(refused)["code"] == "queue_full"
        gate.open()
        thread.join(LATE_S)
        assert kept[0].status_code == 200 and post(LONG).status_code == 200


@pytest.mark.parametrize("streamed", [False, True])
def test_late_answer_is_aborted_and_its_pages_are_freed(target: Target, streamed: bool) -> None:
    engine = make_engine(target, None)
    with gated(engine, 2) as gate, serving(engine, request_timeout=0.2) as url:
        reply = httpx.post(f"{url}/v1/completions", json=LONG | {"stream": streamed}, timeout=LATE_S)
        assert reply.status_code == (200 if streamed else 504) and "deadline_exceeded" in reply.text
        gate.wait_idle()
        assert engine.engine.pool.used == 0


def test_turns_are_fair_over_keys(target: Target) -> None:
    engine = make_engine(target, None)
    keys = []
    real = engine.request
    engine.request = lambda *args, key, **more: keys.append(key) or real(*args, key=key, **more)  # type: ignore
    with serving(engine, api_keys=["one", "two"]) as url:
        for key in ("two", "one", "two"):
            headers = {"Authorization": f"Bearer {key}"}
            assert httpx.post(f"{url}/v1/completions", json=LONG, headers=headers, timeout=LATE_S).status_code == 200
    assert keys == ["1", "0", "1"], "which key, and never the key itself"


def test_keys_come_from_a_file_and_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    file = tmp_path / "keys"
    file.write_text("# team a\none \n\ntwo\n")
    assert read_keys(None) == () and read_keys(str(file)) == ("one", "two")
    monkeypatch.setenv(VARIABLE, "three, four")
    assert read_keys(str(file)) == ("one", "two", "three", "four")
    assert [matching(("one", "two"), given) for given in ("two", "tw", "", "twoo")] == [1, None, None, None]
    for text in ("", "# nothing\n", "a b\n", "schlüssel\n"):
        file.write_text(text)
        with pytest.raises(UserError):
            read_keys(str(file))
    monkeypatch.setenv(VARIABLE, "a,,b")
    with pytest.raises(UserError, match="empty key"):
        read_keys(None)


def test_responses_have_an_id_and_logs_omit_request_text(target: Target, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, access.log.name)
    with serving(make_engine(target, None)) as url:
        own = httpx.get(f"{url}/version?secret=1", headers={"X-Request-Id": "mine-1", "Authorization": "Bearer xyzzy"})
        assert own.headers["x-request-id"] == "mine-1"
        wild = httpx.get(f"{url}/nowhere", headers={"X-Request-Id": "a\tb"})
        assert wild.headers["x-request-id"] not in ("", "a\tb")
    lines = [json.loads(access.JsonLines().format(record)) for record in caplog.records]
    assert [(line["path"], line["status"], line["request_id"]) for line in lines] == [
        ("/version", 200, "mine-1"),
        ("/nowhere", 404, wild.headers["x-request-id"]),
    ]
    assert not any(word in access.PlainLines().format(r) for r in caplog.records for word in ("secret", "xyzzy"))


@pytest.mark.parametrize("root_path", ["", "/proxied"])
def test_successful_polls_are_not_logged_and_failures_are(
    target: Target, caplog: pytest.LogCaptureFixture, root_path: str
) -> None:
    caplog.set_level(logging.INFO, access.log.name)
    key = {"Authorization": "Bearer right"}
    with serving(make_engine(target, None), api_keys=["right"], root_path=root_path) as url:
        for path in ("/metrics", "/health", "/ready", "/v1/models"):
            assert httpx.get(f"{url}{path}", headers=key).status_code == 200
        assert httpx.get(f"{url}/metrics").status_code == 401
    lines = [(record.__dict__["path"], record.__dict__["status"]) for record in caplog.records]
    assert lines == [("/v1/models", 200), ("/metrics", 401)]


def test_client_that_does_not_read_is_disconnected(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(make_engine(target, None)) as url, socket.socket() as slow:
        before = Connection.open.total
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect((url.split("/")[2].split(":")[0], int(url.rsplit(":", 1)[1])))
        zero = target.tokenizer.convert_tokens_to_ids("\u0100")  # JSON writes this byte with six characters
        body = json.dumps({"tokens": [zero] * 500_000}, separators=(",", ":")).encode()
        slow.sendall(b"POST /detokenize HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        monkeypatch.setattr(Connection, "client_timeout_s", 0.3)
        assert slow.recv(12) == b"HTTP/1.1 200"
        wait_until(lambda: Connection.open.total == before)
        assert httpx.get(f"{url}/health", timeout=LATE_S).status_code == 200
        read = 0
        with contextlib.suppress(ConnectionError):
            while chunk := slow.recv(1 << 20):
                read += len(chunk)
        assert read < 3_000_000, "it was cut off"


def test_listening_sockets_have_keepalive() -> None:
    with bind("127.0.0.1", 0) as listener:
        listener.listen()
        with socket.create_connection(listener.getsockname()), listener.accept()[0] as accepted:
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 60


# ---- the whole command ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def command(target_dir: Path, folder: Path, *options: str, **more: Any) -> Iterator[Command]:
    """Runs `dflash-serve`; its processes are forked from one that has imported everything."""
    argv = ["--target", str(target_dir), "--port", "0", "--device", "cpu", "--served-model-name", "org/tiny", *options]
    process = Command("dflash_toolkit.serve.cli", argv, folder, **more)
    try:
        yield process
    finally:
        process.kill()


def test_killed_engine_restarts_and_open_answers_finish(target_dir: Path, tmp_path: Path) -> None:
    path, template = str(tmp_path / "socket"), tmp_path / "template"
    template.write_text("{{ messages[0]['content'] }}")
    options = ("also", "--uds", path, "--chat-template", str(template), "--restart", "--log-json", "--no-access-log")
    client = httpx.Client(
        transport=httpx.HTTPTransport(uds=path), base_url="http://x", timeout=LATE_S,
        headers={"Authorization": "Bearer k"},
    )  # fmt: skip
    with client as c, command(target_dir, tmp_path, *options, DFLASH_API_KEY="k") as process:  # `also`: a second name
        assert f"unix:{path}" in process.line()
        ask = lambda: c.post("/v1/completions", json=LONG)  # noqa: E731
        before = ask().json()["choices"][0]["text"]
        (engine,) = process.children()
        os.kill(engine, signal.SIGKILL)
        killed = time.monotonic()
        wait_until(lambda: c.get("/ready").status_code == 503)
        assert time.monotonic() - killed < LATE_S
        for refused in (ask(), c.get("/health"), c.get("/ready")):
            assert refused.status_code == 503 and int(refused.headers["retry-after"]) > 0
            assert error_of(refused)["code"] == "engine_restarting" and "is restarting" in refused.text
        wait_until(lambda: c.get("/ready").status_code == 200)
        assert ask().json()["choices"][0]["text"] == before

        assert [card["id"] for card in c.get("/v1/models").json()["data"]] == ["org/tiny", "also"]
        chat = {"model": "also", "messages": [{"role": "user", "content": "abc"}]}
        assert c.post("/tokenize", json=chat).json()["count"] == 3, "the template shows nothing else"
        with c.stream("POST", "/v1/completions", json=LONG | {"stream": True, "max_tokens": 200}) as reply:
            events = reply.iter_lines()
            next(events)
            os.kill(process.pid, signal.SIGTERM)
            lines = [line for line in events if line]
        assert lines[-1] == "data: [DONE]" and "length" in lines[-2], "the answer is whole"
        assert process.end(LATE_S) == 0
        assert not os.path.exists(path)
        with pytest.raises((OSError, http.client.HTTPException)), socket.socket(socket.AF_UNIX) as late:
            late.connect(path)
    log = [json.loads(line) for line in process.err.read_text().splitlines()]
    assert any("ended by itself (exit code -9)" in line["message"] for line in log)
    assert not process.children()


@pytest.mark.parametrize("fronts", ["1", "2"])
def test_draining_server_listens_and_is_not_ready(target_dir: Path, tmp_path: Path, fronts: str) -> None:
    with command(target_dir, tmp_path, "--api-server-count", fronts, "--drain-timeout", "300") as process:
        url = process.line().split()[1].removesuffix("/v1")
        (engine, *_) = process.children()
        with httpx.stream("POST", f"{url}/v1/completions", json=LONG | {"stream": True, "max_tokens": 400}) as running:
            next(events := running.iter_lines())
            os.kill(engine, signal.SIGSTOP)  # keeps the request running
            os.kill(process.pid, signal.SIGTERM)

            def draining() -> bool:  # each on a new connection; a front without requests may end in between
                with contextlib.suppress(httpx.TransportError):
                    return (
                        httpx.get(f"{url}/ready", timeout=2).status_code == 503
                    )  # before the drain the engine is asked
                return False

            for _ in range(3):
                wait_until(draining)
            refused = httpx.post(f"{url}/v1/completions", json=LONG, timeout=LATE_S)
            assert refused.status_code == 503 and int(refused.headers["retry-after"]) > 0
            assert error_of(refused)["code"] == "server_shutting_down"
            os.kill(engine, signal.SIGCONT)
            assert "data: [DONE]" in list(events)
        assert process.end(LATE_S) == 0


def test_front_ends_share_address_queue_and_counts_and_end_together(target_dir: Path, tmp_path: Path) -> None:
    options = ("--api-server-count", "3", "--max-num-seqs", "1", "--max-queue", "0")
    with command(target_dir, tmp_path, *options) as process:
        url = process.line().split()[1].removesuffix("/v1")
        ask = lambda **more: httpx.post(f"{url}/v1/completions", json=LONG | more, timeout=LATE_S)  # noqa: E731
        # each on its own connection, which any front-end process may accept
        assert len({ask().json()["choices"][0]["text"] for _ in range(12)}) == 1
        for _ in range(6):
            counted = httpx.get(f"{url}/metrics").text
            assert 'dflash_requests_total{outcome="length"} 12.0' in counted
            assert 'vllm:generation_tokens_total{model_name="org/tiny"} 600.0' in counted
            assert 'vllm:time_to_first_token_seconds_bucket{le="+Inf",model_name="org/tiny"} 12.0' in counted
            assert "dflash_requests_open 0.0" in counted and counted.count("vllm:num_requests_running{") == 1
        engine, *fronts = process.children()
        with httpx.stream("POST", f"{url}/v1/completions", json=LONG | {"stream": True, "max_tokens": 200}) as running:
            next(events := running.iter_lines())
            os.kill(engine, signal.SIGSTOP)  # keeps the request running
            assert {ask().status_code for _ in range(8)} == {429}, "the only place is taken, whichever front has it"
            os.kill(engine, signal.SIGCONT)
            assert "data: [DONE]" in list(events)
        os.kill(fronts[0], signal.SIGKILL)
        assert process.end(LATE_S) == 1
    assert "front1 ended by itself (exit code -9); the server ends" in process.err.read_text()
    assert not any(Path(f"/proc/{pid}").exists() for pid in (engine, *fronts)), "the other processes end too"


def test_requests_are_answered_if_no_log_can_be_written(target_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with command(target_dir, tmp_path, "--uds", str(path), said="/dev/full") as process:

        def answered() -> bool:
            with contextlib.suppress(httpx.TransportError), httpx.Client(transport=transport) as client:
                return client.post("http://x/v1/completions", json=LONG).status_code == 200
            return False

        wait_until(path.exists)
        for _ in range(3):
            transport = httpx.HTTPTransport(uds=str(path))
            wait_until(answered)
        os.kill(process.pid, signal.SIGTERM)
        assert process.end(LATE_S) == 0
