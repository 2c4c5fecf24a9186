"""How models write tool calls. A form is named as vLLM's `--tool-call-parser` names it."""

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
Tools = Mapping[str, Mapping[str, Any]]  # the schema of its parameters by a tool's name


class Calls(Protocol):
    """Where a form reports what it reads."""

    def begin(self, name: str, id: str | None = None) -> None:
        """The text is a call; what was read of it will not become content any more."""

    def arguments(self, text: str) -> None:
        """A piece of its arguments' JSON."""

    @property
    def begun(self) -> int:
        """How many calls were begun."""


@dataclass(frozen=True, slots=True)
class Form:
    """One way to write tool calls.

    Attributes:
        starts: what a call begins with.
        read: reads the call, or the calls, behind the start that it is given. Raises MalformedError.
        special: all markers, which a tokenizer may have as special tokens.
        new_id: makes ids that the models' templates take.
        line_start: starts that count at the start of a line only.
    """

    starts: tuple[str, ...]
    read: Callable[[str, Text, Calls, Tools], Reading[None]]
    special: tuple[str, ...] = ()
    new_id: Callable[[], str] = lambda: f"call_{secrets.token_hex(12)}"
    line_start: tuple[str, ...] = ()


# ---- {"name": ..., "arguments": {...}} -----------------------------------------------------------------------


def _envelope(text: Text, calls: Calls, known: Tools | None = None) -> Reading[None]:
    """Read an object that names the tool and has its arguments under either of `ARGUMENTS`, in any order.

    Args:
        known: the object is a call only if it names one of these, and has nothing else in it.
    """
    text.mark()
    if not (yield from text.one_of("{")):
        raise MalformedError
    name: str | None = None
    before: str | None = None  # arguments that came before the name, or are no plain object
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
    """The JSON of arguments that are an object, the text of one, or null. Raises MalformedError for others."""
    if value.startswith("{"):
        return value
    try:
        read = json.loads(value)
        if read is None:
            return "{}"
        if isinstance(read, str) and isinstance(json.loads(read), dict):
            return read.encode().decode()  # half a surrogate pair is no text
    except (ValueError, RecursionError):
        pass
    raise MalformedError


def _ignore(text: str) -> None:
    pass


# ---- the forms -----------------------------------------------------------------------------------------------


def _hermes(start: str, text: Text, calls: Calls, tools: Tools) -> Reading[None]:
    """`<tool_call>{...}</tool_call>`, with several objects between the tags if need be."""
    yield from text.space()
    yield from _envelope(text, calls)
    while True:
        yield from text.space()
        end = yield from text.one_of(TOOL_CALL_END, "}")  # or a brace too many
        if end == TOOL_CALL_END:
            return
        if not end and (yield from text.peek()) != "{":
            return
        if not end:
            yield from _envelope(text, calls)


def _llama3_json(start: str, text: Text, calls: Calls, tools: Tools) -> Reading[None]:
    """`{"name": ..., "parameters": {...}}`, behind `<|python_tag|>` or on a line of its own; `;` separates several."""
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
    """`[TOOL_CALLS]`, then a list of objects, or `name[ARGS]{...}`, with `[CALL_ID]...` before or without `[ARGS]`."""
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
    """`<tool_call><function=name><parameter=key>value</parameter>...</function></tool_call>`."""
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
    """Read what follows `<function=`, up to its end; the values become JSON by the tool's schema."""
    name = yield from _attribute(text)
    schema, separator, begun = tools.get(name, {}), "{", calls.begun
    while True:
        yield from text.space()
        marker = yield from text.one_of(PARAMETER, FUNCTION_END, TOOL_CALL_END)
        if not marker and not (yield from text.peek()):
            raise MalformedError  # the end: it may have been cut, so the object stays open
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
    """A name up to `>`."""
    pieces: list[str] = []
    end = yield from text.through((">", "<", "\n"), pieces.append)
    name = "".join(pieces).strip()
    if end != ">" or not name:
        text.unread(len(end))
        raise MalformedError
    return name


def _parameter(text: Text, emit: Emit, schema: Any, root: Any) -> Reading[None]:
    """Pass on the value of a parameter as JSON: texts as they come, the rest when complete."""
    if (yield from text.peek()) == "\n":  # one line break before and one behind are of the form
        yield from text.one_of("\n")
    # models forget an end tag, but then the next tag stands on a line of its own
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
        # its templates refuse others
        new_id=lambda: "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9)),
    ),
}
OTHER_NAMES = {"qwen3_xml": "qwen3_coder", "qwen3_json": "hermes", "llama4_json": "llama3_json"}  # vLLM has them too
