"""Hostile requests for every field and route: each is answered, and the server stays responsive and small."""

import asyncio
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from conftest import LONG_RUN
from fastapi.testclient import TestClient
from forked import Command
from live_server import LATE_S, make_app, make_engine
from reciting import make_reciting

from dflash_toolkit.serve.endpoints.chat import ChatRequest
from dflash_toolkit.serve.endpoints.completions import CompletionRequest
from scripts import fuzz
from scripts.fuzz_cases import Case, Cases, request

GREEDY = {"model": "m", "prompt": "The sky", "max_tokens": 30, "temperature": 0, "ignore_eos": True}
CASE = Case("chat", (request("POST", "/v1/chat/completions", b"{}"),), method="post", path="/v1/chat/completions")
ERROR = b'{"error": {"message": "m", "type": "invalid_request_error", "param": null, "code": null}}'


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    with TestClient(make_app(make_engine(make_reciting(), None), "m")) as client:
        return client.get("/openapi.json").json()


@pytest.fixture
def url(target_dir: Path, drafter_dir: Path, tmp_path: Path) -> Iterator[tuple[str, Command]]:
    argv = ["--target", str(target_dir), "--drafter", str(drafter_dir), "--port", "0", "--device", "cpu"]
    argv += ["--served-model-name", "m", "--tool-call-parser", "hermes"]
    process = Command("dflash_toolkit.serve.cli", argv, tmp_path)
    try:
        yield process.line().split()[1].removesuffix("/v1"), process
    finally:
        process.kill()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_hostile_requests_harm_no_other_client(url: tuple[str, Command]) -> None:
    address, process = url
    seed = random.randrange(1 << 32) if LONG_RUN else 0
    print(f"seed {seed}")

    async def run() -> tuple[fuzz.Fuzzer, list[str]]:
        fuzzer = fuzz.Fuzzer(address, await fuzz.description(address), seed)
        async with httpx.AsyncClient(base_url=address, timeout=LATE_S) as client:

            async def answer() -> str:
                return str((await client.post("/v1/completions", json=GREEDY)).json()["choices"][0]["text"])

            answers = [await answer()]
            fuzzing = asyncio.create_task(
                fuzzer.run(6000 if LONG_RUN else len(fuzzer.cases) + 150, 4, fuzz.Watch(address, process.pid))
            )
            while not fuzzing.done():
                answers.append(await answer())
                await asyncio.sleep(0.2)
            await fuzzing
            return fuzzer, answers

    fuzzer, answers = asyncio.run(run())
    assert fuzzer.failures == []
    assert fuzz.bad_lines(process.err.read_text()) == []
    assert len({*answers}) == 1 and answers[0]
    assert fuzzer.counts["200"] > 50 and fuzzer.counts["400"] > 50, "some are accepted, and some refused"


def test_every_parameter_gets_a_hostile_value(document: dict[str, Any]) -> None:
    cases = Cases(document, 0)
    names = {case.name for case in map(cases.case, range(len(cases)))}
    for path, body in (("/v1/chat/completions", ChatRequest), ("/v1/completions", CompletionRequest)):
        for field in body.model_fields.keys() - {*body.elsewhere}:
            assert any(name.startswith(f"POST {path} .{field} = ") for name in names), (path, field)
    for field in ("messages[].content[].text", "tools[].function.name", "response_format.json_schema.schema"):
        assert any(name.startswith(f"POST /v1/chat/completions .{field} = ") for name in names), field


def test_a_case_depends_only_on_its_seed_and_number(document: dict[str, Any]) -> None:
    numbers = [0, 5, 700, 701, 900]
    first, again = ([Cases(document, seed).case(number) for number in numbers] for seed in (3, 3))
    assert first == again != [Cases(document, 4).case(number) for number in numbers]


def replied(status: int, body: bytes, kind: str = "application/json", whole: bool = True) -> fuzz.Replies:
    replies = fuzz.Replies(head=False)
    replies.feed(b"HTTP/1.1 %d x\r\ncontent-type: %s\r\n" % (status, kind.encode()))
    replies.feed(b"content-length: %d\r\n\r\n" % (len(body) + (not whole)) + body)
    return replies


@pytest.mark.parametrize(
    ("replies", "broken"),
    [
        (replied(400, ERROR), None),
        (replied(200, b"data: {}\n\ndata: [DONE]\n\n", "text/event-stream"), None),
        (replied(500, ERROR), "500"),
        (replied(503, ERROR), "503"),
        (replied(418, ERROR), "undescribed status"),
        (replied(400, b"{}"), "'error' is a required property"),
        (replied(400, b"Bad request"), "not JSON"),
        (replied(400, ERROR, whole=False), "0 whole answers"),
        (replied(405, ERROR), "no Allow header"),
        (replied(200, b"{}"), "is a required property"),
        (replied(200, b"data: {}\n\n", "text/event-stream"), "a stream without an end"),
        (replied(200, b'data: {"error": {"type": "server_error"}}\n\n', "text/event-stream"), "an error in a stream"),
        (fuzz.Replies(head=False), "0 whole answers"),
    ],
)
def test_each_rule_of_an_answer_can_be_broken(
    document: dict[str, Any], replies: fuzz.Replies, broken: str | None
) -> None:
    found = fuzz.Rules(document).broken(CASE, replies)
    assert found is None if broken is None else broken in (found or "")


def test_a_busy_loop_before_health_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz, "MAX_STALL", 5)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        until = time.thread_time() + 3 * fuzz.MAX_STALL * fuzz.loop_seconds()
        while time.thread_time() < until:
            pass
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

    async def watched() -> list[str]:
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            watch = fuzz.Watch(f"http://127.0.0.1:{port}", os.getpid())
            watching = asyncio.create_task(watch.run())
            while not watch.asked:
                await asyncio.sleep(0.01)
            watching.cancel()
            return watch.failures

    (failure,) = asyncio.run(watched())
    assert "loops of processor time" in failure
