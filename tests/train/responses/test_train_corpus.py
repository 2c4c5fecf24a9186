"""Token ids in one file that all processes map: what is written is read, nothing is half there, and little is held."""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_toolkit import UserError
from dflash_toolkit.train.responses.corpus import Corpus, CorpusWriter
from dflash_toolkit.train.responses.file import _lines, _row_of
from dflash_toolkit.train.responses.rows import Row


@st.composite
def rows(draw: st.DrawFn) -> list[Row]:
    """Rows with one span, several, or none, of any length."""
    found = []
    for i in range(draw(st.integers(1, 6))):
        edges = sorted(draw(st.sets(st.integers(1, 30), min_size=2, max_size=6)))
        spans = tuple(zip(edges[::2], edges[1::2], strict=False))
        tokens = list(range(100 * i, 100 * i + edges[-1] + draw(st.integers(0, 3))))
        found.append(Row(i, edges[0], tokens, spans if draw(st.booleans()) else ()))
    return found


@settings(max_examples=60, deadline=None)
@given(rows(), st.integers(1, 35))
def test_corpus_properties_equal_those_of_its_rows(made: list[Row], length: int) -> None:
    corpus, cut = Corpus.of_rows(made), [row.cut(length) for row in made]
    assert list(corpus) == made and corpus.response_tokens == sum(row.response_tokens for row in made)
    assert corpus.lengths.tolist() == [len(row.tokens) for row in made]
    shorter = corpus.cut(length)
    assert corpus.responses == sum(len(row.supervised) for row in made if row.response_tokens)
    assert shorter.response_lengths.tolist() == [row.response_tokens for row in cut]
    assert [len(row.tokens) for row in shorter] == [len(row.tokens) for row in cut]
    assert [row.response_tokens for row in shorter] == [row.response_tokens for row in cut]
    kept = [row for row in cut if row.has_anchor]
    anchored = shorter.with_anchors()
    assert [row.tokens.tolist() for row in anchored] == [list(row.tokens) for row in kept]
    assert [row.index for row in anchored] == list(range(len(kept)))


def test_a_corpus_is_mapped_and_written_atomically(tmp_path: Path) -> None:
    folder = tmp_path / "corpus"
    made = [Row(i, 2, list(range(i, i + 9)), ((2, 4), (6, 9))) for i in range(5)]
    with pytest.raises(ZeroDivisionError), CorpusWriter(folder) as writer:
        writer.add(made[0])
        _ = 1 / 0
    assert not list(tmp_path.iterdir())
    (tmp_path / "corpus.partial").mkdir()  # left by a killed run
    for turn in (1, 2):
        with CorpusWriter(folder) as writer:
            for row in made:
                writer.add(row)
            writer.commit({"turn": turn}, keep=[4, 0])
        found = Corpus.open(folder)
        assert found.meta["turn"] == turn and [row.tokens[0] for row in found] == [4, 0]
        assert found[0] == Row(0, 2, made[4].tokens, made[4].spans) and found[-1].index == 1
        assert [path.name for path in tmp_path.iterdir()] == ["corpus"]
    row = found[1]
    torch.as_tensor(row.tokens)[0] = 77  # in this process alone
    assert Corpus.open(folder)[1].tokens[0] == 0
    assert isinstance(row.tokens, np.ndarray) and row.tokens.base is not None, "a view"
    with open(folder / "tokens.i32", "r+b") as handle:
        handle.truncate(8)
    with pytest.raises(UserError, match=r"corpus: damaged .* remove it to build it again"):
        Corpus.open(folder)


# ---- lines of responses files ----------------------------------------------------------------------------------------

WHOLE = {"index": 3, "tokens": [5, 6, 7, 2**31 - 1], "spans": [[1, 4]], "prompt_tokens": 1}


def test_a_row_with_a_lone_surrogate_is_read(tmp_path: Path) -> None:
    path, row = tmp_path / "a.jsonl", WHOLE | {"messages": [{"content": "half a character: \ud83d"}]}
    path.write_text(json.dumps(row) + "\n")
    ((_, _, found),) = _lines(path)
    assert found == row and _row_of(found, 0) == Row(0, 1, WHOLE["tokens"], ((1, 4),))


@pytest.mark.parametrize(
    "tokens", ["[]", "[1, ]", "[1 2]", "[1,,2]", "[1.5, 2]", "[true, 2]", '["a"]', "[[1], 2]", "null", "[1, 2", "{}"]
)
def test_non_integer_tokens_are_refused_by_line(tokens: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(WHOLE) + "\n" + json.dumps(WHOLE).replace("[5, 6, 7, 2147483647]", tokens) + "\n")
    with pytest.raises((UserError, TypeError, ValueError)):
        [_row_of(row, 0) for _, _, row in _lines(path)]


@pytest.mark.parametrize("opened", [open, gzip.open])
def test_a_torn_last_line_is_skipped_at_any_cut(opened: Any, tmp_path: Path) -> None:
    path = tmp_path / ("a.jsonl.gz" if opened is gzip.open else "a.jsonl")
    line = json.dumps(WHOLE | {"messages": []}).encode()
    for end in range(0, len(line), 7):
        with opened(path, "wb") as handle:
            handle.write(line + b"\n" + line[:end])
        assert len(list(_lines(path))) == 1
