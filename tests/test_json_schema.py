"""JSON schemas are followed or refused: every text that a schema's grammar allows is valid by jsonschema."""

import json
import random
from collections import Counter
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from enum import Enum
from typing import Annotated, Any, Literal
from uuid import UUID

import pytest
from conftest import EOS, LONG_RUN, VOCAB
from grammars import BYTE_OF, TOKENIZER
from jsonschema import Draft202012Validator
from pydantic import BaseModel, Field, conint, constr

from dflash_toolkit import string_pattern
from dflash_toolkit.grammar import Grammars, Matcher, words_of
from dflash_toolkit.sampling import Grammar, GrammarError

GRAMMARS = Grammars(TOKENIZER, VOCAB, [EOS])
SPACE = {*TOKENIZER.encode(" \n\t\r")}
CLOSING = {*TOKENIZER.encode('"}],0'), EOS}
USUAL = {*TOKENIZER.encode("abcxyz019-.:{[tfn"), *CLOSING}


def matcher_of(schema: Any) -> Matcher:
    return GRAMMARS.matcher(Grammar("json", json.dumps(schema)), [EOS])


def accepts(schema: Any, text: str) -> bool:
    ids = [*TOKENIZER.encode(text), EOS]
    return matcher_of(schema).accept(ids) == len(ids)


