"""Conversations that clients send back are rendered, whatever form their calls and contents have."""

import json
from typing import Any

import pytest
from conftest import make_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_toolkit.data.conversations import conversation
from dflash_toolkit.serve.endpoints.chat import ChatRequest
from dflash_toolkit.serve.endpoints.tokens import TokenizeRequest
from dflash_toolkit.serve.protocol import ApiError
from dflash_toolkit.serve.tokenizing import Encoder

HEAD = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}"
    "<|{{ 'user' if m.role == 'tool' else m.role }}|>{{ m.content }}"
)
CALLS = HEAD + "{% for c in m.tool_calls or [] %}[{{ c.function.name }}ARGUMENTS]{% endfor %}<|end|>{% endfor %}"
# how published templates write the arguments of a call
WRITTEN = {
    "items": "{% for k, v in c.function.arguments | items %}({{ k }}={{ v }}){% endfor %}",
    "tojson": "{{ c.function.arguments | tojson }}",
    "joined": "{{ 'a:' + c.function.arguments }}",
    "printed": "{{ c.function.arguments }}",
    "either": "{% set a = c.function.arguments %}{{ a if a is string else a | tojson }}",
}
TEMPLATES = {kind: CALLS.replace("ARGUMENTS", text) for kind, text in WRITTEN.items()}
QUESTION = {"role": "user", "content": "Why?"}


