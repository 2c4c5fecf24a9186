"""A target that processes hold together, in slices, trains the drafter that a whole one on every process trains."""

import os
import signal
from pathlib import Path

import pytest
import torch
from conftest import make_drafter, make_target
from forked import ended, run_several, start_several, wait_stopped
from programs import Program
from several_processes import SHORT, assert_same_run, in_one_process
from several_processes import run_rank as _one
from training_runs import repeating_rows as rows

from dflash_toolkit import Target
from dflash_toolkit.train.cli import main
from dflash_toolkit.train.distributed.parallel import Processes
from dflash_toolkit.train.features.source import FeatureSource
from dflash_toolkit.train.features.store import MemoryStore

SHARED = "run.target_tensor_parallel_size=2"


@pytest.fixture(scope="module")
def whole(target_dir: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return in_one_process(target_dir, data, tmp_path_factory.mktemp("whole") / "run")


def test_a_sharded_target_gives_the_same_resumable_run(
    dflash_train: Program,
    tmp_path: Path,
    whole: Path,
) -> None:
    arguments, log = dflash_train.words(*SHORT, "run.save_every=1"), tmp_path / "log"
    for lines, options in ((1, ["run.features=disk"]), (3, ["run.fsdp=true"])):
        until = tmp_path / "run/work/metrics.jsonl", lines
        running = start_several(2, _one, [*arguments, SHARED, *options], log, 0, until)
        wait_stopped(running[0])
        running[1].kill()
        os.kill(running[0].pid or 0, signal.SIGCONT)
        codes = ended(running)
        assert codes[1] == -signal.SIGKILL and None not in codes, "the other ends by itself"
    answers = [path for path in (tmp_path / "run/work").glob("answers*.jsonl") if path.read_bytes()]
    assert [path.name for path in answers] == ["answers.jsonl"], "both have written one part together"
    assert run_several(2, _one, [*arguments, SHARED], log) == [0, 0], log.read_text()
    assert_same_run(whole, tmp_path / "run")


def _features(rank: int, folder: Path) -> None:
    """Returns the features of each process's own rows (the last process has none), and the stored ones."""
    with Processes.started("cpu", share=2) as processes:
        assert processes.group == (rank // 2, 2)
        target = Target.load(str(folder / "target"), mesh=processes.peers.mesh)
        taps = make_drafter(make_target()).config.target_layer_ids
        own = rows(12)[3 * rank : 3 * rank + 3]
        source = FeatureSource(target, taps, 64, store=MemoryStore(0, 1 << 20), peers=processes.peers, final=True)
        source.fill(own[:2] if rank == 2 else [])
        found = source(own)
        again = source(own if rank % 2 else rows(12)[:1])
        assert all(map(torch.equal, (found.hidden, found.final), (again.hidden, again.final))) or not rank % 2
    torch.save((found.hidden, found.final), folder / f"{rank}.pt")


def test_every_process_gets_the_features_of_its_own_rows(tmp_path: Path) -> None:
    target = make_target("qwen3", tied=False)
    target.model.save_pretrained(tmp_path / "target")
    target.tokenizer.save_pretrained(tmp_path / "target")
    assert run_several(4, _features, tmp_path) == [0] * 4
    source = FeatureSource(target, make_drafter(target).config.target_layer_ids, 64, final=True)
    for rank in range(4):
        expected = source(rows(12)[3 * rank : 3 * rank + 3])
        features, final = torch.load(tmp_path / f"{rank}.pt")
        torch.testing.assert_close(features, expected.hidden, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(final, expected.final, rtol=1e-4, atol=1e-4)


def test_a_full_disk_on_one_process_ends_its_peers(dflash_train: Program, tmp_path: Path) -> None:
    log = tmp_path / "log"
    arguments = dflash_train.words(*SHORT, SHARED, "run.features=disk", f"run.feature_dir={tmp_path / 'features'}")
    assert run_several(2, _one, arguments, log, 3000) == [2, 2], log.read_text()
    (error,) = (line for line in log.read_text().splitlines() if line.startswith("error:"))
    assert "free some space" in error


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([SHARED], "start torchrun --nproc-per-node 2"),
        (["run.target_tensor_parallel_size=0"], "must be >= 1"),
        ([SHARED, "responses.runtime=engine"], "responses.runtime is engine, which computes a target on one GPU"),
        ([SHARED, "run.evaluate_runtime=engine"], "run.evaluate_runtime is engine"),
    ],
)
def test_a_target_that_cannot_be_sharded_is_one_line(given: list[str], words: str, dflash_train: Program) -> None:
    assert words in dflash_train.refuses(*given)


def _refused(rank: int, log: Path, arguments: list[str]) -> None:
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    raise SystemExit(main(arguments))


def test_heads_that_cannot_be_shared_out_are_one_line(dflash_train: Program, tmp_path: Path) -> None:
    log = tmp_path / "log"
    arguments = dflash_train.words("run.target_tensor_parallel_size=3")
    assert run_several(3, _refused, log, arguments) == [2] * 3
    (error,) = (line for line in log.read_text().splitlines() if line.startswith("error:"))
    assert "num_attention_heads=4 cannot be shared out over 3 processes" in error
