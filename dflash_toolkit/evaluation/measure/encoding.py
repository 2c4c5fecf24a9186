"""Prompts as token ids, without those that cannot be measured."""

import functools
from collections.abc import Callable, Mapping, Sequence

from ...config import UserError
from ...data.prompts import Message, Prompt, encode_chat
from ...data.skipped import Skipped
from ...generation import PromptError, check_prompt
from .measurement import EncodedPrompt, Rest, last_question
from .pairs import Pair

Mode = bool | None  # thinking on, off, or the template's own


def encode_sets(
    pair: Pair, sets: Mapping[str, Sequence[Prompt]], modes: Sequence[Mode], multi_turn: bool, skipped: Skipped
) -> dict[Mode, dict[str, list[EncodedPrompt]]]:
    """Returns the encoded prompts by thinking mode and set. Every mode has the same prompts.

    Args:
        skipped: counts prompts that the template refuses, that leave no room for an answer, or that hold a token which
            the target's embedding lacks.

    Raises:
        UserError: a set has no prompt that can be used, or as `Skipped.add`.
    """
    found: dict[Mode, dict[str, list[EncodedPrompt]]] = {mode: {name: [] for name in sets} for mode in modes}
    for name, rows in sets.items():
        reason = ""
        for row in rows:
            try:
                encoded = [_encode(pair, row, mode, multi_turn) for mode in modes]
            except _Unusable as error:
                reason = str(error)
                skipped.add(reason, f"set {name!r}, prompt {row.id!r}")
                continue
            for mode, each in zip(modes, encoded, strict=True):
                found[mode][name].append(each)
        if not any(of[name] for of in found.values()):
            raise UserError(f"set {name!r}: none of its {len(rows)} prompts can be used; the last is {reason}")
    return found


class _Unusable(UserError):
    """A prompt that cannot be measured; the message completes "it is ...", with details in parentheses."""


def _encode(pair: Pair, row: Prompt, thinking: Mode, multi_turn: bool) -> EncodedPrompt:
    encode = functools.partial(_ids, pair, row, thinking)
    rest = Rest(row.messages, row.later, encode) if multi_turn and row.later else None
    ids = encode(row.messages)
    try:
        check_prompt(ids, pair.context_limit, pair.vocabulary)
    except PromptError as error:
        kind = "longer than the context" if len(ids) >= pair.context_limit else "not a prompt of this target"
        raise _Unusable(f"{kind} ({error})") from error
    after = functools.partial(_after, encode, row.messages) if any(map(_is_user, row.messages)) else None
    asked, recorded = last_question(row.messages), row.answer or ""
    return EncodedPrompt(row.id, ids, row.category, rest=rest, asked=asked, recorded=recorded, encode_after=after)


def _is_user(message: Message) -> bool:
    return bool(message["role"] == "user")


def _after(encode: Callable[[Sequence[Message]], list[int]], messages: Sequence[Message], text: str) -> list[int]:
    """Encodes the messages with `text` before the first message of the user."""
    first = next(i for i, message in enumerate(messages) if _is_user(message))
    longer = {**messages[first], "content": text + messages[first]["content"]}
    return encode([*messages[:first], longer, *messages[first + 1 :]])


def _ids(pair: Pair, row: Prompt, thinking: Mode, messages: Sequence[Message]) -> list[int]:
    try:
        return encode_chat(pair.tokenizer, messages, thinking, row.tools)
    except UserError as error:
        raise _Unusable(f"refused by the chat template ({error})") from error
