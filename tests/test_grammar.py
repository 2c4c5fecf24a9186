"""Structured answers: what the definition writes under a grammar, and which grammars are read."""

import dataclasses
import json
import math
import re
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from conftest import EOS, VOCAB
from grammars import BYTE_OF, CASES, TOKENIZER, WAYS, of_choices, of_regex, of_schema, params_of
from hypothesis import given, settings
from hypothesis import strategies as st
from known_drafts import PROMPT, check_books, drafting, knows, pair, planting
from token_texts import sentencepiece_like

from dflash_toolkit import SamplingParams, UserError, generate
from dflash_toolkit import grammar as grammar_module
from dflash_toolkit.generation import Generation
from dflash_toolkit.grammar import Grammars, masks_of, words_of
from dflash_toolkit.kernels.reference import mask_logits_
from dflash_toolkit.sampling import Grammar, GrammarError


def text_of(generation: Generation) -> str:
    assert generation.finish_reason == "stop" and generation.tokens[-1] == EOS
    letters = "".join(TOKENIZER.convert_ids_to_tokens(generation.tokens[:-1]))
    # for xgrammar half of a surrogate pair is a character too; random targets write even these
    return bytes(BYTE_OF[letter] for letter in letters).decode("utf-8", "surrogatepass")


def allowed_of(grammar: Grammar, text: str, tokenizer: Any = TOKENIZER, vocabulary: int = VOCAB) -> set[int]:
    """The tokens that may follow a text."""
    matcher = Grammars(tokenizer, vocabulary, ()).matcher(grammar, [tokenizer.eos_token_id])
    ids = tokenizer.encode(text, add_special_tokens=False) if text else []
    assert matcher.accept(ids) == len(ids)
    logits = torch.zeros(1, vocabulary)
    mask_logits_(logits, *masks_of([matcher], [[]], words_of(vocabulary)))
    return set(logits[0].isfinite().nonzero()[:, 0].tolist())


# ---- answers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.sampled
def test_answer_follows_the_grammar_with_and_without_drafts(case: str, way: dict[str, Any]) -> None:
    target, drafter = pair()
    grammar, holds = CASES[case]
    plain = generate(target, None, PROMPT, params_of(grammar, **way))
    assert holds(text_of(plain))
    assert generate(target, drafter, PROMPT, params_of(grammar, **way)).tokens == plain.tokens
    assert holds(text_of(generate(target, drafter, PROMPT, params_of(grammar, **way), "probabilistic")))
    for wrong in (set(), {2, 3, 7}):
        with drafting(knows(tuple(plain.tokens), wrong)):
            helped = generate(target, drafter, PROMPT, params_of(grammar, **way))
        assert helped.tokens == plain.tokens and helped.finish_reason == "stop"
        assert len(helped.steps) < len(plain.steps) or len(plain.steps) < 2
        check_books(helped)
    with planting(plain.tokens):
        helped = generate(target, drafter, PROMPT, params_of(grammar, **way), draft_tree=24)
    assert helped.tokens == plain.tokens and helped.finish_reason == "stop"
    check_books(helped)


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_each_token_is_the_best_allowed_one(seed: int | None) -> None:
    """Against the enumerated answers and the logits of Hugging Face."""
    target, _ = pair()
    choices = ["red", "reddish brown", "green", "grey"]
    answers = [[*TOKENIZER.encode(choice), EOS] for choice in choices]
    way = {} if seed is None else {"temperature": 1.5, "seed": seed}
    found = generate(target, None, PROMPT, SamplingParams(grammar=of_choices(choices)[0], **way)).tokens
    for i, token in enumerate(found):
        going = sorted({answer[i] for answer in answers if answer[:i] == found[:i]})
        if seed is None:
            with torch.inference_mode():
                logits = target.model(torch.tensor([PROMPT + found[:i]])).logits[0, -1]
            assert token == going[int(logits[going].argmax())]
        assert token in going


