"""The form of tool calls that is a list of Python calls."""

import ast
import json
import warnings
from typing import Any

from .calls import NAME, Calls, Tools
from .json_forms import PYTHON_TAG, llama3_json
from .reading import MalformedError, Reading
from .values import Text

PYTHON_START, PYTHON_END = "<|python_start|>", "<|python_end|>"
MARKERS = (PYTHON_START, PYTHON_END, PYTHON_TAG)
CONSTANTS = {"true": True, "false": False, "null": None}
CLOSING = {"(": ")", "[": "]", "{": "}"}


def pythonic(start: str, text: Text, calls: Calls, tools: Tools) -> Reading[None]:
    """Reads `[name(key=value), ...]` after a marker or on its own line: all of its calls, or none.

    Llama 4 also writes calls as Llama 3 does, because its template asks for them.
    """
    if start in MARKERS:
        yield from text.space()
        if (yield from text.peek()) == "{":
            yield from llama3_json(PYTHON_TAG, text, calls, tools)
            return
        if not (yield from text.one_of("[")):
            raise MalformedError
    elif start == "{":
        yield from llama3_json(start, text, calls, tools)
        return
    yield from text.space()
    name = yield from text.run(NAME)
    if not (yield from text.one_of("(")) or not name or (start not in MARKERS and name not in tools):
        raise MalformedError
    written = f"[{name}(" + (yield from _through_brackets(text, "])"))
    found = _calls_of(written)
    if start not in MARKERS and any(function not in tools for function, _ in found):
        raise MalformedError
    for function, arguments in found:
        calls.begin(function)
        calls.arguments(arguments)
    yield from text.space()
    yield from text.one_of(PYTHON_END)


def _through_brackets(text: Text, open_: str) -> Reading[str]:
    """Reads through the closing brackets `open_`, the last one first; returns the text with line breaks escaped."""
    expected, quote, pieces = list(open_), "", list[str]()
    while expected:
        character = yield from text.peek()
        if not character:
            raise MalformedError
        character = yield from text.ahead(2 if quote and character == "\\" else 1)
        yield from text.one_of(character)
        if quote:
            quote = "" if character == quote else quote
            character = "\\n" if character == "\n" else character
        elif character in ("'", '"'):
            quote = character
        elif character in CLOSING:
            expected.append(CLOSING[character])
        elif character in ")]}" and expected.pop() != character:
            raise MalformedError
        pieces.append(character)
    return "".join(pieces)


def _calls_of(written: str) -> list[tuple[str, str]]:
    """Returns the names and the JSON of the arguments of a list of calls. Raises MalformedError."""
    try:
        with warnings.catch_warnings(action="ignore"):  # unknown escapes in strings
            parsed = ast.parse(written, mode="eval").body
        if isinstance(parsed, ast.List):
            return [_call_of(node) for node in parsed.elts]
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise MalformedError from error
    raise MalformedError


def _call_of(node: ast.expr) -> tuple[str, str]:
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError
    arguments = {keyword.arg: _value_of(keyword.value) for keyword in node.keywords}
    if None in arguments:
        raise ValueError
    written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    return ast.unparse(node.func), written.encode().decode()  # raises for a lone surrogate


def _value_of(node: ast.expr) -> Any:
    match node:
        case ast.Name(id=name) if name in CONSTANTS:
            return CONSTANTS[name]
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            return [_value_of(element) for element in elements]
        case ast.Dict(keys=keys, values=values):
            found = {_value_of(key): _value_of(value) for key, value in zip(keys, values, strict=True) if key}
            if len(found) < len(keys) or not all(isinstance(key, str) for key in found):
                raise ValueError
            return found
        case _:
            value = ast.literal_eval(node)
            if not isinstance(value, str | int | float | None):
                raise ValueError
            return value
