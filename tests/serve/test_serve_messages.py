"""`/v1/messages` by raw requests, compared with the chat route; `make test-peers` adds Anthropic's client."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import httpx
import pytest
from conftest import make_drafter
from live_server import LATE_S, chat, client_of, gated, make_engine, serving
from reciting import ARGUMENTS, CLOCKS, SAYS, TOOLS, make_reciting

from dflash_toolkit import Target
from dflash_toolkit.serve.endpoints.messages_request import CountTokensRequest
from dflash_toolkit.serve.state import ServerState

FUNCTIONS = [tool["function"] for tool in TOOLS]
NAMED: list[Any] = [
    {"name": each["name"], "input_schema": each.get("parameters", {"type": "object"})} for each in FUNCTIONS
]
CALL = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": ARGUMENTS}


@pytest.fixture(scope="module")
def reciter() -> Target:
    return make_reciting()


@pytest.fixture(scope="module")
def url(reciter: Target) -> Iterator[str]:
    with serving(make_engine(reciter, make_drafter(reciter))) as url:
        yield url


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def post(url: str, path: str = "", **body: Any) -> httpx.Response:
    headers = {"x-api-key": "none", "anthropic-version": "2023-06-01"}
    body = {"model": "org/tiny", "messages": [user("Please: a")]} | body
    return httpx.post(f"{url}/v1/messages{path}", json=body, headers=headers, timeout=LATE_S)


def events_of(reply: httpx.Response) -> list[dict[str, Any]]:
    events = []
    for text in reply.text.strip().split("\n\n"):
        name, _, data = text.partition("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def assembled(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the message of a stream after checking the order of its events."""
    first, ping, *middle, last, end = events
    assert [each["type"] for each in (first, ping, last, end)] == [
        "message_start",
        "ping",
        "message_delta",
        "message_stop",
    ]
    message = first["message"]
    assert (message["content"], message["stop_reason"], message["stop_sequence"]) == ([], None, None)
    after = {
        "content_block_start": ("delta", "stop"),
        "content_block_delta": ("delta", "stop"),
        "content_block_stop": ("start",),
    }
    assert (middle[0]["type"], middle[-1]["type"]) == ("content_block_start", "content_block_stop")
    for before, event in pairwise(middle):
        assert event["type"].removeprefix("content_block_") in after[before["type"]]
    for event in middle:
        assert event["index"] == len(message["content"]) - (event["type"] != "content_block_start")
        if event["type"] == "content_block_start":
            message["content"].append(event["content_block"])
        elif event["type"] == "content_block_delta":
            block, delta = message["content"][-1], event["delta"]
            kind = delta.pop("type").removesuffix("_delta")
            ((field, text),) = delta.items()
            assert text and kind in (block["type"], "signature", "input_json")
            block[field] = block.get(field, "") + text
        elif (block := message["content"][-1])["type"] == "tool_use":
            assert block["input"] == {}
            block["input"] = json.loads(block.pop("partial_json", "{}"))
    return message | last["delta"] | {"usage": last["usage"]}


def plain(content: Any) -> list[dict[str, Any]]:
    """Returns blocks without their random ids."""
    return [{name: value for name, value in block.items() if name != "id"} for block in content]


def say(url: str, head: str, **options: Any) -> Any:
    """Returns a message of the reciting model after checking that its stream has the same content."""
    options = {"messages": [user(f"Please: {head}")], "max_tokens": 400} | options
    whole = post(url, **options)
    assert whole.status_code == 200, whole.text
    message = whole.json()
    streamed = assembled(events_of(post(url, stream=True, **options)))
    assert plain(streamed["content"]) == plain(message["content"])
    for name in ("type", "role", "model", "stop_reason", "stop_sequence"):
        assert streamed[name] == message[name]
    assert streamed["usage"]["output_tokens"] == message["usage"]["output_tokens"]
    assert message["id"].startswith("msg_")
    return message


