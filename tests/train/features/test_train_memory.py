"""A measured step decides the GPU memory for features; too little memory names the options that help."""

import itertools
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import make_drafter, make_target
from forked import run_several
from programs import Program
from training_runs import config, forwards, losses, run_of, weights
from training_runs import random_rows as rows

import dflash_toolkit.train.features.source
import dflash_toolkit.train.loop
from dflash_toolkit import UserError
from dflash_toolkit.config import from_mapping, to_mapping
from dflash_toolkit.train.config import TrainConfig
from dflash_toolkit.train.distributed.parallel import Processes
from dflash_toolkit.train.features import gpu_memory
from dflash_toolkit.train.features.gpu_memory import MARGIN, MemoryUse, room_after_step
from dflash_toolkit.train.features.source import FeatureSource
from dflash_toolkit.train.objective.blocks import Features
from dflash_toolkit.train.responses.rows import Row
from dflash_toolkit.train.run.settings import fingerprint


def test_features_use_a_share_of_memory_free_at_peak() -> None:
    use = MemoryUse(total=1000, free=700, allocated=200, peak=500)
    assert room_after_step(use, 1.0, 100) == 700 - 300 - 100 - MARGIN * 1000
    assert room_after_step(use, 0.5, 100) == 125
    assert room_after_step(use, 1.0, 400) == 0


@pytest.mark.parametrize("fits", [True, False])
@pytest.mark.parametrize("mode", ["auto", "memory"])
def test_feature_memory_is_filled_after_the_second_step(
    fits: bool, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target, texts = make_target(), rows(10)
    drafter = make_drafter(target)
    needed = FeatureSource(target, drafter.config.target_layer_ids, 3072).nbytes(texts)
    aside = 4 * sum(p.numel() for p in drafter.parameters())
    computed = forwards(target)
    asked: list[int] = []

    def measured(device: torch.device) -> MemoryUse:
        asked.append(len(computed))
        peak = 1000 if asked[1:] else 0  # nothing has run when the source is opened
        return MemoryUse(0, needed + aside + 1000 - (not fits), 0, peak)

    monkeypatch.setattr(dflash_toolkit.train.features.source, "memory_use", measured)
    # when nothing but the target is there
    monkeypatch.setattr(dflash_toolkit.train.features.source, "device_room", lambda *_: needed + 1000)
    begun: list[int] = []
    monkeypatch.setattr(dflash_toolkit.train.loop, "begin_peak", lambda device: begun.append(len(computed)))
    exported: list[object] = []
    run = run_of(config(features=mode, feature_gpu_share=1.0), target, texts, tmp_path)
    run = replace(run, export=lambda trained, made: exported.append(made))
    if mode == "memory" and not fits:
        with pytest.raises(UserError, match=r"run.features=memory .*run.feature_gpu_share"):
            dflash_toolkit.train.loop.train(run)
        assert not exported
        return
    dflash_toolkit.train.loop.train(run)
    assert asked == [0, 8], "a step is of four rows; the first one ends with the optimiser's state, and begins without"
    assert begun == [4]
    said = capsys.readouterr().err
    if fits:
        assert len(computed) == 18, "once more in the fill what two steps computed"
    else:
        assert len(computed) > 18 and "hold a part, the rest is computed in every epoch" in said
    assert len(losses(tmp_path / "metrics.jsonl")) == 9 and exported


def out_of_memory(patch: pytest.MonkeyPatch, batch: int, said: str) -> None:
    """For this batch of features, and for none after it."""
    call, seen = FeatureSource.__call__, itertools.count(1)

    def limited(self: FeatureSource, texts: list[Row]) -> Features:
        if next(seen) == batch:
            raise torch.OutOfMemoryError(said)
        return call(self, texts)

    patch.setattr(FeatureSource, "__call__", limited)


def test_out_of_memory_names_options_and_is_resumable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = "CUDA out of memory. Tried to allocate 2.00 GiB"
    out_of_memory(monkeypatch, 6, f"{said}. GPU 0 has a total of 1")
    target = make_target()
    names = r"run.feature_gpu_share .* optim.splits .* optim.recompute=true .* loss.head_rows .* new run.* optim.pack"
    with pytest.raises(UserError, match=rf"^{said}: .*{names}[^\n]*$"):
        dflash_toolkit.train.loop.train(run_of(config(), target, rows(10), tmp_path))
    assert torch.load(tmp_path / "state.pt")["step"] == 4
    named = {"loss": {"head_rows": 8}, "optim": {"recompute": True, "splits": 4}, "run": {"feature_gpu_share": 0.1}}
    before, after, other = (
        fingerprint(
            {"config": to_mapping(from_mapping(TrainConfig, {"target": "tiny"} | values, "config"))}
            | dict.fromkeys(("drafter", "target_digest", "data_hash", "template_hash"))
        )
        for values in ({}, named, {"optim": {"pack_tokens": 256}})
    )
    assert before == after != other, "the run may go on with what the line says, and only with that"
    dflash_toolkit.train.loop.train(run_of(config(), target, rows(10), tmp_path))
    assert torch.load(tmp_path / "state.pt")["step"] == 9


def _second_without_memory(rank: int, folder: Path) -> None:
    os.dup2(os.open(folder / f"log{rank}", os.O_WRONLY | os.O_CREAT), 2)
    if rank == 1:
        out_of_memory(pytest.MonkeyPatch(), 4, "CUDA out of memory.")
    with Processes.started("cpu") as processes:
        dflash_toolkit.train.loop.train(run_of(config(), make_target(), rows(12), folder), processes)


def test_out_of_memory_on_one_process_ends_it_at_once(tmp_path: Path) -> None:
    codes = run_several(2, _second_without_memory, tmp_path)
    assert codes[1] == 2 and codes[0] not in (0, None)
    (error,) = (line for line in (tmp_path / "log1").read_text().splitlines() if line.startswith("error: "))
    assert error.startswith("error: process 1: CUDA out of memory: lower run.feature_")
    assert torch.load(tmp_path / "state.pt")["step"] == 2


def _first_without_room(rank: int, folder: Path) -> None:
    dflash_toolkit.train.features.source.device_room = lambda *_: 1 << 30 if rank else 0  # type: ignore[assignment]
    target = make_target()
    taps = make_drafter(target).config.target_layer_ids
    with Processes.started("cpu") as processes:
        mine = range(rank, 10, 2)
        source = dflash_toolkit.train.features.source.open_features(
            config(), target, taps, rows(10), folder, mine, processes
        )
        assert processes.all_gather(rank) == [0, 1]
        assert len(source.missing(rows(10))) == 10, "auto keeps all or says that it does not"


def test_process_without_feature_memory_does_not_block_others(tmp_path: Path) -> None:
    """The first process decodes held-out prompts, which may leave no room for features on its GPU."""
    assert run_several(2, _first_without_room, tmp_path) == [0, 0]


def test_training_needs_no_layer_of_an_offloaded_target(dflash_train: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = ("run.features=disk", "prompts.held_out=0", "optim.steps=6")
    dflash_train(*stored, output="whole")
    monkeypatch.setattr(gpu_memory, "HOST", torch.device("meta"))  # weights that no computation can use
    dflash_train(*stored, "run.offload_target=true")
    assert weights(dflash_train.output) == weights(dflash_train.place("whole"))
