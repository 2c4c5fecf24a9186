"""Where features are kept changes nothing; shards survive kills; FP8 is bounded; a disk that is too small says so."""

import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import make_target
from damage import damage
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import Program
from safetensors.torch import load_file, save_file
from training_runs import TAPS, config, forwards, largest_file, losses, run_of
from training_runs import random_rows as rows

from dflash_toolkit import Target, UserError
from dflash_toolkit.config import from_mapping
from dflash_toolkit.fingerprint import TOKENS_BYTES
from dflash_toolkit.train.config import TrainConfig
from dflash_toolkit.train.features.source import FeatureSource, fitting, open_features
from dflash_toolkit.train.features.store import FP8, FP8_MAX, GIB, DiskStore, MemoryStore, Stored
from dflash_toolkit.train.loop import train
from dflash_toolkit.train.responses.rows import Row


def curve(folder: Path, **run: Any) -> list[float]:
    """Losses of a run of three epochs over ten rows."""
    train(run_of(config(**run), make_target(), rows(10), folder))
    return losses(folder / "metrics.jsonl")


def source_in(folder: Path, target: Target, count: int = 10, **run: Any) -> FeatureSource:
    return open_features(config(feature_dir=str(folder), **run), target, TAPS, rows(count), folder)


def on_gpu() -> Target:
    tiny = make_target()
    return Target(tiny.model.to("cuda", torch.bfloat16), tiny.tokenizer, tiny.name)


# ---- the same numbers ------------------------------------------------------------------------------------------


def test_every_feature_store_gives_a_bit_identical_run(tmp_path: Path) -> None:
    online = curve(tmp_path / "online", features="online")
    assert len(online) == 9
    for mode in ("auto", "memory", "disk", "hybrid"):
        assert curve(tmp_path / mode, features=mode, feature_cache_gb=1.0) == online, mode
    assert not (tmp_path / "memory/features").exists() and (tmp_path / "hybrid/features/index.json").exists()
    rounded = curve(tmp_path / "float8", features="disk", feature_dtype="float8")
    assert rounded == curve(tmp_path / "float8 online", features="online", feature_dtype="float8")
    assert rounded != online and rounded == pytest.approx(online, rel=0.05)


def test_rows_announced_ahead_come_from_the_shards_as_they_are(tmp_path: Path) -> None:
    target, texts = make_target(), rows(10)
    direct = FeatureSource(target, TAPS, 3072)(texts[2:5])
    source = source_in(tmp_path, target, features="disk")
    computed = forwards(target)
    source.ahead(texts[3:7])
    assert source.reads_ahead
    assert torch.equal(source(texts[2:5]).hidden, direct.hidden)  # announced or not
    source.ahead(texts[2:5])
    assert torch.equal(source(texts[2:5]).hidden, direct.hidden) and not computed


def test_the_target_runs_in_the_first_epoch_only(tmp_path: Path) -> None:
    target = make_target()
    computed = forwards(target)
    source = source_in(tmp_path, target, features="hybrid")
    assert not computed
    for _ in range(3):
        for row in rows(10):
            source([row])
    source.flush()
    assert len(computed) == 10
    source_in(tmp_path, target, features="disk")
    assert len(computed) == 10, "a later run finds what this one wrote"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["auto", "float8"])
def test_a_gpu_reads_stored_features_through_pinned_memory(dtype: str, tmp_path: Path) -> None:
    target, texts = on_gpu(), rows(40)
    kept = source_in(tmp_path, target, 40, features="memory", feature_dtype=dtype)
    computed = forwards(target)
    source = source_in(tmp_path, target, 40, features="disk", feature_dtype=dtype)
    assert len(computed) < 10, "in groups"
    source.ahead(texts[:20])
    read = source(texts).hidden  # half of it announced
    again = source_in(tmp_path, target, 40, features="disk", feature_dtype=dtype)(texts).hidden
    assert read.is_cuda and read.dtype == torch.bfloat16 and len(computed) < 10
    assert torch.equal(read, again) and torch.equal(read, kept(texts).hidden), "the same groups went through together"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["auto", "float8"])
