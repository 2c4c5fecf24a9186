"""The loop: golden losses, exact resume after kill -9, a full disk, other settings, W&B."""

import errno
import itertools
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
from conftest import Clock, make_drafter, make_target
from damage import damage
from paths import ROOT
from programs import DFLASH2, Program, altered, lines
from programs import train_argv as argv
from training_runs import largest_file, lines_without_speed, losses, weights
from training_runs import repeating_rows as rows
from transformers import AutoModelForCausalLM

from dflash_toolkit import UserError
from dflash_toolkit.files import locked
from dflash_toolkit.progress import Progress
from dflash_toolkit.train import gradients, loop
from dflash_toolkit.train.config import TrainConfig
from dflash_toolkit.train.loop import train
from dflash_toolkit.train.optim.schedule import learning_rate_factor
from dflash_toolkit.train.run import report
from dflash_toolkit.train.run.definition import WORK, Run
from dflash_toolkit.train.run.metrics_log import MetricsLog
from dflash_toolkit.train.run.resume_point import ResumePoint, load_state, save_state
from dflash_toolkit.train.run.settings import first_difference
from dflash_toolkit.train.training_options import DrafterOptions, LossOptions, OptimOptions, RunOptions

GOLDEN = ROOT / "tests/golden/loss_curve.json"


@pytest.mark.parametrize("weights", ["decay", "dpace"])
def test_loss_curve_equals_the_golden_file(weights: str, tmp_path: Path) -> None:
    """A change that should move it sets the golden values anew: GOLDEN=write pytest tests/train/test_train_loop.py."""
    target = make_target()
    config = TrainConfig(
        target="tiny", drafter=DrafterOptions(block_size=8), loss=LossOptions(anchors=8, weights=weights),
        optim=OptimOptions(optimizer="adamw", steps=40, batch_size=4, learning_rate=3e-3), run=RunOptions(log_every=4),
    )  # fmt: skip
    train(Run(config, target, make_drafter(target).train(), rows(16), [], tmp_path, {}, lambda trained, made: None))
    curve = losses(tmp_path / "metrics.jsonl")
    assert len(curve) == 10 and curve[-1] < curve[0] - 1
    golden = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    if os.environ.get("GOLDEN") == "write":
        GOLDEN.parent.mkdir(exist_ok=True)
        GOLDEN.write_text(json.dumps(golden | {weights: curve}, indent=1) + "\n")
        golden = json.loads(GOLDEN.read_text())
    assert curve == pytest.approx(golden[weights], rel=1e-4)


