"""Tool calls that must come, and arguments that must follow their schema, as a grammar of the whole answer."""

import json
from collections.abc import Sequence
from typing import Any

from dflash_toolkit.sampling import Grammar

from .forms import TOOL_CALL, TOOL_CALL_END, TOOL_CALLS
from .output import THINK, THINK_END, Start

ANY: dict[str, Any] = {"type": "object"}  # the schema of a tool that has none
# of each form: what stands before the name, between it and the arguments, and behind them; between two calls; what
# shows that a call begins
WRITTEN = {
    "hermes": (f'{TOOL_CALL}\n{{"name": "', '", "arguments": ', f"}}\n{TOOL_CALL_END}", "\n", TOOL_CALL),
    "qwen3_coder": (f"{TOOL_CALL}\n<function=", ">\n", f"\n</function>\n{TOOL_CALL_END}", "\n", TOOL_CALL),
    "llama3_json": ('{"name": "', '", "parameters": ', "}", "; ", '{"name": "'),
    "mistral": ('{"name": "', '", "arguments": ', "}", ", ", TOOL_CALLS),
}


def structural_tag(
    form: str,
    tools: Sequence[Any],
    *,
    required: bool = False,
    named: str | None = None,
    parallel: bool = True,
    start: Start = "content",
) -> dict[str, Any] | None:
    """The grammar, as `structural_tag` is written for xgrammar; None: the answer is free.

    Args:
        form: a name of `FORMS`.
        tools: OpenAI's `tools`.
        required: there is a call at least; otherwise calls are bound only where a tool is `strict`.
        named: the one function that is called, once.
        parallel: whether several may be called.
        start: what the answer starts with, as for `OutputParser`.
    """
    functions = [tool["function"] for tool in tools]
    if named is not None:
        functions = [function for function in functions if function["name"] == named]
    elif not required and not any(function.get("strict") for function in functions):
        return None
    before, between, behind, separator, trigger = WRITTEN[form]
    tags = [
        {
            "type": "tag",
            "begin": f"{before}{function['name']}{between}",
            "content": {
                "type": "json_schema",
                "json_schema": function.get("parameters") or ANY,
                "style": "qwen_xml" if form == "qwen3_coder" else "json",
            },
            "end": behind,
        }
        for function in functions
    ]
    calls: dict[str, Any] = {
        "type": "tags_with_separator", "tags": tags, "separator": separator, "at_least_one": True,
        "stop_after_first": named is not None or not parallel,
    }  # fmt: skip
    if form == "mistral":
        calls = {"type": "tag", "begin": f"{TOOL_CALLS}[", "content": calls, "end": "]"}
    if not required and named is None:
        tags = [calls] if form == "mistral" else tags
        calls = {"type": "triggered_tags", "triggers": [trigger], "tags": tags, "stop_after_first": not parallel}
    return {"type": "structural_tag", "format": _after_thoughts(calls, start)}


def after_reasoning(grammar: Grammar, start: Start) -> Grammar:
    """The grammar of an answer that may think first: what it says of the answer it says of the part behind that."""
    if start == "content":
        return grammar
    try:
        asked = {} if grammar.kind in ("regex", "grammar") else json.loads(grammar.text)
    except (ValueError, RecursionError):
        return grammar  # as it is: who reads it says so
    element: Any = {
        "json": {"type": "json_schema", "json_schema": asked},
        "regex": {"type": "regex", "pattern": grammar.text},
        "grammar": {"type": "grammar", "grammar": grammar.text},
        "choice": {"type": "or", "elements": [{"type": "const_string", "value": one} for one in asked]},
        "structural_tag": asked.get("format") if isinstance(asked, dict) else None,
    }[grammar.kind]
    return Grammar("structural_tag", json.dumps({"type": "structural_tag", "format": _after_thoughts(element, start)}))


def _after_thoughts(element: dict[str, Any], start: Start) -> dict[str, Any]:
    thought = {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": THINK_END}
    space = {"type": "regex", "pattern": r"\n{0,2}"}
    if start == "reasoning":
        return _sequence(thought, space, element)
    if start == "either":
        return _sequence({"type": "optional", "content": _sequence(thought | {"begin": THINK}, space)}, element)
    return element


def _sequence(*elements: dict[str, Any]) -> dict[str, Any]:
    return {"type": "sequence", "elements": list(elements)}
