"""Echoed prompts and their log-probabilities: one for every token of the text, equal to the target's."""

import copy
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from conftest import EOS
from hypothesis import example, given
from live_server import MESSAGES, chat, client_of, complete, joined, make_engine, refusal, serving
from openai import OpenAI
from token_texts import BYTE_OF, BYTES, PIECES, SPELLING, byte_ids, encode, text_name

from dflash_toolkit import Drafter, Target
from dflash_toolkit.data.prompts import encode_chat
from dflash_toolkit.serve.logprobs import Echo, TokenStrings

TEXT = "Why é→<|end|> 😀?"  # 21 tokens, in chunks of 8
FIELDS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


@pytest.fixture(scope="module")
def client(target: Target, drafter: Drafter) -> Iterator[OpenAI]:
    with serving(make_engine(target, drafter, max_num_batched_tokens=16)) as url:
        yield client_of(url)


@pytest.fixture(scope="module")
def exact(target: Target) -> Any:
    """Returns Hugging Face's model of the target in float64."""
    return copy.deepcopy(target.model).double()


def rows_of(exact: Any, ids: list[int]) -> torch.Tensor:
    """Returns the log-probabilities [T, V] of the next token after each token."""
    with torch.inference_mode():
        return exact(torch.tensor([ids])).logits[0].log_softmax(-1)


def check(exact: Any, logprobs: Any, ids: list[int], best: int) -> None:
    """Checks a completion's `logprobs` for all of these tokens."""
    names, rows = [text_name(token) for token in ids], rows_of(exact, ids)
    assert logprobs.tokens == names
    assert (logprobs.token_logprobs[0], logprobs.top_logprobs[0]) == (None, None)
    assert all(len(getattr(logprobs, name)) == len(ids) for name in FIELDS)
    for row, token, got, top in zip(
        rows, ids[1:], logprobs.token_logprobs[1:], logprobs.top_logprobs[1:], strict=False
    ):
        assert got == pytest.approx(float(row[token]), abs=1e-4) and top[text_name(token)] == got
        reported = [*reversed(row.topk(best).indices.tolist()), token]  # if names repeat: the chosen, then the best
        assert top == pytest.approx({text_name(t): float(row[t]) for t in reported}, abs=1e-4)


@pytest.mark.parametrize("form", ["text", "ids"])
@pytest.mark.parametrize("length", [0, 1, 5])
@pytest.mark.parametrize("best", [0, 1, 5])
@pytest.mark.sampled
def test_an_echo_is_the_log_softmax_of_the_target(
    client: OpenAI, exact: Any, form: str, length: int, best: int
) -> None:
    prompts = [encode(text) for text in (TEXT, "a", "two words")]
    fields: Any = prompts if form == "ids" else [TEXT, "a", "two words"]
    reply = complete(
        client, prompt=fields, echo=True, logprobs=best, max_tokens=length, temperature=0,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )  # fmt: skip
    for ids, choice in zip(prompts, reply.choices, strict=True):
        assert choice.prompt_token_ids == ids and len(choice.token_ids) == length
        assert choice.text.startswith(BYTES.decode(ids)) and (length or choice.text == BYTES.decode(ids))
        assert choice.finish_reason == "length"
        check(exact, choice.logprobs, ids + choice.token_ids, best)
        assert choice.logprobs.text_offset[: len(ids)] == offsets_of(ids)
        assert all(offset >= len(BYTES.decode(ids)) for offset in choice.logprobs.text_offset[len(ids) :])
    sums = reply.usage.prompt_tokens, reply.usage.completion_tokens
    assert sums == (sum(map(len, prompts)), length * len(prompts))


