"""Reads the turns of a chat in the forms that data sets and servers write, as messages for chat templates."""

import ast
import contextlib
import json
from collections.abc import Iterable
from typing import Any

Message = dict[str, Any]  # role and content, both text; also tool_calls, tool_call_id, name, reasoning_content, weight
Tool = dict[str, Any]  # {"type": "function", "function": {"name", "description", "parameters"}}

ROLES = {role: role for role in ("system", "user", "assistant", "tool")} | {
    "human": "user", "prompter": "user", "gpt": "assistant", "chatgpt": "assistant", "bard": "assistant",
    "bing": "assistant", "model": "assistant", "bot": "assistant", "chatbot": "assistant", "ai": "assistant",
    "developer": "system", "observation": "tool", "function": "tool", "tool_response": "tool",
}  # fmt: skip
CALLS = ("function_call", "tool_call")  # roles of ShareGPT's turns with only calls
ROLE_KEYS, CONTENT_KEYS = ("role", "from", "speaker"), ("content", "value", "text", "parts")
ASKED_KEYS, ANSWERED_KEYS = ("human", "user", "input", "question", "prompt"), ("assistant", "gpt", "output", "answer")
REASONING = ("reasoning_content", "reasoning", "thinking", "thoughts", "thought")
WEIGHTS = ("weight", "train", "loss")  # 0 or false in an assistant turn: not trained on


def take(left: dict[str, Any], keys: Iterable[str], kind: Any = object) -> Any:
    """Removes and returns the first value of a type under one of the keys, or None."""
    return next((left.pop(key) for key in keys if key in left and isinstance(left[key], kind)), None)


def filled(values: dict[str, Any]) -> dict[str, Any]:
    """Returns a copy without nulls: Arrow gives every row and struct all keys of its column."""
    return {key: value for key, value in values.items() if value is not None}


