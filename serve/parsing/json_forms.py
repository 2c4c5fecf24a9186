"""Forms of tool calls with arguments in JSON."""

import json
import re

from .calls import NAME, Calls, Tools, named, skip
from .reading import MalformedError, Reading
from .values import QUOTES, Text, repaired

TOOL_CALL, TOOL_CALL_END = "<tool_call>", "</tool_call>"
TOOL_CALLS, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
PYTHON_TAG = "<|python_tag|>"
CALLS_BEGIN, CALLS_END = "<\uff5ctool\u2581calls\u2581begin\uff5c>", "<\uff5ctool\u2581calls\u2581end\uff5c>"
CALL_BEGIN, CALL_END = "<\uff5ctool\u2581call\u2581begin\uff5c>", "<\uff5ctool\u2581call\u2581end\uff5c>"
CALL_SEP = "<\uff5ctool\u2581sep\uff5c>"
FENCE = "```"
ARGUMENTS = ("arguments", "parameters")
SEPARATORS = re.compile(r"[,\s]*")
SURPLUS = re.compile(r"[]},;\s]*")  # separators, and brackets that are too many
BRACKETS, FENCES = re.compile(r"[]}]*"), re.compile(r"[]}`\s]*")


def hermes(start: str, text: Text, calls: Calls, tools: Tools) -> Reading[None]:
    """Reads `<tool_call>{...}</tool_call>` with one or more objects."""
    yield from text.space()
    while True:
        yield from _envelope(text, calls)
        yield from text.run(SURPLUS)
        if (yield from text.peek()) != "{":
            break
    yield from skip(text, (TOOL_CALL_END,), TOOL_CALL)


def llama3_json(start: str, text: Text, calls: Calls, tools: Tools) -> Reading[None]:
    """Reads `{"name": ..., "parameters": {...}}` after `<|python_tag|>` or on its own line; `;` separates calls."""
    if start == PYTHON_TAG:
        yield from text.space()
        yield from _envelope(text, calls)
    else:
        text.unread(len(start))
        yield from _envelope(text, calls, tools)
    yield from text.run(SURPLUS)


def mistral(start: str, text: Text, calls: Calls, tools: Tools) -> Reading[None]:
    """Reads a list of objects, or `name[CALL_ID]...[ARGS]{...}` with either marker optional, after `[TOOL_CALLS]`."""
    yield from text.space()
    if (yield from text.peek()) in ("{", "["):
        yield from text.one_of("[")
        yield from text.space()
        while True:
            yield from _envelope(text, calls)
            yield from text.run(SEPARATORS)
            if (yield from text.peek()) != "{":
                break
    else:
        name = yield from text.run(NAME)
        id = None
        if (yield from text.one_of(CALL_ID)):
            id = yield from text.run(NAME)
        yield from text.space()
        if (yield from text.one_of(ARGS)):
            yield from text.space()
        if (yield from text.peek()) != "{":
            raise MalformedError
        calls.begin(named(name), id)
        yield from text.value(calls.arguments)
    yield from text.run(BRACKETS)


def deepseek(start: str, text: Text, calls: Calls, tools: Tools) -> Reading[None]:
    """Reads `name<sep>{...}`, or `function<sep>name` and a code block with the object, each between call markers."""
    if start == CALLS_BEGIN:
        yield from text.space()
        if not (yield from text.one_of(CALL_BEGIN)):
            raise MalformedError
    while True:
        name = yield from text.run(NAME)
        if not (yield from text.one_of(CALL_SEP)):
            raise MalformedError
        yield from text.space()
        if (yield from text.peek()) != "{":
            name = yield from text.run(NAME)
            yield from text.space()
            if (yield from text.one_of(FENCE)):
                yield from text.run(NAME)
                yield from text.space()
        if (yield from text.peek()) != "{":
            raise MalformedError
        calls.begin(named(name))
        yield from text.value(calls.arguments)
        yield from text.run(FENCES)
        if (yield from skip(text, (CALL_END,), CALL_BEGIN, CALLS_END)):
            yield from text.space()
        if (yield from text.one_of(CALLS_END)) or start != CALLS_BEGIN or not (yield from text.one_of(CALL_BEGIN)):
            return
        text.mark(len(CALL_BEGIN))


# ---- {"name": ..., "arguments": {...}} -----------------------------------------------------------------------


def _envelope(text: Text, calls: Calls, known: Tools | None = None) -> Reading[None]:
    """Reads an object that has the name of the tool and, under a key in `ARGUMENTS`, its arguments, in any order.

    Args:
        known: the object is a call only if it names one of these tools and has no other keys.
    """
    text.mark()
    if not (yield from text.one_of("{")):
        raise MalformedError
    name: str | None = None
    arguments: str | None = None  # before the name, or not written as an object
    while name is None or arguments is None:
        yield from text.space()
        key = json.loads((yield from text.string()))
        if known is not None and key not in ("name", "type", *ARGUMENTS):
            raise MalformedError
        yield from text.space()
        if not (yield from text.one_of(":")):
            raise MalformedError
        yield from text.space()
        if key == "name" and name is None:
            name = named(json.loads((yield from text.string())))
            if known is not None and name not in known:
                raise MalformedError
        elif key in ARGUMENTS and arguments is None and name is not None and (yield from text.peek()) == "{":
            calls.begin(name)
            yield from text.value(calls.arguments)
            break
        else:
            pieces: list[str] = []
            yield from text.value(pieces.append)
            if key in ARGUMENTS and arguments is None:
                arguments = _object("".join(pieces))
        yield from text.space()
        more = yield from text.one_of(",")
        yield from text.space()
        if not more or (yield from text.peek()) == "}":
            if name is None or (arguments is None and known is not None) or not (yield from text.one_of("}")):
                raise MalformedError
            text.unread(1)
            arguments = arguments or "{}"
    else:
        calls.begin(name)
        calls.arguments(arguments)
    yield from text.run(SEPARATORS)
    if (yield from text.peek()) in QUOTES:
        yield from text.value(lambda piece: None, inside="}")
    else:
        yield from text.one_of("}")


def _object(value: str) -> str:
    """Returns the JSON of arguments that are an object, a string with one, or null. Raises MalformedError otherwise."""
    if value.startswith("{"):
        return value
    try:
        read = json.loads(value)
        if read in (None, ""):
            return "{}"
        if isinstance(read, str):
            found = read if _is_json(read) else repaired(read) or ""
            if found.startswith("{"):
                return found.encode().decode()  # raises for a lone surrogate
    except (ValueError, RecursionError):
        pass
    raise MalformedError


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
