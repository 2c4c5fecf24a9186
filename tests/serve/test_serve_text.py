"""Incremental text equals the text decoded at once, however it is cut into pieces."""

import itertools
from typing import Any

import pytest
from conftest import EOS, VOCAB
from hypothesis import example, given
from hypothesis import strategies as st
from token_texts import BYTES, PIECES, byte_ids, cut, cuts, encode, first_stop
from transformers.convert_slow_tokenizer import bytes_to_unicode

from dflash_toolkit.generation import Step
from dflash_toolkit.runtime import Progress
from dflash_toolkit.serve.answer import Answer, AnswerOptions, speculative_decoding
from dflash_toolkit.serve.text import Detokenizer, StopScanner

RAW = {byte: BYTES.convert_tokens_to_ids(c) for byte, c in bytes_to_unicode().items()}


words = st.sampled_from([[1], [2], [3], [4], [5 + 0xC3, 5 + 0xA9], [5 + b for b in "😀".encode()], [261]])


# runs of bytes without a valid prefix: a decoder with byte fallback replaces an invalid run as a whole, and so would
# take back valid characters at its start, see `Detokenizer`
garbage = st.tuples(
    st.sampled_from([0x80, 0xA9, 0xBF, 0xFF]),
    st.lists(st.integers(0x80, 0xFF) | st.sampled_from([0xEF, 0xBF, 0xBD, 0xC3, 0xA9]), max_size=24),
).map(lambda run: [3, 5 + run[0], *(5 + byte for byte in run[1]), 3])
valid = st.text(max_size=6).map(lambda text: [5 + byte for byte in text.encode()])


@given(parts=st.lists(words | valid | garbage, max_size=8), cuts=cuts)
@example(parts=[[261, 2, 261, 2, 1, 2]], cuts=[1, 2, 3, 4, 5])
@example(parts=[[5 + byte for byte in ("\ufffd" * 9).encode()], [3]], cuts=[])
@example(parts=[[3], [5 + 0xFF, *[5 + 0xC3, 5 + 0xA9] * 6], [3]], cuts=[])
def test_sentencepiece_pieces_equal_the_whole_text(parts: list[list[int]], cuts: list[int]) -> None:
    ids = list(itertools.chain.from_iterable(parts))
    detokenizer = Detokenizer(PIECES)
    sent = "".join(detokenizer.add(piece) for piece in cut(ids, cuts))
    assert sent + detokenizer.finish() == PIECES.decode(ids, skip_special_tokens=True)


long_runs = st.lists(st.sampled_from([*"\ufffd😀é".encode(), 0xFF, 0x80, 0xF0, 0x61]).map(RAW.__getitem__), max_size=60)


@given(ids=byte_ids | long_runs, cuts=cuts)
@example(ids=encode("😀é"), cuts=[1, 2, 3, 5])
@example(ids=[EOS, *encode("a"), 299, EOS, *encode("é")], cuts=[1, 2, 3, 4, 5])
@example(ids=encode("\ufffd" * 9), cuts=[])
@example(ids=[RAW[byte] for byte in [0xFF, 0xFF, 0xFF, 0xF0, *"😀".encode() * 3, *b"\x9f\x98\x80" * 3]], cuts=[])
def test_pieces_equal_the_whole_text_and_final_text_is_sent(ids: list[int], cuts: list[int]) -> None:
    whole = BYTES.decode(ids, skip_special_tokens=True)
    detokenizer = Detokenizer(BYTES)
    sent, seen = "", 0
    for piece in cut(ids, cuts):
        sent += detokenizer.add(piece)
        seen += len(piece)
        assert whole.startswith(sent), "half a character was sent"
        assert len(sent) >= len(BYTES.decode(ids[:seen], skip_special_tokens=True)) - 8, "final text waits"
    assert sent + detokenizer.finish() == whole


