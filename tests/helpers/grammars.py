"""Grammars, requests under them, and checks of their answers."""

import json
import re
from collections.abc import Callable
from typing import Any

import jsonschema
from conftest import make_tokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from dflash_toolkit import SamplingParams
from dflash_toolkit.sampling import Grammar

TOKENIZER = make_tokenizer()


BYTE_OF = {letter: byte for byte, letter in bytes_to_unicode().items()}


# random models love white space, of which JSON may have any amount between its parts
NO_SPACE = tuple((TOKENIZER.encode(c)[0], -100.0) for c in " \t\r\n")


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "bé", 7, None]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def is_json(schema: Any) -> Callable[[str], bool]:
    def holds(text: str) -> bool:
        jsonschema.validate(json.loads(text), schema)
        return True

    return holds


def matches(regex: str) -> Callable[[str], bool]:
    return lambda text: re.fullmatch(regex, text) is not None


def of_choices(choices: list[str]) -> tuple[Grammar, Callable[[str], bool]]:
    return Grammar("choice", json.dumps(choices)), lambda text: text in choices


def of_schema(schema: Any) -> tuple[Grammar, Callable[[str], bool]]:
    return Grammar("json", json.dumps(schema)), is_json(schema)


def of_regex(regex: str) -> tuple[Grammar, Callable[[str], bool]]:
    return Grammar("regex", regex), matches(regex)


EBNF = 'root ::= "<" body ">"\nbody ::= "" | [a-c] body | "(" body ")"'


LARK = 'start: "go" NUMBER ("," NUMBER)*\nNUMBER: /[0-9]{1,3}/'


# grammars with short answers, and checks of an answer
CASES = {
    "schema": of_schema(PERSON),
    "regex": of_regex(r"(yes|no), [0-9]{3}(é|!)?"),
    "choice": of_choices(['line\nfeed "quoted" \\', "positive", "pos", "negatif é 😀"]),
    "ebnf": (Grammar("grammar", EBNF), matches(r"<[abc()]*>")),
    "lark": (Grammar("grammar", LARK), matches(r"go[0-9]{1,3}(,[0-9]{1,3})*")),
}


WAYS = [{}, {"temperature": 1.0, "seed": 3}, {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "seed": 8}]


def params_of(grammar: Grammar, **more: Any) -> SamplingParams:
    return SamplingParams(**{"grammar": grammar, "logit_bias": NO_SPACE, "max_tokens": 120} | more)


def wide(number: int) -> Grammar:
    """Returns a grammar that takes minutes to compile; those of other numbers differ."""
    properties = {f"p{number}_{i}": {"type": "string"} for i in range(4000)}
    return Grammar("json", json.dumps({"type": "object", "properties": properties, "additionalProperties": False}))
