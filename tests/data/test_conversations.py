"""Rows of every usual shape become what is asked and answered; others are refused with their line and reason."""

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import LONG_RUN
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import assistant, user, write
from tool_messages import CALL, RESULT

from dflash_toolkit import UserError
from dflash_toolkit.data import rows
from dflash_toolkit.data.conversations import Conversation, conversation, split_messages
from dflash_toolkit.data.messages import REASONING
from dflash_toolkit.data.prompts import read_prompts
from dflash_toolkit.data.rows import ANSWERS, ASKED, CHATS, CONTEXT, FORMS, STRINGS, WRAPPERS
from dflash_toolkit.data.sources import Source

SYSTEM = {"role": "system", "content": "Be brief."}
SHAREGPT = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]

# row, what each turn asks, the recorded first answer
SHAPES: dict[str, tuple[Any, list[list[dict[str, Any]]], str | None]] = {
    "messages": ({"messages": [SYSTEM, user("a"), assistant("b"), user("c")]}, [[SYSTEM, user("a")], [user("c")]], "b"),
    "messages that end with an answer": ({"messages": [user("a"), assistant("b")]}, [[user("a")]], "b"),
    "messages with other keys": ({"messages": [user("a") | {"name": "Ann"}]}, [[user("a")]], None),
    "two questions": ({"messages": [user("a"), user("b"), assistant("c")]}, [[user("a"), user("b")]], "c"),
    "text parts": ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}, [[user("a")]], None),
    "a developer": ({"messages": [SYSTEM | {"role": "developer"}, user("a")]}, [[SYSTEM, user("a")]], None),
    "ShareGPT": ({"conversations": SHAREGPT}, [[user("a")]], "b"),
    "ShareGPT with a system turn": (
        {"conversations": [{"from": "system", "value": "Be brief."}, *SHAREGPT]}, [[SYSTEM, user("a")]], "b",
    ),
    "ShareGPT with a system column": ({"conversations": SHAREGPT, "system": "Be brief."}, [[SYSTEM, user("a")]], "b"),
    "a system column": ({"prompt": "a", "system": "Be brief."}, [[SYSTEM, user("a")]], None),
    "a system column and turns": (
        {"turns": ["a", "b"], "system": "Be brief."}, [[SYSTEM, user("a")], [user("b")]], None,
    ),
    "a system column with a system message": (
        {"messages": [SYSTEM, user("a")], "system": "x"}, [[SYSTEM, user("a")]], None,
    ),
    "an empty system column": ({"prompt": "a", "system": " "}, [[user("a")]], None),
    "a recorded call": (
        {"messages": [user("a"), CALL, RESULT, assistant("b"), user("c"), CALL]},
        [[user("a")], [CALL, RESULT], [user("c")]], "",
    ),
    "a result that waits": ({"messages": [user("a"), CALL, RESULT]}, [[user("a")], [CALL, RESULT]], ""),
    "turns": ({"turns": [" a \n", "b"]}, [[user("a")], [user("b")]], None),
    "question": ({"question": " 1 + 1? "}, [[user(" 1 + 1? ")]], None),
    "gsm8k": ({"question": "1 + 1?", "answer": "Two. #### 2"}, [[user("1 + 1?")]], "Two. #### 2"),
    "math500": ({"problem": "1 + 1?", "solution": "It is 2.", "answer": "2"}, [[user("1 + 1?")]], "It is 2."),
    "an answer that is no text": ({"question": "a", "answer": 2, "choices": ["2", "3"]}, [[user("a")]], None),
    "a solution that is empty": ({"problem": "a", "solution": " ", "answer": "2"}, [[user("a")]], "2"),
    "humaneval": ({"prompt": "def f():", "entry_point": "f"}, [[user("def f():")]], None),
    "mbpp": ({"text": "Write f.", "code": "def f(): 1", "test_list": ["f()"]}, [[user("Write f.")]], "def f(): 1"),
    "prompt": ({"prompt": "Say hi\n"}, [[user("Say hi\n")]], None),
    "prompt and response": ({"prompt": "a", "response": "b"}, [[user("a")]], "b"),
    "prompt and completion": ({"prompt": "a", "completion": "b", "code": "x"}, [[user("a")]], "b"),
    "prompt as messages": ({"prompt": [user("a")], "chosen": [assistant("b")]}, [[user("a")]], None),
    "preferences": ({"prompt": "a", "chosen": "b", "rejected": "c"}, [[user("a")]], None),
    "alpaca": ({"instruction": "a", "input": "1", "output": "2", "text": "### a 1: 2"}, [[user("a\n1")]], "2"),
    "instruction": ({"instruction": "a", "input": "", "output": "b"}, [[user("a")]], "b"),
    "text": ({"text": "a"}, [[user("a")]], None),
    "query and response": ({"query": "a", "response": "b"}, [[user("a")]], "b"),
    "input and output": ({"input": "a", "output": "b"}, [[user("a")]], "b"),
    "WildChat": (
        {"conversation": [user("a") | {"language": "English"}, assistant("b")], "model": "m"}, [[user("a")]], "b",
    ),
    "messages under another name": ({"log": [user("a"), assistant("b")], "text": "x"}, [[user("a")]], "b"),
    "messages as text in a table": ({"messages": json.dumps([user("a"), assistant("b")])}, [[user("a")]], "b"),
    "ultrachat": ({"data": ["a", "b", "c", "d"]}, [[user("a")], [user("c")]], "b"),
    "Capybara": ({"conversation": [{"input": "a", "output": "b"}]}, [[user("a")]], "b"),
    "dolly": ({"instruction": "a", "context": "x", "response": "b", "category": "c"}, [[user("a\n\nx")]], "b"),
    "SQuAD": ({"question": "a", "context": "x", "answers": {"text": ["b"]}}, [[user("x\n\na")]], None),
    "sql-create-context": ({"question": "a", "context": "x", "answer": "b"}, [[user("x\n\na")]], "b"),
    "contexts": ({"question": "a", "contexts": ["x", "y"]}, [[user("x\n\ny\n\na")]], None),
    "natural instructions": ({"definition": "x", "inputs": "a", "targets": "b"}, [[user("x\n\na")]], "b"),
    "a history of pairs": (
        {"instruction": "c", "output": "d", "history": [["a", "b"]], "system": "Be brief."},
        [[SYSTEM, user("a")], [user("c")]], "b",
    ),
    "a history of messages": (
        {"question": "c", "chat_history": [user("a"), assistant("b")]}, [[user("a")], [user("c")]], "b",
    ),
    "TRL": ({"prompt": [user("a")], "completion": [assistant("b")]}, [[user("a")]], "b"),
    "TRL, preferences without a prompt": (
        {"chosen": [user("a"), assistant("b")], "rejected": [user("a"), assistant("c")]}, [[user("a")]], "b",
    ),
    "a batch's input": (
        {"id": "f, line 1", "body": {"model": "m", "messages": [SYSTEM, user("a")]}}, [[SYSTEM, user("a")]], None,
    ),
    "a request with its response": (
        {"request": {"messages": [user("a")]}, "response": {"choices": [{"message": assistant("b")}]}},
        [[user("a")]], "b",
    ),
    "Gemini": (
        {"systemInstruction": {"parts": [{"text": "Be brief."}]}, "contents": [
            {"role": "user", "parts": [{"text": "a"}]}, {"role": "model", "parts": [{"text": "b"}]}]},
        [[SYSTEM, user("a")]], "b",
    ),
    "OpenAI's Responses API": (
        {"instructions": "Be brief.", "input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}]},
        [[SYSTEM, user("a")]], None,
    ),
    "Anthropic": (
        {"params": {"system": "Be brief.", "messages": [user("a")]}}, [[SYSTEM, user("a")]], None,
    ),
    "a message of OpenAssistant": ({"text": "a", "role": "prompter", "parent_id": None}, [[user("a")]], None),
    "columns with capitals": ({"Question": "a", "Response": "b"}, [[user("a")]], "b"),
    "an answer that is a number": ({"prompt": "a", "response": 7}, [[user("a")]], None),
    "a bare string": ("a", [[user("a")]], None),
    "columns that are not filled": ({"messages": None, "question": None, "prompt": "a"}, [[user("a")]], None),
}  # fmt: skip


