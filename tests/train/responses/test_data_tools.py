"""Conversations with tools, and answers that are in the data already: what becomes rows, and which tokens count."""

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import EOS, TEMPLATE, make_tokenizer
from programs import Program, altered, assistant, user, write
from response_servers import PARAMS, TOOL, WITH_TOOLS, WORDS
from response_servers import respond as answer
from response_servers import response_tokens as said
from response_servers import tokenizer_with as words
from response_servers import tool_call as call
from tool_messages import CALL, RESULT

from dflash_toolkit import UserError
from dflash_toolkit.data.conversations import conversation
from dflash_toolkit.data.prompts import Message, encode_chat, read_chat, template_variables
from dflash_toolkit.train.config import TrainConfig
from dflash_toolkit.train.data_options import DataOptions, ResponseOptions
from dflash_toolkit.train.prompts.split import PROMPTS, Reading, choose_prompts
from dflash_toolkit.train.responses.build_corpus import write_recorded
from dflash_toolkit.train.responses.conversation import REFUSED, LiveConversation, recorded_rows
from dflash_toolkit.train.responses.corpus import Corpus
from dflash_toolkit.train.responses.file import Match, read_training_rows
from dflash_toolkit.train.responses.rows import Row

TAGGED = TEMPLATE.replace("{{ m['content'] }}<|end|>", "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "<|end|>{% endgeneration %}{% else %}{{ m.content }}<|end|>{% endif %}")  # fmt: skip
TALK = [user("a"), CALL, RESULT, assistant("b"), user("c"), assistant("d")]
PLAIN = [user("a"), assistant("b"), user("c"), assistant("d")]


def texts(rows: list[Row]) -> list[str]:
    """Returns the supervised texts of rows."""
    return [WORDS.decode(row.tokens[start:end]) for row in rows for start, end in row.supervised]


# ---- rows and templates --------------------------------------------------------------------------------------


SEARCH = {"name": "search", "parameters": {"type": "object", "properties": {"q": {"type": "string"}}}}
CALLED = [user("a"), assistant("") | {"tool_calls": [call("search", q="b")]}, {"role": "tool", "content": "c"}]
SHAPES: dict[str, tuple[dict[str, Any], list[Message]]] = {
    "OpenAI, arguments as text": (
        {"messages": [user("a"), {"role": "assistant", "content": None, "tool_calls": [
            {"id": "x1", "type": "function", "function": {"name": "search", "arguments": '{"q": "b"}'}}]},
            {"role": "tool", "tool_call_id": "x1", "name": "search", "content": "c"}, assistant("d")]},
        [user("a"), assistant("") | {"tool_calls": [{"id": "x1"} | call("search", q="b")]},
         {"role": "tool", "content": "c", "name": "search", "tool_call_id": "x1"}, assistant("d")],
    ),
    "calls that are no function's, results that are no text": (
        {"messages": [user("a"), assistant("so") | {"tool_calls": [{"name": "search", "arguments": {"q": "b"}}]},
                      {"role": "tool", "content": {"n": "\u00e9"}}]},
        [user("a"), assistant("so") | {"tool_calls": [call("search", q="b")]},
         {"role": "tool", "content": '{"n": "\u00e9"}'}],
    ),
    "calls as text, with the empty keys of an Arrow struct": (
        {"messages": [user("a") | {"tool_calls": None}, {"role": "assistant", "content": "", "tool_calls":
            '[{"function": {"name": "search", "arguments": {"q": "b", "r": null}}}]'}, CALLED[2] | {"name": None}]},
        CALLED,
    ),
    "functions as they were before tools": (
        {"messages": [user("a"), {"role": "assistant", "content": None, "function_call":
            {"name": "search", "arguments": '{"q": "b"}'}}, {"role": "function", "content": "c"}]},
        CALLED,
    ),
    "ShareGPT": (
        {"conversations": [{"from": "human", "value": "a"},
            {"from": "function_call", "value": '{"name": "search", "arguments": {"q": "b"}}'},
            {"from": "observation", "value": "c"}]},
        CALLED,
    ),
    "ShareGPT, a text and two calls": (
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "so"},
            {"from": "function_call", "value": '{"name": "search", "arguments": {"q": "b"}}'},
            {"from": "function_call", "value": '{"name": "stop"}'}, {"from": "observation", "value": "c"}]},
        [user("a"), assistant("so") | {"tool_calls": [call("search", q="b"), call("stop")]}, CALLED[2]],
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "tools", [[SEARCH], json.dumps([{"type": "function", "function": SEARCH}]), [json.dumps(SEARCH)]]
)
@pytest.mark.parametrize(("row", "messages"), SHAPES.values(), ids=SHAPES)
def test_tools_calls_and_results_of_every_shape_are_kept(
    row: dict[str, Any], messages: list[Message], tools: Any
) -> None:
    assert read_chat(row | {"tools": tools}) == (messages, ({"type": "function", "function": SEARCH},))
    assert read_chat(row)[1] == read_chat(row | {"tools": "[]"})[1] == ()


