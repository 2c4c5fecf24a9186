"""Incremental text: whatever the pieces, the result is that of decoding everything at once."""

import itertools
from typing import Any

import pytest
from conftest import EOS, VOCAB, make_tokenizer
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from dflash_toolkit.decode import Step
from serve.answer import Answer
from serve.engine import Progress
from serve.text import Detokenizer, StopScanner

BYTES = make_tokenizer()


def sentencepiece_like() -> PreTrainedTokenizerFast:
    """Llama 2's decoder: `▁` is a space except at the start, characters outside the vocabulary are bytes."""
    vocab = {"<unk>": 0, "▁": 1, "▁a": 2, "b": 3, "▁é": 4} | {f"<0x{i:02X}>": 5 + i for i in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<|end|>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


PIECES = sentencepiece_like()


def encode(text: str) -> list[int]:
    return BYTES.encode(text)


def cut(items: Any, cuts: list[int]) -> list[Any]:
    """`items` in pieces that end at the given places (modulo the length)."""
    places = sorted({0, len(items), *(c % (len(items) + 1) for c in cuts)})
    return [items[a:b] for a, b in itertools.pairwise(places)]


texts = st.text(alphabet="ab é→😀\ufffd", max_size=12)
byte_ids = st.lists(st.integers(0, VOCAB - 1), max_size=20) | texts.map(encode)
cuts = st.lists(st.integers(0, 100), max_size=6)


@given(ids=byte_ids, cuts=cuts)
@example(ids=encode("😀é"), cuts=[1, 2, 3, 5])
@example(ids=[EOS, *encode("a"), 299, EOS, *encode("é")], cuts=[1, 2, 3, 4, 5])
def test_the_pieces_joined_are_the_whole_text(ids: list[int], cuts: list[int]) -> None:
    whole = BYTES.decode(ids, skip_special_tokens=True)
    detokenizer = Detokenizer(BYTES)
    sent = ""
    for piece in cut(ids, cuts):
        sent += detokenizer.add(piece)
        assert whole.startswith(sent), "half a character was sent"
    assert sent + detokenizer.finish() == whole


# bytes only as whole characters: a decoder with byte fallback reads an invalid run as a unit, and so takes back
# what it wrote for the valid characters at its start
words = st.sampled_from([[1], [2], [3], [4], [5 + 0xC3, 5 + 0xA9], [5 + b for b in "😀".encode()], [261]])


@given(ids=st.lists(words, max_size=8).map(lambda parts: [i for part in parts for i in part]), cuts=cuts)
@example(ids=[261, 2, 261, 2, 1, 2], cuts=[1, 2, 3, 4, 5])
def test_a_decoder_that_strips_the_first_space_strips_no_other(ids: list[int], cuts: list[int]) -> None:
    detokenizer = Detokenizer(PIECES)
    sent = "".join(detokenizer.add(piece) for piece in cut(ids, cuts))
    assert sent + detokenizer.finish() == PIECES.decode(ids, skip_special_tokens=True)


def first_stop(text: str, stops: list[str]) -> str:
    """The definition: read character by character, cut at the first stop string that is complete."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)]
    return text


@given(
    text=st.text(alphabet="abc", max_size=14),
    stops=st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=4),
    cuts=cuts,
)
@example(text="abc", stops=["abc", "b"], cuts=[])
@example(text="aab", stops=["ab"], cuts=[1, 2])
def test_a_stop_string_is_found_wherever_the_text_is_cut(text: str, stops: list[str], cuts: list[int]) -> None:
    scanner = StopScanner(stops)
    expected = first_stop(text, stops)
    sent = ""
    for piece in cut(text, cuts):
        sent += scanner.add(piece)
        assert expected.startswith(sent), "part of a stop string was sent"
    assert sent + scanner.finish() == expected
    assert scanner.stopped == (expected != text)


def test_text_is_held_back_no_longer_than_it_may_be_a_stop_string() -> None:
    scanner = StopScanner(["END"])
    assert [scanner.add(c) for c in "xENyE"] == ["x", "", "", "ENy", ""]
    assert scanner.finish() == "E"


@given(
    text=st.text(alphabet="abé😀", max_size=10),
    stops=st.lists(st.text(alphabet="abé", min_size=1, max_size=3), max_size=3),
    reason=st.sampled_from(["stop", "length"]),
    cuts=cuts,
)
def test_an_answer_does_not_depend_on_the_steps_that_brought_it(
    text: str, stops: list[str], reason: Any, cuts: list[int]
) -> None:
    ids = [*encode(text), EOS] if reason == "stop" else encode(text + "a")

    def play(steps: list[list[int]]) -> tuple[str, str | None, int]:
        answer = Answer(BYTES, 1, stops)
        sent = ""
        for i, tokens in enumerate(steps):
            last = reason if i == len(steps) - 1 else None
            sent += answer.add(Progress(tuple(tokens), Step(7, len(tokens), tuple(tokens)), last)).text
            if answer.finish_reason:
                break
        return sent, answer.finish_reason, answer.completion_tokens

    played = play(cut(ids, cuts))
    assert played == play([[token] for token in ids])
    whole = BYTES.decode(ids, skip_special_tokens=True)
    assert played[0] == first_stop(whole, stops)
    assert played[1] == ("stop" if played[0] != whole else reason)


@pytest.mark.parametrize(("reason", "text"), [("stop", "a"), ("length", "ab")])
def test_a_stop_token_is_no_text_even_when_it_has_some(reason: Any, text: str) -> None:
    answer = Answer(BYTES, 1, ())
    assert answer.add(Progress(tuple(encode("ab")), None, reason)).text == text
    assert answer.completion_tokens == 2
