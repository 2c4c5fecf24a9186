"""scripts/bench/warm_start.py from a target and its drafter to result.json, on the tiny target."""

import json
import re
import shlex
from pathlib import Path

import pytest
import torch
from conftest import make_target
from start_drafters import small_drafter
from transformers import AutoModelForCausalLM

from dflash_toolkit import load_drafter, save_drafter
from scripts.bench import warm_start as program

SMALL = ["optim.batch_size=2", "loss.anchors=4", "prompts.held_out=2", "run.evaluate_tokens=8"]


def test_warm_starts_are_trained_and_measured(
    target_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_drafter(small_drafter(), tmp_path / "drafter")
    answers, asked = tmp_path / "answers.jsonl", tmp_path / "asked.jsonl"
    rows = [{"prompt": f"count {i} {i * 7}", "response": "one two three" * (1 + i % 2)} for i in range(12)]
    answers.write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked.write_text("".join(json.dumps({"prompt": f"what is {i}?"}) + "\n" for i in range(3)))
    output = tmp_path / "out"
    arguments = [
        "--target", str(target_dir), "--drafter", str(tmp_path / "drafter"), "--answers", str(answers), "--output",
        str(output), "--prompts", f"a={asked}", "--limit", "2", "--tokens", "24", "--minutes", "0.01", "--rates",
        "1e-3", "--blocks", "8", "--tune-layers", "2", "--tune-steps", "12", "--tune-rows", "4", "--tune-rate", "3e-3",
        "--batch", "4", *SMALL,
    ]  # fmt: skip
    assert program.main(arguments) == 0
    result = json.loads((output / "result.json").read_text())
    names = ["before", "unchanged", "b4 warm 0.001", "b4 random", "b8 warm", "b8 random"]
    assert list(result["runs"]) == names and "| b8 warm |" in capsys.readouterr().out
    for name in names:
        assert 1 <= result["runs"][name]["sets"]["a"]["tau_pooled"] <= 8
        assert name in names[:2] or result["runs"][name]["steps"] >= 1
    tuning = result["tuning"]
    assert tuning["conversations"] == 12 and tuning["last_loss"] < tuning["first_loss"]
    tuned, original = AutoModelForCausalLM.from_pretrained(output / "target"), make_target().model
    changed = [
        not torch.equal(a.float(), b.bfloat16().float())
        for a, b in zip(tuned.model.layers.parameters(), original.model.layers.parameters(), strict=True)
    ]
    assert not any(changed[: len(changed) * 4 // 6]) and any(changed), "two of six layers"
    blocks = [load_drafter(str(output / f"drafter-b{size}-warm{rate}")).config.block_size
              for size, rate in ((4, "-0.001"), (8, ""))]  # fmt: skip
    assert blocks == [4, 8]

    del result["runs"]["b8 random"]
    (output / "result.json").write_text(json.dumps(result))
    assert program.main(arguments) == 0, "a stage that exists is not repeated"
    again = json.loads((output / "result.json").read_text())
    assert list(again["runs"]) == names and again["seconds"] == result["seconds"]
    assert program.main([*arguments, "run.seed=1"]) == 2 and "of another command" in capsys.readouterr().err


def test_answers_that_cannot_be_used_are_one_line(
    target_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = tmp_path / "answers.jsonl"
    answers.write_text('{"prompt": "a question without an answer"}\n')
    args = program.parse(["--target", str(target_dir), "--drafter", "d", "--answers", str(answers), "--output",
                          str(tmp_path / "out"), "--prompts", f"a={answers}"])  # fmt: skip
    with pytest.raises(program.UserError, match=r"no conversation with an answer"):
        program.conversations(args, make_target().tokenizer)


def test_the_command_in_the_docstring_parses() -> None:
    (command,) = re.findall(r"python scripts/bench/warm_start\.py(.*?)\n\n", program.__doc__ or "", flags=re.S)
    args = program.parse(shlex.split(command.replace("\\\n", " ")))
    assert args.minutes == 3 and len(args.data) == 2
