"""Grammars of tool calls: they allow exactly the calls that the parser reads."""

import json
from typing import Any

import pytest
from parsing import wide

from dflash_toolkit.sampling import Grammar
from dflash_toolkit.serve.parsing import OutputParser, joined
from dflash_toolkit.serve.parsing.forced import after_reasoning, structural_tag, written_call
from dflash_toolkit.serve.parsing.forms import FORMS

xgrammar = pytest.importorskip("xgrammar")

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "required"}},
]
STRICT = [{"type": "function", "function": TOOLS[0]["function"] | {"strict": True}}, TOOLS[1]]
BEGIN, END = "<|tool_calls_begin|>", "<|tool_calls_end|>"
CALL, SEP, CALL_END = "<|tool_call_begin|>", "<|tool_sep|>", "<|tool_call_end|>"
TO = "<|channel|>commentary to=functions."
DSML, DSML_END = "<|DSML|function_calls>\n", "\n</|DSML|function_calls>"
CALLS = {
    "hermes": '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm", "days": 3}}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=weather>\n<parameter=city>\nUlm\n</parameter>\n<parameter=days>\n3\n"
    "</parameter>\n</function>\n</tool_call>",
    "llama3_json": '{"name": "weather", "parameters": {"city": "Ulm", "days": 3}}',
    "llama4_pythonic": '{"name": "weather", "parameters": {"city": "Ulm", "days": 3}}',
    "glm45": "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Ulm</arg_value>\n<arg_key>days</arg_key>\n"
    "<arg_value>3</arg_value>\n</tool_call>",
    "deepseek_v3": f'{BEGIN}{CALL}function{SEP}weather\n```json\n{{"city": "Ulm", "days": 3}}\n```{CALL_END}{END}',
    "deepseek_v31": f'{BEGIN}{CALL}weather{SEP}{{"city": "Ulm", "days": 3}}{CALL_END}{END}',
    "deepseek_v32": f'{DSML}<|DSML|invoke name="weather">\n<|DSML|parameter name="city" string="true">Ulm'
    '</|DSML|parameter>\n<|DSML|parameter name="days" string="false">3</|DSML|parameter>\n</|DSML|invoke>' + DSML_END,
    "openai": f'{TO}weather <|constrain|>json<|message|>{{"city": "Ulm", "days": 3}}',
    "mistral": '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Ulm", "days": 3}}]',
}
SECOND = {  # a call of the tool without a schema
    "hermes": '<tool_call>\n{"name": "required", "arguments": {"x": [1]}}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=required>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>",
    "llama3_json": '{"name": "required", "parameters": {"x": [1]}}',
    "llama4_pythonic": '{"name": "required", "parameters": {"x": [1]}}',
    "glm45": "<tool_call>required\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
    "deepseek_v3": f'{BEGIN}{CALL}function{SEP}required\n```json\n{{"x": [1]}}\n```{CALL_END}{END}',
    "deepseek_v31": f'{BEGIN}{CALL}required{SEP}{{"x": [1]}}{CALL_END}{END}',
    "deepseek_v32": f'{DSML}<|DSML|invoke name="required">\n<|DSML|parameter name="x" string="false">1'
    f"</|DSML|parameter>\n</|DSML|invoke>{DSML_END}",
    "openai": f'{TO}required <|constrain|>json<|message|>{{"x": [1]}}',
    "mistral": '[TOOL_CALLS][{"name": "required", "arguments": {"x": [1]}}]',
}
CALLS, SECOND = (
    {form: wide(text) if "deepseek" in form else text for form, text in texts.items()} for texts in (CALLS, SECOND)
)
BEGIN, END, DSML, DSML_END = map(wide, (BEGIN, END, DSML, DSML_END))
TWO = {form: f"{call}\n{call}" for form, call in CALLS.items()} | {
    "llama3_json": f"{CALLS['llama3_json']}; {CALLS['llama3_json']}",
    "llama4_pythonic": f"{CALLS['llama3_json']}; {CALLS['llama3_json']}",
    "openai": f"{CALLS['openai']}<|call|><|start|>assistant{CALLS['openai']}",
    "deepseek_v3": CALLS["deepseek_v3"].replace(END, "") + "\n" + CALLS["deepseek_v3"].replace(BEGIN, ""),
    "deepseek_v31": CALLS["deepseek_v31"].replace(END, "") + CALLS["deepseek_v31"].replace(BEGIN, ""),
    "deepseek_v32": CALLS["deepseek_v32"].replace(DSML_END, "\n") + CALLS["deepseek_v32"].replace(DSML, ""),
    "mistral": f"{CALLS['mistral'][:-1]}, {CALLS['mistral'].removeprefix('[TOOL_CALLS][')}",
}
START: dict[str, Any] = {"openai": "messages"}
COMPILER = xgrammar.GrammarCompiler(
    xgrammar.TokenizerInfo(
        [bytes([byte]) for byte in range(256)] + [b""], xgrammar.VocabType.RAW, vocab_size=257, stop_token_ids=[256]
    )
)
forms = pytest.mark.parametrize("form", FORMS)


