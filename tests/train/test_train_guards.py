"""Guards against silent failures: NaN weights, held-out prompts in training, rows of wrong shapes, broken exports."""

from pathlib import Path
from typing import Any

import pytest
from conftest import prompts_of
from programs import Program, assistant, says, user, write

from dflash_toolkit import Target
from dflash_toolkit.files import write_json
from dflash_toolkit.train.config import DataOptions, TrainConfig
from dflash_toolkit.train.run.definition import WORK
from dflash_toolkit.train.run.provenance import OLD_NAMES, fingerprint
from dflash_toolkit.train.run.resume_point import load_state


def test_a_duplicated_prompt_is_in_one_split_only(target: Target, target_dir: Path, tmp_path: Path) -> None:
    data = write(tmp_path / "p.jsonl", says(*(f"say {i}" for i in range(10))) * 2)
    config = TrainConfig(target=str(target_dir), data=(str(data),), prompts=DataOptions(held_out=6))
    training, held_out = prompts_of(config, target.tokenizer, tmp_path)
    assert (len(training), len(held_out)) == (5, 5)
    assert not {tuple(ids) for ids in held_out} & {tuple(ids) for ids in training}


def test_a_row_that_only_fits_without_packing_is_left_out(dflash_train: Program, tmp_path: Path) -> None:
    texts = [*("x" * 200 + str(i) for i in range(4)), *(f"short {i}" for i in range(6))]
    options = ("prompts.max_length=400", "optim.pack_tokens=128", "optim.steps=8", "prompts.held_out=0")
    dflash_train.data = write(tmp_path / "p.jsonl", says(*texts))
    assert "dropped 4 of 10 responses" in "\n".join(dflash_train(*options, "responses.max_tokens=16"))


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


def test_a_drafter_that_is_gone_is_exported_again(short_run: Program) -> None:
    short_run()
    exported = short_run.output / "model.safetensors"
    before = exported.read_bytes()
    exported.unlink()
    short_run()
    assert exported.read_bytes() == before


def test_a_run_resumes_with_another_response_batch_size(short_run: Program) -> None:
    short_run()
    answers = (short_run.output / WORK / "answers.jsonl").read_bytes()
    (short_run.output / "run.json").unlink()
    short_run("responses.batch_size=1")
    assert (short_run.output / WORK / "answers.jsonl").read_bytes() == answers


def test_records_with_old_option_names_are_read(short_run: Program) -> None:
    short_run()
    record = short_run.record()
    old = {new: old for old, new in OLD_NAMES.items()}
    config = {old.get(key, key): value for key, value in record["config"].items()}
    assert {"answers", "answer_files", "trust_answers"} < config.keys()
    write_json(short_run.output / "run.json", record | {"config": config})
    assert "finished" in short_run("answers.batch_size=1")[-1]
    state = load_state(short_run.output / WORK / "state.pt", fingerprint(record | {"config": config}))
    assert state and "answers" in state.fingerprint["config"] and "responses" not in state.fingerprint["config"]
