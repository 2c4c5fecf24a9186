"""Log-probabilities in OpenAI's form: the names of tokens, and the tokens that each piece of text carries."""

import codecs
import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dflash_toolkit.generation import PromptLogprobs, TokenLogprobs

from .text import REPLACEMENT, silent_tokens

FLOOR = -9999.0  # OpenAI's value for "very unlikely"; JSON has no infinity


def _byte_letters() -> dict[str, int]:
    """Returns GPT-2's alphabet, which byte-level vocabularies use: a printable letter for every byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_LETTERS = _byte_letters()
BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")  # a byte in a SentencePiece vocabulary


@dataclass(frozen=True, slots=True)
class TokenString:
    """One token of the vocabulary."""

    raw: bytes | None  # bytes that it adds to the text; None for special tokens and unused ids
    text: str | None  # None: the bytes are not whole characters

    def name(self, prefix: str = "") -> str:
        """Returns the text, or for incomplete characters the prefix and the bytes as `\\xe9\\x80`."""
        if self.text is not None:
            return self.text
        assert self.raw is not None
        return prefix + self.raw.decode("ascii", "backslashreplace")


class TokenStrings:
    """Decodes the tokens of a tokenizer one by one; their joined bytes are those of the text."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._silent = silent_tokens(tokenizer)
        # SentencePiece drops the space of the token that starts a text, so every token is decoded after another one
        self.before = tokenizer.encode("a", add_special_tokens=False)
        self._skip = len(self._decode(self.before))
        self._known: dict[int, TokenString] = {}

    def __getitem__(self, token: int) -> TokenString:
        if token not in self._known:
            self._known[token] = self._string_of(token)
        return self._known[token]

    def _string_of(self, token: int) -> TokenString:
        text = self._decode([*self.before, token])[self._skip :]
        if not text or token in self._silent:
            return TokenString(None, text)
        if REPLACEMENT not in text:
            return TokenString(text.encode(), text)
        piece = self._tokenizer.convert_ids_to_tokens(token)
        if byte := BYTE_PIECE.fullmatch(piece):
            raw = bytes.fromhex(byte[1])
        elif all(letter in BYTE_LETTERS for letter in piece):
            raw = bytes(BYTE_LETTERS[letter] for letter in piece)
        else:
            raw = piece.encode()  # the replacement character itself
        try:
            return TokenString(raw, raw.decode())
        except UnicodeDecodeError:
            return TokenString(raw, None)

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)


@dataclass(frozen=True, slots=True)
class AnswerToken:
    """A token of an answer."""

    token: int
    start: int  # characters of the answer before it, or before the character that it continues
    logprobs: TokenLogprobs


class TokenQueue:
    """Holds tokens until their text is sent: each leaves once, with the piece in which its text starts."""

    def __init__(self, strings: TokenStrings) -> None:
        self._strings = strings
        self._waiting: deque[AnswerToken] = deque()
        self._sent = 0  # characters
        self._whole = 0  # characters that the detokenizer has completed
        self._begun = 0  # characters after those, which it holds back because the last one is not complete
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token: int, logprobs: TokenLogprobs) -> None:
        """Adds the next token of the answer."""
        raw = self._strings[token].raw or b""
        start = self._whole + self._begun
        unfinished, _ = self._utf8.getstate()
        if raw and unfinished:  # two characters if the token does not continue it
            start += len((unfinished + raw[:1]).decode(errors="replace")) - 1
        self._waiting.append(AnswerToken(token, start, logprobs))
        self._begun += len(self._utf8.decode(raw))

    def completed(self, text: str, waiting: bool) -> None:
        """Adds the text that the detokenizer has completed; `waiting`: it holds some tokens back."""
        self._whole += len(text)
        if waiting:
            self._begun = max(0, self._begun - len(text))
        elif text:
            self._begun = 0
            self._utf8.reset()

    def carried_by(self, text: str) -> tuple[AnswerToken, ...]:
        """Returns the tokens that leave with the next text."""
        self._sent += len(text)
        leaving = []
        while self._waiting and self._leaves(self._waiting[0]):
            leaving.append(self._waiting.popleft())
        return tuple(leaving)

    def rest(self) -> tuple[AnswerToken, ...]:
        """Returns the remaining tokens after all text has been sent."""
        leaving = tuple(self._waiting)
        self._waiting.clear()
        return leaving

    def _leaves(self, token: AnswerToken) -> bool:
        without_text = self._strings[token.token].raw is None
        return token.start < self._sent or (without_text and token.start == self._sent)


