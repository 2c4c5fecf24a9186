"""The seam between HTTP and decoding: one request at a time, and nobody is waited for who does not wait himself."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import pytest

import serve.engine
from dflash_toolkit import Drafter, SamplingParams, Target, generate
from dflash_toolkit.decode import Generation, stream
from serve.app import EventResponse
from serve.engine import Engine, EngineClosedError

LONG = SamplingParams(max_new_tokens=50, ignore_eos=True)


class SlowSteps:
    """Stands in for `decode.stream`: 20 ms a step, with a record of the prompts and a count of the steps."""

    def __init__(self) -> None:
        self.prompts: list[list[int]] = []
        self.done = 0

    def __call__(self, target: Target, drafter: Drafter | None, ids: list[int], params: Any) -> Iterator[Generation]:
        self.prompts.append(ids)
        for generation in stream(target, drafter, ids, params):
            self.done += 1
            time.sleep(0.02)
            yield generation


def test_progress_adds_up_to_the_generation(target: Target, drafter: Drafter) -> None:
    expected = generate(target, drafter, [1, 2, 3], LONG)

    async def play() -> list[Any]:
        return [progress async for progress in Engine(target, drafter).decode([1, 2, 3], LONG)]

    told = asyncio.run(play())
    assert [token for progress in told for token in progress.tokens] == expected.tokens
    assert [progress.step for progress in told] == [None, *expected.steps]
    assert [progress.finish_reason for progress in told] == [None] * len(expected.steps) + ["length"]


def test_requests_run_in_the_order_of_arrival_even_when_the_first_is_not_read(target: Target) -> None:
    engine = Engine(target, None)

    async def play() -> list[int]:
        ended = []

        async def consume(number: int, tokens: int) -> None:
            async for _ in engine.decode([1], SamplingParams(max_new_tokens=tokens, ignore_eos=True)):
                pass
            ended.append(number)

        async with contextlib.aclosing(engine.decode([1], LONG)) as unread:
            await anext(unread)
            await asyncio.wait_for(asyncio.gather(consume(1, 20), consume(2, 1), consume(3, 5)), 10)
        return ended

    assert asyncio.run(play()) == [1, 2, 3]


def test_a_queued_request_that_is_given_up_is_never_decoded(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = SlowSteps()
    monkeypatch.setattr(serve.engine, "stream", slow)
    engine = Engine(target, None)

    async def play() -> None:
        async with contextlib.aclosing(engine.decode([1], LONG)) as running:
            await anext(running)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(anext(engine.decode([2], LONG)), 0.001)
        assert len([progress async for progress in engine.decode([3], SamplingParams(max_new_tokens=1))]) == 1

    asyncio.run(play())
    assert slow.prompts == [[1], [3]]
    assert slow.done <= 7, "the first stopped soon after it was left"


def test_closing_ends_running_and_queued_answers(target: Target) -> None:
    engine = Engine(target, None)

    async def play() -> list[Any]:
        async def consume() -> None:
            async for _ in engine.decode([1], SamplingParams(max_new_tokens=400, ignore_eos=True)):
                engine.close()

        return await asyncio.gather(consume(), consume(), return_exceptions=True)

    assert [type(error) for error in asyncio.run(play())] == [EngineClosedError, EngineClosedError]


def test_an_error_belongs_to_its_own_request(target: Target) -> None:
    engine = Engine(target, None)

    async def play() -> list[Any]:
        async def consume(prompt: list[int]) -> int:
            return len([p async for p in engine.decode(prompt, SamplingParams(max_new_tokens=2, ignore_eos=True))])

        return await asyncio.gather(consume([10**6]), consume([1]), return_exceptions=True)

    failed, served = asyncio.run(play())
    assert "token 1000000" in str(failed) and served == 2


def test_a_response_cancelled_while_it_sends_ends_its_generator() -> None:
    ended = []

    async def events() -> AsyncGenerator[bytes]:
        try:
            yield b"never gets through"
        finally:
            ended.append(True)

    async def play() -> list[bool]:
        sending = asyncio.Event()

        async def send(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.body":
                sending.set()
                await asyncio.Event().wait()  # a client that has stopped reading

        async def receive() -> dict[str, Any]:
            await sending.wait()
            return {"type": "http.disconnect"}

        response = EventResponse(events())
        await asyncio.wait_for(response({"type": "http", "asgi": {"spec_version": "2.3"}}, receive, send), 5)
        return list(ended)  # now, not whenever `response` is collected

    assert asyncio.run(play()) == [True]