def test_echo_without_logprobs_or_answer(client: OpenAI) -> None:
    for prompt in (TEXT, encode(TEXT)):
        choice = complete(client, prompt=prompt, echo=True, max_tokens=0).choices[0]
        assert (choice.text, choice.logprobs, choice.finish_reason) == (TEXT, None, "length")
    text = complete(client, prompt=TEXT, seed=1, max_tokens=9).choices[0].text
    assert complete(client, prompt=TEXT, seed=1, max_tokens=9, echo=True).choices[0].text == TEXT + text


def test_a_prompt_alone_may_fill_the_context(client: OpenAI, exact: Any) -> None:
    ids = [i % 250 for i in range(512)]  # the target's context
    reply = complete(client, prompt=ids, echo=True, logprobs=1, max_tokens=0)
    check(exact, reply.choices[0].logprobs, ids, 1)
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (512, 0)
    refused = refusal(complete, client, prompt=ids, echo=True, logprobs=1, max_tokens=1)
    assert refused.code == "context_length_exceeded"


def test_echo_reports_the_end_token_last(client: OpenAI, exact: Any) -> None:
    """lm-eval drops the last token, which it assumes to be the answer's."""
    ends = {"logit_bias": {str(EOS): 100}, "max_tokens": 1, "temperature": 0}
    choice = complete(client, prompt=TEXT, echo=True, logprobs=1, **ends).choices[0]
    assert (choice.text, choice.finish_reason) == (TEXT, "stop")
    check(exact, choice.logprobs, [*encode(TEXT), EOS], 1)
    assert choice.logprobs.text_offset[-1] == len(TEXT)


def test_stop_string_in_the_echoed_prompt_is_ignored(client: OpenAI) -> None:
    whole = complete(client, prompt="ab", temperature=0, echo=True).choices[0].text
    stop = next(letter for letter in whole[2:] if letter.isascii())
    choice = complete(client, prompt="ab" + stop, temperature=0, echo=True, stop=stop, logprobs=0).choices[0]
    assert choice.text.startswith("ab" + stop) and stop not in choice.text[3:]
    assert choice.logprobs.tokens[:3] == ["a", "b", text_name(encode(stop)[0])]


@pytest.mark.parametrize("options", [{"max_tokens": 0}, {"max_tokens": 12, "seed": 2}, {"max_tokens": 3, "n": 2}])
def test_a_stream_begins_with_the_prompt(client: OpenAI, options: dict[str, Any]) -> None:
    options = {"prompt": [TEXT, "b"], "echo": True, "logprobs": 2, "temperature": 0, **options}
    whole = complete(client, **options)
    chunks = list(complete(client, stream=True, **options))
    for i, choice in enumerate(whole.choices):
        mine = [chunk for chunk in chunks if chunk.choices[0].index == i]
        assert mine[0].choices[0].text.startswith(TEXT if i < len(whole.choices) / 2 else "b")
        assert joined(mine)[:2] == (choice.text, choice.finish_reason)
        for name in FIELDS:
            parts = [getattr(chunk.choices[0].logprobs, name) for chunk in mine if chunk.choices[0].logprobs]
            assert [*itertools.chain(*parts)] == getattr(choice.logprobs, name)


# ---- vLLM's field --------------------------------------------------------------------------------------------


def check_field(exact: Any, found: Any, ids: list[int], best: int) -> None:
    assert found[0] is None and len(found) == len(ids)
    for row, token, entries in zip(rows_of(exact, ids), ids[1:], found[1:], strict=False):
        assert entries.keys() == {str(token), *map(str, row.topk(best).indices.tolist())}
        assert next(iter(entries)) == str(token), "the token itself is the first"
        for key, entry in entries.items():
            assert entry["logprob"] == pytest.approx(float(row[int(key)]), abs=1e-4)
            assert entry["rank"] == int((row >= row[int(key)]).sum())
            assert entry["decoded_token"] == text_name(int(key))


