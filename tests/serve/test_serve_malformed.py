"""Tool calls that are malformed or cut: each is corrected, or stays in the content as it is."""

import json
from typing import Any

import pytest
from parsing import CODER, HERMES, LLAMA, NAMED, TOOLS, parse, plain

from dflash_toolkit.serve.parsing import OutputParser, joined

MALFORMED = {
    "hermes": [
        "<tool_call>", "<tool_call>\n", "<tool_call>no JSON</tool_call>", "<tool_call>[]</tool_call>", "</tool_call>",
        '<tool_call>{"arguments": {}}</tool_call>', '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "", "arguments": {}}</tool_call>', '<tool_call>{"name": "now", "arguments": [1]}',
        '<tool_call>{"name": "now", "arguments": "text"}</tool_call>', '<tool_call>{"name": "now" "arguments": {}}',
        '<tool_call>{"name": "now", "arguments": ' + "9" * 5000 + "}", '<tool_call>{"name": "\\ud800"}</tool_call>',
        '<tool_call>{"name": "now", "arguments": "\\ud800"}', "<tool_call>" + "[" * 2000, "<tool_", "< tool_call>{}",
        '<tool_call>{"name": "now", "arguments": ' + "[" * 20_000 + "]" * 20_000 + "}",
    ],
    "qwen3_coder": [
        "<tool_call>", "<tool_call>\nno function", "<function=", "<function=>", "<function=a\nb>", "<function=now>",
        "<function=now>\ntext</function>", "<function=now>\n<param", "<tool_call></tool_call>", "<function=a<function=",
    ],
    "llama3_json": [
        "<|python_tag|>import os", '{"name": "unknown", "parameters": {}}', '{"a": 1}', '{"name": "now"}', "{", "{}",
        'x {"name": "now", "parameters": {}}', '[{"name": "now", "parameters": {}}]', '{"name": "now", "score": 5}',
    ],
    "mistral": [
        "[TOOL_CALLS]", "[TOOL_CALLS] []", "[TOOL_CALLS]now", "[TOOL_CALLS]now[ARGS]", "[TOOL_CALLS]now[ARGS][]",
        "[TOOL_CALLS][ARGS]{}", "[TOOL_CALLS]now[CALL", "[TOOL", '[TOOL_CALLS] [{"arguments": {}}]',
    ],
}  # fmt: skip


@pytest.mark.parametrize(("form", "text"), [(form, text) for form, texts in MALFORMED.items() for text in texts])
def test_malformed_call_stays_in_the_content(form: str, text: str) -> None:
    for whole in (text, f"before {text}", f"{text}\nafter") if form != "llama3_json" else (text,):
        assert plain(parse(form, whole)) == (whole, "", [])


def test_call_after_a_malformed_one_is_found() -> None:
    content, _, calls = plain(parse("hermes", f"<tool_call>{{nothing {HERMES}"))
    assert (content, len(calls)) == ("<tool_call>{nothing ", 1)


