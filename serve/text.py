"""Tokens to text as they arrive: whole characters only, and nothing that may yet turn out to be a stop string."""

import functools
from collections.abc import Collection, Sequence
from typing import Any

from transformers import PreTrainedTokenizerFast

REPLACEMENT = "\ufffd"  # what a decoder writes for bytes that are not (yet) a character
LONGEST = 4  # bytes of a character, and so tokens: what stands before so many is decided


class Vocabulary:
    """What detokenizers of one tokenizer share.

    Args:
        shown: special tokens whose text is returned like others'.
    """

    def __init__(self, tokenizer: Any, shown: frozenset[str]) -> None:
        self._tokenizer = tokenizer
        self.silent = silent_tokens(tokenizer, shown)
        self._text: dict[int, bool] = {}
        self._skip = not shown  # the decoder may not skip them; others never get there
        # what `tokenizer.decode` comes down to, without the half of its time that it takes to look at its arguments
        plain = getattr(type(tokenizer), "_decode", None) is PreTrainedTokenizerFast._decode
        self._backend = tokenizer.backend_tokenizer if plain else None

    def has_text(self, token: int) -> bool:
        """Whether anything of an answer's text is of this token."""
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
    """The special tokens, of which an answer's text has nothing, except those that are `shown`."""
    return {i for i, text in special_tokens(tokenizer).items() if text not in shown}


def special_tokens(tokenizer: Any) -> dict[int, str]:
    """The tokens that are marks of a text and no part of it."""
    added = {i: token.content for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    return {i: tokenizer.convert_ids_to_tokens(i) for i in tokenizer.all_special_ids} | added


class Detokenizer:
    """Incremental `tokenizer.decode(ids, skip_special_tokens=True)`: the pieces joined are exactly its result.

    One exception: a decoder with byte fallback reads a run of bytes as a whole, and so takes back the characters at the
    start of a run that turns out to be invalid; they have been returned by then.

    Args:
        shown: special tokens whose text is returned like others'.
    """

    def __init__(self, tokenizer: Any, before: Sequence[int] = (), shown: Collection[str] = ()) -> None:
        self._vocabulary = vocabulary(tokenizer, frozenset(shown))
        self._decode = self._vocabulary.decode
        # the tokens of the last piece and those after it; with the last piece in front, decoders that treat the
        # start of a text differently (SentencePiece drops its space) do not see a start in the middle
        self._window: list[int] = list(before)
        self._sent = len(before)  # how many tokens of the window have been returned as text
        # of invalid bytes the window keeps the first, which make them invalid, and the last: so many are the first
        self._first = 0

    def add(self, tokens: Sequence[int]) -> str:
        """The text these tokens complete; an unfinished character waits for the next call."""
        visible = [token for token in tokens if self._vocabulary.has_text(token)]
        text = self._decode([*self._window, *visible])
        if text.endswith(REPLACEMENT):
            return "".join(map(self._add, visible))
        self._window += visible
        return self._complete(text)

    @property
    def waiting(self) -> bool:
        """Whether tokens that have been added may still get text."""
        return self._sent < len(self._window)

    def finish(self) -> str:
        """What is still waiting, as the decoder writes it when nothing follows."""
        return self._piece(self._decode(self._window))

    def _add(self, token: int) -> str:
        before = self._decode(self._window)
        self._window.append(token)
        text = self._decode(self._window)
        if text.endswith(REPLACEMENT) and len(text) >= len(before):  # shorter: bytes have become U+FFFD itself
            return self._decided(text)
        return self._complete(text)

    def _complete(self, text: str) -> str:
        """The part of `text`, which ends with a whole character, that has not been returned."""
        piece = self._piece(text)
        if piece:  # tokens without text of their own stay in the window, behind the piece before them
            self._window, self._sent, self._first = self._window[self._sent :], len(self._window) - self._sent, 0
        return piece

    def _decided(self, text: str) -> str:
        """The part of `text`, which may end within a character, that no further token changes."""
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
    """Passes text through up to the stop string that is complete first, wherever the text is cut into pieces.

    Of those that end together the longest counts. Every character is looked at once (Knuth, Morris, Pratt).

    Args:
        include: the stop string is passed through too.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self.stops, self._include = tuple(stops), include
        self.found: str | None = None  # the stop string
        self._borders = [_borders(stop) for stop in self.stops]
        self._matched = [0] * len(self.stops)  # characters of each that the text ends with
        self._held = ""  # may be the start of a stop string

    @property
    def stopped(self) -> bool:
        return self.found is not None

    def add(self, piece: str, early: bool = False) -> str:
        """The text that is safe to send. After a stop string (`stopped`) there is none.

        Args:
            early: a stop string that ends within this piece ends nothing.
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
        """The text that was held back, now that nothing follows."""
        held, self._held = self._held, ""
        return held


def _borders(text: str) -> list[int]:
    """For every start of `text` the length of its longest proper start that is its end too."""
    borders = [0] * len(text)
    for i in range(1, len(text)):
        k = borders[i - 1]
        while k and text[k] != text[i]:
            k = borders[k - 1]
        borders[i] = k + (text[k] == text[i])
    return borders