def rendered(template: str, messages: list[Any], tools: Any = ()) -> str:
    """Returns the prompt of a request with these messages, without special tokens."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    body = {"model": "m", "messages": messages, "tools": list(tools)}
    request = ChatRequest.parse(json.dumps(body).encode())
    ids = Encoder(tokenizer, 20_000).chat([message.plain() for message in request.messages], list(tools))
    return str(tokenizer.decode(ids, skip_special_tokens=True))


def called(**function: Any) -> list[Any]:
    """Returns a chat with a call and its result."""
    call = {"id": "c1", "type": "function", "function": {"name": "f"} | function}
    return [QUESTION, {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "noon"}]  # fmt: skip


NOTHING = ("null", "", " ", "{}", "[]", {}, [], None, '"null"', '""')
ONE = ('{"x": "é"}', {"x": "é"}, '"{\\"x\\": \\"é\\"}"')
OTHERS = {"[1]": [1], '"a"': "a", "5": 5, '{"x": "é': '{"x": "é', "{'x': 1}": "{'x': 1}", "9" * 5000: "9" * 5000}


@pytest.mark.parametrize("kind", TEMPLATES)
def test_arguments_in_every_form_are_rendered(kind: str) -> None:
    def arguments(value: Any, **key: Any) -> str:
        return rendered(TEMPLATES[kind], called(arguments=value)).partition("[f")[2].rpartition("]noon")[0]

    if kind == "items":
        assert {arguments(value) for value in NOTHING} == {""}
        assert {arguments(value) for value in ONE} == {"(x=é)"}
        assert all(arguments(text) == f"(arguments={value})" for text, value in OTHERS.items())
        return
    before = "a:" if kind == "joined" else ""
    assert {arguments(value) for value in NOTHING} == {before + "{}"}
    assert {arguments(value) for value in ONE} == {before + '{"x": "é"}'}
    for text, value in OTHERS.items():
        assert json.loads(arguments(text).removeprefix(before)) == {"arguments": value}
    assert "[f" in rendered(TEMPLATES[kind], called()), "without arguments"


plain = st.none() | st.booleans() | st.integers() | st.text()
values = st.recursive(plain, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner))


@settings(deadline=None)
@given(values | values.map(json.dumps) | st.text(), st.sampled_from(sorted(TEMPLATES)))
@pytest.mark.slow
def test_no_arguments_are_refused(value: Any, kind: str) -> None:
    assert "[f" in rendered(TEMPLATES[kind], called(arguments=value))


def test_a_lone_surrogate_in_arguments_is_rendered() -> None:
    assert "[f" in rendered(TEMPLATES["items"], called(arguments='{"x": "\\ud800"}'))


@pytest.mark.parametrize("value", [*NOTHING, *ONE, *OTHERS])
def test_data_reads_arguments_as_the_server_does(value: Any) -> None:
    (_, message, _) = conversation({"messages": called(arguments=value)}, "x").recorded
    served = ChatRequest.parse(json.dumps({"model": "m", "messages": called(arguments=value)}).encode()).messages[1]
    expected = {"x": 1} if value == "{'x': 1}" else served.plain()["tool_calls"][0]["function"]["arguments"]
    assert message["tool_calls"][0]["function"]["arguments"] == expected, "data also reads Python's literals"


CALL = {"function": {"name": "f", "arguments": "{}"}}
MADE = "[f{}]"
REASONING = ("reasoning", "reasoning_content", "thinking")


@pytest.mark.parametrize(
    ("message", "text"),
    [
        *(({"role": "assistant", "tool_calls": [CALL]} | content, MADE)
          for content in ({}, {"content": None}, {"content": ""}, {"content": []})),
        *(({"role": "assistant", "tool_calls": [CALL | form]}, MADE)
          for form in ({"id": None, "type": None}, {"id": "", "type": ""}, {"index": 0, "id": "x"})),
        ({"role": "assistant", "content": None, "function_call": CALL["function"]}, MADE),
        ({"role": "assistant", "content": "a", "function_call": None, "tool_calls": None, "refusal": None}, "a"),
        ({"role": "assistant", "content": "a", "tool_calls": []}, "a"),
        ({"role": "assistant", "content": None, "refusal": "No."}, "No."),
        ({"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}, "No."),
        ({"role": "assistant", "content": [{"type": "thinking", "thinking": "t"}, {"type": "text", "text": "a"}]}, "a"),
        ({"role": "assistant", "content": [{"type": "output_text", "text": "a", "annotations": []}, "b"]}, "ab"),
        *(({"role": "assistant", "content": "a", name: "t"}, "a") for name in REASONING),
        ({"role": "developer", "content": "a"}, "a"),
        ({"role": "user", "content": None}, ""),
        ({"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "text", "text": "b"}]}, "ab"),
        *(({"role": "tool", "tool_call_id": "x"} | empty, "") for empty in ({}, {"content": None}, {"content": []})),
        ({"role": "tool", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, "ab"),
        ({"role": "tool", "content": "a", "name": None, "tool_call_id": None}, "a"),
        ({"role": "function", "name": "f", "content": "a"}, "a"),
    ],
    ids=str,
)  # fmt: skip
def test_message_in_every_form_is_rendered(message: dict[str, Any], text: str) -> None:
    assert rendered(TEMPLATES["tojson"], [QUESTION, message]) == f"Why?{text}"
    TokenizeRequest.parse(json.dumps({"messages": [QUESTION, message]}).encode())


@pytest.mark.parametrize("field", [*REASONING, "content"])
def test_reasoning_reaches_the_template_under_every_name(field: str) -> None:
    thought: Any = [{"type": "thinking", "thinking": "hm"}] if field == "content" else "hm"
    template = "{% for m in messages %}{{ m.content }}{{ m.reasoning_content }}{{ m.reasoning }}{% endfor %}"
    assert rendered(template, [QUESTION, {"role": "assistant", field: thought}]) == "Why?hmhm"


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file", 3, None, []])
def test_part_without_text_is_refused_by_its_type(kind: Any) -> None:
    with pytest.raises(ApiError, match="this server reads only text") as caught:
        rendered("", [{"role": "user", "content": [{"type": kind}]}])
    assert (caught.value.status, caught.value.param) == (400, "messages[0].content[0].type")


def test_mistral_templates_get_ids_of_nine_letters() -> None:
    template = (
        HEAD + "{% if m.role == 'tool' %}({{ m.tool_call_id }}){% endif %}{% for c in m.tool_calls or [] %}"
        "{% if c.id is not defined or c.id|length != 9 %}{{ raise_exception('length 9!') }}{% endif %}"
        "[{{ c.id }}]{{ c.function | tojson }}{% endfor %}{% endfor %}"
    )
    calls = [CALL | {"id": "call_of_another_server"}, CALL | {"id": "abcdefghi"}, CALL]
    chat = [QUESTION, {"role": "assistant", "tool_calls": calls}]
    chat += [{"role": "tool", "content": "x", "tool_call_id": name} for name in ("call_of_another_server", "abcdefghi")]
    text = rendered(template, [*chat, {"role": "tool", "content": "x"}])
    first, second, third = (text.partition(f"[{name}]")[1] for name in ("call00001", "abcdefghi", "call00000"))
    assert (first, second, third) == ("[call00001]", "[abcdefghi]", "[call00000]")
    assert text.endswith("x(call00001)x(abcdefghi)x(call00000)")


# ---- templates that do not show tools --------------------------------------------------------------------------

PLAIN = "{% for m in messages %}<|{{ m.role }}|>{{ m.role[0] }}:{{ m.content }}{% endfor %}"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
AS_TEXT = (
    'u:Why?a:<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>u:<tool_response>\nnoon\n</tool_response>'
)


def test_template_without_calls_shows_them_as_text() -> None:
    assert rendered(PLAIN, called(arguments='{"x": 1}')) == AS_TEXT
    twice = [*called(arguments={"x": 1}), {"role": "tool", "content": "dusk"}]
    assert rendered(PLAIN, twice).endswith("noon\n</tool_response>\n<tool_response>\ndusk\n</tool_response>")


@pytest.mark.parametrize("system", [[], [{"role": "system", "content": "Be brief."}]])
def test_template_without_tools_gets_them_in_the_first_message(system: list[Any]) -> None:
    text = rendered(PLAIN, [*system, QUESTION], [TOOL])
    assert '{"name": "f", "parameters": {"type": "object"}}' in text and "<tool_call>" in text
    assert text.startswith("s:Be brief.\n\nYou can call") if system else text.startswith("u:You can call")
    assert text.endswith("u:Why?" if system else "\n\nWhy?")
