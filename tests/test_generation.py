"""What is kept of an answer, and which prompts can be answered."""

from array import array

import pytest

from dflash_toolkit.generation import Generation, PromptError, PromptLogprobs, TokenLogprobs, check_prompt


def test_packed_log_probabilities_are_read_by_token() -> None:
    """Enough tokens to show a width that is wrong by one byte."""
    rows = [[-0.5 - i, 3.0 + i, 7.0, 9.0 + i, -0.1, -0.2 - i] for i in range(60)]
    found = PromptLogprobs(2, array("d", [value for row in rows for value in row]).tobytes())
    assert len(found) == 60
    assert list(found) == [
        (TokenLogprobs(chosen, ((int(first), first_logprob), (int(second), second_logprob))), int(rank))
        for chosen, rank, first, second, first_logprob, second_logprob in rows
    ]


def test_a_new_generation_is_empty() -> None:
    new = Generation()
    assert (new.tokens, new.steps, new.prefill_s, new.decode_s, new.acceptance_length) == ([], [], 0.0, 0.0, None)


def test_a_prompt_fits_up_to_the_context_limit() -> None:
    check_prompt([7], 2, 8)
    check_prompt([7, 7], 2, 8, answered=False)
    for count, answered in ((2, True), (3, False)):
        with pytest.raises(PromptError, match=f"has {count} tokens; the context limit is 2") as caught:
            check_prompt([7] * count, 2, 8, answered=answered)
        assert caught.value.code == "context_length_exceeded"


@pytest.mark.parametrize(("ids", "wrong"), [([0, 8], 8), ([0, -1], -1)])
def test_the_token_outside_the_vocabulary_is_named(ids: list[int], wrong: int) -> None:
    with pytest.raises(PromptError, match=rf"token {wrong}; the target's embedding has rows 0\.\.7") as caught:
        check_prompt(ids, 9, 8)
    assert caught.value.code is None
