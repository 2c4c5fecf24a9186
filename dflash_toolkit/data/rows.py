"""Reads a row of data in any usual form: what is asked, what was answered, the tools, and what it did not read.

A row is copied, and every column is removed from the copy where it is read, so the rest is what was not read.
"""

from dataclasses import dataclass, field
from typing import Any, NoReturn

from .messages import (
    REASONING,
    ROLES,
    Message,
    Tool,
    filled,
    is_turn,
    parsed,
    read_tools,
    read_turn,
    read_turns,
    take,
)
from .text_calls import from_text

# columns of whole chats; a list of messages is also read under any other name, except those of NO_CHAT
CHATS = ("messages", "conversations", "conversation", "prompt", "turns")
STRINGS = ("chat", "dialogue", "dialog", "data")  # lists of strings in turn
NO_CHAT = {"tools", "functions", "completion", "response", "output", "choices", "chosen", "rejected",
           "preferred_output", "non_preferred_output"}  # fmt: skip
# columns with the prompt, in order of preference: alpaca's text holds its instruction and the answer too
ASKED = ("question", "prompt", "problem", "instruction", "text", "query", "input", "inputs", "user", "human",
         "user_input")  # fmt: skip
ANSWERS = ("response", "output", "completion", "solution", "answer", "targets", "target", "assistant", "gpt")
# columns before the question: texts are joined to it, chats precede it
HISTORY = ("history", "chat_history", "conversation_history", "dialogue_history")
CONTEXT = ("context", "contexts", "passage", "document", "documents", "article", "paragraph", "background", "story",
           "definition", *HISTORY)  # fmt: skip
SYSTEM = ("system", "system_prompt", "system_message", "instructions", "system_instruction", "systeminstruction")
WRAPPERS = ("body", "request", "params", "input", "data")  # a request as servers and batch files hold it
CATEGORY = ("category", "domain", "subject")
EMPTY = "an empty conversation"
NO_QUESTION = "an output row of a batch without its question; give the batch's input file too"

# Benchmarks with a prompt template, and the columns of which it needs one. A template is applied to a source that is
# given under the benchmark's name, or with it as `form`.
FORMS = {
    "gsm8k": ("question", "problem"), "math500": ("question", "problem"), "math": ("question", "problem"),
    "aime": ("question", "problem"), "aime25": ("question", "problem"), "humaneval": ("prompt",),
    "mbpp": ("text", "prompt"), "mt_bench": ("turns", "prompt"), "livecodebench": ("question_content",),
}  # fmt: skip
BY_NAME, NO_FORM = "auto", "none"
FORM_CHOICES = (BY_NAME, *FORMS, NO_FORM)
STEPS = "Please reason step by step, and put your final answer within \\boxed{}."
SOLVE = "Write a solution to the following problem and make sure that it passes the tests:\n```python\n{prompt}\n```"


@dataclass(slots=True)
class Chat:
    """A row as messages."""

    messages: list[Message]
    later: list[Message] = field(default_factory=list)  # questions after the first, which have no recorded answers
    tools: tuple[Tool, ...] = ()
    name: str | None = None  # its id
    category: str | None = None
    unread: set[str] = field(default_factory=set)  # filled columns, and keys of messages as `column[].key`


def read_row(row: dict[str, Any], form: str | None = None) -> Chat:
    """Reads a row; docs/data.md lists the forms.

    Args:
        form: the benchmark of `FORMS` to take the prompt template from; None reads the row as it is.

    Raises:
        ValueError, TypeError, LookupError, AttributeError: the row is malformed, or does not fit the form. Columns
            other than lists of messages are not checked: they may be of any type.
    """
    left = filled(row)
    spelled = {key.lower(): key for key in left if not key.islower() and key.lower() not in left}
    for lower, key in spelled.items():
        left[lower] = left.pop(key)
    chat = _wrapped(left) or Chat([])
    names: tuple[str, ...] = ANSWERS
    if form is not None:
        _formed(left, form, chat)
    elif not chat.messages:
        names = _read_prompt(left, chat)
    _answered(left, chat, names)
    column = next((key for key in SYSTEM if left.get(key)), None)
    if column and [message["role"] for message in chat.messages[:1]] != ["system"]:
        text = _system_text(left.pop(column))
        chat.messages[:0] = [{"role": "system", "content": text}] if text else []
    for key in ("tools", "functions"):
        if not chat.tools and left.get(key):
            chat.tools = read_tools(left.pop(key))
    chat.messages, chat.tools = from_text(chat.messages, chat.tools)
    chat.category = take(left, CATEGORY, str) or chat.category
    ids = [left.pop(key) for key in ("id", "task_id", "custom_id") if isinstance(left.get(key), str | int)]
    chat.name = str(ids[0]) if ids else chat.name
    chat.unread |= {spelled.get(key, key) for key, value in left.items() if value not in ("", [], {})}
    return chat


