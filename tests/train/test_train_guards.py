"""Guards against silent failures: NaN weights, held-out prompts in training, rows of wrong shapes, broken exports."""

import errno
import fcntl
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_drafter, make_target, prompts_of
from programs import Program, assistant, lines, says, user, write
from training_runs import repeating_rows as rows

from dflash_toolkit import Target, UserError, save_drafter
from dflash_toolkit.files import locked, write_json
from dflash_toolkit.train import loop
from dflash_toolkit.train.config import DataOptions, DrafterOptions, LossOptions, OptimOptions, RunOptions, TrainConfig
from dflash_toolkit.train.optim.schedule import learning_rate_factor
from dflash_toolkit.train.run.definition import WORK, Run
from dflash_toolkit.train.run.provenance import OLD_NAMES, fingerprint
from dflash_toolkit.train.run.resume_point import load_state


@pytest.mark.parametrize("bad", [3, 4, 5])
def test_a_loss_that_is_no_number_ends_the_run_before_it_is_saved(
    bad: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls, exported = loop.compute_loss, iter(range(100)), []

    def poisoned(*args: Any) -> Any:
        result = real(*args)
        if next(calls) == bad:
            result.weighted_sum = result.weighted_sum * math.nan
        return result

    monkeypatch.setattr(loop, "compute_loss", poisoned)
    target = make_target()
    config = TrainConfig(
        target="tiny", drafter=DrafterOptions(block_size=8), loss=LossOptions(anchors=8),
        optim=OptimOptions(optimizer="adamw", steps=6, batch_size=4), run=RunOptions(log_every=2, save_every=2),
    )  # fmt: skip
    with pytest.raises(UserError, match=f"step {2 * (bad // 2) + 2}: the gradient is not a number"):
        drafter = make_drafter(target).train()
        loop.train(Run(config, target, drafter, rows(16), [], tmp_path, {}, lambda *_: exported.append(1)))
    point = load_state(tmp_path / "state.pt", {})
    assert point is not None and point.step == 2 * (bad // 2) and not exported
    assert all(bool(weight.isfinite().all()) for weight in point.drafter.values())


def test_weights_that_are_no_numbers_are_not_exported(tmp_path: Path) -> None:
    drafter = make_drafter(make_target())
    save_drafter(drafter, tmp_path / "d")
    before = (tmp_path / "d" / "model.safetensors").read_bytes()
    with torch.no_grad():
        drafter.fc.weight[0, 0] = math.nan
    with pytest.raises(UserError, match=r"not written, for fc\.weight holds values that are no numbers"):
        save_drafter(drafter, tmp_path / "d")
    assert (tmp_path / "d" / "model.safetensors").read_bytes() == before


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


def test_two_runs_do_not_train_into_one_folder(short_run: Program) -> None:
    work = short_run.output / WORK
    work.mkdir(parents=True)
    with locked(work):
        assert "is being written by another run" in short_run.refuses()
    assert not list(work.iterdir())
    short_run()  # the lock went with its holder


def test_a_lock_excludes_other_runs_and_ends_with_an_error(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "file"):
        with pytest.raises(RuntimeError), locked(place):
            with pytest.raises(UserError, match="another run"), locked(place):
                raise AssertionError("two hold it")
            raise RuntimeError("a mistake")
        with locked(place):
            pass


def test_a_file_system_without_locks_does_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def without(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", without)
    with locked(tmp_path / "file"):
        assert (tmp_path / "file").exists()


@pytest.mark.parametrize("groups", [(8, 1), (1, 8), (2, 4)])
def test_the_learning_rate_is_continuous_over_a_changed_plan(
    groups: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It depends on the share of the data that is done, whatever the steps were."""
    target, real, begun = make_target(), loop.compute_loss, 0

    def interrupted(*args: Any) -> Any:
        nonlocal begun
        begun += 1
        if begun == 17:  # of 32 micro batches
            raise KeyboardInterrupt
        return real(*args)

    def run(accumulate: int) -> None:
        config = TrainConfig(
            target="tiny", drafter=DrafterOptions(block_size=8), loss=LossOptions(anchors=4),
            optim=OptimOptions(optimizer="adamw", epochs=4, batch_size=2, accumulate=accumulate, warmup=0.01),
            run=RunOptions(log_every=1, save_every=1),
        )  # fmt: skip
        loop.train(Run(config, target, make_drafter(target).train(), rows(16), [], tmp_path, {}, lambda *_: None))

    monkeypatch.setattr(loop, "compute_loss", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(groups[0])
    run(groups[1])
    found = lines(tmp_path / "metrics.jsonl")
    micro = [round(8 * line["epoch"]) for line in found]
    assert micro[-1] == 32
    for before, after, line in zip([0, *micro], micro, found, strict=False):
        expected = learning_rate_factor(before // (after - before), 32 // (after - before), 0.01)
        assert line["learning_rate"] == pytest.approx(6e-4 * expected, abs=2e-6), after
