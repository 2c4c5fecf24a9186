"""Which rows of its sources a run asks, trains on and holds out."""

from pathlib import Path
from typing import Any

import pytest
from conftest import prompts_of
from programs import Program, assistant, says, user, write

from dflash_toolkit import Target
from dflash_toolkit.data import file_formats
from dflash_toolkit.train.config import TrainConfig
from dflash_toolkit.train.data_options import DataOptions


def test_a_duplicated_prompt_is_in_one_split_only(target: Target, target_dir: Path, tmp_path: Path) -> None:
    data = write(tmp_path / "p.jsonl", says(*(f"say {i}" for i in range(10))) * 2)
    config = TrainConfig(target=str(target_dir), data=(str(data),), prompts=DataOptions(held_out=6))
    training, held_out = prompts_of(config, target.tokenizer, tmp_path)
    assert (len(training), len(held_out)) == (5, 5)
    assert not {tuple(ids) for ids in held_out} & {tuple(ids) for ids in training}


def test_rows_of_datasets_are_read_as_dflash_data_reads_them(
    monkeypatch: pytest.MonkeyPatch, target: Target, target_dir: Path, tmp_path: Path
) -> None:
    datasets = pytest.importorskip("datasets")
    good = [{"prompt": [user(f"say {i}")]} for i in range(3)]
    parts = [[user("") | {"content": [{"type": "text", "text": f"part {i}"}]}, assistant("yes")] for i in range(3)]
    odd: list[dict[str, Any]] = [{"prompt": 5}, {"messages": '[{"role": "user"}]'}, {"messages": [{"content": "x"}]}]
    # of one column each, which no table holds
    found = [*good, *({"messages": messages} for messages in parts), *odd]
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: found)
    config = TrainConfig(target=str(target_dir), prompts=DataOptions(held_out=0, max_prompts=0))
    training, _ = prompts_of(config, target.tokenizer, tmp_path)
    texts = [target.tokenizer.decode(ids) for ids in training]
    assert texts == [f"<|user|>{kind} {i}<|end|><|assistant|>" for kind in ("say", "part") for i in range(3)]


class Rows(list[Any]):
    """A streamed dataset whose rows say how they were drawn."""

    def shuffle(self, *, seed: int, buffer_size: int) -> "Rows":
        return Rows({"prompt": f"{row['prompt']}, seed {seed}, of {buffer_size}"} for row in reversed(self))


@pytest.mark.parametrize(
    ("options", "asked"),
    [
        ([], ["train b, seed 0, of 10000", "train a, seed 0, of 10000"]),
        (["prompts.split=test"], ["test b, seed 0, of 10000", "test a, seed 0, of 10000"]),
        (["prompts.shuffle=7", "seed=3"], ["train b, seed 3, of 7", "train a, seed 3, of 7"]),
        (["prompts.shuffle=0", "seed=3"], ["train a", "train b"]),
    ],
    ids=str,
)
def test_split_shuffle_and_seed_choose_the_rows_of_a_dataset(
    options: list[str], asked: list[str], command: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(name: str, dataset: str, subset: str, *, split: str, streaming: bool) -> Rows:
        assert (name, dataset, subset, streaming) == ("org/asks:hard", "org/asks", "hard", True)
        return Rows({"prompt": f"{split} {which}"} for which in "ab")

    monkeypatch.setattr(file_formats, "load_rows", load)
    command("--data", "org/asks:hard", "prompts.similarity=1", *options)
    assert [row["turns"][0][0]["content"] for row in command.rows("a.prompts.jsonl")] == asked
