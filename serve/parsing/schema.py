"""Converts parameters that are written as bare text to JSON, by the JSON schema of the tool."""

import json
from collections.abc import Mapping
from typing import Any

from .values import INTEGER, number, repaired

TYPES = {
    "null": type(None),
    "boolean": bool,
    "integer": int,
    "number": float,
    "string": str,
    "array": list,
    "object": dict,
}


def types_of(schema: Any, root: Any, seen: set[str] | None = None) -> set[str]:
    """Returns the JSON types that a schema explicitly allows; the set may be empty.

    Args:
        root: the schema of all parameters, to which `$ref` refers.
        seen: references that were followed; a schema may refer to itself.
    """
    if not isinstance(schema, Mapping):
        return set()
    seen = set() if seen is None else seen
    named = schema.get("type")
    found = {name for name in (named if isinstance(named, list) else [named]) if isinstance(name, str)}
    if not found:
        found.update(
            next(name for name, kind in TYPES.items() if isinstance(value, kind)) for value in _values_of(schema)
        )
    for key in ("anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(key), list):
            found.update(*(types_of(each, root, seen) for each in schema[key]))
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/") and reference not in seen:
        seen.add(reference)
        target = root
        for part in reference[2:].split("/"):
            part = part.replace("~1", "/").replace("~0", "~")
            target = target.get(part) if isinstance(target, Mapping) else None
        found |= types_of(target, root, seen)
    return found


def is_text(schema: Any, root: Any) -> bool:
    """Returns whether any text is a valid value: the schema allows only strings, or names no type."""
    return types_of(schema, root) <= {"string"} and not _values_of(schema)


def as_json(value: str, schema: Any, root: Any) -> str:
    """Converts a text to the JSON of the first allowed type that fits, otherwise to a string.

    Strips white space if the schema lists the stripped string.
    """
    types, bare = types_of(schema, root), value.strip()
    if "null" in types and bare.lower() in ("null", "none"):
        return "null"
    if types & {"integer", "number"}:
        read = number(bare)
        if read is not None and (INTEGER.fullmatch(read) or "number" in types):
            return read
    if "boolean" in types and bare.lower() in ("true", "false"):
        return bare.lower()
    # a text that may also stay a string is not corrected
    for found in (bare, None if "string" in types else repaired(bare)) if types & {"object", "array"} else ():
        try:
            read = json.loads(found or "", strict=False, parse_constant=_refuse)
            text = json.dumps(read, ensure_ascii=False, allow_nan=False)
            text.encode()  # raises for a lone surrogate
        except (ValueError, RecursionError):
            continue
        if ("object" in types and isinstance(read, dict)) or ("array" in types and isinstance(read, list)):
            return text
    return json.dumps(bare if bare in _values_of(schema) else value, ensure_ascii=False)


def _values_of(schema: Any) -> list[Any]:
    """Returns the values that a schema lists."""
    if not isinstance(schema, Mapping):
        return []
    listed = schema["enum"] if isinstance(schema.get("enum"), list) else []
    return [*listed, schema["const"]] if "const" in schema else listed


def _refuse(constant: str) -> None:
    raise ValueError(constant)