@pytest.mark.parametrize("best", [0, 2, 20])
def test_prompt_logprobs_equal_the_target(client: OpenAI, target: Target, exact: Any, best: int) -> None:
    fields = {"extra_body": {"prompt_logprobs": best}}
    completion = complete(client, prompt=[TEXT, "b"], max_tokens=2, **fields)
    for text, choice in zip((TEXT, "b"), completion.choices, strict=True):
        check_field(exact, choice.prompt_logprobs, encode(text), best)
        assert choice.logprobs is None and not choice.text.startswith(text)
    reply = chat(client, max_tokens=2, n=2, **fields)
    check_field(exact, reply.prompt_logprobs, encode_chat(target.tokenizer, MESSAGES), best)
    assert not hasattr(reply.choices[0], "prompt_logprobs")


def test_logprobs_and_prompt_logprobs_keep_their_counts(client: OpenAI, exact: Any) -> None:
    for best, field in ((1, 4), (4, 1)):
        fields = {"extra_body": {"prompt_logprobs": field}}
        choice = complete(client, prompt=TEXT, echo=True, logprobs=best, max_tokens=0, **fields).choices[0]
        check(exact, choice.logprobs, encode(TEXT), best)
        check_field(exact, choice.prompt_logprobs, encode(TEXT), field)
    plain = complete(client, prompt=TEXT, max_tokens=0, extra_body={"prompt_logprobs": 1}).choices[0]
    assert (plain.text, plain.finish_reason) == ("", "length")
    check_field(exact, plain.prompt_logprobs, encode(TEXT), 1)


def test_contradicting_parameters_get_400(client: OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    assert refusal(complete, client, max_tokens=0).param == "max_tokens"
    assert refusal(chat, client, extra_body={"echo": True}).param == "echo"
    assert refusal(complete, client, stream=True, extra_body={"prompt_logprobs": 0}).param == "prompt_logprobs"
    monkeypatch.setattr("dflash_toolkit.serve.service.MAX_PROMPT_LOGPROBS", 60)
    complete(client, prompt=["abcde"] * 2, n=2, echo=True, logprobs=2, max_tokens=0)
    error = refusal(complete, client, prompt=["abcde", "abcdef"], n=2, echo=True, logprobs=2, max_tokens=0)
    assert (error.status_code, error.param) == (400, "echo") and "66 log-probabilities" in error.message
    assert refusal(chat, client, extra_body={"prompt_logprobs": 20}).param == "prompt_logprobs"


# ---- offsets -------------------------------------------------------------------------------------------------


def offsets_of(ids: list[int]) -> list[int]:
    """Returns the offsets of tokens if the text shows all of them: of the character with the token's first byte."""
    found, raw = [], b""
    for token in ids:
        silent = token not in BYTE_OF
        found.append(len((raw + (b"x" if silent else BYTE_OF[token][:1])).decode(errors="replace")) - 1)
        raw += BYTES.decode([token]).encode() if silent else BYTE_OF[token]
    return found


@given(ids=byte_ids)
@example(ids=[*encode("a😀")[:-1], EOS, *encode("é")])
def test_offsets_match_token_starts(ids: list[int]) -> None:
    ids = [token for token in ids if SPELLING[token].text != ""]  # tokens without text
    assert Echo(ids, BYTES.decode(ids), 0).offsets(SPELLING) == offsets_of(ids)


def test_offsets_ignore_tokens_added_by_the_tokenizer() -> None:
    strings = TokenStrings(PIECES)
    end, smile = PIECES.eos_token_id, [5 + byte for byte in "😀".encode()]
    ids = [end, 2, 3, *smile, 4, end, 3]  # ▁a b 😀 ▁é; a text does not begin with a space
    assert Echo(ids, "ab😀 é<|end|>b", 0).offsets(strings) == [0, 0, 1, 2, 2, 2, 2, 3, 5, 12]
    assert Echo([2, 4], "a é", 0).offsets(strings) == [0, 1]
    assert Echo([2, 4, 4], " a é", 0).offsets(strings) == [0, 2, 4], "not after the end of the text"