def batch_answer(row: Any) -> tuple[str, Message | None] | None:
    """Returns the id and the answer of a row of a batch's output file; None for other rows."""
    if not isinstance(row, dict) or not isinstance(row.get("custom_id"), str) or not {"response", "error"} & row.keys():
        return None
    if any(key in row for key in (*WRAPPERS, *ASKED, "messages")):
        return None
    try:
        messages = _reply(row.get("response"), set())
    except (TypeError, LookupError, AttributeError, ValueError):
        messages = []
    return row["custom_id"], messages[0] if messages else None


def _wrapped(left: dict[str, Any]) -> Chat | None:
    """Returns the chat of a request in a batch file or a log, without its answer."""
    for name in WRAPPERS:
        request = left.get(name)
        if isinstance(request, dict) and any(key in request for key in (*CHATS, *ASKED, "contents")):
            del left[name]
            chat = read_row(request)
            chat.unread = {f"{name}.{key}" for key in chat.unread}
            return chat
    return None


# ---- what is asked -------------------------------------------------------------------------------------------


def _read_prompt(left: dict[str, Any], chat: Chat) -> tuple[str, ...]:
    """Reads the column that holds the whole chat; without one, the question and what precedes it.

    Returns the columns that may hold the answer: with a whole chat, `answer` and `solution` are often final values.
    """
    if column := _chat_column(left):
        turns = left.pop(column)
        if column in ("prompt", "turns") and all(isinstance(turn, str) for turn in turns):
            _add_question(left, turns[0].strip(), chat)
            chat.later = [{"role": "user", "content": turn.strip()} for turn in turns[1:]]
        else:
            chat.messages = _turns(column, turns, chat)
        return ANSWERS[:3]
    column = next((key for key in ASKED if key in left), None)
    if column is None:
        column = next((key for key in ("context", "history") if isinstance(left.get(key), str)), None)
    if column is None:
        _refuse(left)
    text = left.pop(column)
    if column == "instruction" and left.get("input"):
        text = "\n".join(part for part in (text, left.pop("input")) if part)
    if not isinstance(text, str):
        raise TypeError(f"{column} must be text")
    role = take(left, ("role",), str) if column == "text" else None  # OpenAssistant's files have one message a row
    if role and ROLES.get(role) != "user":
        raise ValueError(f"one message of the role {role!r} without its question")
    _add_question(left, text, chat, after=column == "instruction")
    return (*ANSWERS, "code") if column == "text" else ANSWERS  # mbpp's


def _refuse(left: dict[str, Any]) -> NoReturn:
    """Raises ValueError or TypeError for a row without a question."""
    if batch_answer(left):
        raise ValueError(NO_QUESTION)
    if key := next((key for key in (*CHATS, *STRINGS) if key in left), None):
        if left[key] == []:
            raise ValueError(EMPTY)
        raise TypeError(f"{key} must be a list")
    raise ValueError(f"none of {', '.join((*CHATS[:3], 'turns', *ASKED[:7]))} is in this row")


def _chat_column(left: dict[str, Any]) -> str | None:
    """Returns the column that holds a chat; a list as text, as in a CSV file, is parsed in place."""
    for key in CHATS:
        value = left.get(key)
        if isinstance(value, str) and value.lstrip().startswith("[") and key != "prompt":
            left[key] = value = parsed(value)
        if isinstance(value, list) and value:
            return key
    question = any(key in left for key in ASKED)
    for key, value in left.items():
        if key not in NO_CHAT and _is_chat(value) and not (question and key in CONTEXT):
            return key
    if question:
        return None
    strings = (key for key in STRINGS if isinstance(left.get(key), list) and left[key])
    return next(strings, "chosen" if _is_chat(left.get("chosen")) else None)


def _is_chat(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(is_turn, value))


def _turns(column: str, turns: list[Any], chat: Chat) -> list[Message]:
    unread: set[str] = set()
    messages = read_turns(turns, unread)
    chat.unread |= {f"{column}[].{key}" for key in unread}
    return messages


def _add_question(left: dict[str, Any], text: str, chat: Chat, after: bool = False) -> None:
    """Adds a question, with the texts and the chat that precede it; `after`: texts follow it, as in dolly."""
    texts = []
    for key in CONTEXT:
        value = left.get(key)
        if isinstance(value, list) and value and all(isinstance(each, str) for each in value) and key not in HISTORY:
            value = "\n\n".join(value)
        if isinstance(value, str) and value.strip():
            texts.append(value)
            del left[key]
        elif isinstance(value, list) and value and (_is_chat(value) or (key in HISTORY and _is_pairs(value))):
            chat.messages += _turns(key, left.pop(key), chat)
    parts = [text, *texts] if after else [*texts, text]
    chat.messages.append({"role": "user", "content": "\n\n".join(part for part in parts if part) if texts else text})


