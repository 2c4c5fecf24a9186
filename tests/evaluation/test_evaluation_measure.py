"""Counts of acceptance against values computed by hand, properties, and a drafter that is always right."""

import itertools
import math
import operator

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from dflash_toolkit import Drafter, Generation, SamplingParams, Target, decode
from dflash_toolkit.acceptance import verdicts
from dflash_toolkit.decode import generate
from dflash_toolkit.evaluation import Acceptance, held_out_acceptance
from dflash_toolkit.generation import Step

PROMPT = list(b"Why is the sky blue?")


def answer(finish: str, *steps: tuple[int, int, int], decode_s: float = 1.0) -> Generation:
    """Returns a finished answer from (drafted, accepted, committed) per step."""
    made = [Step(drafted, accepted, (7,) * committed) for drafted, accepted, committed in steps]
    tokens = [7] * (1 + sum(committed for _, _, committed in steps))
    return Generation(tokens, made, finish, prefill_s=0.5, decode_s=decode_s)  # type: ignore[arg-type]


LIMITED = answer("length", (3, 3, 4), (3, 0, 1), (3, 1, 2), (1, 1, 2), decode_s=2.0)
STOPPED_BY_A_DRAFT = answer("stop", (3, 2, 2))  # the second draft was the stop token
STOPPED_BY_THE_TARGET = answer("stop", (3, 0, 1))
NO_STEP = answer("stop", decode_s=0.0)


def test_acceptance_counts_match_a_hand_count() -> None:
    found = Acceptance.of([LIMITED, STOPPED_BY_A_DRAFT, STOPPED_BY_THE_TARGET, NO_STEP], block_size=4)
    assert (found.answers, found.tokens, found.steps) == (4, 16, 6)
    assert found.tau_pooled == 12 / 6
    assert found.tau_mean == (9 / 4 + 2 + 1) / 3  # the answer without a step has no tau
    assert found.accepted_per_position == (4 / 6, 2 / 4, 1 / 3)
    assert found.accepted_given_previous == (4 / 6, 2 / 3, 1 / 1)
    assert found.accepted_lengths == (2, 3, 0, 1)
    assert (found.prefill_s, found.decode_s, found.seconds) == (2.0, 4.0, 6.0)
    assert found.tokens_per_second == 12 / 4.0


@pytest.mark.parametrize(
    ("generation", "last"),
    [
        pytest.param(LIMITED, (1, 1), id="block cut by the token limit"),
        pytest.param(STOPPED_BY_A_DRAFT, (2, 2), id="slots after a drafted stop token are not judged"),
        pytest.param(STOPPED_BY_THE_TARGET, (1, 0), id="the slot where the target stopped is rejected"),
        pytest.param(answer("stop", (3, 3, 4)), (3, 3), id="stop as the bonus of a full block"),
        pytest.param(answer("length", (3, 0, 1)), (3, 0), id="no stop: every drafted slot is judged"),
    ],
)
def test_slots_after_a_stop_token_are_not_judged(generation: Generation, last: tuple[int, int]) -> None:
    assert verdicts(generation)[-1] == last


def test_acceptance_without_steps_is_nan() -> None:
    found = Acceptance.of([NO_STEP], block_size=3)
    assert (found.answers, found.tokens, found.steps, found.accepted_lengths) == (1, 1, 0, (0, 0, 0))
    figures = (found.tau_pooled, found.tau_mean, found.tokens_per_second, *found.accepted_per_position)
    assert all(map(math.isnan, figures))


@st.composite
def answers(draw: st.DrawFn, full_blocks: bool = False) -> tuple[int, list[Generation]]:
    """Draws possible answers: S, and steps of each answer up to a token limit or a stop token."""
    size = draw(st.integers(2, 6))
    made = []
    for _ in range(draw(st.integers(1, 4))):
        limit = draw(st.integers(1, 25))
        steps: list[tuple[int, int, int]] = []
        left, finish = limit - 1, "length"
        while left > 0 and not (full_blocks and left < size):
            drafted = min(size - 1, left - 1)
            accepted = draw(st.integers(0, drafted))
            committed = accepted + 1
            if not full_blocks and draw(st.booleans()):
                committed = draw(st.integers(1, committed))
                finish = "stop"
            steps.append((drafted, min(accepted, committed), committed))
            left = 0 if finish == "stop" else left - committed
        made.append(answer(finish, *steps))
    return size, made


@given(answers())
def test_acceptance_counts_are_consistent_with_steps(drawn: tuple[int, list[Generation]]) -> None:
    size, generations = drawn
    found = Acceptance.of(generations, size)
    committed = sum(len(step.tokens) for g in generations for step in g.steps)
    assert sum(found.accepted_lengths) == found.steps == sum(len(g.steps) for g in generations)
    assert sum(n * count for n, count in enumerate(found.accepted_lengths, 1)) == committed
    assert found.tokens == committed + found.answers
    if found.steps:
        assert found.tau_pooled == committed / found.steps
        assert 1.0 <= found.tau_mean <= size
    shares = [*found.accepted_per_position, *found.accepted_given_previous]
    assert all(0.0 <= share <= 1.0 for share in shares if not math.isnan(share))
    for at_least, given_previous in zip(found.accepted_per_position, found.accepted_given_previous, strict=True):
        assert math.isnan(given_previous) or at_least <= given_previous


@given(answers(full_blocks=True))
def test_acceptance_by_slot_decreases_for_full_blocks(drawn: tuple[int, list[Generation]]) -> None:
    found = Acceptance.of(drawn[1], drawn[0])
    assume(found.steps)
    curve = found.accepted_per_position
    assert list(curve) == sorted(curve, reverse=True)
    assert found.tau_pooled == pytest.approx(1 + sum(curve))
    conditional = [0.0 if math.isnan(share) else share for share in found.accepted_given_previous]
    assert curve == pytest.approx(tuple(itertools.accumulate(conditional, operator.mul)))


@pytest.mark.parametrize("right", [0, 2, 7])
def test_a_known_drafter_has_the_expected_acceptance(
    target: Target, drafter: Drafter, right: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = generate(target, None, PROMPT, SamplingParams(max_tokens=30, ignore_eos=True)).tokens
    # the answer ends with a stop token inside a block
    params = SamplingParams(max_tokens=30, ignore_eos=True, stop_token_ids=(free[20],))
    plain = generate(target, None, PROMPT, params).tokens

    def propose(target: Target, drafter: Drafter, context: object, last: int, position: int) -> list[int]:
        """Drafts the plain answer in the first `right` slots, and other tokens after them."""
        drafts = (plain[position - len(PROMPT) + 1 :] + [0] * 7)[:7]
        return [token if i < right else (token + 1) % 200 for i, token in enumerate(drafts)]

    monkeypatch.setattr(decode, "propose", propose)
    found = held_out_acceptance(target, drafter, [PROMPT], params)
    assert found.tokens == len(plain)
    assert found.accepted_per_position[:right] == (1.0,) * right
    assert not any(found.accepted_per_position[right:])
    assert found.steps == math.ceil((len(plain) - 1) / (right + 1))