def parsed(value: Any) -> Any:
    """Returns the value of a JSON text, or of a Python literal; other values unchanged. Raises ValueError."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):  # a Python literal, perhaps
        pass
    try:
        return ast.literal_eval(value.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError) as error:
        raise ValueError(f"tools and tool calls must be JSON, not {value[:40]!r}") from error


def is_turn(value: Any) -> bool:
    """Whether a value is a message, or a question with its answer, in a form that `read_turn` knows."""
    if not isinstance(value, dict):
        return False
    pair = any(key in value for key in ASKED_KEYS) and any(key in value for key in ANSWERED_KEYS)
    roles = [value[key] for key in ROLE_KEYS if isinstance(value.get(key), str)]
    return pair or any(role in CALLS or role.lower() in ROLES for role in roles)


def read_turns(turns: list[Any], unread: set[str]) -> list[Message]:
    """Returns the messages of a chat. Strings alternate between the user and the assistant.

    Args:
        unread: receives the keys that were not read.

    Raises:
        ValueError, TypeError, LookupError, AttributeError: a turn is malformed.
    """
    messages: list[Message] = []
    for number, turn in enumerate(turns):
        if isinstance(turn, str):
            messages.append({"role": ("user", "assistant")[number % 2], "content": turn})
            continue
        if isinstance(turn, list) and len(turn) == 2:  # a question and its answer
            messages += [{"role": "user", "content": _text(turn[0])}, {"role": "assistant", "content": _text(turn[1])}]
            continue
        for message in read_turn(turn, unread):
            last = messages[-1] if messages else message
            if "tool_calls" in message and not message["content"] and messages and last["role"] == "assistant":
                # ShareGPT gives a text and each of its calls a turn of its own
                messages[-1] = last | {"tool_calls": [*last.get("tool_calls", ()), *message["tool_calls"]]}
            else:
                messages.append(message)
    return messages


def read_turn(turn: dict[str, Any], unread: set[str]) -> list[Message]:
    """Returns the messages of a turn: one, or several if it holds a question and its answer, or results of tools."""
    if len(turn) == 2:  # nearly all turns
        role, content = turn.get("role") or turn.get("from"), turn.get("content") or turn.get("value")
        if type(role) is str and type(content) is str and role in ROLES:
            return [{"role": ROLES[role], "content": content}]
    left = filled(turn)
    role = take(left, ROLE_KEYS, str)
    if role is None:
        asked, answered = take(left, ASKED_KEYS, str), take(left, ANSWERED_KEYS, str)
        if asked is None or answered is None:
            raise KeyError("role")
        messages: list[Message] = [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
    elif role in CALLS:
        messages = [{"role": "assistant", "content": "", "tool_calls": read_calls(take(left, CONTENT_KEYS))}]
    else:
        name = role if role in ROLES else role.lower()
        if name not in ROLES:
            raise ValueError(f"role {role!r} is not one of system, user, assistant, tool")
        messages = _message(ROLES[name], left)
    unread |= {key for key, value in left.items() if value not in ("", [], {})}
    return messages


def _message(role: str, left: dict[str, Any]) -> list[Message]:
    """Returns the messages of a turn with a role, and removes what it reads."""
    message: Message = {"role": role, "content": ""}
    others: list[Message] = []
    content = take(left, CONTENT_KEYS)
    if isinstance(content, dict) and "parts" in content:
        content = content["parts"]
    calls: list[Any] = []
    if role == "tool":
        message |= {key: left.pop(key) for key in ("name", "tool_call_id") if isinstance(left.get(key), str)}
    if isinstance(content, list) and not (role == "tool" and not all(map(_is_part, content))):
        texts: list[str] = []
        thoughts: list[str] = []
        for part in content:
            _read_part(part, texts, thoughts, calls, others)
        content = "".join(texts) if texts or not (calls or others or thoughts) else None
        if thoughts:
            left["reasoning_content"] = "".join(thoughts)
    if role == "tool" and isinstance(content, dict | list):
        content = json.dumps(content, ensure_ascii=False)
    if role == "assistant":
        if reasoning := take(left, REASONING, str):
            message["reasoning_content"] = reasoning
            for key in REASONING:  # some servers give it under two names
                if left.get(key) == reasoning:
                    del left[key]
        if given := take(left, ("tool_calls", "function_call")):
            calls += read_list(given)
        if calls:
            message["tool_calls"] = [read_call(call) for call in calls]
        for key in WEIGHTS:
            if left.get(key) in (0, 1) and not left.pop(key):
                message["weight"] = 0
    elif left.get("weight") == 0:
        del left["weight"]  # only answers are trained on
    if content is None:
        if len(message) == 2 and not others and role != "tool":
            raise KeyError("content")
        content = ""
    message["content"] = _text(content)
    return [*others, message] if content or len(message) > 2 or not others else others


def _text(content: Any) -> str:
    if not isinstance(content, str):
        raise TypeError("content must be text")
    return content


def _is_part(part: Any) -> bool:
    return isinstance(part, dict) and isinstance(part.get("text"), str)


def _read_part(part: Any, texts: list[str], thoughts: list[str], calls: list[Any], results: list[Message]) -> None:
    """Adds a part of a message, as OpenAI, Anthropic and Gemini write them, to the list that it belongs to."""
    if isinstance(part, str):
        texts.append(part)
        return
    kind = part.get("type")
    if kind == "thinking" or part.get("thought") is True:
        thoughts.append(_text(part.get("thinking", part.get("text"))))
    elif kind in ("text", "input_text", "output_text", None) and "text" in part:
        texts.append(_text(part["text"]))
    elif kind == "tool_use":
        calls.append(part)
    elif call := part.get("functionCall") or part.get("function_call"):
        calls.append(call)
    elif kind == "tool_result":
        content = part.get("content", "")
        found = _message("tool", {"content": content, "tool_call_id": part.get("tool_use_id")})
        results += found
    elif result := part.get("functionResponse") or part.get("function_response"):
        results += _message("tool", {"content": result.get("response"), "name": result.get("name")})
    elif kind == "text":
        raise KeyError("text")
    else:
        raise TypeError(f"content must be text, not {kind or 'another part'}")


def read_calls(value: Any) -> list[dict[str, Any]]:
    """Returns tool calls as templates need them: each under `function`, its arguments a mapping."""
    return [read_call(call) for call in read_list(value)]


def read_list(value: Any) -> list[Any]:
    """Returns a list, or a list of the one value; also from JSON text."""
    found = parsed(value)
    return found if isinstance(found, list) else [found]


def read_call(value: Any) -> dict[str, Any]:
    """Returns one tool call. Raises ValueError."""
    call = parsed(value)
    function = call["function"] if isinstance(call.get("function"), dict) else call
    arguments: Any = next((function[key] for key in ("arguments", "input", "args") if function.get(key)), {})
    with contextlib.suppress(ValueError):  # a Python literal, perhaps
        arguments = literal if isinstance(literal := parsed(arguments), dict) else arguments
    if not isinstance(function.get("name"), str):
        raise ValueError("a tool call needs a name")
    named = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    arguments = without_nulls(call_arguments(arguments))
    return named | {"type": "function", "function": {"name": function["name"], "arguments": arguments}}


def call_arguments(value: Any) -> dict[str, Any]:
    """Returns the arguments of a call as a mapping, which chat templates need.

    Servers and clients write an object, its JSON text (also encoded twice), or null, "" and [] for no arguments. Any
    other value, such as JSON that a model did not complete, is returned under the key `arguments`.
    """
    for _ in range(2):
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError):
                break
    if isinstance(value, dict):
        return value
    return {} if value in (None, []) or (isinstance(value, str) and not value.strip()) else {"arguments": value}


def read_tools(value: Any) -> tuple[Tool, ...]:
    """Returns tools as templates need them. Raises ValueError."""
    found = [parsed(tool) for tool in (read_list(value) if value and value != " " else [])]
    tools: list[Any] = []
    for tool in found:
        declared = isinstance(tool, dict) and (tool.get("functionDeclarations") or tool.get("function_declarations"))
        tools += declared if isinstance(declared, list) else [tool]
    for number, tool in enumerate(tools):
        if not isinstance(tool, dict) or not isinstance((tool.get("function") or tool).get("name"), str):
            raise ValueError("tools must be a list of JSON objects, each with a name")
        if "input_schema" in tool:  # Anthropic's
            tools[number] = {key: each for key, each in tool.items() if key != "input_schema"}
            tools[number]["parameters"] = tool["input_schema"]
    return tuple(
        without_nulls(tool if tool.get("function") else {"type": "function", "function": tool}) for tool in tools
    )


def without_nulls(value: Any) -> Any:
    """Returns a value without empty keys: Arrow gives every struct of a column the keys of all."""
    if isinstance(value, dict):
        return {key: without_nulls(each) for key, each in value.items() if each is not None}
    return [without_nulls(each) for each in value] if isinstance(value, list) else value
