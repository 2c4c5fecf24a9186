"""One conversation in the making: every user turn is answered by the target, whose own answer is fed back."""

from dataclasses import dataclass, replace
from typing import Any

from dflash_toolkit.config import UserError
from dflash_toolkit.decode import SamplingParams
from dflash_toolkit.prompts import Conversation, Message, encode_chat

from .answers import Row
from .backends import Answer


@dataclass(slots=True)
class Part:
    """Turns whose token ids continue each other, so that one row holds them all."""

    row: Row
    messages: list[Message]
    finish_reason: str


class ChatDialogue:
    """Asks the turns of a conversation one after the other.

    A row goes on as long as the rendered conversation begins with the very tokens that are already there, answers
    included. Where it does not (templates that drop earlier thinking, texts that are tokenised otherwise), what follows
    becomes a row of its own, whose prompt is what a server would see. An answer that was cut ends the conversation.

    Attributes:
        parts: the rows; complete when `question` is None.
        dropped: why there is none.
    """

    def __init__(
        self,
        index: int,
        sample: int,
        conversation: Conversation,
        tokenizer: Any,
        params: SamplingParams,
        max_length: int,
        thinking: bool | None = None,
    ) -> None:
        self.index, self.sample, self.id = index, sample, conversation.id
        self.parts: list[Part] = []
        self.dropped: str | None = None
        self.answer_tokens = 0
        self.params = params
        self._turns = list(conversation.turns)
        self._messages: list[Message] = []
        self._tokenizer, self._max_length, self._thinking = tokenizer, max_length, thinking
        self.question: tuple[list[int], SamplingParams] | None = None
        self._ask()

    def _ask(self) -> None:
        """The next turn becomes the question, if there is one and it fits."""
        self.question = None
        if not self._turns:
            self._end()
            return
        messages = [*self._messages, *self._turns.pop(0)]
        try:
            ids = encode_chat(self._tokenizer, messages, self._thinking)
        except UserError:
            self._end("refused by the chat template")
            return
        room = self._max_length - len(ids)
        if room < 2:
            self._end("too long")
            return
        self._messages = messages
        self.question = ids, replace(self.params, max_new_tokens=min(self.params.max_new_tokens, room))

    def _end(self, reason: str = "") -> None:
        self._turns.clear()
        self.parts = [part for part in self.parts if part.row.has_anchor]
        if not self.parts:
            self.dropped = reason or "shorter than two tokens"

    def hear(self, answer: Answer) -> None:
        assert self.question is not None
        ids, _ = self.question
        self.question = None
        if not answer.tokens:
            self._end("of unknown tokens")
            return
        self.answer_tokens += len(answer.tokens)
        spoken = answer.tokens[:-1] if answer.finish_reason == "stop" else answer.tokens
        text = self._tokenizer.decode(spoken, skip_special_tokens=True)
        self._messages = [*self._messages, {"role": "assistant", "content": text}]
        tokens, span = ids + answer.tokens, (len(ids), len(ids) + len(answer.tokens))
        known = self.parts[-1].row if self.parts else None
        if known is not None and ids[: len(known.tokens)] == known.tokens:
            row = replace(known, tokens=tokens, spans=(*known.spans, span))
            self.parts[-1] = Part(row, self._messages, answer.finish_reason)
        else:
            row = Row(self.index, len(ids), tokens, (span,))
            self.parts.append(Part(row, self._messages, answer.finish_reason))
        if answer.finish_reason != "stop" or not text.strip():
            self._end()
        else:
            self._ask()
