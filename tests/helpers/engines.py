"""Small engines on the CPU, their prompts, and answers to compare with."""

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES
from conftest import make_drafter, make_target
from torch import Tensor

from dflash_toolkit import Drafter, SamplingParams, Target, decode, generate
from dflash_toolkit.generation import Generation
from dflash_toolkit.kernels.reference import slots_of
from dflash_toolkit.runtime import Engine, EngineOptions, load_engine
from dflash_toolkit.runtime.prefill_job import PrefillJob
from dflash_toolkit.runtime.programs.prefill_pass import PrefillPass
from dflash_toolkit.runtime.proposer import Draft
from dflash_toolkit.runtime.runner import StepRunner
from dflash_toolkit.runtime.stack import Rows

ROPES = {
    "default": {},
    "linear": {"factor": 4.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": {"factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0},
}


SAMPLINGS = [
    SamplingParams(max_tokens=16, temperature=0.9, top_p=0.9, top_k=40, min_p=0.01, seed=5),
    SamplingParams(max_tokens=16, temperature=1.2, seed=2**63 + 7),
    SamplingParams(max_tokens=16, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2),
    SamplingParams(max_tokens=16, temperature=0.8, logit_bias=((5, 4.0), (7, -3.0)), logprobs=3, seed=1),
    SamplingParams(max_tokens=16, logprobs=0),
    SamplingParams(max_tokens=24, stop_token_ids=tuple(range(0, 256, 3)), min_tokens=17),
]


@cache
def pair(kind: str = "llama", limit: int = 512, **extra: Any) -> tuple[Target, Drafter]:
    if kind in ARCHITECTURES:
        target = ARCHITECTURES[kind].target(**extra)
    else:
        target = make_target(kind, tied=kind != "qwen2", limit=limit, **extra)
    return target, make_drafter(target)


def prompts_of(*lengths: int, seed: int = 1) -> list[list[int]]:
    dice = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 256, (n,), generator=dice).tolist() for n in lengths]


def around_prefills(
    runner: StepRunner, around: Callable[[Sequence[PrefillJob]], contextlib.AbstractContextManager[None]]
) -> None:
    """Runs every pass over prompts within the context that `around` returns for its chunks."""
    real = runner.start_prefill

    def start(jobs: Sequence[PrefillJob]) -> PrefillPass:
        found = real(jobs)
        run = found.run

        def running(seconds: float = math.inf, least: int = 1) -> float:
            with around(jobs):
                return run(seconds, least)

        found.run = running  # type: ignore[method-assign]
        return found

    runner.start_prefill = start  # type: ignore[method-assign]


def counted(engine: Engine) -> Counter[str]:
    """Counts the rows that target and drafter compute in prefills."""
    found = Counter[str]()
    prefilling = False
    runner = engine.runner
    slices, write = runner.verifier.slices, runner.proposer.write_context

    @contextlib.contextmanager
    def prefills(jobs: Sequence[PrefillJob]) -> Iterator[None]:
        nonlocal prefilling
        prefilling = True
        yield
        prefilling = False

    def sliced(ids: torch.Tensor, rows: Rows) -> Any:
        found["target"] += len(ids) * prefilling
        return slices(ids, rows)

    def writes(features: torch.Tensor, rows: Rows, counts: torch.Tensor) -> None:
        found["drafter"] += len(features) * prefilling
        write(features, rows, counts)

    around_prefills(runner, prefills)
    runner.verifier.slices, runner.proposer.write_context = sliced, writes  # type: ignore[method-assign]
    return found


def make_engine(target: Target, drafter: Drafter | None, **options: Any) -> Engine:
    defaults = {"page_size": 4, "max_num_seqs": 3, "max_num_batched_tokens": 16, "kv_cache_tokens": 1200}
    defaults["num_speculative_tokens"] = drafter.config.block_size - 1 if drafter else 0
    return load_engine(target, drafter, options=EngineOptions(**defaults | options))[0]