def test_every_feature_store_gives_the_same_run_on_a_gpu(dtype: str, tmp_path: Path) -> None:
    target, curves = on_gpu(), {}
    for mode in ("online", "memory", "disk", "hybrid"):
        asked = config(features=mode, feature_dtype=dtype, attention="sdpa", compile="off")
        asked = replace(asked, optim=replace(asked.optim, pack_tokens=128, pack_blocks=12))
        train(run_of(asked, target, rows(10), tmp_path / mode))
        curves[mode] = losses(tmp_path / mode / "metrics.jsonl")
    # rows go through the target together, and how many at a time moves the last bit
    assert len(curves["online"]) >= 6
    assert all(curve == pytest.approx(curves["online"], rel=2e-2) for curve in curves.values())


# ---- FP8 -------------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 10**6), st.sampled_from([1e-30, 1.0, 3e4, 3e38]), st.sampled_from([torch.float32, torch.bfloat16])
)
def test_fp8_is_within_its_bound_and_outliers_stay_finite(seed: int, size: float, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(5, 64, generator=g)
    hidden[1, 3], hidden[2, 5], hidden[3] = 1e4, -3e5, 0
    hidden = (hidden / hidden.abs().max() * size).to(dtype)
    stored = Stored.of(hidden, FP8)
    assert stored.data.dtype == FP8 and stored.scale is not None and stored.scale.dtype == torch.float32
    assert stored.nbytes == 5 * 64 + 5 * 4
    back = stored.restore(torch.device("cpu"), torch.float32)
    largest = hidden.float().abs().amax(-1, keepdim=True)
    bound = torch.maximum(hidden.float().abs() / 16, largest / FP8_MAX / 1024)
    assert ((back - hidden.float()).abs() <= bound * 1.0001 + 1e-40).all()
    assert (back[3] == 0).all() and back.isfinite().all()


def test_a_float_type_is_kept_as_it_is() -> None:
    hidden = torch.randn(5, 64)
    assert torch.equal(Stored.of(hidden, torch.float32).restore(hidden.device, torch.float32), hidden)
    assert Stored.of(hidden, torch.bfloat16).nbytes == hidden.nbytes // 2


# ---- the store on disk -----------------------------------------------------------------------------------------


def test_complete_shards_survive_a_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DiskStore.__init__, "__defaults__", (30_000,))  # a shard of some four rows
    target = make_target()
    whole = source_in(tmp_path / "whole", target, 20, features="disk")(rows(20))
    if (child := os.fork()) == 0:
        try:
            started = forwards(target)
            target.layers[1].register_forward_hook(
                lambda *_: os.kill(os.getpid(), signal.SIGKILL) if len(started) > 14 else None
            )
            source_in(tmp_path / "killed", target, 20, features="disk")
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    kept = sum(len(load_file(path)["keys"]) for path in (tmp_path / "killed").glob("*.safetensors"))
    assert 4 <= kept <= 14
    stale = tmp_path / "killed/old.partial"
    stale.write_text("left by a kill")
    os.utime(stale, (0, 0))
    computed = forwards(target)
    again = source_in(tmp_path / "killed", target, 20, features="disk")
    assert len(computed) == 20 - kept and not stale.exists()
    assert torch.equal(again(rows(20)).hidden, whole.hidden)


def test_two_writers_share_a_directory(tmp_path: Path) -> None:
    target, texts = make_target(), rows(10)
    stores = [DiskStore(tmp_path, {"a": 1}) for _ in range(2)]
    sources = [FeatureSource(target, TAPS, 3072, store=store) for store in stores]
    for rank, source in enumerate(sources):
        source.fill(texts[rank::2])
        source.flush()
    stores[0].refresh()
    assert not sources[0].missing(texts) and sources[1].missing(texts) == texts[::2]
    assert torch.equal(sources[0](texts).hidden, FeatureSource(target, TAPS, 3072)(texts).hidden)