def test_drafts_that_the_grammar_forbids_are_rejected_ones() -> None:
    target, drafter = pair()
    grammar, _ = of_regex("[a-f]{20}")
    truth = generate(target, None, PROMPT, params_of(grammar)).tokens
    assert len(truth) == 21
    forbidden, allowed = TOKENIZER.encode("z")[0], TOKENIZER.encode("abcdef")
    for other in (forbidden, EOS, VOCAB - 1, None):  # None: another that the grammar allows

        def draft_at(position: int, other: int | None = other) -> int:
            index = position - len(PROMPT)
            if index in (3, 9):
                return next(t for t in allowed if t != truth[index]) if other is None else other
            return truth[index] if index < len(truth) else 0

        with drafting(draft_at):
            found = generate(target, drafter, PROMPT, params_of(grammar))
        assert found.tokens == truth
        expected = [(7, 2, 3), (7, 5, 6), (7, 7, 8), (7, 3, 3)]
        assert [(s.drafted, s.accepted, len(s.tokens)) for s in found.steps] == expected


schemas = st.recursive(
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"enum": ["x", "yy", 3]}, {"const": [1, {"k": "é"}]},
                     {"type": "integer", "minimum": -9, "maximum": 99}, {"type": "string", "maxLength": 3},
                     {"type": "string", "pattern": "^[ab]{1,3}$"}]),
    lambda inner: st.one_of(
        st.builds(lambda items, most: {"type": "array", "items": items, "maxItems": most}, inner, st.integers(0, 2)),
        st.builds(lambda parts: {"anyOf": parts}, st.lists(inner, min_size=1, max_size=3)),
        st.builds(
            lambda properties, required: {
                "type": "object", "properties": properties, "required": sorted(properties)[:required],
                "additionalProperties": False,
            },
            st.dictionaries(st.sampled_from(["a", "b", "long name"]), inner, max_size=3), st.integers(0, 3),
        ),
    ),
    max_leaves=4,
)  # fmt: skip
words = st.text(st.sampled_from("ab\"\\\n é😀|'[]"), min_size=1, max_size=5)
regexes = st.recursive(
    st.sampled_from(["a", "[b-d]", r"\d", "é", r"\.", "[^a-z]"]),
    lambda inner: st.one_of(
        st.builds("".join, st.lists(inner, min_size=1, max_size=3)),
        st.builds("({}|{})".format, inner, inner),
        st.builds("({}){{1,2}}".format, inner),
        st.builds("({})?".format, inner),
    ),
    max_leaves=6,
)


@given(
    schemas.map(of_schema) | st.lists(words, min_size=1, max_size=4).map(of_choices) | regexes.map(of_regex),
    st.sampled_from(WAYS),
    st.sets(st.integers(0, 30)),
)
@settings(max_examples=40, deadline=None)
def test_every_finished_answer_parses(
    case: tuple[Grammar, Callable[[str], bool]], way: dict[str, Any], wrong: set[int]
) -> None:
    target, drafter = pair()
    grammar, holds = case
    params = params_of(grammar, **way)
    if grammar.kind != "json":
        params = dataclasses.replace(params, logit_bias=())
    plain = generate(target, None, PROMPT, params)
    assert plain.finish_reason == "length" or holds(text_of(plain))
    with drafting(knows(tuple(plain.tokens), wrong)):
        helped = generate(target, drafter, PROMPT, params)
    assert (helped.tokens, helped.finish_reason) == (plain.tokens, plain.finish_reason)


def test_any_object_is_json() -> None:
    grammar = Grammar("json", '{"type": "object"}')
    assert allowed_of(grammar, "") == set(TOKENIZER.encode("{"))
    assert EOS in allowed_of(grammar, '{"any": [1, {"thing": null}], "é": -1.5e3}')