def test_tools_reach_the_template_which_must_show_all_of_them() -> None:
    tokenizer = words("")
    messages, tools = read_chat(SHAPES["ShareGPT"][0] | {"tools": [SEARCH]})
    shown = {
        "tools": "{% if tools %}{{ tools | tojson }}{% endif %}",
        "tool calls": "{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}",
        "tool results": "{% if m.role == 'tool' %}={{ m.content }}{% endif %}",
    }

    def template(parts: dict[str, str]) -> str:
        inner = "".join(parts.get(part, "") for part in ("tool calls", "tool results"))
        said = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}"
        return parts.get("tools", "") + said + inner + "{% endfor %}"

    tokenizer.chat_template = template(shown)
    text = tokenizer.decode(encode_chat(tokenizer, messages, tools=tools))
    assert text == json.dumps(list(tools)) + 'a{"name": "search", "arguments": {"q": "b"}}=c'
    for part in shown:
        tokenizer.chat_template = template({k: v for k, v in shown.items() if k != part})
        with pytest.raises(UserError, match=f"refuses these messages: it leaves out {part}"):
            encode_chat(tokenizer, messages, tools=tools)
    assert encode_chat(tokenizer, [user("Hi")]) == tokenizer("Hi").input_ids


def test_probed_template_renders_similar_chats_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = words(WITH_TOOLS)
    messages, tools = read_chat(SHAPES["ShareGPT"][0] | {"tools": [SEARCH]})
    encode_chat(tokenizer, messages, tools=tools)
    real, rendered = tokenizer.apply_chat_template, []

    def counted(*args: Any, **options: Any) -> Any:
        rendered.append(real(*args, **options))
        return rendered[-1]

    monkeypatch.setattr(tokenizer, "apply_chat_template", counted)
    longer = [*messages, *messages]
    assert rendered == [encode_chat(tokenizer, longer, tools=tools)]
    encode_chat(tokenizer, [m | {"content": ""} for m in longer], tools=tools)
    assert len(rendered) > 2, "another kind of chat, which the template may show otherwise"


def test_the_variables_of_a_template_are_those_that_it_looks_up() -> None:
    tokenizer = words(
        "{{ bos_token }}{% for m in messages %}{% generation %}{{ m }}{% endgeneration %}{% if a %}{% break %}"
        "{% endif %}{% endfor %}{% set c = b | default(1) %}{{ c }}{{ tools }}{{ raise_exception('x') }}"
        "{% if add_generation_prompt and enable_thinking is defined %}?{% endif %}"
    )
    assert template_variables(tokenizer) == {"a", "b", "enable_thinking"}
    tokenizer.chat_template = "{{"
    assert template_variables(tokenizer) == frozenset()


# ---- answered by the target ------------------------------------------------------------------------------------


def test_after_a_tool_call_the_recorded_one_continues() -> None:
    tokenizer, tools = words(WITH_TOOLS), [TOOL]
    talk = LiveConversation(0, 0, conversation({"messages": TALK, "tools": tools}, "x"), tokenizer, PARAMS, 1000)
    asked = []
    for text in ("mine", "yes", "no"):
        assert talk.request is not None
        asked.append(talk.request[0])
        answer(talk, said(text), "length" if text == "mine" else "stop")
    turns = [TALK[:1], TALK[:3], [*TALK[:3], assistant("yes"), user("c")]]
    assert asked == [encode_chat(tokenizer, turn, tools=tools) for turn in turns]
    assert talk.request is None and talk.dropped is None and talk.left_out == []
    first, second = talk.parts
    assert first.messages == [user("a"), assistant("mine")] and second.messages[:4] == turns[2][:4]
    assert texts([first.row, second.row]) == ["mine<|end|>", "yes<|end|>", "no<|end|>"]


