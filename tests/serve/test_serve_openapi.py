"""The description at /openapi.json compared with the routes; `make test-peers` adds schemathesis."""

import json
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient
from jsonschema import Draft202012Validator
from live_server import make_app, make_engine
from reciting import TOOLS, make_reciting
from starlette.routing import Route

from dflash_toolkit.serve.endpoints.responses_request import LOGPROBS

MESSAGES = [{"role": "user", "content": "Please: h"}]
CHAT = {"model": "m", "messages": MESSAGES, "max_tokens": 400}
TEXT = {"model": "m", "prompt": "a", "max_tokens": 4}
ITEMS = {"model": "m", "input": "Please: t", "max_output_tokens": 400}
FUNCTIONS = [{"type": "function"} | tool["function"] for tool in TOOLS]
MESSAGE = CHAT | {"messages": [{"role": "user", "content": "Please: t"}], "tools": []}
NAMED_TOOLS = [{"name": "now", "input_schema": {"type": "object"}}]
OFF = {"type": "disabled"}
BLOCK = {"type": "text", "text": "Please: a", "cache_control": {"type": "ephemeral"}}
NAMED = {"type": "function", "function": {"name": "now"}}


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    with TestClient(make_app(make_engine(make_reciting(), None), "m")) as client:
        yield client


@pytest.fixture(scope="module")
def document(client: TestClient) -> dict[str, Any]:
    return client.get("/openapi.json").json()


def check(document: dict[str, Any], schema: Any, value: Any) -> list[str]:
    """Returns the errors of a value by a schema of the document."""
    validator = Draft202012Validator({**schema, "components": document["components"]})
    return [f"{error.json_path}: {error.message[:200]}" for error in validator.iter_errors(value)]


def test_description_names_exactly_the_routes(client: TestClient, document: dict[str, Any]) -> None:
    def routes_of(routes: Any) -> Iterator[tuple[str, str]]:
        for route in routes:
            if isinstance(route, Route):
                yield from ((route.path.replace(":path", ""), method.lower()) for method in route.methods or ())
            else:
                yield from routes_of(route.original_router.routes)

    found = {(path, method) for path, method in routes_of(client.app.routes) if method != "head"}  # type: ignore[attr-defined]
    assert found == {(path, method) for path, methods in document["paths"].items() for method in methods}
    for schema in document["components"]["schemas"].values():
        Draft202012Validator.check_schema(schema)


TAKEN: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", CHAT | {"tools": TOOLS, "n": 2, "logprobs": True, "top_logprobs": 2}),
    ("/v1/chat/completions", CHAT | {"tools": TOOLS, "tool_choice": NAMED, "stop": "x", "seed": 1, "user": "me"}),
    ("/v1/chat/completions", CHAT | {"messages": [{"role": "user", "content": [{"type": "text", "text": "t"}]}]}),
    ("/v1/completions", TEXT | {"logprobs": 2, "stop": ["x"], "best_of": 1}),
    ("/v1/completions", TEXT | {"prompt": [[5, 6], "b"], "logit_bias": {"3": -1}, "suffix": None}),
    ("/v1/completions", TEXT | {"echo": True, "logprobs": 1, "max_tokens": 0}),
    ("/v1/completions", TEXT | {"prompt_logprobs": 1}),
    ("/v1/chat/completions", CHAT | {"prompt_logprobs": 0}),
    ("/v1/responses", ITEMS | {"tools": FUNCTIONS, "store": False, "return_token_ids": False}),
    ("/v1/responses", ITEMS | {"input": [{"role": "user", "content": "a"}], "include": [LOGPROBS]}),
    ("/v1/responses", ITEMS | {"tools": FUNCTIONS, "tool_choice": {"type": "function", "name": "now"}, "metadata": {}}),
    ("/v1/messages", MESSAGE),
    ("/v1/messages", MESSAGE | {"tools": NAMED_TOOLS, "tool_choice": {"type": "any"}, "thinking": OFF}),
    ("/v1/messages", MESSAGE | {"system": [BLOCK], "messages": [{"role": "user", "content": [BLOCK]}], "metadata": {}}),
    ("/v1/messages/count_tokens", {"model": "m", "messages": MESSAGES}),
    ("/v1/messages/count_tokens", {"model": "m", "messages": [{"role": "user", "content": None}]}),
    ("/tokenize", {"prompt": "a", "return_token_strs": True}),
    ("/tokenize", {"model": "m", "messages": MESSAGES}),
    ("/detokenize", {"tokens": [5, 6]}),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body"), TAKEN)
