"""Which drafter a run exports, how a longer run goes on from it, what its clock counts, and how it is saved."""

import itertools
import json
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import Clock, make_drafter, make_target
from programs import Program
from training_runs import interrupted
from training_runs import repeating_rows as rows

from dflash_toolkit import Drafter, UserError, load_drafter
from dflash_toolkit.train import gradients, loop
from dflash_toolkit.train.config import TrainConfig
from dflash_toolkit.train.data_options import DataOptions
from dflash_toolkit.train.features.source import open_features
from dflash_toolkit.train.optim.schedule import joined_factor, learning_rate_factor
from dflash_toolkit.train.responses.corpus import Corpus
from dflash_toolkit.train.run import save, training_budget
from dflash_toolkit.train.run.cost import before_training
from dflash_toolkit.train.run.definition import Export, Outcome, Run
from dflash_toolkit.train.run.held_out import Evaluation, HeldOut, HeldOutPrompt
from dflash_toolkit.train.run.resume_point import ResumePoint, Writer, load_state
from dflash_toolkit.train.training_options import DrafterOptions, LossOptions, OptimOptions, RunOptions

HELD_OUT = [HeldOutPrompt([20 + i, 30], "ab"[i % 2]) for i in range(4)]
STEPS = 1000  # tokens committed there by 1000 verification steps of each of the four prompts
EVEN, MORE, LUCKY = (3000, 3000, 3000, 3000), (3500, 3600, 3500, 3600), (6000, 2800, 2800, 2800)


def config(**optim: Any) -> TrainConfig:
    found = {"optimizer": "adamw", "steps": 8, "batch_size": 4, "learning_rate": 3e-3} | optim
    return TrainConfig(
        target="tiny", drafter=DrafterOptions(block_size=4), loss=LossOptions(anchors=4), optim=OptimOptions(**found),
        run=RunOptions(log_every=1, save_every=2, evaluate_every=2, evaluate_tokens=4),
    )  # fmt: skip


Weights = dict[str, torch.Tensor]


def served(drafter: Drafter) -> Weights:
    return {name: p.detach().bfloat16().clone() for name, p in drafter.named_parameters()}


class Exports(dict[str, tuple[Export, Weights]]):
    """Exports of a run by role, with their weights as served."""

    def __call__(self, trained: Drafter, made: Export) -> None:
        self[made.role] = made, served(trained)

    def steps(self) -> dict[str, int]:
        return {role: made.step for role, (made, _) in self.items()}


def before_steps(patch: pytest.MonkeyPatch, act: Callable[[int], object]) -> None:
    """Have the n-th step call `act(n)` before it computes."""
    real, numbers = gradients.compute_loss, itertools.count(1)
    patch.setattr(gradients, "compute_loss", lambda *args: (act(next(numbers)), real(*args))[1])


def trained(
    folder: Path, asked: TrainConfig, held_out: list[HeldOutPrompt] | None = None, **shape: int
) -> tuple[Outcome, Exports]:
    folder.mkdir(exist_ok=True)
    target, exports = make_target(), Exports()
    drafter = make_drafter(target, block_size=4, layers=1, taps=2, **shape).train()
    return loop.train(Run(asked, target, drafter, rows(16), held_out or [], folder, {}, exports)), exports


def lines(folder: Path, key: str) -> list[Any]:
    return [line[key] for line in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()) if key in line]


# ---- what is exported ------------------------------------------------------------------------------------------


# measured during the run every two steps, and before it; measured at the end if not the same; what is exported
ENDS: dict[str, tuple[list[tuple[int, ...]], tuple[int, ...] | None, dict[str, int]]] = {
    "equal": ([EVEN, MORE, MORE, MORE], None, {"exported": 8}),  # the last of equal ones
    "earlier": ([EVEN, MORE, MORE, EVEN], None, {"exported": 6, "last": 8}),  # the later of the best
    "lucky": ([EVEN, LUCKY, EVEN, EVEN], None, {"exported": 8, "best": 4}),
    "start": ([EVEN, EVEN, EVEN, EVEN], MORE, {"exported": 0, "last": 8}),
    "lucky start": ([EVEN, EVEN, EVEN, EVEN], LUCKY, {"exported": 8, "best": 0}),
    "nothing": ([(0, 0, 0, 0)] * 4, None, {"exported": 8}),  # no answer was long enough
    "only while it went on": ([EVEN, MORE, MORE, EVEN], None, {"exported": 8, "best": 6}),  # the end measures it equal
}
KILLS = {
    "equal": (8,),
    "only while it went on": (0, 8),
    "earlier": (0, 8),
    "lucky": (4, 8),
    "start": (0, 4),
    "lucky start": (8,),
    "nothing": (4,),
}


