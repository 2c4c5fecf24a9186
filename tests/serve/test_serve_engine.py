"""The engine client and loop: batching, cancellation, failures, closing and metrics."""

import asyncio
import gc
import json
import re
import socket
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from types import SimpleNamespace as Namespace
from typing import Any

import httpx
import pytest
from conftest import make_drafter, make_target
from fastapi.testclient import TestClient
from live_server import LATE_S, LONG, Gate, ask, collect, gated, make_app, make_engine, wait_until

from dflash_toolkit import Drafter, SamplingParams, Target, generate
from dflash_toolkit.runtime import (
    AsyncEngine,
    EngineClosedError,
    EngineOptions,
    Progress,
    Request,
    SyntheticAcceptance,
    load_engine,
)
from dflash_toolkit.runtime import loop as loop_module
from dflash_toolkit.runtime.connection import RequestFailedError
from dflash_toolkit.runtime.wire import Channel
from dflash_toolkit.serve import processes
from dflash_toolkit.serve.config import AdaptOptions
from dflash_toolkit.serve.service import EventResponse


def test_progress_adds_up_to_the_generation(target: Target, drafter: Drafter) -> None:
    expected = generate(target, drafter, [1, 2, 3], LONG)

    async def play() -> list[Progress]:
        return await collect(ask(make_engine(target, drafter), [1, 2, 3]))

    found = asyncio.run(play())
    assert [token for progress in found for token in progress.tokens] == expected.tokens
    assert [progress.step for progress in found] == [None, *expected.steps]
    assert [progress.finish_reason for progress in found] == [None] * len(expected.steps) + ["length"]


