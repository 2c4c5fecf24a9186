"""Estimated step times: corrected by observed steps, and the choices that follow when measured times are wrong."""

import random
import time
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gpu_engines import make_engine, pair, prompts_of
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_toolkit import SamplingParams
from dflash_toolkit.models.spec import ModelSpec, MoeSpec
from dflash_toolkit.runtime.draft_length import BlockChooser, block_sizes, expected_tokens
from dflash_toolkit.runtime.graphs import CAPTURED_AT_START
from dflash_toolkit.runtime.request import RollingAcceptance, StepShape
from dflash_toolkit.runtime.step_costs import Explorer, StepCosts, rows_per_request
from dflash_toolkit.runtime.timing import Shape, Times
from dflash_toolkit.runtime.trees.budget import BudgetChooser, Promise, key_of, row_buckets
from scripts.bench.experts import routing
from scripts.shapes import named_shape

BLOCKS = block_sizes(16)
QWEN = ModelSpec.of_target(named_shape("qwen3.6-35b-a3b")).layers[0].ffn
assert isinstance(QWEN, MoeSpec)


class Truth:
    """The true seconds of steps: longer blocks take longer, also for each token in the cache.

    Args:
        wrong: largest factor by which measured times are wrong, in both directions.
    """

    def __init__(self, dice: random.Random, batch: int, wrong: float) -> None:
        self.batch = batch
        self._empty, self._each, empty, each = dict[Shape, float](), dict[int, float](), 4e-3, 4e-8
        steepest, steepest_each = dice.uniform(1.05, 2.5), dice.uniform(1.0, 2.5)
        for size in BLOCKS:
            self._empty[batch, size], self._each[size] = empty, each
            empty *= dice.uniform(1.0, steepest)
            each *= dice.uniform(1.0, steepest_each)
        self.measured: Times = {key: seconds * wrong ** dice.uniform(-1, 1) for key, seconds in self._empty.items()}

    def seconds(self, size: int, tokens: int) -> float:
        return self._empty[self.batch, size] + self._each[size] * tokens


