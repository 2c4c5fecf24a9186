"""Log-probabilities in replies: one for every token, equal to the target's, and sent with the token's text."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from conftest import EOS, VOCAB
from hypothesis import example, given
from hypothesis import strategies as st
from live_server import chat, client_of, complete, make_engine, refusal, serving
from openai import OpenAI
from token_texts import (
    BYTE_OF,
    BYTES,
    PIECES,
    SPELLING,
    byte_ids,
    cut,
    cuts,
    encode,
    first_stop,
    named,
    sentencepiece_like,
    text_name,
)

from dflash_toolkit import Drafter, SamplingParams, Target, generate
from dflash_toolkit.data.prompts import encode_chat
from dflash_toolkit.generation import TokenLogprobs
from dflash_toolkit.runtime import Progress
from dflash_toolkit.serve import replies
from dflash_toolkit.serve.answer import Answer, AnswerOptions
from dflash_toolkit.serve.logprobs import FLOOR, AnswerToken, TokenStrings, chat_logprobs, text_logprobs

ID_OF = {raw: i for i, raw in BYTE_OF.items()}
# a, b, é and halves of é, nothing else, in about equal parts
HALVES = {str(ID_OF[bytes([byte])]): bias for byte, bias in zip("éab".encode(), (100, 98, 97, 95), strict=True)}
CHARACTERS = {"seed": 2, "temperature": 2.0, "logit_bias": HALVES, "max_tokens": 60}


@pytest.fixture(scope="module")
def client(target: Target, drafter: Drafter) -> Iterator[OpenAI]:
    with serving(make_engine(target, drafter)) as url:
        yield client_of(url)


def rows_of(target: Target, prompt: list[int], answer: list[int]) -> torch.Tensor:
    """Returns the log-probabilities [T, V] at the positions of the answer, from one pass of Hugging Face's model."""
    with torch.inference_mode():
        logits = target.model(torch.tensor([prompt + answer])).logits[0]
    return logits[len(prompt) - 1 : -1].float().log_softmax(-1)


SILENT = {named(token)[0] for token in range(VOCAB) if token not in BYTE_OF}


def spoken(generation: Any) -> list[int]:
    return generation.tokens[:-1] if generation.finish_reason == "stop" else generation.tokens


def streamed(chunks: Any) -> list[tuple[str, Any]]:
    """Returns text and `logprobs` of every chunk with a choice."""
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    return [
        ((c.delta.content if hasattr(c, "delta") else c.text) or "", c.logprobs and c.logprobs.to_dict())
        for c in choices
    ]


# ---- values --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "best"),
    [({"temperature": 0}, None), ({"temperature": 0}, 20), ({"seed": 4}, 0), ({"seed": 4}, 3),
     ({"seed": 4, "top_p": 0.5, "temperature": 0.7}, 20)],
)  # fmt: skip
def test_a_chat_has_the_log_softmax_of_the_target(
    client: OpenAI, target: Target, drafter: Drafter, options: dict[str, Any], best: int | None
) -> None:
    prompt = encode_chat(target.tokenizer, [{"role": "user", "content": "Why is the sky blue?"}])
    params = SamplingParams(max_tokens=20, **{"temperature": 1.0} | options)
    tokens = spoken(generate(target, drafter, prompt, params))
    rows = rows_of(target, prompt, tokens)
    choice = chat(client, logprobs=True, **options, **({} if best is None else {"top_logprobs": best})).choices[0]
    assert choice.logprobs.refusal is None
    assert [(t.token, t.bytes) for t in choice.logprobs.content] == [named(token) for token in tokens]
    for got, row, token in zip(choice.logprobs.content, rows, tokens, strict=True):
        values, ids = row.topk(best or 0)
        assert got.logprob == pytest.approx(float(row[token]), abs=1e-4)
        assert [t.logprob for t in got.top_logprobs] == pytest.approx(values.tolist(), abs=1e-4)
        assert [(t.token, t.bytes) for t in got.top_logprobs] == [named(i) for i in ids.tolist()]


@pytest.mark.parametrize(("ids", "best"), [(False, 0), (False, 5), (True, 1)])
def test_a_completion_has_the_log_softmax_of_the_target(
    client: OpenAI, target: Target, drafter: Drafter, best: int, ids: bool
) -> None:
    text = "é sky"
    prompt = target.tokenizer.encode(text)
    tokens = spoken(generate(target, drafter, prompt, SamplingParams(max_tokens=20)))
    names = [text_name(token) for token in tokens]
    choice = complete(client, prompt=prompt if ids else text, temperature=0, logprobs=best).choices[0]
    got = choice.logprobs
    assert got.tokens == names
    for i, (row, token) in enumerate(zip(rows_of(target, prompt, tokens), tokens, strict=True)):
        assert got.token_logprobs[i] == pytest.approx(float(row[token]), abs=1e-4)
        assert got.top_logprobs[i][names[i]] == got.token_logprobs[i]
        reported = [*reversed(row.topk(best).indices.tolist()), token]  # if names repeat: the chosen, then the best
        assert got.top_logprobs[i] == pytest.approx({text_name(t): float(row[t]) for t in reported}, abs=1e-4)
    for token, offset in zip(tokens, got.text_offset, strict=True):
        raw = BYTE_OF.get(token, b"\xff")
        assert not raw.isascii() or choice.text[offset - len(text)] == raw.decode()


