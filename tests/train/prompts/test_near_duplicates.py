"""Near duplicates are left out of a run: others take their place, and the messages say how many and why."""

import random
from pathlib import Path
from typing import Any

import pytest
from conftest import VOCAB, make_tokenizer
from programs import assistant, says, user, write

from dflash_toolkit import UserError
from dflash_toolkit.data.conversations import conversation
from dflash_toolkit.options import PromptOptions
from dflash_toolkit.train.config import TrainConfig
from dflash_toolkit.train.data_options import DataOptions, ResponseOptions
from dflash_toolkit.train.prompts.choosing import Choice, Wanted, choose, chosen
from dflash_toolkit.train.prompts.split import Reading
from dflash_toolkit.train.responses.build_corpus import write_given
from dflash_toolkit.train.responses.corpus import Corpus
from dflash_toolkit.train.responses.file import Match

RNG = random.Random(11)
TEXTS = [" ".join(f"w{RNG.randrange(10_000)}" for _ in range(24)) for _ in range(40)]
NEAR = [f"{text} please" for text in TEXTS]
NEAR_HELD_OUT = "near duplicates of held-out prompts (prompts.similarity)"


def turns(*texts: str) -> dict[str, Any]:
    """A row with a conversation in which a user says these."""
    return {"messages": [message for text in texts for message in (user(text), assistant("yes"))]}


def chosen_of(rows: list[Any], folder: Path, *held_out: Any, most: int = 0, sampled: bool = False) -> Choice:
    """Chooses prompts of the rows into prompts.jsonl of the folder."""
    wanted = Wanted(
        names=(str(write(folder / "p.jsonl", rows)),), options=PromptOptions(max_prompts=most), sampled=sampled,
        apart=tuple(conversation(row, "h") for row in held_out),
    )  # fmt: skip
    return choose(wanted, folder / "prompts.jsonl")


def asked(folder: Path) -> list[str]:
    return [each.conversation.asked for each in chosen(folder / "prompts.jsonl")]


@pytest.mark.parametrize("sampled", [True, False])
def test_other_prompts_take_the_place_of_near_duplicates(sampled: bool, tmp_path: Path) -> None:
    pairs = [text for pair in zip(TEXTS, NEAR, strict=True) for text in pair]
    choice = chosen_of(says(*pairs * 5), tmp_path, most=30, sampled=sampled)
    found = asked(tmp_path)
    assert choice.near > 0, "some of the prompts that were drawn first had to be replaced"
    assert len(found) == len({text.removesuffix(" please") for text in found}) == choice.prompts == 30
    if sampled:
        assert choice.lines()[0] == "30 of 80 distinct prompts are used (prompts.max_prompts)"


def test_prompts_drawn_later_are_compared_with_held_out_ones(tmp_path: Path) -> None:
    choice = chosen_of(says(TEXTS[0], NEAR[0], NEAR[1], TEXTS[2]), tmp_path, {"prompt": TEXTS[1]}, most=2)
    assert asked(tmp_path) == [TEXTS[0], TEXTS[2]]
    assert (choice.near, choice.like_held_out) == (1, 1)


@pytest.mark.parametrize(
    ("row", "held_out"),
    [
        (turns(NEAR[0], TEXTS[1]), turns(TEXTS[0])),
        (turns(NEAR[0]), turns(TEXTS[0], TEXTS[2])),
        (turns(NEAR[0], TEXTS[1]), turns(TEXTS[0], TEXTS[2])),
        (turns("hello", NEAR[0]), turns("hi", TEXTS[0])),
    ],
    ids=["first of the row", "first of the held-out", "both first", "all turns"],
)
def test_first_questions_are_compared_with_held_out_ones(row: Any, held_out: Any, tmp_path: Path) -> None:
    choice = chosen_of([row, turns(TEXTS[3])], tmp_path, held_out)
    assert asked(tmp_path) == [TEXTS[3]] and choice.like_held_out == 1


