"""Files of responses: what is read, what a kill left, and what is no row of one."""

import lzma
from pathlib import Path
from typing import Any

import pytest
from conftest import VOCAB
from programs import lines, write
from response_files import eight_responses as answers

from dflash_toolkit import UserError
from dflash_toolkit.train.responses.file import Match, read_training_rows, resume

MINE = Match("t", None, VOCAB, "h")
NO_ROW = "not a row that dflash-data wrote"
PART = {"index": 0, "sample": 0, "part": 0, "parts": 1, "prompt_tokens": 1, "tokens": [1, 2], "spans": [[1, 2]]}


def read(*paths: Path) -> Any:
    return read_training_rows([*map(str, paths)], MINE)


def test_answers_are_read_packed_and_without_a_last_newline(tmp_path: Path) -> None:
    plain, packed = answers(tmp_path / "a.jsonl"), tmp_path / "a.jsonl.xz"
    rows = read(plain)
    packed.write_bytes(lzma.compress(plain.read_bytes()))
    assert read(packed) == rows and len(rows) == 8
    for kept in (rows, rows[:-1]):  # the second time it is torn, by a kill
        plain.write_bytes(plain.read_bytes()[:-1])
        assert read(plain) == kept


def test_a_last_line_without_its_newline_is_not_written_on(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [PART, PART | {"index": 1}])
    first = path.read_bytes().splitlines(keepends=True)[0]
    path.write_bytes(path.read_bytes()[:-1])
    assert resume(path)[0] == {(0, 0)}
    assert path.read_bytes() == first


def test_dropped_counts_survive_a_kill(tmp_path: Path) -> None:
    first = PART | {"parts": 2, "left_out": ["later turns too long"]}
    path = write(tmp_path / "a.jsonl", [first, PART | {"parts": 2, "part": 1}, first | {"index": 1}])
    done, rows, _, left_out, _ = resume(path)
    assert (done, rows, left_out) == ({(0, 0)}, 2, {"later turns too long": 1}), "the torn one will be asked again"


def test_bytes_that_are_no_text_are_not_repeated(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"a": "\xff' + b"x" * 10_000 + b'"}\n')
    with pytest.raises(UserError, match=f"line 1: {NO_ROW}") as found:
        read(tmp_path / "a.jsonl")
    assert len(str(found.value)) < 500


@pytest.mark.parametrize(
    ("change", "said"),
    [
        *(({"tokens": [1, 2, 3, token]}, "a token is outside") for token in (300, -7, 10**21)),
        *(({"tokens": tokens}, NO_ROW) for tokens in ([1, 2, 3, 2.0], ["a"])),
        *(({"spans": spans}, NO_ROW) for spans in ([], [[1]], [[9, 4]], None)),
        *(({"prompt_tokens": wrong}, NO_ROW) for wrong in (-5, 1, 10**6, float("inf"))),
        ({"index": None}, NO_ROW),
        ({"template_hash": "0" * 64}, "another chat template"),
        ({"target": "other"}, "written by"),
        ({"vocab_size": 7}, "with 7 tokens in its vocabulary"),
    ],
    ids=str,
)
def test_damaged_or_foreign_row_is_named(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    path = answers(tmp_path / "a.jsonl")
    row = lines(path)[0]
    with pytest.raises(UserError, match=f"a.jsonl, line 2: .*{said}"):
        read(write(path, [row, row | change]))


def test_response_file_given_twice_is_refused(tmp_path: Path) -> None:
    good = answers(tmp_path / "good.jsonl")
    with pytest.raises(UserError, match="given twice"):
        read(good, good)