@pytest.mark.sampled
def test_described_bodies_are_accepted_and_replies_match(
    client: TestClient, document: dict[str, Any], path: str, body: Any
) -> None:
    operation = document["paths"][path]["post"]
    assert check(document, operation["requestBody"]["content"]["application/json"]["schema"], body) == []
    content = operation["responses"]["200"]["content"]
    reply = client.post(path, json=body)
    assert reply.status_code == 200, reply.text
    assert check(document, content["application/json"]["schema"], reply.json()) == []
    assert ("prompt_logprobs" in reply.text) == ("prompt_logprobs" in body)
    if "text/event-stream" in content and "prompt_logprobs" not in body:
        reply = client.post(path, json=body | {"stream": True})
        for line in reply.text.strip().split("\n\n"):
            data = line.rpartition("data: ")[2]
            event = content["text/event-stream"]["itemSchema"]["properties"]["data"]["anyOf"][1]
            assert data == "[DONE]" or check(document, event["contentSchema"], json.loads(data)) == []


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT | {"cache_salt": ""}),
        ("/v1/chat/completions", CHAT | {"reasoning_effort": "much"}),
        ("/v1/chat/completions", CHAT | {"messages": [{"role": "robot", "content": "a"}]}),
        ("/v1/chat/completions", CHAT | {"tool_choice": {"type": "allowed_tools"}}),
        ("/v1/completions", TEXT | {"prompt": {}}),
        ("/v1/completions", TEXT | {"suffix": "x"}),
        ("/v1/responses", ITEMS | {"background": True}),
        ("/v1/messages", MESSAGE | {"max_tokens": 0}),
        ("/v1/messages", MESSAGE | {"mcp_servers": [{}]}),
        ("/v1/messages", MESSAGE | {"messages": [{"role": "user", "content": [{"type": "image"}]}]}),
        ("/v1/responses", ITEMS | {"max_tokens": 3}),
        ("/v1/responses", ITEMS | {"tools": [{"type": "web_search"}]}),
        ("/detokenize", {"tokens": "5"}),
    ],
)
def test_body_outside_the_schema_gets_400(client: TestClient, document: dict[str, Any], path: str, body: Any) -> None:
    operation = document["paths"][path]["post"]
    assert check(document, operation["requestBody"]["content"]["application/json"]["schema"], body)
    reply = client.post(path, json=body)
    assert reply.status_code == 400
    refused = operation["responses"]["400"]
    refused = document["components"]["responses"]["400"] if "$ref" in refused else refused
    assert check(document, refused["content"]["application/json"]["schema"], reply.json()) == []


def test_security_is_described_if_keys_are_required() -> None:
    with warnings.catch_warnings(action="error"):
        engine = make_engine(make_reciting(), None)
        app = make_app(
            engine, "m", api_keys=["secret"], root_path="/under", served_model_name=("m", "n"), admin_keys=["admin"]
        )
    with TestClient(app) as client:
        for path in ("/health", "/under/health"):  # with proxies that remove the path and with others
            assert client.get(path).status_code == 200
        assert client.get("/elsewhere/health").status_code == 404
        assert client.get("/openapi.json").status_code == 401
        document = client.get("/openapi.json", headers={"Authorization": "Bearer secret"}).json()
    names = document["components"]["schemas"]["ChatRequest"]["properties"]["model"]
    assert names == {"enum": ["m", "n"]}, "every name"
    part = document["components"]["schemas"]["UpdateWeightsRequest"]["properties"]["model"]
    assert part["enum"] == ["target", "drafter"], "not a served name"
    assert document["servers"] == [{"url": "/under"}]
    paths = document["paths"]
    assert "401" in paths["/v1/models"]["get"]["responses"] and "security" not in paths["/v1/models"]["get"]
    assert paths["/health"]["get"]["security"] == [] and "401" not in paths["/health"]["get"]["responses"]
