"""Prompts lengthened with other prompts: lengths, questions, order and errors."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from conftest import TEMPLATE, make_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from dflash_toolkit import UserError
from dflash_toolkit.data.prompts import Prompt
from dflash_toolkit.data.skipped import Skipped
from dflash_toolkit.evaluation import EncodedPrompt
from dflash_toolkit.evaluation.measure.encoding import encode_sets
from dflash_toolkit.evaluation.measure.lengthen import CLOSE, lengthened
from dflash_toolkit.evaluation.measure.measurement import text_of
from dflash_toolkit.evaluation.measure.pairs import Pair


def merging_tokenizer() -> PreTrainedTokenizerFast:
    """Returns a byte-level BPE with tokens of several characters, also line breaks."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|end|>", "<|user|>", "<|assistant|>"]
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, special_tokens=special)
    tokenizer.train_from_iterator(["Why is the sky blue?\n\nWhat is the sum of two and two?\n\n"] * 9, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=TEMPLATE)


TOKENIZERS = {"bytes": make_tokenizer(), "merges": merging_tokenizer()}


def encoded(
    tokenizer: Any, texts: Sequence[str], answers: Sequence[str] = (), system: str = ""
) -> dict[str, list[EncodedPrompt]]:
    """Returns a set of prompts, each with a recorded answer if there are answers."""
    first = ({"role": "system", "content": system},) if system else ()
    rows = [
        Prompt(f"q{i}", (*first, {"role": "user", "content": text}), ({"role": "assistant", "content": answer},))
        for i, (text, answer) in enumerate(zip(texts, answers or [""] * len(texts), strict=True))
    ]
    pair = SimpleNamespace(tokenizer=tokenizer, context_limit=1000, vocabulary=len(tokenizer))
    return encode_sets(cast(Pair, pair), {"s": rows}, (None,), False, Skipped(True))[None]


TEXT = st.text(max_size=25).filter(str.strip) | st.sampled_from(["Why is the sky blue?", "What is two and two?\n\n"])


@settings(deadline=None)
@given(
    st.sampled_from(sorted(TOKENIZERS)),
    st.lists(TEXT, min_size=2, max_size=5, unique=True),
    st.lists(st.integers(130, 700), min_size=1, max_size=3, unique=True).map(sorted),
    st.integers(0, 3),
)
@pytest.mark.slow
def test_lengthened_prompts_have_95_to_100_percent_of_the_length(
    name: str, texts: list[str], lengths: list[int], seed: int
) -> None:
    tokenizer = TOKENIZERS[name]
    sets = encoded(tokenizer, texts)
    found = lengthened(tokenizer, sets, lengths, 9, seed)
    assert found == lengthened(tokenizer, sets, lengths, 9, seed)
    assert list(found) == lengths
    for place, text in enumerate(texts):
        shorter = ""
        for length in lengths:
            prompt = found[length][place]
            assert CLOSE * length <= len(prompt.token_ids) <= length
            shown = text_of(tokenizer, prompt.token_ids)
            assert (prompt.id, prompt.asked) == (f"q{place}", text), "the same question at every length"
            assert shown.startswith("<|user|>") and shown.endswith(f"{text}<|end|><|assistant|>")
            assert shown.removeprefix("<|user|>").endswith(shorter), "a longer context ends with the shorter one"
            shorter = shown.removeprefix("<|user|>")


def test_the_context_is_other_prompts_and_answers_in_the_chat() -> None:
    tokenizer = TOKENIZERS["bytes"]
    texts, answers = ["Why is it?", "When was it?", "Where is it?", "Who is it?"], ["Rain.", "1969.", "Rome.", "Ada."]
    sets = encoded(tokenizer, texts, answers, "Be brief.")
    first = text_of(tokenizer, lengthened(tokenizer, sets, [100], 1, 0)[100][0].token_ids)
    assert first.startswith("<|system|>Be brief.<|end|><|user|>")
    assert first.endswith("\n\nWhy is it?<|end|><|assistant|>") and first.count("Why is it?") == 1
    assert "Rain." not in first and all(f"{t}\n\n{a}" in first for t, a in list(zip(texts, answers, strict=True))[2:])
    orders = {text_of(tokenizer, lengthened(tokenizer, sets, [100], 1, seed)[100][0].token_ids) for seed in range(8)}
    assert first in orders and len(orders) > 1


def test_a_set_of_one_prompt_is_lengthened_with_other_sets() -> None:
    tokenizer = TOKENIZERS["bytes"]
    sets = {"a": encoded(tokenizer, ["Why is it?"])["s"], "b": encoded(tokenizer, ["When was it?"])["s"]}
    own, other = (text_of(tokenizer, p.token_ids) for p in lengthened(tokenizer, sets, [60], 2, 0)[60])
    assert own.count("Why is it?") == 1 == other.count("When was it?") and "When was it?\n\nWhen" in own


def test_prompts_longer_than_the_shortest_length_are_skipped(capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = TOKENIZERS["bytes"]
    sets = encoded(tokenizer, ["Why is it?", "long " * 20, "When was it?"])
    assert [p.id for p in lengthened(tokenizer, sets, [60, 200], 9, 0)[200]] == ["q0", "q2"]
    assert capsys.readouterr().err == "context_length: skipped 1 of 3 prompts, longer than 60 tokens\n"


@pytest.mark.parametrize(
    ("texts", "lengths", "said"),
    [
        (["Why is it?", "When was it?"], [8, 60], "context_length 8: the shortest prompt has 13 tokens; give larger"),
        (["Why is it?"], [60], "prompt 'q0' is lengthened with other prompts; give at least two"),
    ],
)
def test_prompts_that_cannot_be_lengthened_are_refused(texts: list[str], lengths: list[int], said: str) -> None:
    tokenizer = TOKENIZERS["bytes"]
    with pytest.raises(UserError, match=said):
        lengthened(tokenizer, encoded(tokenizer, texts), lengths, 9, 0)


def test_prompts_of_token_ids_only_are_not_lengthened() -> None:
    prompts = {"s": [EncodedPrompt("a", [65, 66], asked="AB"), EncodedPrompt("b", [67], asked="C")]}
    with pytest.raises(UserError, match="prompt 'a' has no message of the user"):
        lengthened(TOKENIZERS["bytes"], prompts, [60], 9, 0)
