"""The engine that takes the place of the real one in scripts/bench/front.py."""

import asyncio
from typing import Any

from live_server import LONG, ask, collect

from dflash_toolkit.runtime import AsyncEngine
from dflash_toolkit.runtime.loop import info_of
from dflash_toolkit.sampling import SamplingParams
from scripts.bench.front import CONTEXT, PacedEngine


def test_paced_engine_repeats_the_prompt_in_fixed_steps() -> None:
    engine: Any = PacedEngine(0.0, per_step=3, max_num_seqs=4, vocabulary=10)
    assert info_of(engine).capacity.context_limit == CONTEXT
    reports = []
    params = SamplingParams(max_tokens=6)
    engine.add(engine.request([1, 2], params, lambda request, step: reports.append(step and step.tokens)))
    while not engine.idle:
        engine.step()
    assert reports == [None, (2, 1, 2), (1, 2)]


def test_paced_engine_is_served_like_the_real_one() -> None:
    """The loop of the real engine runs it."""

    async def play() -> list[Any]:
        return await collect(ask(AsyncEngine(engine), [1, 2]))

    engine: Any = PacedEngine(0.0, per_step=3, max_num_seqs=4, vocabulary=10)
    tokens = [token for progress in asyncio.run(play()) for token in progress.tokens]
    assert tokens == [1 + i % 2 for i in range(LONG.max_tokens)]
