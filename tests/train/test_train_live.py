"""What a live drafter is trained on and when it is served: bounded memory, no leaks, few wrong decisions."""

import math
import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_toolkit.train.live.promotion import LEAST, LEVEL, LiveAcceptance, Promotion, Rollback, sure_after
from dflash_toolkit.train.live.replay import ANCHORS, HELD_OUT, ReplayBuffer, Reservoir, is_held_out, size_of
from dflash_toolkit.train.online import Record
from dflash_toolkit.train.run.held_out import Evaluation


def record(number: int, tokens: int = 12) -> Record:
    """Returns a record with tokens of its own."""
    ids = [number, *range(tokens - 1)]
    return Record(ids, torch.full((tokens, 4), float(number)), [(4, tokens)])


# ---- replay ----------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 300), st.integers(6, 40), st.floats(1.0, 8.0)), max_size=120), st.integers())
def test_the_buffer_never_exceeds_its_memory(traffic: list[tuple[int, int, float]], seed: int) -> None:
    buffer = ReplayBuffer(5000, [record(1000 + i) for i in range(3)], seed=seed)
    for number, tokens, length in traffic:
        buffer.add(record(number, tokens), length)
        kept = [*buffer._training.records, *buffer.held_out]
        assert buffer.nbytes == sum(map(size_of, kept)) <= 5000 and len(buffer) == len(kept)


@settings(max_examples=20, deadline=None)
@given(st.integers())
def test_a_held_out_prompt_is_never_trained_on(seed: int) -> None:
    """Also if it comes again with another answer."""
    buffer, dice = ReplayBuffer(10**6, seed=seed), random.Random(seed)
    for _ in range(600):
        buffer.add(record(dice.randrange(150), dice.randint(8, 12)), 2.0)
    held = {one.tokens[0] for one in buffer.held_out}
    trained = {one.tokens[0] for _ in range(20) for one in buffer.sample(64)}
    assert held and trained and not held & trained


def test_a_tenth_of_the_prompts_is_held_out() -> None:
    held = sum(is_held_out(record(i)) for i in range(4000))
    assert abs(held / 4000 - HELD_OUT) < 0.02


def test_low_acceptance_and_recent_records_weigh_more() -> None:
    counts = {"low": 0, "high": 0, "old": 0}
    for seed in range(30):
        reservoir = Reservoir(size_of(record(0)) * 40, random.Random(seed), recent=100)
        for number in range(400):
            reservoir.add(record(number), 1 / 1.5 if number % 2 else 1 / 6.0)
        assert len(reservoir) == 40
        for kept in reservoir.records:
            counts["low" if kept.tokens[0] % 2 else "high"] += 1
            counts["old"] += kept.tokens[0] < 200
    assert counts["low"] > 2.5 * counts["high"] and 0 < counts["old"] < 0.4 * sum((counts["low"], counts["high"]))


def test_a_sample_holds_its_share_of_anchors_and_no_record_twice() -> None:
    anchors = [record(1000 + i) for i in range(50)]
    buffer = ReplayBuffer(10**6, anchors)
    for number in range(200):
        buffer.add(record(number), 2.0)
    sample = buffer.sample(40)
    numbers = [one.tokens[0] for one in sample]
    assert len(set(numbers)) == len(numbers) == 40 and sum(n >= 1000 for n in numbers) == round(40 * ANCHORS)
    few = ReplayBuffer(10**6, anchors[:2])
    assert [one.tokens[0] for one in few.sample(40)] == [1000, 1001] or len(few.sample(40)) == 2


def test_a_record_that_cannot_be_trained_on_is_skipped() -> None:
    buffer = ReplayBuffer(10**6)
    spoiled = record(1)
    spoiled.taps[3, 2] = torch.inf
    buffer.add(spoiled, 2.0)
    buffer.add(Record([1, 2, 3], torch.zeros(3, 4), [(2, 3)]), 2.0)
    assert len(buffer) == buffer.added == buffer.nbytes == 0