# ---- answers -------------------------------------------------------------------------------------------------


def test_message_equals_the_chat_answer(url: str) -> None:
    messages = [{"role": "system", "content": "Be brief."}, user("Please: a")]
    expected = chat(client_of(url), messages=messages)
    for system in ("Be brief.", [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]):
        message = say(url, "a", system=system)
        assert message["content"] == [{"type": "text", "text": expected.choices[0].message.content}]
        usage = message["usage"]
        assert usage["input_tokens"] + usage["cache_read_input_tokens"] == expected.usage.prompt_tokens
        assert usage["output_tokens"] == expected.usage.completion_tokens
        assert usage["dflash"]["verify_steps"] == expected.usage.dflash["verify_steps"]
    assert usage["cache_read_input_tokens"] > 0


def test_calls_become_tool_use_blocks_after_the_text(url: str) -> None:
    message = say(url, "h", tools=NAMED)
    assert plain(message["content"]) == [
        {"type": "text", "text": "I look it up.\n"},
        {"type": "tool_use", "name": "weather", "input": ARGUMENTS},
        {"type": "tool_use", "name": "now", "input": {}},
    ]
    assert message["stop_reason"] == "tool_use"
    one = say(url, "h", tools=NAMED, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert [block["type"] for block in one["content"]] == ["text", "tool_use"]
    none = say(url, "h", tools=NAMED, tool_choice={"type": "none"})
    assert [block["type"] for block in none["content"]] == ["text"] and none["stop_reason"] == "end_turn"


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "alarm"}])
def test_forced_call_ends_with_tool_use(url: str, choice: Any) -> None:
    tools = [{"name": tool["function"]["name"], "input_schema": tool["function"]["parameters"]} for tool in CLOCKS]
    message = say(url, "a", tools=tools, tool_choice=choice, temperature=0)
    call = message["content"][-1]
    assert (message["stop_reason"], call["type"]) == ("tool_use", "tool_use")
    assert call["name"] == choice.get("name", call["name"]) and call["input"]["zone"] in ("utc", "cet")


@pytest.mark.parametrize("kind", ["enabled", "adaptive", "disabled"])
def test_thinking_sets_the_template_variable(url: str, kind: str) -> None:
    budget = {"budget_tokens": 1024} if kind == "enabled" else {}
    message = say(url, "a", thinking={"type": kind} | budget, output_config={"effort": "high"})
    text = message["content"][-1]["text"]
    if kind == "disabled":
        assert [block["type"] for block in message["content"]] == ["text"] and text == SAYS["</think>"]
        return
    thoughts = message["content"][0]
    assert (thoughts["type"], thoughts["thinking"]) == ("thinking", "\nwell, well\n") and thoughts["signature"]
    assert text == "\n\nHello you." and message["usage"]["output_tokens_details"]["thinking_tokens"] > 0


def test_stop_reason_names_what_ended_the_answer(url: str) -> None:
    stopped = say(url, "a", stop_sequences=["there", "x"])
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "there")
    assert stopped["content"][0]["text"] == "Hello "
    short = say(url, "a", max_tokens=1)
    assert (short["stop_reason"], short["stop_sequence"], short["usage"]["output_tokens"]) == ("max_tokens", None, 1)


def test_max_tokens_may_exceed_the_rest_of_the_context(target: Target) -> None:
    with serving(make_engine(target, None, max_model_len=64)) as small:
        message = post(small, messages=[user("a" * 20)], max_tokens=32000, temperature=0).json()
        assert message["stop_reason"] == "model_context_window_exceeded"
        error = post(small, messages=[user("a" * 200)], max_tokens=32000).json()["error"]
        assert error["type"] == "invalid_request_error" and error["message"].startswith("prompt is too long: ")


