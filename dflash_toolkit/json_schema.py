"""Rewrites a JSON schema into the part of JSON Schema that a grammar compiler follows exactly.

Grammar compilers (xgrammar) read anyOf, oneOf and $ref without the keywords next to them, enum without its type, and
required without properties. `rewrite` merges such keywords into alternatives of one type each, so every text
that the compiled grammar allows is valid by the schema that was given. The result may be narrower: it never allows
more. Keywords that cannot be merged are refused by name.

Draft 2020-12; `items` as a list and boolean exclusive bounds are read as in the drafts before. An unknown format says
nothing, as the standard has it.
"""

import functools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, product
from typing import Any
from urllib.parse import unquote

from .string_pattern import StringPattern, has_look_around

Schema = Any  # a parsed JSON schema: dict or bool
Part = dict[str, Any]  # keywords that hold together, without anyOf, oneOf, allOf and $ref

DEEPEST = 64  # levels
MOST_PARTS = 512  # alternatives of one schema
MOST_SCHEMAS = 20_000  # schemas written
FORMATS = {
    "email", "date", "time", "date-time", "duration", "ipv4", "ipv6", "hostname", "uuid", "uri", "uri-reference",
    "uri-template", "json-pointer", "relative-json-pointer",
}  # fmt: skip
UNSUPPORTED = (
    "not", "if", "then", "else", "contains", "minContains", "maxContains", "uniqueItems", "contentSchema",
    "dependentRequired", "dependentSchemas", "dependencies", "$dynamicRef", "$recursiveRef",
)  # fmt: skip
KEYWORDS = {  # by type
    "object": (
        "properties", "required", "additionalProperties", "unevaluatedProperties", "patternProperties",
        "propertyNames", "minProperties", "maxProperties",
    ),
    "array": ("prefixItems", "items", "unevaluatedItems", "minItems", "maxItems"),
    "string": ("pattern", "format", "minLength", "maxLength"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "integer": (), "boolean": (), "null": (),
}  # fmt: skip
ASSERTIONS = {"type", "enum", *(key for keys in KEYWORDS.values() for key in keys)}
READ = {*ASSERTIONS, "const", "$ref", "allOf", "anyOf", "oneOf"}
LEAST = {"minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties"}
MOST = {"maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties"}
SIZES = {key for key in LEAST | MOST if key.endswith(("Length", "Items", "Properties"))}
LONGEST_SIZE = 2**31 - 1  # xgrammar's limits
INT64 = range(-(2**63), 2**63)


class UnsupportedSchema(ValueError):
    """A schema that cannot be followed; the message names the keyword and its place."""


class Rewritten:
    """A rewritten schema.

    Attributes:
        schema: allows nothing that the given one does not; False if it allows no value.
        patterns: what strings with `pattern: "^pattern-N$"` match, by that pattern.
    """

    def __init__(self, schema: Schema, first_pattern: int = 0) -> None:
        self.patterns: dict[str, StringPattern] = {}
        self._root, self._first, self._count = schema, first_pattern, 0
        self._open: dict[str, str | None] = {}  # schemas that are being written: the name that a part refers to
        self._definitions: dict[str, Schema] = {}
        self._done: dict[str, Schema] = {}
        self.schema = self._write(schema, "", 0)
        if self._definitions and not isinstance(self.schema, bool):
            self.schema = {**self.schema, "$defs": self._definitions}

    # ---- alternatives ------------------------------------------------------------------------------------------

    def _parts(self, schema: Schema, place: str, refs: tuple[str, ...] = ()) -> list[Part]:
        """Returns the alternatives that a schema is made of: a value is valid if one of them holds."""
        if isinstance(schema, bool):
            return [{}] if schema else []
        _check_schema(schema, place)
        own = self._filtered(_own_keywords(schema, place))
        found = [] if own is None else [own]
        if "$ref" in schema:
            ref = schema["$ref"]
            if ref in refs:
                raise UnsupportedSchema(f"'$ref' to {ref!r} refers to itself{_at(place)}")
            found = self._all_of(found, self._parts(self._resolve(ref, place), place, (*refs, ref)), place)
        for i, each in enumerate(schema.get("allOf", ())):
            found = self._all_of(found, self._parts(each, f"{place}/allOf/{i}", refs), place)
        for key in ("anyOf", "oneOf"):
            if key in schema:
                places = [f"{place}/{key}/{i}" for i in range(len(schema[key]))]
                branches = [self._parts(each, at, refs) for each, at in zip(schema[key], places, strict=True)]
                branches = [self._all_of(found, branch, place) for branch in branches]
                if sum(map(len, branches)) > MOST_PARTS:
                    raise UnsupportedSchema(f"{key!r} has more than {MOST_PARTS} alternatives{_at(place)}")
                if key == "oneOf":
                    self._check_disjoint(branches, place)
                found = [part for branch in branches for part in branch]
        return found

    def _all_of(self, left: list[Part], right: list[Part], place: str) -> list[Part]:
        if len(left) * len(right) > MOST_PARTS:
            raise UnsupportedSchema(f"it has more than {MOST_PARTS} combinations of alternatives{_at(place)}")
        return [part for a, b in product(left, right) if (part := self._both(a, b, place)) is not None]

    def _both(self, a: Part, b: Part, place: str) -> Part | None:
        """Returns what both parts say; None if no value is valid under both."""
        if not a or not b:
            return a or b
        if "enum" in a or "enum" in b:
            listed, other = (a, b) if "enum" in a else (b, a)
            return self._filtered({**other, "enum": listed["enum"]} | _common_values(a, b))
        merged = _merged_objects(a, b, place) | _merged_arrays(a, b)
        for key in [*a, *(key for key in b if key not in a)]:
            if key not in merged:
                merged[key] = _merged(key, a[key], b[key], place) if key in a and key in b else a.get(key, b.get(key))
        return None if merged.get("type") == [] else merged

    def _filtered(self, part: Part) -> Part | None:
        """Returns a part with an enum as the values that its other keywords allow."""
        if "enum" not in part:
            return part
        rest = {key: value for key, value in part.items() if key != "enum"}
        if rest.keys() - {"type", "pattern", "multipleOf"} - LEAST - MOST:
            _check_valid(rest)
        return {"enum": values} if (values := [value for value in part["enum"] if self._valid(value, rest)]) else None

    def _valid(self, value: Any, part: Part) -> bool:
        root = self._root if isinstance(self._root, dict) else {}
        schema = {key: keyword[0] if key == "pattern" else keyword for key, keyword in part.items()}
        return bool(_validator()(root).evolve(schema=schema).is_valid(value))

    def _resolve(self, ref: Any, place: str) -> Schema:
        if not isinstance(ref, str) or not ref.startswith("#"):
            raise UnsupportedSchema(f"'$ref' to another document is not supported{_at(place)}")
        found = self._root
        for step in ref[1:].split("/")[1:] if len(ref) > 1 else ():
            step = unquote(step).replace("~1", "/").replace("~0", "~")
            try:
                found = found[int(step)] if isinstance(found, list) else found[step]
            except (LookupError, TypeError, ValueError):
                found = None
            if found is None:
                break
        if found is None or (len(ref) > 1 and not ref.startswith("#/")):
            raise UnsupportedSchema(f"'$ref' to {ref!r}: the schema has no such part{_at(place)}")
        return found

    # ---- exclusive alternatives ---------------------------------------------------------------------------------

    def _check_disjoint(self, branches: Sequence[list[Part]], place: str) -> None:
        for left, right in combinations(branches, 2):
            if not all(self._disjoint(a, b, 0) for a, b in product(left, right)):
                raise UnsupportedSchema(
                    f"'oneOf' of schemas that a value could be valid under together is not supported; use anyOf"
                    f"{_at(place)}"
                )

    def _disjoint(self, a: Part, b: Part, depth: int) -> bool:
        """Whether no value can be valid under both parts; False if that is not clear."""
        if "enum" in a or "enum" in b:
            return self._both(a, b, "") is None
        types = _common_types(a.get("type"), b.get("type"))
        if types == [] or types is None or len(types) > 1 or depth > 4:
            return types == []
        for least, most in (("minimum", "maximum"), ("minLength", "maxLength"), ("minItems", "maxItems")):
            if KEYWORDS_TYPE[least] == ("number" if types[0] == "integer" else types[0]) and any(
                one.get(most, math.inf) < other.get(least, -math.inf) for one, other in ((a, b), (b, a))
            ):
                return True
        if types == ["object"]:
            both = {*a.get("required", ())} & {*b.get("required", ())}
            if any(
                self._alternatives_disjoint(a["properties"][key], b["properties"][key], depth)
                for key in both & {*a.get("properties", ())} & {*b.get("properties", ())}
            ):
                return True  # fmt: skip
            return any(_forbids(other, key) for one, other in ((a, b), (b, a)) for key in one.get("required", ()))
        return False

    def _alternatives_disjoint(self, a: Schema, b: Schema, depth: int) -> bool:
        pairs = product(self._parts(a, ""), self._parts(b, ""))
        return all(self._disjoint(one, other, depth + 1) for one, other in pairs)

    # ---- writing ------------------------------------------------------------------------------------------------

    def _write(self, schema: Schema, place: str, depth: int) -> Schema:
        """Returns a schema that the compiler follows: alternatives of one type each, lists of values, references."""
        if isinstance(schema, bool) or schema == {}:
            return schema
        self._count += 1
        if depth > DEEPEST:
            raise UnsupportedSchema(f"it is more than {DEEPEST} levels deep")
        if self._count > MOST_SCHEMAS:
            raise UnsupportedSchema(f"it stands for more than {MOST_SCHEMAS} schemas")
        _check_schema(schema, place)
        read = [name for name in schema if name in READ]
        key = json.dumps({name: schema[name] for name in read})
        if key in self._done:
            return self._done[key]
        if key in self._open:
            self._open[key] = self._open[key] or f"part{self._count}"
            return {"$ref": f"#/$defs/{self._open[key]}"}
        self._open[key] = None
        if read == ["anyOf"]:
            found = [self._write(each, f"{place}/anyOf/{i}", depth + 1) for i, each in enumerate(schema["anyOf"])]
        elif read == ["$ref"] and self._resolve(schema["$ref"], place) is not schema:
            found = [self._write(self._resolve(schema["$ref"], place), schema["$ref"][1:], depth + 1)]
            if not isinstance(found[0], bool) and list(found[0]) != ["$ref"]:
                self._open[key] = self._open[key] or f"part{self._count}"
        else:
            found = [one for part in self._parts(schema, place) for one in self._typed(part, place, depth)]
        found = list({json.dumps(one): one for one in found if one is not False}.values())
        written = True if True in found or {} in found else False if not found else found[0]
        if len(found) > 1 and not isinstance(written, bool):
            written = {"anyOf": found}
        if name := self._open.pop(key):
            self._definitions[name] = written
            written = {"$ref": f"#/$defs/{name}"}
        self._done[key] = written
        return written

    def _typed(self, part: Part, place: str, depth: int) -> Iterator[Schema]:
        """Yields a part as schemas of one type each."""
        if "enum" in part:
            yield {"enum": part["enum"]}
            return
        given = part.get("type")
        if given is None and not part:
            yield True
            return
        # without a type its keywords say which is meant; other types would be valid, too
        types = given or [name for name, keys in KEYWORDS.items() if any(key in part for key in keys)]
        for name in types:
            if name == "object":
                yield self._object(part, place, depth)
            elif name == "array":
                yield self._array(part, place, depth)
            elif name == "string":
                yield self._string(part, place)
            elif name in ("integer", "number") and not (name == "integer" and "number" in types):
                yield _number(part, name, place)
            elif name in ("boolean", "null"):
                yield {"type": name}

    def _object(self, part: Part, place: str, depth: int) -> Schema:
        others = part.get("additionalProperties", part.get("unevaluatedProperties"))
        if others is None and "properties" not in part:
            others = True
        inner = {key: self._write(each, f"{place}/properties/{key}", depth + 1)
                 for key, each in part.get("properties", {}).items()}  # fmt: skip
        patterns = part.get("patternProperties", {})
        required = [key for key in part.get("required", ()) if isinstance(key, str)]
        if len(patterns) > 1 or (patterns and (inner or required)):
            raise UnsupportedSchema(f"'patternProperties' with other properties is not supported{_at(place)}")
        if "propertyNames" in part and (inner or patterns or required or isinstance(others, dict)):
            raise UnsupportedSchema(f"'propertyNames' with other properties is not supported{_at(place)}")
        rest = None if others is None else self._write(others, f"{place}/additionalProperties", depth + 1)
        for key in required:
            if key not in inner:
                inner[key] = True if rest is None else rest
            if inner[key] is False:
                return False
        if (impossible := [key for key, each in inner.items() if each is False]) and rest not in (None, False):
            raise UnsupportedSchema(f"the property {impossible[0]!r} is false next to others that are not{_at(place)}")
        inner = {key: each for key, each in inner.items() if each is not False}
        least, most = part.get("minProperties", 0), part.get("maxProperties", math.inf)
        open_ended = bool(patterns) or rest not in (None, False)
        if most < max(least, len({*required})) or (least > len(inner) and not open_ended):
            return False
        if open_ended and least > max(1, len({*required})):  # a grammar cannot see that a name comes twice
            raise UnsupportedSchema(
                f"'minProperties' of {least} with properties of any name is not supported{_at(place)}"
            )
        found: Part = {"type": "object"}
        if patterns:
            ((pattern, each),) = patterns.items()
            found["patternProperties"] = {pattern: self._write(each, f"{place}/patternProperties/{pattern}", depth + 1)}
        elif inner or rest in (None, False):
            found["properties"] = inner
        found |= {"required": [*dict.fromkeys(required)]} if required else {}
        named = "propertyNames" in part and rest is not False  # else there are no properties to name
        if not patterns and not named:
            found["additionalProperties"] = False if rest is None else rest
        if named:
            found["propertyNames"] = self._write(part["propertyNames"], f"{place}/propertyNames", depth + 1)
        return found | {key: part[key] for key in ("minProperties", "maxProperties") if key in part}

    def _array(self, part: Part, place: str, depth: int) -> Schema:
        first = [self._write(each, f"{place}/prefixItems/{i}", depth + 1)
                 for i, each in enumerate(part.get("prefixItems", ()))]  # fmt: skip
        rest = part.get("items", part.get("unevaluatedItems", not first))
        rest = self._write(rest, f"{place}/items", depth + 1)
        if False in first:
            first, rest = first[: first.index(False)], False
        least, most = part.get("minItems", 0), part.get("maxItems", math.inf)
        most = min(most, len(first)) if rest is False else most
        if least > most:
            return False
        found: Part = {"type": "array"} | (
            {"prefixItems": [{} if each is True else each for each in first[: int(min(most, len(first)))]]}
            if first
            else {}
        )
        found["items"] = False if len(first) >= most else rest
        found |= {"minItems": least} if least else {}
        return found | ({"maxItems": int(most)} if most < math.inf else {})

    def _string(self, part: Part, place: str) -> Schema:
        least, most = part.get("minLength", 0), part.get("maxLength", math.inf)
        patterns, sized = part.get("pattern", []), least > 0 or most < math.inf
        if least > most:
            return False
        if "format" in part:
            if patterns or sized:
                raise UnsupportedSchema(f"a length or a 'pattern' with 'format' is not supported{_at(place)}")
            return {"type": "string", "format": part["format"]}
        if not patterns:
            found: Part = {"type": "string"} | ({"minLength": least} if least else {})
            return found | ({"maxLength": most} if most < math.inf else {})
        if len(patterns) == 1 and not sized and not has_look_around(patterns[0]):
            return {"type": "string", "pattern": patterns[0]}
        try:
            pattern = StringPattern(patterns, least, int(most) if most < math.inf else None)
        except ValueError as error:
            raise UnsupportedSchema(f"'pattern' {error}{_at(place)}") from error
        if pattern.empty:
            return False
        name = f"^pattern-{self._first + len(self.patterns)}$"
        self.patterns[name] = pattern
        return {"type": "string", "pattern": name}


KEYWORDS_TYPE = {key: name for name, keys in KEYWORDS.items() for key in keys}


@functools.cache
def _validator() -> Any:
    """Returns the judge of values in an enum. It runs no pattern of a request: some take exponential time."""
    from jsonschema import Draft202012Validator
    from jsonschema.validators import extend

    def refuse(_: Any, keyword: Any, value: Any, schema: Any) -> Iterator[Any]:
        if isinstance(value, str | dict):
            raise UnsupportedSchema("'pattern' or 'format' next to 'enum' or 'const' is not supported")
        return iter(())

    return extend(Draft202012Validator, dict.fromkeys(("pattern", "patternProperties", "format"), refuse))


def _check_valid(schema: Part) -> None:
    """Raises UnsupportedSchema if a schema next to an enum cannot judge its values."""
    from jsonschema.exceptions import SchemaError

    try:
        _validator().check_schema({key: value for key, value in schema.items() if key != "pattern"})
    except SchemaError as error:
        raise UnsupportedSchema(f"a schema next to 'enum' or 'const' is not valid: {error.message[:80]}") from error


def _at(place: str) -> str:
    return f" (at {place})" if place else ""


def _check_schema(schema: Any, place: str) -> None:
    """Raises UnsupportedSchema if the schema is not an object, or has a keyword that cannot be followed."""
    if not isinstance(schema, dict):
        raise UnsupportedSchema(
            f"a schema should be an object or bool, but it is {json.dumps(schema)[:80]}{_at(place)}"
        )
    for key in UNSUPPORTED:
        harmless: Any = False if key == "uniqueItems" else {} if key.startswith("depend") else None
        if key in schema and (harmless is None or schema[key] != harmless):
            raise UnsupportedSchema(f"{key!r} is not supported{_at(place)}")
    kinds: dict[str, type | tuple[type, ...]] = {
        "properties": dict, "patternProperties": dict, "required": list, "enum": list, "anyOf": list, "oneOf": list,
        "allOf": list, "prefixItems": list, "pattern": str, "format": str, "$ref": str, "type": (str, list),
        **dict.fromkeys(("propertyNames", "additionalProperties", "unevaluatedProperties"), (dict, bool)),
        "multipleOf": (int, float),
        **dict.fromkeys(LEAST | MOST, (int, float)),
    }  # fmt: skip
    for key, kind in kinds.items():
        if key in schema and not (isinstance(schema[key], kind) and _is_read(key, schema[key])):
            wanted = f"; it must be an integer from 0 to {LONGEST_SIZE}" if key in SIZES else ""
            raise UnsupportedSchema(f"{key!r} cannot be {json.dumps(schema[key])[:80]}{wanted}{_at(place)}")


def _is_read(key: str, value: Any) -> bool:
    """Whether a keyword's value is one that can be followed, if it is of the right type."""
    if key in SIZES:
        return not isinstance(value, bool) and 0 <= value <= LONGEST_SIZE and value == int(value)
    if key == "multipleOf" or key in LEAST | MOST:
        if isinstance(value, bool):  # an exclusive bound of the drafts before
            return key.startswith("exclusive")
        return (isinstance(value, int) or math.isfinite(value)) and (key != "multipleOf" or value > 0)
    return True


def _own_keywords(schema: Mapping[str, Any], place: str) -> Part:
    """Returns the keywords of one schema in the forms of draft 2020-12."""
    part: Part = {key: value for key, value in schema.items() if key in ASSERTIONS}
    part |= {key: int(part[key]) for key in SIZES & part.keys()}  # 5.0 is an integer in JSON Schema
    if "type" in part:
        part["type"] = [part["type"]] if isinstance(part["type"], str) else list(part["type"])
        for name in part["type"]:
            if not isinstance(name, str) or name not in KEYWORDS:
                raise UnsupportedSchema(f"Unsupported type {json.dumps(name)}{_at(place)}")
    if "const" in schema:
        part["enum"] = [each for each in part.get("enum", [schema["const"]]) if _same(each, schema["const"])]
    if "pattern" in part:
        part["pattern"] = [part["pattern"]]
    if part.get("format") not in FORMATS:
        part.pop("format", None)
    if isinstance(part.get("items"), list):
        part["prefixItems"], part["items"] = part["items"], schema.get("additionalItems", True)
    for bound in ("minimum", "maximum"):
        strict = f"exclusive{bound.capitalize()}"
        if isinstance(part.get(strict), bool) and part.pop(strict) and bound in part:
            part[strict] = part.pop(bound)
    return part


def _same(a: Any, b: Any) -> bool:
    """Whether two JSON values are equal; true is not 1."""
    return json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True)


