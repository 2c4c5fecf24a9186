"""Forms of tool calls that write each parameter between tags; values get the types of the tool's JSON schema."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .calls import NAME, Calls, Tools, named, skip
from .json_forms import TOOL_CALL, TOOL_CALL_END
from .reading import MalformedError, Reading
from .schema import as_json, is_text
from .values import Text, repaired

FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
ARG_KEY, ARG_KEY_END, ARG_VALUE, ARG_VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
DSML = "\uff5cDSML\uff5c"
DSML_CALLS = (f"<{DSML}function_calls>", f"<{DSML}tool_calls>")  # DeepSeek V3.2 and V4
DSML_CALLS_END = (f"</{DSML}function_calls>", f"</{DSML}tool_calls>")
INVOKE, INVOKE_END = f"<{DSML}invoke", f"</{DSML}invoke>"
DSML_PARAMETER, DSML_PARAMETER_END = f"<{DSML}parameter", f"</{DSML}parameter>"
IS_NAME = re.compile(r'\s*name="([^"]+)"(?:\s+string="(true|false)")?\s*')


@dataclass(frozen=True, slots=True)
class Markup:
    """The tags of a form.

    Attributes:
        parameter: begins a parameter.
        key: reads the key up to the value, and whether the value is text if the tags say so.
        value_ends: the tag after a value, with what belongs to it; other tags that end a value, if it is missing.
        ends: the tag after a function; the tag after all functions.
        stops: tags that begin another call.
        lines: a value has a line break before it.
    """

    parameter: str
    key: Callable[[Text], Reading[tuple[str, bool | None]]]
    value_ends: tuple[str, ...]
    ends: tuple[str, ...]
    stops: tuple[str, ...]
    lines: bool = False


def qwen3_coder(start: str, text: Text, calls: Calls, tools: Tools) -> Reading[None]:
    """Reads `<tool_call><function=name><parameter=key>value</parameter>...</function></tool_call>`."""
    if start == TOOL_CALL:
        yield from text.space()
        if not (yield from text.one_of(FUNCTION)):
            raise MalformedError
    while True:
        name, _ = yield from _attribute(text)
        yield from _parameters(text, calls, name, tools, QWEN3_CODER)
        yield from text.space()
        if start == TOOL_CALL:
            after = yield from skip(text, (TOOL_CALL_END, FUNCTION), TOOL_CALL)
        else:
            after = yield from text.one_of(TOOL_CALL_END, FUNCTION)
        if after != FUNCTION:
            return


def glm45(start: str, text: Text, calls: Calls, tools: Tools) -> Reading[None]:
    """Reads `<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value>...</tool_call>`."""
    yield from text.space()
    name = named((yield from text.run(NAME)))
    yield from _parameters(text, calls, name, tools, GLM45)


def deepseek_v32(start: str, text: Text, calls: Calls, tools: Tools) -> Reading[None]:
    """Reads functions with DeepSeek's DSML tags, which also say whether a value is a string."""
    if start != INVOKE:
        yield from text.space()
        if not (yield from text.one_of(INVOKE)):
            raise MalformedError
    while True:
        name, _ = yield from _attributes(text)
        yield from _parameters(text, calls, name, tools, DEEPSEEK_V32)
        yield from text.space()
        if start == INVOKE:
            after = yield from text.one_of(INVOKE)
        else:
            after = yield from skip(text, (*DSML_CALLS_END, INVOKE), *DSML_CALLS)
        if after != INVOKE:
            return


