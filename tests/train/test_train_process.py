"""The trainer in its own process: it speeds the engine up; killed, paused or broken, it changes no answer."""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
import torch
from bigram_targets import bigram_target
from conftest import make_drafter
from engines import alone, make_engine, prompts_of

from dflash_toolkit import SamplingParams, Target, UserError
from dflash_toolkit.runtime import Engine
from dflash_toolkit.runtime.request import Request
from dflash_toolkit.train.config import LossOptions, OptimOptions, TrainConfig
from dflash_toolkit.train.live.pipe import receive, send
from dflash_toolkit.train.live.process import TrainerProcess
from dflash_toolkit.train.objective.target_head import HeadWeights

LATE_S = 240
PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)
OPTIM: dict[str, Any] = {"optimizer": "adamw", "learning_rate": 1e-2, "batch_size": 8, "ema": 0.5}
CONFIG = TrainConfig(target="", loss=LossOptions(anchors=8), optim=OptimOptions(**OPTIM))
PROMPTS = prompts_of(*[4] * 24)


@pytest.fixture
def pair() -> Iterator[tuple[Engine, TrainerProcess, Target]]:
    target = bigram_target()
    drafter = make_drafter(target)
    engine = make_engine(target, drafter, max_num_seqs=8, keep_taps=True)
    head = HeadWeights(target.embedding.weight, target.head_weight, target.head_bias)
    with closing(TrainerProcess(engine, head, drafter, CONFIG, every=10)) as trainer:
        yield engine, trainer, target


def serve(engine: Engine, trainer: TrainerProcess, prompts: list[list[int]]) -> list[Request]:
    found = [engine.submit(prompt, PARAMS) for prompt in prompts]
    while engine.step():
        trainer.poll()
    trainer.poll()
    return found


def wait(trainer: TrainerProcess, condition: Callable[[], bool]) -> None:
    ends = time.monotonic() + LATE_S
    while not condition():
        assert time.monotonic() < ends, (trainer.status, trainer.error)
        trainer.poll()
        time.sleep(0.05)


def right(target: Target, requests: list[Request]) -> bool:
    return all(r.tokens == alone(target, None, r.prompt_ids, PARAMS).tokens for r in requests)


def test_a_trainer_in_its_own_process_speeds_up_the_engine(pair: tuple[Engine, TrainerProcess, Target]) -> None:
    engine, trainer, target = pair
    served = []
    for turn in range(8):  # held-out prompts are a tenth
        served.append(serve(engine, trainer, [[17 * turn + i, *PROMPTS[i]] for i in range(24)]))
        wait(trainer, lambda: engine._capture is not None and engine._capture.nbytes == 0)
    wait(trainer, lambda: (trainer.status.held_out or 0.0) > 2.0)
    first, last = served[0], serve(engine, trainer, [request.prompt_ids for request in served[0]])
    assert right(target, [*first, *last])
    assert sum(len(r.generation.steps) for r in last) < 0.8 * sum(len(r.generation.steps) for r in first)
    assert engine.drafter_version == trainer.status.promotions > 0 and trainer.status.learnt_from > 0
    assert trainer.alive and trainer.error is None


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_killed_or_paused_trainer_changes_no_answer(
    number: signal.Signals, pair: tuple[Engine, TrainerProcess, Target]
) -> None:
    engine, trainer, target = pair
    before = serve(engine, trainer, PROMPTS[:8])
    os.kill(trainer.pid, number)
    engine._capture._limit = 40_000  # type: ignore[union-attr]
    for _ in range(4):
        assert right(target, [*before, *serve(engine, trainer, PROMPTS)])
    assert engine._capture is not None and engine._capture.nbytes <= 40_000 and engine._capture.skipped > 0
    if number == signal.SIGKILL:
        wait(trainer, lambda: trainer.error is not None)
        assert "the trainer has ended (exit code -9" in str(trainer.error) and engine.drafter_version == 0
    else:
        os.kill(trainer.pid, signal.SIGCONT)


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
