"""Short rows joined to long ones: what is kept, how long they are, and a run that trains on them."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from programs import Program, says, write

from dflash_toolkit.config import UserError
from dflash_toolkit.train.config import configure
from dflash_toolkit.train.optim.schedule import packing
from dflash_toolkit.train.responses.corpus import Corpus
from dflash_toolkit.train.responses.join import joined
from dflash_toolkit.train.responses.rows import Row

BOS = 7


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write(tmp_path / "prompts.jsonl", says(*(f"word {i}" for i in range(10))))


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9), st.booleans()), max_size=12), st.integers(20, 60))
def test_joined_rows_hold_every_response_once(sizes: list[tuple[int, int, bool]], length: int) -> None:
    rows = []
    for i, (prompt, response, bos) in enumerate(sizes):
        tokens = np.arange(prompt + response) + 100 * (i + 1)
        tokens[0] = BOS if bos else tokens[0]
        spans = ((prompt, prompt + response),)
        rows.append(Row(i, prompt, tokens.astype(np.int32), spans if response % 2 else ()))
    found = list(joined(rows, length, 3, BOS))
    assert all(len(row.tokens) <= length for row in found)
    assert sorted(t for row in found for t in row.tokens if t != BOS) == sorted(
        t for row in rows for t in row.tokens if t != BOS
    )
    assert not any(BOS in row.tokens[1:] for row in found), "only a row begins with it"

    def responses(of: list[Row]) -> list[list[int]]:
        return sorted(row.tokens[start:end].tolist() for row in of for start, end in row.supervised)

    assert responses(found) == responses(rows)
    assert all(row.prompt_tokens == row.supervised[0][0] for row in found)


def test_joined_rows_are_full_and_in_random_order() -> None:
    rows = [Row(i, 1, [i, i, i]) for i in range(60)]
    found = list(joined(rows, 10, 0))
    assert [len(row.tokens) for row in found] == [9] * 20
    first = [row.tokens[0] for row in found]
    assert first != sorted(first) and list(joined(rows, 10, 0)) == found != list(joined(rows, 10, 1))


def test_a_run_trains_on_joined_rows_without_held_out_prompts(dflash_train: Program) -> None:
    options = "prompts.max_length=64", "prompts.join_to=128", "responses.samples=2", "optim.steps=4"
    dflash_train(*options)
    work = dflash_train.output / "work"
    corpus = Corpus.open(work / "corpus")
    assert not (work / "corpus.unjoined").exists()
    assert sum(len(row.supervised) for row in corpus) == 2 * 8 > len(corpus)
    assert 64 < max(corpus.lengths) <= 128
    text = " ".join(map(str, np.concatenate([row.tokens for row in corpus]).tolist()))
    held_out = [" ".join(map(str, each["tokens"])) for each in corpus.meta["held_out"]]
    assert len(held_out) == 2 and not any(each in text for each in held_out)
    record = dflash_train.record()
    assert record["result"]["answers"] == 2 * 8 and record["result"]["rows"] == len(corpus)
    assert record["result"]["steps"] == 4 and record["config"]["prompts"]["join_to"] == 128

    files = work / "answers.jsonl"
    dflash_train.data = None
    dflash_train("--responses", files, *options[:2], "optim.steps=2", "prompts.held_out=0", output="again")
    again = Corpus.open(dflash_train.place("again") / "work/corpus")
    assert sum(len(row.supervised) for row in again) == 2 * 8 > len(again), "responses files are joined too"


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["prompts.join_to=100", "prompts.max_length=64"], "it must be a multiple of 128"),
        (["prompts.join_to=2048"], "at least max_length (3072)"),
        (["prompts.join_to=1048576"], "the target's context is"),
        (["prompts.join_to=4096", "optim.pack_tokens=2048"], "raise optim.pack_tokens"),
    ],
)
def test_a_wrong_length_of_joined_rows_is_one_line(words: list[str], error: str, dflash_train: Program) -> None:
    assert error in dflash_train.refuses(*words)


@pytest.mark.parametrize(("join_to", "tokens"), [(4096, 12288), (8192, 8192), (16384, 16384), (32768, 32768)])
def test_packs_on_a_gpu_hold_whole_joined_rows(join_to: int, tokens: int) -> None:
    config = configure({"target": "tiny", "prompts": {"join_to": join_to}})
    assert packing(config, torch.device("cuda"))[0] == tokens
    long = configure({"target": "tiny", "prompts": {"max_length": join_to - 5}})
    assert packing(long, torch.device("cuda"))[0] == max(12288, join_to), "rows of long documents are whole too"
    short = configure({"target": "tiny", "prompts": {"join_to": join_to}, "optim": {"pack_tokens": 3072}})
    with pytest.raises(UserError, match=f"prompts.join_to is {join_to}"):
        packing(short, torch.device("cuda"))
