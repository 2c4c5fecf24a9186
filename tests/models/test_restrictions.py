"""Keys of generation_config.json that change an answer: followed as transformers' `generate` does, or refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import EOS, VOCAB, make_drafter, make_target
from engines import knowing, make_engine
from live_server import client_of, serving
from live_server import make_engine as live_engine
from programs import altered

from dflash_toolkit import SamplingParams, Target, UserError, generate
from dflash_toolkit.evaluation.measure.batched import BatchedDecoder
from dflash_toolkit.models.restrictions import REFUSED, REFUSED_IF_SAMPLED, Restrictions
from dflash_toolkit.models.target_files import load_config
from dflash_toolkit.runtime.load import load_parts
from dflash_toolkit.sampling import Grammar

PROMPT = list(b"Say something.")
GREEDY = SamplingParams(max_tokens=16)


def plain_answer() -> list[int]:
    return generate(make_target(), None, PROMPT, SamplingParams(max_tokens=16, ignore_eos=True)).tokens


FIRST, SECOND, THIRD = list(dict.fromkeys(plain_answer()))[:3]
FOLLOWED: list[dict[str, Any]] = [
    {"suppress_tokens": [FIRST, THIRD, VOCAB + 7]},
    {"begin_suppress_tokens": [FIRST]},
    {"bad_words_ids": [[FIRST], [SECOND], [EOS]]},
    {"sequence_bias": [[[FIRST], -9.0], [[40], 3.0]]},
    {"eos_token_id": [EOS, FIRST], "min_new_tokens": 5},
    {"eos_token_id": [EOS, SECOND], "min_length": len(PROMPT) + 9},
    {"eos_token_id": [EOS, SECOND], "min_length": len(PROMPT), "begin_suppress_tokens": [FIRST, 41]},
    {"eos_token_id": [EOS, SECOND], "min_new_tokens": 4, "begin_suppress_tokens": [FIRST]},
    {"eos_token_id": [FIRST], "min_new_tokens": 99},
]


def folder(target_dir: Path, tmp_path: Path, values: dict[str, Any]) -> str:
    path = altered(target_dir, tmp_path / "restricted")
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS} | values))
    return str(path)


@pytest.mark.parametrize("values", FOLLOWED, ids=lambda values: " ".join(values))
@pytest.mark.sampled
def test_restricted_answers_are_those_of_hf_generate(values: dict[str, Any], target_dir: Path, tmp_path: Path) -> None:
    target = Target.load(folder(target_dir, tmp_path, values), device="cpu")
    drafter = make_drafter(target)
    ids = torch.tensor([PROMPT])
    expected = target.model.generate(ids, max_new_tokens=16, do_sample=False)[0, len(PROMPT) :].tolist()
    unrestricted = plain_answer()
    assert expected != unrestricted[: len(expected)] or len(expected) < 16
    assert [generate(target, each, PROMPT, GREEDY).tokens for each in (None, drafter)] == [expected] * 2
    batched = BatchedDecoder(target, 2)
    batched.submit(0, PROMPT, GREEDY)
    assert batched.wait().tokens == expected
    for each in (None, drafter):
        engine = make_engine(target, each)
        if each is not None:
            knowing(engine, {tuple(PROMPT): expected}, lambda position: position % 5 == 0)
        assert engine.generate([PROMPT], [GREEDY])[0].tokens == expected


def test_sampled_answers_with_drafts_equal_plain_ones(target_dir: Path, tmp_path: Path) -> None:
    target = Target.load(folder(target_dir, tmp_path, {"suppress_tokens": list(range(0, 250, 2))}), device="cpu")
    drafter, params = make_drafter(target), SamplingParams(max_tokens=16, temperature=1.0, seed=3)
    plain = generate(target, None, PROMPT, params).tokens
    assert all(token % 2 or token >= 250 for token in plain)
    for more in ({}, {"draft_tree": 8}):
        engine = make_engine(target, drafter, **more)
        knowing(engine, {tuple(PROMPT): plain}, lambda position: position % 7 == 0)
        assert engine.generate([PROMPT], [params])[0].tokens == plain


def test_an_engine_reads_the_restrictions_of_a_folder(target_dir: Path, tmp_path: Path) -> None:
    name = folder(target_dir, tmp_path, {"suppress_tokens": [FIRST], "min_new_tokens": 3})
    assert load_parts(name, device="cpu").restrictions == Target.load(name, device="cpu").restrictions
    assert load_parts(name, device="cpu").restrictions != Restrictions()


def test_a_grammar_may_need_a_suppressed_token(target_dir: Path, tmp_path: Path) -> None:
    a, b, c = make_target().tokenizer.encode("abc")
    values = {"suppress_tokens": [a, b], "min_new_tokens": 9}
    target = Target.load(folder(target_dir, tmp_path, values), device="cpu")
    params = SamplingParams(max_tokens=8, grammar=Grammar("regex", "a(b|c)a"))
    assert generate(target, None, PROMPT, params).tokens[:3] == [a, c, a]


VALUES: dict[str, Any] = {
    "no_repeat_ngram_size": 3, "encoder_repetition_penalty": 1.2, "encoder_no_repeat_ngram_size": 2,
    "forced_bos_token_id": 5, "forced_eos_token_id": 7, "exponential_decay_length_penalty": [5, 1.1],
    "guidance_scale": 1.5, "watermarking_config": {"greenlist_ratio": 0.5}, "num_beams": 4, "penalty_alpha": 0.6,
    "dola_layers": "low", "constraints": ["x"], "force_words_ids": [[5]], "stop_strings": ["x"], "token_healing": True,
    "typical_p": 0.9, "top_h": 0.4, "epsilon_cutoff": 3e-4, "eta_cutoff": 3e-4,
}  # fmt: skip


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *VALUES.items(),
        ("bad_words_ids", [[5, 6]]),
        ("bad_words_ids", [["x"]]),
        ("sequence_bias", [[[5, 6], 1.0]]),
        ("sequence_bias", [[5]]),
        ("suppress_tokens", "x"),
        ("begin_suppress_tokens", [True]),
        ("min_length", -3),
        ("min_new_tokens", 0.5),
    ],
)
def test_keys_that_are_not_followed_are_refused_by_name(key: str, value: Any, target_dir: Path, tmp_path: Path) -> None:
    assert VALUES.keys() == REFUSED.keys() | REFUSED_IF_SAMPLED.keys()
    name = folder(target_dir, tmp_path, {key: value, "do_sample": key in REFUSED_IF_SAMPLED})
    for load in (Target.load, load_parts):
        with pytest.raises(UserError, match=f"{key}|cannot read its generation_config"):
            load(name, device="cpu")


def test_keys_with_neutral_values_are_accepted(target_dir: Path, tmp_path: Path) -> None:
    neutral = {key: values[0] for key, values in (REFUSED | REFUSED_IF_SAMPLED).items() if values}
    name = folder(target_dir, tmp_path, neutral | {"typical_p": 0.5, "min_length": 0, "temperature": 0.6})
    target = Target(make_target().model, name=name)
    assert load_config(name) is not None and target.restrictions == Restrictions()
    assert Target.load(name, device="cpu").restrictions == Restrictions()


def test_a_server_follows_the_restrictions(target_dir: Path, tmp_path: Path) -> None:
    target = Target.load(folder(target_dir, tmp_path, {"suppress_tokens": [FIRST], "begin_suppress_tokens": [41]}))
    expected = generate(target, None, PROMPT, GREEDY).tokens
    with serving(live_engine(target, make_drafter(target))) as url:
        answer = client_of(url).completions.create(
            model="org/tiny", prompt=PROMPT, max_tokens=16, temperature=0, extra_body={"return_token_ids": True}
        )
    assert answer.choices[0].to_dict()["token_ids"] == expected and FIRST not in expected