def random_text(matcher: Matcher, dice: random.Random, longest: int = 160) -> str | None:
    """A text that the grammar allows, preferring what ends it; None if it does not end."""
    ids: list[int] = []
    while len(ids) < longest:
        mask = matcher.masks((), words_of(VOCAB))[0].tolist()
        allowed = [token for token in range(VOCAB) if mask[token // 32] >> token % 32 & 1]
        closing, usual = ([t for t in allowed if t in kind] for kind in (CLOSING, USUAL))
        share = dice.random()
        pool = closing if closing and share < 0.45 else usual if usual and share < 0.93 else allowed
        token = dice.choice([t for t in pool if t not in SPACE] or pool)
        assert matcher.accept([token]) == 1
        if token == EOS:
            return bytes(BYTE_OF[c] for c in "".join(TOKENIZER.convert_ids_to_tokens(ids))).decode("utf-8", "replace")
        ids.append(token)
    return None


LEAVES: list[Any] = [
    {"type": "boolean"}, {"type": "null"}, {"type": "integer"}, {"type": "number"}, {"type": "string"}, {}, True,
    {"enum": ["x", 1, None]}, {"const": "a"}, {"const": 2}, {"type": "integer", "minimum": 1},
    {"type": "integer", "exclusiveMaximum": 5, "minimum": -2}, {"type": "number", "minimum": 0.5, "maximum": 1.5},
    {"type": "string", "minLength": 1}, {"type": "string", "maxLength": 2}, {"type": "string", "pattern": "^a+$"},
    {"type": "string", "pattern": "b"}, {"type": "string", "pattern": "^(?!aa)[ab]*$", "maxLength": 3},
    {"type": ["string", "null"]}, {"type": ["integer", "string"], "minimum": 3}, {"minimum": 3}, {"maxLength": 1},
    {"type": "array"}, {"type": "object"}, {"type": "integer", "enum": [1, 2, "a"]}, {"type": "string", "const": "q"},
    {"type": "integer", "minimum": 0, "maximum": 9, "multipleOf": 3}, {"type": "integer", "format": "uint32"},
    {"type": "string", "enum": ["abc", "d"], "maxLength": 2},
]  # fmt: skip


def random_schema(dice: random.Random, depth: int, names: list[str]) -> Any:
    """A schema of keywords that stand next to each other in any way."""

    def inner() -> Any:
        return random_schema(dice, depth - 1, names)

    def maybe(share: float, **keywords: Any) -> dict[str, Any]:
        return keywords if dice.random() < share else {}

    kind = dice.choices(["leaf", "ref", "object", "array", "combined"], [25, 7 if names else 0, 23, 20, 25])[0]
    if depth == 0 or kind == "leaf":
        return dice.choice(LEAVES)
    if kind == "ref":
        found = {"$ref": f"#/$defs/{dice.choice(names)}"}
    elif kind == "object":
        found = maybe(0.8, type="object") | maybe(0.9, properties={k: inner() for k in "abc" if dice.random() < 0.6})
        found |= maybe(0.6, required=[k for k in "abc" if dice.random() < 0.5])
        found |= maybe(0.5, additionalProperties=dice.choice([False, True, dice.choice(LEAVES)]))
        found |= maybe(0.15, minProperties=dice.randint(0, 2)) | maybe(0.15, maxProperties=dice.randint(1, 3))
        found |= maybe(0.1, patternProperties={"^x": dice.choice(LEAVES)}) | maybe(0.1, unevaluatedProperties=False)
        found |= maybe(0.1, propertyNames={"pattern": "^[abx]"})
    elif kind == "array":
        found = maybe(0.8, type="array") | maybe(0.4, prefixItems=[inner() for _ in range(dice.randint(1, 2))])
        found |= maybe(0.8, items=dice.choice([False, inner(), inner()]))
        found |= maybe(0.3, minItems=dice.randint(0, 2)) | maybe(0.3, maxItems=dice.randint(0, 3))
    else:
        found = {dice.choice(["anyOf", "oneOf", "allOf"]): [inner() for _ in range(dice.randint(1, 3))]}
        other = random_schema(dice, dice.randint(0, 1), names)
        found = {**other, **found} if isinstance(other, dict) and dice.random() < 0.5 else found
    other = dice.choice(LEAVES)
    return {**other, **found} if isinstance(other, dict) and dice.random() < 0.1 else found


@pytest.mark.parametrize("part", range(4))
def test_every_text_of_a_random_schema_is_valid(part: int) -> None:
    outcomes: Counter[str] = Counter()
    for number in range(2000 if LONG_RUN else 60):
        dice = random.Random(f"{part} {number}")
        names = [name for name in "DE" if dice.random() < 0.4]
        schema = random_schema(dice, 3, names)
        schema = {**schema} if isinstance(schema, dict) else {}
        schema |= {"$defs": {name: random_schema(dice, 2, names) for name in names}} if names else {}
        try:
            matcher = matcher_of(schema)
        except GrammarError:
            outcomes["refused"] += 1
            continue
        judge = Draft202012Validator(schema)
        for _ in range(5):
            if (text := random_text(matcher.fresh(), dice)) is not None:
                outcomes["texts"] += 1
                assert judge.is_valid(json.loads(text)), (text, schema)
    assert outcomes["texts"] > 60 and outcomes["refused"] < 40, outcomes


MAIL = {
    "type": "object", "properties": {"mail": {"type": "string"}, "phone": {"type": "string"}},
    "additionalProperties": False,
}  # fmt: skip
EITHER = [{"required": ["mail"]}, {"required": ["phone"]}]
DECIMAL = {"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (MAIL | {"anyOf": EITHER}, ['{"mail": "a"}', '{"phone": "1"}'], ["true", "[1, 2]", '{"fax": 1}', "{}"]),
        ({"type": "string", "anyOf": [{"maxLength": 1}, {"minLength": 9}]}, ['"a"', '"123456789"'], ["true", '"ab"']),
        ({"$defs": {"n": {"type": "integer"}}, "$ref": "#/$defs/n", "minimum": 5, "maximum": 9}, ["7"], ["70", "4"]),
        ({"allOf": [{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
                    {"properties": {"b": {"type": "null"}}, "required": ["b"]}]},
         ['{"a": 1, "b": null}'], ['{"a": 1}', '{"b": null}']),
        ({"oneOf": [{"type": "integer"}, {"type": "string"}]}, ["1", '"a"'], ["null", "1.5"]),
        ({"type": "object", "required": ["b"]}, ['{"b": 1}'], ["{}", '{"a": 1}']),
        ({"type": "integer", "enum": [1, 2, "a"]}, ["1", "2"], ['"a"', "3"]),
        (DECIMAL, ['"12.5"', '"-1"', '".5"'], ['""', '"-"', '"."', '"a"']),
        ({"type": "string", "pattern": "^(?=ab)[a-z]{4}$"}, ['"abcd"'], ['"zzzz"', '"ab"']),
        ({"type": "string", "pattern": "^[a-z]+$", "maxLength": 3}, ['"abc"'], ['"abcd"', '""']),
        ({"type": "integer", "format": "uint32", "minimum": 0}, ["7"], ["-1", '"7"']),
        ({"type": "number", "format": "double"}, ["7", "1.5"], ['"7"']),
        ({"type": "string", "format": "password"}, ['"2026"'], ["1"]),
        ({"type": "array", "items": [{"const": 1}], "additionalItems": False}, ["[1]", "[]"], ["[1, 2]", "[2]"]),
        ({"type": "integer", "minimum": 3, "exclusiveMinimum": True}, ["4"], ["3"]),
        ({"items": {"$ref": "#"}, "type": "array"}, ["[]", "[[], [[]]]"], ["[1]"]),
    ],
    ids=str,
)  # fmt: skip
def test_keywords_next_to_each_other_are_all_followed(schema: Any, good: list[str], bad: list[str]) -> None:
    assert [text for text in good if not accepts(schema, text)] == []
    assert [text for text in bad if accepts(schema, text)] == []


def test_a_pattern_with_too_many_states_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(string_pattern, "CPU_SECONDS", 1)
    for pattern in ("(a|b)*a(a|b){40}", "(a{1,100}){1,100}"):
        with pytest.raises(GrammarError, match=r"(too many|more than 2000) states"):
            matcher_of({"type": "string", "pattern": pattern, "maxLength": 90})


def test_no_pattern_of_a_request_runs_on_a_value_of_its_enum() -> None:
    slow = {"enum": ["a" * 60 + "!"], "pattern": "^(a+)+$"}
    for schema in (slow, {"allOf": [{"enum": slow["enum"]}, {"pattern": slow["pattern"]}]}):
        with pytest.raises(GrammarError, match="'pattern' or 'format' next to 'enum'"):
            matcher_of(schema)


def test_white_space_has_a_limit() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    call = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": schema}}
    for grammar in (Grammar("json", json.dumps(schema)), Grammar("structural_tag", json.dumps(call))):
        for text, holds in (
            ('{\n    "a": 1\n}', True),
            ('{"a":' + " \n" * 16 + "1}", True),
            ('{"a":' + " " * 33, False),
        ):
            ids = TOKENIZER.encode(text)
            assert (GRAMMARS.matcher(grammar, [EOS]).accept(ids) == len(ids)) == holds


@pytest.mark.parametrize("longest", [1, 2, 5])
def test_short_strings_hold_no_control_characters(longest: int) -> None:
    schema = {"type": "string", "maxLength": longest}
    assert accepts(schema, '"a"') and not accepts(schema, '"\x01"') and not accepts(schema, '"\n"')


def test_no_escape_repeats_the_name_of_a_property() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "string"}}
    assert accepts(schema, '{"a": 1, "b": "x"}')
    assert not accepts(schema, '{"a": 1, "\\u0061": "x"}')


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"not": {}}, "'not' is not supported"),
        ({"properties": {"a": {"uniqueItems": True}}}, r"'uniqueItems' is not supported \(at /properties/a\)"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "'oneOf' of schemas that a value could be valid under"),
        ({"type": "string", "pattern": r"^(a|b)\1$"}, "Backreference is not supported"),
        ({"type": "string", "pattern": r"a\b"}, "Word boundary is not supported"),
        ({"type": "string", "pattern": "a(?=b)"}, "'pattern' .* is not supported"),
        ({"type": "string", "pattern": "(", "maxLength": 2}, "is not a regular expression"),
        ({"oneOf": [{"const": number} for number in range(600)]}, "more than 512 alternatives"),
        ({"type": "string", "format": "date", "maxLength": 3}, "with 'format' is not supported"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, "refers to itself|allows no"),
        ({"$ref": "#/nowhere"}, "the schema has no such part"),
        ({"type": "integer", "minimum": 3, "maximum": 2}, "allows no value"),
        ({"type": "array", "minItems": "2"}, "'minItems' cannot be \"2\""),
        ({"properties": {"a": 3}}, "a schema should be an object or bool"),
    ],
    ids=str,
)  # fmt: skip
def test_unsupported_restrictions_are_refused_by_name(schema: Any, message: str) -> None:
    with pytest.raises(GrammarError, match=message):
        matcher_of(schema)


