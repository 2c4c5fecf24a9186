"""What clients and tools send to an OpenAI server every day, one row each."""

import gzip
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from grammars import NO_SPACE
from live_server import LATE_S, make_engine, serving
from reciting import TOOLS, make_reciting

CHAT = {"model": "org/tiny", "max_tokens": 4, "temperature": 0}
USER = {"role": "user", "content": "a"}
CALL = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
NAMED = {"type": "function", "function": {"name": "now"}}
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"], "additionalProperties": False}
COMPACT = {"enable_thinking": False, "logit_bias": {str(token): bias for token, bias in NO_SPACE}, "max_tokens": 60}
IMAGE = {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}
SENT_BACK = {  # what `message.model_dump()` of OpenAI's client has
    "role": "assistant", "content": "b", "refusal": None, "annotations": None, "audio": None, "function_call": None,
    "tool_calls": None,
}  # fmt: skip


def user(*parts: Any) -> list[Any]:
    return [{"role": "user", "content": list(parts)}]


def called(**result: Any) -> list[Any]:
    return [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c1"} | result]  # fmt: skip


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(make_engine(make_reciting(), None)) as url:
        yield url


CHATS: dict[str, dict[str, Any]] = {
    "developer": {"messages": [{"role": "developer", "content": "Be brief."}, USER]},
    "sent back message": {"messages": [USER, SENT_BACK, USER]},
    "empty tool calls": {"messages": [USER, SENT_BACK | {"tool_calls": []}, USER]},
    "refusal": {"messages": [USER, SENT_BACK | {"content": None, "refusal": "No."}, USER]},
    "input_text part": {"messages": user({"type": "input_text", "text": "a"})},
    "output_text part": {"messages": [USER, {"role": "assistant", "content": [
        {"type": "output_text", "text": "b", "annotations": [], "logprobs": []}]}, USER]},
    "strings in a list": {"messages": user("b", "a")},
    "thinking part": {"messages": [USER, {"role": "assistant", "content": [
        {"type": "thinking", "thinking": "hm", "signature": "x"}, {"type": "text", "text": "b"}]}, USER]},
    "refusal part": {"messages": [USER, {"role": "assistant", "content": [{"type": "refusal", "refusal": "b"}]}, USER]},
    "cache_control": {"messages": user({"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}})},
    "tool content null": {"messages": [*called(content=None), USER]},
    "tool without content": {"messages": [*called(), USER]},
    "user content null": {"messages": [{"role": "user", "content": None}, USER]},
    "arguments as an object": {"messages": [USER, {"role": "assistant", "tool_calls": [
        CALL | {"function": {"name": "now", "arguments": {"zone": "UTC"}}}]}, *called(content="b")[2:], USER]},
    "fields without effect": {
        "user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "modalities": ["text"],
        "safety_identifier": "s", "prompt_cache_key": "k", "parallel_tool_calls": True,
        "response_format": {"type": "text"}, "n": 1, "seed": 1, "logprobs": True, "top_logprobs": 20,
    },
    "OpenAI's fields of other models": {
        "store": True, "service_tier": "flex", "verbosity": "low", "prediction": {"type": "content", "content": "x"},
    },
    "tools null": {"tools": None, "tool_choice": None},
    "tool_choice auto": {"tools": TOOLS, "tool_choice": "auto", "parallel_tool_calls": False},
    "json_schema with one more key": {**COMPACT, "response_format": {
        "type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True, "version": 2}}},
    "response_format.schema": {**COMPACT, "response_format": {"type": "json_object", "schema": SCHEMA}},
    "enable_thinking": {"chat_template_kwargs": {"enable_thinking": False}},
    "reasoning_effort": {"reasoning_effort": "low"},
    "stream_options null": {"stream": False, "stream_options": None},
}  # fmt: skip


@pytest.mark.parametrize("row", CHATS)
def test_everyday_chat_is_answered(url: str, row: str) -> None:
    body = CHAT | {"messages": [USER]} | CHATS[row]
    reply = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=LATE_S)
    assert reply.status_code == 200, reply.text
    assert "x-dflash-ignored-parameters" not in reply.headers or row == "json_schema with one more key"
    if body.get("max_tokens") == 60:
        assert json.loads(reply.json()["choices"][0]["message"]["content"]) == {"a": 1}


def test_allowed_tools_limit_the_calls(url: str) -> None:
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}
    body = CHAT | {"messages": [{"role": "user", "content": "h"}], "tools": TOOLS, "tool_choice": choice}
    reply = httpx.post(f"{url}/v1/chat/completions", json=body | {"max_tokens": 400}, timeout=LATE_S).json()
    assert {call["function"]["name"] for call in reply["choices"][0]["message"]["tool_calls"]} == {"now"}


COMPLETIONS: dict[str, dict[str, Any]] = {
    "text": {"prompt": "a"},
    "several texts": {"prompt": ["a", "b"]},
    "token ids": {"prompt": [97, 98]},
    "lm-eval": {"prompt": [[97, 98]], "max_tokens": 0, "echo": True, "logprobs": 1, "seed": 1234, "temperature": 0},
    "guidellm": {"prompt": "a", "max_tokens": 3, "max_completion_tokens": 3, "ignore_eos": True, "stop": None,
                 "stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    "vllm bench serve": {"prompt": "a", "repetition_penalty": 1.0, "max_tokens": 3, "logprobs": None, "stream": True,
                         "stream_options": {"include_usage": True}, "ignore_eos": True},
    "aiperf": {"prompt": ["a"], "max_tokens": 3, "min_tokens": 3, "stream": True, "ignore_eos": True},
    **{f"{best} log-probabilities": {"prompt": "a", "logprobs": best} for best in (0, 5, 6, 20)},
}  # fmt: skip


@pytest.mark.parametrize("row", COMPLETIONS)
def test_everyday_completion_is_answered(url: str, row: str) -> None:
    body = {"model": "org/tiny", **COMPLETIONS[row]}
    reply = httpx.post(f"{url}/v1/completions", json=body, timeout=LATE_S)
    assert reply.status_code == 200, reply.text
    assert "x-dflash-ignored-parameters" not in reply.headers
    assert not body.get("stream") or reply.text.endswith("data: [DONE]\n\n")


RESPONSES: dict[str, dict[str, Any]] = {
    "Codex": {
        "instructions": "Be brief.", "store": False, "stream": True, "parallel_tool_calls": False,
        "tool_choice": "auto",
        "input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]}],
        "tools": [{"type": "function"} | TOOLS[1]["function"]], "prompt_cache_key": "k",
        "reasoning": {"effort": "medium", "summary": "auto"}, "include": ["reasoning.encrypted_content"],
    },
    "Agents SDK": {"input": "a", "store": None, "truncation": None, "include": [], "max_output_tokens": 3,
                   "reasoning": {"summary": "detailed"}, "metadata": {"a": "b"}, "text": {"verbosity": "medium"}},
    "items of an earlier response": {"input": [
        USER, {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x", "status": None},
        {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [
            {"type": "output_text", "text": "b", "annotations": [], "logprobs": []}]},
        {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "now", "arguments": "{}",
         "status": "completed"},
        {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "b"}]}, USER]},
    "stored": {"input": "a", "store": True, "service_tier": "priority", "max_output_tokens": 3},
}  # fmt: skip


@pytest.mark.parametrize("row", RESPONSES)
def test_everyday_response_is_answered(url: str, row: str) -> None:
    body = {"model": "org/tiny", **RESPONSES[row]}
    reply = httpx.post(f"{url}/v1/responses", json=body, timeout=LATE_S)
    assert reply.status_code == 200, reply.text
    assert "x-dflash-ignored-parameters" not in reply.headers


REFUSED: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "image": ("/v1/chat/completions", {"messages": user({"type": "text", "text": "a"}, IMAGE)},
              "messages[0].content[1].type", "reads only text"),
    "audio": ("/v1/chat/completions", {"messages": user({"type": "input_audio", "input_audio": {}})},
              "messages[0].content[0].type", "reads only text"),
    "image in a response": ("/v1/responses", {"input": user({"type": "input_image", "image_url": "x"})},
                            "input[0].content[0].type", "reads only text"),
    "audio output": ("/v1/chat/completions", {"messages": [USER], "modalities": ["text", "audio"]}, "modalities",
                     "not supported"),
    "suffix": ("/v1/completions", {"prompt": "a", "suffix": "b"}, "suffix", "not supported"),
    "best_of": ("/v1/completions", {"prompt": "a", "best_of": 3}, "best_of", "must equal `n`"),
    "beam search": ("/v1/completions", {"prompt": "a", "use_beam_search": True}, "use_beam_search", "not supported"),
    "custom tool": ("/v1/chat/completions", {"messages": [USER], "tools": [{"type": "custom", "custom": {}}]},
                    "tools[0].type", "function"),
    "stored conversation": ("/v1/responses", {"input": "a", "previous_response_id": "resp_1"}, "previous_response_id",
                            "not supported"),
}  # fmt: skip


@pytest.mark.parametrize("row", REFUSED)
def test_everyday_request_that_cannot_be_followed_gets_400(url: str, row: str) -> None:
    path, body, param, words = REFUSED[row]
    reply = httpx.post(f"{url}{path}", json={"model": "org/tiny"} | body, timeout=LATE_S)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, param) and words in error["message"]


ROUTES: dict[str, tuple[str, str, int, str | None]] = {  # row -> method, path, status, text
    "HEAD /health": ("HEAD", "/health", 200, None),
    "HEAD /v1/models": ("HEAD", "/v1/models", 200, None),
    "GET /v1/models/": ("GET", "/v1/models/", 200, '"permission":[]'),
    "GET /v1/models/org/tiny": ("GET", "/v1/models/org/tiny", 200, '"root":"org/tiny","parent":null'),
    "GET /health/": ("GET", "/health/", 200, None),
    "GET //": ("GET", "//", 404, "this server has no //"),
    "OPTIONS /v1/models": ("OPTIONS", "/v1/models", 204, None),
    "OPTIONS /v1/chat/completions": ("OPTIONS", "/v1/chat/completions", 204, None),
    "OPTIONS /v1/embeddings": ("OPTIONS", "/v1/embeddings", 404, "this server has no /v1/embeddings"),
    "GET /ping": ("GET", "/ping", 200, None),
    "POST /ping": ("POST", "/ping", 200, None),
    "GET /load": ("GET", "/load", 200, '{"server_load":0}'),
    "GET /version": ("GET", "/version", 200, '"version"'),
    "DELETE /v1/models": ("DELETE", "/v1/models", 405, "use GET"),
    **{
        f"POST {path}": ("POST", path, 404, f"this server has no {path}; /openapi.json lists its paths")
        for path in (
            "/v1/embeddings", "/v1/score", "/score", "/v1/rerank", "/rerank", "/v1/files", "/v1/batches",
            "/v1/audio/transcriptions", "/v1/images/generations", "/v1/moderations", "/v1/load_lora_adapter",
            "/reset_prefix_cache", "/sleep", "/invocations",
        )
    },
    "GET /docs": ("GET", "/docs", 404, "this server has no /docs"),
    "GET /server_info": ("GET", "/server_info", 404, "this server has no /server_info"),
}  # fmt: skip


@pytest.mark.parametrize("row", ROUTES)
def test_everyday_route_has_its_status(url: str, row: str) -> None:
    method, path, status, text = ROUTES[row]
    reply = httpx.request(method, f"{url}{path}", timeout=LATE_S)
    assert reply.status_code == status and (text or "") in reply.text, reply.text
    if method == "OPTIONS" and status == 204:
        assert reply.headers["allow"] == ("GET, HEAD, OPTIONS" if "models" in path else "POST, OPTIONS")
    if method == "HEAD":
        assert reply.text == "" and httpx.get(f"{url}{path}", timeout=LATE_S).status_code == 200


@pytest.mark.parametrize("coding", ["gzip", "br", "deflate, gzip"])
def test_compressed_body_gets_415(url: str, coding: str) -> None:
    body = gzip.compress(json.dumps(CHAT | {"messages": [USER]}).encode())
    headers = {"Content-Encoding": coding, "Content-Type": "application/json"}
    reply = httpx.post(f"{url}/v1/chat/completions", content=body, headers=headers, timeout=LATE_S)
    assert reply.status_code == 415 and coding in reply.json()["error"]["message"]
    headers["Content-Encoding"] = "identity"
    plain = httpx.post(f"{url}/v1/chat/completions", json=CHAT | {"messages": [USER]}, headers=headers, timeout=LATE_S)
    assert plain.status_code == 200
