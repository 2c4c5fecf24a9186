"""Parameters that constrain an answer: OpenAI's `response_format`, and those of vLLM and SGLang."""

import json
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from dflash_toolkit.sampling import Grammar

from .body import Strict

OBJECT = '{"type": "object"}'


def _not_empty(text: str) -> str:
    if not text:
        raise ValueError("must not be empty")
    return text


Text = Annotated[str, AfterValidator(_not_empty)]
Schema = Text | dict[str, Any]
Choices = Annotated[list[str], Field(min_length=1, fail_fast=True)]


class NamedSchema(Strict):
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None  # has no effect: every schema is enforced


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: NamedSchema | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")  # Together and llama.cpp call it so
    format: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if self.schema_ is not None and self.type in ("json_object", "json_schema") and self.json_schema is None:
            return self
        for name, wanted in (("json_schema", "json_schema"), ("format", "structural_tag")):
            if (getattr(self, name) is not None) != (self.type == wanted):
                raise ValueError(f"type {self.type!r} {'needs' if self.type == wanted else 'cannot have'} `{name}`")
        return self

    def grammar(self) -> Grammar | None:
        if self.schema_ is not None and self.json_schema is None:
            return _of_schema(self.schema_)
        match self.type:
            case "json_object":
                return Grammar("json", OBJECT)
            case "json_schema":
                assert self.json_schema is not None
                return _of_schema(self.json_schema.schema_)
            case "structural_tag":
                return Grammar("structural_tag", json.dumps({"type": self.type, "format": self.format}))
        return None


class StructuredOutputs(Strict):
    """vLLM's `structured_outputs`."""

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {
        "whitespace_pattern": (),
        "disable_any_whitespace": (False,),
        "disable_additional_properties": (False,),
    }

    json_: Schema | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: Text | None = None
    choice: Choices | None = None
    grammar: Text | None = None
    structural_tag: Schema | None = None

    @model_validator(mode="after")
    def _one(self) -> Self:
        if len(self.grammars()) != 1:
            raise ValueError("must have exactly one of json, json_object, regex, choice, grammar and structural_tag")
        return self

    def grammars(self) -> list[Grammar]:
        found = [
            self.json_ is not None and _of_schema(self.json_),
            self.json_object and Grammar("json", OBJECT),
            self.regex is not None and Grammar("regex", self.regex),
            self.choice is not None and _of_choices(self.choice),
            self.grammar is not None and Grammar("grammar", self.grammar),
            self.structural_tag is not None and Grammar("structural_tag", _text(self.structural_tag)),
        ]
        return [one for one in found if one]


class Structured(Strict):
    """The fields of a request that constrain its answer; at most one is set."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None  # vLLM's older names
    guided_regex: Text | None = None
    guided_choice: Choices | None = None
    guided_grammar: Text | None = None
    json_schema: Text | None = None  # SGLang's names
    regex: Text | None = None
    ebnf: Text | None = None

    def grammar(self) -> tuple[str, Grammar] | None:
        """Returns the field that sets a grammar, and the grammar. Raises ValueError if several fields do."""
        found: dict[str, Grammar | None] = {
            "response_format": self.response_format.grammar() if self.response_format else None,
            "structured_outputs": self.structured_outputs.grammars()[0] if self.structured_outputs else None,
            "guided_json": _of_schema(self.guided_json) if self.guided_json is not None else None,
            "guided_regex": Grammar("regex", self.guided_regex) if self.guided_regex else None,
            "guided_choice": _of_choices(self.guided_choice) if self.guided_choice else None,
            "guided_grammar": Grammar("grammar", self.guided_grammar) if self.guided_grammar else None,
            "json_schema": Grammar("json", self.json_schema) if self.json_schema else None,
            "regex": Grammar("regex", self.regex) if self.regex else None,
            "ebnf": Grammar("grammar", self.ebnf) if self.ebnf else None,
        }
        given = [(name, grammar) for name, grammar in found.items() if grammar is not None]
        if len(given) > 1:
            raise ValueError(f"`{given[0][0]}` and `{given[1][0]}` both constrain the answer; send one of them")
        return given[0] if given else None


def _of_schema(schema: str | dict[str, Any]) -> Grammar:
    return Grammar("json", _text(schema))


def _text(given: str | dict[str, Any]) -> str:
    return given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)


def _of_choices(choices: list[str]) -> Grammar:
    return Grammar("choice", json.dumps(choices, ensure_ascii=False))
