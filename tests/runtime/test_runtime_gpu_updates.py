"""New drafters in a running engine on a GPU, in bf16 with random weights: every near-tie would show."""

import random

import pytest
import torch
from gpu_engines import VOCAB, make_engine, pair

from dflash_toolkit import Drafter, SamplingParams
from dflash_toolkit.runtime import Engine

pytestmark = pytest.mark.gpu
PARAMS = SamplingParams(max_tokens=60, ignore_eos=True)


def served(engine: Engine, prompts: list[list[int]], together: int, versions: list[Drafter]) -> list[list[int]]:
    """Returns the answers; `together` requests run or wait, and the drafter is replaced between steps."""
    dice, found = random.Random(1), []
    for at in range(0, len(prompts), together):
        some = [engine.submit(prompt, PARAMS) for prompt in prompts[at : at + together]]
        while not all(request.finished for request in some):
            if versions and dice.random() < 0.3:
                engine.load_drafter(dice.choice(versions))
            engine.step()
        found += [request.tokens for request in some]
    return found


@pytest.mark.parametrize(("together", "prefix_cache"), [(8, False), (1, True)])
@pytest.mark.parametrize("kind", ["qwen3", "qwen2"])
def test_swaps_of_drafters_change_no_bit(kind: str, together: int, prefix_cache: bool) -> None:
    """With a prefix cache the requests come one by one, so that both engines have the same prefix hits."""
    target, drafter = pair(kind)
    other = Drafter(drafter.config)
    other.init_weights(torch.Generator().manual_seed(9), std=0.05)
    versions = [drafter, other.to("cuda", torch.bfloat16)]
    dice = random.Random(2)
    stems = [[dice.randrange(VOCAB - 1) for _ in range(n)] for n in (40, 150)]
    prompts = [dice.choice(stems) + [dice.randrange(VOCAB - 1) for _ in range(dice.randint(1, 60))] for _ in range(24)]
    options = {"prefix_cache": prefix_cache, "num_speculative_tokens": 15, "keep_taps": True}
    engine, plain = make_engine(target, drafter, **options), make_engine(target, None, prefix_cache=prefix_cache)
    expected = served(plain, prompts, together, [])
    if not prefix_cache:
        engine.stop_drafting()  # until the first swap, which also empties a prefix cache
        for _ in range(30):
            engine.prepare()
        assert engine.runner.graphs.captured and not engine.runner.drafting
    assert served(engine, prompts, together, versions) == expected and engine.drafter_version > 20
    assert (engine.stats.cached_prompt_tokens > 0) == prefix_cache
    assert engine.stats.cached_prompt_tokens == plain.stats.cached_prompt_tokens
