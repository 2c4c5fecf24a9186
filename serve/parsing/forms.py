"""The forms in which models write tool calls, with the names of vLLM's `--tool-call-parser`."""

import json
import secrets
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from .reading import NAME, Emit, MalformedError, Reading, Text
from .schema import as_json, is_text

TOOL_CALL, TOOL_CALL_END = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
TOOL_CALLS, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
PYTHON_TAG = "<|python_tag|>"
ARGUMENTS = ("arguments", "parameters")
Tools = Mapping[str, Mapping[str, Any]]  # name of a tool -> schema of its parameters


class Calls(Protocol):
    """Receives the calls that a form reads."""

    def begin(self, name: str, id: str | None = None) -> None:
        """Begins a call; the text that was read for it is no longer content."""

    def arguments(self, text: str) -> None:
        """Adds to the JSON of the call's arguments."""

    @property
    def begun(self) -> int:
        """Number of calls begun."""


@dataclass(frozen=True, slots=True)
class Form:
    """A form of tool calls.

    Attributes:
        starts: texts that begin a call.
        read: reads the call or calls after the given start. Raises MalformedError.
        special: all markers, which may be special tokens.
        new_id: makes ids that the models' templates accept.
        line_start: those of `starts` that count only at the start of a line.
    """

    starts: tuple[str, ...]
    read: Callable[[str, Text, Calls, Tools], Reading[None]]
    special: tuple[str, ...] = ()
    new_id: Callable[[], str] = lambda: f"call_{secrets.token_hex(12)}"
    line_start: tuple[str, ...] = ()


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
    before: str | None = None  # arguments before the name, or not written as an object
    done = False
    yield from text.space()
    while True:
        key = json.loads((yield from text.string()))
        if known is not None and key not in ("name", "type", *ARGUMENTS):
            raise MalformedError
        yield from text.space()
        if not (yield from text.one_of(":")):
            raise MalformedError
        yield from text.space()
        if key == "name" and name is None:
            name = json.loads((yield from text.string()))
            if not name.isprintable() or not name or (known is not None and name not in known):
                raise MalformedError
        elif key in ARGUMENTS and not done and before is None:
            if name is not None and (yield from text.peek()) == "{":
                calls.begin(name)
                yield from text.value(calls.arguments)
                done = True
                text.mark()
            else:
                pieces: list[str] = []
                yield from text.value(pieces.append)
                before = _object("".join(pieces))
        else:
            yield from text.value(_ignore)
        if name is not None and before is not None and not done:
            calls.begin(name)
            calls.arguments(before)
            done = True
            text.mark()
        yield from text.space()
        if not (yield from text.one_of(",")):
            break
        yield from text.space()
    if done:  # models forget the last brace
        yield from text.one_of("}")
        text.unmark()
    elif name is None or known is not None or not (yield from text.one_of("}")):
        raise MalformedError
    else:
        calls.begin(name)
        calls.arguments("{}")


def _object(value: str) -> str:
    """Returns the JSON of arguments that are an object, a string with one, or null. Raises MalformedError otherwise."""
    if value.startswith("{"):
        return value
    try:
        read = json.loads(value)
        if read is None:
            return "{}"
        if isinstance(read, str) and isinstance(json.loads(read), dict):
            return read.encode().decode()  # raises for a lone surrogate
    except (ValueError, RecursionError):
        pass
    raise MalformedError


def _ignore(text: str) -> None:
    pass


# ---- the forms -----------------------------------------------------------------------------------------------


def _hermes(start: str, text: Text, calls: Calls, tools: Tools) -> Reading[None]:
    """Reads `<tool_call>{...}</tool_call>` with one or more objects."""
    yield from text.space()
    yield from _envelope(text, calls)
    while True:
        yield from text.space()
        end = yield from text.one_of(TOOL_CALL_END, "}")  # or an extra brace
        if end == TOOL_CALL_END:
            return
        if not end and (yield from text.peek()) != "{":
            return
        if not end:
            yield from _envelope(text, calls)


def _llama3_json(start: str, text: Text, calls: Calls, tools: Tools) -> Reading[None]:
    """Reads `{"name": ..., "parameters": {...}}` after `<|python_tag|>` or on its own line; `;` separates calls."""
    if start == PYTHON_TAG:
        yield from text.space()
        yield from _envelope(text, calls)
    else:
        text.unread(len(start))
        yield from _envelope(text, calls, tools)
    yield from text.space()
    if (yield from text.one_of(";", ",")):
        yield from text.space()