def test_an_identical_tool_call_stays_in_one_row() -> None:
    talk = LiveConversation(0, 0, conversation({"messages": TALK[:4]}, "x"), words(WITH_TOOLS), PARAMS, 1000)
    answer(talk, said('<call>{"name": "f", "arguments": {}}'))
    answer(talk, said("yes"))
    assert len(talk.parts) == 1 and len(talk.parts[0].row.spans) == 2


def test_tools_are_written_and_trained_on(dflash_data: Program, tmp_path: Path) -> None:
    target = altered(dflash_data.target, tmp_path / "t", words(WITH_TOOLS))
    rows = [{"messages": [user(f"ask {i}"), *TALK[1:]], "tools": json.dumps([TOOL])} for i in range(3)]
    dflash_data("--target", target, "--data", write(tmp_path / "q.jsonl", rows))
    written = dflash_data.rows()
    assert {row["index"] for row in written} == {0, 1, 2} and all(row["tools"] == [TOOL] for row in written)
    later = [row for row in written if row["part"]]
    assert later and all(row["messages"][1:3] == [CALL, RESULT] for row in later)
    assert all(WORDS.decode(row["tokens"]).startswith(json.dumps([TOOL])) for row in written)
    match = Match(str(target), None, written[0]["vocab_size"], written[0]["template_hash"])
    read = read_training_rows([str(dflash_data.output)], match)
    assert [list(row.tokens) for row in read] == [row["tokens"] for row in written]


def test_a_template_without_tools_is_one_counted_reason(dflash_data: Program, tmp_path: Path) -> None:
    rows = [{"prompt": "ask"}, {"messages": TALK}, {"prompt": "tell", "tools": [TOOL]}]
    said = dflash_data("--data", write(tmp_path / "q.jsonl", rows))[-1]
    assert "; dropped 1 refused by the chat template (first: q.jsonl/3); left out of others: 1 later turns" in said
    found = dflash_data.rows()
    kept = [row["left_out"] for row in found if "left_out" in row]
    assert kept == [["later turns refused by the chat template"]], "a resumed run counts it again"
    first = sorted(row["messages"][0]["content"] for row in found)  # in the order in which they ended
    assert first == ["a", "ask"], "before the call it could be asked"


# ---- recorded --------------------------------------------------------------------------------------------------


def test_recorded_turns_are_supervised_up_to_stop_tokens() -> None:
    tokenizer = words(WITH_TOOLS.replace("<|end|>", "<|end|>\n"))  # as templates of Qwen and Llama go on behind it
    (row,), left_out = recorded_rows(tokenizer, [*TALK, user("e")], [TOOL], {EOS, 7})
    assert texts([row]) == ['<call>{"name": "f", "arguments": {}}<|end|>', "b<|end|>", "d<|end|>"]
    assert row.tokens == encode_chat(tokenizer, TALK, tools=[TOOL], ask=False)[:-1] and not left_out
    assert row.prompt_tokens == len(encode_chat(tokenizer, TALK[:1], tools=[TOOL])) == row.spans[0][0]


def test_the_stop_token_is_the_one_that_the_template_writes() -> None:
    tokenizer = words(TEMPLATE.replace("<|end|>", "{% if m.role == 'assistant' %}<|pad|>{% else %}<|end|>{% endif %}"))
    pad = tokenizer.pad_token_id
    (row,), _ = recorded_rows(tokenizer, [user("a"), assistant("b")], [], (EOS, pad))
    assert row.tokens[-2:] == [*WORDS("b").input_ids, pad], "not the first of the target's"


@pytest.mark.parametrize("template", [TEMPLATE, TAGGED])
def test_a_recorded_response_ends_at_its_first_stop_token(template: str) -> None:
    messages = [user("a"), assistant("b<|end|><|user|>now"), *PLAIN[2:]]
    (row,), _ = recorded_rows(words(template), messages, [], {EOS})
    assert texts([row]) == ["b<|end|>", "d<|end|>"]
    assert row.tokens == encode_chat(WORDS, messages, ask=False), "the rest is context of the next turn"


