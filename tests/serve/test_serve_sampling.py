"""What a client asks of the sampler reaches it."""

import copy
import json
from pathlib import Path

import pytest
from test_serve_api import client_of, complete, serving, text_of
from test_serve_engine import make_engine

from dflash_toolkit import Drafter, SamplingParams, Target, UserError, generate
from serve.defaults import sampling_defaults


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
