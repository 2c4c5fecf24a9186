"""Parsing of reasoning and tool calls, whole and streamed; no text is lost."""

import itertools
import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from parsing import CODER, HERMES, LIST, LLAMA, NAMED, TOOLS, parse, plain

from dflash_toolkit.serve.parsing import Message, OutputParser, joined
from dflash_toolkit.serve.parsing.deltas import Delta, merged
from dflash_toolkit.serve.parsing.forms import FORMS
from dflash_toolkit.serve.parsing.schema import as_json, is_text

# ---- calls that are well formed ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "text", "calls"),
    [
        ("hermes", HERMES, [("weather", {"city": "Köln", "more": {"a": ["}", {}]}})]),
        ("hermes", f"{HERMES}\n<tool_call>\n{{\"name\": \"now\"}}\n</tool_call>", [("weather", ...), ("now", {})]),
        ("hermes", '<tool_call>{"name": "now", "arguments": null}</tool_call>', [("now", {})]),
        ("hermes", '<tool_call>{"arguments": {"city": "x"}, "id": 5, "name": "weather"}', [("weather", {"city": "x"})]),
        ("hermes", '<tool_call>{"name": "now", "arguments": "{\\"a\\": 1}"}</tool_call>', [("now", {"a": 1})]),
        ("hermes", '<tool_call>{"name": "now"}\n{"name": "now"}</tool_call>', [("now", {}), ("now", {})]),
        ("hermes", '<tool_call>{"name": "now", "arguments": {"tag": "</tool_call>"}}</tool_call>', [("now", ...)]),
        ("qwen3_coder", CODER, [("weather", {"city": "Köln", "days": 3})]),
        ("qwen3_coder", CODER.removeprefix("<tool_call>\n"), [("weather", {"city": "Köln", "days": 3})]),
        ("qwen3_coder", CODER.replace("\n</parameter>", ""), [("weather", {"city": "Köln", "days": 3})]),
        ("qwen3_coder", "<tool_call><function=now></function></tool_call>", [("now", {})]),
        ("qwen3_coder", CODER + CODER, [("weather", ...), ("weather", ...)]),
        ("qwen3_coder", "<function=other>\n<parameter=a>\n5\n</parameter>\n</function>", [("other", {"a": "5"})]),
        ("llama3_json", LLAMA, [("weather", {"city": "Köln", "days": 3})]),
        ("llama3_json", f"<|python_tag|>{LLAMA}; {LLAMA}", [("weather", ...), ("weather", ...)]),
        ("llama3_json", '{"type": "function", "name": "now", "parameters": {}}', [("now", {})]),
        ("llama3_json", f"I look it up.\n{LLAMA}", [("weather", ...)]),
        ("mistral", LIST, [("weather", {"city": "Köln"}), ("now", {})]),
        ("mistral", NAMED, [("weather", {"city": "Köln"}), ("now", {})]),
        ("mistral", '[TOOL_CALLS]weather{"city": "x"}', [("weather", {"city": "x"})]),
    ],
)  # fmt: skip
def test_calls_are_found_in_each_form(form: str, text: str, calls: list[tuple[str, Any]]) -> None:
    message = parse(form, text)
    assert [call.name for call in message.calls] == [name for name, _ in calls]
    for call, (_, expected) in zip(message.calls, calls, strict=True):
        arguments = json.loads(call.arguments)
        assert isinstance(arguments, dict) if expected is ... else arguments == expected
    assert len({call.id for call in message.calls}) == len(calls)
    assert message.content == ("I look it up.\n" if text.startswith("I") else "")


def test_text_around_calls_is_content() -> None:
    for form, call in {"hermes": HERMES, "qwen3_coder": CODER, "mistral": NAMED}.items():
        message = parse(form, f"Let me see.\n{call}\n{call}\nThat is all.")
        assert message.content == "Let me see.\n\nThat is all.", form
        assert len(message.calls) == 2 * len(parse(form, call).calls)


def test_without_a_form_a_call_is_content() -> None:
    assert plain(parse(None, f"\n{HERMES}", start="either")) == (f"\n{HERMES}", "", [])


def test_call_ids_fit_the_models_templates() -> None:
    first, second = parse("mistral", NAMED).calls
    assert first.id.isalnum() and len(first.id) == 9 and second.id == "abcdefghi"
    assert parse("hermes", HERMES).calls[0].id.startswith("call_")


def test_only_the_first_call_is_kept_without_parallel_calls() -> None:
    for form, text in {"hermes": HERMES * 2, "qwen3_coder": CODER * 2, "mistral": LIST}.items():
        assert [call.name for call in parse(form, text, parallel=False).calls] == ["weather"], form


