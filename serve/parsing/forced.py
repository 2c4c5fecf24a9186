"""Builds grammars of whole answers that force tool calls, or arguments that match their schema."""

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from dflash_toolkit.sampling import Grammar

from .harmony import ANALYSIS, ARGUMENTS, CALL, CALL_TO, END, FINAL, START
from .json_forms import CALL_BEGIN, CALL_END, CALL_SEP, CALLS_BEGIN, CALLS_END, TOOL_CALL, TOOL_CALL_END, TOOL_CALLS
from .output import THINK, THINK_END, Start
from .xml_forms import (
    ARG_KEY,
    ARG_KEY_END,
    ARG_VALUE,
    ARG_VALUE_END,
    DSML_CALLS,
    DSML_CALLS_END,
    DSML_PARAMETER,
    DSML_PARAMETER_END,
    INVOKE,
    INVOKE_END,
    PARAMETER,
    PARAMETER_END,
)

ANY: dict[str, Any] = {"type": "object"}  # the schema of a tool that has none
# form -> text before the name, between the name and the arguments, after the arguments, and between two calls; text
# that begins a call
WRITTEN = {
    "hermes": (f'{TOOL_CALL}\n{{"name": "', '", "arguments": ', f"}}\n{TOOL_CALL_END}", "\n", TOOL_CALL),
    "qwen3_coder": (f"{TOOL_CALL}\n<function=", ">\n", f"\n</function>\n{TOOL_CALL_END}", "\n", TOOL_CALL),
    "llama3_json": ('{"name": "', '", "parameters": ', "}", "; ", '{"name": "'),
    "llama4_pythonic": ('{"name": "', '", "parameters": ', "}", "; ", '{"name": "'),
    "glm45": (TOOL_CALL, "\n", f"\n{TOOL_CALL_END}", "\n", TOOL_CALL),
    "openai": (CALL_TO, ARGUMENTS, "", f"{CALL}{START}assistant", CALL_TO),
    "mistral": ('{"name": "', '", "arguments": ', "}", ", ", TOOL_CALLS),
    "deepseek_v3": (f"{CALL_BEGIN}function{CALL_SEP}", "\n```json\n", f"\n```{CALL_END}", "\n", CALLS_BEGIN),
    "deepseek_v31": (CALL_BEGIN, CALL_SEP, CALL_END, "", CALLS_BEGIN),
    "deepseek_v32": (f'{INVOKE} name="', '">\n', f"\n{INVOKE_END}", "\n", DSML_CALLS[0]),
}
AROUND = {  # form -> text before the first call and after the last one
    "mistral": (f"{TOOL_CALLS}[", "]"),
    "deepseek_v3": (CALLS_BEGIN, CALLS_END),
    "deepseek_v31": (CALLS_BEGIN, CALLS_END),
    "deepseek_v32": (f"{DSML_CALLS[0]}\n", f"\n{DSML_CALLS_END[0]}"),
}
STYLES = {"qwen3_coder": "qwen_xml", "glm45": "glm_xml", "deepseek_v32": "deepseek_xml"}  # xgrammar's; others: json
PARAMETERS = {  # form -> how it writes a parameter, unless the arguments are JSON
    "qwen3_coder": f"{PARAMETER}{{key}}>\n{{text}}\n{PARAMETER_END}",
    "glm45": f"{ARG_KEY}{{key}}{ARG_KEY_END}\n{ARG_VALUE}{{text}}{ARG_VALUE_END}",
    "deepseek_v32": f'{DSML_PARAMETER} name="{{key}}" string="{{is_string}}">{{text}}{DSML_PARAMETER_END}',
}


def written_call(form: str, name: str, arguments: Mapping[str, Any]) -> str:
    """Returns a call as a model writes it in a form."""
    before, between, after, *_ = WRITTEN[form]
    parameter = PARAMETERS.get(form)
    if parameter is None:
        body = json.dumps(arguments, ensure_ascii=False)
    else:
        texts = {
            key: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            for key, value in arguments.items()
        }
        is_string = {key: json.dumps(isinstance(value, str)) for key, value in arguments.items()}
        body = "\n".join(parameter.format(key=key, text=texts[key], is_string=is_string[key]) for key in arguments)
    begin, end = AROUND.get(form, ("", ""))
    return f"{begin}{before}{name}{between}{body}{after}{end}"


