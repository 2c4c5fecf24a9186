"""Prompts that differ in nothing essential are duplicates."""

import itertools
import random
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import Program, says, write

from dflash_toolkit.data.conversations import Conversation, conversation
from dflash_toolkit.train.prompts.dedup import ENOUGH, LEAST, RUN, SHARERS, Duplicates, SharedText, normalized

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
        ("Name a fruit.", "name a fruit ?", True),
        ("What is 5!", "What is 5", False),
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
            for _ in range(rng.randrange(1, 4)):
                changed[rng.randrange(len(changed))] = f"w{rng.randrange(500)}"
            texts.append(" ".join(changed))
    rng.shuffle(texts)

    def pairs(text: str) -> Counter[tuple[str, str]]:
        return Counter(itertools.pairwise(text.split()))

    def near(a: Counter[tuple[str, str]], b: Counter[tuple[str, str]]) -> bool:
        same = (a & b).total()
        differ = (a | b).total() - same
        return same >= LEAST and min(same, ENOUGH) >= 0.8 * (min(same, ENOUGH) + differ)

    duplicates = Duplicates(0.8)
    kept: list[Counter[tuple[str, str]]] = []
    verdicts, expected = [], []
    for text in texts:
        expected.append(any(near(pairs(text), other) for other in kept))
        verdicts.append(duplicates.seen(text))
        if not expected[-1]:
            kept.append(pairs(text))
    assert verdicts == expected and 10 < sum(expected) < 110


def judged(texts: list[str]) -> list[str]:
    """Returns the texts that are kept, as a run judges them."""
    shared = SharedText()
    for text in texts:
        shared.add(text)
    duplicates = Duplicates(0.8, shared)
    return [text for text in texts if not duplicates.seen(text)]


@settings(deadline=None)
@given(st.integers(RUN, 300), st.lists(st.text("abc ", min_size=1, max_size=12), unique_by=normalized, max_size=30))
@pytest.mark.slow
def test_all_short_questions_after_a_shared_text_stay(length: int, ends: list[str]) -> None:
    shared = " ".join(f"rule{i}" for i in range(length)) + " say: x"
    texts = [f"{shared}{end}" for end in ends if end.strip()]
    texts = list({normalized(text): text for text in texts}.values())
    if len(texts) > SHARERS:
        assert judged(texts) == texts


def test_distinct_questions_about_each_document_stay() -> None:
    rng = random.Random(6)
    vocabulary = [f"w{i}" for i in range(3000)]
    documents = [" ".join(rng.choices(vocabulary, k=300)) for _ in range(20)]
    questions = [f"what does it say about {word}, and why?" for word in rng.sample(vocabulary, 10)]
    same = [f"{document} {question}" for document in documents for question in questions]
    assert judged(same) == same
    few = [f"{document} {' '.join(rng.choices(vocabulary, k=8))}" for document in documents for _ in range(2)]
    assert judged(few) == few, "also where only two share a document"


@pytest.mark.parametrize("words", [20, 60, 300])
def test_a_prompt_with_one_word_changed_is_dropped(words: int) -> None:
    rng = random.Random(7)
    texts = [[f"w{rng.randrange(3000)}" for _ in range(words)] for _ in range(100)]
    changed = [list(text) for text in texts]
    for text in changed:
        text[rng.randrange(words)] = "changed"
    first, second = ([" ".join(text) for text in each] for each in (texts, changed))
    assert judged(first + second) == first


def instructed(count: int) -> list[str]:
    """Prompts below the threshold that share a long instruction."""
    rng = random.Random(4)
    instruction = " ".join(f"rule{i}" for i in range(100))
    return [f"{instruction} {' '.join(f'w{rng.randrange(10_000)}' for _ in range(20))}" for _ in range(count)]


def test_duplicates_are_found_among_many_similar_prompts() -> None:
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


def test_questions_that_share_long_instructions_are_no_duplicates() -> None:
    rng = random.Random(5)
    system = {"role": "system", "content": " ".join(f"rule{i}" for i in range(150))}

    def asked(text: str, *before: dict[str, str]) -> Conversation:
        return conversation({"messages": [*before, {"role": "user", "content": text}]}, "x")

    def seen(found: Conversation) -> bool:
        return duplicates.seen(found.asked, under=found.instructions)

    duplicates = Duplicates(0.8)
    texts = [" ".join(f"w{rng.randrange(10_000)}" for _ in range(20)) for _ in range(100)]
    assert not any(seen(asked(text, system)) for text in texts)
    assert all(seen(asked(f"{text} please", system)) for text in texts)
    assert not any(seen(asked(text)) for text in texts[:10]), "under other instructions another prompt"


@pytest.mark.parametrize(("similarity", "kept"), [("0.6", 1), ("0.8", 2), ("0.9", 3), ("1", 3)])
def test_similarity_is_the_threshold_of_duplicates(similarity: str, kept: int, command: Program, prompts: Path) -> None:
    words = [f"w{i}" for i in range(22)]
    near, far = [*words[:-1], "x", "y"], [*words[:-4], *"abcd"]  # with 20 of 23 and 17 of 25 pairs in common
    write(prompts, says(*map(" ".join, (words, near, far))))
    left_out = f"; left out: {3 - kept} near duplicates (prompts.similarity)" if kept < 3 else ""
    assert f"{kept} prompts{left_out}" in command(f"prompts.similarity={similarity}")
