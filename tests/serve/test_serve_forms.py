"""Tool calls in the forms of published chat templates, whole, streamed and cut."""

import itertools
import json
from typing import Any

import pytest
from conftest import EOS
from hypothesis import given
from hypothesis import strategies as st
from parsing import HERMES, LLAMA, TOOLS, plain, wide
from token_texts import BYTES, cut, cuts, encode

from dflash_toolkit.runtime import Progress
from dflash_toolkit.serve.answer import Answer, AnswerOptions
from dflash_toolkit.serve.parsing import Message, OutputParser, joined
from dflash_toolkit.serve.parsing.forms import FORMS

# the text of a model -> its content, reasoning and calls
WEATHER: Any = ("weather", {"city": "Köln 😀", "days": 3, "places": ["a", "b"], "exact": True})
NOW: Any = ("now", {})
ARGUMENTS = json.dumps(WEATHER[1], ensure_ascii=False)
CODED = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nKöln 😀\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
    "<parameter=places>\n['a', 'b']\n</parameter>\n<parameter=exact>\nTrue\n</parameter>\n</function>\n</tool_call>"
)
GLM = (
    "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Köln 😀</arg_value>\n<arg_key>days</arg_key>\n"
    '<arg_value>3</arg_value>\n<arg_key>places</arg_key>\n<arg_value>["a", "b"]</arg_value>\n'
    "<arg_key>exact</arg_key>\n<arg_value>true</arg_value>\n</tool_call>"
)
V3 = (
    "<|tool_calls_begin|><|tool_call_begin|>function<|tool_sep|>weather\n```json\n" + ARGUMENTS + "\n```"
    "<|tool_call_end|>\n<|tool_call_begin|>function<|tool_sep|>now\n```json\n{}\n```<|tool_call_end|><|tool_calls_end|>"
)
V31 = (
    "<|tool_calls_begin|><|tool_call_begin|>weather<|tool_sep|>" + ARGUMENTS + "<|tool_call_end|>"
    "<|tool_call_begin|>now<|tool_sep|>{}<|tool_call_end|><|tool_calls_end|>"
)
V32 = (
    '<|DSML|function_calls>\n<|DSML|invoke name="weather">\n'
    '<|DSML|parameter name="city" string="true">Köln 😀</|DSML|parameter>\n'
    '<|DSML|parameter name="days" string="false">3</|DSML|parameter>\n'
    '<|DSML|parameter name="places" string="false">["a", "b"]</|DSML|parameter>\n'
    '<|DSML|parameter name="exact" string="false">true</|DSML|parameter>\n</|DSML|invoke>\n'
    '<|DSML|invoke name="now">\n</|DSML|invoke>\n</|DSML|function_calls>'
)
PYTHON = "[weather(city='Köln 😀', days=3, places=['a', 'b'], exact=True), now()]"
ANSWERS: list[tuple[str, str, str, list[Any]]] = [
    ("hermes", f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>', "", [WEATHER]),
    ("hermes", f'Yes.\n<tool_call>\n{{"name": "now"}}\n</tool_call>\n{HERMES}', "Yes.\n", [NOW, ...]),
    ("qwen3_coder", CODED, "", [WEATHER]),
    ("qwen3_coder", f"I look it up.\n\n{CODED}\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
     "I look it up.\n\n", [WEATHER, NOW]),
    ("glm45", f"\n{GLM}\n<tool_call>now\n</tool_call>", "", [WEATHER, NOW]),
    ("glm45", f"Yes.{GLM.replace(chr(10), '')}<tool_call>now</tool_call>", "Yes.", [WEATHER, NOW]),
    ("deepseek_v3", V3, "", [WEATHER, NOW]),
    ("deepseek_v31", f"Yes.{V31}", "Yes.", [WEATHER, NOW]),
    ("deepseek_v32", f"Yes.\n\n{V32}", "Yes.\n\n", [WEATHER, NOW]),
    ("deepseek_v32", V32.replace("function_calls", "tool_calls"), "", [WEATHER, NOW]),
    ("llama4_pythonic", PYTHON, "", [WEATHER, NOW]),
    ("llama4_pythonic", f"<|python_start|>{PYTHON}<|python_end|>", "", [WEATHER, NOW]),
    ("llama4_pythonic", f'<|python_start|><|python_end|>{{"name": "weather", "parameters": {ARGUMENTS}}}',
     "<|python_start|>", [WEATHER]),
    ("llama4_pythonic", f'{{"name": "weather", "parameters": {ARGUMENTS}}}', "", [WEATHER]),
    ("llama3_json", f'{{"name": "weather", "parameters": {ARGUMENTS}}}', "", [WEATHER]),
    ("llama3_json", f'<|python_tag|>{{"name": "weather", "parameters": {ARGUMENTS}}}; {LLAMA}', "", [WEATHER, ...]),
    ("openai", f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{ARGUMENTS}", "", [WEATHER]),
    ("openai", f" to=functions.weather<|channel|>commentary json<|message|>{ARGUMENTS}<|call|>", "", [WEATHER]),
    ("openai", "<|channel|>commentary<|message|>Yes.<|end|><|start|>assistant to=functions.weather<|channel|>"
     f"commentary json<|message|>{ARGUMENTS}<|call|><|start|>assistant<|channel|>commentary to=functions.now<|message|>"
     "{}<|call|>", "Yes.", [WEATHER, NOW]),
    ("mistral", f"[TOOL_CALLS]weather[ARGS]{ARGUMENTS}[TOOL_CALLS]now[CALL_ID]abcdefghi[ARGS]{{}}", "", [WEATHER, NOW]),
    ("mistral", f'[TOOL_CALLS] [{{"name": "weather", "arguments": {ARGUMENTS}}}]', "", [WEATHER]),
]  # fmt: skip
ANSWERS = [(form, wide(text) if "deepseek" in form else text, *rest) for form, text, *rest in ANSWERS]


def parse(form: str, *pieces: str, start: Any = "content", cut: bool = False) -> Message:
    start = "messages" if form == "openai" else start
    parser = OutputParser(start, form, TOOLS)
    return joined([delta for piece in pieces for delta in parser.feed(piece)] + parser.finish(cut))


@pytest.mark.parametrize(("form", "text", "content", "calls"), ANSWERS)
def test_texts_of_published_templates_are_read(form: str, text: str, content: str, calls: list[Any]) -> None:
    message = parse(form, text)
    assert message.content == content
    found = [(call.name, json.loads(call.arguments)) for call in message.calls]
    assert [... if call is ... else one for one, call in zip(found, calls, strict=True)] == calls


@pytest.mark.parametrize(
    ("text", "content", "reasoning"),
    [
        ("<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hello.<|return|>",
         "Hello.", "Hm."),
        ("<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>analysis<|message|>So.<|end|>"
         "<|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
         "<|start|>assistant<|channel|>final<|message|>A <b>",
         "I look.\nA <b>", "Hm.\nSo."),
        ("<|channel|>commentary to=python code<|message|>print(1)<|call|>", "", "print(1)"),
        ("<|channel|>analysis<|message|>Cut <|en", "", "Cut "), ("<|channel|>anal", "", ""),
        ("Hello <b>", "Hello <b>", ""),
        ("<|channel|>final<|message|>a<|start|>assistant<|channel|>final<|message|>b", "a\nb", ""),
        ("<|channel|>commentary to=functions.now<|message|>no JSON<|call|>", "no JSON", ""),
    ],
)  # fmt: skip
def test_channels_of_gpt_oss_are_reasoning_or_content(text: str, content: str, reasoning: str) -> None:
    for pieces in ([text], list(text)):
        assert plain(parse("openai", *pieces)) == (content, reasoning, [])
    parser = OutputParser("messages")
    without_tools = joined(parser.feed(text) + parser.finish())
    assert (without_tools.content, without_tools.reasoning) == (content, reasoning)


def test_every_form_has_a_text() -> None:
    assert {form for form, *_ in ANSWERS} == set(FORMS)


texts = st.sampled_from([(form, text) for form, text, *_ in ANSWERS])


@given(
    answer=texts,
    start=st.sampled_from(["content", "reasoning"]),
    thoughts=st.sampled_from(["", "Hm.</think>", "Hm {call} hm</think>", "Hm {call}\n"]),
    damage=st.lists(
        st.tuples(st.integers(0, 1000), st.sampled_from(["", ",", "}", "{", '"', "'", "]", "x", "\n", "<"]))
    ),
    cuts=st.lists(st.integers(0, 1000), max_size=12),
    cut=st.booleans(),
)
def test_damaged_texts_in_random_pieces_equal_the_whole(
    answer: Any, start: Any, thoughts: str, damage: list[tuple[int, str]], cuts: list[int], cut: bool
) -> None:
    form, text = answer
    text = thoughts.replace("{call}", text) + text
    for at, character in damage[:3]:
        at %= len(text)
        text = text[:at] + character + text[at + (not character) :]
    places = sorted({0, len(text), *(place % (len(text) + 1) for place in cuts)})
    whole = plain(parse(form, text, start=start, cut=cut))
    assert plain(parse(form, *(text[a:b] for a, b in itertools.pairwise(places)), start=start, cut=cut)) == whole
    assert plain(parse(form, *text, start=start, cut=cut)) == whole
    for _, arguments in whole[2][: -1 if cut else None]:
        assert isinstance(json.loads(arguments), dict)


@pytest.mark.parametrize(("form", "text", "content", "calls"), ANSWERS)
def test_no_prefix_of_an_answer_gives_half_a_call(form: str, text: str, content: str, calls: list[Any]) -> None:
    for end in range(len(text)):
        read, _, found = plain(parse(form, text[:end]))
        assert all(isinstance(json.loads(arguments), dict) for _, arguments in found), text[:end]
        if form == "openai":
            assert content.startswith(read)
        elif not found:
            assert read == text[:end], "as it is"
        elif rest := read.removeprefix(content).strip():  # another call, which is cut before its name
            assert read.startswith(content) and text[:end].strip().endswith(rest)
            assert any(start.startswith(rest[: len(start)]) for start in FORMS[form].starts)
        cut_read, _, cut = plain(parse(form, text[:end], cut=True))
        assert [name for name, _ in cut] == [name for name, _ in found]
        for (_, opened), (_, closed) in zip(cut, found, strict=True):
            assert closed == opened or not _is_json(opened)
        assert cut_read == read


@given(answer=texts, cuts=cuts, reason=st.sampled_from(["stop", "length"]), share=st.floats(0, 1))
def test_tokens_within_a_character_do_not_change_calls(answer: Any, cuts: list[int], reason: Any, share: float) -> None:
    """Each token is a byte, so that a step may end within a character."""
    form, text = answer
    ids = encode(text)[: int(share * len(text.encode()))]

    def play(steps: list[list[int]]) -> Any:
        parser = OutputParser("messages" if form == "openai" else "content", form, TOOLS)
        answer = Answer(BYTES, 1, AnswerOptions(), parser)
        last = (EOS,) if reason == "stop" else ()
        ends = [*([None] * (len(steps) - 1)), reason]
        pieces = [
            answer.add(Progress((*step, *(last if end else ())), None, end))
            for step, end in zip(steps, ends, strict=True)
        ]
        return plain(joined(delta for piece in pieces for delta in piece.deltas or ())), answer.reason

    whole, finish_reason = play([ids])
    assert play(cut(ids, cuts) or [[]]) == (whole, finish_reason) == play([[token] for token in ids] or [[]])
    assert finish_reason == ("tool_calls" if whole[2] and reason == "stop" else reason)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
