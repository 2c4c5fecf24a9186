"""Converts tokens to text as they arrive, in whole characters, and finds stop strings."""

import functools
from collections.abc import Collection, Sequence
from typing import Any

from transformers import PreTrainedTokenizerFast

REPLACEMENT = "\ufffd"  # a decoder writes it for bytes that are not (yet) a character
LONGEST = 4  # bytes, and so tokens, of a character; text before the last four tokens is final


class Vocabulary:
    """Caches what the detokenizers of one tokenizer share.

    Args:
        shown: special tokens with text that is returned.
    """

    def __init__(self, tokenizer: Any, shown: frozenset[str]) -> None:
        self._tokenizer = tokenizer
        self.silent = silent_tokens(tokenizer, shown)
        self._text: dict[int, bool] = {}
        self._skip = not shown  # others are removed before they reach the decoder
        # `tokenizer.decode` calls this backend, but spends half of its time on checking arguments
        plain = getattr(type(tokenizer), "_decode", None) is PreTrainedTokenizerFast._decode
        self._backend = tokenizer.backend_tokenizer if plain else None
        # the text of whole characters does not depend on the tokens before them
        self.independent = self._backend is not None and type(self._backend.decoder).__name__ == "ByteLevel"

    def has_text(self, token: int) -> bool:
        """Returns whether the token adds to an answer's text."""
        if token not in self._text:
            found = token not in self.silent and self._tokenizer.convert_ids_to_tokens(token) is not None
            self._text[token] = found
        return self._text[token]

    def decode(self, tokens: Sequence[int]) -> str:
        if self._backend is not None:
            return str(self._backend.decode(tokens, skip_special_tokens=self._skip))
        text = self._tokenizer.decode(tokens, skip_special_tokens=self._skip, clean_up_tokenization_spaces=False)
        return str(text)


vocabulary = functools.lru_cache(maxsize=16)(Vocabulary)


def silent_tokens(tokenizer: Any, shown: Collection[str] = ()) -> set[int]:
    """Returns the special tokens that an answer's text omits: all but those `shown`."""
    return {i for i, text in special_tokens(tokenizer).items() if text not in shown}


def special_tokens(tokenizer: Any) -> dict[int, str]:
    """Returns the special tokens and their names."""
    added = {i: token.content for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    return {i: tokenizer.convert_ids_to_tokens(i) for i in tokenizer.all_special_ids} | added


class Detokenizer:
    """Decodes incrementally: the joined pieces equal `tokenizer.decode(ids, skip_special_tokens=True)`.

    One exception: a decoder with byte fallback replaces a whole run of bytes if the run is invalid, although its first
    characters have been returned by then.

    Args:
        before: tokens that the text continues.
        shown: special tokens with text that is returned.
    """

    def __init__(self, tokenizer: Any, before: Sequence[int] = (), shown: Collection[str] = ()) -> None:
        self._vocabulary = vocabulary(tokenizer, frozenset(shown))
        self._decode = self._vocabulary.decode
        # the tokens of the last piece and those after it; SentencePiece drops the space at the start of a text, so the
        # decoder must not see a start in the middle
        self._window: list[int] = list(before)
        self._sent = len(before)  # tokens of the window with text that was returned
        # for a run of invalid bytes the window keeps the last tokens and this many first ones, which make it invalid
        self._first = 0

    def add(self, tokens: Sequence[int]) -> str:
        """Returns the text that these tokens complete; an unfinished character waits for the next call."""
        visible = [token for token in tokens if self._vocabulary.has_text(token)]
        if self._vocabulary.independent and not self.waiting:
            text = self._decode(visible)
            if not text.endswith(REPLACEMENT):
                self._window, self._sent, self._first = [], 0, 0
                return text
        text = self._decode([*self._window, *visible])
        if text.endswith(REPLACEMENT):
            return "".join(map(self._add, visible))
        self._window += visible
        return self._complete(text)

    @property
    def waiting(self) -> bool:
        """Returns whether tokens still wait for their text."""
        return self._sent < len(self._window)

    def finish(self) -> str:
        """Returns the rest of the text, as the decoder writes it when nothing follows."""
        return self._piece(self._decode(self._window))

    def _add(self, token: int) -> str:
        before = self._decode(self._window)
        self._window.append(token)
        text = self._decode(self._window)
        if text.endswith(REPLACEMENT) and len(text) >= len(before):  # shorter: the bytes encode U+FFFD itself
            return self._decided(text)
        return self._complete(text)

    def _complete(self, text: str) -> str:
        """Returns the new part of `text`, which ends with a whole character."""
        piece = self._piece(text)
        if piece:  # tokens without text stay in the window, after the piece before them
            self._window, self._sent, self._first = self._window[self._sent :], len(self._window) - self._sent, 0
        return piece

    def _decided(self, text: str) -> str:
        """Returns the new part of `text`, which may end within a character, that no further token changes."""
        end = len(self._window) - LONGEST
        if end <= self._sent or not text.startswith(head := self._decode(self._window[:end])):
            return ""
        piece = self._piece(head)
        if piece:
            self._first = self._first or self._sent + LONGEST
            middle = max(0, end - LONGEST - self._first)
            del self._window[self._first : self._first + middle]
            self._sent = end - middle
        return piece

    def _piece(self, text: str) -> str:
        return text[len(self._decode(self._window[: self._sent])) :]


class StopScanner:
    """Passes text through up to the first complete stop string, however the text is cut into pieces.

    Of stop strings that end together the longest counts. Reads every character once (Knuth, Morris, Pratt).

    Args:
        include: also pass the stop string through.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self.stops, self._include = tuple(stops), include
        self.found: str | None = None  # the stop string
        self._borders = [_borders(stop) for stop in self.stops]
        self._matched = [0] * len(self.stops)  # length of each stop string's prefix that ends the text
        self._held = ""  # may be the start of a stop string

    @property
    def stopped(self) -> bool:
        return self.found is not None

    def add(self, piece: str, early: bool = False) -> str:
        """Returns the text that is safe to send; "" after a stop string (`stopped`).

        Args:
            early: ignore a stop string that ends within this piece.
        """
        if self.stopped or not self.stops:
            return "" if self.stopped else piece
        text = self._held + piece
        for end, letter in enumerate(piece, len(self._held) + 1):
            complete = ""
            for i, (stop, borders) in enumerate(zip(self.stops, self._borders, strict=True)):
                matched = self._matched[i]
                while matched and stop[matched] != letter:
                    matched = borders[matched - 1]
                self._matched[i] = matched = matched + (stop[matched] == letter)
                if matched == len(stop):
                    complete = max(complete, stop, key=len)
                    self._matched[i] = borders[-1]
            if complete and not early:
                self.found, self._held = complete, ""
                return text[: end - (0 if self._include else len(complete))]
        keep = 0 if self._include else max(self._matched)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """Returns the text that was held back."""
        held, self._held = self._held, ""
        return held


@functools.lru_cache(maxsize=256)  # all answers to a request share the tables of its stop strings
def _borders(text: str) -> tuple[int, ...]:
    """Returns, for every prefix of `text`, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(text)
    for i in range(1, len(text)):
        k = borders[i - 1]
        while k and text[k] != text[i]:
            k = borders[k - 1]
        borders[i] = k + (text[k] == text[i])
    return tuple(borders)