def _common_values(a: Part, b: Part) -> Part:
    if "enum" in a and "enum" in b:
        return {"enum": [value for value in a["enum"] if any(_same(value, each) for each in b["enum"])]}
    return {}


def _common_types(a: list[str] | None, b: list[str] | None) -> list[str] | None:
    """Returns the types in both lists, where every integer is a number; None is all."""
    if a is None or b is None:
        return a or b
    found = [name for name in a if name in b or (name == "integer" and "number" in b)]
    return found + (["integer"] if "number" in a and "integer" in b and not {"number", "integer"} & {*found} else [])


def _merged(key: str, a: Any, b: Any, place: str) -> Any:
    if key == "type":
        return _common_types(a, b)
    if key in LEAST:
        return max(a, b)
    if key in MOST:
        return min(a, b)
    if key == "required":
        return [*dict.fromkeys([*a, *b])]
    if key == "pattern":
        return [*dict.fromkeys([*a, *b])]
    if key == "multipleOf" and isinstance(a, int) and isinstance(b, int) and a > 0 and b > 0:
        return math.lcm(a, b)
    if not _same(a, b):
        raise UnsupportedSchema(f"two different {key!r} that hold together are not supported{_at(place)}")
    return a


def _merged_objects(a: Part, b: Part, place: str) -> Part:
    """Returns the keywords of properties that hold under both parts."""
    if not any("properties" in one or "additionalProperties" in one for one in (a, b)):
        return {}
    ours, theirs = a.get("properties", {}), b.get("properties", {})
    for one, names in ((a, theirs), (b, ours)):
        if names and one.get("patternProperties"):
            raise UnsupportedSchema(f"'patternProperties' with other properties is not supported{_at(place)}")
    found: Part = {}
    names = [*dict.fromkeys([*ours, *theirs])]
    if names:
        found["properties"] = {
            key: _joined(
                ours.get(key, a.get("additionalProperties", True)), theirs.get(key, b.get("additionalProperties", True))
            )
            for key in names
        }
    if "additionalProperties" in a and "additionalProperties" in b:
        found["additionalProperties"] = _joined(a["additionalProperties"], b["additionalProperties"])
    return found