def _parameters(text: Text, calls: Calls, name: str, tools: Tools, markup: Markup) -> Reading[None]:
    """Reads the parameters of a call and the tag after them; converts the values to JSON."""
    schema, separator, begun = tools.get(name, {}), "{", calls.begun
    markers = (markup.parameter, *markup.ends)
    while True:
        yield from text.space()
        if calls.begun > begun:
            marker = yield from skip(text, markers, *markup.stops)
        elif not (marker := (yield from text.one_of(*markers))):
            raise MalformedError
        if marker == markup.parameter:
            try:
                key, is_string = yield from markup.key(text)
            except MalformedError:
                if calls.begun == begun:
                    raise
                continue  # drop it
            if calls.begun == begun:
                calls.begin(name)
            calls.arguments(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
            separator = ", "
            properties = schema.get("properties")
            of_key = properties.get(key) if isinstance(properties, Mapping) else None
            yield from _value(text, calls, markup, of_key, schema, is_string)
            continue
        if not marker and text.at_end and text.cut:
            raise MalformedError
        if calls.begun == begun:
            calls.begin(name)
        calls.arguments("{}" if separator == "{" else "}")
        if marker in markup.ends[1:]:
            text.unread(len(marker))
        return


def _value(text: Text, calls: Calls, markup: Markup, schema: Any, root: Any, is_string: bool | None) -> Reading[None]:
    """Emits the value of a parameter as JSON: strings as they arrive, other values when complete."""
    if markup.lines and (yield from text.peek()) == "\n":
        yield from text.one_of("\n")
    pieces: list[str] = []
    if is_text(schema, root) if is_string is None else is_string:
        calls.arguments('"')
        end = yield from text.through(
            markup.value_ends, lambda piece: calls.arguments(json.dumps(piece, ensure_ascii=False)[1:-1]), whole=True
        )
        value = '"'
    else:
        end = yield from text.through(markup.value_ends, pieces.append, whole=True)
        read = "".join(pieces)
        value = (is_string is False and repaired(read)) or as_json(read, schema, root)
    if not end and text.cut:
        raise MalformedError
    calls.arguments(value)
    if markup.value_ends[0].strip() not in end:
        text.unread(len(end.lstrip("\n")))


def _attribute(text: Text) -> Reading[tuple[str, None]]:
    """Reads a name up to `>`."""
    pieces: list[str] = []
    end = yield from text.through((">", "<", "\n"), pieces.append)
    name = "".join(pieces).strip()
    if end != ">" or not name:
        text.unread(len(end))
        raise MalformedError
    return name, None


def _attributes(text: Text) -> Reading[tuple[str, bool | None]]:
    """Reads `name="..." string="true">`."""
    written, _ = yield from _attribute(text)
    found = IS_NAME.fullmatch(written)
    if found is None:
        raise MalformedError
    return found[1], found[2] == "true" if found[2] else None


def _arg_key(text: Text) -> Reading[tuple[str, None]]:
    """Reads a key and the tags up to its value."""
    pieces: list[str] = []
    end = yield from text.through(("<", "\n"), pieces.append)
    text.unread(len(end))
    key = "".join(pieces).strip()
    if not key or not (yield from text.one_of(ARG_KEY_END)):
        raise MalformedError
    yield from text.space()
    if not (yield from text.one_of(ARG_VALUE)):
        raise MalformedError
    return key, None


# if a model forgets an end tag, the next tag is on its own line
QWEN3_CODER = Markup(
    PARAMETER,
    _attribute,
    (PARAMETER_END, f"\n{PARAMETER_END}", f"\n{PARAMETER}", f"\n{FUNCTION_END}"),
    (FUNCTION_END, TOOL_CALL_END),
    (TOOL_CALL, FUNCTION),
    lines=True,
)
GLM45 = Markup(ARG_KEY, _arg_key, (ARG_VALUE_END, f"\n{ARG_KEY}"), (TOOL_CALL_END,), (TOOL_CALL,))
DEEPSEEK_V32 = Markup(
    DSML_PARAMETER,
    _attributes,
    (DSML_PARAMETER_END, f"\n{DSML_PARAMETER}", f"\n{INVOKE_END}"),
    (INVOKE_END, *DSML_CALLS_END),
    (INVOKE, *DSML_CALLS),
)