def knowing(engine: Engine, answers: dict[tuple[int, ...], list[int]], miss: Callable[[int], bool]) -> None:
    """Makes the engine draft the given answers, except at positions that `miss` selects; trees are chains with
    probabilities that depend on the position."""

    def propose(last: Tensor, rows: Any, block: int) -> Draft:
        drafts = torch.zeros(len(last), block - 1, dtype=torch.int64)
        for row, request in enumerate(engine.scheduler.running):
            text = request.prompt_ids + answers[tuple(request.prompt_ids)]
            for k in range(1, block):
                position = int(rows.lengths[row]) + k
                token = text[position] if position < len(text) else 0
                drafts[row, k - 1] = (token + 1) % 256 if miss(position) else token
        return Draft(drafts)

    def children(last: Tensor, rows: Any, block: int, calibration: Tensor, width: int) -> tuple[Tensor, ...]:
        candidates = propose(last, rows, block).tokens[..., None]
        positions = rows.lengths[:, None] + torch.arange(1, block)
        sure = 0.3 + 0.1 * (positions * 3 % 7)[:, :, None, None]
        return sure.log(), torch.zeros(sure.shape, dtype=torch.int32), candidates

    engine.runner.proposer.propose = propose  # type: ignore[method-assign]
    engine.runner.proposer.children = children  # type: ignore[method-assign]


@cache
def _written(target: Target, drafter: Drafter | None, prompt: tuple[int, ...], params: SamplingParams) -> Generation:
    return generate(target, drafter, list(prompt), params)


def alone(target: Target, drafter: Drafter | None, prompt: list[int], params: SamplingParams) -> Generation:
    """Returns the answer of `generate`; cached, as many tests need the same."""
    return _written(target, drafter, tuple(prompt), params)


def same(got: Generation, expected: Generation) -> bool:
    return (got.tokens, got.steps, got.finish_reason) == (expected.tokens, expected.steps, expected.finish_reason)


def check(engine: Engine, models: tuple[Target, Drafter | None], prompts: list[list[int]], *params: Any) -> None:
    """Checks that answers and steps equal those of `generate`; `params` is for all prompts or one for each."""
    each = params * (len(prompts) // len(params))
    for prompt, one, got in zip(prompts, each, engine.generate(prompts, list(each)), strict=True):
        assert same(got, alone(*models, prompt, one))


def check_drafts(engine: Engine, models: tuple[Target, Drafter], prompts: list[list[int]], *params: Any) -> None:
    """Checks answers, and that drafts equal those of `decode.propose`, almost all of which are rejected."""
    expected, drafted = dict[Any, list[int]](), dict[Any, list[int]]()
    alone, together, prompt = decode.propose, engine.runner.proposer.propose, list[int]()

    def by_generate(*args: Any) -> list[int]:
        expected[tuple(prompt), args[-1]] = alone(*args)
        return expected[tuple(prompt), args[-1]]

    def by_engine(last: Tensor, rows: Any, block: int) -> Draft:
        draft = together(last, rows, block)
        each = zip(engine.scheduler.running, rows.lengths.tolist(), draft.tokens.tolist(), strict=True)
        drafted.update({(tuple(request.prompt_ids), place): tokens for request, place, tokens in each})
        return draft

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode, "propose", by_generate)
        patch.setattr(engine.runner.proposer, "propose", by_engine)
        each = params * (len(prompts) // len(params))
        answers = engine.generate(prompts, list(each))
        for prompt, one, got in zip(prompts, each, answers, strict=True):
            assert same(got, generate(*models, prompt, one))
    assert len(expected) > 10 and {place: drafted[place] for place in expected} == expected


def context_of(runner: StepRunner, pages: Sequence[int], tokens: int) -> torch.Tensor:
    """Returns the drafter's keys and values [L, 2, tokens, G, H] of the first tokens in these pages."""
    places, table = (torch.tensor([*of], device=runner.device)[None] for of in (range(tokens), pages))
    return runner.proposer.stack.cache[:, :, slots_of(places, table, runner.page_size)[0]]