def test_a_record_larger_than_the_memory_does_not_stay() -> None:
    buffer = ReplayBuffer(500)
    buffer.add(record(1, 4000), 2.0)
    assert len(buffer) == buffer.nbytes == 0


# ---- promotion and rollback ------------------------------------------------------------------------------------


def evaluated(counts: Sequence[tuple[int, int]]) -> Evaluation:
    tokens, steps = zip(*counts, strict=True)
    return Evaluation(0, ("",) * len(tokens), tokens, steps)


def walks(dice: random.Random, rate: float, texts: list[float], length: int = 60) -> Evaluation:
    """Returns walks over the same texts: each has its own difficulty, and the drafter a rate."""

    def steps(difficulty: float) -> int:
        done = count = 0
        while done < length:
            accepted = 0
            while accepted < 7 and dice.random() < min(0.97, rate * difficulty):
                accepted += 1
            done, count = done + accepted + 1, count + 1
        return count

    return evaluated([(length, steps(each)) for each in texts])


def promotions(rate: float, looks: int, trials: int = 60) -> int:
    """Returns how many of `trials` servers promote a candidate within some looks."""
    found = 0
    for seed in range(trials):
        dice, promotion = random.Random(seed), Promotion()
        texts = [dice.uniform(0.6, 1.2) for _ in range(32)]
        found += any(promotion.judge(walks(dice, rate, texts), walks(dice, 0.6, texts)) for _ in range(looks))
    return found


def test_an_equal_candidate_is_rarely_promoted_however_often_it_is_judged() -> None:
    assert promotions(0.6, looks=12) <= 5  # of 60; 1.4 are expected at most


def test_a_better_candidate_is_promoted() -> None:
    assert promotions(0.7, looks=2) >= 57


def test_a_promotion_starts_the_count_of_looks_again() -> None:
    promotion, worse, better = Promotion(), evaluated([(60, 40)] * 20), evaluated([(60, 20)] * 20)
    assert not promotion.judge(worse, worse) and not promotion.judge(worse, better) and promotion.looks == 2
    assert promotion.judge(better, worse) and promotion.looks == 0


def test_the_errors_of_all_looks_sum_to_the_level() -> None:
    assert sum(1 - sure_after(k) for k in range(1, 20000)) == pytest.approx(LEVEL, rel=1e-3)


def live(dice: random.Random, rate: float, kinds: dict[str, int], harder: str = "") -> LiveAcceptance:
    found = LiveAcceptance()
    for kind, count in kinds.items():
        base = rate * (0.5 if kind == harder else 1.0)
        for tokens, steps in zip(
            *(lambda e: (e.tokens, e.steps))(walks(dice, base, [dice.uniform(0.8, 1.1) for _ in range(count)])),
            strict=True,
        ):
            found.add(kind, tokens, steps)
    return found


def rollbacks(new: float, trials: int = 50, **changes: int) -> int:
    found = 0
    for seed in range(trials):
        dice = random.Random(seed)
        old = live(dice, 0.65, {"a": 60, "b": 60}, "b")
        found += Rollback().judge(live(dice, new, {"a": 60, "b": 60} | changes, "b"), old)
    return found


def test_a_version_that_accepts_less_is_rolled_back() -> None:
    assert rollbacks(0.5) >= 48


def test_an_equal_version_is_rarely_rolled_back() -> None:
    assert rollbacks(0.65) <= 4


def test_a_change_of_traffic_alone_is_no_reason_to_roll_back() -> None:
    """Hard requests become ten times as frequent; the old version would do no better."""
    assert rollbacks(0.65, a=20, b=200) <= 4


def test_versions_without_common_kinds_are_not_compared() -> None:
    dice, rollback = random.Random(1), Rollback()
    assert not rollback.judge(live(dice, 0.1, {"a": LEAST}), live(dice, 0.9, {"b": 99, "a": LEAST - 1}))
    assert rollback.looks == 0
    empty = LiveAcceptance()
    empty.add("a", 3, 0)
    assert empty.requests == 0 and math.isnan(empty.tau)
