"""What a request may ask of its sampling."""

import math

import pytest

from dflash_toolkit import SamplingParams, decode
from dflash_toolkit.sampling import BiasError


@pytest.mark.parametrize("seed", [0, 1, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, 1 << 64, -1, -(1 << 63)])
def test_any_seed_is_a_signed_integer_of_64_bits_with_its_low_bits(seed: int) -> None:
    found = decode.int64_seed(seed)
    assert -(1 << 63) <= found < 1 << 63 and (found - seed) % (1 << 64) == 0


def test_penalties_and_biases_count_as_edited_logits() -> None:
    assert not SamplingParams(temperature=1.0, top_p=0.5, top_k=3, min_p=0.1, seed=4).edits_logits
    for one in ({"repetition_penalty": 1.1}, {"presence_penalty": 0.1}, {"frequency_penalty": -0.1}):
        assert SamplingParams(**one).edits_logits
    assert SamplingParams(logit_bias=((5, 1.0),)).edits_logits and SamplingParams(min_tokens=1).edits_logits


@pytest.mark.parametrize("bias", [math.inf, math.nan])
def test_logit_bias_that_overflows_softmax_is_refused(bias: float) -> None:
    with pytest.raises(ValueError, match="logit_bias of token 5"):
        SamplingParams(logit_bias=((4, 1.0), (5, bias)))
    SamplingParams(logit_bias=((5, -math.inf),))


# values at the ends of a range, and beyond them
RANGES: dict[str, tuple[list[float | None], list[float]]] = {
    "temperature": ([0.0, 1e-5, 100.0], [-0.1, 9e-6, 101.0, math.nan]),
    "top_p": ([1e-6, 1.0], [0.0, 1.1, math.nan]),
    "top_k": ([0], [-1]),
    "min_p": ([0.0, 1.0], [-0.1, 1.5]),
    "repetition_penalty": ([0.01, 100.0], [0.009, 101.0]),
    "presence_penalty": ([-100.0, 100.0], [-101.0, 101.0, math.nan]),
    "frequency_penalty": ([-100.0, 100.0], [-101.0, 101.0, math.nan]),
    "logprobs": ([None, 0, 20], [-1, 21]),
    "prompt_logprobs": ([None, 0, 20], [-1, 21]),
    "max_tokens": ([1], [0]),
    "min_tokens": ([0, 512], [-1, 513]),
}


@pytest.mark.parametrize("name", RANGES)
def test_sampling_params_refuse_values_out_of_range(name: str) -> None:
    good, bad = RANGES[name]
    for value in good:
        assert getattr(SamplingParams(**{name: value}), name) == value
    for value in bad:
        with pytest.raises(ValueError, match=f"^{name} is {value}"):
            SamplingParams(**{name: value})


def test_an_answer_may_be_empty_if_its_prompt_is_scored() -> None:
    assert SamplingParams(max_tokens=0, prompt_logprobs=0).max_tokens == 0
    with pytest.raises(ValueError, match="max_tokens is -1; it must be >= 0"):
        SamplingParams(max_tokens=-1, prompt_logprobs=0)


def test_a_biased_token_is_one_of_the_vocabulary() -> None:
    SamplingParams(logit_bias=((0, 1.0), (9, 1.0))).check_bias(10)
    for token in (-1, 10):
        with pytest.raises(BiasError, match=rf"token {token}; the target has tokens 0\.\.9"):
            SamplingParams(logit_bias=((0, 1.0), (token, 1.0))).check_bias(10)
