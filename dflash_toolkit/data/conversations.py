"""Conversations: the messages before each answer, turn by turn, of a row in any usual form."""

import itertools
import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from .messages import Message, Tool
from .rows import BY_NAME as BY_NAME
from .rows import EMPTY, read_row
from .rows import FORM_CHOICES as FORM_CHOICES
from .rows import FORMS as FORMS
from .rows import likely_form as likely_form

MALFORMED = (TypeError, LookupError, AttributeError, RecursionError, ValueError)  # errors that `read_chat` may raise


def read_chat(row: dict[str, Any], form: str | None = None) -> tuple[list[Message], tuple[Tool, ...]]:
    """Returns the messages, including recorded answers, and the tools of a row. Arguments and errors as `read_row`."""
    chat = read_row(row, form)
    return chat.messages, chat.tools


def split_messages(messages: list[Message]) -> tuple[list[Message], list[Message]]:
    """Splits messages before the first assistant turn."""
    first = next((i for i, message in enumerate(messages) if message["role"] == "assistant"), len(messages))
    return messages[:first], messages[first:]


# ---- conversations --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation without its recorded answers: the messages before each answer, turn by turn.

    A recorded tool call cannot be replaced by another answer, as the tools are not run: the turn after it begins with
    the call and its results.
    """

    id: str
    turns: tuple[tuple[Message, ...], ...]
    tools: tuple[Tool, ...] = ()
    recorded: tuple[Message, ...] = field(default=(), compare=False)  # all messages, including the row's answers
    category: str | None = field(default=None, compare=False)  # the row's

    def to_json(self, *, recorded: bool) -> dict[str, Any]:
        """Returns the fields, not copied; `recorded`: with the row's answers."""
        fields = {"id": self.id, "turns": self.turns, "tools": self.tools}
        return fields | {"recorded": self.recorded} if recorded else fields

    @classmethod
    def of_json(cls, values: dict[str, Any]) -> "Conversation":
        turns = tuple(map(tuple, values["turns"]))
        return cls(values["id"], turns, tuple(values.get("tools", ())), tuple(values.get("recorded", ())))

    @property
    def asked(self) -> str:
        """The text of all user messages."""
        return self._text_of("user")

    @property
    def instructions(self) -> str:
        """The system messages and the tools."""
        return self._text_of("system") + (json.dumps(self.tools, sort_keys=True) if self.tools else "")

    def _text_of(self, role: str) -> str:
        return "\n".join(message["content"] for turn in self.turns for message in turn if message["role"] == role)


def conversation(row: Any, default_id: str, form: str | None = None, unread: set[str] | None = None) -> Conversation:
    """Returns the conversation of a row that `read_row` can read, with all turns; or of a bare string.

    Args:
        unread: receives the columns and the keys of messages that were not read.

    Raises:
        ValueError: a short description of the fault.
    """
    if isinstance(row, str):
        row = {"prompt": row}
    if not isinstance(row, dict):
        raise ValueError(f"expected an object, got {type(row).__name__}")
    try:
        chat = read_row(row, form)
    except (TypeError, LookupError, AttributeError, RecursionError) as error:
        raise ValueError(f"malformed row ({error!r})") from error
    turns = (*_turns(chat.messages), *((question,) for question in chat.later))
    if fault := _fault(chat.messages, turns):
        raise ValueError(fault)
    if unread is not None:
        unread |= chat.unread
    return Conversation(chat.name or default_id, turns, chat.tools, tuple(chat.messages), chat.category)


def _turns(messages: list[Message]) -> tuple[tuple[Message, ...], ...]:
    """Returns the messages before each answer; a turn after a recorded call begins with the call."""
    turns: list[list[Message]] = [[]]
    before: Message | None = None
    for message in messages:
        if message["role"] == "assistant":
            turns.append([message] if "tool_calls" in message else [])
        else:
            if message["role"] == "tool" and before and before["role"] == "assistant" and not turns[-1]:
                turns[-1].append(before)  # an answer before a result is a call, whatever its text is
            turns[-1].append(message)
        before = message
    ended = all(message["role"] == "assistant" for message in turns[-1])  # with an answer, or a call without a result
    return tuple(tuple(turn) for turn in (turns[:-1] if ended else turns))


def _fault(messages: list[Message], turns: tuple[tuple[Message, ...], ...]) -> str:
    """Returns why messages are no conversation; empty if they are one."""
    if not messages:
        return EMPTY
    if next((message["role"] for message in messages if message["role"] != "system"), "") == "assistant":
        return "a conversation that begins with the assistant"
    for number, turn in enumerate(turns):
        if number and any(message["role"] == "tool" for message in turn):
            continue
        if not any(message["role"] == "user" for message in turn):
            return "two turns of the assistant in a row" if number else "a conversation without a question"
        if not any(message["content"].strip() for message in turn if message["role"] == "user"):
            return "an empty question"
    return "" if turns else "a conversation without a question"


def with_call_ids(messages: Sequence[Message]) -> list[Message]:
    """Returns messages in which every call has an id and every result names one, as servers get them from any client.

    A call without an id gets one that is named by a result and no other call, else a new one of nine letters and
    digits, the form that Mistral's templates need. Results without an id get those of the other calls in turn.
    """
    found = []
    given = {call.get("id") for message in messages for call in message.get("tool_calls", ())}
    given |= {message.get("tool_call_id") for message in messages}
    fresh = _new_ids(given)
    waiting: list[str] = []  # calls without a result so far
    for i, message in enumerate(messages):
        if "tool_calls" in message:
            results = itertools.takewhile(lambda later: later["role"] == "tool", messages[i + 1 :])
            named = [result["tool_call_id"] for result in results if result.get("tool_call_id")]
            ids = [call.get("id") for call in message["tool_calls"]]
            free = [name for name in named if name not in ids]
            ids = [name or (free.pop(0) if free else next(fresh)) for name in ids]
            waiting = [name for name in ids if name not in named]
            calls = [call | {"id": name} for call, name in zip(message["tool_calls"], ids, strict=True)]
            message = message | {"tool_calls": calls}
        elif message["role"] == "tool" and not message.get("tool_call_id"):
            message = message | {"tool_call_id": waiting.pop(0) if waiting else next(fresh)}
        found.append(message)
    return found


def with_short_ids(messages: Sequence[Message]) -> list[Message]:
    """Gives calls ids of nine letters and digits; Mistral's templates refuse others."""
    named = [[call.get("id") for call in message.get("tool_calls", ())] for message in messages]
    named += [[message.get("tool_call_id")] for message in messages]
    ids = dict.fromkeys(name for names in named for name in names if name)
    fresh = _new_ids(ids)
    short = {name: name if len(name) == 9 and name.isalnum() else next(fresh) for name in ids}
    found = []
    for message in messages:
        if "tool_calls" in message:
            calls = [call | {"id": short[call["id"]]} if call.get("id") else call for call in message["tool_calls"]]
            message = message | {"tool_calls": calls}
        if message.get("tool_call_id"):
            message = message | {"tool_call_id": short[message["tool_call_id"]]}
        found.append(message)
    return found


def _new_ids(taken: Collection[str]) -> Iterator[str]:
    return (name for i in itertools.count() if (name := f"call{i:05d}") not in taken)
