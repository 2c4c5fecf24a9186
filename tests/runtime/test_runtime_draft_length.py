"""The choice of the block size: its cost without accepted drafts, and the step times that it uses."""

import math
import random
import statistics
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import chain, product, repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from conftest import make_drafter, make_target
from engines import make_engine, pair

from dflash_toolkit import SamplingParams
from dflash_toolkit.kernels.features import KNOWN
from dflash_toolkit.runtime import EngineOptions, load_engine, timing
from dflash_toolkit.runtime import engine as engine_module
from dflash_toolkit.runtime.draft_length import BlockChooser, block_sizes, break_even, expected_tokens
from dflash_toolkit.runtime.engine import expected_of_first_requests
from dflash_toolkit.runtime.graphs import buckets_up_to
from dflash_toolkit.runtime.request import RollingAcceptance, StepShape
from dflash_toolkit.runtime.step_costs import StepCosts
from dflash_toolkit.runtime.timing import Shape, Times, cached_times, extended, measured_times, shapes_to_measure

OPTIONS = EngineOptions(max_num_seqs=2, kv_cache_tokens=1200, page_size=4, num_speculative_tokens=7)


def requests(*rates: float, tried: bool = True, known: bool = True, in_flight: tuple[int, ...] = ()) -> list[Any]:
    acceptances = [SimpleNamespace(rate=rate, tried=tried, known=known) for rate in rates]
    return [
        SimpleNamespace(acceptance=acceptance, blocks_in_flight=list(in_flight), length=0) for acceptance in acceptances
    ]


def chooser(**times: float) -> BlockChooser:
    """Times of blocks s1, s4, s8, s16 in milliseconds, for every bucket."""
    table = {(1, int(name[1:])): t for name, t in times.items()}
    return BlockChooser([int(name[1:]) for name in times], StepCosts(table), lambda rows: 1)


def test_drafts_pay_from_the_acceptance_at_which_a_block_is_faster() -> None:
    assert break_even({1: 1.0, 4: 1.5}) == pytest.approx(1.5, abs=0.02)
    assert break_even({1: 1.0, 2: 1.25, 8: 4.0}) == pytest.approx(4 / 3, abs=0.03), "2 tokens pay from a rate of 1/4"
    assert break_even({1: 1.0, 2: 2.5}) == math.inf


def test_expected_tokens_sum_the_acceptance_probabilities() -> None:
    for rate in (0.0, 0.3, 0.865, 1.0):
        assert expected_tokens([rate], 8) == pytest.approx([sum(rate**i for i in range(n)) for n in range(1, 9)])
    assert expected_tokens([1.0, 0.5], 2) == [2.0, 3.5]


def test_the_block_that_promises_most_tokens_a_second_is_chosen() -> None:
    times = {"s1": 4.0, "s4": 5.0, "s8": 5.2, "s16": 5.6}
    assert chooser(**times)(requests(0.95)) == 16
    assert chooser(**times)(requests(0.5)) in (4, 8)
    assert chooser(**times)(requests(0.05)) == 1, "plain decoding where no draft is accepted"
    compute_bound = {"s1": 4.0, "s4": 6.0, "s8": 10.0, "s16": 19.0}
    assert chooser(**compute_bound)(requests(0.865)) < 16
    assert chooser(**compute_bound)(requests(0.95)) == 8
    assert chooser(**compute_bound)(requests(0.95, 0.0, 0.0, 0.0, 0.0)) == 4, "the batch as a whole"
    assert chooser(**compute_bound, s2=4.4)(requests(0.6)) == 2


def test_the_first_drafts_of_all_are_short_and_awaited() -> None:
    choose = chooser(s1=4.0, s4=5.0, s16=5.6)
    unknown: dict[str, Any] = {"tried": False, "known": False}
    assert choose(requests(0.9, 0.9, **unknown)) == 4
    assert choose(requests(0.9, 0.9, **unknown, in_flight=(4,))) == 1
    assert choose(requests(0.9, 0.9, **unknown, in_flight=(1,))) == 4, (
        "the request with drafts was preempted or cancelled"
    )
    assert choose(requests(0.9, 0.9, tried=False, in_flight=(16,))) == 16, "drafts of other requests were verified"


def test_acceptance_of_other_requests_is_inherited() -> None:
    others = RollingAcceptance()
    ours = RollingAcceptance(others)
    assert not ours.known
    others.observe(4, 0)
    assert ours.known and not ours.tried