@pytest.mark.parametrize(("near", "warned"), [(5, False), (6, True)])
def test_a_loss_of_more_than_a_third_names_the_option(near: int, warned: bool, tmp_path: Path) -> None:
    said = chosen_of(says(*TEXTS[:10], *NEAR[:near]), tmp_path).lines()
    warning = f"warning: {near} of {10 + near} distinct prompts are left out because they are near duplicates; "
    assert said[0] == f"10 prompts; left out: {near} near duplicates (prompts.similarity)"
    assert said[1:] == ([f"{warning}prompts.similarity=1 keeps all prompts that differ"] if warned else [])


def test_a_run_without_a_prompt_is_told_the_true_reason(tmp_path: Path) -> None:
    with pytest.raises(UserError) as found:
        chosen_of([*says(NEAR[0], NEAR[0]), {"prompt": 5}], tmp_path, {"prompt": TEXTS[0]}, most=1)
    message = str(found.value)
    assert message.startswith(f"{tmp_path / 'p.jsonl'}: none of 3 rows is a prompt to use; left out: 1 duplicates, ")
    assert f"1 {NEAR_HELD_OUT}, 1 " in message and "line 3" in message and "max_prompts" not in message
    assert [path.name for path in tmp_path.iterdir()] == ["p.jsonl"], "nothing half-written"


# ---- files of responses ----------------------------------------------------------------------------------------


def trained_on(rows: list[tuple[int, int, dict[str, Any]]], held_out: Any, folder: Path, **options: Any) -> list[int]:
    """Returns the indices of the responses, given as (index, sample, conversation), that are trained on."""
    common = {
        "part": 0, "parts": 1, "prompt_tokens": 2, "spans": [[2, 4]], "target": "t", "vocab_size": VOCAB,
        "template_hash": "h", "sampler": {"temperature": 0.0, "thinking": None},
    }  # fmt: skip
    made = [
        common | {"index": index, "sample": sample, "tokens": [10 + index, 20, 30, 40]} | each
        for index, sample, each in rows
    ]
    config = TrainConfig(
        target="t", response_files=(str(write(folder / "r.jsonl", made)),), prompts=DataOptions(**options),
        held_out=(str(write(folder / "h.jsonl", [held_out])),), responses=ResponseOptions(),
    )  # fmt: skip
    write_given(Reading(config, make_tokenizer(), ""), "", Match("t", None, VOCAB, "h"), folder / "corpus", {})
    corpus = Corpus.open(folder / "corpus")
    return [corpus[i].tokens[0] - 10 for i in range(len(corpus))]


def test_later_samples_are_compared_with_held_out_prompts(tmp_path: Path) -> None:
    rows = [(0, 0, turns("hello")), (0, 1, turns("hello", NEAR[0])), (1, 0, turns(TEXTS[1]))]
    assert trained_on(rows, turns("hi", TEXTS[0]), tmp_path) == [1]


@pytest.mark.parametrize(
    ("row", "held_out"),
    [(turns(NEAR[0], TEXTS[1]), turns(TEXTS[0])), (turns(NEAR[0]), turns(TEXTS[0], TEXTS[2]))],
    ids=["of the response", "of the held-out"],
)
def test_first_questions_of_responses_are_compared_too(row: Any, held_out: Any, tmp_path: Path) -> None:
    assert trained_on([(0, 0, row), (1, 0, turns(TEXTS[3]))], held_out, tmp_path) == [1]


def test_responses_without_a_prompt_left_name_the_true_reason(tmp_path: Path) -> None:
    with pytest.raises(UserError) as found:
        trained_on([(0, 0, turns(NEAR[0]))], turns(TEXTS[0]), tmp_path, max_prompts=1)
    assert str(found.value) == (
        "no prompt is left to train on: of 1, 0 are held out and 1 are near duplicates of held-out ones; "
        "prompts.similarity=1 keeps all that differ"
    )