# ---- pydantic --------------------------------------------------------------------------------------------------


class Colour(Enum):
    RED, BLUE = "red", "blue"


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: conint(ge=1, le=9)  # type: ignore[valid-type]


class Dog(BaseModel):
    kind: Literal["dog"]
    name: constr(pattern=r"^[A-Z][a-z]*$", max_length=5)  # type: ignore[valid-type]


class Order(BaseModel):
    price: Decimal
    at: datetime
    day: date
    key: UUID
    took: timedelta
    colour: Colour
    size: Literal["s", "m", 3]
    note: str | None
    number: int | float | str
    tags: list[str] = Field(max_length=2)
    pair: tuple[int, bool]
    stock: dict[str, int]
    pet: Annotated[Cat | Dog, Field(discriminator="kind")]
    pets: list[Cat] = []


@pytest.mark.parametrize("mode", ["validation", "serialization"])
def test_models_of_pydantic_pass_a_round_trip(mode: Literal["validation", "serialization"]) -> None:
    schema = Order.model_json_schema(mode=mode)
    order = Order(
        price=Decimal("12.50"), at=datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC), day=date(2026, 1, 2),
        key=UUID(int=5), took=timedelta(hours=3), colour=Colour.BLUE, size=3, note=None, number=1.5, tags=["a"],
        pair=(1, True), stock={"b": 2}, pet=Dog(kind="dog", name="Rex"), pets=[Cat(kind="cat", lives=9)],
    )  # fmt: skip
    assert accepts(schema, order.model_dump_json())
    assert not accepts(schema, order.model_dump_json().replace('"lives":9', '"lives":10'))
    assert not accepts(schema, order.model_dump_json().replace('"Rex"', '"rex"'))
    for model in (Cat, Dog):
        for seed in range(5):
            text = random_text(matcher_of(model.model_json_schema(mode=mode)), random.Random(seed))
            assert text is None or model.model_validate_json(text)
