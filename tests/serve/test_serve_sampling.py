"""Sampling defaults of a checkpoint."""

import copy
from pathlib import Path
from typing import Any

import pytest
from live_server import client_of, complete, make_engine, serving, text_of

from dflash_toolkit import Drafter, SamplingParams, Target, UserError, generate
from dflash_toolkit.serve.defaults import sampling_defaults


def test_checkpoint_defaults_apply_to_omitted_parameters(target: Target, drafter: Drafter) -> None:
    ids = target.tokenizer.encode("The sky")
    defaults = {"temperature": 0.6, "top_k": 3, "top_p": 0.9, "repetition_penalty": 1.3}
    with serving(make_engine(target, drafter), defaults=defaults) as url:
        client = client_of(url)
        for given in ({}, {"temperature": 0}, {"top_p": 1.0}):
            params = SamplingParams(max_tokens=30, seed=3, **(defaults | given))
            got = complete(client, max_tokens=30, seed=3, **given).choices[0].text
            assert got == text_of(target, generate(target, drafter, ids, params))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ('{"temperature": 0.6, "top_k": 20, "eos_token_id": 5}', {"temperature": 0.6, "top_k": 20}),
        ('{"temperature": 1e-6, "top_p": 1e-7, "top_k": 1}', {"temperature": 0.0, "top_p": 1e-7, "top_k": 1}),
        ('{"top_p": 7}', "top_p is 7; it must be in"),
        ('{"temperature": "hot"}', "sampling-defaults openai"),
        ('{"top_k": NaN}', "top_k is"),
        ('{"top_k": Infinity}', "top_k is"),
    ],
)
def test_invalid_sampling_defaults_of_a_checkpoint_are_refused(values: str, expected: Any, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(values)
    if isinstance(expected, str):
        with pytest.raises(UserError, match=expected):
            sampling_defaults(str(tmp_path))
        return
    found = sampling_defaults(str(tmp_path))
    assert found == pytest.approx(expected, abs=1e-3) and found.get("top_p", 1.0) > 0
    SamplingParams(**found)


def test_tokenizers_eos_ends_an_answer(target: Target) -> None:
    plain = generate(target, None, target.tokenizer.encode("The sky"), SamplingParams(max_tokens=9)).tokens
    tokenizer = copy.deepcopy(target.tokenizer)
    tokenizer.eos_token = target.tokenizer.convert_ids_to_tokens(plain[4])
    with serving(make_engine(Target(target.model, tokenizer), None)) as url:
        for options, reason in (({}, "stop"), ({"extra_body": {"ignore_eos": True}}, "length")):
            choice = complete(client_of(url), temperature=0, max_tokens=9, **options).choices[0]
            assert choice.finish_reason == reason
