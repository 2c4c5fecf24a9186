"""Writes tools, calls and results as text, for chat templates that do not show them."""

import itertools
import json
from collections.abc import Sequence

from dflash_toolkit.data.messages import Message, Tool

from .parsing.forced import written_call

TOOLS = """You can call functions. Each line is a function with the JSON schema of its parameters:
{tools}

To call a function, write:
{call}"""


def tools_as_text(messages: Sequence[Message], tools: Sequence[Tool], form: str) -> list[Message]:
    """Returns the messages with the tools listed in the first one.

    Args:
        form: the form of calls, a name of `FORMS`.
    """
    listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    text = TOOLS.format(tools=listed, call=written_call(form, "NAME", {"PARAMETER": "VALUE"}))
    first, *others = messages
    if first["role"] not in ("system", "user"):
        return [{"role": "system", "content": text}, *messages]
    # not every template takes a system message
    parts = (first["content"], text) if first["role"] == "system" else (text, first["content"])
    return [first | {"content": "\n\n".join(filter(None, parts))}, *others]


def calls_as_text(messages: Sequence[Message], form: str) -> list[Message]:
    """Returns messages with calls in the assistant's text, and results as messages of the user."""
    found: list[Message] = []
    for is_result, group in itertools.groupby(messages, lambda message: message["role"] == "tool"):
        if is_result:
            texts = [f"<tool_response>\n{message['content']}\n</tool_response>" for message in group]
            found.append({"role": "user", "content": "\n".join(texts)})
            continue
        for message in group:
            functions = [call["function"] for call in message.get("tool_calls", ())]
            calls = [written_call(form, function["name"], function["arguments"]) for function in functions]
            others = {key: value for key, value in message.items() if key != "tool_calls"}
            found.append(others | {"content": "\n".join(filter(None, (message["content"], *calls)))})
    return found
