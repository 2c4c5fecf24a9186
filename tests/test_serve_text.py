"""Detokenising and stop strings: any chunking of the tokens gives the same text."""

from conftest import make_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from serve.text import Detokenizer, StopScanner

TOKENIZER = make_tokenizer()
TEXT = st.text(alphabet="aab é世🙂\n", max_size=40)


def chunked(data: st.DataObject, tokens: list[int]) -> list[list[int]]:
    chunks = []
    while tokens:
        n = data.draw(st.integers(1, len(tokens)))
        chunks.append(tokens[:n])
        tokens = tokens[n:]
    return chunks


@settings(max_examples=200, deadline=None)
@given(TEXT, st.data())
def test_the_pieces_of_any_chunking_join_to_the_whole_text(text: str, data: st.DataObject) -> None:
    tokens = TOKENIZER(text).input_ids
    detokenizer = Detokenizer(TOKENIZER)
    pieces = [detokenizer.push(chunk) for chunk in chunked(data, tokens)]
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) + detokenizer.flush() == text


def test_an_answer_cut_inside_a_character_ends_as_the_tokenizer_decodes_it() -> None:
    tokens = TOKENIZER("a🙂").input_ids[:-1]
    detokenizer = Detokenizer(TOKENIZER)
    assert detokenizer.push(tokens) + detokenizer.flush() == TOKENIZER.decode(tokens)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.text("ab", max_size=4), max_size=12), st.lists(st.text("ab", min_size=1, max_size=4), max_size=4))
def test_what_is_sent_is_the_text_before_the_first_stop_string(pieces: list[str], stops: list[str]) -> None:
    whole = "".join(pieces)
    cuts = [whole.find(stop) for stop in stops if stop in whole]
    scanner = StopScanner(stops)
    sent = "".join(scanner.push(piece) for piece in pieces) + scanner.push("", last=True)
    assert scanner.stopped == bool(cuts)
    # a stop string that ends earlier may begin later than another that is still growing
    ends = [whole.find(stop) + len(stop) for stop in stops if stop in whole]
    if cuts:
        assert whole.startswith(sent) and len(sent) <= max(cuts)
        assert any(whole[len(sent) :].startswith(stop) for stop in stops) and len(sent) <= min(ends)
    else:
        assert sent == whole


def test_the_start_of_a_stop_string_is_held_back_until_it_is_decided() -> None:
    scanner = StopScanner(["END"])
    assert scanner.push("a EN") == "a "
    assert scanner.push("x") == "ENx"
    assert scanner.push(" END more") == " " and scanner.stopped
    assert scanner.push("more") == ""
