"""Rows of every usual shape become what is asked and answered; others are refused with their line and reason."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import assistant, user, write
from tool_messages import CALL, RESULT

from dflash_toolkit import UserError
from dflash_toolkit.data.conversations import FORM_CHOICES, Conversation, conversation, split_messages
from dflash_toolkit.data.prompts import read_prompts

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
    "a bare string": ("a", [[user("a")]], None),
    "columns that are not filled": ({"messages": None, "question": None, "prompt": "a"}, [[user("a")]], None),
}  # fmt: skip


@pytest.mark.parametrize(("row", "turns", "answer"), SHAPES.values(), ids=SHAPES)
def test_every_shape_becomes_the_turns_that_ask(
    row: Any, turns: list[list[dict[str, str]]], answer: str | None, tmp_path: Path
) -> None:
    assert conversation(row, "f, line 1") == Conversation("f, line 1", tuple(tuple(turn) for turn in turns))
    (prompt,) = read_prompts(write(tmp_path / "a.jsonl", [row]))
    assert (list(prompt.messages), prompt.answer) == (turns[0], answer)


EMPTY = "a turn asks nothing"


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ([1], "expected an? (JSON )?object, got list"),
        ({"reply": "a"}, "none of messages, conversations, turns, question, prompt, problem, instruction, text, "),
        ({"prompt": None}, "none of messages"),
        ({"messages": None}, "none of messages"),
        *(({key: 5}, "malformed row") for key in ("prompt", "text", "question", "instruction")),
        ({"instruction": "a", "input": 4}, "malformed row"),
        *(({"turns": wrong}, "malformed row") for wrong in ([], "abc", [None])),
        *(({"messages": wrong}, "malformed row") for wrong in ("abc", ["a"], [{"role": "user"}])),
        ({"messages": [user("a") | {"content": [{"type": "text"}]}]}, "malformed row"),
        ({"messages": [user("a") | {"content": 3}]}, "malformed row .*content must be text"),
        ({"prompt": "a", "system": 3}, "malformed row .*system must be text"),
        ({"prompt": "a", "tools": "search"}, "tools and tool calls must be JSON, not 'search'"),
        *(({"prompt": "a", "tools": [w]}, "tools must be a list of JSON objects") for w in (3, {"type": "web_search"})),
        ({"messages": [user("a"), {"role": "critic", "content": "b"}]}, "role 'critic' is not one of"),
        ({"messages": [user("a"), {"role": "assistant", "tool_calls": [{"name": 3}]}]}, "a tool call needs a name"),
        *(({"messages": wrong}, EMPTY) for wrong in ([], [assistant("a"), user("b")], [user("  ")])),
        ({"prompt": " \n"}, EMPTY),
        ({"turns": [" "]}, EMPTY),
        ({"instruction": "", "input": ""}, EMPTY),
    ],
    ids=str,
)
def test_a_malformed_row_is_named_with_its_line(row: Any, reason: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=reason):
        conversation(row, "x")
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"prompt": "fine"}}\n\n{json.dumps(row)}')
    reason = "the prompt is empty" if reason == EMPTY else reason
    with pytest.raises(UserError, match=rf"^\S+a.jsonl, line 3: {reason}.*$"):
        read_prompts(path)


def test_data_reads_later_turns_and_prompts_read_answers(tmp_path: Path) -> None:
    for row in ({"turns": ["a", ""]}, {"messages": [SYSTEM]}, {"messages": [RESULT]}):
        with pytest.raises(ValueError, match=EMPTY):
            conversation(row, "x")
    row = {"prompt": "a", "response": 7}
    assert conversation(row, "x").asked == "a"
    with pytest.raises(UserError, match="line 1: malformed row"):
        read_prompts(write(tmp_path / "a.jsonl", [row]))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "tool_calls", "name"]), inner, max_size=3)
    ),
    max_leaves=5,
)
KEYS = [
    "problem", "answer", "solution", "completion", "code",
    "messages", "turns", "question", "prompt", "entry_point", "text", "test_list", "instruction", "input",
    "output", "response", "id", "conversations", "system", "tools", "query",
]  # fmt: skip


@given(row=st.dictionaries(st.sampled_from(KEYS), JSON, max_size=4), form=st.sampled_from(FORM_CHOICES))
@settings(max_examples=200, deadline=None, derandomize=True)
@pytest.mark.slow
def test_any_row_is_a_prompt_or_a_user_error(
    row: dict[str, Any], form: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    try:
        (prompt,) = read_prompts(write(tmp_path_factory.getbasetemp() / "row.jsonl", [row]), form=form)
    except UserError:
        return
    assert prompt.messages and all(isinstance(m["content"], str) for m in prompt.messages)
    assert prompt.answer is None or isinstance(prompt.answer, str)


def test_split_messages_cuts_before_the_first_answer() -> None:
    chat = [SYSTEM, user("a"), assistant("b"), user("c"), assistant("d")]
    assert split_messages(chat) == ([SYSTEM, user("a")], chat[2:])
    assert split_messages(chat[:2]) == (chat[:2], [])
    assert split_messages([]) == ([], [])
