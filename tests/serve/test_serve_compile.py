"""Grammars that take minutes to compile, next to those that take a moment."""

import asyncio
import contextlib
import json
import os
import select
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from conftest import EOS, VOCAB
from forked import Command
from grammar_trials import children, pid_of, running
from grammars import TOKENIZER, wide
from live_server import LATE_S, error_of, make_engine, serving, wait_until

from dflash_toolkit import SamplingParams, Target
from dflash_toolkit.grammar import Grammars
from dflash_toolkit.runtime import AsyncEngine, compile_queue
from dflash_toolkit.runtime import client as client_module
from dflash_toolkit.runtime.compile_queue import CompileQueue
from dflash_toolkit.runtime.wire import Compiled, Compiling
from dflash_toolkit.sampling import Grammar, GrammarError

SHORT = {"model": "org/tiny", "prompt": "x", "max_tokens": 3}
KEYS = {"Authorization": "Bearer a"}, {"Authorization": "Bearer b"}


@pytest.fixture(scope="module")
def engine(target: Target) -> AsyncEngine:
    return make_engine(target, None)


@pytest.fixture(scope="module")
def url(engine: AsyncEngine) -> Iterator[str]:
    with serving(engine, api_keys=["a", "b"]) as url:
        yield url


@pytest.fixture
def compiling(engine: AsyncEngine) -> Iterator[CompileQueue]:
    found = engine._loop.compiling
    yield found
    wait_until(lambda: not found._jobs and not found._used.total() and not children(pid_of(found._process)))


def structured(regex: str) -> dict[str, Any]:
    return SHORT | {"structured_outputs": {"regex": regex}}


@contextlib.contextmanager
def slow(url: str, number: int) -> Iterator[None]:
    """Sends a request with a grammar that takes minutes; leaves without the answer."""
    body = json.dumps(SHORT | {"structured_outputs": {"json": wide(number).text}}).encode()
    address = httpx.URL(url)
    with socket.create_connection((address.host, address.port)) as connected:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer a\r\nContent-Length: {len(body)}"
        connected.sendall(head.encode() + b"\r\n\r\n" + body)
        yield


def test_short_grammar_is_answered_next_to_four_slow_ones(url: str, compiling: CompileQueue) -> None:
    with contextlib.ExitStack() as leaving:
        for number in range(4):
            leaving.enter_context(slow(url, number))
        wait_until(lambda: compiling._used["slow"] == 2 and len(compiling._jobs) == 4)
        for header in KEYS:
            answer = httpx.post(f"{url}/v1/completions", json=structured(f"[a-{header['Authorization'][-1]}]"),
                                headers=header, timeout=LATE_S)  # fmt: skip
            assert answer.status_code == 200
        assert len(compiling._jobs) == 4
        process = pid_of(compiling._process)
        wait_until(lambda: len(children(process)) >= 2)
    wait_until(lambda: not compiling._jobs and not children(process))  # the clients have left


def test_one_key_cannot_fill_the_queue(url: str, compiling: CompileQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_queue, "MAX_OF_KEY", 2)
    with slow(url, 0), slow(url, 1):
        wait_until(lambda: len(compiling._jobs) == 2)
        refused, other = (
            httpx.post(f"{url}/v1/completions", json=structured("[0-9]{4}"), headers=header, timeout=LATE_S)
            for header in KEYS
        )
        assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
        assert "2 grammars of this API key" in error_of(refused)["message"]
        assert other.status_code == 200
        monkeypatch.setattr(compile_queue, "MAX_GRAMMARS", 2)
        full = httpx.post(f"{url}/v1/completions", json=structured("[0-9]{5}"), headers=KEYS[1], timeout=LATE_S)
        assert full.status_code == 429 and "2 grammars are compiled" in error_of(full)["message"]


def test_long_wait_in_the_queue_is_503(url: str, compiling: CompileQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(compile_queue.SLOTS, "fast", 0)
    monkeypatch.setattr(client_module, "COMPILE_QUEUE_S", 0.01)
    late = httpx.post(f"{url}/v1/completions", json=structured("[0-9]{6}"), headers=KEYS[0], timeout=LATE_S)
    assert late.status_code == 503 and late.headers["retry-after"] == "5"
    assert "has waited 0 s, as others are compiled" in error_of(late)["message"]


def test_time_to_compile_begins_when_it_starts(
    engine: AsyncEngine, compiling: CompileQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "COMPILE_S", 0.0)

    async def play() -> None:
        with monkeypatch.context() as patch:
            patch.setitem(compile_queue.SLOTS, "fast", 0)
            waiting = asyncio.ensure_future(engine.compile(SamplingParams(grammar=Grammar("regex", "q{3}"))))
            await asyncio.sleep(0)
            await engine.ping()
            assert len(compiling._jobs) == 1
            await engine.ping()
            assert not waiting.done(), "its time in the queue does not count"
        others = SamplingParams(grammar=Grammar("regex", "q{4}"))
        for late in (engine.compile(others), waiting):  # the queue starts both
            with pytest.raises(GrammarError, match="takes more than 0 s to compile"):
                await late

    asyncio.run(play())


@pytest.mark.slow
def test_keys_take_turns_to_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(compile_queue.SLOTS, "fast", 0)
    sent: list[tuple[str, Any]] = []
    grammars = Grammars(TOKENIZER, VOCAB, [EOS])
    compiling = CompileQueue(grammars, lambda params: None, lambda front, message: sent.append((front, message)))
    for number, key in enumerate("aaabb"):
        compiling.add(key, number, SamplingParams(grammar=Grammar("regex", f"a{{{number + 1}}}")), key)
    monkeypatch.setitem(compile_queue.SLOTS, "fast", 1)
    while compiling._jobs:
        compiling.finish()
        select.select([compiling.woken], [], [])
        compiling.finish()
    compiling.close()
    assert [front for front, message in sent if isinstance(message, Compiling)] == list("ababa")
    assert [message.error for _, message in sent if isinstance(message, Compiled)] == [None] * 5


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_grammar_process_ends_with_the_server(target_dir: Path, tmp_path: Path, number: int) -> None:
    argv = ["--target", str(target_dir), "--port", "0", "--device", "cpu", "--drain-timeout", "0"]
    process = Command("dflash_toolkit.serve.cli", [*argv, "--served-model-name", "org/tiny"], tmp_path)
    with contextlib.ExitStack() as ending:
        ending.callback(process.kill)
        url = process.line().split()[1].removesuffix("/v1")
        (engine,) = process.children()
        wait_until(lambda: len(children(engine)) == 1)
        (grammars,) = children(engine)
        with slow(url, 0):
            wait_until(lambda: len(children(grammars)) == 1)
            (trial,) = children(grammars)
            os.kill(process.pid if number == signal.SIGTERM else engine, number)
            wait_until(lambda: not any(running(pid) for pid in (grammars, trial)))
        assert number == signal.SIGKILL or process.end(LATE_S) == 0