@pytest.mark.parametrize(("row", "turns", "answer"), SHAPES.values(), ids=SHAPES)
def test_every_row_format_is_parsed_into_conversation_turns(
    row: Any, turns: list[list[dict[str, str]]], answer: str | None, tmp_path: Path
) -> None:
    assert conversation(row, "f, line 1") == Conversation("f, line 1", tuple(tuple(turn) for turn in turns))
    (prompt,) = read_prompts(write(tmp_path / "a.jsonl", [row]))
    assert (list(prompt.messages), prompt.answer) == (turns[0], answer)


THOUGHT = assistant("b") | {"reasoning_content": "t"}


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        *(({"messages": [user("a"), assistant("b") | {name: "t"}]}, THOUGHT) for name in REASONING),
        ({"messages": [user("a"), assistant("b") | {"reasoning": "t", "reasoning_content": "t"}]}, THOUGHT),
        ({"messages": [user("a"), assistant([{"type": "thinking", "thinking": "t"}, {"text": "b"}])]}, THOUGHT),
        (
            {"contents": [user("a"), {"role": "model", "parts": [{"text": "t", "thought": True}, {"text": "b"}]}]},
            THOUGHT,
        ),
        *(({"Question": "a", name: "t", "Response": "b"}, THOUGHT) for name in ("Complex_CoT", "reasoning")),
        *(
            ({"messages": [user("a"), assistant("b") | {key: value}]}, assistant("b") | {"weight": 0})
            for key, value in (("weight", 0), ("train", False), ("loss", False))
        ),
        ({"messages": [user("a") | {"weight": 0}, assistant("b") | {"weight": 1}]}, assistant("b")),
    ],
    ids=str,
)
def test_reasoning_and_weights_of_every_name_are_kept(row: Any, expected: Any) -> None:
    unread: set[str] = set()
    assert conversation(row, "x", unread=unread).recorded == (user("a"), expected)
    assert not unread


