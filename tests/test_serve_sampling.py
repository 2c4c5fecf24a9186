"""What a client asks of the sampler reaches it."""

from collections.abc import Iterator

import pytest
from openai import APIStatusError, OpenAI
from test_serve_api import client_of, complete, serving, text_of
from test_serve_engine import make_engine

from dflash_toolkit import Drafter, SamplingParams, Target, generate


@pytest.fixture(scope="module")
def client(target: Target, drafter: Drafter) -> Iterator[OpenAI]:
    with serving(make_engine(target, drafter)) as url:
        yield client_of(url)


def test_penalties_and_bias_are_those_of_generate(client: OpenAI, target: Target, drafter: Drafter) -> None:
    ids = target.tokenizer.encode("The sky")
    params = SamplingParams(
        max_new_tokens=30, presence_penalty=0.7, frequency_penalty=0.3, repetition_penalty=1.2, logit_bias=((65, 3.0),)
    )
    got = complete(
        client, temperature=0, max_tokens=30, presence_penalty=0.7, frequency_penalty=0.3, logit_bias={"65": 3},
        extra_body={"repetition_penalty": 1.2},
    )  # fmt: skip
    assert got.choices[0].text == text_of(target, generate(target, drafter, ids, params))
    plain = generate(target, drafter, ids, SamplingParams(max_new_tokens=30))
    assert got.choices[0].text != text_of(target, plain)


@pytest.mark.parametrize("streamed", [False, True])
def test_a_request_that_the_engine_refuses_is_the_clients_error(client: OpenAI, streamed: bool) -> None:
    with pytest.raises(APIStatusError, match="logit_bias names token 300") as caught:
        complete(client, logit_bias={"300": 1}, stream=streamed)
    assert caught.value.status_code == 400, "not an event in a stream that has begun"


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"temperature": 1e39}, "temperature"), ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
        ({"extra_body": {"repetition_penalty": 1e39}}, "repetition_penalty"),
        ({"extra_body": {"repetition_penalty": 1e-39}}, "repetition_penalty"),
        ({"extra_body": {"bad_words": ["a"]}}, "bad_words"), ({"extra_body": {"regex": "a*"}}, "regex"),
        ({"extra_body": {"truncate_prompt_tokens": 3}}, "truncate_prompt_tokens"),
    ],
)  # fmt: skip
def test_what_the_sampler_cannot_do_is_named(client: OpenAI, options: dict[str, object], param: str) -> None:
    with pytest.raises(APIStatusError) as caught:
        complete(client, **options)
    assert (caught.value.status_code, caught.value.param) == (400, param)


def test_a_nucleus_too_small_for_fp32_holds_the_best_token(client: OpenAI) -> None:
    best = complete(client, temperature=0).choices[0].text
    assert complete(client, temperature=1, seed=1, top_p=1e-46).choices[0].text == best
