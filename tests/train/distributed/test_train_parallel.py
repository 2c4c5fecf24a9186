"""Several processes are one run: the same losses, the same resume point, the same end when something breaks."""

import contextlib
import importlib.util
import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import LONG_RUN, make_dflash2, make_drafter, make_target
from forked import call, ended, free_port, run_several, start_several, wait_stopped
from paths import ROOT
from programs import DFLASH2, Program
from several_processes import SHORT, assert_same_run, in_one_process
from several_processes import run_rank as _one
from torch import Tensor
from torch.distributed.elastic.multiprocessing import subprocess_handler
from training_runs import config, forwards, losses, run_of
from training_runs import repeating_rows as rows

from dflash_toolkit import UserError
from dflash_toolkit.train.cli import main
from dflash_toolkit.train.config import TrainConfig
from dflash_toolkit.train.distributed.parallel import Processes
from dflash_toolkit.train.distributed.ranks import without_local_rank
from dflash_toolkit.train.distributed.zero import deepspeed_config
from dflash_toolkit.train.features.source import FeatureSource
from dflash_toolkit.train.features.store import GIB
from dflash_toolkit.train.loop import train
from dflash_toolkit.train.objective.blocks import Features, sample_blocks
from dflash_toolkit.train.objective.loss import compute_loss
from dflash_toolkit.train.responses.rows import Row
from dflash_toolkit.train.training_options import LossOptions, OptimOptions, RunOptions


