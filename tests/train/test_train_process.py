"""The trainer in its own process: it speeds the engine up; killed, paused or broken, it changes no answer."""

import contextlib
import itertools
import multiprocessing
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
import torch
from bigram_targets import bigram_target, prompts_to_learn
from conftest import LONG_RUN, make_drafter
from engines import alone, make_engine, prompts_of

from dflash_toolkit import SamplingParams, Target, UserError
from dflash_toolkit.runtime import Engine
from dflash_toolkit.runtime.capture import Served
from dflash_toolkit.runtime.request import Request
from dflash_toolkit.train.config import TrainConfig
from dflash_toolkit.train.live.pipe import receive, send
from dflash_toolkit.train.live.process import TrainerProcess, interval
from dflash_toolkit.train.live.slowdown import Slowdown
from dflash_toolkit.train.objective.target_head import HeadWeights
from dflash_toolkit.train.training_options import LossOptions, OptimOptions

LATE_S = 240
PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)
OPTIM: dict[str, Any] = {"optimizer": "adamw", "learning_rate": 1e-2, "batch_size": 8, "ema": 0.5}
CONFIG = TrainConfig(target="", loss=LossOptions(anchors=8), optim=OptimOptions(**OPTIM))
PROMPTS = prompts_of(*[4] * 24)
Fault = Callable[[Engine, TrainerProcess], None]


Pair = tuple[Engine, TrainerProcess, Target]


@contextlib.contextmanager
def started(fresh: bool) -> Iterator[Pair]:
    target = bigram_target()
    drafter = make_drafter(target)
    engine = make_engine(target, drafter, max_num_seqs=8, keep_taps=True)
    head = HeadWeights(target.embedding.weight, target.head_weight, target.head_bias)
    with closing(TrainerProcess(engine, head, drafter, CONFIG, every=10, fresh=fresh)) as trainer:
        yield engine, trainer, target


@pytest.fixture
def pair() -> Iterator[Pair]:
    with started(fresh=True) as found:
        yield found


@pytest.fixture(scope="module")
def shared_pair() -> Iterator[Pair]:
    with started(fresh=False) as found:
        yield found


def serve(engine: Engine, trainer: TrainerProcess, prompts: list[list[int]]) -> list[Request]:
    found = [engine.submit(prompt, PARAMS) for prompt in prompts]
    while engine.step():
        trainer.poll()
    trainer.poll()
    return found


def wait(trainer: TrainerProcess, condition: Callable[[], bool], meanwhile: Callable[[], object] | None = None) -> None:
    ends = time.monotonic() + LATE_S
    while not condition():
        assert time.monotonic() < ends, (trainer.status, trainer.error)
        trainer.poll()
        if meanwhile:
            meanwhile()
        time.sleep(0.05)


def right(target: Target, requests: list[Request]) -> bool:
    return all(r.tokens == alone(target, None, r.prompt_ids, PARAMS).tokens for r in requests)


@pytest.mark.timeout(1800 if LONG_RUN else 300)
def test_a_trainer_in_its_own_process_speeds_up_the_engine(pair: Pair) -> None:
    """With DFLASH_LONG 5,000 requests, with new versions among them."""
    engine, trainer, target = pair
    plain = make_engine(target, None, max_num_seqs=8)

    def served(turn: int) -> list[Request]:
        prompts = prompts_to_learn(400 * turn)
        found = serve(engine, trainer, prompts)
        assert [r.tokens for r in found] == [g.tokens for g in plain.generate(prompts, PARAMS)]
        return found

    first = served(0)
    assert trainer.status.promotions or set(engine.stats.draft_lengths) == {0}
    many = 114 if LONG_RUN else 1
    for turn in range(1, many):
        served(turn)
    turns = itertools.count(many)  # requests go on: the first may have come before the trainer was ready
    wait(trainer, lambda: (trainer.status.held_out or 0.0) > 2.0, meanwhile=lambda: served(next(turns)))
    last = served(0)
    assert sum(len(r.generation.steps) for r in last) < 0.8 * sum(len(r.generation.steps) for r in first)
    wait(trainer, lambda: engine.drafter_version == trainer.status.promotions + trainer.status.rollbacks)
    assert trainer.status.promotions > 0 and trainer.status.learnt_from > 0
    assert trainer.alive and trainer.error is None