def test_a_process_keeps_its_own_rows_and_no_others(tmp_path: Path) -> None:
    target, texts = make_target(), rows(10)
    direct = FeatureSource(target, TAPS, 3072)(texts[1::3])
    for mode in ("memory", "disk"):
        computed = forwards(target)
        asked = config(features=mode, feature_dir=str(tmp_path), feature_cache_gb=1.0)
        source = open_features(asked, target, TAPS, texts, tmp_path, range(1, 10, 3))
        assert len(computed) == 3 and source.missing(texts) == [t for t in texts if t not in texts[1::3]]
        assert torch.equal(source(texts[1::3]).hidden, direct.hidden) and len(computed) == 3


@pytest.mark.parametrize("as_tokens", [list, lambda tokens: np.asarray(tokens, dtype=np.int32)], ids=["list", "array"])
def test_added_rows_reuse_features_of_equal_tokens(as_tokens: Callable[[list[int]], Any], tmp_path: Path) -> None:
    target, texts = make_target(), rows(12)
    asked = config(features="disk", feature_dir=str(tmp_path))
    open_features(asked, target, TAPS, texts[:8], tmp_path)
    computed = forwards(target)
    # four rows more, all in another order under other numbers, one of them twice
    moved = [Row(100 + i, row.prompt_tokens, as_tokens(row.tokens)) for i, row in enumerate(reversed(texts))]
    moved.append(replace(moved[0], index=200))
    source = open_features(asked, target, TAPS, moved, tmp_path)
    assert len(computed) == 4
    again = [replace(row, index=0) for row in moved]
    assert torch.equal(source(again).hidden, FeatureSource(target, TAPS, 3072)(again).hidden)
    shorter = replace(asked, prompts=replace(asked.prompts, max_length=len(texts[0].tokens)))
    longer = Row(0, 6, as_tokens([*texts[0].tokens, 7, 8]))
    computed.clear()
    assert open_features(shorter, target, TAPS, [longer], tmp_path)([longer]).hidden.shape[1] == len(texts[0].tokens)
    assert not computed


def test_rows_that_appear_twice_are_computed_and_kept_once() -> None:
    target, texts = make_target(), rows(3)
    twice = [*texts, *(replace(row, index=10 + row.index) for row in texts)]
    computed = forwards(target)
    source = FeatureSource(target, TAPS, 3072, store=MemoryStore(0, GIB))
    assert source.nbytes(source.missing(twice)) == source.nbytes(texts)
    hidden = source(twice).hidden
    assert torch.equal(hidden[:3], hidden[3:]) and len(computed) == 3


def test_foreign_features_are_refused_by_name(tmp_path: Path) -> None:
    source_in(tmp_path, make_target(), features="disk")
    for name, other, change in (
        ("weights", make_target(tied=False), {}),
        ("dtype", make_target(), {"feature_dtype": "float8"}),
    ):
        with pytest.raises(UserError, match=rf"of another run \({name}: .*, now .*\)"):
            source_in(tmp_path, other, features="disk", **change)
    for name, content, said in (
        ("torn.safetensors", "torn", "torn.safetensors: not a shard"),
        ("index.json", None, "without an index.json"),
        ("index.json", "{}", "not an index of features"),
        # layout 1
        (
            "index.json",
            '{"fingerprint": {"data": "0123"}}',
            "by another version",
        ),
    ):
        damage(tmp_path / name, content)
        with pytest.raises(UserError, match=said):
            source_in(tmp_path, make_target(), features="disk")


