"""Reads rows of data as chats: converts the usual formats to messages, and splits them before each answer."""

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]  # role and content, both text; with tools also tool_calls, tool_call_id, name
Tool = dict[str, Any]  # {"type": "function", "function": {"name", "description", "parameters"}}

# columns with the prompt, in order of preference: alpaca's text holds its instruction and the answer too
ASKED = ("question", "prompt", "problem", "instruction", "text", "query", "input")
ANSWERS = ("response", "output", "completion", "solution", "answer")
# Benchmarks with a prompt template, and the columns of which it needs one. A template is applied to a source that is
# given under the benchmark's name, or with it as `form`.
FORMS = {
    "gsm8k": ("question", "problem"), "math500": ("question", "problem"), "math": ("question", "problem"),
    "aime": ("question", "problem"), "aime25": ("question", "problem"), "humaneval": ("prompt",),
    "mbpp": ("text", "prompt"), "mt_bench": ("turns", "prompt"), "livecodebench": ("question_content",),
}  # fmt: skip
BY_NAME, NO_FORM = "auto", "none"
FORM_CHOICES = (BY_NAME, *FORMS, NO_FORM)
REASONING = "Please reason step by step, and put your final answer within \\boxed{}."
MALFORMED = (TypeError, LookupError, AttributeError, RecursionError, ValueError)  # errors that `read_chat` may raise
SOLVE = "Write a solution to the following problem and make sure that it passes the tests:\n```python\n{prompt}\n```"


ROLES = {
    "human": "user", "gpt": "assistant", "chatgpt": "assistant", "bard": "assistant", "bing": "assistant",
    "developer": "system", "observation": "tool", "function": "tool", "tool_response": "tool",
}  # fmt: skip
CALLS = ("function_call", "tool_call")  # roles of ShareGPT's turns with only calls


# ---- rows ----------------------------------------------------------------------------------------------------


def read_chat(row: dict[str, Any], form: str | None = None) -> tuple[list[Message], tuple[Tool, ...]]:
    """Returns the messages, including recorded answers, and the tools of a row in any usual format.

    The formats: `messages`, ShareGPT's `conversations` (`from` and `value`) or a `prompt` that is a list of messages;
    `turns` (the first); else the prompt is the first column of `ASKED` that exists (`instruction` may have an `input`),
    unchanged, and the answer the first of `ANSWERS` that holds text: gsm8k's `answer`, math500's `solution` rather than
    its `answer`, which is a final value. A column `system` or `system_prompt` goes first unless there is a system
    message; `tools` is a list or the JSON text of one.

    Args:
        form: the benchmark of `FORMS` to take the prompt template from; None reads the row as it is.

    Raises:
        ValueError, TypeError, LookupError, AttributeError: the row is malformed, or does not fit the form. Columns
            other than lists of messages are not checked: they may be of any type.
    """
    given = {key: value for key, value in row.items() if value is not None}  # columns that a row does not fill
    turns = next((given[key] for key in ("messages", "conversations", "prompt") if type(given.get(key)) is list), None)
    if form is not None:
        messages = [{"role": "user", "content": _formed(given, form)}, *_answered(given)]
    elif turns is None:
        messages = _asked(given)
    else:
        messages = _said(turns)
    system = given.get("system") or given.get("system_prompt") or ""
    if not isinstance(system, str):
        raise TypeError("system must be text")
    if system.strip() and not any(message["role"] == "system" for message in messages[:1]):
        messages.insert(0, {"role": "system", "content": system})
    return messages, _tools(given.get("tools"))


def _formed(row: dict[str, Any], form: str) -> str:
    """Returns a row in a benchmark's prompt template. Raises ValueError if the form does not fit."""
    columns = FORMS[form]
    text: Any = next((row[key] for key in columns if key in row), None)
    if form == "mt_bench" and isinstance(text, list) and text:
        text = text[0]
    tests = row["test_list"] if isinstance(row.get("test_list"), list) else []
    if not isinstance(text, str) or (form == "mbpp" and not tests):
        needed = " or ".join(columns) + (" and a test_list" if form == "mbpp" else "")
        raise ValueError(f"the form {form} needs {needed} in each row; form none reads rows as they are")
    if form == "humaneval":
        return SOLVE.format(prompt=text.strip())
    if form == "mbpp":
        return f"{text}\nYour code should pass this test:\n{tests[0]}"
    if form == "livecodebench":  # with the beginning of the answer, if it is given
        return SOLVE.format(prompt=f"{text.strip()}\n{row.get('starter_code') or ''}".strip())
    return text.strip() if form == "mt_bench" else f"{text.strip()}\n{REASONING}"


def likely_form(row: Any) -> str | None:
    """Returns the benchmark with the columns of a row, which may be of any type."""
    if not isinstance(row, dict) or any(isinstance(row.get(key), list) for key in ("messages", "conversations")):
        return None
    given = {key for key, value in row.items() if value is not None}
    if "question" in given or "problem" in given:
        return "gsm8k"
    return "humaneval" if {"prompt", "entry_point"} <= given else "mbpp" if {"text", "test_list"} <= given else None


