"""Reads text that is still arriving. A reader is a generator that yields when it needs more text.

The result never depends on how the text is cut into pieces, because a reader waits whenever the next character may
matter.
"""

import functools
import re
from collections.abc import Callable, Generator
from typing import TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]  # yields while it waits for more text, and returns a T
Emit = Callable[[str], object]

SPACE = re.compile(r"\s*")
NAME = re.compile(r"[\w.:/-]*")
PLAIN = re.compile(r'[^"\\\x00-\x1f]+')  # characters of a JSON string that need no escape
SCALAR = re.compile(r"[-+.\w]*")
NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
WORDS = {
    "true": "true",
    "false": "false",
    "null": "null",
    "True": "true",  # some models write Python's constants
    "False": "false",
    "None": "null",
}
HEX = re.compile(r"[0-9a-fA-F]{4}")


class MalformedError(Exception):
    """Raised when the text does not match the reader, from the next character on."""


class Text:
    """Buffers text that has arrived but is not read yet."""

    def __init__(self) -> None:
        self._buffer, self._at = "", 0
        self._mark: int | None = None
        self.ended = False

    def add(self, text: str) -> None:
        """Adds text that has arrived."""
        start = self._at if self._mark is None else self._mark
        self._buffer = self._buffer[start:] + text
        self._at -= start
        self._mark = None if self._mark is None else 0

    def mark(self, back: int = 0) -> None:
        """Keeps the text from here on, or from `back` characters before, unless there is an earlier mark."""
        if self._mark is None:
            self._mark = self._at - back

    def unmark(self) -> str:
        """Returns the text read since the mark, and removes the mark; "" without a mark."""
        read = "" if self._mark is None else self._buffer[self._mark : self._at]
        self._mark = None
        return read

    def unread(self, count: int) -> None:
        """Goes back over the last characters, which must have been read since the last wait."""
        self._at -= count

    # ---- any text --------------------------------------------------------------------------------------------

    def peek(self) -> Reading[str]:
        """Returns the next character without reading it; "" at the end."""
        while self._at == len(self._buffer) and not self.ended:
            yield
        return self._buffer[self._at : self._at + 1]

    def run(self, pattern: re.Pattern[str]) -> Reading[str]:
        """Reads as many characters as match; the pattern must be a repeated class of characters."""
        pieces = []
        while True:
            found = pattern.match(self._buffer, self._at)
            assert found is not None
            pieces.append(found[0])
            self._at = found.end()
            if self._at < len(self._buffer) or self.ended:
                return "".join(pieces)
            yield

    def space(self) -> Reading[str]:
        """Reads white space."""
        return self.run(SPACE)

    def ahead(self, count: int) -> Reading[str]:
        """Returns the next `count` characters, fewer at the end, without reading them."""
        while len(self._buffer) - self._at < count and not self.ended:
            yield
        return self._buffer[self._at : self._at + count]

    def one_of(self, *markers: str) -> Reading[str]:
        """Reads one of the markers, and returns it; "" if none is next.

        Raises:
            MalformedError: the text ends within a marker; its start has been read.
        """
        while True:
            here = self._buffer[self._at : self._at + max(map(len, markers))]
            for marker in markers:
                if here.startswith(marker):
                    self._at += len(marker)
                    return marker
            if not any(marker.startswith(here) for marker in markers):
                return ""
            if self.ended:
                self._at += len(here)
                if here:
                    raise MalformedError
                return ""
            yield

    def through(self, markers: tuple[str, ...], emit: Emit) -> Reading[str]:
        """Reads through the first marker, emits the text before it, and returns the marker; "" at the end."""
        pattern = any_of(markers)
        while True:
            found = pattern.search(self._buffer, self._at) if markers else None
            if found:
                if found.start() > self._at:
                    emit(self._buffer[self._at : found.start()])
                self._at = found.end()
                return found[0]
            end = len(self._buffer) - (0 if self.ended else self._begun(markers))
            if end > self._at:
                emit(self._buffer[self._at : end])
                self._at = end
            if self.ended:
                return ""
            yield

    def _begun(self, markers: tuple[str, ...]) -> int:
        """Returns how many of the last characters may be the start of a marker."""
        longest = min(max(map(len, markers), default=1) - 1, len(self._buffer) - self._at)
        tail = self._buffer[len(self._buffer) - longest :]
        ends = (tail[i:] for i in range(longest))
        return next((len(end) for end in ends if any(marker.startswith(end) for marker in markers)), 0)

    # ---- JSON ------------------------------------------------------------------------------------------------

    def value(self, emit: Emit) -> Reading[None]:
        """Emits one JSON value as it arrives.

        Corrects frequent errors of models: raw control characters and unknown escapes in strings, Python's constants.

        Raises:
            MalformedError: the text is not JSON, or ends early. The text that was read has been emitted.
        """
        open_: list[str] = []  # expected closing brackets
        while True:
            yield from self._space(emit)
            first = yield from self.peek()
            if first in ("{", "["):
                self._take(emit)
                open_.append("}" if first == "{" else "]")
                yield from self._space(emit)
                if (yield from self.peek()) != open_[-1]:
                    if first == "{":
                        yield from self._key(emit)
                    continue
            elif first == '"':
                yield from self._string(emit)
            else:
                yield from self._scalar(emit)
            while open_:  # the value is complete, and so are the values that end here
                yield from self._space(emit)
                following = yield from self.peek()
                if following == open_[-1]:
                    self._take(emit)
                    open_.pop()
                elif following == ",":
                    self._take(emit)
                    if open_[-1] == "}":
                        yield from self._space(emit)
                        yield from self._key(emit)
                    break
                else:
                    raise MalformedError
            if not open_:
                return

    def string(self) -> Reading[str]:
        """Reads a JSON string and returns it with its quotes, as JSON. Raises MalformedError."""
        pieces: list[str] = []
        yield from self._string(pieces.append)
        return "".join(pieces)

    def _take(self, emit: Emit) -> None:
        emit(self._buffer[self._at])
        self._at += 1

    def _space(self, emit: Emit) -> Reading[None]:
        if space := (yield from self.space()):
            emit(space if not space.strip(" \t\r\n") else " ")  # JSON allows only these four

    def _key(self, emit: Emit) -> Reading[None]:
        yield from self._string(emit)
        yield from self._space(emit)
        if (yield from self.peek()) != ":":
            raise MalformedError
        self._take(emit)

    def _scalar(self, emit: Emit) -> Reading[None]:
        while True:
            found = SCALAR.match(self._buffer, self._at)
            assert found is not None
            if found.end() < len(self._buffer) or self.ended:
                break
            yield
        text = found[0]
        word = text if NUMBER.fullmatch(text) else WORDS.get(text)
        if self.ended and found.end() == len(self._buffer):
            word = None  # it may have been cut
            emit(text)
            self._at = found.end()
        if word is None:
            raise MalformedError
        emit(word)
        self._at = found.end()

    def _string(self, emit: Emit) -> Reading[None]:
        if (yield from self.peek()) != '"':
            raise MalformedError
        self._take(emit)
        while character := (yield from self.peek()):
            if character == '"':
                self._take(emit)
                return
            if character == "\\":
                yield from self._escape(emit)
            elif character < " ":
                emit(f"\\u{ord(character):04x}" if character not in CONTROL else CONTROL[character])
                self._at += 1
            else:
                found = PLAIN.match(self._buffer, self._at)
                assert found is not None
                emit(found[0])
                self._at = found.end()
        raise MalformedError

    def _escape(self, emit: Emit) -> Reading[None]:
        escape = yield from self.ahead(2)
        if escape == "\\u":
            escape = yield from self.ahead(6)
        if len(escape) < (6 if escape.startswith("\\u") else 2):
            emit(escape)  # cut by the end
            self._at += len(escape)
            raise MalformedError
        if escape[1] in '"\\/bfnrt' or (len(escape) == 6 and HEX.fullmatch(escape, 2)):
            emit(escape)
            self._at += len(escape)
        else:
            emit("\\\\" if escape[1] != "'" else "")
            self._at += 1


CONTROL = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


@functools.cache
def any_of(markers: tuple[str, ...]) -> re.Pattern[str]:
    """Returns a pattern that matches any of the markers."""
    return re.compile("|".join(map(re.escape, markers)))
