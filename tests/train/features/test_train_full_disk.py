"""A disk that is full while features are written during training ends all processes at one place, with one line."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from conftest import make_target
from forked import run_several
from programs import Program
from safetensors.torch import save_file
from several_processes import SHORT, assert_same_run, in_one_process
from several_processes import run_rank as _one
from training_runs import TAPS
from training_runs import random_rows as rows

import dflash_toolkit.train.features.store
from dflash_toolkit import UserError
from dflash_toolkit.train.cli import main
from dflash_toolkit.train.features.source import FeatureSource
from dflash_toolkit.train.features.store import DiskStore


@pytest.fixture(scope="module")
def whole(target_dir: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return in_one_process(target_dir, data, tmp_path_factory.mktemp("whole") / "run")


def no_space(tensors: dict[str, torch.Tensor], path: Path) -> None:
    path.write_bytes(b"a part of it")
    raise OSError(28, "No space left on device")


def _one_with_a_full_disk(rank: int, full: int, shard_bytes: int, arguments: list[str], log: Path) -> None:
    DiskStore.__init__.__defaults__ = (shard_bytes,)
    if rank == full:
        dflash_toolkit.train.features.store.save_file = no_space  # type: ignore[assignment]
    _one(rank, arguments, log)


@pytest.mark.parametrize(
    ("full", "shard_bytes", "settings"),
    [(0, 1, ["run.save_every=2"]), (1, 1, ["run.save_every=2"]), (1, 1 << 30, ["optim.epochs=1"])],
    ids=["the first process", "the second", "the second, after the last step"],
)
def test_a_failed_feature_write_ends_all_processes_resumably(
    full: int, shard_bytes: int, settings: list[str], dflash_train: Program, tmp_path: Path, whole: Path
) -> None:
    arguments, log = dflash_train.words(*SHORT, "run.features=hybrid", *settings), tmp_path / "log"
    codes = run_several(2, _one_with_a_full_disk, full, shard_bytes, arguments, log)
    said = log.read_text()
    assert codes == [2, 2], said
    (error,) = (line for line in said.splitlines() if "rror" in line)
    assert "No space left on device" in error and "free some space" in error
    assert not list(tmp_path.rglob("*.partial*")) and not (tmp_path / "run/run.json").exists()
    assert torch.load(tmp_path / "run/work/state.pt")["step"] == 2, "what was computed before is saved"
    assert main([*arguments, "optim.accumulate=2"]) == 0
    if "optim.epochs=1" not in settings:
        assert_same_run(whole, tmp_path / "run")


def test_a_concurrently_renamed_partial_file_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = Path.glob

    def seen_before(folder: Path, pattern: str) -> Iterator[Path]:
        yield from find(folder, pattern)
        if pattern == "*.partial":
            yield folder / "index.0123abcd.partial"  # it was there when the directory was read

    monkeypatch.setattr(Path, "glob", seen_before)
    old = tmp_path / "left.partial"
    old.touch()
    os.utime(old, (0, 0))
    DiskStore(tmp_path, {})
    assert not old.exists() and (tmp_path / "index.json").exists()


def test_a_failed_write_keeps_rows_and_stores_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, texts = make_target(), rows(6)
    direct = FeatureSource(target, TAPS, 3072)(texts)
    store = DiskStore(tmp_path, {}, shard_bytes=1)
    source = FeatureSource(target, TAPS, 3072, store=store)
    source(texts[:2])
    source.flush()
    monkeypatch.setattr(dflash_toolkit.train.features.store, "save_file", no_space)
    for i, row in [*enumerate(texts)] * 2:
        assert torch.equal(source([row]).hidden[0], direct.hidden[i, : len(row.tokens)])
    assert not source.missing(texts[:2]) and source.missing(texts[-1:])
    for check in (source.check, source.flush):
        with pytest.raises(UserError, match="No space left"):
            check()
    monkeypatch.setattr(dflash_toolkit.train.features.store, "save_file", save_file)
    assert len(list(tmp_path.iterdir())) == 3, "the index and the two shards before"