def test_cut_call_keeps_its_complete_arguments(url: str) -> None:
    def ask(most: int) -> dict[str, Any]:
        return post(url, messages=[user("Please: h")], tools=NAMED, max_tokens=most).json()

    cut = list[Any]()
    with ThreadPoolExecutor(8) as threads:  # the engine answers several at a time
        for message in threads.map(ask, range(14, 45, 3)):
            assert message["stop_reason"] == "max_tokens"
            cut += [block["input"] for block in message["content"] if block["type"] == "tool_use"][:1]
    assert [each for i, each in enumerate(cut) if each not in cut[:i]] == [{}, {"city": "Kyōto 😀"}, ARGUMENTS]


def test_schema_of_output_config_is_enforced(url: str) -> None:
    schema = {
        "type": "object",
        "properties": {"sky": {"enum": ["blue"]}},
        "required": ["sky"],
        "additionalProperties": False,
    }
    config = {"format": {"type": "json_schema", "schema": schema}}
    message = say(url, "a", output_config=config, thinking={"type": "disabled"}, temperature=0)
    assert json.loads(message["content"][0]["text"]) == {"sky": "blue"}


# ---- conversations -------------------------------------------------------------------------------------------


def test_tool_loop_renders_as_in_the_chat_route(url: str) -> None:
    first = say(url, "t", tools=NAMED)
    thoughts, call = first["content"]
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": [{"type": "text", "text": "5 degrees, a"}]}
    messages = [user("Please: t"), {"role": "assistant", "content": first["content"]}, user([result])]
    again = say(url, "", messages=messages)
    assert again["content"][-1]["text"] == SAYS["a"]
    made = {"id": call["id"], "type": "function",
            "function": {"name": call["name"], "arguments": json.dumps(call["input"], ensure_ascii=False)}}  # fmt: skip
    replayed = {"role": "assistant", "content": None, "reasoning_content": thoughts["thinking"], "tool_calls": [made]}
    expected = chat(client_of(url), messages=[
        user("Please: t"), replayed, {"role": "tool", "tool_call_id": call["id"], "content": "5 degrees, a"}
    ])  # fmt: skip
    assert post(url, "/count_tokens", messages=messages).json() == {"input_tokens": expected.usage.prompt_tokens}


RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "5"}
CALLED = {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}, CALL]}
NOTE = {"role": "system", "content": "note"}
SAID = {"role": "assistant", "content": "b"}
B = {"type": "text", "text": "b"}


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([NOTE, user("a")], ["system note", "user a"]),
        ([user("a"), NOTE], ["user a\n\nnote"]),
        ([user("a"), user("b")], ["user a\n\nb"]),
        ([user([{"type": "text", "text": "a"}, B])], ["user a\nb"]),
        ([user("a"), SAID, NOTE], ["user a", "assistant b", "user note"]),
        ([user("a"), SAID, NOTE, user("c")], ["user a", "assistant b", "user note\n\nc"]),
        ([user("a"), CALLED, user([RESULT]), NOTE], ["user a", "assistant ", "tool 5\n\nnote"]),
        ([user("a"), CALLED, NOTE, user([RESULT])], ["user a", "assistant ", "tool 5\n\nnote"]),
        ([user("a"), CALLED, user([RESULT, B])], ["user a", "assistant ", "tool 5", "user b"]),
        ([user("a"), CALLED, user([RESULT | {"is_error": True}])], ["user a", "assistant ", "tool Error: 5"]),
        ([user("a"), CALLED, user([{"type": "tool_result", "tool_use_id": "1"}])], ["user a", "assistant ", "tool "]),
    ],
)  # fmt: skip
def test_turns_become_chat_messages(messages: list[Any], expected: list[str]) -> None:
    """A system message in the conversation must not move to its start: that would spoil the prefix cache."""
    body = CountTokensRequest.parse(json.dumps({"model": "m", "messages": messages}).encode())
    found = [message.plain() for message in body.chat().messages]
    assert [f"{message['role']} {message['content']}" for message in found] == expected


