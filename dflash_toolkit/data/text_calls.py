"""Finds tools, calls and results that a chat holds as text: Hermes' tags, and lists such as `[f(x=1)]`."""

import ast
import re
from collections.abc import Sequence
from typing import Any

from .messages import Message, Tool, parsed, read_call, read_tools

CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
RESULT = re.compile(r"<tool_response>\s*(.*?)\s*</tool_response>", re.DOTALL)
TOOLS = re.compile(r"<tools>\s*([\[{].*?)\s*</tools>(?:.*</tool_call>)?", re.DOTALL)  # with an example of a call
NAME = re.compile(r"\s*([^\s()=,\[\]'\"][^()=,\[\]'\"]*)\(")


def from_text(messages: list[Message], tools: tuple[Tool, ...]) -> tuple[list[Message], tuple[Tool, ...]]:
    """Returns a chat with calls under `tool_calls`, and the tools once; a chat without tools is unchanged.

    The text of a call that cannot be read is unchanged, and so is the system text if its tools cannot be read.
    """
    system = messages[0]["content"] if messages and messages[0]["role"] == "system" else ""
    listed = TOOLS.search(system)
    if not (tools or listed or any(message["role"] == "tool" for message in messages)):
        return messages, tools
    if listed and (tools := tools or _listed(listed[1])):
        rest = (system[: listed.start()] + system[listed.end() :]).strip()
        messages = [messages[0] | {"content": rest}, *messages[1:]] if rest else messages[1:]
    found: list[Message] = []
    for message in messages:
        if message["role"] == "tool":
            results = RESULT.findall(message["content"])
            found += [message | {"content": result} for result in results] or [message]
        elif message["role"] == "assistant" and "tool_calls" not in message:
            found.append(message | _calls(message["content"]))
        else:
            found.append(message)
    return found, tools


def _listed(text: str) -> tuple[Tool, ...]:
    """Returns the tools in Hermes' tags: a list, or one JSON object per line."""
    try:
        return read_tools(parsed(text) if text.startswith("[") else text.splitlines())
    except (ValueError, AttributeError):
        return ()


def _calls(text: str) -> dict[str, Any]:
    """Returns the content and the calls of an answer that holds calls as text; else nothing."""
    try:
        if tagged := CALL.findall(text):
            return {"content": CALL.sub("", text).strip(), "tool_calls": [read_call(call) for call in tagged]}
        if text.lstrip().startswith("[") and text.rstrip().endswith(")]"):
            return {"content": "", "tool_calls": _python_calls(text.strip()[1:-1])}
    except (ValueError, TypeError, AttributeError, SyntaxError, RecursionError, MemoryError):
        pass  # it only looks like calls, so it stays text
    return {}


def _python_calls(text: str) -> list[dict[str, Any]]:
    """Returns calls written as `f(x=1), other name(y="a")`. Raises ValueError or SyntaxError."""
    calls = []
    while text:
        name = NAME.match(text)
        if name is None:
            raise ValueError("no call")
        ends = [place for place, letter in enumerate(text) if letter == ")" and place >= name.end()]
        values, end = _arguments(text, name.end(), ends)
        calls.append(read_call({"name": name[1].strip(), "arguments": values}))
        text = text[end + 1 :].lstrip().removeprefix(",").lstrip()
    return calls


def _arguments(text: str, start: int, ends: Sequence[int]) -> tuple[dict[str, Any], int]:
    """Returns the keyword arguments that begin at `start`, and the place of the parenthesis that ends them."""
    for end in ends[:100]:  # a parenthesis may be part of a text
        try:
            call = ast.parse(f"f({text[start:end]})", mode="eval").body
        except SyntaxError:
            continue
        if isinstance(call, ast.Call) and not call.args:
            return {word.arg or "": ast.literal_eval(word.value) for word in call.keywords}, end
    raise ValueError("no call")
