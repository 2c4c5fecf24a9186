"""Tokens to text as they arrive: whole characters only, and nothing that may yet turn out to be a stop string."""

from collections.abc import Sequence
from typing import Any

REPLACEMENT = "\ufffd"  # what a decoder writes for bytes that are not (yet) a character


def silent_tokens(tokenizer: Any) -> set[int]:
    """The special tokens, of which an answer's text has nothing."""
    added = tokenizer.added_tokens_decoder.items()
    return {*tokenizer.all_special_ids, *(i for i, token in added if token.special)}


class Detokenizer:
    """Incremental `tokenizer.decode(ids, skip_special_tokens=True)`: the pieces joined are exactly its result."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._silent = silent_tokens(tokenizer)
        # the tokens of the last piece and those after it; with the last piece in front, decoders that treat the
        # start of a text differently (SentencePiece drops its space) do not see a start in the middle
        self._window: list[int] = []
        self._sent = 0  # how many tokens of the window have been returned as text

    def add(self, tokens: Sequence[int]) -> str:
        """The text these tokens complete; an unfinished character waits for the next call."""
        self._window += [token for token in tokens if token not in self._silent]
        return self._flush(unfinished=False)

    def finish(self) -> str:
        """What is still waiting, as the decoder writes it when nothing follows."""
        return self._flush(unfinished=True)

    def _flush(self, unfinished: bool) -> str:
        text = self._decode(self._window)
        if text.endswith(REPLACEMENT) and not unfinished:
            return ""
        piece = text[len(self._decode(self._window[: self._sent])) :]
        if piece:  # tokens without text of their own stay in the window, behind the piece before them
            self._window = self._window[self._sent :]
            self._sent = len(self._window)
        return piece

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)


class StopScanner:
    """Passes text through up to the stop string that is complete first, wherever the text is cut into pieces."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""  # may be the start of a stop string
        self.stopped = False

    def add(self, piece: str) -> str:
        """The text that is safe to send. After a stop string (`stopped`) there is none."""
        if self.stopped:
            return ""
        text = self._held + piece
        # by end, then by start: what reading one character at a time would find, whatever the pieces are
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.stopped = True
            self._held = ""
            return text[: min(found)[1]]
        keep = max((self._overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """The text that was held back, now that nothing follows."""
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """Length of the longest end of `text` that is a proper start of `stop`."""
        return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
