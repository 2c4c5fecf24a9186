"""Runs that go on with something changed or damaged, inputs of another kind, answers that are not as they should be:
one line that names it, or the right thing."""

import shutil
from pathlib import Path

import pytest
import torch
from conftest import answers_of
from damage import damage
from forked import run_several
from programs import Program, altered, says, write
from response_files import eight_responses as answers
from several_processes import run_rank as _one
from transformers import AutoModelForCausalLM

from dflash_toolkit.fingerprint import template_digest
from dflash_toolkit.models.target import load_tokenizer
from dflash_toolkit.train.config import TrainConfig

# ---- runs that go on -------------------------------------------------------------------------------------------


def test_other_weights_under_the_same_name_are_another_target(short_run: Program, tmp_path: Path) -> None:
    short_run.target = mine = altered(short_run.target, tmp_path / "mine")
    short_run()
    model = AutoModelForCausalLM.from_pretrained(mine)
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(1.5)
    model.save_pretrained(mine)
    assert "target_digest" in short_run.refuses()
    for name in ("run.json", "work/state.pt"):  # as after a kill before the first resume point
        (short_run.output / name).unlink()
    assert "holds responses of another run (target_digest" in short_run.refuses()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_target_in_sixteen_bits_is_trained_for_on_a_cpu(dtype: str, dflash_train: Program) -> None:
    dflash_train(f"dtype={dtype}", "optim.steps=3")


def _apart(rank: int, arguments: list[list[str]], log: Path) -> None:
    _one(rank, arguments[rank], log)


def test_machines_without_a_shared_directory_are_refused(short_run: Program, tmp_path: Path) -> None:
    log = tmp_path / "log"
    arguments = [short_run.words("optim.optimizer=adamw", output=f"run{rank}") for rank in (0, 1)]
    assert run_several(2, _apart, arguments, log) == [2, 2], log.read_text()
    errors = [line for line in log.read_text().splitlines() if "Error" in line or line.startswith("error:")]
    assert len(errors) == 1 and "all machines must share the output directory" in errors[0]


def test_a_damaged_file_of_a_run_is_named(short_run: Program, tmp_path: Path) -> None:
    run, kept = short_run.output, tmp_path / "kept"
    short_run("run.save_every=1")
    (run / "run.json").unlink()  # as if it had not ended
    shutil.copytree(run, kept)
    for name, text in {
        "corpus/rows.npy": "torn",
        "metrics.jsonl": '{"step": 1}\n{"st\n',
        "answers.json": "",
        "answers.jsonl": '{"index":0,"prompt_tokens":1,"tokens":5}\n',
    }.items():
        for change in (text, None):
            shutil.rmtree(run)
            shutil.copytree(kept, run)
            if name.startswith("answers"):
                shutil.rmtree(run / "work/corpus")  # it is read again
            damage(path := run / "work" / name, change)
            if change is None:
                path.mkdir()
            named = path.parent if name.startswith("corpus") else path
            assert short_run.refuses("run.save_every=1").startswith(str(named))


def test_a_resume_point_without_weights_is_one_line(short_run: Program) -> None:
    short_run("prompts.held_out=0")
    path = short_run.output / "work/state.pt"
    (short_run.output / "run.json").unlink()  # as if it had not ended
    for weights in ({}, None, {"fc.weight": torch.zeros(1)}):
        torch.save(torch.load(path) | {"drafter": weights}, path)
        said = short_run.refuses("prompts.held_out=0")
        assert said == f"{path}: does not fit this drafter's weights; remove it to start again"


# ---- inputs ----------------------------------------------------------------------------------------------------


def test_a_prompt_that_cannot_be_rendered_is_passed_over_and_counted(dflash_train: Program, tmp_path: Path) -> None:
    dflash_train.data = write(tmp_path / "p.jsonl", says("fine 0", "fine 1", "fine 2", "\ud800 half"))
    said = "\n".join(dflash_train("optim.steps=1", "prompts.held_out=0"))
    assert "1 refused by the chat template" in said


@pytest.mark.parametrize(("name", "text"), [("a.txt", "say\nmore"), ("a.json", '[\n{"prompt": "a"}, {"prompt": "b"}]')])
def test_dflash_train_reads_files_of_other_kinds(name: str, text: str, dflash_train: Program, tmp_path: Path) -> None:
    dflash_train.data = tmp_path / name
    dflash_train.data.write_text(text)
    assert "2 responses" in "\n".join(dflash_train("optim.steps=1", "prompts.held_out=0"))


def test_a_broken_file_leaves_no_partial_output(dflash_train: Program, tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1\xff")
    said = dflash_train.refuses("--data", tmp_path / "a.parquet")
    assert said.startswith(f"{tmp_path / 'a.parquet'}: cannot be read") and not dflash_train.output.exists()


def test_feature_dir_is_checked_before_responses(dflash_train: Program, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    said = dflash_train.refuses("run.features=disk", f"run.feature_dir={tmp_path}/file/x")
    assert said.startswith(f"run.feature_dir {tmp_path}/file/x: cannot be created")
    assert not list(dflash_train.output.glob("work/answers*.jsonl"))


def test_a_wandb_account_is_checked_before_responses(
    dflash_train: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb").teardown()  # it remembers the mode of an earlier run
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    said = dflash_train.refuses("run.wandb=tiny")
    assert said.startswith("run.wandb=tiny: ") and "WANDB_MODE=offline" in said
    assert not list(dflash_train.output.glob("work/answers*.jsonl"))


# ---- answers of dflash-data ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("option", "ending"), [(None, "off"), (True, "on")])
def test_held_out_prompts_are_rendered_as_those_of_the_answers_were(
    option: bool | None, ending: str, target_dir: Path, tmp_path: Path
) -> None:
    tokenizer = load_tokenizer(str(target_dir))
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content }}{% endfor %}"
        "{% if enable_thinking is not defined %}unset{% elif enable_thinking %}on{% else %}off{% endif %}"
    )
    mine = str(altered(target_dir, tmp_path / "mine", tokenizer))
    sampler, template = {"temperature": 0.0, "thinking": False}, template_digest(load_tokenizer(mine))
    path = answers(tmp_path / "a.jsonl", target=mine, sampler=sampler, template_hash=template)
    held_out = write(tmp_path / "h.jsonl", says("ask"))
    config = TrainConfig(target=mine, response_files=(str(path),), held_out=(str(held_out),))
    if option is not None:
        object.__setattr__(config.responses, "thinking", option)
    _, held = answers_of(config, tokenizer, tmp_path / "w")
    assert [tokenizer.decode(ids) for ids in held] == [f"ask{ending}"]