def _is_pairs(value: list[Any]) -> bool:
    """Whether a history is strings in turn, or pairs of a question and its answer."""
    return all(isinstance(each, str) for each in value) or all(isinstance(each, list) for each in value)


def _system_text(value: Any) -> str:
    """Returns the system message of a column: a text, parts of one, or a message."""
    if isinstance(value, str):
        return value if value.strip() else ""
    if isinstance(value, list) or (isinstance(value, dict) and "parts" in value):
        parts = value if isinstance(value, list) else value["parts"]
        return str(read_turn({"role": "system", "content": parts}, set())[0]["content"])
    raise TypeError("system must be text")


# ---- what was answered -----------------------------------------------------------------------------------------


def _answered(left: dict[str, Any], chat: Chat, names: tuple[str, ...]) -> None:
    """Adds the recorded answer of a row to messages that end with a question.

    In many data sets columns hold numbers, choices and lists, not answers in words: these are not read.
    """
    if chat.messages and chat.messages[-1]["role"] not in ("user", "tool"):
        return
    unread: set[str] = set()
    for key in ("response", "completion", "output", "choices"):
        if isinstance(left.get(key), dict | list) and (found := _reply(left[key], unread)):
            del left[key]
            chat.messages += found
            chat.unread |= {f"{key}[].{each}" for each in unread}
            return
    column = next((key for key in names if isinstance(left.get(key), str) and left[key].strip()), None)
    if column is not None:
        chat.messages.append({"role": "assistant", "content": left.pop(column)})
        if reasoning := take(left, (*REASONING, "complex_cot"), str):
            chat.messages[-1]["reasoning_content"] = reasoning


def _reply(value: Any, unread: set[str]) -> list[Message]:
    """Returns the messages of a response: a list of them, a message, or what a server returned; else an empty list."""
    if isinstance(value, dict) and isinstance(value.get("body"), dict):
        value = value["body"]
    if isinstance(value, dict):
        value = value.get("choices") or value.get("candidates") or [value]
    if not isinstance(value, list) or not value:
        return []
    first = value[0]
    if not isinstance(first, dict):
        return []
    inner = first.get("message") or first.get("content")  # a choice, or Gemini's candidate
    if isinstance(inner, dict):
        return read_turn({"role": "assistant"} | inner, unread)
    if isinstance(first.get("text"), str) and "role" not in first:
        return [{"role": "assistant", "content": first["text"]}]
    return read_turns(value, unread) if all(map(is_turn, value)) else []


# ---- benchmarks ------------------------------------------------------------------------------------------------


def _formed(left: dict[str, Any], form: str, chat: Chat) -> None:
    """Reads a row in a benchmark's prompt template. Raises ValueError if the form does not fit."""
    columns = FORMS[form]
    text: Any = take(left, columns)
    if form == "mt_bench" and isinstance(text, list) and text:
        text, *later = text
        chat.later = [{"role": "user", "content": turn.strip()} for turn in later]
    tests = take(left, ("test_list",), list) if form == "mbpp" else None
    if not isinstance(text, str) or (form == "mbpp" and not tests):
        needed = " or ".join(columns) + (" and a test_list" if form == "mbpp" else "")
        raise ValueError(f"the form {form} needs {needed} in each row; form none reads rows as they are")
    if form == "humaneval":
        text = SOLVE.format(prompt=text.strip())
    elif tests:
        text = f"{text}\nYour code should pass this test:\n{tests[0]}"
    elif form == "livecodebench":  # with the beginning of the answer, if it is given
        text = SOLVE.format(prompt=f"{text.strip()}\n{left.pop('starter_code', '')}".strip())
    else:
        text = text.strip() if form == "mt_bench" else f"{text.strip()}\n{STEPS}"
    chat.messages = [{"role": "user", "content": text}]


def likely_form(row: Any) -> str | None:
    """Returns the benchmark with the columns of a row, which may be of any type."""
    if not isinstance(row, dict) or any(
        isinstance(row.get(key), list) for key in ("messages", "conversations", "conversation")
    ):
        return None
    given = {key for key, value in row.items() if value is not None}
    if "question" in given or "problem" in given:
        return "gsm8k"
    return "humaneval" if {"prompt", "entry_point"} <= given else "mbpp" if {"text", "test_list"} <= given else None