def test_a_plain_batch_tries_a_draft_now_and_then() -> None:
    choose = chooser(s1=4.0, s2=4.9, s4=5.0, s16=5.6)
    chosen = [choose(requests(0.0)) for _ in range(520)]
    assert [i + 1 for i, block in enumerate(chosen) if block > 1] == [8, 24, 56, 120, 248, 376, 504]
    assert choose(requests(0.95)) == 16, "it pays again"
    assert [choose(requests(0.0)) for _ in range(8)] == [1] * 7 + [4], "soon at first, again"
    dear = chooser(s1=5.1, s2=6.2, s4=7.4)  # as in large batches
    assert [dear(requests(0.0)) for _ in range(8)] == [1] * 7 + [2], "the cheapest probe"
    none_shorter = chooser(s1=4.0, s8=5.0, s16=5.6)
    assert [none_shorter(requests(0.0)) for _ in range(8)] == [1] * 7 + [8]


@pytest.mark.parametrize(("new", "old", "steps"), [(1, 0, 8), (1, 3, 32), (2, 2, 16), (1, 31, 128)])
def test_a_plain_batch_tries_sooner_the_more_of_it_is_new(new: int, old: int, steps: int) -> None:
    choose = chooser(s1=4.0, s4=5.0)
    for _ in range(500):
        choose(requests(0.0))
    while choose(requests(0.0)) == 1:
        pass
    batch = [*requests(*[0.0] * new, tried=False), *requests(*[0.0] * old)]
    assert [choose(batch) for _ in range(steps)] == [1] * (steps - 1) + [4]


# ms of a step of Qwen3-8B on an H200 by batch and block; blocks that were not measured are interpolated
STEP_MS = {
    1: {1: 4.27, 2: 5.2, 4: 5.25, 8: 5.3, 16: 5.31},
    8: {1: 4.58, 2: 5.6, 4: 5.8, 8: 6.1, 16: 6.94},
    32: {1: 5.09, 2: 6.4, 4: 7.8, 8: 10.1, 16: 16.0},
}


@pytest.mark.parametrize(("batch", "times"), STEP_MS.items())
def test_requests_without_a_useful_draft_soon_decode_plainly(batch: int, times: dict[int, float]) -> None:
    """Returns the cost of rejected drafts over plain steps, for whole answers, without writing the context."""
    choose = BlockChooser(
        block_sizes(16), StepCosts({(batch, size): t for size, t in times.items()}), lambda rows: batch
    )
    expected = expected_of_first_requests()
    unread = deque[int]()
    those = [
        SimpleNamespace(acceptance=RollingAcceptance(expected), blocks_in_flight=unread, length=0) for _ in range(batch)
    ]
    spent, over = 0.0, {}
    for tokens in range(1, 257):
        unread.append(choose(those))
        spent += times[unread[-1]]
        block = unread.popleft() if len(unread) > 1 else 1  # a step is launched before the one before it is read
        for request in those:
            if block > 1:
                request.acceptance.observe(block - 1, 0)
                expected.observe(block - 1, 0)
        over[tokens] = spent / (tokens * times[1]) - 1
    assert over[64] < 0.023 and over[128] < 0.013 and over[256] < 0.008


@pytest.mark.slow
@pytest.mark.parametrize(("batch", "times"), STEP_MS.items())
@pytest.mark.parametrize("rate", [0.0, 0.3, 0.5, 0.865])  # acceptance lengths of 1, 1.4, 2, 6.7
@pytest.mark.sampled
def test_choosing_is_hardly_slower_than_plain_decoding(batch: int, times: dict[int, float], rate: float) -> None:
    """Answers of 256 tokens, one batch after the other; the engine keeps their acceptance."""
    chance = random.Random(0)
    choose = BlockChooser(
        block_sizes(16), StepCosts({(batch, size): t for size, t in times.items()}), lambda rows: batch
    )
    expected = expected_of_first_requests()
    gains = []
    for _ in range(24):
        left = dict.fromkeys(range(batch), 256)
        those = [SimpleNamespace(acceptance=RollingAcceptance(expected), blocks_in_flight=[], length=0) for _ in left]
        spent = 0.0
        while left:
            block = choose([those[row] for row in left])
            spent += times[block]
            for row in list(left):
                accepted = next((i for i in range(block - 1) if chance.random() >= rate), block - 1)
                if block > 1:
                    those[row].acceptance.observe(block - 1, accepted)
                    expected.observe(block - 1, accepted)
                left[row] -= accepted + 1
                if left[row] <= 0:
                    del left[row]
        gains.append(256 * times[1] / spent)
    assert statistics.mean(gains) > 0.98 and min(gains) > 0.96
    assert statistics.mean(gains) > (1.1 if rate == 0.5 else 2.0 if rate == 0.865 else 0.0)


