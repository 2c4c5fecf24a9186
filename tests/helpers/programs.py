"""dflash-data and dflash-train as a user calls them, in a folder of the test. conftest.py makes the fixtures known."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from damage import damage

TRAINING = [
    "drafter.layers=1", "drafter.taps=2", "drafter.block_size=4", "responses.max_tokens=12", "responses.samples=1",
    "loss.anchors=4",
    "optim.steps=12", "optim.batch_size=2", "run.save_every=4", "run.log_every=1", "run.evaluate_prompts=2",
    "run.evaluate_every=10", "run.evaluate_tokens=8", "prompts.held_out=2",
]  # fmt: skip

DFLASH2 = [
    "drafter.kind=dflash2", "drafter.conv_group_size=8", "drafter.selector_rank=6", "run.export_selector=always",
]  # fmt: skip


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def says(*texts: str) -> list[dict[str, str]]:
    """Rows of data that ask these."""
    return [{"prompt": text} for text in texts]


def altered(target: Path, path: Path, tokenizer: Any = None, **changes: Any) -> Path:
    """A copy of a target's folder with another tokenizer, or with other values in config or generation_config."""
    shutil.copytree(target, path)
    for name, values in changes.items():
        damage(path / f"{name}.json", values)
    if tokenizer is not None:
        tokenizer.save_pretrained(path)
    return path


def data_argv(target: Path, data: Path, output: Path, *more: str) -> list[str]:
    one_response = ["--samples", "1", "--no-greedy-first", "--temperature", "0"]
    return [
        "--target",
        str(target),
        "--data",
        str(data),
        "--output",
        str(output),
        "max_tokens=12",
        *one_response,
        *more,
    ]


def train_argv(target: Path, data: Path | None, output: Path, *more: str) -> list[str]:
    given = ["--data", str(data)] if data else []
    words = ["--target", str(target), *given, "--output", str(output), *TRAINING, *more]
    if any(word.startswith("optim.pack_tokens=") for word in more):  # rows that are not packed
        words += ["optim.batch_size=null", "loss.anchors=null"]
    return words


@dataclass
class Program:
    """A program with default arguments. A call may repeat a flag or key: the last one counts."""

    main: Callable[[list[str]], int]
    argv: Callable[..., list[str]]
    target: Path
    data: Path | None
    output: Path
    capsys: Any
    out: str = ""  # stdout of the last call

    def place(self, output: str | None) -> Path:
        """Returns an output of that name next to the usual one."""
        return self.output.parent / output if output else self.output

    def words(self, *more: Any, output: str | None = None) -> list[str]:
        """The command line."""
        return self.argv(self.target, self.data, self.place(output), *map(str, more))

    def __call__(self, *more: Any, code: int = 0, output: str | None = None) -> list[str]:
        """Runs the program and returns the lines of stderr; `code` is the expected exit code."""
        self.capsys.readouterr()
        assert self.main(self.words(*more, output=output)) == code
        self.out, err = self.capsys.readouterr()
        return err.splitlines()

    def refuses(self, *more: Any, output: str | None = None) -> str:
        """Returns its one-line error, the last line that it writes."""
        *before, last = self(*more, code=2, output=output)
        assert last.startswith("error: ") and not any(line.startswith("error:") for line in before)
        return last.removeprefix("error: ")

    def rows(self, output: str | None = None) -> list[dict[str, Any]]:
        """The rows of dflash-data."""
        return lines(self.place(output))

    def answers(self, output: str | None = None) -> dict[tuple[int, int], list[int]]:
        """The tokens of every row of dflash-data by its prompt and sample, each of which is there once."""
        rows = self.rows(output)
        found = {(row["index"], row["sample"]): row["tokens"] for row in rows}
        assert len(found) == len(rows), "an answer is there twice"
        return found

    def record(self) -> dict[str, Any]:
        """The run.json of dflash-train."""
        return json.loads((self.output / "run.json").read_text())

    def metrics(self) -> list[dict[str, Any]]:
        return lines(self.output / "work/metrics.jsonl")


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return write(tmp_path / "p.jsonl", says(*(f"ask {i} of it" for i in range(9))))


@pytest.fixture
def dflash_data(target_dir: Path, prompts: Path, tmp_path: Path, capsys: Any) -> Program:
    """Answers nine prompts into a.jsonl."""
    from dflash_toolkit.train.data_cli import main

    return Program(main, data_argv, target_dir, prompts, tmp_path / "a.jsonl", capsys)


@pytest.fixture
def dflash_train(target_dir: Path, data: Path, tmp_path: Path, capsys: Any) -> Program:
    """Trains on ten prompts, two of them held out, in the folder run."""
    from dflash_toolkit.train.cli import main

    return Program(main, train_argv, target_dir, data, tmp_path / "run", capsys)


@pytest.fixture
def short_run(dflash_train: Program) -> Program:
    """The same for two steps."""
    return replace(dflash_train, argv=lambda *words: train_argv(*words[:3], "optim.steps=2", *words[3:]))
