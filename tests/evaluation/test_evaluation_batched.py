"""Batched decoding gives each prompt the tokens of single decoding, for every kind of cache."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, tiny
from conftest import make_target

from dflash_toolkit import SamplingParams, Target, UserError, generate
from dflash_toolkit.evaluation.measure import batched
from dflash_toolkit.evaluation.measure.batched import BatchedDecoder, unbatchable_reason
from dflash_toolkit.generation import PromptError
from dflash_toolkit.sampling import BiasError

LENGTHS = (3, 19, 1, 11, 26)
DRAWN = SamplingParams(temperature=1.3, top_k=40, top_p=0.95, min_p=0.01)


def asked() -> list[list[int]]:
    """Prompts of different lengths, some longer than the windows of sliding layers."""
    drawn = torch.Generator().manual_seed(3)
    return [torch.randint(0, 250, (length,), generator=drawn).tolist() for length in LENGTHS]


def params(*kinds: SamplingParams) -> Iterator[SamplingParams]:
    """Returns one per prompt; they end at different times."""
    for i in range(len(LENGTHS)):
        yield replace(kinds[i % len(kinds)], max_tokens=3 + 5 * i % 9, seed=100 + i, ignore_eos=True)


def check(target: Target, wanted: Sequence[SamplingParams], batch: int = 4) -> None:
    decoder, prompts = BatchedDecoder(target, batch), asked()
    for key, (prompt, each) in enumerate(zip(prompts, wanted, strict=True)):
        decoder.submit(key, prompt, each)
    found = {response.key: response.generation for response in (decoder.wait() for _ in prompts)}
    for key, (prompt, each) in enumerate(zip(prompts, wanted, strict=True)):
        expected = generate(target, None, prompt, each)
        assert found[key].tokens == expected.tokens and found[key].finish_reason == expected.finish_reason
        assert found[key].steps == expected.steps and found[key].prompt_logprobs == expected.prompt_logprobs
        assert len(found[key].logprobs) == len(expected.logprobs)


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.sampled
def test_batched_rows_equal_single_decoding(name: str) -> None:
    assert unbatchable_reason(tiny(name)) is None
    check(tiny(name), list(params(SamplingParams(), DRAWN)))


@pytest.mark.parametrize("name", ["Qwen3.5", "gpt-oss"])
def test_without_padding_only_equal_lengths_are_batched(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batched.packed, "separable", lambda _: False)
    monkeypatch.setattr(batched, "PREFILL_TOKENS", 30)
    target, seen = tiny(name), []
    forward = Target.forward

    def watched(self: Target, ids: torch.Tensor, **options: Any) -> Any:
        seen.append((tuple(ids.shape), options.get("padding") is not None))
        return forward(self, ids, **options)

    decoder = BatchedDecoder(target, 4)
    monkeypatch.setattr(Target, "forward", watched)
    for key, length in enumerate((5, 9, 9, 30)):
        decoder.submit(key, [key] * length, SamplingParams(max_tokens=2, ignore_eos=True))
    assert {decoder.wait().key for _ in range(4)} == {0, 1, 2, 3}
    prefills = [((1, 5), False), ((2, 9), False)] if name == "Qwen3.5" else [((3, 9), True)]
    assert seen == [*prefills, ((1, 30), False), ((4, 1), True)]


@pytest.mark.parametrize(
    "edits",
    [
        {"repetition_penalty": 1.5, "frequency_penalty": 0.5},
        {"logit_bias": ((7, 3.0),), "min_tokens": 2},
        {"logprobs": 2},
        {"prompt_logprobs": 1},
    ],
)
def test_logits_edits_apply_to_their_own_row_only(edits: dict[str, Any]) -> None:
    check(make_target(), list(params(replace(DRAWN, **edits), DRAWN, replace(SamplingParams(), **edits))))


def test_a_finished_row_is_replaced_by_a_waiting_prompt() -> None:
    target = make_target()
    stops = tuple(generate(target, None, prompt, SamplingParams(max_tokens=4)).tokens[-1] for prompt in asked())
    check(target, [SamplingParams(max_tokens=9, stop_token_ids=stops)] * len(LENGTHS), batch=2)


def test_invalid_prompts_are_refused_on_submit() -> None:
    decoder = BatchedDecoder(make_target(), 2)
    for prompt in ([], [300], [1] * 5000):
        with pytest.raises(PromptError):
            decoder.submit(0, prompt, SamplingParams())
    with pytest.raises(BiasError):
        decoder.submit(0, [1], SamplingParams(logit_bias=((300, 1.0),)))
    with pytest.raises(RuntimeError, match="nothing was submitted"):
        decoder.wait()


def test_out_of_memory_error_suggests_a_smaller_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    decoder = BatchedDecoder(make_target(), 64)
    decoder.submit(0, [1], SamplingParams())
    monkeypatch.setattr(Target, "forward", full)
    with pytest.raises(UserError, match=r"64 prompts.*lower batch_size"):
        decoder.wait()


def test_unbatchable_targets_have_a_reason() -> None:
    target = make_target()
    for rope in ({"rope_type": "dynamic", "factor": 2.0}, {"full_attention": {"rope_type": "longrope"}}):
        target.config.rope_parameters = rope
        assert "RoPE" in str(unbatchable_reason(target))
    target.config.rope_parameters = {"rope_type": "default"}
    target.config.layer_types = ["hybrid"] * len(target.layers)
    assert "keep state" in str(unbatchable_reason(target))
