"""A drafter learns from an engine's traffic: the engine gets faster, its answers stay, and faults change nothing."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from bigram_targets import bigram_target
from conftest import make_drafter
from engines import make_engine, prompts_of

from dflash_toolkit import SamplingParams, Target, UserError
from dflash_toolkit.runtime import Engine
from dflash_toolkit.runtime.request import Request
from dflash_toolkit.train.config import TrainConfig
from dflash_toolkit.train.live import replay
from dflash_toolkit.train.live.adapter import Adapter
from dflash_toolkit.train.online import OnlineTrainer, Record
from dflash_toolkit.train.training_options import LossOptions, OptimOptions

PARAMS = SamplingParams(max_tokens=16, ignore_eos=True)
OPTIM: dict[str, Any] = {"optimizer": "adamw", "learning_rate": 1e-2, "batch_size": 8, "ema": 0.5}
CONFIG = TrainConfig(target="", loss=LossOptions(anchors=8), optim=OptimOptions(**OPTIM))


def tau(requests: list[Request]) -> float:
    steps = [step for request in requests for step in request.generation.steps]
    return sum(len(step.tokens) for step in steps) / len(steps)


def serve(engine: Engine, prompts: list[list[int]], **options: Any) -> list[Request]:
    found = [engine.submit(prompt, PARAMS, **options) for prompt in prompts]
    while engine.step():
        pass
    return found


def adapted(target: Target, **options: Any) -> tuple[Engine, Adapter, OnlineTrainer]:
    drafter = make_drafter(target)
    engine = make_engine(target, drafter, max_num_seqs=8, keep_taps=True)
    trainer = OnlineTrainer(target, drafter, CONFIG, warmup=1)
    return engine, Adapter(engine, trainer, **{"batch": 8, "every": 10} | options), trainer


@pytest.fixture(autouse=True)
def small_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "HELD_OUT", 0.5)


@pytest.mark.parametrize("fresh", [False, True])
def test_a_server_gets_faster_on_its_traffic_and_answers_the_same(fresh: bool) -> None:
    target = bigram_target()
    engine, adapter, _ = adapted(target, fresh=fresh)
    prompts = prompts_of(*[4] * 48)
    first = serve(engine, prompts)
    assert (set(engine.stats.draft_lengths) == {0}) == fresh, "an untrained drafter would only cost time"
    for _ in range(61):
        adapter.work()
    last = serve(engine, prompts)
    assert adapter.promotions >= 1 and adapter.rollbacks == 0 and engine.drafter_version == adapter.promotions
    assert tau(last) > 1.5 * tau(first)
    assert [r.tokens for r in last] == [r.tokens for r in first]
    served = adapter.served
    assert served.learnt_from == 48 and served.held_out is not None and served.held_out > 1.3
    for _ in range(2):
        adapter.roll_back()
    assert engine.runner.drafting == (not adapter.served.plain) and adapter.rollbacks == 1


def test_a_drafter_follows_a_target_that_is_trained_further() -> None:
    """The frozen drafter's acceptance falls with the new target, the adapted one's recovers."""
    target, trained = bigram_target(1), bigram_target(2)
    drafter = make_drafter(target)
    prompts = prompts_of(*[4] * 24)
    trainer = OnlineTrainer(target, drafter, CONFIG, warmup=1)
    engine = make_engine(target, drafter, max_num_seqs=8, keep_taps=True)

    def rollouts(steps: int) -> float:
        found = engine.generate(prompts, replace(PARAMS, return_taps=True))
        records = [
            Record(prompt + got.tokens, got.taps, [(len(prompt), len(prompt) + len(got.tokens))])
            for prompt, got in zip(prompts, found, strict=True)
        ]
        for _ in range(steps):
            trainer.step(records)
        all_steps = [step for got in found for step in got.steps]
        return sum(len(step.tokens) for step in all_steps) / len(all_steps)

    rollouts(40)
    engine.update_drafter(trainer.drafter.state_dict())
    before = rollouts(0)
    engine.update_target({"lm_head.weight": trained.head_weight})
    with torch.no_grad():
        target.head_weight.copy_(trained.head_weight)
    frozen = rollouts(40)
    engine.update_drafter(trainer.drafter.state_dict())
    assert before > 1.5 * frozen and rollouts(0) > 0.8 * before
    assert (engine.target_version, engine.drafter_version) == (1, 2)


def test_records_of_an_old_target_are_forgotten() -> None:
    target = bigram_target()
    engine, adapter, _ = adapted(target)
    prompts = prompts_of(*[4] * 48)
    serve(engine, prompts)
    for _ in range(61):
        adapter.work()
    head = bigram_target(2).head_weight
    engine.update_target({"lm_head.weight": head})
    with torch.no_grad():
        target.head_weight.copy_(head)
    adapter.use_target(target)
    assert len(adapter.buffer) == adapter.buffer.nbytes == 0 and len(adapter.versions) == 1
    first, promotions = tau(serve(engine, prompts)), adapter.promotions
    for _ in range(61):
        adapter.work()
    assert tau(serve(engine, prompts)) > 1.3 * first and adapter.promotions > promotions and adapter.rollbacks == 0


def test_a_worse_version_is_rolled_back() -> None:
    engine, adapter, _ = adapted(bigram_target())
    prompts = prompts_of(*[4] * 48)
    serve(engine, prompts)
    for _ in range(61):
        adapter.work()
    good, version = adapter.served, engine.drafter_version
    serve(engine, prompts)
    adapter.work()  # the good version's live acceptance
    bad = make_drafter(bigram_target())
    engine.load_drafter(bad)
    adapter.versions = [good, replace(good, number=engine.drafter_version, drafter=bad, live=type(good.live)())]
    serve(engine, prompts)
    adapter.work()
    assert adapter.rollbacks == 1 and adapter.served is good and engine.drafter_version == version + 2
    assert tau(serve(engine, prompts)) > 1.5


def test_a_request_that_opts_out_leaves_no_trace() -> None:
    engine, adapter, _ = adapted(bigram_target())
    serve(engine, prompts_of(*[4] * 6), store=False)
    assert engine._capture is not None and engine._capture.nbytes == 0 and not engine._capture._waiting
    adapter.work()
    assert len(adapter.buffer) == adapter.buffer.nbytes == 0
    serve(engine, prompts_of(*[5] * 3))
    adapter.work()
    assert len(adapter.buffer) == 3


def test_a_capture_without_room_skips_requests() -> None:
    engine, adapter, _ = adapted(bigram_target(), memory=4 * 19 * 96 * 4 * 2)  # room for two of 19 taps
    requests = serve(engine, prompts_of(*[4] * 8))
    assert engine._capture is not None and engine._capture.skipped == 6 and all(r.finished for r in requests)
    adapter.work()
    assert engine._capture.nbytes == 0 and adapter.buffer.added == 2


def test_a_long_request_is_kept_up_to_the_length_of_training() -> None:
    target = bigram_target()
    drafter = make_drafter(target)
    engine = make_engine(target, drafter, keep_taps=True)
    config = replace(CONFIG, prompts=replace(CONFIG.prompts, max_length=16))
    adapter = Adapter(engine, OnlineTrainer(target, drafter, config))
    serve(engine, prompts_of(30))
    adapter.work()
    (kept,) = [*adapter.buffer._training.records, *adapter.buffer.held_out]
    assert len(kept.tokens) == 16 and kept.taps.untyped_storage().nbytes() == 15 * 96 * 4


def test_a_step_that_fails_continues_from_the_served_version() -> None:
    engine, adapter, trainer = adapted(bigram_target())
    serve(engine, prompts_of(*[4] * 36))
    adapter.work()
    before = copy.deepcopy(adapter.served.state["drafter"])
    with torch.no_grad():
        trainer.state_dict()["drafter"]["norm.weight"].fill_(torch.nan)
    adapter.work()
    assert all(torch.equal(before[name], tensor) for name, tensor in trainer.state_dict()["drafter"].items())
    assert len(adapter.buffer) == 28, "the records of that step may be at fault"
    adapter.work()
    assert engine.drafter_version == 0 and trainer.steps == 1


def test_capture_needs_an_engine_that_keeps_taps() -> None:
    target = bigram_target()
    with pytest.raises(UserError, match=r"capture needs a drafter and an engine with EngineOptions\(keep_taps=True"):
        make_engine(target, make_drafter(target)).start_capture(1 << 20)