@pytest.mark.parametrize(("killed", "end"), [(step, end) for end, steps in KILLS.items() for step in steps])
@pytest.mark.sampled
def test_the_last_drafter_is_exported_unless_clearly_worse(
    killed: int, end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after a kill between the evaluation and the save of step 4 or 8."""
    measured, start, found = ENDS[end]
    asked = replace(config(), init_from="somewhere" if start else None)
    seen: dict[int, Weights] = {}  # as they were during the run, also of the earlier one at the end

    def evaluated(self: Any, drafter: Drafter, step: int = 0, bar: Any = None) -> Evaluation:
        seen[step] = served(drafter)
        tokens = start if not step and start else measured[step // 2 - 1]
        return Evaluation(step, tuple("abab"), tokens, tuple(STEPS * (n > 0) for n in tokens))

    def final(self: Any, drafter: Drafter, step: int) -> Evaluation:
        found = evaluated(self, drafter, step)
        return replace(found, tokens=EVEN) if end == "only while it went on" else found

    monkeypatch.setattr(HeldOut, "__call__", evaluated)
    monkeypatch.setattr(HeldOut, "final", final)
    if killed:
        with interrupted(killed, written=False), pytest.raises(KeyboardInterrupt):
            trained(tmp_path, asked, HELD_OUT)
    outcome, exports = trained(tmp_path, asked, HELD_OUT)
    assert exports.steps() == found and outcome.earlier == (found["exported"] != 8)
    for role, (made, weights) in exports.items():
        assert made.evaluation is not None and made.evaluation.step == found[role]
        assert all(torch.equal(weight, seen[made.step][name]) for name, weight in weights.items())
    assert set(lines(tmp_path, "acceptance_length_by_source")[-1]) == {"a", "b"}
    again, same = trained(tmp_path, asked, HELD_OUT)  # as if the process died after the last save
    assert same.steps() == found and again.steps == 8
    assert all(torch.equal(w, same[role][1][n]) for role in exports for n, w in exports[role][1].items())


def test_without_held_out_prompts_the_last_drafter_is_exported(tmp_path: Path) -> None:
    outcome, exports = trained(tmp_path, config())
    assert exports.steps() == {"exported": 8} and exports["exported"][0].evaluation is None
    assert outcome.other is None and not outcome.earlier and not list(tmp_path.glob("best*"))


SELECTOR = {"selector_rank": 4, "selector_top_k": 8}


@pytest.mark.parametrize(("alone", "refused"), [(MORE, True), (EVEN, False), (LUCKY, False)], ids=str)
def test_a_harmful_selector_is_not_exported(
    alone: tuple[int, ...], refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def evaluated(tokens: tuple[int, ...], step: int) -> Evaluation:
        return Evaluation(step, tuple("abab"), tokens, (STEPS,) * 4)

    monkeypatch.setattr(HeldOut, "__call__", lambda self, drafter, step=0, bar=None: evaluated(EVEN, step))
    monkeypatch.setattr(HeldOut, "final", lambda self, drafter, step: evaluated(EVEN, step))
    monkeypatch.setattr(HeldOut, "without_selector", lambda self, drafter, step: evaluated(alone, step))

    def run(**options: str) -> Exports:
        asked = replace(config(), run=replace(config().run, **options))
        return trained(tmp_path, asked, HELD_OUT, **SELECTOR)[1]

    if refused:
        with pytest.raises(UserError, match=r"3.000 tokens per step, 3.550 without it"):
            run()
        made, weights = run(export_selector="always")["exported"]  # the same run continues
    else:
        made, weights = run()["exported"]
    assert made.evaluation and made.without_selector and made.without_selector.tokens == alone
    assert "candidate_selector.successor_codebook" in weights
    made, weights = run(export_selector="never")["exported"]
    assert made.evaluation and made.evaluation.tokens == alone and made.without_selector is None
    assert not any("selector" in name for name in weights)


def test_export_selector_never_drops_a_harmful_selector(short_run: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    def evaluated(tokens: int) -> Callable[..., Evaluation]:
        counts = (100 * tokens, 100 * tokens + 10)
        return lambda self, drafter, step=0, bar=None: Evaluation(step, ("a", "a"), counts, (1000, 1000))

    monkeypatch.setattr(HeldOut, "__call__", evaluated(20))
    monkeypatch.setattr(HeldOut, "final", evaluated(20))
    monkeypatch.setattr(HeldOut, "without_selector", evaluated(30))
    kind = ("drafter.kind=dflash2", "drafter.conv_group_size=8", "drafter.selector_rank=4", "drafter.selector_top_k=8")
    said = short_run.refuses(*kind)
    assert said.startswith("the selector makes drafts worse, 2.005 tokens per step, 3.005 without it")
    assert sorted(path.name for path in short_run.output.iterdir()) == ["work"]
    short_run(*kind, "run.export_selector=never")
    config = load_drafter(str(short_run.output)).config
    assert (config.conv_kernel_size, config.selector_rank) == (2, 0)
    assert short_run.record()["result"]["acceptance_length"] == 3.005
    assert "\n# vllm" in short_run.out, "neither serves it"
    card = (short_run.output / "README.md").read_text()
    assert "# DFlash 2 drafter for" in card and "selector" not in card
    short_run(*kind, "run.export_selector=always", "optim.steps=3")
    card = (short_run.output / "README.md").read_text()
    assert "| selector | pairs of rank 4 among the 8 best" in card and "Without its selector it is 3.00." in card
    assert "\nvllm serve" in short_run.out


# ---- the clock -------------------------------------------------------------------------------------------------


def by_clock(clock: Clock, monkeypatch: pytest.MonkeyPatch, first: float, step: float = 1.0) -> None:
    """A step takes so long, and the first one of every call of `train` compiles."""
    for module in (training_budget, save):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=clock))
    make = loop.make_learner
    compiling: list[float] = []

    def compute(_: int) -> None:
        clock.now += compiling.pop() if compiling else step

    def begin(*args: Any) -> Any:
        compiling[:] = [first]
        return make(*args)

    before_steps(monkeypatch, compute)
    monkeypatch.setattr(loop, "make_learner", begin)


def test_minutes_exclude_compiling_and_saving(clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a minute of one-second steps, with a minute of compiling before them, also after a kill."""
    by_clock(clock, monkeypatch, first=60)
    asked = config(steps=0, minutes=0.5)
    outcome, _ = trained(tmp_path / "whole", asked)
    rates = lines(tmp_path / "whole", "learning_rate")
    assert (outcome.steps, outcome.elapsed_s, outcome.warnings) == (30, 30.0, [])
    assert len(rates) == 30 and max(rates) > 0.95 * 3e-3 and rates[-1] < 3e-3 / 50

    with interrupted(10), pytest.raises(KeyboardInterrupt):
        trained(tmp_path / "killed", asked)
    state = load_state(tmp_path / "killed/state.pt", {})
    assert state is not None and (state.step, state.elapsed_s) == (10, 10.0)
    outcome, _ = trained(tmp_path / "killed", asked)
    assert (outcome.steps, outcome.elapsed_s) == (30, 30.0), "resuming compiles, and takes no time of the run"


def test_a_run_too_short_to_warm_up_is_warned_about(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    by_clock(clock, monkeypatch, first=60, step=5)
    outcome, _ = trained(tmp_path / "minutes", config(steps=0, minutes=0.5))
    assert outcome.steps == 6 and ["6 steps are too few" in said for said in outcome.warnings] == [True]
    outcome, _ = trained(tmp_path / "steps", config())
    assert ["8 steps are too few" in said for said in outcome.warnings] == [True]
    assert "warning: 8 steps are too few to learn" in capsys.readouterr().err, "before it begins"
    assert not trained(tmp_path / "enough", config(warmup=0.2))[0].warnings


def test_the_cost_of_a_run_is_computed_without_creating_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For 800,000 rows that would need seconds and a gigabyte."""
    texts, target = rows(16), make_target()
    corpus, drafter = Corpus.of_rows(texts), make_drafter(target)
    length = 3 + min(len(row.tokens) for row in texts)
    tokens = sum(min(len(row.tokens), length) for row in texts)
    asked = replace(config(), prompts=DataOptions(max_length=length))

    def made(self: Corpus, index: object) -> None:
        raise AssertionError("a row is made")

    monkeypatch.setattr(Corpus, "__getitem__", made)
    source = open_features(asked, target, (1, 3), corpus, tmp_path, range(4, 16))
    assert source.nbytes(corpus) == source.nbytes(texts) == 4 * source.width * tokens
    said = before_training(asked, drafter, corpus, 8, 2.0, source.nbytes(corpus), tmp_path)
    assert said[0] == f"training data: 16 rows, {tokens} tokens per epoch; 8 steps, 2 epochs"


def test_the_cost_of_a_run_is_printed_before_training(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    by_clock(clock, monkeypatch, first=60, step=36_000)
    trained(tmp_path, config(steps=0, epochs=2))
    said = capsys.readouterr().err
    tokens = sum(len(row.tokens) for row in rows(16))
    before = said.index(f"training data: 16 rows, {tokens} tokens per epoch; 8 steps, 2 epochs")
    assert (
        before
        < said.index("disk: resume point")
        < said.index("about 40 h 0 min of training left: 4 steps of 3.6e+04 s")
    )
    assert "to shorten it: optim.epochs below 2, prompts.max_prompts, more GPUs (torchrun" in said


# ---- a longer plan ---------------------------------------------------------------------------------------------


def test_learning_rate_joins_a_longer_schedule_linearly() -> None:
    led = [joined_factor(step, 80, 0.1, None, 60, 0.01) for step in range(60, 80)]
    plain = [learning_rate_factor(step, 80, 0.1) for step in range(81)]
    there = plain[68]
    assert led[:8] == pytest.approx([0.01 + (there - 0.01) * (i + 1) / 8 for i in range(8)]) and led[8:] == plain[68:80]
    short = [joined_factor(step, 62, 0.1, None, 60, 0.01) for step in (60, 61)]
    assert 0.01 > short[0] > short[1] >= 0, "the loss keeps falling for two more steps"


@pytest.mark.parametrize(
    ("first", "longer", "less"),
    [[{"steps": 0, "epochs": n} for n in (6, 9, 5)], [{"steps": n} for n in (24, 36, 23)],
     [{"steps": 0, "minutes": n} for n in (0.4, 0.6, 0.3)]],
    ids=["epochs", "steps", "minutes"],
)  # fmt: skip
def test_a_longer_plan_continues_with_its_own_rate(
    first: Any,
    longer: Any,
    less: Any,
    clock: Clock,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    by_clock(clock, monkeypatch, first=60)
    first, longer, less = (config(warmup=0.1, **plan) for plan in (first, longer, less))
    assert trained(tmp_path, first)[0].steps == 24
    capsys.readouterr()
    with interrupted(30), pytest.raises(KeyboardInterrupt):
        trained(tmp_path, longer)
    said = capsys.readouterr().err
    assert "resuming at step 24" in said and ("of 36\n" in said or "of 0.6 minutes" in said)
    assert trained(tmp_path, longer)[0].steps == 36
    rates = [rate / 3e-3 for rate in lines(tmp_path, "learning_rate")]
    assert len(rates) == 36 and rates[23] < 0.02
    if not longer.optim.minutes:  # a plan in steps does not depend on compile time
        plain = [learning_rate_factor(step, 36, 0.1) for step in range(36)]
        ramp = [rates[23] + (plain[28] - rates[23]) * (i + 1) / 4 for i in range(4)]
        assert rates[24:28] == pytest.approx(ramp, rel=0.01) and rates[28:] == pytest.approx(plain[28:], abs=1e-3)
    assert max(rates[24:]) > 0.1 and rates[-1] < 0.02
    with pytest.raises(UserError, match=r"optim\.\w+ is [\d.]+, but the run in .* has done [\d.]+ \w+"):
        trained(tmp_path, less)
    assert trained(tmp_path, longer)[0].steps == 36, "nothing was lost"


def test_a_finished_run_continues_with_more_epochs_not_fewer(dflash_train: Program, tmp_path: Path) -> None:
    for epochs, steps, said in (
        (2, 8, ""),
        (3, 12, "resuming at step 8 of 12"),
        (3, 12, "holds this run, which is finished"),
    ):
        assert said in "\n".join(dflash_train("optim.steps=0", f"optim.epochs={epochs}"))
        assert dflash_train.record()["result"]["steps"] == steps
    assert "optim.epochs is 2, but the run in" in dflash_train.refuses("optim.steps=0", "optim.epochs=2")
    exported, state = load_drafter(str(tmp_path / "run")), torch.load(tmp_path / "run/work/state.pt")
    assert all(torch.equal(p, state["drafter"][name].bfloat16()) for name, p in exported.named_parameters())


# ---- saving ----------------------------------------------------------------------------------------------------


def test_background_saves_hold_the_step_of_their_start(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By time: ten minutes are over after step 4, and again while that is still being written."""
    by_clock(clock, monkeypatch, first=150, step=150)
    real_save, real_copy = save.save_state, save.host_copy
    taken: list[Any] = []
    written: list[int] = []
    further = threading.Event()

    def copied(value: Any, device: torch.device) -> Any:
        taken.append([weight.clone() for weight in value[0].values()])
        return real_copy(value, device)

    def saved(state: ResumePoint, path: Path) -> None:
        assert further.wait(60), "training did not continue"
        written.append(state.step)
        assert all(map(torch.equal, state.drafter.values(), taken[len(written) - 1]))
        real_save(state, path)

    before_steps(monkeypatch, lambda n: n == 11 and further.set())
    monkeypatch.setattr(save, "host_copy", copied)
    monkeypatch.setattr(save, "save_state", saved)
    asked = config(steps=12)
    trained(tmp_path, replace(asked, run=replace(asked.run, save_every=0, save_minutes=10)))
    assert written[0] == 4 and written[-1] == 12 and len(written) <= 3
    assert not all(map(torch.equal, taken[0], taken[-1])), "there is something to keep apart"
    state = load_state(tmp_path / "state.pt", {})
    assert state is not None and state.step == 12


def test_the_clock_synchronizes_only_around_pauses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Anywhere else the host prepares the next step while a GPU computes this one."""
    begun: list[int] = []
    waited: list[int] = []
    wait = training_budget.TrainingClock._wait
    before_steps(monkeypatch, begun.append)
    monkeypatch.setattr(training_budget.TrainingClock, "_wait", lambda self: (waited.append(len(begun)), wait(self)))
    asked = config(steps=24)
    trained(tmp_path, replace(asked, run=replace(asked.run, save_every=9, evaluate_every=10)), HELD_OUT)
    assert waited == [1, 2, 3, 4, 9, 10, 18, 20, 24]


def test_a_resume_point_is_copied_once_the_one_before_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a machine never holds two copies."""
    real_save, real_copy = save.save_state, save.host_copy
    events: list[str] = []

    def copied(value: Any, device: torch.device) -> Any:
        events.append("copied")
        return real_copy(value, device)

    def saved(state: ResumePoint, path: Path) -> None:
        time.sleep(0.05)  # longer than a step of this drafter, or else nothing is shown
        real_save(state, path)
        events.append("written")

    monkeypatch.setattr(save, "host_copy", copied)
    monkeypatch.setattr(save, "save_state", saved)
    asked = config(steps=6)
    trained(tmp_path, replace(asked, run=replace(asked.run, save_every=1)))
    assert events == ["copied", "written"] * 6


def test_a_failed_save_is_raised_at_the_next_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = threading.Event()
    begun: list[int] = []

    def fails(state: ResumePoint, path: Path) -> None:
        done.set()
        raise UserError("no space")

    def waits(n: int) -> None:
        begun.append(n)
        assert n <= 2 or done.wait(60)  # the first save is after step 2

    monkeypatch.setattr(save, "save_state", fails)
    before_steps(monkeypatch, waits)
    with pytest.raises(UserError, match="no space"):
        trained(tmp_path, config(steps=1000))
    assert len(begun) <= 5
    writer = Writer()
    writer.begin(lambda: None)
    writer.wait()
    assert not writer.busy and not writer.failed


def test_an_export_removes_what_a_killed_one_left(dflash_train: Program) -> None:
    left = dflash_train.output / ".partial-killed"
    left.mkdir(parents=True)
    (left / "model.safetensors").write_bytes(b"half")
    dflash_train("optim.steps=1")
    assert not list(dflash_train.output.glob(".partial-*"))
