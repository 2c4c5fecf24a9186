"""Reads gpt-oss's harmony format, in which an answer is a sequence of messages in channels."""

import re
from typing import Protocol

from .calls import Calls, named
from .reading import Emit, MalformedError, Reading
from .values import Text

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
ENDS = (END, CALL, RETURN)
BODY_ENDS = (*ENDS, START, CHANNEL)
SPECIAL = (START, CHANNEL, MESSAGE, CONSTRAIN, *ENDS)
FUNCTIONS = "functions."
ANALYSIS, FINAL = f"{CHANNEL}analysis{MESSAGE}", f"{CHANNEL}final{MESSAGE}"  # texts that begin a message
CALL_TO, ARGUMENTS = f"{CHANNEL}commentary to={FUNCTIONS}", f" {CONSTRAIN}json{MESSAGE}"
RECIPIENT, CHANNEL_NAME = re.compile(r"to=([^\s<]+)"), re.compile(rf"{re.escape(CHANNEL)}\s*(\w+)")


class Answer(Calls, Protocol):
    """Receives the text of the messages."""

    thinking: bool

    def emit(self, text: str) -> None:
        """Adds to the reasoning or, if `thinking` is false, to the content."""


def read(text: Text, answer: Answer, with_tools: bool) -> Reading[None]:
    """Reads the messages of an answer.

    The channel `analysis` and messages to built-in tools are reasoning, messages to functions are calls, all others are
    content. A line break separates two messages of one kind.

    Raises:
        MalformedError: the text is cut within a call.
    """
    text.ends = BODY_ENDS
    seen: set[bool] = set()
    while (yield from text.peek()):
        header = yield from _header(text)
        if header is None:
            continue
        to, channel = RECIPIENT.search(header), CHANNEL_NAME.search(header)
        recipient = to[1] if to else ""
        function = recipient.removeprefix(FUNCTIONS) if recipient.startswith(FUNCTIONS) else ""
        if function and with_tools:
            yield from text.space()
            if (yield from text.peek()) == "{":
                answer.begin(named(function))
                yield from text.value(answer.arguments)
                yield from _body(text, lambda piece: None)
                continue
        answer.thinking = bool((channel and channel[1] == "analysis") or (recipient and not function))
        if answer.thinking in seen and (yield from text.peek()):
            answer.emit("\n")
        seen.add(answer.thinking)
        yield from _body(text, answer.emit)
        answer.thinking = False


def _header(text: Text) -> Reading[str | None]:
    """Reads what is before the text of a message; None: no text follows. Text without a header has the header ""."""
    try:
        opened = yield from text.one_of(*SPECIAL, " to=")
    except MalformedError:
        return None
    if opened in (START, CHANNEL, " to="):
        pieces = [opened]
        found = yield from text.through((MESSAGE, *ENDS), pieces.append)
        return "".join(pieces) if found == MESSAGE else None
    return None if opened in (*ENDS, CONSTRAIN) else ""


def _body(text: Text, emit: Emit) -> Reading[None]:
    """Emits the text of a message, and reads the marker that ends it."""
    found = yield from text.through(BODY_ENDS, emit, whole=True)
    if found not in ENDS:
        text.unread(len(found))