def test_cut_arguments_stay_open() -> None:
    """No client may run a call with a cut value."""
    for form, text in {"hermes": HERMES, "mistral": NAMED, "llama3_json": LLAMA, "qwen3_coder": CODER}.items():
        whole = parse(form, text).calls[0].arguments
        parser = OutputParser(form=form, tools=TOOLS)
        message = joined(parser.feed(text[: text.index("Kö") + 2]) + parser.finish(cut=True))
        assert message.content == "" and message.calls[0].arguments == whole[: whole.index("Kö") + 2], form
        assert not parser.called


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ('{"a": 1,}', {"a": 1}), ('{"a": [1, 2,],}', {"a": [1, 2]}), ('{"a": 1,, "b": 2}', {"a": 1, "b": 2}),
        ('{"a": word}', {"a": "word"}), ('{"a": two words, "b": 1}', {"a": "two words", "b": 1}),
        ("{'a': 'b'}", {"a": "b"}), ("{'a': 'it\\'s', 'b': [None, False]}", {"a": "it's", "b": [None, False]}),
        ('{a: 1, b: "x"}', {"a": 1, "b": "x"}), ('{"a": 1 "b": 2}', {"a": 1, "b": 2}),
        ('{"a": [1, 2}', {"a": [1, 2]}), ('{"a": {"b": [1}}', {"a": {"b": [1]}}), ('{"a": 1]}', {"a": 1}),
        ('{{"a": 1}}', {"a": 1}), ('{"a": }', {"a": None}),
        ('{"a": NaN, "b": +5, "c": .5}', {"a": None, "b": 5, "c": 0.5}),
        ('{"a": "say "hi" to me"}', {"a": 'say "hi" to me'}), ("{,}", {}), ('{"a": 1', {"a": 1}),
        ('{"a": [1, ', {"a": [1]}),
        ('{"a": {"b": "c"', {"a": {"b": "c"}}), ('{"a": 1}, "id": [2, x}', {"a": 1}),
    ],
)  # fmt: skip
def test_arguments_that_are_nearly_json_are_corrected(written: str, meant: Any) -> None:
    for form, text in {
        "hermes": f'<tool_call>{{"name": "now", "arguments": {written}}}</tool_call>',
        "llama3_json": f'{{"name": "now", "parameters": {written}}}',
        "mistral": f"[TOOL_CALLS]now[ARGS]{written}",
    }.items():
        if form == "hermes" or written.count("{") == written.count("}"):
            content, _, ((_, arguments),) = plain(parse(form, text))
            assert (content, json.loads(arguments)) == ("", meant), form


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("", {}), ('"a', {}), ('"a": ', {}), ('"a": 1', {"a": 1}), ('"a": [1, ', {"a": [1]}), ('"a": "b', {"a": "b"}),
        ('"a": 1, "b', {"a": 1}), ('"a": {"b": "c\\u12', {"a": {"b": "c"}}), ('"a": 1</tool_', {"a": 1}),
    ],
)  # fmt: skip
def test_arguments_that_the_model_does_not_end_are_closed(written: str, meant: Any) -> None:
    content, _, ((_, arguments),) = plain(parse("hermes", f'<tool_call>{{"name": "now", "arguments": {{{written}'))
    assert (content, json.loads(arguments)) == ("", meant)


def test_string_without_its_last_quote_ends_before_the_call() -> None:
    for end in ("}}\n</tool_call>", "}}</tool_call>\n", "}", "\n</tool_", ""):
        text = f'<tool_call>\n{{"name": "now", "arguments": {{"a": "b \\\\n{{}}.{end}'
        for pieces in ([text], list(text)):
            assert plain(parse("hermes", *pieces)) == ("", "", [("now", '{"a": "b \\\\n{}."}')]), end


def test_text_within_a_call_after_its_arguments_is_dropped() -> None:
    message = parse("hermes", '<tool_call>{"name": "now", "arguments": {"a": 1}} or so</tool_call> Done.')
    assert plain(message) == (" Done.", "", [("now", '{"a": 1}')])
    message = parse("qwen3_coder", "<function=now>\n<parameter=a>\n1\n</parameter>\noops\n</function>")
    assert plain(message) == ("", "", [("now", '{"a": "1"}')])
    message = parse("qwen3_coder", "<function=now>\n<parameter=a>\n1\n</parameter>\nThat is all.")
    assert plain(message) == ("That is all.", "", [("now", '{"a": "1"}')])


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ('{"a": "x\ny\tz\x01"}', {"a": "x\ny\tz\x01"}),
        (r'{"a": "\d \' \u12 \\ \u00e9 \/"}', {"a": "\\d ' \\u12 \\ é /"}),
        ('{"a": [True, False, None, -0.5e3]}', {"a": [True, False, None, -500.0]}),
        ('{"a": {"b": [{}, [], "\\"}"]}}', {"a": {"b": [{}, [], '"}']}}),
    ],
)
def test_frequent_json_errors_of_models_are_corrected(written: str, meant: Any) -> None:
    (call,) = parse("hermes", f'<tool_call>{{"name": "now", "arguments": {written}}}</tool_call>').calls
    assert json.loads(call.arguments) == meant
    (call,) = parse("mistral", f"[TOOL_CALLS]now[ARGS]{written}").calls
    assert json.loads(call.arguments) == meant


@pytest.mark.parametrize("end", ["", "\n</tool_call>", "}\n</tool_call>", "}}}</tool_call>"])
def test_missing_or_extra_braces_after_arguments_are_accepted(end: str) -> None:
    assert plain(parse("hermes", f'<tool_call>{{"name": "now", "arguments": {{"a": 1}}{end}')) == (
        "", "", [("now", '{"a": 1}')],
    )  # fmt: skip
