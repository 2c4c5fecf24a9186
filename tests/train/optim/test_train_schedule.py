"""Rows are dealt to lanes, of which each process has its own; every row is seen once an epoch, however runs go on."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_drafter, make_target
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import lines
from training_runs import repeating_rows

from dflash_toolkit.train import gradients, loop
from dflash_toolkit.train.config import TrainConfig
from dflash_toolkit.train.optim.schedule import PackedSchedule, Schedule, learning_rate_factor, rng_for
from dflash_toolkit.train.run.definition import Run
from dflash_toolkit.train.training_options import DrafterOptions, LossOptions, OptimOptions, RunOptions


def a_schedule(lengths: list[int], room: int, *more: Any) -> Schedule | PackedSchedule:
    """Returns a schedule with packs of the given number of tokens, or with batches of three rows."""
    return PackedSchedule(lengths, room, *more) if room else Schedule(len(lengths), 3, *more)


def taken(schedule: Schedule | PackedSchedule, turns: range) -> list[int]:
    return [i for turn in turns for i in schedule.indices(turn)]


LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=40)


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.sampled_from([0, 60, 90]), st.integers(1, 6), st.integers(0, 3))
def test_every_lane_has_rows_of_its_own_and_meets_them_once_an_epoch(
    lengths: list[int], room: int, group: int, seed: int
) -> None:
    schedule = a_schedule(lengths, room, 3, 0, seed, group)
    assert schedule.total % group == 0
    lanes = [[schedule.indices(turn) for turn in range(lane, schedule.total, group)] for lane in range(group)]
    own = [schedule.rows_of(lane, group) for lane in range(group)]
    assert sorted(i for rows in own for i in rows) == list(range(len(lengths)))
    for lane, rows in zip(lanes, own, strict=True):
        met = [i for batch in lane for i in batch]
        for epoch in range(3):
            assert sorted(met[epoch * len(rows) : (epoch + 1) * len(rows)]) == rows
        full = [batch for batch in lane if batch]
        assert lane[: len(full)] == full, "empty ones are at the end"
        assert all(sum(lengths[i] for i in batch) <= room or len(batch) == 1 for batch in full if room)
    counts, tokens = [len(rows) for rows in own], [sum(lengths[i] for i in rows) for rows in own]
    assert max(counts) - min(counts) <= 1 and (not room or max(tokens) - min(tokens) <= max(lengths))
    for world in (w for w in range(1, group + 1) if group % w == 0):
        for rank in range(world):
            turns = [t for t in range(schedule.total) if t % world == rank]
            assert {i for turn in turns for i in schedule.indices(turn)} == set(schedule.rows_of(rank, world))
            assert set(schedule.spare(rank)) <= set(schedule.rows_of(rank, world) or [0])
    assert [schedule.epoch(turn) for turn in (0, schedule.total)] == [0, 3]


def test_one_lane_takes_the_permutations_of_all_rows() -> None:
    schedule, packed = Schedule(10, 4, 2, 0, seed=3), PackedSchedule([10] * 10, 40, 2, 0, seed=3)
    for epoch in range(2):
        expected = torch.randperm(10, generator=rng_for(3, 1, epoch)).tolist()
        assert taken(schedule, range(3 * epoch, 3 * epoch + 3)) == expected
        assert taken(packed, range(3 * epoch, 3 * epoch + 3)) == expected


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.sampled_from([0, 60, 90]), st.lists(st.tuples(st.integers(1, 5), st.integers(0, 9)), max_size=3))
def test_rows_are_seen_once_an_epoch_after_a_changed_world_size(
    lengths: list[int], room: int, before: list[tuple[int, int]]
) -> None:
    history: list[Any] = []
    turn, met = 0, Counter(dict.fromkeys(range(len(lengths)), 0))
    for group, steps in [*before, (3, 10**6)]:
        schedule = a_schedule(lengths, room, 4, 0, 5, group, history)
        stop = min(turn + steps * group, schedule.total)
        met.update(taken(schedule, range(turn, stop)))
        assert schedule.epoch(stop) == pytest.approx(met.total() / len(lengths))
        turn, history = stop, schedule.history(stop)
        again = a_schedule(lengths, room, 4, 0, 5, group, history)
        assert again.total == schedule.total, "the same group continues unchanged"
        assert taken(again, range(turn, again.total)) == taken(schedule, range(turn, schedule.total))
    assert turn == schedule.total and set(met.values()) == {4}
    longer = a_schedule(lengths, room, 6, 0, 5, 3, history)
    met.update(taken(longer, range(turn, longer.total)))
    assert set(met.values()) == {6}, "two epochs more, whatever lane was through first"


def test_the_rest_of_an_epoch_is_dealt_again_and_comes_first() -> None:
    first = Schedule(40, 2, 2, 0, 1, 4)
    seen = taken(first, range(12))  # three of each lane
    second = Schedule(40, 2, 2, 0, 1, 2, first.history(12))
    rest = taken(second, range(12, 12 + 8))
    assert len(seen) == 24 and sorted(seen + rest) == list(range(40))
    endless = Schedule(40, 2, 1, 10**9, 1, 4, first.history(12))
    assert all(len(endless.indices(turn)) == 2 for turn in range(12, 200))


@pytest.mark.parametrize("groups", [(8, 1), (1, 8), (2, 4)])
def test_the_learning_rate_is_continuous_over_a_changed_plan(
    groups: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It depends on the share of the data that is done, whatever the steps were."""
    target, real, begun = make_target(), gradients.compute_loss, 0

    def interrupted(*args: Any) -> Any:
        nonlocal begun
        begun += 1
        if begun == 17:  # 17 of 32 micro batches
            raise KeyboardInterrupt
        return real(*args)

    def run(accumulate: int) -> None:
        config = TrainConfig(
            target="tiny", drafter=DrafterOptions(block_size=8), loss=LossOptions(anchors=4),
            optim=OptimOptions(optimizer="adamw", epochs=4, batch_size=2, accumulate=accumulate, warmup=0.01),
            run=RunOptions(log_every=1, save_every=1),
        )  # fmt: skip
        loop.train(
            Run(config, target, make_drafter(target).train(), repeating_rows(16), [], tmp_path, {}, lambda *_: None)
        )

    monkeypatch.setattr(gradients, "compute_loss", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(groups[0])
    run(groups[1])
    found = lines(tmp_path / "metrics.jsonl")
    micro = [round(8 * line["epoch"]) for line in found]
    assert micro[-1] == 32
    for before, after, line in zip([0, *micro], micro, found, strict=False):
        expected = learning_rate_factor(before // (after - before), 32 // (after - before), 0.01)
        assert line["learning_rate"] == pytest.approx(6e-4 * expected, abs=2e-6), after
