"""Rows of data as chats: the usual shapes become messages, and what precedes each answer, turn by turn."""

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]  # role and content, both text; with tools also tool_calls, tool_call_id, name
Tool = dict[str, Any]  # {"type": "function", "function": {"name", "description", "parameters"}}

# columns of what is asked, the first that a row has: alpaca's text holds its instruction and the answer too
ASKED = ("question", "prompt", "problem", "instruction", "text", "query", "input")
ANSWERS = ("response", "output", "completion", "solution", "answer")
# Benchmarks with a usual way to be asked, and the columns of which it needs one. It is applied to a source that is
# given under the name, or with it as its form.
FORMS = {
    "gsm8k": ("question", "problem"), "math500": ("question", "problem"), "math": ("question", "problem"),
    "aime": ("question", "problem"), "aime25": ("question", "problem"), "humaneval": ("prompt",),
    "mbpp": ("text", "prompt"), "mt_bench": ("turns", "prompt"), "livecodebench": ("question_content",),
}  # fmt: skip
BY_NAME, NO_FORM = "auto", "none"
FORM_CHOICES = (BY_NAME, *FORMS, NO_FORM)
REASONING = "Please reason step by step, and put your final answer within \\boxed{}."
MALFORMED = (TypeError, LookupError, AttributeError, RecursionError, ValueError)  # what `read_chat` may raise
SOLVE = "Write a solution to the following problem and make sure that it passes the tests:\n```python\n{prompt}\n```"


ROLES = {
    "human": "user", "gpt": "assistant", "chatgpt": "assistant", "bard": "assistant", "bing": "assistant",
    "developer": "system", "observation": "tool", "function": "tool", "tool_response": "tool",
}  # fmt: skip
CALLS = ("function_call", "tool_call")  # roles of ShareGPT's turns that hold calls alone


# ---- rows ----------------------------------------------------------------------------------------------------


def read_chat(row: dict[str, Any], form: str | None = None) -> tuple[list[Message], tuple[Tool, ...]]:
    """Messages, recorded answers included, and tools of a row of any usual shape.

    The shapes: `messages`, ShareGPT's `conversations` (`from` and `value`) or a `prompt` that is a list of messages;
    `turns` (the first); else what is asked stands in the first of `ASKED` that there is (`instruction` may have an
    `input`), as it is, and the answer in the first of `ANSWERS` that holds text: gsm8k's `answer`, math500's `solution`
    rather than its `answer`, which is a final value. A column `system` or `system_prompt` goes first unless there is a
    system message; `tools` is a list or the JSON text of one.

    Args:
        form: the benchmark of `FORMS` whose way of asking is applied instead; None reads the row as it is.

    Raises:
        ValueError, TypeError, LookupError, AttributeError: the row is malformed, or does not fit the form. Contents of
            rows that are no lists of messages are not looked at: they may be of any type.
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
    """What a benchmark asks with a row. Raises ValueError where the form does not fit."""
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
    if form == "livecodebench":  # with what the answer is to begin with, where that is given
        return SOLVE.format(prompt=f"{text.strip()}\n{row.get('starter_code') or ''}".strip())
    return text.strip() if form == "mt_bench" else f"{text.strip()}\n{REASONING}"


def likely_form(row: Any) -> str | None:
    """The benchmark whose columns a row has, whatever it is."""
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
    """Tool calls as templates want them: each under `function`, its arguments a mapping."""
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
    """Without the keys that have no value: Arrow gives every struct of a column the keys of all."""
    if isinstance(value, dict):
        return {key: _filled(each) for key, each in value.items() if each is not None}
    return [_filled(each) for each in value] if isinstance(value, list) else value


def _asked(row: dict[str, Any]) -> list[Message]:
    """Messages of a row that is no list of them."""
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
    """The recorded answer of a row that is no list of messages, if it has one."""
    answer = row.get("response", row.get("output"))
    if answer is None:  # the others hold numbers, choices and lists in many a dataset, which are no answer in words
        names = [key for key in (*ANSWERS, "code") if key != "code" or column == "text"]  # mbpp's
        texts = [row[key] for key in names if isinstance(row.get(key), str) and row[key].strip()]
        answer = texts[0] if texts else None
    return [] if answer is None else [{"role": "assistant", "content": answer}]


def split_messages(messages: list[Message]) -> tuple[list[Message], list[Message]]:
    """What precedes the first assistant turn, and what there is from it on."""
    first = next((i for i, message in enumerate(messages) if message["role"] == "assistant"), len(messages))
    return messages[:first], messages[first:]


# ---- conversations --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Conversation:
    """What is asked, turn by turn: the messages before each answer. The recorded answers are left out.

    A recorded tool call is no answer that can be gone on from in other words, for nobody runs the tools: the turn after
    it begins with the call, and then has its results.
    """

    id: str
    turns: tuple[tuple[Message, ...], ...]
    tools: tuple[Tool, ...] = ()
    recorded: tuple[Message, ...] = field(default=(), compare=False)  # all messages, with the answers that the row has

    @property
    def asked(self) -> str:
        """What is asked, all turns."""
        return self._said("user")

    @property
    def instructions(self) -> str:
        """The system messages and the tools."""
        return self._said("system") + (json.dumps(self.tools, sort_keys=True) if self.tools else "")

    def _said(self, role: str) -> str:
        return "\n".join(message["content"] for turn in self.turns for message in turn if message["role"] == role)


def conversation(row: Any, default_id: str, form: str | None = None) -> Conversation:
    """A row of any shape that `read_chat` knows, all its turns; every one of `turns`; or a bare string.

    Raises:
        ValueError: says in a few words what is wrong with the row.
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
    """What a row asks, turn by turn, as in `Conversation`; `messages` are what `read_chat` made of it."""
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
    """Messages whose calls all have an id, and whose results name a call's, as servers get them from any client.

    A call without an id takes the one that a result of its names and no other call has, else one that is made up: of
    nine letters and digits, which the templates of Mistral ask for. Results without one name the other calls in turn.
    """
    found = []
    given = {call.get("id") for message in messages for call in message.get("tool_calls", ())}
    given |= {message.get("tool_call_id") for message in messages}
    fresh = (name for i in itertools.count() if (name := f"call{i:05d}") not in given)
    waiting: list[str] = []  # calls that no result names
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