def test_log_probabilities_are_the_targets_own_whatever_the_grammar() -> None:
    target, drafter = pair()
    found = generate(target, drafter, PROMPT, SamplingParams(grammar=Grammar("regex", "[a-c]{4}"), logprobs=2))
    with torch.inference_mode():
        logits = target.model(torch.tensor([PROMPT + found.tokens])).logits[0, len(PROMPT) - 1 : -1]
    own = logits.float().log_softmax(-1)
    for row, token, logprobs in zip(own, found.tokens, found.logprobs, strict=True):
        assert logprobs.chosen == pytest.approx(float(row[token]), abs=1e-4)
        assert logprobs.best[0][0] == int(row.argmax())


# ---- ends and dead ends --------------------------------------------------------------------------------


def test_special_tokens_are_no_text() -> None:
    user = TOKENIZER.convert_tokens_to_ids("<|user|>")
    assert allowed_of(Grammar("regex", r"<\|user\|>"), "") == set(TOKENIZER.encode("<"))
    assert user not in allowed_of(Grammar("json", '{"type": "string"}'), '"')


def test_the_end_is_allowed_only_if_the_grammar_is_complete() -> None:
    grammar = Grammar("regex", "ab?")
    assert EOS not in allowed_of(grammar, "")
    assert allowed_of(grammar, "a") == {*TOKENIZER.encode("b"), EOS}
    assert allowed_of(grammar, "ab") == {EOS}


def test_a_text_stop_token_ends_an_answer_if_the_grammar_allows() -> None:
    target, drafter = pair()
    comma = TOKENIZER.encode(",")[0]
    params = SamplingParams(grammar=Grammar("regex", "[a-z]{3},[a-z]{3}"), stop_token_ids=(comma,))
    for helper in (None, drafter):
        found = generate(target, helper, PROMPT, params)
        assert found.finish_reason == "stop" and found.tokens[-1] == comma
        assert re.fullmatch("[a-z]{3}", TOKENIZER.decode(found.tokens[:-1]))


def test_a_request_may_name_the_token_that_ends_its_answer() -> None:
    target, drafter = pair()
    end = TOKENIZER.convert_tokens_to_ids("<|user|>")
    choices = [generate(target, helper, PROMPT, SamplingParams(
        grammar=Grammar("regex", "ab"), stop_token_ids=(end, 9999, -1), logit_bias=((end, 100.0),)
    )) for helper in (None, drafter)]  # fmt: skip
    assert [found.tokens for found in choices] == [[*TOKENIZER.encode("ab"), end]] * 2


def test_a_dead_end_is_an_error_and_no_answer() -> None:
    target, drafter = pair()
    grammar = Grammar("grammar", 'root ::= "ab" x\nx ::= "c" x | y\ny ::= y "d"')
    params = SamplingParams(grammar=grammar, logit_bias=((TOKENIZER.encode("c")[0], -100.0),), max_tokens=60)
    for helper in (None, drafter):
        assert generate(target, helper, PROMPT, params).finish_reason == "length"
    nowhere = Grammar("grammar", 'root ::= "ab" y\ny ::= y "d"')
    for helper in (None, drafter):
        with pytest.raises(GrammarError, match="the grammar allows no token"):
            generate(target, helper, PROMPT, SamplingParams(grammar=nowhere))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ignore_eos": True}, "ignore_eos"),
        ({"logit_bias": ((5, -float("inf")),)}, "logit_bias bans token 5"),
    ],
)
def test_parameters_that_leave_no_answer_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(grammar=Grammar("regex", "a"), **options)


def test_a_target_without_an_end_needs_one_of_the_request() -> None:
    grammars = Grammars(TOKENIZER, VOCAB, ())
    for stop in ([], TOKENIZER.encode("a")):
        with pytest.raises(GrammarError, match="declares none; name one in stop_token_ids"):
            grammars.matcher(Grammar("regex", "a"), stop)


