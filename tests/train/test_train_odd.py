"""Runs that go on with something changed or damaged, options that contradict one another, answers that are not as they
should be: one line that names it, or the right thing."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from conftest import answers_of
from test_response_file import answers
from test_train_guards import command, written
from test_train_parallel import CONTEXT, _forkserver, _one, ended, free_port  # noqa: F401  # a fixture
from transformers import AutoModelForCausalLM

from dflash_toolkit.fingerprint import template_digest
from dflash_toolkit.models.target import load_tokenizer
from train.cli import main
from train.config import TrainConfig
from train.data_cli import main as answer


@pytest.fixture
def data(tmp_path: Path) -> str:
    return written(tmp_path / "p.jsonl", [{"prompt": f"say {i}"} for i in range(10)])


def refusal(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> str:
    capsys.readouterr()
    assert main(arguments) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("error: ")
    return last.removeprefix("error: ")


def test_other_weights_under_the_same_name_are_another_target(
    target_dir: Path, data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / "mine"
    shutil.copytree(target_dir, mine)
    arguments = command(mine, data, tmp_path / "run")
    assert main(arguments) == 0
    model = AutoModelForCausalLM.from_pretrained(mine)
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(1.5)
    model.save_pretrained(mine)
    assert "target_digest" in refusal(capsys, arguments)
    for name in ("run.json", "work/state.pt"):  # as after a kill before the first resume point
        (tmp_path / "run" / name).unlink()
    assert "holds answers of another run (target_digest" in refusal(capsys, arguments)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_target_in_sixteen_bits_is_trained_for_on_a_cpu(
    dtype: str, target_dir: Path, data: str, tmp_path: Path
) -> None:
    assert main(command(target_dir, data, tmp_path / "run", f"dtype={dtype}", "optim.steps=3")) == 0


def test_machines_that_share_no_directory_are_told(target_dir: Path, data: str, tmp_path: Path) -> None:
    port, log = free_port(), tmp_path / "log"
    processes = []
    for rank in (0, 1):
        arguments = command(target_dir, data, tmp_path / f"run{rank}", "optim.optimizer=adamw")
        processes.append(CONTEXT.Process(target=_one, args=(rank, 2, port, arguments, log, 0, None)))
        processes[-1].start()
    assert ended(processes) == [2, 2], log.read_text()
    errors = [line for line in log.read_text().splitlines() if "Error" in line or line.startswith("error:")]
    assert len(errors) == 1 and "all machines must share the output directory" in errors[0]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["optim.minutes=0.1"], "optim.steps and optim.minutes are both given"),
        (["optim.weight_decay=-1"], "optim.weight_decay is -1"),
        (["optim.pack_blocks=7", "loss.anchors=null"], "optim.pack_blocks is of packed rows: on a CPU give optim.pack"),
        (["run.attention=flex"], "run.attention=flex has no backward on a CPU"),
    ],
)
def test_options_that_would_be_ignored_or_fail_late_are_refused(
    options: list[str], said: str, target_dir: Path, data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in refusal(capsys, command(target_dir, data, tmp_path / "run", "device=cpu", *options))
    assert not list((tmp_path / "run").glob("work/answers*.jsonl")), "before anything is answered"


def test_a_damaged_file_of_a_run_is_named(
    target_dir: Path, data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, kept = tmp_path / "run", tmp_path / "kept"
    assert main(command(target_dir, data, run, "run.save_every=1")) == 0
    (run / "run.json").unlink()  # as if it had not ended
    shutil.copytree(run, kept)
    for name, text in {
        "corpus/rows.npy": "torn",
        "metrics.jsonl": '{"step": 1}\n{"st\n',
        "answers.json": "",
        "answers.jsonl": '{"index":0,"prompt_tokens":1,"tokens":5}\n',
    }.items():
        for damage in (lambda path, text=text: path.write_text(text), lambda path: (path.unlink(), path.mkdir())):
            shutil.rmtree(run)
            shutil.copytree(kept, run)
            if name.startswith("answers"):
                shutil.rmtree(run / "work/corpus")  # what stands there is read again
            damage(path := run / "work" / name)
            named = path.parent if name.startswith("corpus") else path
            assert refusal(capsys, command(target_dir, data, run, "run.save_every=1")).startswith(str(named))


def test_a_prompt_that_cannot_be_rendered_is_passed_over_and_counted(
    target_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = written(
        tmp_path / "p.jsonl", [{"prompt": f"fine {i}"} for i in range(3)] + [{"id": "half", "prompt": "\ud800 half"}]
    )
    assert main(command(target_dir, data, tmp_path / "run", "optim.steps=1", "prompts.held_out=0")) == 0
    assert "1 refused by the chat template" in capsys.readouterr().err


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
    mine = tmp_path / "mine"
    shutil.copytree(target_dir, mine)
    tokenizer.save_pretrained(mine)
    path = answers(mine, tmp_path / "a.jsonl", thinking=False, template_hash=template_digest(load_tokenizer(str(mine))))
    held_out = written(tmp_path / "h.jsonl", [{"prompt": "ask"}])
    config = TrainConfig(target=str(mine), answer_files=(path,), held_out=(held_out,))
    if option is not None:
        object.__setattr__(config.answers, "thinking", option)
    _, held = answers_of(config, tokenizer, tmp_path / "w")
    assert [tokenizer.decode(ids) for ids in held] == [f"ask{ending}"]


def test_a_damaged_list_of_chosen_prompts_is_named(
    target_dir: Path, data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "a.jsonl"
    arguments = [
        "--target", str(target_dir), "--data", data, "--output", str(output), "--device", "cpu",
        "max_tokens=4",
    ]  # fmt: skip
    assert answer(arguments) == 0
    record = output.with_suffix(".run.json")
    unfinished = json.loads(record.read_text())
    del unfinished["finished"]
    chosen = output.with_suffix(".prompts.jsonl")
    whole = chosen.read_text()
    for damaged in (whole[:-9], whole.replace('"turns"', '"turn"', 1)):
        record.write_text(json.dumps(unfinished))
        chosen.write_text(damaged)
        capsys.readouterr()
        assert answer(arguments) == 2
        last = capsys.readouterr().err.splitlines()[-1]
        assert last.startswith(f"error: {chosen}: damaged") and "chosen again" in last
    chosen.unlink()
    assert answer(arguments) == 0 and chosen.read_text() == whole