def test_a_small_gain_does_not_change_the_block() -> None:
    choose = chooser(s1=4.0, s8=5.00, s16=5.55)
    assert len({choose(requests(rate)) for rate in [0.80, *[0.79, 0.81] * 10]}) == 1


def test_rolling_acceptance_follows_observed_steps() -> None:
    rolling = RollingAcceptance()
    for _ in range(60):
        rolling.observe(7, 0)
    assert rolling.rate < 0.02
    for _ in range(60):
        rolling.observe(7, 7)
    assert rolling.rate > 0.98
    mixed = RollingAcceptance()
    for i in range(400):
        mixed.observe(7, 3 if i % 2 else 4)  # 3 or 4 of 4 or 5 judged
    assert mixed.rate == pytest.approx(3.5 / 4.5, abs=0.02)


def test_a_new_request_starts_where_others_lately_were() -> None:
    target = make_target()
    engine = load_engine(target, make_drafter(target), options=OPTIONS)[0]
    assert engine.request([1, 2]).acceptance.rate == pytest.approx(0.7)
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    for prompt in ([1, 2, 3], [9, 9], [4]):
        engine.generate([prompt], params)
    stats = engine.stats
    assert stats.drafted and stats.accepted < 0.2 * stats.steps, "a random drafter is of little use"
    new = engine.request([1, 2]).acceptance
    before = new.rate
    assert before < 0.3 and not new.tried
    judged = [step.accepted for step in engine.generate([[7, 7]], params)[0].steps if step.drafted]
    assert judged and new.rate == engine.request([1, 2]).acceptance.rate < before, "what others had since counts too"
    plain = load_engine(target, None, options=replace(OPTIONS, num_speculative_tokens=0))[0]
    plain.generate([[1, 2, 3]], params)
    assert plain.request([1]).acceptance.rate == pytest.approx(0.7), "nothing was judged"


def test_block_sizes_end_with_the_drafters_own() -> None:
    assert block_sizes(16) == (1, 2, 4, 8, 16) and block_sizes(10) == (1, 2, 4, 8, 10) and block_sizes(2) == (1, 2)


def test_step_times_are_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    seconds = {(1, 16): 0.5, (8, 4): 0.25, (8, 64, 16): 0.75}
    measure = Mock(return_value=seconds)
    for key in ("a", "a", "b"):
        assert cached_times([key], measure) == seconds
    assert measure.call_count == 2
    for file in (tmp_path / "dflash-toolkit").iterdir():
        file.write_text("torn {")
    assert cached_times(["a"], measure) and measure.call_count == 3
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))  # no directory: nothing can be kept
    assert cached_times(["a"], measure) and measure.call_count == 4


def test_retune_measures_step_times_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    measure = Mock(side_effect=lambda: {(1, 1): float(measure.call_count)})
    found = [cached_times("key", measure, anew) for anew in (False, False, True, False)]
    assert found == [{(1, 1): n} for n in (1.0, 1.0, 2.0, 2.0)], "and kept"
    monkeypatch.setattr(engine_module, "measure_steps", lambda runner, shapes: measure() and dict.fromkeys(shapes, 1.0))
    for retune, calls in ((False, 3), (False, 3), (True, 4)):
        make_engine(*pair(), num_speculative_tokens=None, retune=retune)
        assert measure.call_count == calls


def clocked(
    times: Mapping[Shape, Iterator[float]],
) -> tuple[Times, list[Shape]]:
    """Returns the measured times if every shape's runs take these times, and the order of the runs."""
    order: list[Shape] = []

    def step(shape: Shape) -> Callable[[], float]:
        return lambda: order.append(shape) or next(times[shape])  # type: ignore[func-returns-value]

    found = measured_times({shape: step(shape) for shape in times}, lambda run: run(), 3, 60.0)  # type: ignore
    return found, order


def test_a_noisy_sample_decides_nothing() -> None:
    one, two = (1, 1), (1, 8)
    found, order = clocked({one: iter([9.0, 1.0, 1.1]), two: iter([2.0, 2.2, 0.1])})
    assert found == {one: 1.1, two: 2.0} and order == [one, two] * 3, "in turns"