# ---- what is read --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("json", "{", "the JSON schema is not valid JSON"),
        ("json", "[1]", r"the JSON schema cannot be used: a schema should be an object or bool, but it is \[1\]"),
        ("json", '{"type": "objekt"}', 'the JSON schema cannot be used: Unsupported type "objekt"'),
        ("json", '{"$ref": "#/$defs/missing"}', "missing"),
        ("json", '{"enum": []}', "it allows no value"),
        ("json", "false", "it allows no value"),
        ("json", '{"type": "object", "minProperties": 2}', "minProperties"),
        ("json", '{"a": ' * 3000 + "1" + "}" * 3000, "levels deep"),
        ("json", '{"items": ' * 100 + "{}" + "}" * 100, "more than 64 levels deep"),
        ("regex", "(a", "the regular expression cannot be used: Regex parsing error at position 3"),
        ("regex", "a\0", "NUL"),
        ("regex", "(?=a)b", "the regular expression cannot be used"),
        ("regex", r"(a)\1", "the regular expression cannot be used"),
        ("regex", "a" * 300_000, "the regular expression has 300000 characters; the maximum is 262144"),
        ("grammar", "root ::= x", 'the grammar cannot be used: .*Rule "x" is not defined'),
        ("grammar", 'rot ::= "a"', 'root rule with name "root" is not found'),
        ("grammar", "start: missing", "the grammar cannot be used"),
        ("grammar", "start: ò", "the grammar cannot be used: Lark error"),
        ("grammar", "root ::= " + "(" * 9000 + '"a"' + ")" * 9000, "Nest layer"),
        ("grammar", "root ::= root", "allows no answer"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_unusable_grammar_error_names_the_reason_in_one_line(kind: Any, text: str, message: str) -> None:
    grammars = Grammars(TOKENIZER, VOCAB, [EOS])
    with pytest.raises(GrammarError, match=message) as caught:
        grammars.matcher(Grammar(kind, text), [EOS])
    said = str(caught.value)
    assert "\n" not in said and "/project/" not in said and len(said) < 500
    assert isinstance(caught.value, UserError)


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"not": {"type": "string"}}, "'not' is not supported"),
        ({"if": {}, "then": {}}, "'if' is not supported"),
        ({"type": "array", "contains": {}}, "'contains' is not supported"),
        ({"type": "array", "uniqueItems": True}, "'uniqueItems' is not supported"),
        ({"type": "object", "dependentRequired": {"a": ["b"]}}, "'dependentRequired' is not supported"),
        ({"properties": {"a": {"items": [{"not": {}}]}}}, r"'not' is not supported \(at /properties/a/prefixItems/0\)"),
        ({"$ref": "https://example.org/schema"}, "'\\$ref' to another document is not supported"),
        ({"type": "integer", "multipleOf": 5000}, "'multipleOf' of 5000"),
        ({"type": "number", "multipleOf": 0.5}, "'multipleOf' of 0.5"),
        ({"patternProperties": {"^a": {}, "^b": {}}}, "'patternProperties' with other properties"),
        ({"propertyNames": {"pattern": "a"}, "properties": {"a": {}}}, "'propertyNames' with other properties"),
        (
            {"type": "integer", "maximum": 10**30},
            "the bound 10{30} of an integer is not supported; it must be from -92",
        ),
        ({"type": "integer", "exclusiveMinimum": 2**63 - 1}, "the bound 9223372036854775808 of an integer is not supp"),
        ({"type": "number", "maximum": math.inf}, "'maximum' cannot be Infinity"),
        ({"type": "string", "maxLength": 10**30}, "'maxLength' cannot be 10{30}; it must be an integer from 0 to 2147"),
        ({"type": "array", "minItems": True}, "'minItems' cannot be true; it must be an integer from 0 to 2147483647"),
        ({"multipleOf": 0}, "'multipleOf' cannot be 0"),
        ({"type": None}, "'type' cannot be null"),
        ({"items": "a", "minimum": 5, "anyOf": [{}]}, 'a schema should be an object or bool, but it is "a"'),
        ({"enum": [[1]], "items": 1}, "a schema next to 'enum' or 'const' is not valid: 1 is not of type 'object'"),
    ],
    ids=str,
)
def test_unsupported_schema_keywords_are_refused(schema: Any, message: str) -> None:
    with pytest.raises(GrammarError, match=message) as caught:
        Grammars(TOKENIZER, VOCAB, [EOS]).compile(Grammar("json", json.dumps(schema)))
    assert "Check failed" not in str(caught.value)