def _mistral(start: str, text: Text, calls: Calls, tools: Tools) -> Reading[None]:
    """Reads a list of objects, or `name[CALL_ID]...[ARGS]{...}` with either marker optional, after `[TOOL_CALLS]`."""
    yield from text.space()
    first = yield from text.peek()
    if first == "{":
        yield from _envelope(text, calls)
    elif (yield from text.one_of("[")):
        while True:
            yield from text.space()
            yield from _envelope(text, calls)
            yield from text.space()
            if not (yield from text.one_of(",")):
                break
        yield from text.one_of("]")
    else:
        name = yield from text.run(NAME)
        id = None
        if (yield from text.one_of(CALL_ID)):
            id = yield from text.run(NAME)
        yield from text.space()
        if (yield from text.one_of(ARGS)):
            yield from text.space()
        if not name or (yield from text.peek()) != "{":
            raise MalformedError
        calls.begin(name, id)
        yield from text.value(calls.arguments)


def _qwen3_coder(start: str, text: Text, calls: Calls, tools: Tools) -> Reading[None]:
    """Reads `<tool_call><function=name><parameter=key>value</parameter>...</function></tool_call>`."""
    if start == TOOL_CALL:
        yield from text.space()
        if not (yield from text.one_of(FUNCTION)):
            raise MalformedError
    while True:
        yield from _function(text, calls, tools)
        yield from text.space()
        if (yield from text.one_of(TOOL_CALL_END, FUNCTION)) != FUNCTION:
            return


def _function(text: Text, calls: Calls, tools: Tools) -> Reading[None]:
    """Reads a function after `<function=`; converts the values to JSON by the tool's schema."""
    name = yield from _attribute(text)
    schema, separator, begun = tools.get(name, {}), "{", calls.begun
    while True:
        yield from text.space()
        marker = yield from text.one_of(PARAMETER, FUNCTION_END, TOOL_CALL_END)
        if not marker and not (yield from text.peek()):
            raise MalformedError  # end of the text: the call may be cut, so the object stays open
        if calls.begun == begun:
            if not marker:
                raise MalformedError
            calls.begin(name)
        if marker != PARAMETER:
            calls.arguments("{}" if separator == "{" else "}")
            if not marker:
                raise MalformedError
            if marker == TOOL_CALL_END:
                text.unread(len(marker))
            return
        text.mark(len(marker))
        key = yield from _attribute(text)
        text.unmark()
        calls.arguments(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
        separator = ", "
        properties = schema.get("properties")
        of_key = properties.get(key) if isinstance(properties, Mapping) else None
        yield from _parameter(text, calls.arguments, of_key, schema)


def _attribute(text: Text) -> Reading[str]:
    """Reads a name up to `>`."""
    pieces: list[str] = []
    end = yield from text.through((">", "<", "\n"), pieces.append)
    name = "".join(pieces).strip()
    if end != ">" or not name:
        text.unread(len(end))
        raise MalformedError
    return name


def _parameter(text: Text, emit: Emit, schema: Any, root: Any) -> Reading[None]:
    """Emits the value of a parameter as JSON: strings as they arrive, other values when complete."""
    if (yield from text.peek()) == "\n":  # the form has one line break before and one after the value
        yield from text.one_of("\n")
    # if a model forgets an end tag, the next tag is on its own line
    markers = (f"\n{PARAMETER_END}", PARAMETER_END, f"\n{PARAMETER}", f"\n{FUNCTION_END}")
    pieces: list[str] = []
    if is_text(schema, root):
        emit('"')
        end = yield from text.through(markers, lambda piece: emit(json.dumps(piece, ensure_ascii=False)[1:-1]))
        if end:
            emit('"')
    else:
        end = yield from text.through(markers, pieces.append)
        emit(as_json("".join(pieces), schema, root) if end else "".join(pieces))
    if not end:
        raise MalformedError
    if not end.endswith(PARAMETER_END):
        text.unread(len(end) - 1)


FORMS = {
    "hermes": Form((TOOL_CALL,), _hermes, (TOOL_CALL, TOOL_CALL_END)),
    "qwen3_coder": Form((TOOL_CALL, FUNCTION), _qwen3_coder, (TOOL_CALL, TOOL_CALL_END)),
    "llama3_json": Form((PYTHON_TAG, "{"), _llama3_json, (PYTHON_TAG,), line_start=("{",)),
    "mistral": Form(
        (TOOL_CALLS,),
        _mistral,
        (TOOL_CALLS, CALL_ID, ARGS),
        # Mistral's templates refuse other ids
        new_id=lambda: "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9)),
    ),
}
OTHER_NAMES = {"qwen3_xml": "qwen3_coder", "qwen3_json": "hermes", "llama4_json": "llama3_json"}  # vLLM's aliases
