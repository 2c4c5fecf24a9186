"""First tokens of requests after one pass for all their prompts."""

from typing import Any

import pytest
import torch
from engines import alone, make_engine, pair, prompts_of

from dflash_toolkit import SamplingParams
from dflash_toolkit.runtime.request import Request
from dflash_toolkit.runtime.sampler import Sampler

GREEDY = SamplingParams(max_tokens=6, ignore_eos=True)
OTHERS = [
    SamplingParams(max_tokens=6, ignore_eos=True, temperature=1.0, seed=3),
    SamplingParams(max_tokens=6, ignore_eos=True, logprobs=2),
]


@pytest.fixture
def argmaxes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of states of each greedy choice."""
    found, real = list[int](), Sampler.greedy

    def greedy(sampler: Sampler, hidden: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
        found.append(len(hidden))
        return real(sampler, hidden, head)

    monkeypatch.setattr(Sampler, "greedy", greedy)
    return found


def submitted(params: list[SamplingParams], *reports: Any) -> tuple[Any, list[Request]]:
    """Returns an engine that has computed the first chunk of all prompts in one pass, and the requests."""
    engine = make_engine(*pair("qwen3"), max_num_seqs=16, max_num_batched_tokens=256)
    prompts = prompts_of(*range(4, 4 + len(params)), seed=5)
    return engine, [engine.submit(p, each, *reports) for p, each in zip(prompts, params, strict=True)]


def test_first_tokens_of_greedy_requests_are_chosen_together(argmaxes: list[int]) -> None:
    params = [GREEDY] * 5 + OTHERS + [GREEDY] * 5
    engine, requests = submitted(params)
    engine.step()
    assert argmaxes[0] == 10 and all(request.tokens for request in requests)
    while engine.step():
        pass
    target, drafter = pair("qwen3")
    assert [r.tokens for r in requests] == [alone(target, drafter, r.prompt_ids, r.params).tokens for r in requests]


def test_a_request_cancelled_by_a_first_token_leaves_the_others(argmaxes: list[int]) -> None:
    def report(request: Request, step: Any) -> None:
        if request is requests[0]:
            engine.cancel(requests[1])

    engine, requests = submitted([GREEDY] * 12, report)
    while engine.step():
        pass
    assert argmaxes[0] == 12 and not requests[1].tokens and requests[1].cancelled
    target, drafter = pair("qwen3")
    left = [requests[0], *requests[2:]]
    assert [r.tokens for r in left] == [alone(target, drafter, r.prompt_ids, GREEDY).tokens for r in left]


@pytest.mark.parametrize("always", [False, True])
def test_requests_whose_first_tokens_fail_are_retried(always: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    real, failed = Sampler.greedy, list[int]()

    def greedy(sampler: Sampler, hidden: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
        if len(hidden) == 12 and (always or not failed):
            failed.append(len(hidden))
            raise RuntimeError("out of memory")
        return real(sampler, hidden, head)

    monkeypatch.setattr(Sampler, "greedy", greedy)
    engine, requests = submitted([GREEDY] * 12)
    while engine.step():
        pass
    target, drafter = pair("qwen3")
    assert failed and [r.tokens for r in requests] == [
        alone(target, drafter, r.prompt_ids, GREEDY).tokens for r in requests
    ]
