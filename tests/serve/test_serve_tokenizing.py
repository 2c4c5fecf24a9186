"""`/tokenize`, `/detokenize`, and the limits on long texts and bodies."""

import contextlib
import difflib
import http.client
import json
import threading
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient
from live_server import LATE_S, make_app, make_engine, serving, wait_until
from pydantic import ValidationError

from dflash_toolkit import Target, __version__
from dflash_toolkit.data.prompts import encode_chat
from dflash_toolkit.serve.endpoints.chat import MAX_MESSAGES, ChatRequest
from dflash_toolkit.serve.endpoints.completions import CompletionRequest
from dflash_toolkit.serve.endpoints.tokens import DetokenizeRequest
from dflash_toolkit.serve.protocol import ApiError
from dflash_toolkit.serve.thread_pools import MAX_LISTS, MAX_STRINGS, SHORT_BODY
from dflash_toolkit.serve.tokenizing import Encoder
from dflash_toolkit.serve.unknown import MAX_NAME, UnknownFields

MESSAGES = [{"role": "user", "content": "Why is the sky blue?"}]


@pytest.fixture(scope="module")
def client(target: Target) -> TestClient:
    return TestClient(make_app(make_engine(target, None), "m"))


def test_tokenize_and_detokenize_round_trip(client: TestClient, target: Target) -> None:
    tokenizer = target.tokenizer
    reply = client.post("/tokenize", json={"model": "m", "prompt": "a blue sky", "return_token_strs": True}).json()
    ids = tokenizer.encode("a blue sky")
    assert reply["tokens"] == ids and reply["count"] == len(ids) and reply["max_model_len"] > 0
    assert reply["token_strs"] == tokenizer.convert_ids_to_tokens(ids)
    assert client.post("/detokenize", json={"tokens": ids}).json() == {"prompt": tokenizer.decode(ids)}
    chat = client.post("/tokenize", json={"messages": MESSAGES}).json()
    assert chat["tokens"] == encode_chat(tokenizer, MESSAGES) and chat["token_strs"] is None
    chat_body = {"model": "m", "messages": MESSAGES, "max_tokens": 1}
    assert client.post("/v1/chat/completions", json=chat_body).json()["usage"]["prompt_tokens"] == chat["count"]


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/tokenize", {}, "either `prompt` or `messages`"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, "either `prompt` or `messages`"),
        ("/tokenize", {"promt": "b"}, "either `prompt` or `messages`"),
        ("/detokenize", {"tokens": [100000]}, "token 100000 is out of range"),
        ("/detokenize", {"tokens": [-1]}, "token -1 is out of range"),
        ("/detokenize", {}, "tokens"),
    ],
)
def test_invalid_tokenize_body_gets_400(client: TestClient, path: str, body: dict[str, Any], words: str) -> None:
    reply = client.post(path, json=body)
    assert reply.status_code == 400 and words in reply.json()["error"]["message"]
    assert client.post(path, json={"model": "other", "prompt": "a", "tokens": [1]}).status_code in (400, 404)


def test_version_needs_no_key(client: TestClient) -> None:
    assert client.get("/version").json() == {"version": __version__}


