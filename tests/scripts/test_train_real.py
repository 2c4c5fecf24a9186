"""scripts/bench/train_real.py from prompts to result.json on the tiny target, and what it is made of."""

import fcntl
import json
import re
import shlex
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import LONG_RUN, MASK, make_drafter, make_target
from forked import run_several

from dflash_toolkit import UserError, load_drafter
from dflash_toolkit.config import read_yaml
from dflash_toolkit.models.rope import RopeScaling
from dflash_toolkit.train.config import TrainConfig
from dflash_toolkit.train.features.source import FeatureSource
from dflash_toolkit.train.loop import train
from dflash_toolkit.train.objective import loss
from dflash_toolkit.train.objective.blocks import sample_blocks
from dflash_toolkit.train.responses.rows import Row
from dflash_toolkit.train.run.definition import Run
from dflash_toolkit.train.training_options import DrafterOptions, LossOptions, OptimOptions, RunOptions
from scripts.bench import train_real as program
from scripts.bench import training_lab

SMALL = ["drafter.layers=1", "drafter.taps=2", "drafter.block_size=4", "optim.pack_tokens=256", "optim.pack_blocks=32",
         "prompts.max_length=128", "run.log_every=1"]  # fmt: skip


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "say.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"say {i} and {i * 7}"}) + "\n" for i in range(12)))
    return path


def result_of(output: Path) -> dict[str, Any]:
    text = (output / "result.json").read_text()
    assert "/tmp" not in text and str(output.parent) not in text, "no paths of this machine"
    return json.loads(text)