def test_the_learning_rate_warms_up_and_decays_as_a_cosine() -> None:
    factors = [learning_rate_factor(step, 100, 0.1) for step in range(101)]
    assert factors[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert factors[55] == pytest.approx(0.5) and factors[100] == pytest.approx(0.0)
    assert all(a >= b for a, b in itertools.pairwise(factors[10:]))


@pytest.mark.parametrize("bad", [3, 4, 5])
def test_a_loss_that_is_no_number_ends_the_run_before_it_is_saved(
    bad: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls, exported = gradients.compute_loss, iter(range(100)), []

    def poisoned(*args: Any) -> Any:
        result = real(*args)
        if next(calls) == bad:
            result.weighted_sum = result.weighted_sum * math.nan
        return result

    monkeypatch.setattr(gradients, "compute_loss", poisoned)
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


# ---- resume ----------------------------------------------------------------------------------------------------


def start(arguments: list[str]) -> subprocess.Popen[bytes]:
    """The trainer in a process of its own."""
    code = "import torch, sys; torch.set_num_threads(1); from dflash_toolkit.train.cli import main; sys.exit(main())"
    return subprocess.Popen([sys.executable, "-c", code, *arguments], cwd=ROOT)


def kill_after(count: int, pid: int, metrics: Path) -> None:
    """Kills a process on a GPU with SIGKILL when metrics.jsonl has the given number of lines."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if metrics.exists() and len(metrics.read_text().splitlines()) >= count:
            os.kill(pid, signal.SIGKILL)
            return
        time.sleep(0.002)


def test_ctrl_c_saves_the_step_and_the_run_resumes(dflash_train: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    real, steps, handler = gradients.compute_loss, itertools.count(1), signal.getsignal(signal.SIGINT)

    def interrupted(*args: Any) -> Any:
        if next(steps) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return real(*args)

    monkeypatch.setattr(gradients, "compute_loss", interrupted)
    said = dflash_train("run.save_minutes=60", "optim.accumulate=1", code=130)
    assert said[-1] == "interrupted after step 3; run the same command again to resume"
    assert torch.load(dflash_train.output / "work" / "state.pt", "cpu", weights_only=False)["step"] == 3
    assert any("resuming at step 3" in line for line in dflash_train("run.save_minutes=60", "optim.accumulate=1"))
    assert signal.getsignal(signal.SIGINT) is handler


def test_a_second_ctrl_c_ends_at_once(dflash_train: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("it went on")

    monkeypatch.setattr(gradients, "compute_loss", interrupted)
    said = dflash_train(code=130)
    assert said[-1].endswith("run the same command again to resume; up to 1 min of steps are repeated")


def run_killed_after(count: int, arguments: list[str], path: Path) -> None:
    """Runs a real process and kills it with SIGKILL when `path` has the given number of lines."""
    process = forked.start("dflash_toolkit.train.cli", arguments, until=(path, count))
    forked.wait_stopped(process)
    process.kill()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL


@pytest.mark.slow
def test_a_repeatedly_killed_run_ends_bit_identical(dflash_train: Program, tmp_path: Path) -> None:
    dflash_train("responses.batch_size=1", output="whole")
    # while answering; before the first resume point; between two, after an evaluation, with another speed
    work = dflash_train.output / "work"
    run_killed_after(1, dflash_train.words("responses.batch_size=1"), work / "answers.jsonl")
    for count, features in ((2, "online"), (6, "hybrid"), (12, "disk")):
        arguments = dflash_train.words("responses.batch_size=1", f"run.features={features}")
        run_killed_after(count, arguments, work / "metrics.jsonl")
    dflash_train("responses.batch_size=1")
    whole, killed = (lines_without_speed(tmp_path / name / "work/metrics.jsonl") for name in ("whole", "run"))
    assert len(whole) == 14 and whole == killed
    assert weights(tmp_path / "whole") == weights(dflash_train.output)


def test_a_resumed_packed_run_equals_an_uninterrupted_one(dflash_train: Program, tmp_path: Path) -> None:
    packed = [*DFLASH2, "optim.pack_tokens=256", "optim.pack_blocks=12", "optim.epochs=1000", "optim.steps=9"]
    dflash_train(*packed, output="whole")
    run_killed_after(3, dflash_train.words(*packed), dflash_train.output / "work/metrics.jsonl")
    dflash_train(*packed)
    whole, killed = (lines_without_speed(tmp_path / name / "work/metrics.jsonl") for name in ("whole", "run"))
    assert whole == killed and [line["step"] for line in whole if "loss" in line][-1] == 9
    assert weights(tmp_path / "whole") == weights(dflash_train.output)


def test_the_selectors_loss_ramps_up_after_the_first_step(short_run: Program) -> None:
    losses = []
    for i, weight in enumerate((1, 100)):
        short_run(*DFLASH2, f"loss.selector={weight}", output=str(i))
        losses.append(
            [line["loss"] for line in lines(short_run.place(str(i)) / "work/metrics.jsonl") if "loss" in line]
        )
    (first, later), (same, other) = losses
    assert first == same and later != other


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [[], DFLASH2], ids=["dflash", "dflash2"])
def test_a_run_killed_on_a_gpu_equals_an_uninterrupted_one(
    kind: list[str], target_dir: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As users run it: bf16, a compiled step over FlexAttention, Muon; acceptance by the engine.

    Every part is a process of its own: what this one compiled for other tests decides how it compiles the step. They
    share a cache that no other test writes to: torch times some of a step's kernels once and keeps its choice there.
    """
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiled"))
    users = [
        "dtype=bfloat16", "run.attention=flex", "run.compile=auto", "drafter.head_dim=16", "optim.optimizer=muon",
        "optim.pack_tokens=256", "optim.pack_blocks=12", "optim.epochs=1000", *kind,
    ]  # fmt: skip
    assert start(argv(target_dir, data, tmp_path / "whole", *users)).wait() == 0
    for count in (6, 15):  # between resume points; after an evaluation
        process = start(argv(target_dir, data, tmp_path / "killed", *users))
        kill_after(count, process.pid, tmp_path / "killed/work/metrics.jsonl")
        assert process.wait(timeout=60) == -signal.SIGKILL, "the run ended before it could be killed"
    assert start(argv(target_dir, data, tmp_path / "killed", *users)).wait() == 0
    curves = [losses(tmp_path / name / "work/metrics.jsonl") for name in ("whole", "killed")]
    assert len(curves[0]) == 24 and curves[0] == curves[1]
    assert weights(tmp_path / "whole") == weights(tmp_path / "killed")


def test_a_run_by_the_clock_ends_by_the_clock(
    timed: Clock, dflash_train: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    bars: list[Any] = []

    class Watched(Progress):
        def __init__(self, *arguments: Any, **more: Any) -> None:
            super().__init__(*arguments, **more)
            bars.append(self._bar.tasks[0])

    monkeypatch.setattr(report, "Progress", Watched)
    dflash_train("optim.minutes=0.5", "optim.steps=0", "run.evaluate_every=0", "run.save_every=100")
    rates = [line["learning_rate"] for line in dflash_train.metrics() if "loss" in line]
    assert len(rates) == 30 and rates[-1] < max(rates) / 100, "a step takes a second"
    assert [(bar.description, bar.total, bar.completed) for bar in bars] == [("training s", 30, 30)], "its time left"


def test_other_settings_in_the_same_output_are_refused_by_name(dflash_train: Program) -> None:
    dflash_train("optim.steps=2")
    for change in ("optim.learning_rate=1e-3", "responses.max_tokens=9", "run.evaluate_tokens=9", "run.seed=3"):
        assert change.partition("=")[0].partition(".")[2] in dflash_train.refuses("optim.steps=2", change)


def test_answers_are_not_reused_for_another_split(dflash_train: Program) -> None:
    """An index of the answers file names a prompt of one split; in another, it would be a held-out one."""
    dflash_train("optim.steps=1")
    for name in ("run.json", "work/state.pt"):  # as after a kill before the first resume point
        (dflash_train.output / name).unlink()
    for change in ("prompts.held_out=3", "run.seed=1", "prompts.max_prompts=9"):
        assert change.partition("=")[0].partition(".")[2] in dflash_train.refuses("optim.steps=1", change)
    dflash_train("optim.steps=1")


def test_two_runs_do_not_train_into_one_folder(short_run: Program) -> None:
    work = short_run.output / WORK
    work.mkdir(parents=True)
    with locked(work):
        assert "is being written by another run" in short_run.refuses()
    assert not list(work.iterdir())
    short_run()  # the lock went with its holder


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
    for others in ({}, None, {"fc.weight": torch.zeros(1)}):
        torch.save(torch.load(path) | {"drafter": others}, path)
        said = short_run.refuses("prompts.held_out=0")
        assert said == f"{path}: does not fit this drafter's weights; remove it to start again"


def test_a_full_disk_is_one_line_and_the_run_resumes(dflash_train: Program, tmp_path: Path) -> None:
    dflash_train(output="whole")
    failed = set()
    for size in (100, 2000, 40_000, 70_000):
        with largest_file(size):
            error = dflash_train.refuses()
        assert "free some space" in error
        failed.add(Path(error.split()[0].rstrip(":")).name)
        assert not list(dflash_train.output.rglob("*.partial*"))
    assert failed == {"all.jsonl", "answers.jsonl", "state.pt"}, "each in turn"
    dflash_train()
    assert weights(tmp_path / "whole") == weights(dflash_train.output)


def test_a_metrics_file_that_cannot_grow_is_one_line(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl", 0, None, {})
    log.write(1, {"loss": 1.0})
    with largest_file(30), pytest.raises(UserError, match=r"metrics.jsonl: cannot be written .* free some space"):
        log.write(2, {"loss": 2.0})
    log.close()
    again = MetricsLog(tmp_path / "metrics.jsonl", 1, None, {})  # the torn line goes
    again.write(2, {"loss": float("nan")})
    assert lines_without_speed(tmp_path / "metrics.jsonl") == [{"step": 1, "loss": 1.0}, {"step": 2, "loss": None}]
    with largest_file(3), pytest.raises(UserError, match="cannot be written"):
        MetricsLog(tmp_path / "metrics.jsonl", 1, None, {})
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize("failure", [OSError(errno.ENOSPC, "No space left on device"), RuntimeError("write failed")])
def test_a_full_disk_leaves_the_last_resume_point(
    failure: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "state.pt"
    before, after = (ResumePoint(step, {"a": 1}, {"w": torch.ones(1000)}, {}, 1.0, 2.0, step) for step in (3, 4))
    save_state(before, path)

    def half(value: Any, handle: Any) -> None:
        handle.write(b"half")
        raise failure

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", half)
        with pytest.raises(UserError, match="cannot save the run"):
            save_state(after, path)
    loaded = load_state(path, {"a": 1})
    assert loaded is not None and loaded.step == 3
    assert [p.name for p in tmp_path.iterdir()] == ["state.pt"]


def test_a_corrupt_resume_point_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "state.pt").write_bytes(b"nonsense")
    with pytest.raises(UserError, match="not a resume point"):
        load_state(tmp_path / "state.pt", {})


def test_the_first_difference_is_named_by_its_path() -> None:
    assert first_difference({"a": {"b": 1}}, {"a": {"b": 2}}) == "a.b: 1, now 2"
    assert first_difference({"a": 1}, {"a": 1, "c": 3}) == "c: None, now 3"
    assert first_difference({"a": [1]}, {"a": [1]}) is None


# ---- W&B -------------------------------------------------------------------------------------------------------


def test_a_missing_wandb_names_its_extra(dflash_train: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert "dflash-toolkit[train]" in dflash_train.refuses("run.wandb=tiny")
    assert not dflash_train.output.exists(), "said before anything is computed"


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
