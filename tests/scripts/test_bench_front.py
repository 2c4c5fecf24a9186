"""The engine that takes the place of the real one in scripts/bench/front.py."""

from typing import Any

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
