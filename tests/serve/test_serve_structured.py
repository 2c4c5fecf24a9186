"""Constrained answers with the parameters of OpenAI, vLLM and SGLang."""

import asyncio
import json
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from grammars import EBNF, NO_SPACE, PERSON, is_json, matches
from live_server import ask, chat, client_of, collect, complete, joined, make_engine, refusal, serving
from openai import OpenAI
from pydantic import BaseModel, Field

from dflash_toolkit import Drafter, SamplingParams, Target, generate
from dflash_toolkit.data.prompts import encode_chat
from dflash_toolkit.grammar import Grammars
from dflash_toolkit.runtime import AsyncEngine
from dflash_toolkit.runtime import client as client_module
from dflash_toolkit.sampling import Grammar, GrammarError
from dflash_toolkit.serve.processes import _read_grammars

COMPACT = {"logit_bias": {str(token): bias for token, bias in NO_SPACE}, "max_tokens": 120}
NAMED = {"name": "person", "schema": PERSON, "strict": True}
COLOURS = ["red", "green", 'no "colour"']
COLOUR, DIGITS = (lambda text: text in COLOURS), matches("[0-9]{3}")
CONSTRAINTS: list[tuple[dict[str, Any], Callable[[str], bool]]] = [
    ({"response_format": {"type": "json_schema", "json_schema": NAMED}}, is_json(PERSON)),
    ({"response_format": {"type": "json_schema", "schema": PERSON}}, is_json(PERSON)),
    ({"response_format": {"type": "json_object", "schema": PERSON}}, is_json(PERSON)),
    ({"structured_outputs": {"json": PERSON}}, is_json(PERSON)),
    ({"structured_outputs": {"json": json.dumps(PERSON)}}, is_json(PERSON)),
    ({"structured_outputs": {"regex": "[0-9]{3}"}}, DIGITS),
    ({"structured_outputs": {"choice": COLOURS}}, COLOUR),
    ({"structured_outputs": {"grammar": EBNF}}, matches(r"<[abc()]*>")),
    ({"structured_outputs": {"structural_tag": {"type": "structural_tag", "format": {"type": "sequence", "elements": [
        {"type": "const_string", "value": "= "}, {"type": "regex", "pattern": "[0-9]{3}"}]}}}}, matches("= [0-9]{3}")),
    ({"guided_json": PERSON}, is_json(PERSON)),
    ({"guided_regex": "[0-9]{3}"}, DIGITS),
    ({"guided_choice": COLOURS}, COLOUR),
    ({"guided_grammar": EBNF}, matches(r"<[abc()]*>")),
    ({"json_schema": json.dumps(PERSON)}, is_json(PERSON)),
    ({"regex": "[0-9]{3}"}, DIGITS),
    ({"ebnf": EBNF}, matches(r"<[abc()]*>")),
]  # fmt: skip


@pytest.fixture(scope="module")
def engine(target: Target, drafter: Drafter) -> AsyncEngine:
    return make_engine(target, drafter)


@pytest.fixture(scope="module")
def url(engine: AsyncEngine) -> Iterator[str]:
    with serving(engine) as url:
        yield url


@pytest.fixture(scope="module")
def client(url: str) -> OpenAI:
    return client_of(url)


@pytest.mark.parametrize(
    ("fields", "holds"), CONSTRAINTS, ids=lambda value: str(value)[:40] if isinstance(value, dict) else ""
)
@pytest.mark.sampled
def test_constrained_answer_matches_on_both_endpoints_and_streamed(
    client: OpenAI, fields: dict[str, Any], holds: Callable[[str], bool]
) -> None:
    options = COMPACT | {"temperature": 0.9, "seed": 5, "extra_body": fields}
    answer = chat(client, **options).choices[0]
    assert answer.finish_reason == "stop" and holds(answer.message.content)
    assert joined(chat(client, stream=True, **options))[:2] == (answer.message.content, "stop")
    text = complete(client, **options).choices[0]
    assert text.finish_reason == "stop" and holds(text.text)


def test_pydantic_class_is_parsed_from_the_answer(client: OpenAI) -> None:
    class Point(BaseModel):
        label: str = Field(max_length=5)
        x: int
        tags: list[bool] = Field(max_length=2)

    answer = client.chat.completions.parse(
        model="org/tiny", messages=[{"role": "user", "content": "A point"}], response_format=Point, **COMPACT
    )
    assert isinstance(answer.choices[0].message.parsed, Point)


def test_json_object_gives_an_object(client: OpenAI) -> None:
    found = chat(client, response_format={"type": "json_object"}, temperature=0.5, seed=1, max_tokens=30)
    assert re.match(r"\{\s*(\"|\}|$)", found.choices[0].message.content)


def test_constrained_answer_equals_generate_and_counts_drafts(client: OpenAI, target: Target, drafter: Drafter) -> None:
    messages = [{"role": "user", "content": "Why is the sky blue?"}]
    answer = chat(client, temperature=0, max_tokens=40, extra_body={"regex": "[a-z]{30}"})
    params = SamplingParams(max_tokens=40, grammar=Grammar("regex", "[a-z]{30}"))
    expected = generate(target, drafter, encode_chat(target.tokenizer, messages), params)
    assert answer.choices[0].message.content == target.tokenizer.decode(expected.tokens[:-1])
    assert answer.usage.dflash["verify_steps"] == len(expected.steps)
    assert answer.usage.dflash["accepted"] == sum(step.accepted for step in expected.steps)