def chat_logprobs(strings: TokenStrings, tokens: Sequence[AnswerToken]) -> dict[str, Any]:
    """Returns `choices[].logprobs` of /v1/chat/completions."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        string = strings[token]
        raw = None if string.raw is None else list(string.raw)
        return {"token": string.name(), "logprob": max(FLOOR, logprob), "bytes": raw}

    content = [
        {**entry(t.token, t.logprobs.chosen), "top_logprobs": [entry(*best) for best in t.logprobs.best]}
        for t in tokens
    ]
    return {"content": content, "refusal": None}


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt that its answer begins with."""

    ids: Sequence[int]
    text: str
    best: int | None  # alternatives reported with each token; None: no log-probabilities
    logprobs: PromptLogprobs | None = None  # set when known; may have more alternatives than `best`

    def offsets(self, strings: TokenStrings) -> list[int]:
        """Returns the number of characters before each token, or before the character that it continues.

        A special token that the text omits, such as the one that begins a text, has no characters.
        """
        utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        found, at, begun = [], 0, False
        for token in self.ids:
            string = strings[token]
            raw, unfinished = string.raw, utf8.getstate()[0]
            if raw is None:
                at += len(utf8.decode(b"", final=True)) if string.text else 0  # it ends an incomplete character
                found.append(at)
                at += len(string.text or "") if self.text.startswith(string.text or "", at) else 0
                continue
            if not begun and raw.startswith(b" ") and not self.text.startswith(" ", at):
                raw = raw[1:]  # the space that SentencePiece adds before a text
            begun = True
            found.append(at + (len((unfinished + raw[:1]).decode(errors="replace")) - 1 if unfinished and raw else 0))
            at += len(utf8.decode(raw))
        return [min(offset, len(self.text)) for offset in found]  # a normalized text may be longer than it was


def text_logprobs(
    strings: TokenStrings, tokens: Sequence[AnswerToken], prompt_length: int, echo: Echo | None = None
) -> dict[str, Any]:
    """Returns `choices[].logprobs` of /v1/completions; offsets count characters from the start of the prompt.

    Args:
        echo: the prompt, if the answer begins with it; its first token has no log-probability.
    """

    def best_of(token: int, logprobs: TokenLogprobs, best: int | None = None) -> dict[str, float]:
        found: dict[str, float] = {}
        for other, logprob in logprobs.best[:best]:  # if names repeat, the most probable, but always the chosen one
            found.setdefault(strings[other].name("bytes:"), max(FLOOR, logprob))
        return found | {strings[token].name("bytes:"): max(FLOOR, logprobs.chosen)}

    before: list[tuple[int, int, float | None, dict[str, float] | None]] = []
    if echo is not None:
        offsets, scores = echo.offsets(strings), [None, *(logprobs for logprobs, _ in echo.logprobs or ())]
        before = [
            (offset, token, *((max(FLOOR, score.chosen), best_of(token, score, echo.best)) if score else (None, None)))
            for offset, token, score in zip(offsets, echo.ids, scores, strict=True)
        ]
    after = (
        (prompt_length + t.start, t.token, max(FLOOR, t.logprobs.chosen), best_of(t.token, t.logprobs)) for t in tokens
    )
    rows = [*before, *after]
    return {
        "text_offset": [offset for offset, *_ in rows],
        "token_logprobs": [logprob for _, _, logprob, _ in rows],
        "tokens": [strings[token].name("bytes:") for _, token, *_ in rows],
        "top_logprobs": [best for *_, best in rows],
    }


def prompt_logprobs(
    strings: TokenStrings, ids: Sequence[int], logprobs: PromptLogprobs, best: int
) -> list[dict[str, dict[str, Any]] | None]:
    """Returns vLLM's `prompt_logprobs`: for each token, its own and the `best` most probable ones, by id."""

    def entry(token: int, logprob: float, rank: int) -> dict[str, Any]:
        name = strings[token].name("bytes:")
        return {"logprob": max(FLOOR, logprob), "rank": rank, "decoded_token": name}

    found: list[dict[str, dict[str, Any]] | None] = [None]
    for token, (each, rank) in zip(ids[1:], logprobs, strict=True):
        others = {str(t): entry(t, logprob, i) for i, (t, logprob) in enumerate(each.best[:best], 1)}
        found.append({str(token): entry(token, each.chosen, rank)} | others)
    return found