# ---- values by the schema ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("city", "5", "5"), ("city", '"quoted"\n\nlines', '"quoted"\n\nlines'), ("city", "", ""),
        ("days", "5", 5), ("days", " 5 ", 5), ("days", "5.0", 5), ("days", "five", "five"), ("days", "5.5", "5.5"),
        ("exact", "true", True), ("exact", "False", False), ("exact", "maybe", "maybe"),
        ("ratio", "0.5", 0.5), ("ratio", "2", 2), ("ratio", "inf", "inf"), ("ratio", "1e999", "1e999"),
        ("maybe", "null", None), ("maybe", "text", "text"), ("maybe", "5", "5"),
        ("places", '["a", "b"]', ["a", "b"]), ("places", "['a']", ["a"]), ("places", "[NaN]", [None]),
        ("places", '{"a": 1}', '{"a": 1}'), ("places", "[" * 100_000, "[" * 100_000),
        ("more", '{"a": "\n"}', {"a": "\n"}), ("more", '{"a": "\\ud800"}', '{"a": "\\ud800"}'), ("unknown", "5", "5"),
        ("unit", "C", "C"), ("unit", " \n\tF ", "F"), ("unit", " K ", " K "),
    ],
)  # fmt: skip
def test_parameter_values_get_the_types_of_the_schema(key: str, value: str, expected: Any) -> None:
    text = f"<tool_call>\n<function=weather>\n<parameter={key}>\n{value}\n</parameter>\n</function>\n</tool_call>"
    (call,) = parse("qwen3_coder", text).calls
    arguments = json.loads(call.arguments)
    assert arguments == {key: expected} and type(arguments[key]) is type(expected)


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({}, True), (None, True), ({"type": "string"}, True), ({"enum": ["a", "b"]}, False), ({"const": "a"}, False),
        ({"enum": [1, "a"]}, False), ({"const": None}, False), ({"type": ["string", "null"]}, False),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, False), ({"type": {"odd": 1}}, True),
        ({"$ref": "#/nowhere/at~1all"}, True), ({"$ref": "#/a"}, False), ({"anyOf": 5, "enum": 5}, True),
    ],
)  # fmt: skip
def test_schema_decides_whether_a_value_is_text(schema: Any, text: bool) -> None:
    assert is_text(schema, {"a": {"type": "object"}}) is text


def test_a_schema_that_refers_to_itself_many_times_is_read_once() -> None:
    schema: Any = {"anyOf": [{"$ref": "#/$defs/a"}] * 100}
    root = {"$defs": {"a": schema}}
    assert as_json("5", schema, root) == '"5"'


@pytest.mark.parametrize("parameters", [{"properties": []}, {"properties": {"a": 5}}, {"properties": None}, None, {}])
def test_invalid_schema_leaves_values_as_text(parameters: Any) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    parser = OutputParser(form="qwen3_coder", tools=tools)
    deltas = parser.feed("<function=f>\n<parameter=a>\n1\n</parameter>\n</function>") + parser.finish()
    assert joined(deltas).calls[0].arguments == '{"a": "1"}'


# ---- reasoning -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("start", "text", "reasoning", "content"),
    [
        ("either", "<think>\nhm\n</think>\n\nHello", "\nhm\n", "\n\nHello"),
        ("either", "\n<think>hm</think>Hello", "hm", "Hello"),
        ("either", "Hello <think>hm</think>", "", "Hello <think>hm</think>"),
        ("either", "  Hello", "", "  Hello"),
        ("either", "<thin", "", "<thin"),
        ("either", "", "", ""),
        ("reasoning", "hm</think>Hello</think>", "hm", "Hello</think>"),
        ("reasoning", "<think>\nhm</think>Hello", "\nhm", "Hello"),
        ("reasoning", "\nhm that was too lo", "\nhm that was too lo", ""),
        ("reasoning", "hm</th", "hm</th", ""),
        ("content", "<think>hm</think>Hello", "", "<think>hm</think>Hello"),
    ],
)  # fmt: skip
def test_reasoning_is_the_text_between_the_tags(start: Any, text: str, reasoning: str, content: str) -> None:
    assert plain(parse(None, text, start=start)) == (content, reasoning, [])
    message = parse("hermes", f"{text}", start=start)
    assert (message.content, message.reasoning) == (content, reasoning)


def test_call_in_reasoning_that_ends_is_reasoning() -> None:
    for form, call in {"hermes": HERMES, "qwen3_coder": CODER}.items():
        drafted = f"I could write {call} but that is risky.\n"
        assert plain(parse(form, f"{drafted}</think>\nShall I?", start="reasoning")) == ("\nShall I?", drafted, [])
        message = parse(form, f"{drafted}</think>\n{call}", start="reasoning")
        assert (message.reasoning, message.content, len(message.calls)) == (drafted, "", 1)
        assert plain(parse(form, f"{call[:40]}</think>{call}", start="reasoning"))[1] == call[:40]


def test_call_in_reasoning_that_never_ends_is_a_call() -> None:
    for form, call in {"hermes": HERMES, "qwen3_coder": CODER}.items():
        text = f"A <tool_call> tag. I do it now.\n{call}\n{call}"
        message = parse(form, text, start="reasoning")
        assert message.reasoning == "A <tool_call> tag. I do it now.\n" and message.content == ""
        assert len(message.calls) == 2
        parser = OutputParser("reasoning", form, TOOLS)
        assert plain(joined(parser.feed(text) + parser.finish(cut=True))) == ("", text, []), "it may have gone on"