def test_features_of_a_target_with_one_other_value_are_refused(target_dir: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    shutil.copytree(target_dir, mine)
    source_in(tmp_path / "features", Target.load(str(mine), "cpu"), features="disk")
    tensors = load_file(mine / "model.safetensors")
    tensors["model.layers.0.mlp.down_proj.weight"][-1, -1] += 1  # not among the first values of the tensor
    save_file(tensors, mine / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=r"of another run \(target: .*, now .*\)"):
        source_in(tmp_path / "features", Target.load(str(mine), "cpu"), features="disk")


# ---- no room ---------------------------------------------------------------------------------------------------


def test_features_larger_than_the_disk_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = source_in(tmp_path, make_target(), features="disk")
    assert " MiB to " in capsys.readouterr().err
    shard = load_file(next(tmp_path.glob("*.safetensors")))
    assert source.nbytes(rows(10)) == shard["hidden"].nbytes
    store = DiskStore(tmp_path / "other", {})
    with pytest.raises(UserError, match=r"1073741824.0 GiB are needed, but [\d.]+ GiB are free"):
        store.reserve(1 << 60)


def test_a_write_that_fails_is_one_line_and_leaves_no_part(tmp_path: Path) -> None:
    with largest_file(4096), pytest.raises(UserError, match=r"cannot be written .*free some space"):
        source_in(tmp_path, make_target(), features="disk")
    assert [path.name for path in tmp_path.iterdir()] == ["index.json"]
    source_in(tmp_path, make_target(), features="disk")


def test_features_larger_than_memory_are_refused() -> None:
    with pytest.raises(UserError, match=r"run.features=memory needs [\d.]+ MiB"):
        source_in(Path(), make_target(), features="memory")


def test_memory_store_fills_device_then_host() -> None:
    row, keys = Stored(torch.zeros(4, 4)), [bytes([i]) for i in range(4)]
    store = MemoryStore(130, 70)
    for i, key in enumerate(keys):
        for _ in range(2):  # once is enough
            store.add(key, row)
        assert store.reads_ahead == (i > 1)
    assert [key in store for key in keys] == [True, True, True, False] and store.room == (2, 6)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 100), max_size=40), st.integers(50, 400))
def test_rows_of_one_forward_keep_their_order_and_fit(lengths: list[int], most: int) -> None:
    texts = [Row(i, 1, [0] * n) for i, n in enumerate(lengths)]
    groups = list(fitting(texts, lambda row: len(row.tokens), most))
    assert [row for group in groups for row in group] == texts
    sizes = [sum(len(row.tokens) for row in group) for group in groups]
    assert all(size <= most or len(group) == 1 for size, group in zip(sizes, groups, strict=True))
    # and no group could have taken the next one's first row
    assert all(size + len(after[0].tokens) > most for size, after in zip(sizes, groups[1:], strict=False))


def test_features_that_fit_only_in_part_are_announced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = make_target()
    needed = source_in(tmp_path, target).nbytes(rows(10))
    for room, expected in ((needed, False), (needed - 1, True)):
        monkeypatch.setattr("dflash_toolkit.train.features.source.device_room", lambda *_, room=room: room)
        source_in(tmp_path, target)
        said = capsys.readouterr().err
        assert ("features of 10 rows" in said and "run.feature_dtype=float8" in said) == expected


@pytest.mark.parametrize(
    ("option", "value"),
    [("features", "ram"), ("feature_dtype", "int4"), ("feature_gpu_share", 1.5), ("feature_cache_gb", -1.0)],
)
def test_a_value_out_of_range_is_named(option: str, value: object) -> None:
    with pytest.raises(UserError, match=rf"{option}.*{value}"):
        from_mapping(TrainConfig, {"target": "tiny", "run": {option: value}})


@pytest.mark.parametrize("lengths", [[2], [2, 2], [-1, 4]])
def test_an_inconsistent_shard_is_one_line(lengths: list[int], tmp_path: Path) -> None:
    store = DiskStore(tmp_path, {})
    store.add(bytes(TOKENS_BYTES), Stored.of(torch.zeros(3, 4), torch.float32))
    store.flush()
    (shard,) = tmp_path.glob("*.safetensors")
    keys = torch.zeros(2, dtype=torch.uint8)
    save_file({"hidden": torch.zeros(3, 4), "lengths": torch.tensor(lengths), "keys": keys}, shard)
    with pytest.raises(UserError, match=r"not a shard of features .*do not fit.*remove it and run again"):
        DiskStore(tmp_path, {})


def test_feature_dir_is_checked_before_responses(dflash_train: Program, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    said = dflash_train.refuses("run.features=disk", f"run.feature_dir={tmp_path}/file/x")
    assert said.startswith(f"run.feature_dir {tmp_path}/file/x: cannot be created")
    assert not list(dflash_train.output.glob("work/answers*.jsonl"))
