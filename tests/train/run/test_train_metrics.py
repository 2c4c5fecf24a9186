"""Metrics during a run: rates, GPU utilisation, W&B over a resume."""

import itertools
import json
import math
import resource
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import Clock, make_drafter
from programs import Program
from training_runs import interrupted, largest_file
from wandb_runs import wandb_records

import dflash_toolkit.train.run.metrics_log
from dflash_toolkit import Target, UserError, save_drafter, tracking
from dflash_toolkit.train.optim.schedule import learning_rate_factor
from dflash_toolkit.train.run.metrics_log import MetricsLog, Speed


def test_rates_exclude_pauses_and_mfu_uses_peak_flops(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dflash_toolkit.train.run.metrics_log, "time", SimpleNamespace(perf_counter=clock))
    speed = Speed(torch.device("cpu"))
    clock.now += 1
    alone = {"tokens_per_second", "sequences_per_second", "data_share", "peak_resident_gb"}
    assert speed.take(0.0).keys() == alone
    speed.peak = 1e12
    for _ in range(2):
        speed.count(100, 3)
        clock.now += 0.25
    with speed.data():
        clock.now += 1.5
    with speed.paused():
        clock.now += 500
    rates = speed.take(5e9)
    assert (rates["tokens_per_second"], rates["sequences_per_second"]) == (200 / 2, 6 / 2)
    assert rates["mfu"] == pytest.approx(2 * 5e9 / 2 / 1e12)
    assert rates["data_share"] == 1.5 / 2
    clock.now += 1
    assert speed.take(5e9)["mfu"] == 0, "restarted"


def test_on_a_cpu_memory_is_the_largest_that_was_resident() -> None:
    speed = Speed(torch.device("cpu"))
    before = speed.take(0.0)["peak_resident_gb"]
    now = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 1e9
    assert now * 0.9 <= before < 1000, "the kernel counts pages now and then only"
    held = torch.ones(int(1e9 * (before - now + 0.2)) // 4)
    after = speed.take(0.0)["peak_resident_gb"]
    assert before + 0.1 < after < before + 0.4
    del held
    assert speed.take(0.0)["peak_resident_gb"] >= after, "a peak, not what is resident now"


def test_wsd_stays_at_the_peak_and_falls_to_zero_in_its_share() -> None:
    factors = [learning_rate_factor(step, 100, 0.1, 0.2) for step in range(101)]
    assert factors[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert factors[10:81] == [1.0] * 71
    assert factors[85] == pytest.approx(1 - math.sqrt(5 / 20)) and factors[100] == 0.0
    short = [learning_rate_factor(step, 1, 0.5, 0.5) for step in range(2)]
    assert short == [1.0, 0.0]


def test_wsd_schedule_follows_the_clock_if_limited_by_minutes(timed: Clock, dflash_train: Program) -> None:
    wsd = ("optim.schedule=wsd", "optim.decay=0.5", "run.evaluate_every=0", "run.save_every=100")
    clock = ("optim.learning_rate=1e-3", "optim.steps=0", "optim.minutes=0.5")  # a step takes a second
    dflash_train(*wsd, *clock)
    rates = [line["learning_rate"] for line in dflash_train.metrics() if "learning_rate" in line]
    falling = rates[len(rates) - rates[::-1].index(1e-3) :]
    assert 10 <= rates.count(1e-3) <= 20 and 10 <= len(falling) <= 20, "half of some thirty steps"
    assert all(a > b for a, b in itertools.pairwise([1e-3, *falling])) and rates[-1] < 5e-5


# ---- W&B -------------------------------------------------------------------------------------------------------


def test_full_disk_when_saving_the_wandb_run_id_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[str] = []
    wandb = SimpleNamespace(errors=SimpleNamespace(Error=RuntimeError), init=lambda **given: begun.append(given["id"]))
    monkeypatch.setattr(tracking, "import_wandb", lambda option: wandb)
    with largest_file(0), pytest.raises(UserError, match=r"wandb_id: cannot be written .*free some space"):
        MetricsLog(tmp_path / "metrics.jsonl", 0, "tiny", {})
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"], "nothing that a resumption would believe"
    for _ in range(2):
        MetricsLog(tmp_path / "metrics.jsonl", 0, "tiny", {})
    assert len(begun) == 2 and len(set(begun)) == 1 and len(begun[0]) == 8


def test_wandb_offline_continues_the_same_run(
    dflash_train: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb").teardown()  # it keeps the settings of its first use in the process
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    often = ("run.wandb=tiny", "optim.steps=6", "run.evaluate_every=2", "run.save_every=2")
    with interrupted(4):
        dflash_train(*often, code=130)
    dflash_train(*often)

    deadline = time.monotonic() + 120  # wandb's own process may still be writing
    while sum(record.HasField("exit") for record in wandb_records(tmp_path / "run/work/wandb")) != 2:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    records = wandb_records(tmp_path / "run/work/wandb")
    runs = [record.run for record in records if record.HasField("run")]
    assert len({run.run_id for run in runs}) == 1 and {run.project for run in runs} == {"tiny"}
    config = {item.key: json.loads(item.value_json) for run in runs for item in run.config.update}
    record = dflash_train.record()
    assert config["versions"]["git"] == record["versions"]["git"]
    assert config["config"] == record["config"]
    summary = {item.key: json.loads(item.value_json) for r in records for item in r.summary.update}
    assert summary["best_acceptance_length"] == pytest.approx(record["result"]["acceptance_length"])
    items = [item for r in records for item in r.history.item]
    steps = {json.loads(item.value_json) for item in items if "step" in (item.key, *item.nested_key)}
    assert steps == {1, 2, 3, 4, 5, 6}, "both halves"


def rates(run: Program) -> list[float]:
    """Sequences a second, line by line."""
    return [line["sequences_per_second"] for line in run.metrics() if "loss" in line]


@pytest.mark.parametrize("often", ["run.evaluate_every=2", "run.save_every=3"])
def test_an_evaluation_or_a_save_does_not_make_training_slower(often: str, timed: Clock, dflash_train: Program) -> None:
    began = timed.now
    dflash_train("optim.steps=8", "run.evaluate_every=0", "run.save_every=100", often)
    assert rates(dflash_train) == [2.0] * 8, "two rows a step"
    assert timed.now - began == 8 + (400 + 1000 if "evaluate" in often else 100 + 3000)


def test_measuring_the_start_uses_no_training_minutes(
    timed: Clock, target: Target, dflash_train: Program, tmp_path: Path
) -> None:
    save_drafter(make_drafter(target, taps=2, layers=1, block_size=4), tmp_path / "start")
    clocked = ("optim.steps=0", "optim.minutes=0.1", "run.evaluate_every=0", "run.save_every=100")
    dflash_train("--init-from", tmp_path / "start", *clocked)
    assert rates(dflash_train) == [2.0] * 6, "a tenth of a minute, a second a step"
    assert [line["step"] for line in dflash_train.metrics() if "acceptance_length" in line] == [0, 6]