@pytest.fixture(scope="module")
def whole(target_dir: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return in_one_process(target_dir, data, tmp_path_factory.mktemp("whole") / "run")


@pytest.fixture(scope="module")
def whole_dflash2(target_dir: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return in_one_process(target_dir, data, tmp_path_factory.mktemp("dflash2") / "run", *DFLASH2)


def _launch(launcher: str, arguments: list[str], log: Path) -> None:
    """The process of a launcher; what it and those that it starts say is added to `log`."""
    os.chdir(ROOT)
    os.environ |= {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    for stream in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    module = importlib.import_module(launcher)
    if launcher == "deepspeed.launcher.runner":
        module.subprocess = SimpleNamespace(Popen=_PerMachine)
    else:
        vars(importlib.import_module(subprocess_handler.SubprocessHandler.__module__))["Popen"] = _Forked
    module.main(arguments)


class _PerMachine:
    """DeepSpeed's other launcher, which its first starts on every machine: here in the first one's process."""

    returncode = 0

    def __init__(self, command: list[str], env: dict[str, str]) -> None:
        os.environ |= env
        at = command.index("deepspeed.launcher.launch")
        sys.argv = command[at:]
        launch: Any = importlib.import_module(command[at])
        launch.subprocess = SimpleNamespace(Popen=_Forked)
        launch.main()

    def wait(self) -> None:
        """It has ended when it is made."""


class _Forked(subprocess.Popen[bytes]):
    """`python -u -m MODULE ...`, forked: everything is imported."""

    def _execute_child(self, args: list[str], *rest: Any) -> None:
        self.pid = os.fork()
        if self.pid:
            self._child_created = True  # wait() and poll() may ask for it
            return
        code = 1
        with contextlib.suppress(BaseException):
            (env,) = (value for value in rest if isinstance(value, dict))
            os.environ |= env
            torch.set_num_threads(1)
            sys.argv = args[args.index("-m") + 1 :]
            try:
                runpy.run_module(sys.argv[0], run_name="__main__")
            except SystemExit as ended:
                code = ended.code if isinstance(ended.code, int) else 1
        os._exit(code)


@pytest.mark.parametrize("way", ["torchrun on two machines", "deepspeed"])
def test_processes_of_a_launcher_are_one_run(way: str, dflash_train: Program, tmp_path: Path, whole: Path) -> None:
    """Each machine has a launcher and a first process of its own."""
    machines, arguments, log = 2 if "two" in way else 1, dflash_train.words(*SHORT), tmp_path / "log"
    if way == "deepspeed":
        if importlib.util.find_spec("deepspeed") is None:  # not imported here: that takes seconds
            pytest.skip("needs DeepSpeed")
        (tmp_path / "hosts").write_text("localhost slots=2\n")
        launcher = "deepspeed.launcher.runner"
        words = [f"--hostfile={tmp_path / 'hosts'}", "--master_addr=127.0.0.1", f"--master_port={free_port()}",
                 "--no_ssh", "--node_rank=0", "--module"]  # fmt: skip
        arguments.append("device=cpu")
    else:
        launcher = "torch.distributed.run"
        meeting = ["--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{free_port()}"]
        words = [*meeting, "--nnodes=2", "--nproc-per-node=1", "-m"]
    launchers = [
        call(_launch, launcher, [*words, "dflash_toolkit.train.cli", *arguments], log) for _ in range(machines)
    ]
    assert ended(launchers) == [0] * machines, log.read_text()
    said = log.read_text()
    assert said.count("vllm serve") == said.count("dflash-train: target") == 1, "only the first process prints"
    assert_same_run(whole, tmp_path / "run")
    answers = [(tmp_path / "run/work" / name).read_text().splitlines() for name in ("answers.jsonl", "answers.1.jsonl")]
    assert [len(lines) for lines in answers] == [4, 4]


def test_a_killed_process_leaves_a_resumable_run(dflash_train: Program, tmp_path: Path, whole: Path) -> None:
    arguments, log = dflash_train.words(*SHORT, "run.save_every=1"), tmp_path / "log"
    for lines, victim in ((1, 1), (3, 0)):
        running = start_several(2, _one, arguments, log, 0, (tmp_path / "run/work/metrics.jsonl", lines))
        wait_stopped(running[0])
        running[victim].kill()
        if victim:
            os.kill(running[0].pid or 0, signal.SIGCONT)
        codes = ended(running)
        assert codes[victim] == -signal.SIGKILL and None not in codes, "the other ends by itself"
    assert main([*arguments, "optim.accumulate=2"]) == 0
    assert_same_run(whole, tmp_path / "run")


def test_a_changed_group_resumes_at_the_same_place(dflash_train: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    real, again = FeatureSource.__call__, False

    def watched(self: FeatureSource, rows: list[Row]) -> Features:
        taken.extend(row.index for row in rows)
        return real(self, rows) if len(taken) < 12 or again else sys.exit(1)

    monkeypatch.setattr(FeatureSource, "__call__", watched)
    with pytest.raises(SystemExit):
        dflash_train(*SHORT, "run.save_every=3")
    first = taken[:8]  # three micro batches were saved: an epoch
    again, taken[:] = True, []
    said = dflash_train(*SHORT, "run.save_every=3", "optim.accumulate=4")
    assert "resuming with 4 micro batches per step, after 3 in 3 steps" in "\n".join(said)
    assert sorted(first) == sorted(taken[:8]) == sorted(taken[8:16]) and first != taken[:8]
    epochs = [line["epoch"] for line in dflash_train.metrics() if "loss" in line]
    assert epochs == pytest.approx([3 / 8, 6 / 8, 1, 2, 3], abs=1e-4)


@pytest.mark.parametrize("world", [2, 4])
def test_packed_rows_are_dealt_to_several_processes_as_to_one(
    world: int, dflash_train: Program, tmp_path: Path
) -> None:
    packed = [*SHORT, *DFLASH2, "optim.epochs=2", "optim.pack_tokens=128", "optim.pack_blocks=12", "optim.splits=5"]
    dflash_train(*packed, f"optim.accumulate={world}", output="one")
    sharded = ["run.fsdp=true", "run.target_tensor_parallel_size=2"] if world == 4 else []
    several = dflash_train.words(*packed, "optim.recompute=true", *sharded, output="several")
    assert run_several(world, _one, several, tmp_path / "log") == [0] * world, (tmp_path / "log").read_text()
    assert_same_run(tmp_path / "one", tmp_path / "several")


def _counted(rank: int, folder: Path, asked: TrainConfig, texts: list[Row]) -> None:
    """One of the processes of a run; leaves how many forwards of the target it made, and over which rows."""
    target, met = make_target(), set()
    made, call = forwards(target), FeatureSource.__call__

    def watched(self: FeatureSource, rows: list[Row]) -> Features:
        met.update(row.index for row in rows)
        return call(self, rows)

    FeatureSource.__call__ = watched  # type: ignore[method-assign]
    with Processes.started("cpu") as processes:
        train(run_of(asked, target, texts, folder), processes)
    (folder / f"forwards.{rank}.json").write_text(json.dumps([len(made), sorted(met)]))


@pytest.mark.parametrize(
    ("world", "count", "kept", "forwards"),
    [
        (2, 18, 18, [9, 9]),
        (4, 34, 16, [19, 19, 16, 16]),  # lanes of 9, 9, 8 and 8 rows, of which 4 are kept in the first of 3 epochs
    ],
)
def test_processes_share_the_rows_and_the_cache_of_a_machine(
    world: int, count: int, kept: int, forwards: list[int], tmp_path: Path
) -> None:
    target, g = make_target(), torch.Generator().manual_seed(1)
    texts = [Row(i, 6, torch.randint(0, 250, (30,), generator=g).tolist()) for i in range(count)]
    taps = make_drafter(target).config.target_layer_ids
    cache = (kept + 0.5) * FeatureSource(target, taps, 3072).nbytes(texts[:1]) / GIB
    runs, asked = [], config(feature_cache_gb=cache)
    for processes in (1, world):
        folder = tmp_path / str(processes)
        accumulated = replace(asked, optim=replace(asked.optim, accumulate=world // processes))
        assert run_several(processes, _counted, folder, accumulated, texts) == [0] * processes
        runs.append([json.loads((folder / f"forwards.{rank}.json").read_text()) for rank in range(processes)])
    (alone, everything), several = runs[0][0], runs[1]
    assert [made for made, _ in several] == forwards and sum(forwards) == alone
    assert sorted(i for _, rows in several for i in rows) == everything == list(range(count)), "each has its own"
    curves = [losses(tmp_path / str(processes) / "metrics.jsonl") for processes in (1, world)]
    assert curves[1] == pytest.approx(curves[0], rel=1e-4) and len(curves[0]) >= 9


def test_a_full_disk_is_one_line_of_all_processes_and_none_hangs(
    dflash_train: Program, tmp_path: Path, whole: Path
) -> None:
    arguments = dflash_train.words(*SHORT, "run.save_every=2")
    broken = tmp_path / "run/work/answers.1.jsonl"  # the second process's own
    broken.parent.mkdir(parents=True)
    broken.symlink_to(tmp_path / "nowhere/at_all")
    for name, size in (("answers.1.jsonl", 0), ("state.pt", 40_000)):
        log = tmp_path / name
        assert run_several(2, _one, arguments, log, size) == [2, 2], log.read_text()
        (error,) = (line for line in log.read_text().splitlines() if line.startswith("error:"))
        assert "free some space" in error and name in error
        broken.unlink(missing_ok=True)
    assert not list(tmp_path.rglob("*.partial*"))
    assert main([*arguments, "optim.accumulate=2"]) == 0
    assert_same_run(whole, tmp_path / "run")


def test_accumulated_micro_steps_are_one_large_step(tmp_path: Path) -> None:
    """The loss is divided by the weights of all micro batches together, not each by its own."""
    target, curves, trained = make_target(), [], []
    for batch, accumulate in ((12, 1), (3, 4)):  # a step has all twelve rows either way
        optim = OptimOptions(optimizer="adamw", steps=3, learning_rate=3e-3, batch_size=batch, accumulate=accumulate)
        # an anchor at every possible position, so that no random choice differs
        asked = replace(config(), loss=LossOptions(anchors=64), optim=optim)
        run = run_of(asked, target, rows(12), tmp_path / str(batch))
        train(run)
        curves.append(losses(run.work / "metrics.jsonl"))
        trained.append(run.drafter.state_dict())
    assert curves[0] == pytest.approx(curves[1], rel=1e-5) and len(curves[0]) == 3
    assert all(torch.allclose(trained[0][k], trained[1][k], rtol=1e-4, atol=1e-6) for k in trained[0])


def test_recomputed_activations_change_nothing() -> None:
    target = make_target()
    gradients, kept = [], []
    for recompute in (False, True):
        drafter = make_dflash2(target).train()
        drafter.recompute = recompute
        features = FeatureSource(target, drafter.config.target_layer_ids, 64)(rows(3))
        blocks = sample_blocks(features, 6, 8, 299, torch.Generator().manual_seed(0))
        sizes: list[int] = []

        def keep(tensor: Tensor, sizes: list[int] = sizes) -> Tensor:
            sizes.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = compute_loss(drafter, target, features, blocks, TrainConfig(target="tiny"), flex=False).loss
        loss.backward()
        kept.append(sum(sizes))
        gradients.append([loss.detach(), *(p.grad for p in drafter.parameters())])
    assert all(map(torch.equal, *gradients))
    assert kept[1] < 0.7 * kept[0]


# ---- mistakes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "place", "gpus", "message"),
    [
        ("cpu", {"WORLD_SIZE": "2"}, 0, "RANK is not a number; start with torchrun"),
        ("cpu", {"WORLD_SIZE": ""}, 0, "WORLD_SIZE is '', but WORLD_SIZE is not a number"),
        ("cpu", {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}, 0, "MASTER_ADDR is not set: start with torchrun"),
        ("cuda", {"WORLD_SIZE": "4", "RANK": "1", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}, 2, "4 processes .* 2 G"),
        ("cuda", {"WORLD_SIZE": "4", "RANK": "2", "LOCAL_RANK": "2"}, 2, "3 processes run here, but there are 2 GPUs"),
        ("cuda:1", {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}, 2, "device is cuda:1, but each of 2 processes"),
    ],
)
def test_invalid_launcher_environment_is_one_line(
    device: str, place: dict[str, str], gpus: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    if gpus:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    with pytest.raises(UserError, match=message), Processes.started(device):
        pass


def test_an_error_on_all_processes_is_printed_once_per_machine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(SystemExit) as exit:
        main(["--target", "x", "optim.accumulate=0"])
    assert exit.value.code == 2 and capsys.readouterr().err == ""
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert main(["--target", "x", "optim.accumulate=0"]) == 2
    assert "optim.accumulate" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["run.zero=4"], "run.zero is 4; it must be in 0..3"),
        (["run.zero=1", "run.fsdp=true"], "run.fsdp=true and run.zero=1 are both given"),
        (["run.zero=1", "optim.ema=0.9"], "optim.ema=0"),
    ],
)
def test_an_impossible_sharding_is_one_line(given: list[str], words: str, dflash_train: Program) -> None:
    assert words in dflash_train.refuses(*given)


def test_without_deepspeed_its_extra_is_named(
    tmp_path: Path, dflash_train: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    assert "dflash-toolkit[train]" in dflash_train.refuses("run.zero=1")
    assert not (tmp_path / "run").exists() and not torch.distributed.is_initialized()


def test_the_other_optimizer_s_resume_point_is_one_line(dflash_train: Program, tmp_path: Path) -> None:
    short = ("optim.steps=1", "optim.optimizer=adamw")
    dflash_train(*short)
    state = torch.load(tmp_path / "run/work/state.pt")
    state["optimizer"]["1"] = {}  # as `auto` leaves it on a GPU
    state["optimizer"]["0"]["param_groups"] = state["optimizer"]["0"]["param_groups"][:1]
    torch.save(state, tmp_path / "run/work/state.pt")
    (tmp_path / "run/run.json").unlink()
    for way in ("run.fsdp=false", "run.fsdp=true"):
        assert "state of another optimiser" in dflash_train.refuses(*short, way)


# ---- DeepSpeed -------------------------------------------------------------------------------------------------


def test_deepspeed_config_follows_the_options() -> None:
    assert without_local_rank(["--local_rank=1", "--target", "x", "run.zero=2"]) == ["--target", "x", "run.zero=2"]
    config = TrainConfig(target="x", optim=OptimOptions(accumulate=3, batch_size=5, clip=0.5), run=RunOptions(zero=2))
    settings = deepspeed_config(config, packed=False, device=torch.device("cpu"))
    assert settings["train_micro_batch_size_per_gpu"] == 5 and settings["gradient_accumulation_steps"] == 3
    assert settings["gradient_clipping"] == 0.5 and settings["zero_optimization"] == {"stage": 2}
    assert settings["torch_autocast"]["enabled"] is False
    on_gpu = deepspeed_config(config, packed=True, device=torch.device("cuda"))
    assert on_gpu["train_micro_batch_size_per_gpu"] == 1 and on_gpu["torch_autocast"]["enabled"] is True


@pytest.mark.skipif(shutil.which("c++") is None, reason="DeepSpeed compiles its collectives for CPUs")
@pytest.mark.sampled
@pytest.mark.parametrize(
    ("stage", "kind", "kills"), [(2, "dflash", (1,)), (3, "dflash2", (1, 2) if LONG_RUN else (2,))]
)
def test_deepspeed_zero_equals_one_process_and_resumes(
    stage: int, kind: str, kills: tuple[int, ...], dflash_train: Program, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    expected = request.getfixturevalue("whole" if kind == "dflash" else "whole_dflash2")
    own = DFLASH2 if kind == "dflash2" else []
    arguments, log = dflash_train.words(*SHORT, *own, "run.save_every=1", "optim.recompute=true"), tmp_path / "log"
    for lines in kills:
        until = tmp_path / "run/work/metrics.jsonl", lines
        running = start_several(2, _one, [*arguments, f"run.zero={stage}"], log, 0, until)
        wait_stopped(running[0])
        for process in running:  # as a launcher does when one of them has died
            process.kill()
        ended(running)
    assert json.loads((tmp_path / "run/work/deepspeed.json").read_text())["zero_optimization"]["stage"] == stage
    last = [*arguments, f"run.zero={1 + stage % 3}", "optim.accumulate=2"]
    assert run_several(1, _one, last, log) == [0], log.read_text()
    assert not (tmp_path / "compiled").exists(), "nothing is compiled, which takes a minute"
    assert_same_run(expected, tmp_path / "run")


def test_deepspeed_finds_local_rank_in_a_single_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "7")
    monkeypatch.delenv("LOCAL_RANK")
    with Processes.started("cpu", group=True) as processes:
        assert os.environ["LOCAL_RANK"] == "0" and processes.main