def test_each_of_several_answers_follows_the_schema(client: OpenAI) -> None:
    answer = chat(client, n=4, temperature=1.5, seed=2, extra_body={"regex": "[0-9]{6}"})
    texts = [choice.message.content for choice in answer.choices]
    assert all(re.fullmatch("[0-9]{6}", text) for text in texts) and len(set(texts)) > 1


def test_response_format_text_is_unconstrained(client: OpenAI) -> None:
    plain = chat(client, temperature=0).choices[0].message.content
    for form in ({"type": "text"}, None):
        assert chat(client, temperature=0, extra_body={"response_format": form}).choices[0].message.content == plain


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "objekt"}}}},
         "response_format", 'the JSON schema cannot be used: Unsupported type "objekt"'),
        ({"response_format": {"type": "json_schema"}}, "response_format", "'json_schema' needs `json_schema`"),
        ({"response_format": {"type": "text", "json_schema": NAMED}}, "response_format", "cannot have `json_schema`"),
        ({"response_format": {"type": "yaml"}}, "response_format.type", "json_object"),
        ({"structured_outputs": {}}, "structured_outputs", "exactly one of json"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "exactly one of json"),
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs", "position 3"),
        ({"structured_outputs": {"json": {}, "whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern",
         "not supported"),
        ({"guided_choice": []}, "guided_choice", "at least 1"),
        ({"guided_regex": ""}, "guided_regex", "must not be empty"),
        ({"guided_json": {"not": {}}}, "guided_json", "'not' is not supported"),
        ({"guided_grammar": "root ::= x"}, "guided_grammar", 'Rule "x" is not defined'),
        ({"ebnf": "root ::= root"}, "ebnf", "allows no answer"),
        ({"regex": "a", "guided_choice": ["b"]}, None, "`guided_choice` and `regex`"),
        ({"regex": "a", "ignore_eos": True}, "ignore_eos", "`ignore_eos`"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "not supported"),
    ],
    ids=str,
)  # fmt: skip
def test_invalid_grammar_gets_400_before_decoding(
    client: OpenAI, fields: dict[str, Any], param: str | None, message: str, streamed: bool
) -> None:
    for endpoint in (chat, complete):
        error = refusal(endpoint, client, stream=streamed, extra_body=fields)
        assert (error.status_code, error.param) == (400, param)
        assert message in error.message


def test_other_requests_run_while_a_grammar_compiles(
    engine: AsyncEngine, client: OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammars = engine.engine.grammars
    begun, go_on, real = threading.Event(), threading.Event(), grammars._compile

    def slow(*asked: Any) -> Any:
        begun.set()
        assert go_on.wait(60)
        return real(*asked)

    monkeypatch.setattr(grammars, "_compile", slow)
    found: list[Any] = []
    waiting = threading.Thread(target=lambda: found.append(chat(client, extra_body={"regex": "[0-9]{7}"})))
    waiting.start()
    assert begun.wait(60)
    assert chat(client, max_tokens=5).choices[0].message.content is not None and not found
    go_on.set()
    waiting.join(60)
    assert re.fullmatch("[0-9]{7}", found[0].choices[0].message.content)


def test_slow_or_uncompilable_grammar_is_refused(engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    failed = iter([ValueError("a defect")])

    def slow(*asked: Any) -> Any:
        assert go_on.wait(60)
        raise next(failed)

    monkeypatch.setattr(engine.engine.grammars, "_compile", slow)

    async def play() -> None:
        with monkeypatch.context() as patch, pytest.raises(GrammarError, match="more than 0 s"):
            patch.setattr(client_module, "COMPILE_S", 0.05)
            await engine.compile(SamplingParams(grammar=Grammar("regex", "a{9}")))
        assert (await collect(ask(engine, [1, 2], SamplingParams(max_tokens=2))))[-1].finish_reason == "length"

    asyncio.run(play())
    go_on.set()
    with pytest.raises(GrammarError, match="server's log"):
        asyncio.run(engine.compile(SamplingParams(grammar=Grammar("regex", "a{9}"))))


def test_grammar_dead_end_fails_only_its_answer(url: str, client: OpenAI) -> None:
    body = {"model": "org/tiny", "prompt": "x", "ebnf": 'root ::= "ab" y\ny ::= y "d"', "max_tokens": 9}
    response = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    assert response.status_code >= 400 and "allows no token" in response.json()["error"]["message"]
    assert complete(client, max_tokens=3).choices[0].text is not None


def test_grammars_are_prepared_before_the_first_request(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(target, None).engine
    _read_grammars(engine)
    monkeypatch.setattr(Grammars, "_new_vocabulary", lambda *_: pytest.fail("a request reads the vocabulary"))
    assert engine.matcher(SamplingParams(grammar=Grammar("regex", "a+"))) is not None
