"""What a client asks of the sampler reaches it."""

from collections.abc import Iterator

import pytest
from openai import APIError, OpenAI
from test_serve_api import client_of, complete, joined, serving, text_of
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
    with pytest.raises(APIError, match="logit_bias names token 300"):
        answer = complete(client, logit_bias={"300": 1}, stream=streamed)
        joined(answer)