def test_prompts_are_answered_trained_on_and_decoded(
    target_dir: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    arguments = [
        "--target", str(target_dir), "--prompts-train", f"say={prompts}[:8]", f"more={prompts}[6:9]", "--samples", "3",
        "--answer-tokens", "24", "--batch", "4", "--minutes", "0.01", "0.02", "--prompts", f"a={prompts}[8:]",
        f"b={prompts}[10:]", "--limit", "2", "--tokens", "12", "--pool", "b", "--baseline", "b", "--requests", "2",
        "--output", str(output), *SMALL, "run.features=memory", "run.feature_cache_gb=1",
    ]  # fmt: skip
    assert program.main(arguments) == 0
    shown, progress = capsys.readouterr()
    result = result_of(output)
    assert sum(line.startswith("features ") for line in progress.splitlines()) == 1, "filled once for both"
    assert result["answers"]["left_out"]["in_evaluation"] == 3, "row 8 is both trained and measured on"
    assert result["answers"]["rows"] + result["answers"]["left_out"]["repeated"] == 3 * 8
    assert [run["name"] for run in result["runs"]] == ["0.01m", "0.02m"]
    for run in result["runs"]:
        assert run["steps"] >= 1 and run["epochs"] > 0 and run["sequences_per_second"] > 0
        assert set(run["seconds"]) == {"features", "compile", "training", "evaluation"}
        assert run["sets"]["a"]["requests"] == 2 and 1 <= run["sets"]["a"]["tau_pooled"] <= 4
        assert run["pooled"]["tau"] == run["sets"]["b"]["tau_pooled"]
        assert (output / f"drafter-{run['name']}/model.safetensors").exists()
        assert f"| {run['name']} |" in shown
        assert run["seconds"]["training"] >= 60 * run["minutes"]
    assert "speedup" not in result["runs"][0]["sets"]["b"] and "speedup" not in result["runs"][1]["sets"]["a"]
    assert result["runs"][1]["sets"]["b"]["identical_to_plain"] == 1
    first, second = (run["loads"]["2"] for run in result["runs"])
    assert first["requests"] == 4 and first["tokens_per_second"] > 0 and "speedup" in second and "speedup" not in first
    rows = [json.loads(line) for line in (output / "answers.jsonl").read_text().splitlines()]
    greedy = [row for row in rows if row["sample"] == 0]
    reference = make_target()
    for row in greedy[:2]:
        ids = torch.tensor([row["tokens"]])
        logits = reference.forward(ids, logits="all").logits
        start = row["prompt_tokens"]
        assert logits[0, start - 1 : -1].argmax(-1).tolist() == row["tokens"][start:], "the first answer is greedy"
    assert len({tuple(row["tokens"]) for row in rows if row["index"] == 0}) > 1, "the others are not"
    assert program.main(arguments) == 2 and "result.json is there already" in capsys.readouterr().err
    (output / "result.json").write_text(json.dumps(result | {"runs": result["runs"][:1]}))
    assert program.main(arguments) == 0, "only the result is missing, which is written after every run"
    assert result_of(output)["runs"] == result["runs"]
    assert program.main([*arguments, "run.seed=1"]) == 2 and "is there already" in capsys.readouterr().err
    (output / "result.json").unlink()
    assert program.main([*arguments, "run.seed=1"]) == 2 and "of another command" in capsys.readouterr().err


def test_variants_are_compared_on_held_out_answers(
    target_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answers, output = tmp_path / "answers.jsonl", tmp_path / "out"
    lines = [{"prompt_ids": [i, 1, 2], "output_ids": [i, 5, 6, 7] * 5} for i in range(20)]
    answers.write_text("".join(json.dumps(line) + "\n" for line in [*lines, lines[0]]))
    arguments = [
        "--target", str(target_dir), "--answers", str(answers), "--minutes", "0.01", "--held-out", "4",
        "--variant", "decay", "loss.weights=decay", "--variant", "taps", "drafter.taps=3", "--output", str(output),
        "--training-prompts", "8", "--gpu-price", "30", "--answers-gpu-minutes", "0.5", *SMALL,
    ]  # fmt: skip

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training_lab, "save_drafter", killed)
        assert program.main(arguments) == 130
    point = torch.load(output / "work/decay/state.pt")
    assert program.main(arguments) == 0
    result = result_of(output)
    assert result["runs"][0]["steps"] == point["step"], "the stopped run continues from its resume point"
    for run in result["runs"]:
        assert (run["prompts"], run["rows"], run["response_tokens"]) == (8, 8, 160)
        assert run["seen_tokens"] == pytest.approx(160 * run["epochs"], abs=1)
        parts = run["gpu_minutes"]
        assert parts["responses"] == 0.25, "half of the prompts"
        assert parts["total"] == pytest.approx(sum(parts.values()) - parts["total"], abs=0.002)
        assert run["cost"] == pytest.approx(parts["total"] / 2, abs=0.01)
    assert result["curves"]["decay"].startswith("0 points")
    assert result["answers"] | {"left_out": 0} == {
        "regenerated": False, "rows": 16, "tokens": 16 * 20, "held_out": 4, "left_out": 0,
    }  # fmt: skip
    assert [(run["name"], run["settings"]) for run in result["runs"]] == [
        ("decay", ["loss.weights=decay"]),
        ("taps", ["drafter.taps=3"]),
    ]
    assert all(1 <= run["held_out_tau"] <= 4 for run in result["runs"])
    assert result["runs"][0]["parameters"] < result["runs"][1]["parameters"]
    assert "Held out" in capsys.readouterr().out


def test_drafters_are_compared_by_prompt_length(
    target_dir: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answers, output = tmp_path / "answers.jsonl", tmp_path / "out"
    lines = [{"prompt_ids": [i, 1, 2], "output_ids": [i, 5, 6, 7] * 5} for i in range(20)]
    answers.write_text("".join(json.dumps(line) + "\n" for line in lines))
    arguments = [
        "--target", str(target_dir), "--answers", str(answers), "--minutes", "0.01", "--held-out", "4",
        "--prompts", f"a={prompts}[:6]", f"b={prompts}[6:]", "--limit", "2", "--tokens", "8",
        "--context-length", "96", "200", "--variant", "short", "--variant", "long", "prompts.join_to=256",
        "init_from=short", "optim.minutes=0.005", "optim.learning_rate=1e-7",
        "--output", str(output), *SMALL,
    ]  # fmt: skip
    assert program.main(arguments) == 0
    runs = result_of(output)["runs"]
    assert [run["rows"] for run in runs] == [16, 2], "rows of 23 tokens, eleven in 256"
    short, long = (load_drafter(str(output / f"drafter-{name}")).state_dict() for name in ("short", "long"))
    moved = max(float((short[name] - long[name]).abs().max()) for name in short)
    assert 0 < moved < 1e-3, "near the drafter that it starts from"
    for run in runs:
        assert list(run["contexts"]) == ["96", "200"]
        for of_length in run["contexts"].values():
            assert of_length["requests"] == 4 and of_length["sets"].keys() == {"a", "b"}
            assert 1 <= min(of_length["sets"].values()) <= of_length["tau"] <= max(of_length["sets"].values()) <= 4
    assert "| Prompt tokens | 96" in re.sub(" +", " ", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["--prompts", "a=FILE[90:]"], "no such rows"),
        (["--prompts", "=FILE"], "expected NAME=SOURCE"),
        (["--prompts", "a=FILE", "--pool", "c"], "'c' is not a set to decode"),
        (["--minutes", "1", "1"], "two runs have one name"),
        (["optim.learning_rat=1"], "learning_rate"),
        (["seed.x=1.0"], "seed.x=1.0: only options of drafter"),
        (["responses.temperature=1.0"], "responses.temperature=1.0: --answers gives the responses"),
        (["--variant", "x", "loss.weights=no"], "is not one of"),
    ],
)
def test_mistakes_are_one_line_before_loading(
    wrong: list[str], said: str, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [item.replace("FILE", str(prompts)) for item in wrong]
    # options that take several values would swallow what follows them
    overrides = [item for item in given if "=" in item and "." in item.partition("=")[0] and "--variant" not in given]
    flags = [item for item in given if item not in overrides]
    output = ["--output", str(tmp_path / "out")]
    assert program.main(["--target", "nowhere", "--answers", "none", *flags, *output, *overrides]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and said in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_program_is_measured_when_all_have_prepared(tmp_path: Path) -> None:
    first, second = (training_lab.Turns(tmp_path / "turns") for _ in range(2))

    def free() -> bool:
        with open(tmp_path / "turns") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            return True

    seen = []

    def measured() -> None:
        with first.alone():
            seen.append(free())

    waits = threading.Thread(target=measured, daemon=True)
    waits.start()
    waits.join(0.2)
    assert not seen, "the second one still prepares"
    with second.alone():
        seen.append(free())
    del second  # it ends
    waits.join(10)
    assert seen == [False, False] and free()


def test_commands_in_docstring_parse() -> None:
    commands = re.findall(r"python scripts/bench/train_real\.py(.*?)\n\n", program.__doc__ or "", flags=re.S)
    assert commands
    for command in commands:
        args = program.parse(shlex.split(command.replace("\\\n", " ")))
        assert program.jobs_of(args) and str(args.output)


@pytest.mark.sampled
@pytest.mark.skipif(not LONG_RUN, reason="takes 20 seconds: make test-long")
def test_processes_share_the_minutes_of_a_run(target_dir: Path, prompts: Path, tmp_path: Path) -> None:
    answers, output = tmp_path / "answers.jsonl", tmp_path / "out"
    lines = [{"prompt_ids": [i, 1, 2], "output_ids": [i, 5, 6, 7] * 5} for i in range(20)]
    answers.write_text("".join(json.dumps(line) + "\n" for line in lines))
    arguments = [
        "--target", str(target_dir), "--answers", str(answers), "--minutes", "0.02", "--prompts", f"a={prompts}[:2]",
        "--tokens", "8", "--output", str(output), *SMALL,
    ]  # fmt: skip
    assert run_several(2, _process, arguments) == [0, 0]
    (run,) = result_of(output)["runs"]
    assert result_of(output)["gpus"] == 2 and run["sets"]["a"]["requests"] == 2
    assert 0.02 <= run["gpu_minutes"]["training"] < 0.1
    assert (output / "drafter-0.02m/model.safetensors").exists()


def _process(rank: int, arguments: list[str]) -> None:
    assert program.main(arguments) == 0


# ---- what it is made of ----------------------------------------------------------------------------------------


def test_training_rows_exclude_duplicates_and_evaluation() -> None:
    texts = [[1, 2, 3, 4, 5], [1, 2, 3, 4], [5, 6, 7, 8], [1, 2, 9, 9], [1, 2, 3]]
    kept, left_out = program.usable([Row(10 + i, 2, tokens) for i, tokens in enumerate(texts)], 4, {(5, 6)})
    assert kept == [Row(0, 2, [1, 2, 3, 4]), Row(1, 2, [1, 2, 9, 9])], "cut, and numbered anew"
    assert left_out == {"repeated": 1, "in_evaluation": 1, "too_short": 1}


def test_fewer_prompts_are_a_subset_of_more() -> None:
    rows = [Row(i, 2, [i // 3, 1, *range(10 + i)]) for i in range(12)]
    two, three, whole = (training_lab.of_prompts(rows, count) for count in (2, 3, 0))
    assert (len(two), len(three), len(whole)) == (6, 9, 12) and whole == rows
    assert {tuple(row.tokens) for row in two} < {tuple(row.tokens) for row in three}
    assert [row.index for row in three] == list(range(9))
    with pytest.raises(UserError, match=r"--training-prompts has 5, but there are 4 prompts"):
        training_lab.of_prompts(rows, 5)


def test_every_named_variant_is_a_run() -> None:
    names = list(read_yaml(program.VARIANTS))
    words = ["--target", "t", "--prompts-train", "a=b", "--output", "out", "--samples", "2", "--minutes", "3"]
    words += [word for name in names for word in ("--variant", name)]
    jobs = {job.name: job for job in program.jobs_of(program.parse([*words, "--seeds", "4"]))}
    assert list(jobs) == names
    assert jobs["default"].config.responses.samples == 2 and jobs["default"].config.run.seed == 4
    assert {jobs[name].minutes for name in ("default", "half", "rewarmed")} == {3, 1.5}
    assert jobs["rewarmed"].config.init_from == "out/drafter-half"
    assert len({job.sampler for job in jobs.values()}) == 4
    alone = program.jobs_of(
        program.parse([*words[: -2 * len(names)], "--seeds", "1", "2", "--variant", "tv-last-third"]), 2
    )
    assert [job.name for job in alone] == [
        f"{name}-s{i}" for name in ("constant-two-thirds", "tv-last-third") for i in (1, 2)
    ]
    assert [job.config.init_from for job in alone[2:]] == [f"out/drafter-constant-two-thirds-s{i}" for i in (1, 2)]
    assert alone[0].minutes == pytest.approx(2, rel=0.01) and alone[0].config.optim.minutes == alone[0].minutes / 2


def test_held_out_prompts_have_no_training_rows() -> None:
    rows = [Row(i, 2, [i // 3, 1, *range(10 + i)]) for i in range(12)]
    training, held_out = program.hold_out(rows, 2, seed=0)
    assert len(training) == 6 and len(held_out) == 2
    assert not {row.tokens[0] for row in training} & {row.tokens[0] for row in held_out}
    assert all(row.index % 3 == 0 for row in held_out), "the first answer of each"


def test_teacher_forced_length_ignores_batching(tmp_path: Path) -> None:
    target = make_target()
    drafter = make_drafter(target, block_size=4).train()
    rows = [Row(i, 3, [i, 1, 2] + [i, 5, 6, 7] * (i + 3)) for i in range(6)]
    optim = OptimOptions(optimizer="adamw", steps=40, learning_rate=3e-3)
    config = TrainConfig(target="tiny", drafter=DrafterOptions(block_size=4), loss=LossOptions(anchors=64), optim=optim)
    train(Run(config, target, drafter, rows[:3], [], tmp_path, {}, lambda *_: None))
    found = []
    for given in ({"batch_size": 1}, {"batch_size": 4}, {"batch_size": 6}, {"pack_tokens": 128, "pack_blocks": 128}):
        batched = replace(config, optim=OptimOptions(**given))
        source = FeatureSource(target, drafter.config.target_layer_ids, 64, packed=given.get("pack_tokens", 0))
        found.append(training_lab.teacher_forced_length(drafter, target, source, rows, batched))
    assert 1.3 < found[0] < 4 and found == pytest.approx([found[0]] * 4)


@pytest.mark.parametrize("scaling", [None, RopeScaling(rope_type="linear", factor=4.0)], ids=str)
def test_equal_shapes_compile_once(scaling: RopeScaling | None, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.compiler.reset()
    compiled = torch.compile(loss._forward, backend="eager", fullgraph=True)  # its guards are those of every backend
    monkeypatch.setattr(loss, "_compiled_forward", lambda: compiled)
    target = make_target()
    source = FeatureSource(target, (1, 2, 3), 64, packed=128)
    features = source([Row(i, 3, list(range(40))) for i in range(3)])
    blocks = sample_blocks(features, 16, 8, MASK, torch.Generator().manual_seed(0), fixed=True)
    config = TrainConfig(target="tiny", run=RunOptions(compile="on"))

    def one_step() -> None:
        drafter = make_drafter(target, rope_scaling=scaling).train()
        loss.compute_loss(drafter, target, features, blocks, config, False).loss.backward()

    one_step()
    with torch._dynamo.config.patch(error_on_recompile=True):
        one_step()