def test_columns_and_keys_that_are_not_read_are_listed_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows: list[Any] = [
        {"conversation": [user("a") | {"lang": "en"}, assistant("b")], "model": "m", "empty": [], "none": None},
        {"prompt": "a", "model": "m", "Notes": 0},
        {"prompt": "a", "model": "m", "rating": 5, "category": "c", "id": 7},
    ]
    path = write(tmp_path / "a.jsonl", rows)
    for _ in range(2):
        list(Source(str(path)).read())
    expected = "a.jsonl: not read: model (all rows), Notes, conversation[].lang, rating (1 of 3 rows)\n"
    assert capsys.readouterr().err == expected
    read_prompts(path, 1)
    assert capsys.readouterr().err.endswith("not read: conversation[].lang, model (all rows)\n")


HERMES = (
    "You may call tools. <tools>[{'type': 'function', 'function': {'name': 'f'}}]</tools> As: <tool_call>x</tool_call>"
)
CALLED = assistant("so") | {"tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]}


@pytest.mark.parametrize(
    ("text", "call"),
    [
        ('so <tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>', CALLED),
        ("[f(x=1)]", CALLED | {"content": ""}),
        ("[f(x=1, y=')'), a b()]", None),
        ("<tool_call>not JSON</tool_call>", assistant("<tool_call>not JSON</tool_call>")),
        ("[f(1)]", assistant("[f(1)]")),
    ],
)
@pytest.mark.parametrize("system", [HERMES, "Call tools."])
def test_calls_written_as_text_are_recorded_calls(text: str, call: Any, system: str) -> None:
    result = "<tool_response>7</tool_response>"
    turns = [("system", system), ("human", "a"), ("gpt", text), ("tool", result), ("gpt", "b")]
    tools = {} if "<tools>" in system else {"tools": '[{"name": "f"}]'}
    found = conversation({"conversations": [{"from": role, "value": value} for role, value in turns]} | tools, "x")
    assert found.tools == ({"type": "function", "function": {"name": "f"}},)
    first, (recorded, answer) = found.turns
    assert [m["role"] for m in first] == ["system", "user"] and "<tool" not in first[0]["content"]
    assert answer == {"role": "tool", "content": "7"} and recorded == (call or recorded)
    if call is None:
        assert [each["function"]["name"] for each in recorded["tool_calls"]] == ["f", "a b"]


def test_text_about_calls_in_a_chat_without_tools_is_unchanged() -> None:
    chat = [user("a"), assistant('<tool_call>{"name": "f"}</tool_call>')]
    assert conversation({"messages": chat}, "x").recorded == tuple(chat)


BEGINS = "a conversation that begins with the assistant"
EMPTY, BLANK = "an empty conversation", "an empty question"


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ([1], "expected an? (JSON )?object, got list"),
        (
            {"reply": "a"},
            "none of messages, conversations, conversation, turns, question, prompt, problem",
        ),
        ({"prompt": None}, "none of messages"),
        ({"messages": None}, "none of messages"),
        *(({key: 5}, "malformed row") for key in ("prompt", "text", "question", "instruction")),
        ({"instruction": "a", "input": 4}, "malformed row"),
        *(({"turns": wrong}, "malformed row") for wrong in ("abc", [None])),
        *(({"messages": wrong}, "malformed row") for wrong in ("abc", [3], [{"role": "user"}])),
        ({"messages": [user("a") | {"content": [{"type": "text"}]}]}, "malformed row"),
        ({"messages": [user("a") | {"content": 3}]}, "malformed row .*content must be text"),
        ({"prompt": "a", "system": 3}, "malformed row .*system must be text"),
        ({"prompt": "a", "tools": "search"}, "tools and tool calls must be JSON, not 'search'"),
        *(({"prompt": "a", "tools": [w]}, "tools must be a list of JSON objects") for w in (3, {"type": "web_search"})),
        ({"messages": [user("a"), {"role": "critic", "content": "b"}]}, "role 'critic' is not one of"),
        ({"messages": [user("a"), {"role": "assistant", "tool_calls": [{"name": 3}]}]}, "a tool call needs a name"),
        *(({key: []}, EMPTY) for key in ("messages", "conversations", "turns", "data")),
        *(({"messages": [*before, assistant("a"), user("b")]}, BEGINS) for before in ([], [SYSTEM])),
        ({"messages": [user("a"), assistant("b"), assistant("c"), user("d")]}, "two turns of the assistant in a row"),
        ({"messages": [user("  ")]}, BLANK),
        ({"prompt": " \n"}, BLANK),
        ({"turns": [" "]}, BLANK),
        ({"turns": ["a", ""]}, BLANK),
        ({"instruction": "", "input": ""}, BLANK),
        *(({"messages": [wrong]}, "a conversation without a question") for wrong in (SYSTEM, RESULT)),
        (
            {"text": "a", "role": "assistant", "parent_id": "x"},
            "one message of the role 'assistant'",
        ),
        (
            {"id": "b1", "custom_id": "q", "response": {"body": {"choices": [{"message": assistant("a")}]}}},
            "an output row of a batch without its question; give the batch's input file too",
        ),
    ],
    ids=str,
)
def test_a_malformed_row_is_named_with_its_line(row: Any, reason: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=reason):
        conversation(row, "x")
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"prompt": "fine"}}\n\n{json.dumps(row)}')
    with pytest.raises(UserError, match=rf"^\S+a.jsonl, line 3: {reason}.*$"):
        read_prompts(path)


