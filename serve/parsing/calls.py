"""The description of a form of tool calls, and helpers for reading it."""

import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from .reading import MalformedError, Reading, begun
from .values import Text

NAME = re.compile(r"[\w.:/-]*")
PARAGRAPH = "\n\n"
Tools = Mapping[str, Mapping[str, Any]]  # name of a tool -> schema of its parameters


class Calls(Protocol):
    """Receives the calls that a form reads."""

    def begin(self, name: str, id: str | None = None) -> None:
        """Begins a call; the text that was read for it is no longer content."""

    def arguments(self, text: str) -> None:
        """Adds to the JSON of the call's arguments."""

    @property
    def begun(self) -> int:
        """Number of calls begun."""


@dataclass(frozen=True, slots=True)
class Form:
    """A form of tool calls.

    Attributes:
        starts: texts that begin a call.
        read: reads the call or calls after the given start. Raises MalformedError. None: see `harmony`.
        special: all markers, which may be special tokens.
        ends: markers that end the JSON of a call, except within a string.
        opening: start of a call -> characters that may follow it, after white space; any, if it is not listed.
        new_id: makes ids that the models' templates accept.
        line_start: those of `starts` that count only at the start of a line.
    """

    starts: tuple[str, ...]
    read: Callable[[str, Text, Calls, Tools], Reading[None]] | None
    special: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    opening: Mapping[str, str] = field(default_factory=dict)
    new_id: Callable[[], str] = lambda: f"call_{secrets.token_hex(12)}"
    line_start: tuple[str, ...] = ()


def named(name: str) -> str:
    """Returns the name of a function. Raises MalformedError if it cannot be one."""
    if not name or not name.isprintable():
        raise MalformedError
    return name


def skip(text: Text, markers: tuple[str, ...], *stops: str) -> Reading[str]:
    """Reads through the first of the markers and returns it; drops the text before it, which is within a call.

    Returns "" if a stop, the end of a paragraph or the end of the text comes first, and reads nothing.
    """
    held: list[str] = []
    found = yield from text.through((*markers, *stops, PARAGRAPH), held.append)
    if found in markers:
        return found
    rest = "".join(held)
    text.restore(rest[: len(rest) - begun(rest, markers)] if text.at_end else rest + found)
    return ""