def _merged_arrays(a: Part, b: Part) -> Part:
    if not any("prefixItems" in one or "items" in one for one in (a, b)):
        return {}
    left, right = a.get("prefixItems", []), b.get("prefixItems", [])
    rest = [one.get("items", True) for one in (a, b)]
    size = max(len(left), len(right))
    filled = [[*first, *[after] * (size - len(first))] for first, after in ((left, rest[0]), (right, rest[1]))]
    found: Part = {"prefixItems": [_joined(x, y) for x, y in zip(*filled, strict=True)]} if size else {}
    return found | ({"items": _joined(*rest)} if "items" in a or "items" in b else {})


def _joined(a: Schema, b: Schema) -> Schema:
    if a is False or b is False:
        return False
    if a is True or a == {}:
        return b
    return a if b is True or b == {} or _same(a, b) else {"allOf": [a, b]}


def _forbids(part: Part, key: str) -> bool:
    return part.get("additionalProperties") is False and key not in part.get("properties", {}) and not part.get(
        "patternProperties"
    )  # fmt: skip


def _multiples(step: int, least: int | None, most: int | None, place: str) -> Schema:
    if least is None or most is None or (most - least) // step > MOST_PARTS:
        raise UnsupportedSchema(
            f"'multipleOf' with one bound, or over {MOST_PARTS} steps, is not supported{_at(place)}"
        )
    values = [*range(-(-least // step) * step, most + 1, step)]
    return {"enum": values} if values else False


def _number(part: Part, name: str, place: str) -> Schema:
    step = part.get("multipleOf")
    if step is not None:
        if step not in range(1, 1025):
            raise UnsupportedSchema(f"'multipleOf' of {step!r} is not supported; use an integer in 1..1024{_at(place)}")
        name = "integer"  # narrower than a number, such as 6.0
    found: Part = {"type": name} | ({"multipleOf": int(step)} if step is not None and step != 1 else {})
    least, most = part.get("minimum"), part.get("maximum")
    above, below = part.get("exclusiveMinimum"), part.get("exclusiveMaximum")
    if name == "integer":
        lows = [math.ceil(least)] if least is not None else []
        lows += [math.floor(above) + 1] if above is not None else []
        highs = [math.floor(most)] if most is not None else []
        highs += [math.ceil(below) - 1] if below is not None else []
        if lows and highs and max(lows) > min(highs):
            return False
        if outside := [bound for bound in (*lows, *highs) if bound not in INT64]:
            raise UnsupportedSchema(
                f"the bound {str(outside[0])[:80]} of an integer is not supported; it must be from {INT64[0]} to "
                f"{INT64[-1]}{_at(place)}"
            )
        if "multipleOf" in found and (lows or highs):
            return _multiples(found["multipleOf"], max(lows, default=None), min(highs, default=None), place)
        return found | ({"minimum": max(lows)} if lows else {}) | ({"maximum": min(highs)} if highs else {})
    if above is not None and (least is None or above >= least):
        found["exclusiveMinimum"] = above
    elif least is not None:
        found["minimum"] = least
    if below is not None and (most is None or below <= most):
        found["exclusiveMaximum"] = below
    elif most is not None:
        found["maximum"] = most
    low, high = (found.get(f"exclusive{key}", found.get(key.lower())) for key in ("Minimum", "Maximum"))
    if low is not None and high is not None:
        strict = "exclusiveMinimum" in found or "exclusiveMaximum" in found
        if low > high or (strict and low == high):
            return False
    return found