def test_billing_line_of_claude_code_is_left_out(url: str) -> None:
    line = {"type": "text", "text": "x-anthropic-billing-header: cc_version=1.2.3"}
    counts = [
        post(url, "/count_tokens", system=[*more, {"type": "text", "text": "Be brief."}]).json()
        for more in ([], [line])
    ]
    assert counts[0] == counts[1]


# ---- errors --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [user([{"type": "image", "source": {"type": "url", "url": "x"}}])]}, "has type 'image'"),
        ({"messages": [user([RESULT | {"content": [{"type": "image"}]}])]}, "has type 'image'"),
        ({"messages": [user([CALL])]}, "block 0 has type 'tool_use'"),
        ({"messages": [user("a"), SAID]}, "end with a user's"),
        ({"messages": [user([{"type": "text"}])]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type: is 'web_search_20250305'"),
        ({"tools": [{"name": "two words", "input_schema": {}}]}, "tools[0].name"),
        ({"tools": NAMED, "tool_choice": {"type": "tool", "name": "other"}}, "tool_choice: names 'other'"),
        ({"tool_choice": {"type": "tool"}}, "needs `name`"),
        ({"tool_choice": {"type": "any"}}, "tool_choice: is 'any'"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"output_config": {"effort": "much"}}, "output_config.effort"),
        ({"temperature": -1.0}, "temperature"),
    ],
)  # fmt: skip
def test_invalid_request_gets_400_in_anthropics_form(url: str, options: dict[str, Any], named: str) -> None:
    reply = post(url, **{"max_tokens": 4} | options)
    body = reply.json()
    assert reply.status_code == 400 and set(body) == {"type", "error"} and set(body["error"]) == {"type", "message"}
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    assert named in body["error"]["message"], body


def test_other_errors_have_anthropics_types(target: Target) -> None:
    with serving(make_engine(target, None), api_keys=["secret"]) as url:
        for headers in ({"x-api-key": "secret"}, {"authorization": "Bearer secret"}):
            body = {"model": "org/tiny", "messages": [user("a")]}
            assert httpx.post(f"{url}/v1/messages/count_tokens", json=body, headers=headers).status_code == 200
            replies = [
                (404, "not_found_error", httpx.post(f"{url}/v1/messages/batches", json=body, headers=headers)),
                (405, "invalid_request_error", httpx.get(f"{url}/v1/messages", headers=headers)),
                (413, "request_too_large", httpx.post(f"{url}/v1/messages", content=b" " * 5_000_000, headers=headers)),
                (404, "not_found_error", httpx.post(
                    f"{url}/v1/messages", json=body | {"model": "x", "max_tokens": 1}, headers=headers)),
            ]  # fmt: skip
            for status, kind, reply in replies:
                assert (reply.status_code, reply.json()["error"]["type"]) == (status, kind)
        reply = post(url, max_tokens=1)
        assert (reply.status_code, reply.json()["error"]["type"]) == (401, "authentication_error")


def test_unknown_field_is_ignored_and_listed(url: str) -> None:
    known = {"context_management": {"edits": []}, "metadata": {"user_id": "a"}, "cache_control": {"type": "ephemeral"}}
    reply = post(url, max_tokens=4, colour="red", **known)
    assert (reply.status_code, reply.headers["x-dflash-ignored-parameters"]) == (200, "colour")


def test_draining_server_answers_in_anthropics_form(target: Target) -> None:
    state = ServerState()
    with serving(make_engine(target, None), state=state) as url:
        state.draining = True
        reply = post(url, max_tokens=1)
        assert (reply.status_code, reply.headers["connection"]) == (503, "close")
        assert reply.json()["error"]["type"] == "overloaded_error"


def test_error_after_the_first_event_is_an_error_event(target: Target) -> None:
    engine = make_engine(target, None)
    with gated(engine, 2), serving(engine, request_timeout=0.2) as url:
        *_, last = events_of(post(url, max_tokens=200, stream=True, temperature=0))
        assert last["type"] == "error" and last["error"]["type"] == "timeout_error"
