"""What a client asks of the sampler reaches it."""

import copy
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import APIStatusError, OpenAI
from test_serve_api import client_of, complete, serving, text_of
from test_serve_engine import make_engine

from dflash_toolkit import Drafter, SamplingParams, Target, UserError, generate
from serve.defaults import sampling_defaults


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
    assert caught.value.param == "logit_bias"


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"temperature": 1e39}, "temperature"), ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
        ({"extra_body": {"repetition_penalty": 1e39}}, "repetition_penalty"),
        ({"extra_body": {"repetition_penalty": 1e-39}}, "repetition_penalty"),
        ({"extra_body": {"bad_words": ["a"]}}, "bad_words"), ({"extra_body": {"regex": "a*"}}, "regex"),
        ({"extra_body": {"truncate_prompt_tokens": 3}}, "truncate_prompt_tokens"),
        ({"extra_body": {"add_special_tokens": False}}, "add_special_tokens"),
        ({"extra_body": {"prompt_embeds": "AAAA"}}, "prompt_embeds"),
    ],
)  # fmt: skip
def test_what_the_sampler_cannot_do_is_named(client: OpenAI, options: dict[str, object], param: str) -> None:
    with pytest.raises(APIStatusError) as caught:
        complete(client, **options)
    assert (caught.value.status_code, caught.value.param) == (400, param)


def test_a_nucleus_too_small_for_fp32_holds_the_best_token(client: OpenAI) -> None:
    best = complete(client, temperature=0).choices[0].text
    assert complete(client, temperature=1, seed=1, top_p=1e-46).choices[0].text == best


def test_what_a_request_does_not_say_the_checkpoint_does(target: Target, drafter: Drafter) -> None:
    ids = target.tokenizer.encode("The sky")
    defaults = {"temperature": 0.6, "top_k": 3, "top_p": 0.9, "repetition_penalty": 1.3}
    with serving(make_engine(target, drafter), defaults=defaults) as url:
        client = client_of(url)
        for asked in ({}, {"temperature": 0}, {"top_p": 1.0}):
            params = SamplingParams(max_new_tokens=30, seed=3, **(defaults | asked))
            got = complete(client, max_tokens=30, seed=3, **asked).choices[0].text
            assert got == text_of(target, generate(target, drafter, ids, params))


def test_the_defaults_are_read_strictly(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "top_k": 20, "eos_token_id": 5}))
    assert sampling_defaults(str(tmp_path)) == {"temperature": 0.6, "top_k": 20}
    for wrong, said in (
        ({"top_p": 7}, "top_p is 7; it must be in"),
        ({"temperature": "hot"}, "sampling-defaults openai"),
    ):
        (tmp_path / "generation_config.json").write_text(json.dumps(wrong))
        with pytest.raises(UserError, match=said):
            sampling_defaults(str(tmp_path))


def test_defaults_too_small_to_compute_with_are_greedy_as_in_a_request(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 1e-6, "top_p": 1e-7, "top_k": 1}))
    found = sampling_defaults(str(tmp_path))
    assert found["temperature"] == 0.0 and 0.0 < found["top_p"] < 1e-3
    SamplingParams(**found)
    for wrong in ("NaN", "Infinity"):
        (tmp_path / "generation_config.json").write_text(f'{{"top_k": {wrong}}}')
        with pytest.raises(UserError, match="top_k is"):
            sampling_defaults(str(tmp_path))


def test_the_tokenizers_own_end_ends_an_answer(target: Target) -> None:
    engine = make_engine(target, None)
    engine.tokenizer = copy.deepcopy(target.tokenizer)
    plain = generate(target, None, target.tokenizer.encode("The sky"), SamplingParams(max_new_tokens=9)).tokens
    engine.tokenizer.eos_token = target.tokenizer.convert_ids_to_tokens(plain[4])
    with serving(engine) as url:
        for options, reason in (({}, "stop"), ({"extra_body": {"ignore_eos": True}}, "length")):
            choice = complete(client_of(url), temperature=0, max_tokens=9, **options).choices[0]
            assert choice.finish_reason == reason


def test_one_prompt_in_a_list_is_one_prompt_whatever_its_form(client: OpenAI, target: Target) -> None:
    ids = target.tokenizer.encode("The sky")
    forms = ("The sky", ["The sky"], ids, [ids])
    assert len({complete(client, temperature=0, prompt=prompt).choices[0].text for prompt in forms}) == 1
    assert len(complete(client, prompt=[ids, "The sky"]).choices) == 2
