"""`/v1/responses` through the real `openai` client, compared with the chat route."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any, Literal

import httpx
import pytest
from conftest import make_drafter
from live_server import LATE_S, chat, client, client_of, engine, gated, make_engine, refusal, serving, url
from openai import AsyncOpenAI, OpenAI
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter
from reciting import ARGUMENTS, CLOCKS, SAYS, TIGHT, TOOLS, make_reciting

from dflash_toolkit import Target
from dflash_toolkit.runtime import AsyncEngine

__all__ = ["client", "engine", "url"]  # fixtures
FUNCTIONS: list[Any] = [{"type": "function"} | tool["function"] for tool in TOOLS]
EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


@pytest.fixture(scope="module")
def reciter() -> Target:
    return make_reciting()


@pytest.fixture(scope="module")
def reciting(reciter: Target) -> AsyncEngine:
    return make_engine(reciter, make_drafter(reciter))


@pytest.fixture(scope="module")
def recited(reciting: AsyncEngine) -> Iterator[str]:
    with serving(reciting) as url:
        yield url


def respond(client: OpenAI, **options: Any) -> Any:
    options = {"model": "org/tiny", "input": "Why is the sky blue?", "max_output_tokens": 20} | options
    response = client.responses.create(**options)
    if not options.get("stream"):
        Response.model_validate(response.to_dict(), strict=True)
    return response


def say(url: str, head: str, **options: Any) -> Any:
    """Returns a response of the reciting model after checking that the streamed events are equal to it."""
    client = client_of(url)
    options = {"input": f"Please: {head}", "max_output_tokens": 400} | options
    whole = respond(client, **options)
    events = list(respond(client, stream=True, **options))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    for event in events:
        EVENTS.validate_python(event.to_dict(), strict=True)
    last = events[-1]
    assert last.type == f"response.{whole.status}"
    assert plain(last.response.output) == plain(whole.output)
    assert [e.item for e in events if e.type == "response.output_item.done"] == last.response.output
    for index, item in enumerate(last.response.output):
        mine = [event for event in events if getattr(event, "output_index", None) == index]
        text = "".join(event.delta for event in mine if event.type.endswith(".delta"))
        assert text == (item.arguments if item.type == "function_call" else item.content[0].text)
        assert mine[0].type == "response.output_item.added" and mine[0].item.id == item.id
    whole.events = events
    return whole


def plain(output: Any) -> list[dict[str, Any]]:
    """Returns items without their random ids."""
    return [{k: v for k, v in item.to_dict().items() if k not in ("id", "call_id")} for item in output]


# ---- answers -------------------------------------------------------------------------------------------------


def test_response_equals_the_chat_answer(client: OpenAI) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why is the sky blue?"}]
    sampling: dict[str, Any] = {"temperature": 0.9, "top_p": 0.8}
    expected = chat(client, messages=messages, extra_body={"top_k": 9, "seed": 4}, **sampling)
    request = [
        {"instructions": "Be brief."},
        {"input": messages},
        {"input": [{"type": "message"} | messages[0], {"role": "user", "content": [
            {"type": "input_text", "text": "Why is "}, {"type": "input_text", "text": "the sky blue?"}]}]},
    ]  # fmt: skip
    for options in request:
        answer = respond(
            client, extra_body={"top_k": 9, "seed": 4}, store=False, metadata={"a": "b"}, **sampling, **options
        )
        assert answer.output_text == expected.choices[0].message.content
        assert (answer.usage.input_tokens, answer.usage.output_tokens) == (
            expected.usage.prompt_tokens, expected.usage.completion_tokens)  # fmt: skip
        assert answer.usage.total_tokens == expected.usage.total_tokens
        assert answer.usage.dflash["verify_steps"] == expected.usage.dflash["verify_steps"]
    assert (answer.temperature, answer.top_p, answer.max_output_tokens, answer.metadata) == (0.9, 0.8, 20, {"a": "b"})
    assert (answer.store, answer.error, answer.tools, answer.tool_choice) == (False, None, [], "auto")
    assert answer.id.startswith("resp_") and answer.output[0].id.startswith("msg_")


def test_short_limit_gives_status_incomplete(client: OpenAI) -> None:
    answer = respond(client, max_output_tokens=3, extra_body={"ignore_eos": True})
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert answer.output[0].status == "incomplete" and answer.usage.output_tokens == 3


def test_openai_stream_helpers_rebuild_the_answer(recited: str) -> None:
    expected = say(recited, "h", tools=FUNCTIONS)
    request: Any = {"model": "org/tiny", "input": "Please: h", "tools": FUNCTIONS}
    with client_of(recited).responses.stream(**request) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert "response.output_text.delta" in kinds and kinds[-1] == "response.completed"
    assert final.output_text == expected.output_text == "I look it up.\n"
    assert [item.type for item in final.output] == ["message", "function_call", "function_call"]

    async def play() -> tuple[Any, list[str]]:
        async with AsyncOpenAI(base_url=f"{recited}/v1", api_key="none", max_retries=0) as client:
            one = await client.responses.create(**request)
            return one, [event.type async for event in await client.responses.create(stream=True, **request)]

    answer, asynchronous = asyncio.run(play())
    assert plain(answer.output) == plain(expected.output)
    assert {*asynchronous} == {*kinds}


def test_logprobs_cover_the_message_only(recited: str) -> None:
    include: Any = ["message.output_text.logprobs"]
    for thinking in (True, False):
        extra = {"chat_template_kwargs": {"enable_thinking": thinking}}
        answer = say(recited, "a", include=include, top_logprobs=2, extra_body=extra)
        part = answer.output[-1].content[0]
        assert len(answer.output) == 1 + thinking
        spoken = "".join(token.token for token in part.logprobs)
        assert part.text.endswith(spoken) and spoken, "except the token that also ends the mark before it"
        assert all(len(token.top_logprobs) == 2 and token.logprob > -1 for token in part.logprobs)
        streamed = [lp for e in answer.events if e.type == "response.output_text.delta" for lp in e.logprobs]
        assert [lp.token for lp in streamed] == [lp.token for lp in part.logprobs][: len(streamed)] and streamed


# ---- reasoning, calls, schemas -------------------------------------------------------------------------------


def test_reasoning_and_calls_continue_in_the_next_request(recited: str) -> None:
    answer = say(recited, "t", tools=FUNCTIONS)
    thoughts, call = answer.output
    assert (thoughts.type, thoughts.content[0].text) == ("reasoning", "\nhm, hm\n")
    assert (call.name, json.loads(call.arguments), call.status) == ("weather", ARGUMENTS, "completed")
    assert answer.tools[0].strict is False and answer.tools[1].parameters is None

    result = {"type": "function_call_output", "call_id": call.call_id, "output": "5 degrees, a"}
    again = respond(client_of(recited), input=[{"role": "user", "content": "Please: t"}, *answer.output, result])
    assert again.output_text == SAYS["a"]
    user = {"role": "user", "content": "Please: t"}
    made = {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
    messages = [user, {"role": "assistant", "content": None, "reasoning_content": "\nhm, hm\n", "tool_calls": [made]},
                {"role": "tool", "tool_call_id": call.call_id, "content": "5 degrees, a"}]  # fmt: skip
    assert again.usage.input_tokens == chat(client_of(recited), messages=messages).usage.prompt_tokens


@pytest.mark.parametrize("thinking", [True, False])
def test_reasoning_tokens_include_the_end_mark(reciter: Target, recited: str, thinking: bool) -> None:
    """The count does not depend on how many tokens a step adds."""
    body = {"chat_template_kwargs": {"enable_thinking": thinking}, "return_token_ids": True}
    found = []
    with serving(make_engine(reciter, None)) as plain_url:
        for address in (recited, plain_url):
            answer = chat(client_of(address), messages=[{"role": "user", "content": "a"}], extra_body=body)
            ids, counted = answer.choices[0].token_ids, answer.usage.completion_tokens_details.reasoning_tokens
            text = [reciter.tokenizer.decode(ids[:end]) for end in (counted, counted - 1)] if counted else ["", ""]
            assert ("</think>" in text[0]) == thinking and "</think>" not in text[1]
            found.append(counted)
    assert found[0] == found[1]


def test_repeated_prompt_is_cached(recited: str) -> None:
    long = "a" * 200
    first, again = (say(recited, "a", input=long) for _ in range(2))
    assert first.usage.input_tokens_details.cached_tokens < again.usage.input_tokens_details.cached_tokens
    assert again.usage.input_tokens_details.cached_tokens < again.usage.input_tokens


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "alarm"}])
def test_required_call_is_made(recited: str, choice: Any) -> None:
    clocks = [{"type": "function"} | tool["function"] for tool in CLOCKS]
    answer = say(
        recited, "a", tools=clocks, tool_choice=choice, parallel_tool_calls=False, temperature=0, extra_body=TIGHT
    )
    (call,) = [item for item in answer.output if item.type == "function_call"]
    assert call.name == "alarm" if isinstance(choice, dict) else call.name in ("clock", "alarm")
    assert json.loads(call.arguments)["zone"] in ("utc", "cet")


class Sky(BaseModel):
    colour: Literal["blue", "grey"]


def test_schema_is_enforced_and_parsed(recited: str) -> None:
    extra: Any = TIGHT | {"seed": 1, "chat_template_kwargs": {"enable_thinking": False}}
    request: Any = {"model": "org/tiny", "input": "a", "text_format": Sky, "max_output_tokens": 90, "extra_body": extra}
    answer = client_of(recited).responses.parse(**request)
    assert answer.output_parsed is not None and answer.output_parsed.colour in ("blue", "grey")
    assert answer.text.format.type == "json_schema"
    with client_of(recited).responses.stream(**request) as stream:
        assert stream.get_final_response().output_parsed == answer.output_parsed
    text: Any = {"format": {"type": "json_object"}}
    assert say(recited, "a", text=text, max_output_tokens=9, extra_body=extra).output_text.startswith("{")


# ---- errors --------------------------------------------------------------------------------------------------

MESSAGE = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"truncation": "middle"}, "truncation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"include": ["message.output_text.logprobs"], "tools": FUNCTIONS}, "include"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"tools": [{"type": "function", "name": "two words"}]}, "tools[0].name"),
        ({"tools": FUNCTIONS, "tool_choice": {"type": "function", "name": "other"}}, "tool_choice"),
        ({"tools": FUNCTIONS, "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format"),
        ({"text": {"format": {"type": "json_schema", "schema": {"uniqueItems": True}}}}, "text.format"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 100000}, "max_output_tokens"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"n": 2}, "n"),
        ({"input": []}, "input"),
        ({"input": [{"type": "web_search_call", "id": "1"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [MESSAGE, {"type": "function_call", "call_id": "1"}]}, "input[1].name"),
        ({"input": [{"type": "function_call_output", "call_id": "1", "output": "x"}]}, "input[0].call_id"),
        ({"input": "a" * 5000}, "input"),
    ],
)  # fmt: skip
def test_unsupported_parameter_gets_400_with_its_name(recited: str, options: dict[str, Any], param: str) -> None:
    error = refusal(respond, client_of(recited), extra_body=options)
    assert (error.status_code, error.param) == (400, param), error


def test_error_after_the_first_event_is_response_failed(target: Target) -> None:
    engine = make_engine(target, None)
    body = {"model": "org/tiny", "input": "a", "stream": True, "ignore_eos": True}
    with gated(engine, 2), serving(engine, request_timeout=0.2) as url:
        reply = httpx.post(f"{url}/v1/responses", json=body, timeout=LATE_S)
        *_, last = reply.text.strip().split("\n\n")
        name, _, data = last.partition("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == "event: response.failed" and event["type"] == "response.failed"
        assert event["response"]["status"] == "failed" and "longer" in event["response"]["error"]["message"]