def structural_tag(
    form: str,
    tools: Sequence[Any],
    *,
    required: bool = False,
    named: str | None = None,
    allowed: Collection[str] | None = None,
    parallel: bool = True,
    start: Start = "content",
    content: Grammar | None = None,
) -> dict[str, Any] | None:
    """Returns the grammar as a `structural_tag` of xgrammar; None: the answer is not constrained.

    Args:
        form: a name of `FORMS`.
        tools: OpenAI's `tools`.
        required: the answer has at least one call; otherwise only calls of `strict` tools are constrained.
        named: the function that must be called, once.
        allowed: names of the functions that may be called; None: all.
        parallel: allow several calls.
        start: what the answer begins with, see `OutputParser`.
        content: the grammar of an answer without calls.
    """
    functions = [tool["function"] for tool in tools]
    free = not required and allowed is None and not any(function.get("strict") for function in functions)
    if named is not None:
        allowed = (named,)
    elif free and content is None:
        return None
    if allowed is not None:
        functions = [function for function in functions if function["name"] in allowed]
    before, between, after, separator, trigger = WRITTEN[form]
    tags = [
        {
            "type": "tag",
            "begin": f"{before}{function['name']}{between}",
            "content": {
                "type": "json_schema",
                "json_schema": (None if free else function.get("parameters")) or ANY,
                "style": STYLES.get(form, "json"),
            },
            "end": after,
        }
        for function in functions
    ]
    calls: dict[str, Any] = {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": separator,
        "at_least_one": True,
        "stop_after_first": named is not None or not parallel,
    }
    if form in AROUND:
        begin, end = AROUND[form]
        calls = {"type": "tag", "begin": begin, "content": calls, "end": end}
    if not required and named is None and content is not None:
        calls = {"type": "or", "elements": [calls, _element(content, start)]}
    elif not required and named is None:
        tags = [calls] if form in AROUND else tags
        calls = {"type": "triggered_tags", "triggers": [trigger], "tags": tags, "stop_after_first": not parallel}
    return {"type": "structural_tag", "format": _after_reasoning(calls, start)}


def after_reasoning(grammar: Grammar, start: Start) -> Grammar:
    """Returns a grammar that allows reasoning first and applies `grammar` to the text after it."""
    if start == "content":
        return grammar
    try:
        element = _element(grammar, start)
    except (ValueError, RecursionError):
        return grammar  # compiling it reports the error
    return Grammar("structural_tag", json.dumps({"type": "structural_tag", "format": _after_reasoning(element, start)}))


def _element(grammar: Grammar, start: Start) -> Any:
    """Returns a grammar as a part of a structural tag. Raises ValueError or RecursionError."""
    parsed = {} if grammar.kind in ("regex", "grammar") else json.loads(grammar.text)
    element: Any = {
        "json": {"type": "json_schema", "json_schema": parsed},
        "regex": {"type": "regex", "pattern": grammar.text},
        "grammar": {"type": "grammar", "grammar": grammar.text},
        "choice": {"type": "or", "elements": [{"type": "const_string", "value": one} for one in parsed]},
        "structural_tag": parsed.get("format") if isinstance(parsed, dict) else None,
    }[grammar.kind]
    return _sequence({"type": "const_string", "value": FINAL}, element) if start == "messages" else element


def _after_reasoning(element: dict[str, Any], start: Start) -> dict[str, Any]:
    thought = {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": THINK_END}
    space = {"type": "regex", "pattern": r"\n{0,2}"}
    if start == "reasoning":
        return _sequence(thought, space, element)
    if start == "messages":
        thought = {"type": "tag", "begin": ANALYSIS, "content": {"type": "any_text"}, "end": f"{END}{START}assistant"}
        return _sequence({"type": "optional", "content": thought}, element)
    if start == "either":
        return _sequence({"type": "optional", "content": _sequence(thought | {"begin": THINK}, space)}, element)
    return element


def _sequence(*elements: dict[str, Any]) -> dict[str, Any]:
    return {"type": "sequence", "elements": list(elements)}