def test_a_killed_trainer_changes_no_answer(pair: Pair) -> None:
    engine, trainer, target = pair
    before = serve(engine, trainer, PROMPTS[:8])
    os.kill(trainer.pid, signal.SIGKILL)
    engine._capture._limit = 40_000  # type: ignore[union-attr]
    for _ in range(4):
        assert right(target, [*before, *serve(engine, trainer, PROMPTS)])
    assert engine._capture is not None and engine._capture.nbytes <= 40_000 and engine._capture.skipped > 0
    wait(trainer, lambda: trainer.error is not None)
    assert "the trainer has ended (exit code -9" in str(trainer.error) and engine.drafter_version == 0


def pause(engine: Engine, trainer: TrainerProcess) -> None:
    os.kill(trainer.pid, signal.SIGSTOP)


def resume(engine: Engine, trainer: TrainerProcess) -> None:
    os.kill(trainer.pid, signal.SIGCONT)


def starve(engine: Engine, trainer: TrainerProcess) -> None:
    assert engine._capture is not None
    engine._capture._limit = 0


def feed(engine: Engine, trainer: TrainerProcess) -> None:
    assert engine._capture is not None
    engine._capture._limit = 1 << 20


def poison(value: float) -> Callable[[Engine, TrainerProcess], None]:
    """Returns a fault: requests whose hidden states are `value`."""

    def send_them(engine: Engine, trainer: TrainerProcess) -> None:
        for prompt in PROMPTS:
            taps = torch.full((len(prompt) + 11, 96), value)
            trainer._going.put(Served(prompt + [1] * 12, len(prompt), taps, 12, 6, "", engine.drafter_version))

    return send_them


def send_garbage(engine: Engine, trainer: TrainerProcess) -> None:
    """Sends the trainer what no engine would, and the engine prompts of one token."""
    for tokens, taps, steps in ((4, 9, 1), (0, 0, 1), (9, 8, 0), (9, 8, 5)):
        trainer._going.put(Served([1] * tokens, 2, torch.zeros(taps, 96), 3, steps, "", 0))
    for i in range(8):
        engine.submit([i], SamplingParams(max_tokens=1 + i % 3))


def nothing(engine: Engine, trainer: TrainerProcess) -> None:
    pass


@pytest.mark.parametrize(
    ("begin", "end"),
    [(pause, resume), (starve, feed), (poison(torch.nan), nothing), (poison(3e38), nothing), (send_garbage, nothing)],
    ids=["paused", "starved", "not-finite", "gradient-not-finite", "garbage"],
)
def test_a_fault_of_the_trainer_changes_no_answer(begin: Fault, end: Fault, shared_pair: Pair) -> None:
    engine, trainer, target = shared_pair
    serve(engine, trainer, PROMPTS)
    begin(engine, trainer)
    assert trainer._ready or not trainer._slowdown._sums, "a trainer that starts does not count"
    for _ in range(2):
        assert right(target, serve(engine, trainer, PROMPTS))
    end(engine, trainer)
    steps = trainer.status.steps
    wait(trainer, lambda: trainer.status.steps != steps)  # it trains on; a step that fails starts from an earlier one
    assert trainer.alive and trainer.error is None


def test_a_late_trainer_learns_every_version(shared_pair: Pair) -> None:
    engine, trainer, _ = shared_pair
    pause(engine, trainer)
    serve(engine, trainer, PROMPTS * 2)
    assert engine._capture is not None and len(engine._capture._waiting) > 0, "more would be in flight than may be"
    assert engine.runner.drafter is not None
    trainer._came.append({name: view.clone() for name, view in engine.runner.drafter.parameter_views().items()})
    trainer.poll()
    assert engine.drafter_version in trainer._going.queue
    resume(engine, trainer)


def test_a_trainer_forgets_the_requests_of_an_old_target(pair: Pair) -> None:
    engine, trainer, target = pair
    serve(engine, trainer, PROMPTS)
    wait(trainer, lambda: trainer.status.records == len(PROMPTS))
    new = bigram_target(2).head_weight
    serve(engine, trainer, PROMPTS)  # some of these wait for the trainer
    engine.update_target({"lm_head.weight": new})
    target.head_weight.data.copy_(new)
    trainer.poll()
    prompts = prompts_to_learn()
    assert right(target, serve(engine, trainer, prompts))
    steps = trainer.status.steps
    wait(trainer, lambda: trainer.status.records == len(prompts) and trainer.status.steps > steps)
    assert trainer.alive and trainer.error is None