def test_too_long_text_is_refused_before_it_is_encoded(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = Encoder(target.tokenizer, 5)
    longest = max(len(token.encode()) for token in target.tokenizer.get_vocab())
    assert encoder.text("é" * 3) == target.tokenizer.encode("é" * 3)
    monkeypatch.setattr(type(target.tokenizer), "encode", lambda *_, **__: pytest.fail("it was encoded"))
    for ask in (encoder.text, lambda text: encoder.chat([{"role": "user", "content": text}])):
        with pytest.raises(ApiError, match=rf"5 tokens .* {5 * longest};"):
            ask("a" * (5 * longest + 1))


def test_short_texts_overtake_long_ones_and_lost_clients_are_skipped(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, gate, real = [], threading.Event(), Encoder.text

    def held(self: Encoder, text: str, *more: Any, **options: Any) -> list[int]:
        if len(text) > SHORT_BODY:
            began.append(text)
            gate.wait(LATE_S)
        return real(self, text, *more, **options)

    monkeypatch.setattr(Encoder, "text", held)
    with serving(make_engine(target, None)) as url:

        def post(text: str) -> http.client.HTTPConnection:
            connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=LATE_S)
            connection.request("POST", "/tokenize", json.dumps({"prompt": text}))
            return connection

        long = [post("a" * (SHORT_BODY + 1)) for _ in range(2)]
        wait_until(lambda: len(began) == 2)
        for left in [post("b" * (SHORT_BODY + 1)) for _ in range(3)]:
            wait_until(lambda: httpx.get(f"{url}/health").status_code == 200)
            left.close()
        wait_until(lambda: 'status="499"} 3.0' in httpx.get(f"{url}/metrics").text)
        assert httpx.post(f"{url}/tokenize", json={"prompt": "hello"}, timeout=LATE_S).status_code == 200
        gate.set()
        assert [one.getresponse().status for one in long] == [400, 400], "no context holds them"
    assert len(began) == 2


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (ChatRequest, {"messages": [1] * 9}),
        (ChatRequest, {"messages": [{"role": "user", "content": [1] * 9}]}),
        (ChatRequest, {"messages": [{"role": "user", "content": ""}], "tools": [1] * 9}),
        (ChatRequest, {"messages": [{"role": "user", "content": ""}] * (MAX_MESSAGES + 1)}),
        (CompletionRequest, {"prompt": "a", "stop_token_ids": ["a"] * 9}),
        (DetokenizeRequest, {"tokens": ["a"] * 9}),
    ],
)
def test_only_the_first_error_in_a_list_is_reported(kind: Any, body: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as found:
        kind.model_validate(body | {"model": "m"})
    assert found.value.error_count() == 1


def test_long_body_is_parsed_outside_the_event_loop(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    threads, real = [], ChatRequest.parse
    monkeypatch.setattr(
        ChatRequest, "parse", lambda body: threads.append(threading.current_thread().name) or real(body)
    )
    body = {"model": "m", "messages": [{"role": "user", "content": "a" * SHORT_BODY}]}
    assert client.post("/v1/chat/completions", json=body).status_code == 400
    assert threads[0].startswith("long")
    body["stop"] = ["a"] * (MAX_STRINGS + 1)
    refused = client.post("/v1/chat/completions", json=body)
    assert refused.status_code == 400 and f"at most {MAX_STRINGS}" in refused.text and len(threads) == 1


def test_lists_are_counted_before_a_body_is_parsed(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed, real = [], ChatRequest.parse
    monkeypatch.setattr(ChatRequest, "parse", lambda body: parsed.append(len(body)) or real(body))
    body = {"model": "m", "messages": [{"role": "user", "content": "a"}]}
    for nested in ([[]] * MAX_LISTS, [{}] * MAX_LISTS, ['\\"', "\\", [[]] * MAX_LISTS]):
        refused = client.post("/v1/chat/completions", json=body | {"metadata": nested})
        assert refused.status_code == 400 and f"at most {MAX_LISTS}" in refused.text and not parsed
    body["messages"][0]["content"] = '[{"\\' * MAX_LISTS
    assert "context" in client.post("/v1/chat/completions", json=body).text and parsed, "text is not counted"


def test_long_parameter_name_is_cut_before_it_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    compared, real = [], difflib.get_close_matches
    monkeypatch.setattr(
        difflib, "get_close_matches", lambda name, *more: compared.append(len(name)) or real(name, *more)
    )
    body = CompletionRequest.parse(json.dumps({"model": "m", "prompt": "a", "b" * 5000: 1}).encode())
    for strict in (False, True):
        with pytest.raises(ApiError, match="not a parameter") if strict else contextlib.nullcontext():
            UnknownFields(strict).check(body)
    assert compared == [MAX_NAME], "once for a name"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (f"/{'a' * 30000}", {}),
        (f"/v1/models/{'a' * 30000}", {}),
        ("/v1/completions", {"model": "a" * 30000, "prompt": "a"}),
        ("/v1/completions", {"model": "m", "prompt": "a", "structured_outputs": {"a" * 30000: 1}}),
    ],
)
def test_error_quotes_little_of_the_request(client: TestClient, path: str, body: dict[str, Any]) -> None:
    reply = client.post(path, json=body) if body else client.get(path)
    assert reply.status_code in (400, 404) and reply.json()["error"]["message"] and len(reply.content) < 1500