def test_device_failure_without_rows_is_noticed(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(target, None)
    client = TestClient(make_app(engine, "m"), raise_server_exceptions=False)
    body = {"model": "m", "prompt": [1, 2], "max_tokens": 4}
    assert client.post("/v1/completions", json=body).status_code == 200

    def dead(*_: object) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    for name in ("start_prefill", "check"):
        monkeypatch.setattr(engine.engine.runner, name, dead)
    assert client.post("/v1/completions", json=body).status_code == 503
    wait_until(lambda: client.get("/health").status_code != 200)
    assert client.get("/health").status_code == 503
    assert client.post("/v1/completions", json=body).json()["error"]["code"] == "engine_failed"


def test_failing_request_ends_alone_and_is_logged(
    target: Target, drafter: Drafter, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine(target, drafter)
    real = engine.engine.runner.decode

    def decode(requests: Sequence[Any], block: int) -> Any:
        if any(request.prompt_ids == [7, 7] for request in requests):
            raise RuntimeError("secret details")
        return real(requests, block)

    monkeypatch.setattr(engine.engine.runner, "decode", decode)

    async def play() -> list[Any]:
        tasks = [collect(ask(engine, prompt)) for prompt in ([1], [7, 7], [2, 3])]
        return await asyncio.gather(*tasks, return_exceptions=True)

    first, failed, last = asyncio.run(play())
    assert isinstance(failed, RequestFailedError)
    for found, prompt in ((first, [1]), (last, [2, 3])):
        tokens = [token for progress in found for token in progress.tokens]
        assert tokens == generate(target, drafter, prompt, LONG).tokens
    client = TestClient(make_app(engine, "m"))
    body = {"model": "m", "prompt": [7, 7], "max_tokens": 9, "ignore_eos": True}
    reply = client.post("/v1/completions", json=body, headers={"x-request-id": "that-one"})
    assert reply.status_code == 500 and reply.json()["error"]["code"] == "request_failed"
    assert "secret" not in reply.text and "request that-one failed" in caplog.text and "secret details" in caplog.text
    assert client.get("/health").status_code == 200


def test_failed_recovery_ends_requests_and_serves_later_ones(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(target, None)
    runner, faults = engine.engine.runner, {"decode": 1, "remove": 1}

    def faulty(name: str) -> Callable[..., Any]:
        real = getattr(runner, name)

        def run(*args: Any) -> Any:
            if faults[name] and (name == "decode" or not faults["decode"]):
                faults[name] -= 1
                raise RuntimeError("of the device")
            return real(*args)

        return run

    for name in faults:
        monkeypatch.setattr(runner, name, faulty(name))

    async def play() -> list[Any]:
        with pytest.raises(RequestFailedError):
            await collect(ask(engine, [1]))
        assert not runner.state.active.any() and faults == {"decode": 0, "remove": 0}
        return await collect(ask(engine, [3]))

    expected = generate(target, None, [3], LONG).tokens
    assert [token for progress in asyncio.run(play()) for token in progress.tokens] == expected


@pytest.mark.parametrize("fails", [False, True])
def test_an_idle_engine_captures_what_is_missing(
    target: Target, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fails: bool
) -> None:
    """One step at a time, so that a request waits for one of them at most."""
    monkeypatch.setattr(loop_module, "IDLE_S", 0.01)
    engine, missing = make_engine(target, None), list(range(40))

    def prepare(everything: bool) -> bool:
        assert everything and engine.engine.scheduler.idle
        if fails:
            missing.clear()
            raise RuntimeError("out of memory")
        return bool(missing and missing.pop() + 1)

    monkeypatch.setattr(engine.engine, "prepare", prepare)
    client = TestClient(make_app(engine, "m"))
    body = {"model": "m", "prompt": [1, 2], "max_tokens": 4}
    for _ in range(2):
        assert client.post("/v1/completions", json=body).status_code == 200
    wait_until(lambda: not missing)
    assert engine.engine.runner.graphs.started, "requests wait for few captures"
    assert client.post("/v1/completions", json=body).status_code == 200
    assert caplog.text.count("could not be captured") == fails


def test_hung_step_fails_the_health_check(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(target, None)
    app = make_app(engine, "m")

    async def play() -> list[int]:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://m") as client:

            async def statuses() -> list[int]:
                return [(await client.get(path)).status_code for path in ("/health", "/ready")]

            with gated(engine, 0) as gate:
                asking = asyncio.ensure_future(collect(ask(engine, [1])))
                await asyncio.sleep(0)  # it sends the ping
                await asyncio.to_thread(gate.wait)
                with monkeypatch.context() as patch:
                    patch.setattr("dflash_toolkit.serve.endpoints.health.ENGINE_TIMEOUT_S", 0.05)
                    hung = await statuses()
                gate.open()
                await asking
                return hung + await statuses()

    assert asyncio.run(asyncio.wait_for(play(), LATE_S)) == [503, 503, 200, 200]


def test_requests_run_together_even_when_the_first_is_not_read(target: Target) -> None:
    engine = make_engine(target, None)

    async def play() -> list[int]:
        ended = []

        async def consume(number: int, tokens: int) -> None:
            await collect(ask(engine, [1], SamplingParams(max_tokens=tokens, ignore_eos=True)))
            ended.append(number)

        # the first takes fifty, and the longest of the others two hundred
        with gated(engine, 40) as gate, ask(engine, [1]) as unread:
            await anext(unread)
            longest = asyncio.create_task(consume(1, 200))
            await asyncio.wait_for(asyncio.gather(consume(2, 5), consume(3, 1)), LATE_S)
            assert not longest.done()
            gate.open()
            await asyncio.wait_for(longest, LATE_S)
        return ended

    # the unread request leaves two rows, so the third request waits for the second
    assert asyncio.run(play()) == [2, 3, 1]


def test_cancelled_queued_request_is_never_decoded(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(target, None, max_num_seqs=1)
    joined: list[list[int]] = []
    real = engine.engine.runner.add
    monkeypatch.setattr(
        engine.engine.runner, "add", lambda row, r, *rest: joined.append(r.prompt_ids) or real(row, r, *rest)
    )

    async def play(gate: Gate) -> None:
        with ask(engine, [1]) as running:
            await anext(running)
            queued = asyncio.ensure_future(collect(ask(engine, [2])))
            await asyncio.sleep(0)
            await asyncio.to_thread(gate.wait, 3)
            assert not engine.engine.scheduler.idle and not queued.done()
            queued.cancel()
            with pytest.raises(asyncio.CancelledError):
                await queued
        gate.open()
        assert len(await collect(ask(engine, [3], SamplingParams(max_tokens=1)))) == 1

    with gated(engine, 2) as gate:
        asyncio.run(play(gate))
    assert joined == [[1], [3]]
    assert gate.done <= 9, "the first stopped when it was left"


def test_closing_ends_running_and_queued_answers(target: Target) -> None:
    engine = make_engine(target, None)

    async def play() -> list[Any]:
        async def consume() -> None:
            with ask(engine, [1], SamplingParams(max_tokens=400, ignore_eos=True)) as responses:
                async for _ in responses:
                    engine.close()

        return await asyncio.gather(consume(), consume(), return_exceptions=True)

    assert [type(error) for error in asyncio.run(play())] == [EngineClosedError, EngineClosedError]


def test_closing_ends_answers_before_a_long_step_ends(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(target, None)
    begun, over = threading.Event(), threading.Event()
    real = engine.engine.step

    def step() -> bool:
        if not engine.engine.scheduler.idle:
            begun.set()
            over.wait(2 * LATE_S)
        return real()

    monkeypatch.setattr(engine.engine, "step", step)

    async def play() -> None:
        asking = asyncio.ensure_future(anext(ask(engine, [1])))
        await asyncio.to_thread(begun.wait, LATE_S)
        engine.close()
        with pytest.raises(EngineClosedError):
            await asyncio.wait_for(asking, LATE_S)

    asyncio.run(play())
    assert not engine.join(0.1), "the step goes on"
    over.set()
    assert engine.join(LATE_S)


def test_closing_ends_the_thread_and_later_requests_are_refused(target: Target) -> None:
    engine = make_engine(target, None)

    async def first() -> Request:
        request = engine.request([1], LONG)
        await anext(engine.decode([request]))
        return request

    async def again(request: Request) -> None:
        engine.decode([request])

    request = asyncio.run(first())
    engine.close()
    assert engine.join(LATE_S)
    with pytest.raises(EngineClosedError):
        asyncio.run(first())
    with pytest.raises(EngineClosedError):
        asyncio.run(again(request))


def test_closed_event_loop_does_not_end_other_requests(target: Target) -> None:
    engine = make_engine(target, None)
    left_open = []

    async def first_of_many() -> None:
        left_open.append(ask(engine, [1]))
        await anext(left_open[-1])

    for _ in range(3):
        asyncio.run(asyncio.wait_for(first_of_many(), LATE_S))
    assert engine._thread.is_alive() and engine.broken is None


def test_device_failure_while_removing_a_request_ends_the_engine(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(target, None)

    def fail(row: int) -> None:
        raise RuntimeError("the device is gone")

    async def play() -> list[Any]:
        async def consume() -> None:
            await collect(ask(engine, [1]))

        with gated(engine, 2) as gate, ask(engine, [2]) as left:
            await anext(left)
            other = asyncio.create_task(consume())
            await asyncio.sleep(0)  # it sends the ping
            await asyncio.to_thread(gate.wait, 5)
            monkeypatch.setattr(engine.engine.runner, "remove", fail)
        found = await asyncio.gather(other, consume(), return_exceptions=True)
        return [type(error) for error in found]

    assert asyncio.run(asyncio.wait_for(play(), LATE_S)) == [EngineClosedError, EngineClosedError]
    assert "the device is gone" in str(engine.broken)
    health = TestClient(make_app(engine)).get("/health")
    assert health.status_code == 503 and "restart the server" in health.text


def test_cancelled_response_closes_its_generator() -> None:
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
                await asyncio.Event().wait()  # the client has stopped reading

        async def receive() -> dict[str, Any]:
            await sending.wait()
            return {"type": "http.disconnect"}

        response = EventResponse(events())
        await asyncio.wait_for(response({"type": "http", "asgi": {"spec_version": "2.3"}}, receive, send), LATE_S)
        return list(ended)  # before `response` is garbage-collected

    assert asyncio.run(play()) == [True]


def test_last_text_and_end_of_a_stream_are_one_write(target: Target) -> None:
    body = {"model": "m", "prompt": [1], "max_tokens": 1, "stream": True, "stream_options": {"include_usage": True}}

    async def play() -> list[bytes]:
        sent = []

        async def send(message: dict[str, Any]) -> None:
            sent.append(message.get("body", b""))

        async def receive() -> dict[str, Any]:
            if read:
                await asyncio.Event().wait()  # the client stays
            read.append(True)
            return {"type": "http.request", "body": json.dumps(body).encode()}

        read: list[bool] = []
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "query_string": b""}
        await asyncio.wait_for(make_app(engine, "m")(scope, receive, send), LATE_S)
        return [part for part in sent if part]

    engine = make_engine(target, None)
    (events,) = asyncio.run(play())
    engine.close()
    assert [b'"finish_reason":"length"' in events, b'"usage":{' in events, events.endswith(b"data: [DONE]\n\n")] == [
        True
    ] * 3


@pytest.mark.parametrize("failed", [False, True])
def test_error_code_separates_failure_from_shutdown(target: Target, failed: bool) -> None:
    engine = make_engine(target, None)
    if failed:
        engine._loop.failure = RuntimeError("the device is gone")
    engine.close()
    engine.join(LATE_S)
    client = TestClient(make_app(engine))
    reply = client.post("/v1/completions", json={"model": "org/tiny", "prompt": [1]})
    code = "engine_failed" if failed else "server_shutting_down"
    assert reply.status_code == 503 and reply.json()["error"]["code"] == code
    stream = client.post("/v1/completions", json={"model": "org/tiny", "prompt": [1], "stream": True})
    assert stream.status_code == 503 and stream.json() == reply.json(), "not an event of a stream that has begun"
    health = client.get("/health")
    assert (health.json()["error"]["code"] == code) if failed else health.status_code == 200


def test_the_metrics_hold_the_mean_acceptance_length(target: Target) -> None:
    """Also if a stop token was an accepted draft, so that no token of the target's own follows it."""
    certain = EngineOptions(
        num_speculative_tokens=7, page_size=4, max_num_seqs=3, synthetic=SyntheticAcceptance(rate=1.0)
    )
    engine = AsyncEngine(load_engine(target, make_drafter(target), options=certain)[0], target.tokenizer)
    client = TestClient(make_app(engine))
    steps = committed = accepted = 0
    for i in range(6):
        ask = {"model": "org/tiny", "prompt": [1, i], "max_tokens": 20, "ignore_eos": True, "temperature": 0}
        long = client.post("/v1/completions", json=ask | {"return_token_ids": True}).json()
        stops = {"stop_token_ids": [long["choices"][0]["token_ids"][11 + i % 3]], "ignore_eos": False}
        short = client.post("/v1/completions", json=ask | stops).json()
        for usage in (long["usage"], short["usage"]):
            steps += usage["dflash"]["verify_steps"]
            accepted += usage["dflash"]["accepted"]
            committed += usage["dflash"]["acceptance_length"] * usage["dflash"]["verify_steps"]
    text = client.get("/metrics").text
    counted = {name: float(value) for name, value in (x.split() for x in text.splitlines() if not x.startswith("#"))}
    of_model = '{model_name="org/tiny"}'
    assert counted["dflash_verify_steps_total"] == steps
    assert counted["vllm:spec_decode_num_accepted_tokens_total" + of_model] == accepted > committed - steps, (
        "no stop token was a draft"
    )
    assert counted["dflash_committed_tokens_total"] == pytest.approx(committed)


def test_acceptance_is_counted_by_prompt_length_and_key() -> None:
    target = make_target(limit=1024)
    options = EngineOptions(
        num_speculative_tokens=3, page_size=4, max_num_seqs=3, synthetic=SyntheticAcceptance(rate=0.5)
    )
    engine = AsyncEngine(load_engine(target, make_drafter(target), options=options)[0], target.tokenizer)
    keys = [f"secret{number}" for number in range(66)]
    client = TestClient(make_app(engine, api_keys=keys))
    used = {}
    for key, length, groups in ((0, 3, ("1-512", "0")), (1, 512, ("1-512", "1")), (1, 513, ("513-2048", "1")),
                                (64, 2, ("1-512", "other")), (65, 2, ("1-512", "other"))):  # fmt: skip
        body = {"model": "org/tiny", "prompt": [1] * length, "max_tokens": 20, "ignore_eos": True, "temperature": 0}
        headers = {"Authorization": f"Bearer {keys[key]}"}
        usage = client.post("/v1/completions", json=body, headers=headers).json()["usage"]["dflash"]
        for label, group in zip(("prompt_tokens", "api_key"), groups, strict=True):
            drafted, accepted = used.get((label, group), (0, 0))
            used[label, group] = drafted + usage["drafted"], accepted + usage["accepted"]
    text = client.get("/metrics", headers=headers).text
    assert "secret" not in text
    found: dict[tuple[str, str], dict[str, float]] = {}
    pattern = r'dflash:spec_decode_num_(\w+)_by_\w+_total\{(?:model_name="org/tiny"|,|(\w+)="([^"]*)")+\} (\S+)'
    for name, label, group, value in re.findall(pattern, text):
        found.setdefault((label, group), {})[name] = float(value)
    assert {place: (one["draft_tokens"], one["accepted_tokens"]) for place, one in found.items()} == used
    assert all(one["drafts"] >= one["draft_tokens"] / 3 > 0 for one in found.values())


def test_metrics_count_rows_of_steps_and_nodes_of_draft_trees(target: Target) -> None:
    options = EngineOptions(
        num_speculative_tokens=7, page_size=4, max_num_seqs=3, draft_tree=12, synthetic=SyntheticAcceptance(rate=0.6)
    )
    engine = AsyncEngine(load_engine(target, make_drafter(target), options=options)[0], target.tokenizer)
    client = TestClient(make_app(engine))
    ask = {"model": "org/tiny", "prompt": [1, 2], "max_tokens": 40, "ignore_eos": True, "temperature": 0}
    over_trees = client.post("/v1/completions", json=ask).json()["usage"]["dflash"]
    undrafted = ask | {"speculative": {"num_speculative_tokens": 0}}
    alone = client.post("/v1/completions", json=undrafted).json()["usage"]["dflash"]
    text = client.get("/metrics").text.replace('model_name="org/tiny",', "").replace('{model_name="org/tiny"}', "")
    counted = {name: float(value) for name, value in (x.split() for x in text.splitlines() if not x.startswith("#"))}

    def by_position(name: str) -> list[float]:
        found = (counted.get(f'{name}_total{{position="{k}"}}') for k in range(7))
        return [count for count in found if count is not None]

    rows = {13: over_trees["verify_steps"], 1: alone["verify_steps"]}
    assert {n: counted[f'dflash:steps_by_rows_total{{rows="{n}"}}'] for n in rows} == rows
    assert [x for x in counted if x.startswith("dflash:tree_steps_by_rows_total")] == [
        'dflash:tree_steps_by_rows_total{rows="13"}'
    ]
    assert counted['dflash:tree_steps_by_rows_total{rows="13"}'] == rows[13]
    assert counted["dflash:rows_verified_total"] == 13 * rows[13] + rows[1]
    verified, accepted = by_position("dflash:tree_nodes_per_pos"), by_position("dflash:tree_nodes_accepted_per_pos")
    assert len(verified) == len(accepted) == 7 and 0 < sum(verified) <= 12 * rows[13]
    assert all(a <= min(v, rows[13]) for a, v in zip(accepted, verified, strict=True)) and verified[0] > rows[13]
    # vLLM's counter has the tokens of the answers
    positions = by_position("vllm:spec_decode_num_accepted_tokens_per_pos")
    assert sum(positions) == over_trees["accepted"]
    assert 0 < over_trees["accepted"] <= sum(accepted)


def test_imported_objects_are_frozen_for_garbage_collection(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise each garbage collection would pause all answers."""
    found: list[int] = []
    options = EngineOptions(page_size=4, max_num_seqs=2, kv_cache_tokens=64)
    config: Any = Namespace(target=target, drafter=None, device="cpu", dtype="float32", runtime=options, threads=1,
                            chat_template=None, from_report=None, adaptation=AdaptOptions())  # fmt: skip

    def run(loop: loop_module.EngineLoop) -> None:
        found.append(len(gc.get_objects()))
        loop._listener.close()
        loop.compiling.close()

    monkeypatch.setattr(loop_module.EngineLoop, "run", run)
    monkeypatch.setattr(processes, "_read_grammars", lambda engine: None)
    for global_setting in ("dflash_toolkit.threads.use_threads", "transformers.utils.logging.disable_progress_bar"):
        monkeypatch.setattr(global_setting, lambda *given: None)
    near, far = socket.socketpair()
    gc.unfreeze()
    try:
        before = len(gc.get_objects())
        assert processes._serve(config, tmp_path / "engine.sock", Channel(far)) == 0
    finally:
        gc.freeze()
        near.close()
        far.close()
    assert found[0] < before / 10


def test_captures_delay_the_start_for_a_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    captured: list[int] = []

    def prepare() -> bool:
        captured.append(len(captured))
        return len(captured) < 9

    engine: Any = Namespace(prepare=prepare)
    monkeypatch.setattr(processes, "CAPTURE_S", 3600.0)
    processes._capture(engine)
    assert len(captured) == 9
    captured.clear()
    monkeypatch.setattr(processes, "CAPTURE_S", 0.0)
    processes._capture(engine)
    assert len(captured) == 1, "the loop captures the others"