def _said(turns: list[Any]) -> list[Message]:
    messages: list[Message] = []
    for message in map(_message, turns):
        last = messages[-1] if messages else message
        if "tool_calls" in message and not message["content"] and messages and last["role"] == "assistant":
            # ShareGPT gives a text and each of its calls a turn of its own
            messages[-1] = last | {"tool_calls": [*last.get("tool_calls", ()), *message["tool_calls"]]}
        else:
            messages.append(message)
    return messages


def _message(turn: dict[str, Any]) -> Message:
    turn = {key: value for key, value in turn.items() if value is not None}
    role = turn["role"] if "role" in turn else turn["from"]
    content = turn.get("content", turn.get("value"))
    if role in CALLS:
        return {"role": "assistant", "content": "", "tool_calls": _calls(content)}
    role = ROLES.get(role, role)
    if role not in ("system", "user", "assistant", "tool"):
        raise ValueError(f"role {role!r} is not one of system, user, assistant, tool")
    more: dict[str, Any] = {}
    if role == "assistant" and (calls := turn.get("tool_calls") or turn.get("function_call")):
        more["tool_calls"] = _calls(calls)
    elif role == "tool":
        more = {key: turn[key] for key in ("name", "tool_call_id") if isinstance(turn.get(key), str)}
    if content is None:
        if not more and role != "tool":
            raise KeyError("content")
        content = ""
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        content = "".join(part["text"] for part in content)
    if role == "tool" and isinstance(content, dict | list):
        content = json.dumps(content, ensure_ascii=False)
    if not isinstance(content, str):
        raise TypeError("content must be text")
    return {"role": role, "content": content, **more}


def _calls(value: Any) -> list[dict[str, Any]]:
    """Returns tool calls as templates need them: each under `function`, its arguments a mapping."""
    found = _parsed(value)
    calls = []
    for call in map(_parsed, found if isinstance(found, list) else [found]):
        function = call["function"] if isinstance(call.get("function"), dict) else call
        arguments = _parsed(function.get("arguments") or {})
        if not isinstance(function.get("name"), str) or not isinstance(arguments, dict):
            raise ValueError("a tool call needs a name, and arguments that are a JSON object")
        named = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
        made = {"type": "function", "function": {"name": function["name"], "arguments": _filled(arguments)}}
        calls.append(named | made)
    return calls


def _tools(value: Any) -> tuple[Tool, ...]:
    found = _parsed(value or [])
    tools = [_parsed(tool) for tool in (found if isinstance(found, list) else [found])]
    for tool in tools:
        if not isinstance(tool, dict) or not isinstance((tool.get("function") or tool).get("name"), str):
            raise ValueError("tools must be a list of JSON objects, each with a name")
    return tuple(_filled(tool if tool.get("function") else {"type": "function", "function": tool}) for tool in tools)


def _parsed(value: Any) -> Any:
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise ValueError(f"tools and tool calls must be JSON, not {value[:40]!r}") from error


def _filled(value: Any) -> Any:
    """Returns a value without empty keys: Arrow gives every struct of a column the keys of all."""
    if isinstance(value, dict):
        return {key: _filled(each) for key, each in value.items() if each is not None}
    return [_filled(each) for each in value] if isinstance(value, list) else value


def _asked(row: dict[str, Any]) -> list[Message]:
    """Returns the prompt of a row without a list of messages, as messages."""
    if isinstance(row.get("turns"), list):
        return [{"role": "user", "content": row["turns"][0].strip()}]
    column = next((key for key in ASKED if key in row), None)
    if column is None:
        if key := next((key for key in ("messages", "conversations", "turns") if key in row), None):
            raise TypeError(f"{key} must be a list")
        raise ValueError(f"none of messages, conversations, turns, {', '.join(ASKED)} is in this row")
    text = row[column]
    if column == "instruction":
        text = "\n".join(part for part in (text, row.get("input") or "") if part)
    return [{"role": "user", "content": text}, *_answered(row, column)]


def _answered(row: dict[str, Any], column: str = "") -> list[Message]:
    """Returns the recorded answer of a row without a list of messages, if it has one."""
    answer = row.get("response", row.get("output"))
    if answer is None:  # in many datasets the other columns hold numbers, choices and lists, not answers in words
        names = [key for key in (*ANSWERS, "code") if key != "code" or column == "text"]  # mbpp's
        texts = [row[key] for key in names if isinstance(row.get(key), str) and row[key].strip()]
        answer = texts[0] if texts else None
    return [] if answer is None else [{"role": "assistant", "content": answer}]


def split_messages(messages: list[Message]) -> tuple[list[Message], list[Message]]:
    """Splits messages before the first assistant turn."""
    first = next((i for i, message in enumerate(messages) if message["role"] == "assistant"), len(messages))
    return messages[:first], messages[first:]


