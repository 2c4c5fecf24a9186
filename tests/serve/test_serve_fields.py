"""Fields of requests that the server does not know: they are ignored, and a header and the log name them."""

import copy
import json
import logging
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient
from live_server import MESSAGES, make_app, make_engine
from reciting import make_reciting

from dflash_toolkit import Target
from dflash_toolkit.serve.unknown import MAX_LISTED, MAX_LOGGED, MAX_NAME

HEADER = "X-Dflash-Ignored-Parameters"
CHAT: dict[str, Any] = {"model": "m", "messages": MESSAGES, "max_tokens": 3, "temperature": 0}
TEXT: dict[str, Any] = {"model": "m", "prompt": "The sky", "max_tokens": 3, "temperature": 0}
ITEMS: dict[str, Any] = {"model": "m", "input": "The sky", "max_output_tokens": 3, "temperature": 0}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": TEXT,
    "/v1/responses": ITEMS,
    "/tokenize": {"prompt": "The sky"},
    "/detokenize": {"tokens": [5, 6]},
}


@pytest.fixture(scope="module")
def target() -> Target:
    return make_reciting()


@pytest.fixture
def client(target: Target) -> Iterator[TestClient]:
    with TestClient(make_app(make_engine(target, None), "m")) as client:
        yield client


@pytest.fixture(scope="module")
def strict(target: Target) -> Iterator[TestClient]:
    with TestClient(make_app(make_engine(target, None), "m", strict_parameters=True)) as client:
        yield client


def ignored(reply: httpx.Response) -> list[str]:
    """Returns the ignored fields that the header of a successful response lists."""
    assert reply.status_code == 200, reply.text
    return reply.headers.get(HEADER, "").split(", ")


def answer_of(reply: httpx.Response) -> Any:
    found = reply.json()
    return found.get("choices") or found.get("output", [{}])[0].get("content") or found


@pytest.mark.parametrize("path", BODIES)
def test_unknown_fields_are_ignored_and_listed(client: TestClient, path: str) -> None:
    body, extra = BODIES[path], {"keep_alive": 5, "provider": {"order": ["x"]}, "nothing": None}
    reply = client.post(path, json=body | extra)
    assert ignored(reply) == ["keep_alive", "provider"]
    plain = client.post(path, json=body)
    assert HEADER not in plain.headers and answer_of(reply) == answer_of(plain)
    if path.startswith("/v1/"):
        with client.stream("POST", path, json=body | extra | {"stream": True}) as streamed:
            assert ignored(streamed) == ["keep_alive", "provider"]
            streamed.read()


@pytest.mark.parametrize(
    ("path", "more", "name"),
    [
        ("/v1/chat/completions", {"messages": [MESSAGES[0] | {"id": "1"}]}, "messages.id"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "x": 1}]}]},
         "messages.content.x"),
        ("/v1/chat/completions", {"stream": True, "stream_options": {"chunk_size": 1}}, "stream_options.chunk_size"),
        ("/v1/chat/completions", {"response_format": {"type": "text", "strict": True}}, "response_format.strict"),
        ("/v1/completions", {"structured_outputs": {"regex": "a", "backend": "auto"}}, "structured_outputs.backend"),
        ("/v1/completions", {"speculative": {"depth": 3}}, "speculative.depth"),
        ("/v1/responses", {"input": [{"role": "user", "content": "a", "phase": "x"}]}, "input.phase"),
        ("/v1/responses", {"text": {"tone": "dry"}}, "text.tone"),
        ("/tokenize", {"prompt": None, "messages": [{"role": "user", "content": "a", "id": "1"}]}, "messages.id"),
    ],
)  # fmt: skip
def test_unknown_nested_fields_are_listed_by_path(
    client: TestClient, strict: TestClient, path: str, more: dict[str, Any], name: str
) -> None:
    assert ignored(client.post(path, json=BODIES[path] | more)) == [name]
    reply = strict.post(path, json=BODIES[path] | more)
    assert reply.status_code == 400 and reply.json()["error"]["param"] == name


@pytest.mark.parametrize("path", BODIES)
def test_strict_parameters_refuse_unknown_fields(strict: TestClient, path: str) -> None:
    assert strict.post(path, json=BODIES[path]).status_code == 200
    for name, value, hint in (("keep_alive", 5, "omit it"), ("x" * 5000, None, "omit it"), ("modle", "m", "`model`?")):
        reply = strict.post(path, json=BODIES[path] | {name: value})
        error = reply.json()["error"]
        assert (reply.status_code, error["code"], error["param"]) == (400, "unknown_parameter", name[:MAX_NAME])
        assert hint in error["message"] and len(error["message"]) < 300


