"""Engines and HTTP servers on tiny models, and requests to them."""

import contextlib
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from openai import APIStatusError, OpenAI

from dflash_toolkit import Drafter, SamplingParams, Target
from dflash_toolkit.generation import Generation
from dflash_toolkit.runtime import AsyncEngine, EngineOptions, Progress, Responses, load_engine
from dflash_toolkit.serve.app import create_app
from dflash_toolkit.serve.config import ServeConfig
from dflash_toolkit.serve.server import Server, bind, url_of

LONG = SamplingParams(max_tokens=50, ignore_eos=True)
LATE_S = 60.0  # longest wait for an event; no test measures speed


def make_engine(target: Target, drafter: Drafter | None, **options: Any) -> AsyncEngine:
    """Returns the server's engine on tiny models, with the drafter's own block length."""
    options = {
        "num_speculative_tokens": drafter.config.block_size - 1 if drafter else 0,
        "page_size": 4,
        "max_num_seqs": 3,
    } | options
    return AsyncEngine(load_engine(target, drafter, options=EngineOptions(**options))[0], target.tokenizer)


def ask(engine: AsyncEngine, prompt: list[int], params: SamplingParams = LONG) -> Responses:
    return engine.decode([engine.request(prompt, params)])


async def collect(responses: Responses) -> list[Progress]:
    """Returns all progress of one request."""
    with responses:
        return [progress async for _, progress in responses]


class Gate:
    """Stops an engine after a number of turns; idle turns do not count.

    Attributes:
        done: turns that have passed.
    """

    def __init__(self, engine: AsyncEngine, turns: int) -> None:
        self.done, self._left, self._stopped, self._engine = 0, turns, False, engine
        self._changed = threading.Condition()

    def enter(self) -> None:
        with self._changed:
            self._stopped = self._left == 0
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._left != 0, LATE_S)
            self._stopped = False
            self._left -= 1
            self.done += 1

    def wait(self, more: int = 0) -> None:
        """Lets `more` turns pass, and waits until the engine stops before the next."""
        with self._changed:
            self._left += more
            self._stopped = self._stopped and not more
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self._stopped, LATE_S)

    def open(self) -> None:
        with self._changed:
            self._left = sys.maxsize
            self._changed.notify_all()

    def wait_idle(self) -> None:
        """Lets all turns pass until the engine is idle."""
        self.open()
        wait_until(lambda: self._engine.engine.scheduler.idle)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LATE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@contextlib.contextmanager
def gated(engine: AsyncEngine, turns: int) -> Iterator[Gate]:
    gate = Gate(engine, turns)
    real = engine.engine.step

    def step() -> bool:
        if not engine.engine.scheduler.idle:
            gate.enter()
        return real()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.engine, "step", step)
        try:
            yield gate
        finally:
            gate.open()


MESSAGES: list[Any] = [{"role": "user", "content": "Why is the sky blue?"}]


OF_SERVER = ("api_keys", "admin_keys", "excluded", "defaults", "state")  # arguments of `create_app`


def make_app(engine: AsyncEngine, name: str = "org/tiny", **options: Any) -> FastAPI:
    """Returns the application with options of `dflash-serve`, and with arguments of `create_app`."""
    own = {key: options.pop(key) for key in OF_SERVER if key in options}
    return create_app(engine, ServeConfig(target=name, **options), **own)


@contextlib.contextmanager
def serving(engine: AsyncEngine, port: int = 0, **options: Any) -> Iterator[str]:
    """Runs a server in a thread, and yields its URL."""
    ready = threading.Event()
    with bind("127.0.0.1", port) as listener:
        server = Server(make_app(engine, **options), ready=ready.set, stop=engine.close)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        url = url_of(listener)
        thread.start()
        try:
            assert ready.wait(LATE_S)
            yield url
        finally:
            server.should_exit = True
            thread.join(LATE_S)
    assert not thread.is_alive()


@pytest.fixture(scope="session")
def engine(target: Target, drafter: Drafter) -> AsyncEngine:
    return make_engine(target, drafter)


@pytest.fixture(scope="session")
def url(engine: AsyncEngine) -> Iterator[str]:
    with serving(engine) as url:
        yield url


def client_of(url: str, key: str = "none") -> OpenAI:
    return OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=LATE_S)


@pytest.fixture(scope="session")
def client(url: str) -> OpenAI:
    return client_of(url)


def chat(client: OpenAI, **options: Any) -> Any:
    return client.chat.completions.create(**{"model": "org/tiny", "messages": MESSAGES, "max_tokens": 20} | options)


def complete(client: OpenAI, **options: Any) -> Any:
    return client.completions.create(**{"model": "org/tiny", "prompt": "The sky", "max_tokens": 20} | options)


def joined(chunks: Any) -> tuple[str, str | None, Any]:
    """Returns text, finish reason and usage of a stream of either endpoint."""
    text, reason, usage = "", None, None
    for chunk in chunks:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            assert reason is None, "text after the finish reason"
            text += (choice.delta.content if hasattr(choice, "delta") else choice.text) or ""
            reason = choice.finish_reason
    return text, reason, usage


def text_of(target: Target, generation: Generation) -> str:
    tokens = generation.tokens[:-1] if generation.finish_reason == "stop" else generation.tokens
    return target.tokenizer.decode(tokens, skip_special_tokens=True)


def error_of(response: httpx.Response) -> dict[str, Any]:
    """Returns the error object after checking that it has OpenAI's form."""
    body = json.loads(response.read())
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    return body["error"]


def refusal(ask: Callable[..., Any], *args: Any, **options: Any) -> APIStatusError:
    """Returns the error of a request that must be refused."""
    with pytest.raises(APIStatusError) as caught:
        ask(*args, **options)
    assert error_of(caught.value.response)["type"] == "invalid_request_error"
    return caught.value