# ---- conversations --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation without its recorded answers: the messages before each answer, turn by turn.

    A recorded tool call cannot be replaced by another answer, as the tools are not run: the turn after it begins with
    the call and its results.
    """

    id: str
    turns: tuple[tuple[Message, ...], ...]
    tools: tuple[Tool, ...] = ()
    recorded: tuple[Message, ...] = field(default=(), compare=False)  # all messages, including the row's answers

    def to_json(self, *, recorded: bool) -> dict[str, Any]:
        """Returns the fields, not copied; `recorded`: with the row's answers."""
        fields = {"id": self.id, "turns": self.turns, "tools": self.tools}
        return fields | {"recorded": self.recorded} if recorded else fields

    @classmethod
    def of_json(cls, values: dict[str, Any]) -> "Conversation":
        turns = tuple(map(tuple, values["turns"]))
        return cls(values["id"], turns, tuple(values.get("tools", ())), tuple(values.get("recorded", ())))

    @property
    def asked(self) -> str:
        """The text of all user messages."""
        return self._said("user")

    @property
    def instructions(self) -> str:
        """The system messages and the tools."""
        return self._said("system") + (json.dumps(self.tools, sort_keys=True) if self.tools else "")

    def _said(self, role: str) -> str:
        return "\n".join(message["content"] for turn in self.turns for message in turn if message["role"] == role)


def conversation(row: Any, default_id: str, form: str | None = None) -> Conversation:
    """Returns the conversation of a row that `read_chat` can read, with all turns; or of a bare string.

    Raises:
        ValueError: a short description of the fault.
    """
    if isinstance(row, str):
        row = {"prompt": row}
    if not isinstance(row, dict):
        raise ValueError(f"expected an object, got {type(row).__name__}")
    name = next((row[key] for key in ("id", "task_id") if isinstance(row.get(key), str | int)), default_id)
    try:
        messages, tools = read_chat(row, form)
        turns = all_turns(row, messages, form)
        if not all(isinstance(message["content"], str) for turn in turns for message in turn):
            raise TypeError("the prompt must be text")
    except (TypeError, LookupError, AttributeError, RecursionError) as error:
        raise ValueError(f"malformed row ({error!r})") from error
    if not turns or not all(_asks(turn, first=i == 0) for i, turn in enumerate(turns)):
        raise ValueError("a turn asks nothing")
    return Conversation(str(name), turns, tools, tuple(messages))


def all_turns(row: dict[str, Any], messages: list[Message], form: str | None) -> tuple[tuple[Message, ...], ...]:
    """Returns a row's messages turn by turn, as in `Conversation`; `messages` come from `read_chat`."""
    turns = _turns(messages)
    chat = any(isinstance(row.get(key), list) for key in ("messages", "conversations", "prompt"))
    if form == "mt_bench" or (form is None and not chat):
        asked = row.get("turns") or (row.get("prompt") if form == "mt_bench" else None)
        later = asked[1:] if isinstance(asked, list) else []
        turns += tuple(({"role": "user", "content": turn.strip()},) for turn in later)
    return turns


def _turns(messages: list[Message]) -> tuple[tuple[Message, ...], ...]:
    turns: list[list[Message]] = [[]]
    for message in messages:
        if message["role"] != "assistant":
            turns[-1].append(message)
        else:
            turns.append([message] if "tool_calls" in message else [])
    ended = all(message["role"] == "assistant" for message in turns[-1])  # with an answer, or a call without a result
    return tuple(tuple(turn) for turn in (turns[:-1] if ended else turns))


def _asks(turn: tuple[Message, ...], first: bool) -> bool:
    if not first and any(message["role"] == "tool" for message in turn):
        return True
    return any(message["role"] == "user" and message["content"].strip() for message in turn)


def with_call_ids(messages: Sequence[Message]) -> list[Message]:
    """Returns messages in which every call has an id and every result names one, as servers get them from any client.

    A call without an id gets one that is named by a result and no other call, else a new one of nine letters and
    digits, the form that Mistral's templates need. Results without an id get those of the other calls in turn.
    """
    found = []
    given = {call.get("id") for message in messages for call in message.get("tool_calls", ())}
    given |= {message.get("tool_call_id") for message in messages}
    fresh = (name for i in itertools.count() if (name := f"call{i:05d}") not in given)
    waiting: list[str] = []  # calls without a result so far
    for i, message in enumerate(messages):
        if "tool_calls" in message:
            results = itertools.takewhile(lambda later: later["role"] == "tool", messages[i + 1 :])
            named = [result["tool_call_id"] for result in results if result.get("tool_call_id")]
            ids = [call.get("id") for call in message["tool_calls"]]
            free = [name for name in named if name not in ids]
            ids = [name or (free.pop(0) if free else next(fresh)) for name in ids]
            waiting = [name for name in ids if name not in named]
            calls = [call | {"id": name} for call, name in zip(message["tool_calls"], ids, strict=True)]
            message = message | {"tool_calls": calls}
        elif message["role"] == "tool" and not message.get("tool_call_id"):
            message = message | {"tool_call_id": waiting.pop(0) if waiting else next(fresh)}
        found.append(message)
    return found
