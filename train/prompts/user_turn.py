"""Finds the user's turn in any chat template: what comes before the user's words, and what ends them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dflash_toolkit.config import UserError
from dflash_toolkit.data.prompts import Message, apply_template

SENTINEL = "USERWORDS7"  # no template changes letters and digits


@dataclass(frozen=True, slots=True)
class UserTurn:
    """A place where a target can write the user's words."""

    opening: list[int]  # tokens before the user's words
    stop_ids: tuple[int, ...]  # special tokens of the template; none is the user's word
    end: str  # text that the template writes after the user's words

    def words_in(self, text: str) -> tuple[str, bool]:
        """Returns the user's words at the start of a decoded text, and whether their end is in it."""
        words, end, _ = text.partition(self.end)
        return words.strip(), bool(end)


def user_turn(tokenizer: Any, before: Sequence[Message]) -> UserTurn:
    """Returns the user's turn that follows the messages `before`.

    It renders a sentinel as the user's message and cuts the text there.

    Raises:
        UserError: there is no chat template, it refuses these messages, or it does not mark where the user's turn
            begins and ends.
    """

    def rendered(ask: bool) -> str:
        messages = [*before, {"role": "user", "content": SENTINEL}]
        return str(apply_template(tokenizer, messages, {}, (), tokenize=False, add_generation_prompt=ask))

    opening, *rest = rendered(ask=False).split(SENTINEL)
    whole = rendered(ask=True)
    if len(rest) == 1 and not rest[0].strip():  # the answer's beginning ends the user's turn
        opening, *rest = whole.split(SENTINEL)
    if len(rest) != 1 or not opening.removeprefix(tokenizer.bos_token or "").strip() or not rest[0].strip():
        raise UserError(
            "the target cannot write prompts itself: its chat template does not mark the beginning and the end of the "
            "user's turn; give prompts with --data"
        )
    marks = {id for id, its in tokenizer.added_tokens_decoder.items() if its.special}
    stops = marks.intersection(_tokens(tokenizer, whole))
    # a space at the end belongs to the first word
    return UserTurn(_tokens(tokenizer, opening.rstrip(" ")), tuple(sorted(stops)), rest[0].strip().splitlines()[0])


def _tokens(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