def test_names_of_properties_and_data_are_no_keywords() -> None:
    schema = {
        "type": "object", "properties": {"not": {"const": {"not": 1}}, "format": {"enum": ["if"]}},
        "required": ["not", "format"], "$defs": {"contains": {"type": "string"}}, "examples": [{"uniqueItems": True}],
    }  # fmt: skip
    grammar, holds = of_schema(schema)
    assert holds(text_of(generate(pair()[0], None, PROMPT, params_of(grammar))))


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "integer", "multipleOf": 5}, ["15", "-5", "0"], ["16"]),
        ({"type": "number", "minimum": 2.5}, ["2.5", "3"], ["2.4", "-3"]),
        ({"type": "string", "format": "date"}, ['"2024-02-28"'], ['"2024-13-01"']),
        ({"type": "string", "minLength": 2.0, "maxLength": 3}, ['"ab"', '"éé"'], ['"a"', '"abcd"']),
        ({"type": "object", "patternProperties": {"^a": {"type": "null"}}}, ['{"a": null}'], ['{"a": 1}']),
        ({"type": "object", "propertyNames": {"pattern": "^a$"}}, ['{"a": 1}'], ['{"b": 1}']),
        ({"$ref": "#/$defs/n", "$defs": {"n": {"anyOf": [{"type": "null"}, {"items": {"$ref": "#/$defs/n"},
          "type": "array"}]}}}, ["null", "[[null], []]"], ["[1]"]),
        ({"prefixItems": [{"const": 1}], "items": False, "type": "array"}, ["[1]"], ["[1, 2]", "[2]"]),
        ({"type": "object", "properties": {"a": {}}, "minProperties": 1}, ['{"a": 1}'], ["{}"]),
    ],
    ids=str,
)  # fmt: skip
def test_a_keyword_that_is_read_is_obeyed(schema: Any, good: list[str], bad: list[str]) -> None:
    grammars = Grammars(TOKENIZER, VOCAB, [EOS])
    for text, holds in [*((t, True) for t in good), *((t, False) for t in bad)]:
        ids = [*TOKENIZER.encode(text), EOS]
        assert (grammars.matcher(Grammar("json", json.dumps(schema)), [EOS]).accept(ids) == len(ids)) == holds, text


def test_pieces_of_a_sentencepiece_vocabulary_are_text_with_spaces() -> None:
    tokenizer = sentencepiece_like()
    size = len(tokenizer) + 3  # rows of the head that no token has
    grammar = Grammar("regex", "( a)+b( é)?")
    assert allowed_of(grammar, "", tokenizer, size) == {1, 2, 5 + 0x20}
    matcher = Grammars(tokenizer, size, ()).matcher(grammar, [tokenizer.eos_token_id])
    assert matcher.accept([2, 1, 5 + 0x61, 3, 1, 5 + 0xC3, 5 + 0xA9, tokenizer.eos_token_id]) == 8


