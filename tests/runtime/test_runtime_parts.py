"""Requests with different sampling share a step: no answer changes, and only the needed parts run."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engines import SAMPLINGS, make_engine, pair, prompts_of, same

from dflash_toolkit import SamplingParams, generate
from dflash_toolkit.runtime import Engine

GREEDY = SamplingParams(max_tokens=24)
KINDS = [SAMPLINGS[4], GREEDY, SAMPLINGS[0], SAMPLINGS[2], GREEDY, SAMPLINGS[1], SAMPLINGS[3]]
PROMPTS = prompts_of(4, 19, 7, 26, 11, 5, 9)


def captured(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs steps as on a GPU: padded to buckets, with fixed addresses, in memory that all graphs share."""
    runner = engine.runner
    shared: list[torch.Tensor] = []  # results of graphs without an address of their own

    def capture(run: Callable[[], Any]) -> tuple[Any, Any]:
        first = run()  # as a capture does first
        result = run()
        if result is not None and result.data_ptr() != first.data_ptr():
            shared.append(result)

        def replay() -> None:
            again = run()
            if result is not None:
                result.copy_(again)

        return SimpleNamespace(replay=replay), result

    def run(part: Any, eager: Callable[[Any], Any]) -> Any:
        graph, result = runner.graphs.graph(part, eager)
        for result_of_other in shared:
            result_of_other.fill_(-(1 << 40))
        graph.replay()
        # the result of a step is copied to the host before anything else runs
        return result if result is None or part.kind == "choose" else result.clone()

    monkeypatch.setattr(runner.graphs, "capture", capture)
    monkeypatch.setattr(runner.graphs, "run", run)
    monkeypatch.setattr(runner.context, "computed_rows", runner.bucket)


@pytest.mark.parametrize("on_gpu", [False, True])
def test_requests_of_all_modes_are_independent_in_a_batch(on_gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    target, drafter = pair()
    engine = make_engine(target, drafter, max_num_seqs=6, kv_cache_tokens=2400)
    if on_gpu:
        captured(engine, monkeypatch)
    for prompt, params, got in zip(PROMPTS, KINDS, engine.generate(PROMPTS, KINDS), strict=True):
        expected = generate(target, drafter, prompt, params)
        assert same(got, expected)
        assert [t.chosen for t in got.logprobs] == pytest.approx([t.chosen for t in expected.logprobs], abs=1e-4)
        assert len(got.logprobs) == (0 if params.logprobs is None else len(got.tokens))


def test_logits_are_computed_for_the_rows_that_need_them_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(*pair(), max_num_seqs=6, kv_cache_tokens=2400)
    sampler, head, rows = engine.runner.state.sampler, engine.runner.target.head, dict[str, set[int]]()
    real = sampler._ops

    def watched(name: str) -> Callable[..., torch.Tensor]:
        def call(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            assert weight is head
            rows.setdefault(name, set()).add(len(x))
            found: torch.Tensor = getattr(real, name)(x, weight)
            return found

        return call

    ops = SimpleNamespace(sample=real.sample, linear=watched("linear"), linear_argmax=watched("linear_argmax"))
    monkeypatch.setattr(sampler, "_ops", ops)
    engine.generate(PROMPTS[:4], [GREEDY, SAMPLINGS[4], GREEDY, GREEDY])
    assert rows["linear"] == {1, 8}, "a first token, and the block of one row"
    assert rows["linear_argmax"] == {1, *(8 * count for count in (1, 2, 3))}
    rows.clear()
    engine.generate(PROMPTS[:4], GREEDY)
    assert "linear" not in rows


def test_every_padded_batch_fits_its_inputs() -> None:
    prefills = make_engine(*pair(), max_num_seqs=12, max_model_len=300, max_num_batched_tokens=4096).runner.prefills
    assert prefills.limits.packed > 1024, "packed passes may have more rows"
    assert len(prefills.batch_shapes) > 3
    for size, count in prefills.batch_shapes:
        prefills.run_empty_batch(size, count)
