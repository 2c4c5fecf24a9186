"""From committed tokens to text that may be sent: whole characters only, and nothing that may begin a stop string."""

from typing import Any

INCOMPLETE = "\ufffd"  # what a decoder writes for bytes that are no character yet


class Detokenizer:
    """Incremental decoding. The pieces returned, joined, are the decoding of all tokens at once."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._start = 0  # decoding begins here, so that a piece has the context its spaces depend on
        self._read = 0  # tokens before this one have been returned as text

    def push(self, tokens: list[int]) -> str:
        """New complete text; bytes of an unfinished character wait for the next call."""
        self._tokens += tokens
        before = self._decode(self._start, self._read)
        after = self._decode(self._start, len(self._tokens))
        if after.endswith(INCOMPLETE) or len(after) <= len(before):
            return ""
        self._start, self._read = self._read, len(self._tokens)
        return after[len(before) :]

    def flush(self) -> str:
        """What is left at the end of the answer, complete or not."""
        before = self._decode(self._start, self._read)
        return self._decode(self._start, len(self._tokens))[len(before) :]

    def _decode(self, start: int, end: int) -> str:
        return self._tokenizer.decode(self._tokens[start:end], skip_special_tokens=True)


class StopScanner:
    """Cuts the text before the first stop string, and holds back what may turn out to be the start of one."""

    def __init__(self, stops: list[str]) -> None:
        self._stops = stops
        self._held = ""
        self.stopped = False

    def push(self, text: str, last: bool = False) -> str:
        """Text that is safe to send now. With `last`, nothing is held back."""
        if self.stopped:
            return ""
        text = self._held + text
        found = [at for at in (text.find(stop) for stop in self._stops) if at >= 0]
        if found:
            self.stopped = True
            self._held = ""
            return text[: min(found)]
        hold = 0 if last else max((self._overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - hold :]
        return text[: len(text) - hold]

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """Length of the longest proper prefix of `stop` that ends `text`."""
        longest = min(len(stop) - 1, len(text))
        return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
