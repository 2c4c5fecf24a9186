"""Rows of data as conversations to be answered: what precedes each answer, turn by turn."""

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dflash_toolkit.prompts import Message, Tool, read_chat


@dataclass(frozen=True, slots=True)
class Conversation:
    """What is asked, turn by turn: the messages before each answer. The recorded answers are left out.

    A recorded tool call is no answer that can be gone on from in other words, for nobody runs the tools: the turn after
    it begins with the call, and then has its results.
    """

    id: str
    turns: tuple[tuple[Message, ...], ...]
    tools: tuple[Tool, ...] = ()

    @property
    def asked(self) -> str:
        """What is asked, all turns."""
        return self._said("user")

    @property
    def instructions(self) -> str:
        """The system messages and the tools."""
        return self._said("system") + (json.dumps(self.tools, sort_keys=True) if self.tools else "")

    def _said(self, role: str) -> str:
        return "\n".join(message["content"] for turn in self.turns for message in turn if message["role"] == role)


def conversation(row: Any, default_id: str) -> Conversation:
    """A row of any shape that `read_chat` knows, all its turns; every one of `turns`; or a bare string.

    Raises:
        ValueError: says in a few words what is wrong with the row.
    """
    if isinstance(row, str):
        row = {"prompt": row}
    if not isinstance(row, dict):
        raise ValueError(f"expected an object, got {type(row).__name__}")
    name = next((row[key] for key in ("id", "task_id") if isinstance(row.get(key), str | int)), default_id)
    try:
        messages, tools = read_chat(row)
        turns = _turns(messages)
        if not any(isinstance(row.get(key), list) for key in ("messages", "conversations", "prompt")):
            later = row["turns"][1:] if isinstance(row.get("turns"), list) else []
            turns += tuple(({"role": "user", "content": turn.strip()},) for turn in later)
        if not all(isinstance(message["content"], str) for turn in turns for message in turn):
            raise TypeError("the prompt must be text")
    except (TypeError, LookupError, AttributeError, RecursionError) as error:
        raise ValueError(f"malformed row ({error!r})") from error
    if not turns or not all(_asks(turn, first=i == 0) for i, turn in enumerate(turns)):
        raise ValueError("a turn asks nothing")
    return Conversation(str(name), turns, tools)


def _turns(messages: list[Message]) -> tuple[tuple[Message, ...], ...]:
    turns: list[list[Message]] = [[]]
    for message in messages:
        if message["role"] != "assistant":
            turns[-1].append(message)
        else:
            turns.append([message] if "tool_calls" in message else [])
    ended = all(message["role"] == "assistant" for message in turns[-1])  # with an answer, or a call without a result
    return tuple(tuple(turn) for turn in (turns[:-1] if ended else turns))


def _asks(turn: tuple[Message, ...], first: bool) -> bool:
    if not first and any(message["role"] == "tool" for message in turn):
        return True
    return any(message["role"] == "user" and message["content"].strip() for message in turn)


def with_call_ids(messages: Sequence[Message]) -> list[Message]:
    """Messages whose calls all have an id, and whose results name a call's, as servers get them from any client.

    A call without an id takes the one that a result of its names and no other call has, else one that is made up: of
    nine letters and digits, which the templates of Mistral ask for. Results without one name the other calls in turn.
    """
    found = []
    given = {call.get("id") for message in messages for call in message.get("tool_calls", ())}
    given |= {message.get("tool_call_id") for message in messages}
    fresh = (name for i in itertools.count() if (name := f"call{i:05d}") not in given)
    waiting: list[str] = []  # calls that no result names
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
