"""Texts with tool calls, and what the parser makes of them."""

import re
from typing import Any

from dflash_toolkit.serve.parsing import Message, OutputParser, joined

PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "exact": {"type": "boolean"},
        "ratio": {"type": "number"},
        "maybe": {"type": ["string", "null"]},
        "places": {"type": "array", "items": {"type": "string"}},
        "unit": {"enum": ["C", "F"]},
        "more": {"$ref": "#/$defs/more"},
    },
    "$defs": {"more": {"anyOf": [{"type": "object"}, {"$ref": "#/$defs/more"}]}},
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "now"}},
]
HERMES = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln", "more": {"a": ["}", {}]}}}\n</tool_call>'
CODER = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nKöln\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
    "</function>\n</tool_call>"
)
LLAMA = '{"name": "weather", "parameters": {"city": "Köln", "days": 3}}'
LIST = '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Köln"}}, {"name": "now", "arguments": {}}]'
NAMED = '[TOOL_CALLS]weather[ARGS]{"city": "Köln"}[TOOL_CALLS]now[CALL_ID]abcdefghi[ARGS]{}'


def parse(form: str | None, *pieces: str, **options: Any) -> Message:
    """Parses a text that arrives in pieces."""
    parser = OutputParser(form=form, tools=TOOLS, **options)
    return joined([delta for piece in pieces for delta in parser.feed(piece)] + parser.finish())


def plain(message: Message) -> tuple[str, str, list[tuple[str, str]]]:
    """Returns a message without its random ids."""
    return message.content, message.reasoning, [(call.name, call.arguments) for call in message.calls]


def wide(text: str) -> str:
    """Returns a text with DeepSeek's markers, which have full-width bars and blocks instead of spaces."""
    return re.sub(r"\|(\w+)\|", lambda mark: f"\uff5c{mark[1].replace('_', chr(0x2581))}\uff5c", text)
