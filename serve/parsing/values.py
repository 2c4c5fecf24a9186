"""Reads JSON as models write it, and emits valid JSON."""

import json
import math
import re
from collections.abc import Generator

from .reading import Buffer, Emit, MalformedError, Reading, any_of, begun

QUOTES = ('"', "'")
PLAIN = re.compile(r"""[^"'\\\x00-\x1f]+""")  # characters of a string that need no escape
SPACE, COLONS = re.compile(r"\s*"), re.compile(":*")
HEX = re.compile(r"[0-9a-fA-F]{4}")
INTEGER = re.compile(r"-?(0|[1-9][0-9]*)")
NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
CONTROL = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
WORDS = {
    "true": "true",
    "false": "false",
    "null": "null",
    "True": "true",  # some models write Python's constants
    "False": "false",
    "None": "null",
    "NaN": "null",  # JSON has no such number
    "Infinity": "null",
    "-Infinity": "null",
}


class Text(Buffer):
    """Reads JSON too.

    Attributes:
        cut: the end of the text is not the model's own; a value that it cuts stays incomplete.
        ends: markers that end a call; a value ends before them, except within a string.
    """

    def __init__(self, text: str = "") -> None:
        super().__init__(text)
        self.cut = False
        self.ends: tuple[str, ...] = ()

    def value(self, emit: Emit, inside: str = "") -> Reading[None]:
        """Emits one JSON value as it arrives: valid JSON, whatever the text is.

        Valid JSON is emitted unchanged. Corrects errors of models: Python's constants and quotes, words without quotes,
        missing and extra commas, colons and brackets; in strings raw control characters, quotes and unknown escapes.

        Args:
            inside: closing bracket of an object or list of which the start, with an element, has been read.

        Raises:
            MalformedError: the text is cut within the value, or there is no value.
        """
        open_ = [inside] if inside else []  # expected closing brackets
        filled = bool(inside)  # the innermost object or list has an element
        before = ""  # white space, comma and key: emitted when the value after them begins
        keyed = False  # `before` ends with a key
        while True:
            before += yield from self._space()
            first = yield from self._next()
            if not first:
                if not open_ or (self.at_end and self.cut):
                    raise MalformedError
                emit("".join(reversed(open_)))
                return
            if open_ and first in ",}]" and keyed:
                emit(f"{before}null")
                before, keyed, filled = "", False, True
            if open_ and not keyed:
                if first == ",":
                    self._at += 1
                    before += "" if "," in before else ","
                    continue
                if first in "}]":
                    self._at += 1
                    if first in open_:
                        emit(before.replace(",", ""))
                        before, filled = "", True
                        closed = len(open_) - open_[::-1].index(first) - 1
                        emit("".join(reversed(open_[closed:])))
                        del open_[closed:]
                    if not open_:
                        return
                    continue
                if open_[-1] == "}" and first in "{[:":
                    self._at += 1
                    continue
                before = before.replace(",", "") if not filled else before if "," in before else f",{before}"
                if open_[-1] == "}":
                    before += yield from self._key()
                    keyed = True
                    continue
            if not open_ and first in ",}]:":
                raise MalformedError
            emit(before)
            before, keyed, filled = "", False, True
            if first in "{[":
                self._at += 1
                emit(first)
                open_.append("}" if first == "{" else "]")
                filled = False
            elif first in QUOTES:
                yield from self._string(emit)
            else:
                before = yield from self._word(emit)
            if not open_:
                return

    def string(self) -> Reading[str]:
        """Reads a string and returns it as JSON. Raises MalformedError."""
        if (yield from self.peek()) not in QUOTES:
            raise MalformedError
        pieces: list[str] = []
        yield from self._string(pieces.append)
        return "".join(pieces)

    def _space(self) -> Reading[str]:
        space = yield from self.space()
        return space if not space.strip(" \t\r\n") else " "  # JSON allows only these four

    def _next(self) -> Reading[str]:
        """Returns the next character without reading it; "" at the end and before one of `ends`."""
        first = yield from self.peek()
        while (end := self._end(self._at)) is not None:
            if end:
                return ""
            if self.ended:  # within the marker
                self._at = len(self._buffer)
                return ""
            yield
        return first

    def _end(self, at: int) -> str | None:
        """Returns the one of `ends` at a place; "" if only its start has arrived; None if there is none."""
        here = self._buffer[at : at + max(map(len, self.ends), default=0)]
        if found := next((marker for marker in self.ends if here.startswith(marker)), ""):
            return found
        return "" if here and any(marker.startswith(here) for marker in self.ends) else None

    def _key(self) -> Reading[str]:
        """Reads a key and the colon after it."""
        if (yield from self.peek()) in QUOTES:
            key = yield from self.string()
        else:
            key = json.dumps((yield from self._bare(":,{}[]\n")).strip(), ensure_ascii=False)
        before = yield from self._space()
        yield from self.run(COLONS)
        return f"{key}{before}:"

    def _word(self, emit: Emit) -> Reading[str]:
        """Emits a value that has no quotes or brackets; returns the white space after it."""
        read = yield from self._bare(",}]\n")
        if self.at_end and self.cut:
            raise MalformedError
        word = read.strip()
        if NUMBER.fullmatch(word):
            emit(word)
        else:
            emit(WORDS.get(word) or number(word) or json.dumps(word, ensure_ascii=False))
        return read[len(read.rstrip()) :]

    def _bare(self, stops: str) -> Reading[str]:
        """Reads text up to one of the characters, a double quote or one of `ends`."""
        pieces: list[str] = []
        end = yield from self.through((*self.ends, '"', *stops), pieces.append)
        self.unread(len(end))
        read = "".join(pieces)
        return read if end else read[: len(read) - begun(read, self.ends)]

    def _string(self, to: Emit) -> Reading[None]:
        quote = self._buffer[self._at]
        self._at += 1
        to('"')
        inside = _StringText(to, self.ends)
        emit = inside.add
        while character := (yield from self.peek()):
            if character == quote and (yield from self._closes()):
                self._at += 1
                to(f'{inside.held}"')
                return
            if character == "\\":
                yield from self._escape(emit)
            elif found := PLAIN.match(self._buffer, self._at):
                emit(found[0])
                self._at = found.end()
            else:
                escaped = CONTROL.get(character, f"\\u{ord(character):04x}") if character < " " else character
                emit('\\"' if character == '"' else escaped)
                self._at += 1
        if self.cut:
            raise MalformedError
        to('"')

    def _closes(self) -> Generator[None, None, bool]:
        """Returns whether the quote here ends its string, because JSON follows."""
        while True:
            after = SPACE.match(self._buffer, self._at + 1)
            assert after is not None
            following = self._buffer[after.end() : after.end() + 1]
            end = self._end(after.end())
            if self.ended or end or (following and end is None):
                break
            yield
        return not following or following in ",}]:" or end is not None or bool(after[0] and following in QUOTES)

    def _escape(self, emit: Emit) -> Reading[None]:
        escape = yield from self.ahead(2)
        if escape == "\\u":
            escape = yield from self.ahead(6)
        if len(escape) < (6 if escape.startswith("\\u") else 2):
            self._at += len(escape)  # cut by the end
        elif escape[1] in '"\\/bfnrt' or (len(escape) == 6 and HEX.fullmatch(escape, 2)):
            emit(escape)
            self._at += len(escape)
        else:
            emit("\\\\" if escape[1] != "'" else "")
            self._at += 1