def test_log_names_each_unknown_field_once(client: TestClient, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            for path in ("/v1/completions", "/v1/chat/completions"):
                client.post(path, json=BODIES[path] | {"max_token": 2, "keep_alive": 1, "user": "me"})
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2 and "`max_token`" in lines[0] and "`keep_alive`" in lines[1]
    assert "did you mean `max_tokens`?" in lines[0]


def test_header_and_log_of_unknown_fields_are_bounded(client: TestClient, caplog: pytest.LogCaptureFixture) -> None:
    names = ["a\r\nSet-Cookie: b=\u2028é", "x" * 1_000_000, *(f"n{i}" for i in range(1000))]
    listed = ignored(client.post("/v1/completions", json=TEXT | dict.fromkeys(names, 1)))
    assert listed[:3] == ["a__Set-Cookie__b___", "x" * MAX_NAME, "n0"] and len(listed) == MAX_LISTED
    with caplog.at_level(logging.WARNING):
        for i in range(MAX_LOGGED + 10):
            client.post("/tokenize", json={"prompt": "a", f"m{i}": 1})
    assert 0 < sum(each.msg.startswith("ignored in") for each in caplog.records) <= MAX_LOGGED


def test_unsupported_field_that_changes_the_answer_gets_400(client: TestClient, strict: TestClient) -> None:
    for path, body in BODIES.items():
        if path.startswith("/v1/"):
            for server in (client, strict):
                error = server.post(path, json=body | {"use_beam_search": True}).json()["error"]
                assert (error["param"], error["code"]) == ("use_beam_search", "unsupported_parameter")
                assert server.post(path, json=body | {"use_beam_search": False}).status_code == 200


def test_completions_accept_max_completion_tokens(client: TestClient, strict: TestClient) -> None:
    body = {"model": "m", "prompt": "The sky", "ignore_eos": True, "max_completion_tokens": 5}
    for server in (client, strict):
        for more, tokens in (({}, 5), ({"max_tokens": 4}, 4), ({"max_tokens": 4, "max_completion_tokens": None}, 4)):
            reply = server.post("/v1/completions", json=body | more)
            assert reply.status_code == 200 and HEADER not in reply.headers
            assert reply.json()["usage"]["completion_tokens"] == tokens


@pytest.mark.parametrize("plain", [True, False], ids=["ignored", "strict"])
def test_template_variables_without_effect_are_listed(target: Target, plain: bool) -> None:
    """The fixture's template has `enable_thinking`; this one has no switch."""
    tokenizer = copy.deepcopy(target.tokenizer)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ note }}"
    engine = make_engine(target, None)
    engine.tokenizer = tokenizer
    fields: dict[str, Any] = {
        "reasoning_effort": "high", "thinking": {"type": "enabled"}, "reasoning": {"enabled": True},
        "enable_thinking": True, "chat_template_kwargs": {"note": "x", "depth": 3, "enable_thinking": False},
    }  # fmt: skip
    with TestClient(make_app(engine, "m", strict_parameters=not plain)) as client:
        body = CHAT | fields
        reply = client.post("/v1/chat/completions", json=body)
        if plain:
            names = ["chat_template_kwargs.depth", "reasoning_effort", "thinking", "reasoning", "enable_thinking"]
            assert ignored(reply) == names
            responses = client.post("/v1/responses", json=ITEMS | {"reasoning": {"effort": "low", "summary": "auto"}})
            assert ignored(responses) == ["reasoning_effort"]
        else:
            error = reply.json()["error"]
            assert (reply.status_code, error["param"]) == (400, "chat_template_kwargs.depth")
            assert "which uses: note" in error["message"]


def test_responses_accept_fields_without_effect(client: TestClient, strict: TestClient) -> None:
    fields = {
        "store": True, "max_tool_calls": 3, "truncation": "auto", "stream_options": {"include_obfuscation": True},
        "include": ["reasoning.encrypted_content"], "reasoning": {"summary": "auto", "generate_summary": "concise"},
        "service_tier": "flex", "text": {"verbosity": "low"}, "prompt_cache_key": "k",
    }  # fmt: skip
    for server in (client, strict):
        with server.stream("POST", "/v1/responses", json=ITEMS | fields | {"stream": True}) as streamed:
            assert streamed.status_code == 200 and HEADER not in streamed.headers
            *_, last = streamed.read().decode().strip().split("\n\n")
        found = json.loads(last.partition("data: ")[2])["response"]
        assert (found["store"], found["truncation"]) == (False, "auto")


def test_responses_truncation_auto_keeps_the_last_tokens(client: TestClient) -> None:
    long = ITEMS | {"input": "a" * 5000}
    assert client.post("/v1/responses", json=long).status_code == 400
    reply = client.post("/v1/responses", json=long | {"truncation": "auto"})
    assert reply.status_code == 200 and reply.json()["usage"]["input_tokens"] == 4096 - 3


def test_description_allows_unknown_fields_unless_strict(client: TestClient, strict: TestClient) -> None:
    for server, allowed in ((client, True), (strict, False)):
        schemas = server.get("/openapi.json").json()["components"]["schemas"]
        for name in ("ChatRequest", "ChatMessage", "StructuredOutputs", "ResponsesRequest", "TokenizeRequest"):
            assert schemas[name]["additionalProperties"] is allowed
        assert schemas["Function"]["additionalProperties"] is True


def test_pages_of_allowed_sites_can_read_the_header(target: Target) -> None:
    origin = "https://chat.example"
    with TestClient(make_app(make_engine(target, None), "m", allowed_origins=[origin])) as client:
        reply = client.post("/tokenize", json={"prompt": "a", "keep_alive": 5}, headers={"Origin": origin})
    assert ignored(reply) == ["keep_alive"] and reply.headers["access-control-allow-origin"] == origin
    assert HEADER.lower() in reply.headers["access-control-expose-headers"]
