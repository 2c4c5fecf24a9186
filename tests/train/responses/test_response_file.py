"""Files of responses: what is read, what a kill left, and what is no row of one."""

import lzma
from pathlib import Path
from typing import Any

import pytest
from conftest import make_target
from test_data_cli import write
from test_train_guards import written

from dflash_toolkit import UserError
from dflash_toolkit.fingerprint import template_digest
from dflash_toolkit.models.target import load_tokenizer
from train.responses.file import Match, read_training_rows, resume


def answers(target_dir: Path, path: Path, **changes: Any) -> str:
    sampler = {"temperature": 0.0, "thinking": changes.pop("thinking", None)}
    rows = [
        {
            "index": i, "tokens": [10 + i, 20, 30, 40], "spans": [[2, 4]], "prompt_tokens": 2, "sampler": sampler,
            "target": str(target_dir), "vocab_size": make_target().config.vocab_size,
            "template_hash": template_digest(load_tokenizer(str(target_dir))),
        }
        | changes
        for i in range(8)
    ]  # fmt: skip
    return written(path, rows)


def read(target_dir: Path, *paths: str) -> Any:
    template = template_digest(load_tokenizer(str(target_dir)))
    return read_training_rows(paths, Match(str(target_dir), None, make_target().config.vocab_size, template))


def test_answers_are_read_packed_and_without_a_last_newline(target_dir: Path, tmp_path: Path) -> None:
    plain = Path(answers(target_dir, tmp_path / "a.jsonl"))
    rows = read(target_dir, str(plain))
    packed = tmp_path / "a.jsonl.xz"
    packed.write_bytes(lzma.compress(plain.read_bytes()))
    assert read(target_dir, str(packed)) == rows
    plain.write_bytes(plain.read_bytes()[:-1])
    assert read(target_dir, str(plain)) == rows
    plain.write_bytes(plain.read_bytes()[:-1])  # torn by a kill
    assert read(target_dir, str(plain)) == rows[:-1]


def test_a_last_line_without_its_newline_is_not_written_on(tmp_path: Path) -> None:
    row = {"index": 0, "sample": 0, "part": 0, "parts": 1, "prompt_tokens": 1, "tokens": [1, 2], "spans": [[1, 2]]}
    path = write(tmp_path / "a.jsonl", [row, row | {"index": 1}])
    first = path.read_bytes().splitlines(keepends=True)[0]
    path.write_bytes(path.read_bytes()[:-1])
    assert resume(path)[0] == {(0, 0)}
    assert path.read_bytes() == first


def test_what_was_left_out_before_a_kill_is_counted_after_it(tmp_path: Path) -> None:
    row = {"index": 0, "sample": 0, "part": 0, "parts": 2, "prompt_tokens": 1, "tokens": [1, 2], "spans": [[1, 2]]}
    first = row | {"left_out": ["later turns too long"]}
    torn = row | {"index": 1, "left_out": ["later turns too long"]}
    path = write(tmp_path / "a.jsonl", [first, row | {"part": 1}, torn])
    done, rows, _, left_out = resume(path)
    assert (done, rows, left_out) == ({(0, 0)}, 2, {"later turns too long": 1}), "the torn one will be asked again"


def test_bytes_that_are_no_text_are_not_repeated(target_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"a": "\xff' + b"x" * 10_000 + b'"}\n')
    with pytest.raises(UserError, match="line 1: not a row that dflash-data wrote") as found:
        read(target_dir, str(tmp_path / "a.jsonl"))
    assert len(str(found.value)) < 500


@pytest.mark.parametrize(
    "change",
    [{"tokens": [1, 300]}, {"tokens": [1, -7]}, {"tokens": [1, 10**21]}, {"spans": [[1]]}, {"tokens": [1, 2.0]}],
)
def test_a_damaged_row_of_answers_is_one_line(change: dict[str, Any], tmp_path: Path) -> None:
    row = {"index": 0, "prompt_tokens": 1, "tokens": [1, 2], "spans": [[1, 2]], "target": "t", "vocab_size": 300,
           "template_hash": "h", "sampler": {}}  # fmt: skip
    path = write(tmp_path / "answers.jsonl", [row, row | change])
    with pytest.raises(UserError, match=r"answers.jsonl, line 2: (not a row that|holds a token outside)"):
        read_training_rows([str(path)], Match("t", None, 300, "h"))


def test_rows_whose_prompt_ends_elsewhere_and_files_given_twice_are_refused(target_dir: Path, tmp_path: Path) -> None:
    good = answers(target_dir, tmp_path / "good.jsonl")
    assert len(read(target_dir, good)) == 8
    with pytest.raises(UserError, match="given twice"):
        read(target_dir, good, good)
    for wrong in (-5, 1, 10**6, float("inf")):
        with pytest.raises(UserError, match="line 1: not a row that dflash-data wrote"):
            read(target_dir, answers(target_dir, tmp_path / "bad.jsonl", prompt_tokens=wrong))