class _StringText:
    """Emits the JSON of a string's text, but holds back a possible end of the call.

    Args:
        ends: markers that end a call.
    """

    def __init__(self, emit: Emit, ends: tuple[str, ...]) -> None:
        self._emit, self._ends = emit, ends
        self._closing, self._marker = "", ""  # brackets and white space; start of a marker after them
        self._rest: list[str] = []  # a marker, and all text after it

    @property
    def held(self) -> str:
        return self._closing + self._marker + "".join(self._rest)

    def add(self, piece: str) -> None:
        """Adds text without control characters; a line break and an escape are pieces of their own."""
        if self._rest:
            self._rest.append(piece)
            return
        text = self._marker + piece
        found = any_of(self._ends).search(text) if self._ends else None
        end = found.start() if found else len(text) - begun(text, self._ends)
        final = "" if text == "\\n" else text[:end].rstrip("]} ")
        if final:
            self._emit(self._closing + final)
            self._closing = ""
        self._closing += text[len(final) : end]
        self._marker = text[end:]
        if found:
            self._rest, self._marker = [self._marker], ""


def repaired(text: str) -> str | None:
    """Returns the JSON of a text that is nearly JSON, or a Python literal; None if it is not one whole value."""
    read, pieces = Text(text.strip()), list[str]()
    read.ended = read.cut = True
    try:
        next(read.value(pieces.append), None)
    except MalformedError:
        return None
    return "".join(pieces) if read.at_end else None


def number(text: str) -> str | None:
    """Returns the JSON of a number, or None; 3.0 becomes an integer."""
    if INTEGER.fullmatch(text):
        return text
    try:
        read = float(text) if re.fullmatch(r"[-+0-9.eE]+", text) else math.nan
    except ValueError:
        return None
    if not math.isfinite(read):
        return None
    return str(int(read)) if read == int(read) and abs(read) < 2**53 else repr(read)