class Counted:
    """Counts the tokens that a tokenizer decodes."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self.decoded = tokenizer, 0

    def decode(self, ids: list[int], **options: Any) -> str:
        self.decoded += len(ids)
        return self._tokenizer.decode(ids, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


@pytest.mark.parametrize(
    ("tokenizer", "ids"),
    [
        *(
            (BYTES, [RAW[byte] for byte in run])
            for run in ("ab é→😀".encode(), "\ufffd".encode(), b"\xff", b"\xf0\x9f")
        ),
        *((PIECES, [5 + byte for byte in run]) for run in ("\ufffd".encode(), b"\xff", b"\xff\xc3\xa9")),
        (BYTES, [VOCAB - 1]),  # an id without a token
    ],
)
def test_decoding_work_per_token_is_bounded(tokenizer: Any, ids: list[int]) -> None:
    counted = Counted(tokenizer)
    detokenizer = Detokenizer(counted)
    answer = (ids * 480)[:480]  # whole characters
    sent = "".join(detokenizer.add([token]) for token in answer)
    assert counted.decoded <= 80 * len(answer)
    assert sent + detokenizer.finish() == tokenizer.decode(answer)


@given(
    text=st.text(alphabet="abc", max_size=14),
    stops=st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=4),
    cuts=cuts,
    include=st.booleans(),
)
@example(text="abc", stops=["abc", "b"], cuts=[], include=False)
@example(text="aab", stops=["ab"], cuts=[1, 2], include=False)
def test_stop_string_is_found_in_any_split_of_the_text(
    text: str, stops: list[str], cuts: list[int], include: bool
) -> None:
    scanner = StopScanner(stops, include)
    expected = first_stop(text, stops, include)
    sent = ""
    for piece in cut(text, cuts):
        sent += scanner.add(piece)
        assert expected.startswith(sent), "part of a stop string was sent"
    assert sent + scanner.finish() == expected
    assert scanner.stopped == (first_stop(text, stops) != text)
    assert first_stop(text, stops, include=True) == first_stop(text, stops) + (scanner.found or "")


def test_text_is_held_back_only_while_it_may_be_a_stop_string() -> None:
    scanner = StopScanner(["END"])
    assert [scanner.add(c) for c in "xENyE"] == ["x", "", "", "ENy", ""]
    assert scanner.finish() == "E"


@given(
    text=st.text(alphabet="abé😀", max_size=10),
    stops=st.lists(st.text(alphabet="abé", min_size=1, max_size=3), max_size=3),
    reason=st.sampled_from(["stop", "length"]),
    cuts=cuts,
    include=st.booleans(),
    least=st.integers(0, 6),
)
@example(text="aaa", stops=["a"], reason="length", cuts=[], include=False, least=2)
def test_answer_does_not_depend_on_how_steps_split_it(
    text: str, stops: list[str], reason: Any, cuts: list[int], include: bool, least: int
) -> None:
    ids = [*encode(text), EOS] if reason == "stop" else encode(text + "a")

    def play(steps: list[list[int]]) -> tuple[str, str | None, int]:
        answer = Answer(BYTES, 1, AnswerOptions(stops=stops, include_stop=include, least=least))
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
    assert played[0] == first_stop(whole, stops, include, least)
    assert played[1] == ("stop" if first_stop(whole, stops, least=least) != whole else reason)


def test_draft_metrics_equal_those_of_vllm() -> None:
    answer = Answer(BYTES, 1, AnswerOptions(trace=True))
    for drafted, accepted in ((None, 0), (7, 3), (7, 0), (0, 0), (2, 2), (7, 3)):
        tokens = tuple(encode("a" * (accepted + 1)))
        answer.add(Progress(tokens, None if drafted is None else Step(drafted, accepted, tokens), None))
    assert speculative_decoding(answer, 7, True) == {
        "mean_acceptance_length": 3.0, "draft_acceptance_rate": 8 / 23,
        "acceptance_histogram": [1, 0, 1, 2, 0, 0, 0, 0],
        "num_spec_steps": 4, "num_accepted_draft_tokens": 8, "num_draft_tokens": 23, "num_spec_tokens": 7,
        "per_step_accepted": [3, 0, 2, 3], "per_step_drafted": [7, 7, 2, 7],
    }  # fmt: skip
    none = speculative_decoding(Answer(BYTES, 1, AnswerOptions()), 1, False)
    assert (none["mean_acceptance_length"], none["draft_acceptance_rate"], none["num_spec_steps"]) == (1.0, 0.0, 0)


@pytest.mark.parametrize(("reason", "include", "text"), [("stop", 0, "a"), ("stop", 1, "ab"), ("length", 0, "ab")])
def test_stop_token_text_is_returned_only_with_include_stop(reason: Any, include: bool, text: str) -> None:
    answer = Answer(BYTES, 1, AnswerOptions(include_stop=include))
    assert answer.add(Progress(tuple(encode("ab")), None, reason)).text == text
    assert answer.completion_tokens == 2


def test_text_after_a_prompt_keeps_its_space() -> None:
    """SentencePiece drops the space of the token that starts a text; a completion does not start one."""
    before = [PIECES.convert_tokens_to_ids("▁a")]
    assert Detokenizer(PIECES).add([2, 3]) == "ab"
    assert Detokenizer(PIECES, before).add([2, 3]) == " ab"
    scanned = Answer(PIECES, 1, AnswerOptions(stops=[" ab"], before=before))
    assert scanned.add(Progress([2, 3, 2], Step(2, 2, (2, 3, 2)), None)).text == "" and scanned.finish_reason == "stop"
