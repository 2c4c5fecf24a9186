"""Tools and reasoning through the real `openai` client, with a model that recites fixed texts."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from conftest import make_drafter, make_tokenizer
from live_server import chat, client_of, make_engine, refusal, serving
from openai import OpenAI
from parsing import wide
from reciting import ARGUMENTS, CLOCKS, JSON, SAYS, SPECIAL, TIGHT, TOOLS, make_reciting

from dflash_toolkit import Target, UserError
from dflash_toolkit.runtime import AsyncEngine
from dflash_toolkit.serve.parsing import Parsers, joined
from dflash_toolkit.serve.parsing.forms import FORMS
from dflash_toolkit.serve.text import Detokenizer


@pytest.fixture(scope="module")
def target() -> Target:
    return make_reciting()


@pytest.fixture(scope="module")
def engine(target: Target) -> AsyncEngine:
    return make_engine(target, make_drafter(target))


@pytest.fixture(scope="module")
def url(engine: AsyncEngine) -> Iterator[str]:
    with serving(engine) as url:
        yield url


@pytest.fixture(scope="module")
def client(url: str) -> OpenAI:
    return client_of(url)


def say(client: OpenAI, head: str, **options: Any) -> Any:
    """Returns the answer to a prompt."""
    messages = [{"role": "user", "content": f"Please: {head}"}]
    return chat(client, **{"messages": messages, "tools": TOOLS, "max_tokens": 400} | options).choices[0]


def streamed(client: OpenAI, head: str, **options: Any) -> tuple[dict[str, Any], str, list[Any]]:
    """Returns the joined message of a stream, its finish reason and its deltas."""
    messages = [{"role": "user", "content": f"Please: {head}"}]
    options = {"messages": messages, "tools": TOOLS, "max_tokens": 400, "stream": True} | options
    *chunks, last = (chunk.choices[0] for chunk in chat(client, **options))
    assert all(chunk.finish_reason is None for chunk in chunks)
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    for delta in (chunk.delta for chunk in chunks):
        message["content"] += delta.content or ""
        message["reasoning_content"] += getattr(delta, "reasoning_content", None) or ""
        for call in delta.tool_calls or ():
            if call.id:
                assert call.type == "function" and call.index == len(message["tool_calls"])
                message["tool_calls"].append({"name": call.function.name, "arguments": ""})
            else:
                assert call.function.name is None and call.type is None
            message["tool_calls"][call.index]["arguments"] += call.function.arguments
    return message, last.finish_reason, [chunk.delta for chunk in chunks]


# ---- answers -------------------------------------------------------------------------------------------------


def test_answers_have_calls_in_openai_form(client: OpenAI) -> None:
    choice = say(client, "h")
    assert choice.finish_reason == "tool_calls" and choice.message.content == "I look it up.\n"
    first, second = choice.message.tool_calls
    assert (first.type, first.function.name, json.loads(first.function.arguments)) == ("function", "weather", ARGUMENTS)
    assert (second.function.name, second.function.arguments) == ("now", "{}")
    assert first.id != second.id
    assert not hasattr(choice.message, "reasoning_content")


def test_a_stream_is_the_whole_answer_in_pieces(client: OpenAI) -> None:
    for head in "ahtb":
        whole, (message, reason, deltas) = say(client, head), streamed(client, head)
        calls = [{"name": c.function.name, "arguments": c.function.arguments} for c in whole.message.tool_calls or ()]
        assert message["tool_calls"] == calls and message["content"] == (whole.message.content or "")
        assert message["reasoning_content"] == getattr(whole.message, "reasoning_content", "")
        assert reason == whole.finish_reason
        assert all(len([x for x in (d.content, d.tool_calls) if x]) <= 1 for d in deltas), "one thing a chunk"
    fragments = [d.tool_calls[0].function.arguments for d in streamed(client, "h")[2] if d.tool_calls]
    assert len(fragments) > 4, "as they come"


@pytest.mark.parametrize(("parser", "head"), [("qwen3_coder", "q"), ("llama3_json", "l"), ("mistral", "m")])
def test_forms_are_read_if_their_markers_are_special_tokens(target: Target, parser: str, head: str) -> None:
    with serving(make_engine(target, None), tool_call_parser=parser) as url:
        client = client_of(url)
        (call,) = say(client, head).message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("weather", ARGUMENTS)
        message, reason, _ = streamed(client, head)
        assert message["tool_calls"] == [{"name": "weather", "arguments": call.function.arguments}]
        assert (message["content"], reason) == ("", "tool_calls")
        plain = say(client, head, tools=[]).message.content
        assert plain.replace("\n", "") and not any(marker in plain for marker in SPECIAL), "they are special tokens"


def test_a_malformed_call_is_content(client: OpenAI) -> None:
    choice = say(client, "b")
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (SAYS["b"], None, "stop")


def test_calls_are_content_without_tools_or_with_choice_none(client: OpenAI) -> None:
    for options in ({"tools": []}, {"tools": None}, {"tool_choice": "none"}):
        choice = say(client, "h", **options)
        assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (SAYS["h"], None, "stop")


def test_without_parallel_tool_calls_there_is_one_call(client: OpenAI) -> None:
    (call,) = say(client, "h", parallel_tool_calls=False).message.tool_calls
    assert call.function.name == "weather"


def test_cut_call_has_finish_reason_length(client: OpenAI) -> None:
    choice = say(client, "h", max_tokens=26)
    assert choice.finish_reason == "length"
    (call,) = choice.message.tool_calls
    assert JSON.startswith(call.function.arguments) and call.function.arguments != JSON


def test_every_answer_of_several_has_its_calls(client: OpenAI) -> None:
    messages = [{"role": "user", "content": "h"}]
    choices = chat(client, messages=messages, tools=TOOLS, max_tokens=400, n=3).choices
    assert [[call.function.name for call in choice.message.tool_calls] for choice in choices] == [
        ["weather", "now"]
    ] * 3
    assert len({call.id for choice in choices for call in choice.message.tool_calls}) == 6


def test_log_probabilities_cover_tokens_of_reasoning_and_calls(client: OpenAI) -> None:
    whole = say(client, "h", logprobs=True)
    messages = [{"role": "user", "content": "Please: h"}]
    stream = chat(client, messages=messages, tools=TOOLS, max_tokens=400, logprobs=True, stream=True)
    pieces = [chunk.choices[0].logprobs for chunk in stream]
    tokens = [token.token for piece in pieces if piece for token in piece.content]
    assert tokens == [token.token for token in whole.logprobs.content]
    assert "".join(tokens) == SAYS["h"]


# ---- reasoning -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tools", [[], TOOLS], ids=["plain", "tools"])
def test_reasoning_is_separate_if_model_or_template_opens_it(client: OpenAI, tools: list[Any]) -> None:
    expected = {True: ("\nwell, well\n", "\n\nHello you."), False: (None, "No thoughts.")}
    for thinking, (reasoning, content) in expected.items():
        options = {"tools": tools, "extra_body": {"chat_template_kwargs": {"enable_thinking": thinking}}}
        message = say(client, "a", **options).message
        assert (getattr(message, "reasoning_content", None), message.content.strip()) == (reasoning, content.strip())
        pieces = streamed(client, "a", **options)[0]
        assert (pieces["reasoning_content"], pieces["content"]) == (reasoning or "", message.content)
    message = say(client, "t", tools=tools).message
    assert message.reasoning_content == "\nhm, hm\n"
    assert (message.content is None) == bool(message.tool_calls) == bool(tools)


def test_template_gets_only_variables_it_uses(client: OpenAI) -> None:
    for effort in ("none", "low", "max"):
        message = say(client, "a", tools=[], extra_body={"reasoning_effort": effort}).message
        assert hasattr(message, "reasoning_content") == (effort != "none")
    kept = {"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": False, "note": "Note!"}}
    messages = [{"role": "user", "content": "a"}]
    answer = chat(client, messages=messages, max_tokens=1, extra_body=kept | {"return_token_ids": True})
    prompt = make_tokenizer().decode([token for token in answer.prompt_token_ids if token < 256])
    assert "Note!" in prompt and answer.usage.completion_tokens_details.reasoning_tokens == 0
    plain = say(client, "a", tools=[])
    for value in ({"nope": 1}, {"tools": [1]}, {"messages": []}):
        assert say(client, "a", tools=[], extra_body={"chat_template_kwargs": value}) == plain
    error = refusal(say, client, "a", extra_body={"chat_template_kwargs": {"enable_thinking": "no"}})
    assert (error.status_code, error.param) == (400, "chat_template_kwargs.enable_thinking")
    error = refusal(say, client, "a", extra_body={"reasoning_effort": "much"})
    assert (error.status_code, error.param) == (400, "reasoning_effort")


@pytest.mark.parametrize("thinks", [True, False])
def test_other_names_of_the_thinking_switch_work(client: OpenAI, thinks: bool) -> None:
    kind = "enabled" if thinks else "disabled"
    for fields in (
        {"enable_thinking": thinks},
        {"thinking": thinks},
        {"thinking": {"type": kind, "budget_tokens": 9}},
        {"reasoning": {"enabled": thinks}},
        {"reasoning": {"effort": "high" if thinks else "none"}},
        {"enable_thinking": not thinks, "chat_template_kwargs": {"enable_thinking": thinks}},
    ):
        message = say(client, "a", tools=[], extra_body=fields).message
        assert hasattr(message, "reasoning_content") == thinks, fields


def test_cut_reasoning_stays_reasoning(client: OpenAI) -> None:
    choice = say(client, "t", max_tokens=3)
    assert choice.finish_reason == "length" and choice.message.content is None
    assert "\nhm, hm".startswith(choice.message.reasoning_content)


def test_parsers_can_be_disabled(target: Target) -> None:
    with serving(make_engine(target, None), tool_call_parser="none", reasoning_parser="none") as url:
        client = client_of(url)
        assert say(client, "t", tools=[]).message.content == SAYS["t"]
        error = refusal(say, client, "h")
        assert (error.status_code, error.param) == (400, "tools") and "--tool-call-parser" in str(error)


# ---- conversations -------------------------------------------------------------------------------------------


def test_a_conversation_with_calls_goes_through_the_template(engine: AsyncEngine, client: OpenAI) -> None:
    """The returned message is sent back unchanged, with the result of the call."""
    message = say(client, "h").message
    question = {"role": "user", "content": "Please: h"}
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "5 degrees, a"}
    messages = [question, message.model_dump(), result]
    answer = chat(client, messages=messages, tools=TOOLS, max_tokens=20, extra_body={"return_token_ids": True})
    assert answer.choices[0].message.content == SAYS["a"]
    prompt = engine.tokenizer.decode(answer.prompt_token_ids)
    assert '"name": "weather", "arguments": {"city"' in prompt, "as a mapping"
    assert '"description": "The weather of a city"' in prompt and "5 degrees, a" in prompt


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        *(
            ({"tool_choice": {"type": "allowed_tools", "allowed_tools": allowed}}, "tool_choice")
            for allowed in (
                {"mode": "auto", "tools": []},
                {"mode": "none", "tools": TOOLS},
                {"mode": "auto"},
                {"mode": "auto", "tools": [{"type": "function", "function": {"name": "other"}}]},
            )
        ),
        ({"tools": [*TOOLS, TOOLS[0]]}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "two words"}}]}, "tools[0].function.name"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
            "tools[0].function.parameters",
        ),
    ],
)
def test_invalid_tools_get_400_with_the_parameter(client: OpenAI, options: dict[str, Any], param: str) -> None:
    error = refusal(say, client, "h", extra_body=options)
    assert (error.status_code, error.param) == (400, param)


# ---- the choice of parsers -----------------------------------------------------------------------------------


TEMPLATES = {
    '{{ "<tool_call>\\n{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}" }}': ("hermes", None),
    "<tool_call>\n<function=name>\n<parameter=key>{{ x }}</think>": ("qwen3_coder", "qwen3"),
    "<seed:tool_call><function=name><parameter=key>": (None, None),
    "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>": ("glm45", None),
    wide("{{'<|tool_calls_begin|>'}}{{'\n```json\n'}}"): ("deepseek_v3", None),
    wide("<|Assistant|></think><think>{{'<|tool_calls_begin|><|tool_call_begin|>'}}"): ("deepseek_v31", "qwen3"),
    wide('{% set dsml_token = "|DSML|" %}<{{ dsml_token }}function_calls>'): ("deepseek_v32", None),
    '<|header_start|>{{ \'{"name": function name, "parameters": dictionary}\' }}': ("llama4_pythonic", None),
    "<|start|>assistant to=functions.{{ name }}<|channel|>commentary json<|message|>": ("openai", "openai_gptoss"),
    "[TOOL_CALLS] [{{ call | tojson }}]": ("mistral", None),
    '<|start_header_id|>{{ \'{"name": function name, "parameters": dictionary}\' }}': ("llama3_json", None),
    "<|start_header_id|>{{ m.content }}": (None, None),
    "<\uff5cAssistant\uff5c>{{ content.split('</think>')[-1] }}": (None, "deepseek_r1"),
    "{{ content.split('</think>')[-1] }}<think>": (None, "qwen3"),
}


@pytest.mark.parametrize(("template", "expected"), TEMPLATES.items())
def test_a_plain_template_chooses_the_parsers(template: str, expected: tuple[str | None, str | None]) -> None:
    tokenizer = make_tokenizer()
    for form in (template, {"default": "x", "tool_use": template}):
        tokenizer.chat_template = form
        parsers = Parsers.choose(tokenizer)
        assert (parsers.tool_calls, parsers.reasoning) == expected
    tokenizer.chat_template = None
    assert Parsers.choose(tokenizer) == Parsers(None, None)


def test_options_choose_the_parsers_by_vllms_names() -> None:
    tokenizer = make_tokenizer()
    assert Parsers.choose(tokenizer, "qwen3_xml", "deepseek_r1") == Parsers("qwen3_coder", "deepseek_r1")
    for form in FORMS:
        assert Parsers.choose(tokenizer, form, "none") == Parsers(form, None)
    with pytest.raises(UserError, match="tool_call_parser: 'other'"):
        Parsers.choose(tokenizer, "other")


@pytest.mark.parametrize(
    ("reasoning", "prompt", "text", "expected"),
    [
        ("qwen3", "<|assistant|>", "hm</think>a", ""), ("qwen3", "<|assistant|>", "<think>hm</think>a", "hm"),
        ("qwen3", "<|assistant|><think>\n", "hm</think>a", "hm"), ("qwen3", "<think></think>\n\n", "<think>hm", ""),
        ("deepseek_r1", "<|assistant|>", "hm</think>a", "hm"), ("deepseek_r1", "<|assistant|></think>", "a", ""),
        ("qwen3", "what is <think>?<|assistant|>", "a", ""), (None, "<think>", "a", ""),
    ],
)  # fmt: skip
def test_prompt_decides_whether_answer_starts_with_reasoning(
    reasoning: str | None, prompt: str, text: str, expected: str
) -> None:
    tokenizer = make_tokenizer()
    parsers = Parsers(None, reasoning)
    parser = parsers.of_answer(parsers.start_of(tokenizer, tokenizer.encode(prompt)))
    deltas = [] if parser is None else parser.feed(text) + parser.finish()
    assert joined(deltas).reasoning == expected


def test_special_tokens_needed_by_a_parser_are_text() -> None:
    tokenizer = make_tokenizer()
    ids = tokenizer.encode("é<|user|>b<|system|>c")

    def text_of(shown: Sequence[str]) -> str:
        detokenizer = Detokenizer(tokenizer, (), shown)
        return "".join(detokenizer.add([token]) for token in ids) + detokenizer.finish()

    assert (text_of(()), text_of(("<|user|>",))) == ("ébc", "é<|user|>bc")


# ---- required calls and grammars -------------------------------------------------------------------------------


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "alarm"}}])
@pytest.mark.parametrize("head", ["a", "</think>"])
@pytest.mark.sampled
def test_required_call_is_made(client: OpenAI, choice: Any, head: str, streamed: bool) -> None:
    """The target would greet if it were free."""
    fields: dict[str, Any] = {"tools": CLOCKS, "tool_choice": choice, "parallel_tool_calls": False} | TIGHT
    if head != "a":
        fields["extra_body"] = {"chat_template_kwargs": {"enable_thinking": False}}
    if streamed:
        messages = [{"role": "user", "content": "Please: a"}]
        chunks = list(chat(client, messages=messages, max_tokens=400, stream=True, **fields))
        deltas = [call for chunk in chunks for c in chunk.choices for call in c.delta.tool_calls or ()]
        name, arguments = deltas[0].function.name, "".join(delta.function.arguments or "" for delta in deltas)
        reason = [c.finish_reason for chunk in chunks for c in chunk.choices][-1]
    else:
        answer = say(client, "a", **fields)
        (call,) = answer.message.tool_calls
        name, arguments, reason = call.function.name, call.function.arguments, answer.finish_reason
    assert name == "alarm" if isinstance(choice, dict) else name in ("clock", "alarm")
    assert json.loads(arguments)["zone"] in ("utc", "cet")
    assert reason == ("stop" if isinstance(choice, dict) else "tool_calls"), "as OpenAI has it"


@pytest.mark.parametrize("form", [form for form in FORMS if form != "openai"])  # gpt-oss may always reason
@pytest.mark.sampled
def test_required_call_has_the_form_of_the_target(target: Target, form: str) -> None:
    """Without reasoning, because this target might reason until its tokens run out."""
    fields: dict[str, Any] = {"tools": CLOCKS, "tool_choice": "required", "parallel_tool_calls": False} | TIGHT
    fields["extra_body"] = {"chat_template_kwargs": {"enable_thinking": False}}
    with serving(make_engine(target, make_drafter(target)), tool_call_parser=form) as url:
        message = say(client_of(url), "a", seed=2, **fields).message
        (call,) = message.tool_calls
        assert message.content is None and call.function.name in ("clock", "alarm")
        assert json.loads(call.function.arguments)["zone"] in ("utc", "cet")


@pytest.mark.parametrize("mode", ["required", "auto"])
def test_only_allowed_tools_are_called(client: OpenAI, mode: str) -> None:
    """The target would call `weather`, or greet."""
    alarm = {"type": "function", "function": {"name": "alarm"}}
    choice: Any = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [alarm]}}
    options: dict[str, Any] = {"tools": [*CLOCKS, *TOOLS], "tool_choice": choice, "parallel_tool_calls": False}
    (call,) = say(client, "h" if mode == "auto" else "a", **options | TIGHT).message.tool_calls
    assert call.function.name == "alarm" and json.loads(call.function.arguments)["zone"] in ("utc", "cet")
    if mode == "auto":
        assert say(client, "a", **options).message.content == SAYS["a"]
    response = client.responses.create(
        model="org/tiny", input="Please: a", max_output_tokens=400,
        tools=[{"type": "function", **tool["function"]} for tool in CLOCKS], extra_body=TIGHT,
        tool_choice={"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "alarm"}]},
    )  # fmt: skip
    assert {item.name for item in response.output if item.type == "function_call"} == {"alarm"}


def test_answer_with_a_format_may_call_tools(client: OpenAI) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"],
              "additionalProperties": False}  # fmt: skip
    shape: Any = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    options: dict[str, Any] = {"response_format": shape, "parallel_tool_calls": False} | TIGHT
    (call,) = say(client, "t", **options).message.tool_calls
    assert call.function.name == "weather" and json.loads(call.function.arguments) == ARGUMENTS
    options["extra_body"] = {"chat_template_kwargs": {"enable_thinking": False}}
    (call,) = say(client, "a", **options | {"tools": CLOCKS, "tool_choice": "required"}).message.tool_calls
    assert call.function.name in ("clock", "alarm")
    assert set(json.loads(say(client, "a", **options | {"tools": []}).message.content)) == {"ok"}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "alarm"}}])
def test_forced_call_works_if_the_template_shows_no_tools(choice: Any) -> None:
    target = make_reciting()
    target.tokenizer.chat_template = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}<|assistant|>a"
    with serving(make_engine(target, None)) as url:
        client = client_of(url)
        options: dict[str, Any] = {"tools": CLOCKS, "tool_choice": choice, "parallel_tool_calls": False} | TIGHT
        messages: list[Any] = [{"role": "user", "content": "Wake me"}]
        answer = chat(client, messages=messages, max_tokens=400, extra_body={"return_token_ids": True}, **options)
        (call,) = answer.choices[0].message.tool_calls
        assert call.function.name == "alarm" or choice == "required"
        assert '{"name": "clock"' in target.tokenizer.decode(answer.prompt_token_ids), "the model sees the tools"
        messages += [answer.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "done"}]
        again = chat(client, messages=messages, max_tokens=9, extra_body={"return_token_ids": True})
        prompt = target.tokenizer.decode(again.prompt_token_ids)
        assert json.dumps(json.loads(call.function.arguments)) in prompt and "<tool_response>\ndone" in prompt


def test_reasoning_precedes_a_required_call(client: OpenAI) -> None:
    thinking = {"chat_template_kwargs": {"enable_thinking": True}}
    options: dict[str, Any] = {"tools": CLOCKS, "tool_choice": "required", "parallel_tool_calls": False}
    message = say(client, "a", **options, extra_body=thinking).message
    assert message.reasoning_content == "\nwell, well\n" and message.content is None
    assert len(message.tool_calls) == 1


def test_only_calls_of_strict_tools_follow_their_schema(client: OpenAI) -> None:
    """The target would write `days`, which this schema does not allow."""
    schema = {"type": "object", "properties": {"city": {"enum": ["Kyōto 😀"]}}, "required": ["city"],
              "additionalProperties": False}  # fmt: skip
    strict = [{"type": "function", "function": {"name": "weather", "parameters": schema, "strict": True}}]
    assert say(client, "a", tools=strict).message.content == SAYS["a"]
    (call,) = say(client, "t", tools=strict, parallel_tool_calls=False).message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Kyōto 😀"}


def test_grammar_applies_after_the_reasoning(client: OpenAI) -> None:
    for thinking, thoughts in ((True, "well, well"), (False, None)):
        body = {"regex": "[0-9]{3}", "chat_template_kwargs": {"enable_thinking": thinking}}
        message = say(client, "a", tools=[], extra_body=body).message
        assert len(message.content.strip()) == 3 and message.content.strip().isdigit()
        assert (getattr(message, "reasoning_content", None) or "").strip() == (thoughts or "")


def test_required_call_with_grammar_is_refused(client: OpenAI) -> None:
    fields = {"tools": CLOCKS, "tool_choice": "required", "extra_body": {"regex": "a"}}
    error = refusal(say, client, "a", **fields)
    assert (error.status_code, error.param) == (400, "regex")
    error = refusal(say, client, "a", tools=CLOCKS, tool_choice="required", extra_body={"ignore_eos": True})
    assert (error.status_code, error.param) == (400, "ignore_eos")


def test_unsupported_schema_is_refused_only_if_enforced(client: OpenAI) -> None:
    unique = {"type": "function", "function": {"name": "u", "parameters": {"uniqueItems": True}}}
    assert say(client, "a", tools=[unique]).message.content == SAYS["a"]
    error = refusal(say, client, "a", tools=[unique], tool_choice="required")
    assert (error.status_code, error.param) == (400, "tool_choice") and "uniqueItems" in str(error)