def test_masks_are_those_of_each_start_of_the_draft_that_is_allowed() -> None:
    matcher = Grammars(TOKENIZER, VOCAB, [EOS]).matcher(Grammar("regex", "abc?"), [EOS])
    a, b, c, z = TOKENIZER.encode("abcz")

    def rows(*draft: int) -> list[set[int]]:
        masks, at = masks_of([None, matcher], [draft, draft], words_of(VOCAB))
        logits = torch.zeros(len(at), VOCAB)
        mask_logits_(logits, masks, at)
        assert logits[: len(draft) + 1].isfinite().all(), "a request without a grammar"
        return [set(row.isfinite().nonzero()[:, 0].tolist()) for row in logits[len(draft) + 1 :]]

    everything = set(range(VOCAB))
    assert rows() == [{a}]
    assert rows(a, b, c) == [{a}, {b}, {c, EOS}, {EOS}]
    assert rows(a, b, EOS, c) == [{a}, {b}, {c, EOS}, everything, everything]
    assert rows(a, z, b) == [{a}, {b}, everything, everything]
    assert rows(VOCAB - 1, a) == [{a}, everything, everything]
    assert matcher.accept([a, b]) == 2 and rows(c) == [{c, EOS}, {EOS}], "nothing of the drafts was kept"
    assert matcher.accept([c, z]) == 1
    assert matcher.fresh().accept([a, b, c, EOS]) == 4


def test_a_missing_xgrammar_is_one_sentence_that_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    with pytest.raises(GrammarError, match=r"xgrammar.*dflash-toolkit\[serve\]"):
        generate(pair()[0], None, PROMPT, SamplingParams(grammar=Grammar("regex", "a")))


@pytest.mark.parametrize("tokenizer", [None, object()])
def test_an_unusable_tokenizer_is_an_error(tokenizer: Any) -> None:
    with pytest.raises(GrammarError, match="tokenizer"):
        Grammars(tokenizer, VOCAB, [EOS]).compile(Grammar("regex", "a"))


@pytest.mark.parametrize(("kind", "text", "message"), [("yaml", "a", "kind is 'yaml'"), ("regex", "", "is empty")])
def test_a_grammar_is_of_a_kind_and_has_a_text(kind: Any, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Grammar(kind, text)


# ---- compiled once -------------------------------------------------------------------------------------


def test_a_grammar_is_compiled_once_and_kept_while_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = Grammars(TOKENIZER, VOCAB, [EOS])
    first, second, third = (Grammar("regex", f"{letter}[0-9]+") for letter in "abc")
    assert not grammars.ready(first)
    compiled = grammars.compile(first)
    assert grammars.ready(first) and grammars.compile(first) is compiled
    room = compiled.memory_size_bytes
    monkeypatch.setattr(grammar_module, "CACHED", int(2.5 * room))
    grammars.compile(second)
    grammars.compile(first)
    grammars.compile(third)
    assert [grammars.ready(each) for each in (first, second, third)] == [True, False, True]
    monkeypatch.setattr(grammar_module, "CACHED", 0)
    grammars.compile(second)
    assert [grammars.ready(each) for each in (first, second, third)] == [False, True, False], "the last one is kept"


def test_concurrent_equal_grammars_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    grammars, grammar = Grammars(TOKENIZER, VOCAB, [EOS]), Grammar("regex", "a+")
    begun, go_on, real, times = threading.Event(), threading.Event(), grammars._compile, []

    def slow(asked: Grammar, parsed: str | None) -> Any:
        times.append(asked)
        begun.set()
        assert go_on.wait(60)
        return real(asked, parsed)

    monkeypatch.setattr(grammars, "_compile", slow)
    with ThreadPoolExecutor() as pool:
        first = pool.submit(grammars.compile, grammar)
        assert begun.wait(60)
        others = [pool.submit(grammars.compile, grammar) for _ in range(2)]
        assert not grammars.ready(grammar)
        go_on.set()
        assert {id(future.result()) for future in (first, *others)} == {id(first.result())}
    assert times == [grammar]


def test_a_grammar_that_failed_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    grammars, grammar = Grammars(TOKENIZER, VOCAB, [EOS]), Grammar("regex", "a+")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "xgrammar", None)
        with pytest.raises(GrammarError, match="need xgrammar"):
            grammars.compile(grammar)
        assert not grammars.ready(grammar)
    grammars.compile(grammar)
