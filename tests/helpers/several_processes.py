"""Training runs over several processes, compared with a run of one."""

import os
import resource
import sys
from pathlib import Path

import pytest
import torch
from forked import stop_at
from programs import train_argv as argv
from torch import Tensor
from training_runs import lines_without_speed, losses

from dflash_toolkit.train.cli import main

# 8 responses: each of two processes has 4, in micro batches of 3 and 1
SHORT = [
    "optim.steps=0", "optim.epochs=3", "optim.batch_size=3", "optim.learning_rate=3e-3", "optim.optimizer=adamw",
    "responses.max_tokens=24",
]  # fmt: skip


def run_rank(
    rank: int, arguments: list[str], log: Path, largest_file: int = 0, until: tuple[Path, int] | None = None
) -> None:
    """Runs dflash-train in a process of several, with its output in `log`."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ["TORCH_EXTENSIONS_DIR"] = str(log.parent / "compiled")
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    if largest_file:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, resource.RLIM_INFINITY))
    if until and not rank:
        stop_at(*until)  # the others wait for it
    code = main(arguments)
    keeping = ("run.zero=", "run.fsdp=true", "run.target_tensor_parallel_size=")
    if any(argument.startswith(keeping) for argument in arguments):
        sys.exit(code)  # DeepSpeed and meshes keep their groups to the end
    # if a thread of a process group frees a tensor while Python exits, the process aborts
    left = [thread for comm in Path("/proc/self/task").glob("*/comm") if "gloo" in (thread := comm.read_text())]
    sys.exit(code or (f"threads outlive their group: {left}" if left else 0))


def drafter_weights(run: Path) -> dict[str, Tensor]:
    return torch.load(run / "work/state.pt")["drafter"]


def assert_same_run(one: Path, other: Path) -> None:
    """Compares all lines of the metrics, and the weights, up to the order of sums."""
    lines = [lines_without_speed(run / "work/metrics.jsonl") for run in (one, other)]
    assert [line["step"] for line in lines[0]] == [line["step"] for line in lines[1]]
    for a, b in zip(*lines, strict=True):
        assert a.keys() == b.keys()
        for key in a:
            exact = key == "slot_accuracy" or b[key] is None  # one prompt has no standard error
            assert a[key] == (b[key] if exact else pytest.approx(b[key], rel=1e-5)), (a["step"], key)
    first, second = drafter_weights(one), drafter_weights(other)
    assert all(torch.allclose(first[name], second[name], rtol=1e-5, atol=1e-6) for name in first)


def in_one_process(target: Path, data: Path, output: Path, *more: str) -> Path:
    """Runs training in one process that accumulates the micro batches of two."""
    assert main(argv(target, data, output, *SHORT, *more, "optim.accumulate=2")) == 0
    assert len(losses(output / "work/metrics.jsonl")) == 6, "12 micro batches, two a step"
    return output