NAMES = [
    *CHATS, *STRINGS, *ASKED, *ANSWERS, *CONTEXT, *rows.SYSTEM, *WRAPPERS, "entry_point", "test_list", "id", "tools",
    "code", "contents", "custom_id", "choices", "rejected", "chosen", "other", "Question",
]  # fmt: skip
INNER = [
    "role",
    "from",
    "content",
    "value",
    "parts",
    "text",
    "type",
    "tool_calls",
    "name",
    "weight",
    "reasoning",
    "body",
]
WORD = st.sampled_from(["user", "assistant", "gpt", "tool", "a", "", "[1", "<tool_call>{}</tool_call>", "[f()]"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | WORD,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*INNER, *NAMES]), inner, max_size=3),
    max_leaves=6,
)
TURN = st.fixed_dictionaries({"role": WORD, "content": JSON}, optional={"weight": JSON, "reasoning": JSON, "odd": JSON})


COLUMNS = st.dictionaries(st.sampled_from(NAMES), WORD | JSON | st.lists(TURN, max_size=3), min_size=1, max_size=6)
BASES = st.sampled_from([{}, {"question": "q"}, {"messages": [user("q"), assistant("r")]}, {"prompt": [user("q")]}])


@given(
    row=st.builds(lambda base, columns: columns | base, BASES, COLUMNS),
    form=st.sampled_from([None, *FORMS]),
)
@settings(max_examples=1000 if LONG_RUN else 250, deadline=None, derandomize=True)
@pytest.mark.sampled
@pytest.mark.slow
def test_any_row_is_a_conversation_or_a_reason(row: dict[str, Any], form: str | None) -> None:
    unread: set[str] = set()
    try:
        found = conversation(row, "x", form, unread)
    except ValueError as error:
        assert str(error)
        return
    assert found.turns and all(isinstance(m["content"], str) for turn in found.turns for m in turn)
    assert all(isinstance(message["content"], str) for message in found.recorded)
    gone = {key: value for key, value in row.items() if key not in unread and value not in (None, "", [], {})}
    without = conversation(gone, "x", form)
    assert (without.turns, without.recorded, without.tools) == (found.turns, found.recorded, found.tools)
    for key in gone:  # what is not reported is read: without it the row is another, or none
        less = {name: value for name, value in gone.items() if name != key}
        try:
            other = conversation(less, "x", form)
        except ValueError:
            continue
        mine, theirs = ((c.turns, c.recorded, c.tools, c.id, c.category) for c in (found, other))
        assert mine != theirs or key in ("system", "tools"), key


def test_split_messages_cuts_before_the_first_answer() -> None:
    chat = [SYSTEM, user("a"), assistant("b"), user("c"), assistant("d")]
    assert split_messages(chat) == ([SYSTEM, user("a")], chat[2:])
    assert split_messages(chat[:2]) == (chat[:2], [])
    assert split_messages([]) == ([], [])
