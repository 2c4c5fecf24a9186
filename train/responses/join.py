"""Joins short rows to long ones, so that a drafter is trained at every position of a long context."""

import itertools
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from .corpus import Corpus, CorpusWriter
from .rows import Row, Tokens


def joined(rows: Sequence[Row], length: int, seed: int, bos: int | None = None) -> Iterator[Row]:
    """Yields rows of at most `length` tokens, each of several rows in a random order.

    The target reads a joined row as one text: every response sees all prompts and responses before it. All responses
    stay supervised. The order is random, since two responses to one prompt are next to each other in a corpus, and the
    second could be copied.

    Args:
        rows: of at most `length` tokens each.
        bos: token that begins every prompt, kept only at the start of a joined row.
    """
    group: list[Row] = []
    texts: list[Tokens] = []
    for place in np.random.default_rng(seed).permutation(len(rows)).tolist():
        row = rows[place]
        if group and sum(map(len, texts)) + len(row.tokens) > length:
            yield _one(group, texts)
            group, texts = [], []
        texts.append(row.tokens)
        group.append(row)
        if len(group) > 1 and row.tokens[0] == bos:
            texts[-1] = row.tokens[1:]
    if group:
        yield _one(group, texts)


def _one(group: Sequence[Row], texts: Sequence[Tokens]) -> Row:
    """Returns the row of consecutive texts. Args: group: their rows, which may begin with one token more."""
    ends = itertools.accumulate(map(len, texts))
    shifts = [end - len(row.tokens) for row, end in zip(group, ends, strict=True)]
    spans = tuple(
        (shift + start, shift + end) for row, shift in zip(group, shifts, strict=True) for start, end in row.supervised
    )
    return Row(group[0].index, spans[0][0], np.concatenate([np.asarray(text, np.int32) for text in texts]), spans)


def write_joined(source: Path, folder: Path, length: int, seed: int, bos: int | None) -> None:
    """Writes the corpus of the joined rows of the corpus in `source`, and removes that one. Raises UserError."""
    corpus = Corpus.open(source)
    with CorpusWriter(folder) as writer:
        for row in joined(corpus, length, seed, bos):
            writer.add(row)
        meta = {key: value for key, value in corpus.meta.items() if key not in ("version", "tokens")}
        writer.commit(meta)
    shutil.rmtree(source, ignore_errors=True)