def test_reasoning_that_names_a_tag_is_sent_at_once() -> None:
    sent = joined(OutputParser("reasoning", "hermes", TOOLS).feed("I write <tool_call> tags and more"))
    assert sent.reasoning == "I write <tool_call> tags and more"


# ---- streaming -----------------------------------------------------------------------------------------------

FRAGMENTS = [
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<function=weather>", "<function=", "</function>",
    "<parameter=city>", "<parameter=days>", "</parameter>", "<parameter=", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]",
    "<|python_tag|>", '{"name": ', '"weather"', '"now"', ', "arguments": ', ', "parameters": ', "{", "}", "[", "]", ",",
    ": ", '"', "\\", "\\u00e9", "\\d", '"a"', "12", "-1.5e3", "true", "None", "\n", " ", ";", "é", "😀", "word", "now",
    HERMES, CODER, LLAMA, LIST, NAMED, "\u00a0", "\x00",
]  # fmt: skip


@given(
    form=st.sampled_from([None, *FORMS]),
    start=st.sampled_from(["content", "reasoning", "either"]),
    parallel=st.booleans(),
    parts=st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=3), max_size=14),
    cuts=st.lists(st.integers(0, 400), max_size=12),
)
@example(
    form="hermes", start="either", parallel=True, parts=["<think>", "</think>", HERMES, "\n", HERMES], cuts=[3, 40]
)
@example(form="qwen3_coder", start="content", parallel=True, parts=[CODER, CODER], cuts=[*range(0, 300, 5)])
def test_parse_does_not_depend_on_how_text_is_cut(
    form: str | None, start: Any, parallel: bool, parts: list[str], cuts: list[int]
) -> None:
    text = "".join(parts)
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    pieces = [text[a:b] for a, b in itertools.pairwise(places)]
    options: dict[str, Any] = {"start": start, "parallel": parallel}
    whole = plain(parse(form, text, **options))
    assert plain(parse(form, *pieces, **options)) == whole
    assert plain(parse(form, *text, **options)) == whole
    if not whole[2] and start == "content":
        assert whole[0] == text, "nothing is lost"


scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
values = st.recursive(scalars, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8)


@given(
    arguments=st.dictionaries(st.text(), values, max_size=4), ascii=st.booleans(), indent=st.none() | st.integers(0, 2)
)
@pytest.mark.slow
def test_any_arguments_are_returned_unchanged(arguments: dict[str, Any], ascii: bool, indent: int | None) -> None:
    written = json.dumps(arguments, ensure_ascii=ascii, indent=indent)
    for form, text in {
        "hermes": f'<tool_call>{{"name": "now", "arguments": {written}}}</tool_call>',
        "llama3_json": f'{{"name": "now", "parameters": {written}}}',
        "mistral": f"[TOOL_CALLS]now[ARGS]{written}",
    }.items():
        assert plain(parse(form, text)) == ("", "", [("now", written)])


@given(arguments=st.dictionaries(st.sampled_from("abc"), st.text(alphabet='a"\\\n é</{', max_size=8)))
def test_any_parameter_text_is_returned_unchanged(arguments: dict[str, str]) -> None:
    written = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    (call,) = parse("qwen3_coder", f"<tool_call>\n<function=now>\n{written}</function>\n</tool_call>").calls
    assert json.loads(call.arguments) == arguments


def test_final_text_is_sent_immediately() -> None:
    def sent(form: str, text: str, start: Any = "content") -> Message:
        return joined(OutputParser(start, form, TOOLS).feed(text))

    assert sent("hermes", "Hello <").content == "Hello "
    assert sent("hermes", "hm <", "reasoning").reasoning == "hm "
    assert sent("hermes", HERMES[: HERMES.index("ln")]).calls[0].arguments == '{"city": "Kö'
    assert sent("llama3_json", LLAMA[: LLAMA.index("ln")]).calls[0].arguments == '{"city": "Kö'
    assert sent("mistral", NAMED[: NAMED.index("ln")]).calls[0].arguments == '{"city": "Kö'
    assert sent("qwen3_coder", CODER[: CODER.index("ln")]).calls[0].arguments == '{"city": "Kö'


def test_deltas_name_a_call_once_and_adjacent_ones_merge() -> None:
    parser = OutputParser(form="hermes", tools=TOOLS)
    deltas = [delta for character in HERMES * 2 for delta in parser.feed(character)] + parser.finish()
    tools = [delta.tool for delta in deltas if delta.tool]
    assert [tool.index for tool in tools if tool.id and tool.name] == [0, 1]
    assert [tool.index for tool in tools] == sorted(tool.index for tool in tools)
    assert len(merged(deltas)) == 2
    assert merged([Delta("a"), Delta("b"), Delta(reasoning="c"), Delta(reasoning="d"), Delta("e")]) == [
        Delta("ab"), Delta(reasoning="cd"), Delta("e"),
    ]  # fmt: skip


def test_each_character_is_scanned_a_bounded_number_of_times() -> None:
    """The buffer keeps only text that is not final, so a feed never reads the whole text again."""
    parser = OutputParser("reasoning", "hermes", TOOLS)
    for _ in range(20_000):
        parser.feed("x <")
        assert len(parser._text._buffer) < 20