def test_generation_tags_mark_supervised_tokens() -> None:
    (row,), left_out = recorded_rows(words(TAGGED), [*PLAIN, user("e")], [], {EOS})
    assert row.tokens == encode_chat(WORDS, PLAIN, ask=False) and texts([row]) == ["b<|end|>", "d<|end|>"]
    assert row.prompt_tokens == len(encode_chat(WORDS, PLAIN[:1])) and not left_out
    # the tags are believed: here they leave the end out
    (row,), _ = recorded_rows(words(TAGGED.replace("<|end|>{% endgen", "{% endgen")), PLAIN, [], {EOS})
    assert texts([row]) == ["b", "d"]
    untagged = words(TAGGED.replace("m.role == 'assistant'", "m.role == 'model'"))
    assert recorded_rows(untagged, PLAIN, [], {EOS}) == ([], {"without a token in generation tags": 1})


def test_unaligned_recorded_turns_are_dropped_and_counted() -> None:
    # a thinking template: the prompt opens what only the last answer that thinks has
    opens = words(TEMPLATE.replace("prompt %}<|assistant|>", "prompt %}<|assistant|><t>"))
    messages = [user("a"), assistant("b"), user("c"), assistant("<t>d")]
    rows, left_out = recorded_rows(opens, messages, [], {EOS})
    assert texts(rows) == ["d<|end|>"] and left_out == {"that do not follow their prompt token for token": 1}
    assert rows[0].tokens == encode_chat(WORDS, messages, ask=False), "what was said before is its context"


def test_dropped_thinking_gives_rows_as_served() -> None:
    last = "{{ m.content if loop.last else m.content.split('|')[-1] }}"
    forgets = words(TEMPLATE.replace("{{ m['content'] }}", last))
    rows, left_out = recorded_rows(forgets, [user("a"), assistant("think|b"), *PLAIN[2:]], [], {EOS})
    assert texts(rows) == ["think|b<|end|>", "d<|end|>"] and len(rows) == 2 and not left_out
    assert rows[1].tokens == encode_chat(WORDS, PLAIN, ask=False)


def test_recorded_answers_are_read_rendered_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    talk = [user("ask"), assistant("say"), user("more"), assistant("no")]
    called = {"messages": [user("b"), CALL, RESULT, assistant("c")]}
    data = write(tmp_path / "p.jsonl", [{"messages": TALK, "tools": [TOOL]}, {"messages": talk}, called])
    options = {"prompts": DataOptions(held_out=0, max_length=500), "responses": ResponseOptions(regenerate=False)}

    def recorded(tokenizer: Any) -> Corpus:
        config = TrainConfig(target="tiny", data=(str(data),), **options)
        reading = Reading(config, tokenizer, "")
        write_recorded(reading, choose_prompts(reading, tmp_path), tmp_path / PROMPTS, (EOS,), tmp_path / "corpus", {})
        return Corpus.open(tmp_path / "corpus")

    found = recorded(words(WITH_TOOLS))
    assert [len(row.supervised) for row in found] == [3, 2, 2] and [row.index for row in found] == [0, 1, 2]
    prompt = encode_chat(words(WITH_TOOLS), [user("a")], tools=[TOOL])
    assert found[0].tokens[: found[0].prompt_tokens].tolist() == prompt
    capsys.readouterr()
    # without tools the first call is no part of the template, nor are its results
    lacking = recorded(make_tokenizer())
    assert texts(lacking) == ["say<|end|>", "no<|end|>"]
    counts, said = lacking.meta["counts"], capsys.readouterr().err
    for lost in ("tools", "tool calls"):
        assert counts[f"{REFUSED}, which leaves out {lost}"] == 1 and f"1 {REFUSED}, which leaves out {lost}" in said
    write(data, [called])
    with pytest.raises(UserError, match=": 1 refused by the chat"):
        recorded(make_tokenizer())


def test_thinking_reaches_the_recorded_rows() -> None:
    mode = "{% if m.role == 'assistant' and enable_thinking %}!{% endif %}"
    thinks = words(TEMPLATE.replace("{{ m['content'] }}", mode + "{{ m.content }}"))
    for thinking, text in ((True, "!b<|end|>"), (False, "b<|end|>")):
        assert texts(recorded_rows(thinks, PLAIN[:2], [], {EOS}, thinking)[0]) == [text]
