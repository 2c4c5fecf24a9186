"""Prompts that differ in nothing essential are duplicates."""

import random
from collections.abc import Collection
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from programs import Program, says, write

from dflash_toolkit.data.conversations import Conversation, conversation
from dflash_toolkit.train.prompts import dedup
from dflash_toolkit.train.prompts.dedup import Duplicates, shingles, similarity

LONG = " ".join(f"word{i}" for i in range(60))


def test_the_same_question_with_other_tools_is_another_prompt() -> None:
    duplicates = Duplicates(0.8)
    plain, one, other = (
        conversation({"prompt": LONG, "tools": tools}, "x") for tools in (None, [{"name": "f"}], '[{"name": "g"}]')
    )
    assert other.tools == ({"type": "function", "function": {"name": "g"}},)
    for found in (plain, one, other):
        assert not duplicates.seen(found.asked, under=found.instructions)
        assert duplicates.seen(found.asked, under=found.instructions)


WEATHER = "\u4eca\u5929\u5929\u6c14\u600e\u4e48\u6837\u554a\u4f60\u89c9\u5f97\u5462\u6211\u60f3\u53bb\u516c\u56ed\u73a9"


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        ("Say hello", "say   HELLO\n", True),
        ("\uff21\uff22\uff23", "abc", True),  # full width
        (LONG, LONG.replace("word30", "other"), True),
        (LONG, "Please, " + LONG, True),
        (WEATHER, WEATHER[:-1], True),
        ("What is 2 + 2?", "What is 2 + 3?", False),
        ("What is 5 - 1?", "What is 5 + 1?", False),
        ("Count from 1 to 20.", "Count from 1 to 30.", False),
        ("yes", "no", False),
        (LONG, LONG[: len(LONG) // 2], False),
    ],
)
def test_similar_prompts_are_duplicates_and_others_not(a: str, b: str, same: bool) -> None:
    duplicates = Duplicates(0.8)
    assert not duplicates.seen(a) and duplicates.seen(b) == same and duplicates.seen(a)


def test_at_a_threshold_of_one_only_equal_prompts_are_dropped() -> None:
    duplicates = Duplicates(1.0)
    assert not duplicates.seen(LONG) and not duplicates.seen(LONG + " more") and duplicates.seen(LONG.upper())


def test_minhash_agrees_with_comparing_all_pairs() -> None:
    rng = random.Random(3)
    texts = []
    for _ in range(40):
        words = [f"w{rng.randrange(500)}" for _ in range(rng.randrange(20, 80))]
        texts.append(" ".join(words))
        for _ in range(3):
            changed = list(words)
            for _ in range(rng.randrange(1, 8)):
                changed[rng.randrange(len(changed))] = f"w{rng.randrange(500)}"
            texts.append(" ".join(changed))
    rng.shuffle(texts)
    duplicates = Duplicates(0.8)
    kept: list[frozenset[int]] = []
    verdicts, expected = [], []
    for text in texts:
        mine = shingles(text)
        expected.append(any(similarity(mine, other) >= 0.8 for other in kept))
        verdicts.append(duplicates.seen(text))
        if not expected[-1]:
            kept.append(mine)
    assert verdicts == expected and 10 < sum(expected) < 110


def instructed(count: int) -> list[str]:
    """Prompts below the threshold that share a long instruction."""
    rng = random.Random(4)
    instruction = " ".join(f"rule{i}" for i in range(100))
    return [f"{instruction} {' '.join(f'w{rng.randrange(10_000)}' for _ in range(20))}" for _ in range(count)]


@pytest.mark.slow
def test_a_shared_instruction_does_not_compare_all_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[float] = []

    def counted(a: frozenset[int], b: Collection[int]) -> float:
        calls.append(similarity(a, b))
        return calls[-1]

    monkeypatch.setattr(dedup, "similarity", counted)
    compared = []
    for count in (200, 400):
        calls.clear()
        duplicates = Duplicates(0.8)
        assert not any(map(duplicates.seen, instructed(count)))
        compared.append(len(calls))
    assert compared[1] < 2.5 * compared[0], "four times as many if all pairs are compared"


def test_in_a_crowd_repeats_and_one_word_edits_are_still_found() -> None:
    duplicates, texts = Duplicates(0.8), instructed(200)
    assert not any(map(duplicates.seen, texts))
    assert all(duplicates.seen(text.upper()) for text in texts)
    assert all(duplicates.seen(text + " please") for text in texts)
    found = [duplicates.seen(text.replace("rule50", "other")) for text in texts]
    assert sum(found) > 0.95 * len(found)


@given(st.text(max_size=40))
def test_any_text_can_be_compared(text: str) -> None:
    duplicates = Duplicates(0.8)
    assert not duplicates.seen(text) and duplicates.seen(text)
    assert similarity(shingles(text), shingles(text)) == 1.0


def test_questions_that_share_long_instructions_are_no_duplicates() -> None:
    rng = random.Random(5)
    system = {"role": "system", "content": " ".join(f"rule{i}" for i in range(150))}

    def asked(text: str, *before: dict[str, str]) -> Conversation:
        return conversation({"messages": [*before, {"role": "user", "content": text}]}, "x")

    def seen(found: Conversation) -> bool:
        return duplicates.seen(found.asked, under=found.instructions)

    duplicates = Duplicates(0.8)
    texts = [" ".join(f"w{rng.randrange(10_000)}" for _ in range(12)) for _ in range(100)]
    assert not any(seen(asked(text, system)) for text in texts)
    assert all(seen(asked(f"{text} please", system)) for text in texts)
    assert not any(seen(asked(text)) for text in texts[:10]), "under other instructions another prompt"


@pytest.mark.parametrize(("similarity", "kept"), [("0.6", 1), ("0.8", 2), ("0.9", 3), ("1", 3)])
def test_similarity_is_the_threshold_of_duplicates(similarity: str, kept: int, command: Program, prompts: Path) -> None:
    words = [f"w{i}" for i in range(22)]  # 20 runs of three
    near, far = [*words[:-1], "x", "y"], [*words[:-4], *"abcd"]  # with 19 of 22 and 16 of 24 in common
    write(prompts, says(*map(" ".join, (words, near, far))))
    said = "\n".join(command(f"prompts.similarity={similarity}"))
    assert f"{kept} prompts; left out: {3 - kept} near duplicates" in said