def test_logprobs_are_null_unless_requested(client: OpenAI) -> None:
    assert chat(client, logprobs=False).choices[0].logprobs is None
    assert complete(client).choices[0].logprobs is None
    assert {logprobs for _, logprobs in streamed(chat(client, stream=True))} == {None}


def test_many_logprobs_of_several_whole_answers_are_refused(client: OpenAI) -> None:
    """They would be in memory until the last answer ends; those of one answer are bounded by the context."""
    many = {"n": 128, "prompt": ["a", "b"] * 4, "logprobs": 20, "max_tokens": 400}
    message = refusal(complete, client, **many).message
    assert "1024 answers of up to 400 tokens have 8601600 log-probabilities; request at most 8388608" in message


@pytest.mark.parametrize("ask", [chat, complete])
def test_logprobs_are_encoded_in_a_thread(client: OpenAI, ask: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other clients would wait for those of a hundred answers."""
    threads = list[str]()
    for name in ("chat_logprobs", "text_logprobs"):
        real = getattr(replies, name)
        monkeypatch.setattr(
            replies, name, lambda *args, real=real: threads.append(threading.current_thread().name) or real(*args)
        )
    ask(client, logprobs=True if ask is chat else 2, max_tokens=2)
    assert len(threads) == 1 and threads[0].startswith(("asyncio_", "uvloop_"))


def test_completions_accept_the_name_top_logprobs(client: OpenAI) -> None:
    for extra, same in (
        ({"top_logprobs": 20}, 20),
        ({"top_logprobs": 3, "logprobs": 2}, 2),
        ({"top_logprobs": 0}, None),
    ):
        found = complete(client, temperature=0, extra_body=extra).choices[0]
        assert found == complete(client, temperature=0, logprobs=same).choices[0]
        assert (found.logprobs is None) == (same is None)


def test_bias_and_penalties_do_not_change_reported_logprobs(client: OpenAI, target: Target) -> None:
    prompt = target.tokenizer.encode("The sky")
    got = complete(client, logprobs=0, presence_penalty=1.5, **CHARACTERS).choices[0].logprobs
    tokens = [ID_OF[bytes([int(t[-2:], 16)])] if t.startswith("bytes:") else encode(t)[0] for t in got.tokens]
    assert {str(token) for token in tokens} <= set(HALVES)
    rows = rows_of(target, prompt, tokens)
    expected = [float(row[token]) for row, token in zip(rows, tokens, strict=True)]
    assert got.token_logprobs == pytest.approx(expected, abs=1e-4)


# ---- tokens and their chunks ---------------------------------------------------------------------------------

STOPS = ["never said", ["ab", "é"], "éa", "aa"]
ASKS: list[dict[str, Any]] = [*({**CHARACTERS, "stop": stop} for stop in STOPS), {"seed": 5}, {"temperature": 0}]


@pytest.mark.parametrize("options", ASKS)
@pytest.mark.sampled
def test_a_stream_has_every_token_once_with_its_text(client: OpenAI, options: dict[str, Any]) -> None:
    for ask in (complete, chat):  # an uncached prompt would be summed in another order
        ask(client, **options)
    whole = complete(client, logprobs=2, **options).choices[0]
    sent, found = len("The sky"), {name: [] for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")}
    *chunks, (last_text, last) = streamed(complete(client, logprobs=2, stream=True, **options))
    assert (last_text, last) == ("", None)
    for text, logprobs in chunks:
        for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
            assert sent <= offset < sent + len(text) + (token in SILENT)
        sent += len(text)
        for name, values in found.items():
            values += logprobs[name]
    assert found == whole.logprobs.to_dict()
    assert sent == len("The sky" + whole.text)

    whole = chat(client, logprobs=True, top_logprobs=2, **options).choices[0]
    first, *chunks, last_chunk = streamed(chat(client, logprobs=True, top_logprobs=2, stream=True, **options))
    assert (first, last_chunk) == (("", {"content": [], "refusal": None}), ("", None))
    assert [t for _, logprobs in chunks for t in logprobs["content"]] == whole.logprobs.to_dict()["content"]
    assert "".join(text for text, _ in chunks) == whole.message.content


@pytest.mark.parametrize("stop", STOPS)
def test_tokens_cut_by_a_stop_string_have_no_logprobs(client: OpenAI, stop: Any) -> None:
    choice = chat(client, logprobs=True, stop=stop, **CHARACTERS).choices[0]
    assert (choice.finish_reason == "stop") == (stop != STOPS[0])
    raw = b"".join(bytes(t.bytes) for t in choice.logprobs.content)
    assert raw.decode(errors="replace") == choice.message.content
    if stop == STOPS[0]:
        assert "é" in choice.message.content and "\ufffd" in choice.message.content
        assert len(choice.logprobs.content) == 60


def test_end_token_has_no_logprobs(client: OpenAI) -> None:
    choice = complete(client, logprobs=1, temperature=0, logit_bias={str(EOS): 100}).choices[0]
    assert (choice.finish_reason, choice.text) == ("stop", "")
    assert choice.logprobs.to_dict() == {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


def play(ids: list[int], stops: list[str], reason: Any, steps: list[list[int]]) -> tuple[str, list[AnswerToken]]:
    """Returns the text and tokens that an answer sends; checks that each token comes with its text."""
    answer, text, tokens = Answer(BYTES, 1, AnswerOptions(stops=stops, strings=SPELLING)), "", []
    for i, step in enumerate(steps):
        news = tuple(TokenLogprobs(-float(token), ()) for token in step)
        piece = answer.add(Progress(tuple(step), None, reason if i == len(steps) - 1 else None, news))
        for t in piece.tokens:
            silent = t.token not in BYTE_OF
            assert len(text) <= t.start < len(text + piece.text) + silent
        text += piece.text
        tokens += piece.tokens
        if answer.finish_reason:
            break
    return text, tokens


@given(ids=byte_ids, stops=st.lists(st.text("ab é", min_size=1, max_size=3), max_size=2), cuts=cuts)
@example(ids=encode("ab😀é"), stops=["é"], cuts=[1, 2, 3, 4, 5])
@example(ids=[*encode("a")[:1], ID_OF[b"\xf0"], EOS, 299, *encode("b")], stops=["bc"], cuts=[1, 2, 3])
def test_sent_tokens_match_the_sent_text(ids: list[int], stops: list[str], cuts: list[int]) -> None:
    if not ids:
        return
    text, tokens = play(ids, stops, "length", cut(ids, cuts))
    assert (text, tokens) == play(ids, stops, "length", [[token] for token in ids])
    assert [t.token for t in tokens] == ids[: len(tokens)]
    assert [t.logprobs.chosen for t in tokens] == [-float(token) for token in ids[: len(tokens)]]
    raw = b""
    for t in tokens:
        if t.token in BYTE_OF:  # it starts with the character that holds its first byte
            assert t.start == len((raw + BYTE_OF[t.token]).decode(errors="replace")) - 1
            raw += BYTE_OF[t.token]
    assert raw.decode(errors="replace") == text
    whole = BYTES.decode(ids, skip_special_tokens=True)
    assert text == first_stop(whole, stops)
    assert len(tokens) == len(ids) or text != whole


def test_token_without_decoded_text_leaves_at_the_end() -> None:
    answer = Answer(PIECES, 1, AnswerOptions(strings=TokenStrings(PIECES)))
    piece = answer.add(Progress((1,), None, "length", (TokenLogprobs(-1.0, ()),)))
    assert (piece.text, [t.token for t in piece.tokens]) == ("", [1])


# ---- names ---------------------------------------------------------------------------------------------------


def test_joined_token_bytes_equal_the_text() -> None:
    for i in range(VOCAB):
        assert SPELLING[i].raw == BYTE_OF.get(i)
    pieces = TokenStrings(PIECES)
    text = "b a éb😀é a"
    ids = [3, 2, 4, 3, *(5 + byte for byte in "😀é".encode()), 2]
    assert b"".join(pieces[i].raw or b"" for i in ids).decode() == "b a éb😀é a" == text
    assert (pieces[5 + 0xF0].name(), pieces[5 + ord("x")].name(), pieces[1].raw) == ("\\xf0", "x", b" ")
    assert pieces[sentencepiece_like().eos_token_id].raw is None


def test_token_with_partial_character_keeps_its_ascii() -> None:
    class Half:
        all_special_ids, added_tokens_decoder = (), {}

        def encode(self, text: str, **_: Any) -> list[int]:
            return [0]

        def decode(self, ids: list[int], **_: Any) -> str:
            return b"".join([b"a", b"x\xe2"][i] for i in ids).decode(errors="replace")

        def convert_ids_to_tokens(self, token: int) -> str:
            return "xâ"

    token = AnswerToken(1, 0, TokenLogprobs(-torch.inf, ((0, -1.0), (1, -torch.inf))))
    strings = TokenStrings(Half())
    (entry,) = chat_logprobs(strings, [token])["content"]
    assert (entry["token"], entry["bytes"], entry["logprob"]) == ("x\\xe2", [120, 226], FLOOR)
    text = text_logprobs(strings, [token], 7)
    assert text == {
        "tokens": ["bytes:x\\xe2"], "token_logprobs": [FLOOR], "text_offset": [7],
        "top_logprobs": [{"a": -1.0, "bytes:x\\xe2": FLOOR}],
    }  # fmt: skip