def test_a_trainer_without_memory_ends_and_serving_goes_on(pair: Pair) -> None:
    engine, trainer, target = pair
    resource.prlimit(trainer.pid, resource.RLIMIT_AS, (1, 1))
    for _ in range(2):
        assert right(target, serve(engine, trainer, PROMPTS))
    wait(trainer, lambda: trainer.error is not None)
    assert "the trainer has ended (exit code" in str(trainer.error)
    assert right(target, serve(engine, trainer, PROMPTS))


def test_a_long_piece_of_work_is_not_paid_for_in_full() -> None:
    assert interval(0.2, 0.1) == pytest.approx(2.0) and interval(0.2, 1.0) == 0.2
    assert interval(30.0, 0.1) == 30.0 and interval(3.0, 0.1) == 10.0, "kernels were compiled"


@pytest.mark.parametrize(("cost", "share"), [(0.35, 0.2), (0.5, 0.1), (0.9, 0.1), (0.3, 0.5), (0.0, 0.1)])
def test_the_engine_keeps_its_share_of_speed(cost: float, share: float) -> None:
    """While the trainer works, the engine takes 1 - cost of the steps that it takes otherwise."""
    slowdown, steps, passed = Slowdown(), 0.0, 0.0
    for turn in range(60):
        if turn == 20:  # the cost is known by now
            steps = passed = 0.0
        took = 100.0 / 1000
        whole = interval(took, share, slowdown.cost)
        for working, seconds in ((True, took), (False, whole - took)):
            count = round(1000 * seconds * (1.0 - cost * working))
            for _ in range(count):
                slowdown.add(8, working, seconds / count)
            steps, passed = steps + count, passed + seconds
    assert slowdown.cost == pytest.approx(max(cost, 0.2), abs=0.01) or whole == took
    assert steps / passed >= 1000 * (1 - share) * 0.98
    assert share >= cost or steps / passed <= 1000 * (1 - share) * 1.03, "the trainer takes what it may"


def test_the_cost_is_unknown_until_both_kinds_of_steps_were_seen() -> None:
    slowdown = Slowdown()
    for _ in range(100):
        slowdown.add(8, True, 2.0)
        slowdown.add(1, False, 0.1)
        assert slowdown.cost == 1.0


def test_a_trainer_that_cannot_start_is_reported() -> None:
    target = bigram_target()
    drafter = make_drafter(target)
    engine = make_engine(target, drafter, keep_taps=True)
    head = HeadWeights(target.embedding.weight, target.head_weight)
    config = replace(CONFIG, loss=LossOptions(kl=1.0))
    with closing(TrainerProcess(engine, head, drafter, config)) as trainer:
        wait(trainer, lambda: trainer.error is not None)
        assert right(target, serve(engine, trainer, PROMPTS[:2])) and "exit code 1" in str(trainer.error)
    with pytest.raises(UserError, match="the trainer's share is 0; it must be in"):
        TrainerProcess(engine, head, drafter, share=0)


def test_tensors_pass_a_pipe_bit_by_bit() -> None:
    here, there = multiprocessing.Pipe()
    tensors = {
        "bf16": torch.randn(3, 5).bfloat16(),
        "fp8": torch.randn(4).to(torch.float8_e4m3fn),
        "part": torch.randn(6, 6)[::2, 1],
        "empty": torch.empty(0, 3),
        "number": torch.tensor(3),
    }
    send(here, {"tensors": tensors, "other": [1, "two"]})
    got = receive(there)
    assert got["other"] == [1, "two"] and list(got["tensors"]) == list(tensors)
    for name, tensor in tensors.items():
        assert got["tensors"][name].dtype == tensor.dtype and got["tensors"][name].shape == tensor.shape
        assert torch.equal(got["tensors"][name].float(), tensor.float())
    here.close()
    with pytest.raises(EOFError):
        receive(there)
