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


class MalformedError(Exception):
    """Raised when the text does not match the reader, from the next character on."""


class Buffer:
    """Buffers text that has arrived but is not read yet.

    Attributes:
        ended: no more text arrives.
    """

    def __init__(self, text: str = "") -> None:
        self._buffer, self._at = text, 0
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

    def restore(self, text: str) -> None:
        """Puts back text that has been read."""
        self._buffer, self._at, self._mark = text + self._buffer[self._at :], 0, None

    @property
    def at_end(self) -> bool:
        """Returns whether all of the text has been read."""
        return self.ended and self._at == len(self._buffer)

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

    def through(self, markers: tuple[str, ...], emit: Emit, whole: bool = False) -> Reading[str]:
        """Reads through the first marker, emits the text before it, and returns the marker; "" at the end.

        Args:
            whole: drop an incomplete marker at the end of the text.
        """
        pattern = any_of(markers)
        while True:
            found = pattern.search(self._buffer, self._at) if markers else None
            if found:
                if found.start() > self._at:
                    emit(self._buffer[self._at : found.start()])
                self._at = found.end()
                return found[0]
            end = len(self._buffer)
            if whole or not self.ended:
                end -= begun(self._buffer[self._at :], markers)
            if end > self._at:
                emit(self._buffer[self._at : end])
                self._at = end
            if self.ended:
                self._at = len(self._buffer)
                return ""
            yield


def begun(text: str, markers: tuple[str, ...]) -> int:
    """Returns how many of the last characters may be the start of a marker."""
    longest = min(max(map(len, markers), default=1) - 1, len(text))
    ends = (text[len(text) - count :] for count in range(longest, 0, -1))
    return next((len(end) for end in ends if any(marker.startswith(end) for marker in markers)), 0)


@functools.cache
def any_of(markers: tuple[str, ...]) -> re.Pattern[str]:
    """Returns a pattern that matches any of the markers."""
    return re.compile("|".join(map(re.escape, markers)))
