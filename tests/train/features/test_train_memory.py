"""What features may take of a GPU is known once a step was measured; too little memory names the options that help."""

import json
import os
from pathlib import Path

import pytest
import torch
from conftest import make_drafter, make_target
from test_train_features import config, forwards, rows
from test_train_parallel import CONTEXT, _forkserver, ended, free_port  # noqa: F401  # the fixture starts what forks

import train.features.source
import train.loop
from dflash_toolkit import UserError
from dflash_toolkit.config import from_mapping, to_mapping
from train.config import TrainConfig
from train.distributed.parallel import Processes
from train.features.memory import MARGIN, MemoryUse, room_behind_step
from train.features.source import FeatureSource
from train.objective.blocks import Features
from train.run.definition import Run
from train.run.provenance import fingerprint


def test_features_take_a_share_of_what_a_step_at_its_peak_leaves() -> None:
    use = MemoryUse(total=1000, free=700, allocated=200, peak=500)
    assert room_behind_step(use, 1.0, 100) == 700 - 300 - 100 - MARGIN * 1000
    assert room_behind_step(use, 0.5, 100) == 125
    assert room_behind_step(use, 1.0, 400) == 0


@pytest.mark.parametrize("fits", [True, False])
@pytest.mark.parametrize("mode", ["auto", "memory"])
def test_memory_is_taken_and_filled_behind_a_step_that_finds_the_optimisers_state(
    fits: bool, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target, texts = make_target(), rows(10)
    drafter = make_drafter(target).train()
    needed = FeatureSource(target, drafter.config.target_layer_ids, 3072).nbytes(texts)
    aside = 4 * sum(p.numel() for p in drafter.parameters())
    computed = forwards(target)
    asked: list[int] = []

    def measured(device: torch.device) -> MemoryUse:
        asked.append(len(computed))
        peak = 1000 if asked[1:] else 0  # nothing has run when the source is opened
        return MemoryUse(0, needed + aside + 1000 - (not fits), 0, peak)

    monkeypatch.setattr(train.features.source, "memory_use", measured)
    monkeypatch.setattr(
        train.features.source, "device_room", lambda *_: needed + 1000
    )  # when nothing but the target is there
    begun: list[int] = []
    monkeypatch.setattr(train.loop, "begin_peak", lambda device: begun.append(len(computed)))
    exported: list[object] = []

    def run() -> None:
        asked_for = config(features=mode, feature_gpu_share=1.0)
        kept = exported.append
        train.loop.train(Run(asked_for, target, drafter, texts, [], tmp_path, {}, lambda trained, made: kept(made)))

    if mode == "memory" and not fits:
        with pytest.raises(UserError, match=r"run.features=memory: .*run.feature_gpu_share"):
            run()
        assert not exported
        return
    run()
    assert asked == [0, 8], "a step is of four rows; the first one ends with the optimiser's state, and begins without"
    assert begun == [4]
    said = capsys.readouterr().err
    if fits:
        assert len(computed) == 18, "once more in the fill what two steps computed"
    else:
        assert len(computed) > 18 and "hold a part, the rest is computed in every epoch" in said
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert len([line for line in lines if "loss" in line]) == 9 and exported


def test_out_of_memory_is_one_line_with_the_options_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = make_target()
    call, seen = FeatureSource.__call__, [0]

    def out_of_memory(self: FeatureSource, texts: list) -> Features:  # type: ignore[type-arg]
        seen[0] += 1
        if seen[0] == 6:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total of 1")
        return call(self, texts)

    monkeypatch.setattr(FeatureSource, "__call__", out_of_memory)

    def run() -> None:
        drafter = make_drafter(target).train()
        train.loop.train(Run(config(), target, drafter, rows(10), [], tmp_path, {}, lambda trained, export: None))

    names = r"run.feature_gpu_share .* optim.recompute=true .* loss.head_rows .* in a new run .* optim.pack_tokens"
    with pytest.raises(UserError, match=rf"^CUDA out of memory. Tried to allocate 2.00 GiB: .*{names}[^\n]*$"):
        run()
    assert torch.load(tmp_path / "state.pt")["step"] == 4
    named = {"loss": {"head_rows": 8}, "optim": {"recompute": True}, "run": {"feature_gpu_share": 0.1}}
    before, after, other = (
        fingerprint(
            {"config": to_mapping(from_mapping(TrainConfig, {"target": "tiny"} | values, "config"))}
            | dict.fromkeys(("drafter", "target_digest", "data_hash", "template_hash"))
        )
        for values in ({}, named, {"optim": {"pack_tokens": 256}})
    )
    assert before == after != other, "the run may go on with what the line says, and only with that"
    run()
    assert torch.load(tmp_path / "state.pt")["step"] == 9


def _second_without_memory(rank: int, port: int, folder: Path) -> None:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()} | {"MASTER_ADDR": "127.0.0.1"})
    torch.set_num_threads(1)
    os.dup2(os.open(folder / f"log{rank}", os.O_WRONLY | os.O_CREAT), 2)
    call, seen = FeatureSource.__call__, [0]

    def out_of_memory(self: FeatureSource, texts: list) -> Features:  # type: ignore[type-arg]
        seen[0] += 1
        if rank == 1 and seen[0] == 4:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return call(self, texts)

    FeatureSource.__call__ = out_of_memory  # type: ignore[method-assign]
    with Processes.started("cpu") as processes:
        target = make_target()
        drafter = make_drafter(target).train()
        train.loop.train(Run(config(), target, drafter, rows(12), [], folder, {}, lambda *_: None), processes)


def test_a_process_without_memory_says_so_itself_and_does_not_wait_for_the_others(tmp_path: Path) -> None:
    port = free_port()
    running = [CONTEXT.Process(target=_second_without_memory, args=(rank, port, tmp_path)) for rank in range(2)]
    for process in running:
        process.start()
    codes = ended(running)
    assert codes[1] == 2 and codes[0] not in (0, None)
    errors = [line for line in (tmp_path / "log1").read_text().splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and errors[0].startswith("error: process 1: CUDA out of memory: give a lower run.feature_")
    assert torch.load(tmp_path / "state.pt")["step"] == 2


def _first_without_room(rank: int, port: int, folder: Path) -> None:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()} | {"MASTER_ADDR": "127.0.0.1"})
    torch.set_num_threads(1)
    train.features.source.device_room = lambda *_: 1 << 30 if rank else 0  # type: ignore[assignment]
    target = make_target()
    taps = make_drafter(target).config.target_layer_ids
    with Processes.started("cpu") as processes:
        mine = range(rank, 10, 2)
        source = train.features.source.open_features(config(), target, taps, rows(10), folder, mine, processes)
        assert processes.all_gather(rank) == [0, 1]
        assert len(source.missing(rows(10))) == 10, "auto keeps all or says that it does not"


def test_a_process_without_room_does_not_leave_the_others_waiting(tmp_path: Path) -> None:
    """Held-out prompts are decoded by the first, whose GPU may have nothing left for features."""
    port = free_port()
    running = [CONTEXT.Process(target=_first_without_room, args=(rank, port, tmp_path)) for rank in range(2)]
    for process in running:
        process.start()
    assert ended(running) == [0, 0]