def allows(form: str, text: str, tools: Any = TOOLS, **options: Any) -> bool:
    """Returns whether the grammar allows this whole answer."""
    tag = structural_tag(form, tools, **options)
    matcher = xgrammar.GrammarMatcher(COMPILER.compile_structural_tag(json.dumps(tag)))
    return all(matcher.accept_token(byte) for byte in text.encode()) and matcher.accept_token(256)


@forms
def test_grammar_of_required_call_matches_the_parser(form: str) -> None:
    for text, count in ((CALLS[form], 1), (SECOND[form], 1), (TWO[form], 2)):
        assert allows(form, text, required=True)
        parser = OutputParser(START.get(form, "content"), form, TOOLS)
        message = joined(parser.feed(text) + parser.finish())
        assert (message.content, len(message.calls)) == ("", count)
    for text in ("", "Hello", f"Hello {CALLS[form]}", CALLS[form].replace("city", "town"), CALLS[form] + "Hello"):
        assert not allows(form, text, required=True)


@forms
def test_written_call_is_read_as_the_same_call(form: str) -> None:
    arguments = {"city": "Ulm", "days": 3, "x": [1, "é"], "y": "5"}
    parser = OutputParser(START.get(form, "content"), form, TOOLS)
    written = written_call(form, "weather", arguments)
    message = joined(parser.feed(written) + parser.finish())
    (call,) = message.calls
    expected = arguments | ({"x": '[1, "é"]'} if form in ("qwen3_coder", "glm45") else {})  # the schema has no `x`
    assert (message.content, call.name, json.loads(call.arguments)) == ("", "weather", expected)


@forms
def test_named_function_is_called_exactly_once(form: str) -> None:
    assert allows(form, CALLS[form], named="weather") and not allows(form, SECOND[form], named="weather")
    assert allows(form, SECOND[form], named="required") and not allows(form, CALLS[form], named="required")
    assert not allows(form, TWO[form], named="weather")


@forms
def test_only_allowed_functions_can_be_called(form: str) -> None:
    for required in (False, True):
        assert allows(form, SECOND[form], required=required, allowed=["required"])
        assert not allows(form, CALLS[form], required=required, allowed=["required"])
        assert allows(form, "Hello", required=required, allowed=["required"]) is not required


@forms
def test_answer_has_the_format_or_calls(form: str) -> None:
    content = Grammar("json", json.dumps({"type": "object", "properties": {"ok": {"type": "boolean"}},
                                          "required": ["ok"], "additionalProperties": False}))  # fmt: skip
    for tools in (TOOLS, STRICT):
        for text in ('{"ok": true}', CALLS[form], TWO[form]):
            assert allows(form, text, tools, content=content)
        for text in ("Hello", '{"no": 1}', CALLS[form] + '{"ok": true}'):
            assert not allows(form, text, tools, content=content)
    assert allows(form, CALLS[form], required=True, content=content)
    assert not allows(form, '{"ok": true}', required=True, content=content)


@forms
def test_written_call_is_one_that_the_grammar_allows(form: str) -> None:
    text = written_call(form, "weather", {"city": "Ulm", "days": 3})
    assert text == CALLS[form] and allows(form, text, required=True)


@forms
def test_without_parallel_calls_there_is_one(form: str) -> None:
    assert allows(form, CALLS[form], required=True, parallel=False)
    assert not allows(form, TWO[form], required=True, parallel=False)


@forms
def test_calls_are_free_unless_a_tool_is_strict(form: str) -> None:
    assert structural_tag(form, TOOLS) is None
    for text in ("Hello", "", CALLS[form], f"Hello {CALLS[form] if form == 'openai' else TWO[form]}"):
        assert allows(form, text, STRICT)
    assert not allows(form, CALLS[form].replace("city", "town"), STRICT)


@forms
def test_reasoning_comes_before_the_call(form: str) -> None:
    thought, call = "hm, {<tool_call>}\n</think>\n\n", CALLS[form]
    assert allows(form, thought + call, required=True, start="reasoning")
    assert not allows(form, call, required=True, start="reasoning")
    assert allows(form, f"<think>{thought}{call}", required=True, start="either")
    assert allows(form, call, required=True, start="either")
    assert not allows(form, "<think>hm", required=True, start="either")


def test_grammar_of_gpt_oss_applies_to_its_final_message() -> None:
    tag = after_reasoning(Grammar("regex", "[0-9]{3}"), "messages")
    final = "<|channel|>final<|message|>"
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    matcher = xgrammar.GrammarMatcher(COMPILER.compile_structural_tag(tag.text))
    assert all(matcher.accept_token(byte) for byte in f"{thought}{final}123".encode()) and matcher.accept_token(256)
    assert allows("openai", thought + CALLS["openai"], required=True, start="messages")
    assert not allows("openai", f"{thought}{final}Hello", required=True, start="messages")
    matcher.reset()
    assert not all(matcher.accept_token(byte) for byte in f"{final}12a".encode())