def test_times_that_fall_with_more_rows_are_measured_again() -> None:
    sure, odd, large = repeat(1.0), chain([8.0] * 3, repeat(1.5)), repeat(2.0)
    found, order = clocked({(1, 1): sure, (1, 4): odd, (1, 8): large, (2, 1): repeat(1.2)})
    assert found == {(1, 1): 1.0, (1, 4): 1.5, (1, 8): 2.0, (2, 1): 1.2}
    assert order[12:] == [(1, 4), (1, 8)] * 3, "those two alone, and once"
    found, order = clocked({(1, 1): repeat(3.0), (2, 1): repeat(2.0), (4, 1): repeat(2.0)})
    assert found[1, 1] == 3.0 and len(order) == 9 + 6 * timing.AGAIN, "it is so"
    assert timing.out_of_order({(1, 1): 1.0, (2, 1): 0.99, (2, 4): 1.0, (1, 4): 1.01}) == [], "within the noise"
    trees = {(4, 16, 8): 2.0, (4, 32, 8): 1.0, (4, 32, 16): 1.5, (8, 32, 16): 1.2, (4, 8): 3.0, (8, 32): 1.0}
    assert timing.out_of_order(trees) == [(4, 16, 8), (4, 32, 8), (4, 32, 16), (8, 32, 16)], "by each of three axes"


def test_steps_of_few_batch_sizes_are_measured() -> None:
    sizes = block_sizes(16)
    assert shapes_to_measure(28, sizes) == list(product((1, 2, 4, 8, 16, 28), sizes)), "not of 24"
    large = [shape for shape in shapes_to_measure(256, sizes) if shape[0] > 32]
    assert large == [*product((64,), sizes), *product((128,), sizes[:4]), *product((256,), sizes[:3])]
    assert shapes_to_measure(2000, sizes)[-2:] == [(2000, 1), (2000, 2)]


def test_times_of_other_large_batches_follow_lines() -> None:
    """Steps with a time that is linear in their rows, and constant below 64 rows."""
    sizes, batches = block_sizes(16), buckets_up_to(256)
    true = {(batch, size): max(batch * size, 64) + batch / 4 for batch, size in product(batches, sizes)}
    found = extended({shape: true[shape] for shape in shapes_to_measure(256, sizes)}, batches, sizes)
    assert found == pytest.approx(true)
    trees = {(64, 128, 8): 2.0, (64, 160, 8): 3.0, (128, 160, 8): 5.0, (64, 1): 1.0, (128, 1): 1.0, (64, 96, 8): 1.0}
    assert extended(trees, [96], (1,)) == trees | {(96, 1): 1.0, (96, 128, 8): 2.0, (96, 160, 8): 4.0}


def test_other_kernels_are_timed_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(timing, "KERNELS", tmp_path)
    for source, seconds in (("x = 1", 0.5), ("x = 2", 0.25)):
        (tmp_path / "linear.py").write_text(source)
        for _ in range(2):
            assert cached_times("key", lambda now=seconds: {(1, 1): now}) == {(1, 1): seconds}


def test_times_of_an_emulated_gpu_are_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    places = []
    for name in ("sm_90", "sm_86", "sm_86"):
        monkeypatch.setattr(timing, "features_of", lambda device, name=name: KNOWN[name])
        places.append(timing.place_of(torch.device("cuda")))
    assert places[0] != places[1] == places[2]


def test_a_measured_draft_length_changes_no_answer(target_dir: Path, drafter_dir: Path) -> None:
    free = EngineOptions(max_num_seqs=2, kv_cache_tokens=1200, page_size=4)
    params = SamplingParams(max_tokens=30)
    answers = []
    for options in (free, OPTIONS):
        engine, _ = load_engine(str(target_dir), str(drafter_dir), "cpu", options=options)
        answers.append([g.tokens for g in engine.generate([[1, 2, 3], [7] * 20, [9]], params)])
    assert answers[0] == answers[1]


def test_random_drafter_is_disabled_after_few_steps() -> None:
    target, options = make_target(), EngineOptions(max_num_seqs=1, kv_cache_tokens=1200, page_size=4)
    engine = load_engine(target, make_drafter(target), options=options)[0]
    times = {(1, 1): 1.0, (1, 4): 1.3, (1, 8): 1.4}
    choose = BlockChooser([1, 4, 8], StepCosts(times), lambda rows: 1)
    engine.scheduler.choose_shape = lambda requests: StepShape(choose(requests))
    (got,) = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=300, ignore_eos=True))
    drafting = [step for step in got.steps if step.drafted]
    assert len(drafting) <= 12, "a dozen of 300"