def run(truth: Truth, costs: StepCosts, rate: float, lengths: range, steps: int, dice: random.Random) -> float:
    """Decodes and returns the tokens per second, relative to plain decoding over the same contexts.

    The first 32 steps of a new engine do not count. At most 16 requests are different.
    """
    batch, spent, plain = truth.batch, 0.0, 0.0
    choose, prior = BlockChooser(BLOCKS, costs, lambda rows: batch), RollingAcceptance()
    unread = deque[tuple[int, int, float]]()
    some: list[Any] = [SimpleNamespace(acceptance=RollingAcceptance(prior)) for _ in range(min(batch, 16))]
    for step in range(steps):
        length = lengths[step * len(lengths) // steps]
        for request in some:
            request.length, request.blocks_in_flight = length, [size for size, *_ in unread]
        size, cached = choose(some * (batch // len(some))), batch * length
        seconds = truth.seconds(size, cached)
        spent += seconds * (step >= 32)
        plain += (step >= 32) * expected_tokens([rate], size)[-1] * truth.seconds(1, cached)
        unread.append((size, cached, seconds * dice.uniform(0.98, 1.02)))
        if len(unread) > 1:  # a step is launched before the one before it is read
            size, cached, seconds = unread.popleft()
            costs.observe((batch, size), cached, seconds)
            for request in some if size > 1 else []:
                accepted = next((i for i in range(size - 1) if dice.random() >= rate), size - 1)
                request.acceptance.observe(size - 1, accepted)
                prior.observe(size - 1, accepted)
    return plain / spent


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    batch=st.sampled_from((1, 8, 64, 256)),
    rate=st.sampled_from((0.0, 0.3, 0.6, 0.865)),
    lengths=st.sampled_from((range(100, 600), range(500, 32000), range(30000, 32000), range(32000, 100, -1))),
    wrong=st.sampled_from((1.0, 1.2)),
)
def test_chosen_lengths_are_as_fast_as_plain_decoding(
    seed: int, batch: int, rate: float, lengths: range, wrong: float
) -> None:
    """With wrong measured times, growing and shrinking contexts, and noise of 2 % in what is observed."""
    dice = random.Random(seed)
    truth = Truth(dice, batch, wrong)
    assert run(truth, StepCosts(truth.measured, 1e5), rate, lengths, 1000, dice) >= 0.98


class MixtureTruth(Truth):
    """A mixture of experts, 40 layers of 256 experts: measured with rows that choose independently.

    A few experts are popular, and rows of a block are similar, as in `scripts/bench/experts.py`: synthetic statistics.
    """

    def __init__(self, batch: int, skew: float) -> None:
        super().__init__(random.Random(0), batch, 1.0)
        torch.manual_seed(0)
        for size in BLOCKS:
            rows = batch * size
            independent, true = (
                4e-3 + 8e-6 * rows + 40e-6 * len(routing(QWEN, rows, each, torch.device("cpu"))[1].unique())
                for each in (0.0, skew)
            )
            self.measured[batch, size], self._empty[batch, size] = independent, true


@pytest.mark.parametrize("skew", [1.0, 3.0])
@pytest.mark.parametrize("batch", [32, 64, 128])
def test_lengths_for_skewed_experts_are_as_fast_as_plain(batch: int, skew: float) -> None:
    truth, faster = MixtureTruth(batch, skew), 0
    for rate in (0.0, 0.3, 0.6, 0.865):
        dice = random.Random(0)
        found = run(truth, StepCosts(truth.measured, 1e6, routes=True), rate, range(500, 1000), 400, dice)
        best = max(expected_tokens([rate], 16)[size - 1] / truth.seconds(size, batch * 750) for size in BLOCKS)
        faster += found > 1.2
        assert found >= max(0.98, 0.96 * best * truth.seconds(1, batch * 750)), rate
    assert faster, "drafts pay at some rate"


def test_a_token_takes_the_time_of_as_many_weights() -> None:
    costs = StepCosts({(1, 1): 2.0, (1, 8): 3.0, (8, 16, 8): 4.0}, 1000.0)
    assert costs.seconds([(1, 1), (1, 8), (8, 16, 8)], 500) == [3.0, 4.0, 5.0]
    assert StepCosts({(1, 1): 2.0}).seconds([(1, 1)], 500) == [2.0], "on a CPU"
    assert [rows_per_request(shape) for shape in ((256, 1), (4, 10), (8, 16, 16), (5, 16, 4))] == [1, 16, 2, 4]
    assert (1, 8) in costs and (1, 16) not in costs


@pytest.mark.parametrize("tokens", [0, 100, 1000, 100_000])
def test_estimates_converge_to_observed_steps(tokens: int) -> None:
    costs = StepCosts({(8, 1): 2.0, (8, 4): 3.0}, 1000.0)
    (before,) = costs.seconds([(8, 4)], tokens)
    for _ in range(20):
        costs.observe((8, 4), tokens, 1.4 * before)
    assert costs.seconds([(8, 4)], tokens) == pytest.approx([1.4 * before], rel=0.01)
    if tokens == 100_000:
        assert costs.seconds([(8, 4)]) == pytest.approx([3.0], rel=0.1), "an empty batch takes what was measured"
    if tokens == 0:
        assert costs.seconds([(8, 1)]) == [2.0], "other lengths keep their times"


def test_one_slow_step_at_most_doubles_an_estimate() -> None:
    costs = StepCosts({(1, 1): 1.0})
    costs.observe((1, 1), 0, 1e3)
    assert costs.seconds([(1, 1)])[0] <= 2.0
    costs.observe((1, 2), 0, 1.0)
    assert (1, 2) not in costs, "a shape that was not measured"


def test_rows_without_observed_steps_follow_the_nearest() -> None:
    costs = StepCosts({(8, 1): 1.0, (8, 4): 1.0, (8, 16): 1.0}, 1000.0)
    for _ in range(60):
        costs.observe((8, 4), 10**6, 3001.0)
    one, four, sixteen = costs.seconds([(8, 1), (8, 4), (8, 16)], 10**6)
    assert one == pytest.approx(1001.0) and four == pytest.approx(3001.0, rel=0.01)
    assert sixteen == pytest.approx(four, rel=0.01), "more rows do not take less"
    for _ in range(60):
        costs.observe((8, 4), 10**6, 501.0)
    assert costs.seconds([(8, 1)], 10**6)[0] == pytest.approx(501.0, rel=0.01), "fewer rows do not take more"


def seconds_of_experts(rows: float) -> float:
    """Returns the time of a step that reads 64 experts' weights, if so many rows choose 4 of them independently."""
    return 2.0 + 0.1 * 64 * (1 - (1 - 4 / 64) ** rows)


@pytest.mark.parametrize("batch", [1, 4])
def test_observed_steps_correct_other_rows_of_experts(batch: int) -> None:
    """Real rows of a block are similar: they read as many experts as half as many independent rows."""
    times: Times = {(batch, size): seconds_of_experts(batch * size) for size in BLOCKS}
    times |= {(2 * batch, 1): 5.0}
    costs, dense = StepCosts(times, routes=True), StepCosts(times)
    true = {size: seconds_of_experts(batch * (1 + size) / 2) for size in BLOCKS}
    for each in (costs, dense):
        for _ in range(8):
            each.observe((batch, 4), 0, true[4])
            each.observe((batch, 1), 0, true[1])
    (before,) = dense.seconds([(batch, 8)])
    assert before == times[batch, 8], "a dense step is as long as it was measured"
    (found,) = costs.seconds([(batch, 8)])
    assert abs(found - true[8]) < 0.5 * abs(before - true[8])
    assert costs.seconds([(batch, 1), (2 * batch, 1)]) == pytest.approx([true[1], 5.0], rel=0.01)
    assert not costs.known((batch, 8), 0), "it is still tried"
    costs.observe((batch, 8), 0, true[8])
    assert costs.seconds([(batch, 8)])[0] == pytest.approx(true[8], rel=0.04)


def test_observed_times_are_old_when_the_context_grows() -> None:
    costs = StepCosts({(8, 1): 1.0}, 1000.0)
    assert costs.known((8, 1), 0), "nothing is observed on a CPU"
    for known in (False, True):
        costs.observe((8, 1), 1000, 2.0)
        assert costs.known((8, 1), 1000) == known
    assert costs.known((8, 1), 1100) and not costs.known((8, 1), 1500) and not costs.known((8, 1), 500)
    assert not costs.known((8, 2), 1000)


def test_hopeful_steps_of_unknown_time_are_tried() -> None:
    costs = StepCosts(dict.fromkeys(((8, 1), (8, 2), (8, 4)), 1.0))
    promised: dict[Shape, float] = {(8, 1): 2.1, (8, 2): 3.0, (8, 4): 1.9}
    explore = Explorer(costs)
    assert {explore(promised, (8, 2), 0) for _ in range(100)} == {(8, 2)}, "no step was observed at all"
    costs.observe((8, 2), 0, 1.0)
    for _ in range(2):
        tried = [explore(promised, (8, 2), 0) for _ in range(2 * explore.EVERY)]
        assert tried.count((8, 1)) == 2 and tried.count((8, 2)) == len(tried) - 2
        costs.observe((8, 1), 0, 1.0)
    assert {explore(promised, (8, 2), 0) for _ in range(100)} == {(8, 2)}, "all others are known, or hopeless"


def test_trees_end_when_observed_plain_steps_are_faster() -> None:
    """A tree promises 1.3 times the tokens; plain steps were measured too slow."""
    times: Times = {(4, 1): 1.0, (4, 4): 1.0, (4, 16, 4): 1.0}
    costs, true = StepCosts(times), times | {(4, 1): 0.7}
    choose, made = BudgetChooser((1, 4), costs, lambda n: n), list[StepShape]()
    for _ in range(200):
        made.append(choose(4))
        costs.observe(key_of(made[-1], 4), 0, true[key_of(made[-1], 4)])
        if made[-1].rows:
            choose.observe(Promise(4, 4, [[0.5, *[1.2] * len(row_buckets(4))]]))
    assert made[0].rows and made.count(StepShape(1)) > 120
    assert set(made[-30:-20]) <= {StepShape(1), StepShape(4, 16)} and made[-30:].count(StepShape(1)) >= 28


def test_trees_end_when_long_contexts_make_them_slow() -> None:
    times: Times = {(4, 1): 1.0, (4, 4): 1.1, (4, 16, 4): 1.1}
    costs, made = StepCosts(times, 1000.0), dict[int, list[StepShape]]()
    choose = BudgetChooser((1, 4), costs, lambda n: n)
    for tokens in (0, 10_000, 0):
        shapes = made[tokens] = []
        for _ in range(300):
            shapes.append(shape := choose(4, tokens=tokens))
            each = 1e-3 * (4 if shape.block > 1 else 1)
            costs.observe(key_of(shape, 4), tokens, times[key_of(shape, 4)] + each * tokens)
            if shape.rows:
                choose.observe(Promise(4, 4, [[2.0, *[4.0] * len(row_buckets(4))]]))
        assert (shapes[-1].block > 1) == (tokens == 0)


def test_costly_probes_are_rarer() -> None:
    """Plain decoding with useless drafts over long contexts, where a block takes four times as long."""
    costs = StepCosts({(1, 1): 1.0, (1, 4): 1.1}, 1000.0)
    choose, steps = BlockChooser((1, 4), costs, lambda n: n), 2000
    request: Any = SimpleNamespace(acceptance=RollingAcceptance(), blocks_in_flight=[], length=10_000)
    spent = 0.0
    for _ in range(steps):
        size = choose([request])
        spent += (seconds := 11.0 if size == 1 else 44.0)
        costs.observe((1, size), request.length, seconds)
        if size > 1:
            request.acceptance.observe(size - 1, 0)
    assert spent < 1.02 * 11.0 * steps


@pytest.mark.gpu
def test_observed_steps_take_the_time_of_the_gpu() -> None:
    engine, observed = make_engine(*pair(), num_speculative_tokens=None), list[tuple[Shape, int, float]]()
    while engine.prepare():
        pass
    engine.runner.observe_time = lambda *step: observed.append(step)
    prompts, params = prompts_of(4), SamplingParams(max_tokens=100, ignore_eos=True)
    began, steps = time.perf_counter(), engine.runner.step_rows.total()
    engine.generate(prompts, params)
    taken, steps = time.perf_counter() - began, engine.runner.step_rows.total() - steps
    assert len(observed) == steps > 10, "every step, as none was captured"
    assert all(seconds > 0 for *_, seconds in observed) and sum(seconds for *_, seconds in observed) < taken
    longest = sum(map(len, prompts)) + 4 * 100
    assert max(key[0] for key, *_ in observed) == 4 and longest / 2 < max(tokens for _, tokens, _ in observed) < longest


@pytest.mark.gpu
def test_steps_of_large_batches_run_before_they_are_captured() -> None:
    engine = make_engine(*pair(), max_num_seqs=96, num_speculative_tokens=None, kv_cache_tokens=96 * 128)
    while engine.prepare():
        pass
    captured: Any = engine.runner.graphs.captured
    before = {part for part in captured if part.rows > CAPTURED_AT_START}
    assert {part.kind for part in before} <= {"step", "tree"}, "those that were measured"
    params = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.5, seed=1)
    prompts = [[1 + i, 2, 3] for i in range(90)]
    answers = engine.generate(prompts, params)
    assert all(len(answer.tokens) == 12 for answer in answers)
    missed = engine.runner.graphs.missed
    assert missed > len([part for part in captured if part not in before and part.rows > CAPTURED_AT_START])
    while engine.prepare(everything=True):
        pass
    assert {part.kind for part in captured if part.rows == 96} >= {"read", "choose", "end"}
    engine.generate(prompts, params)
    assert engine.runner.graphs.missed == missed
