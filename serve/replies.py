"""What a client receives: the JSON of an answer, whole or in chunks, for both endpoints."""

import json
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from .answer import Piece
from .logprobs import Spelling, SpokenToken, chat_logprobs, text_logprobs

DONE = b"data: [DONE]\n\n"


def event(body: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return f"data: {json.dumps(body, separators=(',', ':'))}\n\n".encode()


@dataclass(frozen=True, slots=True)
class Replies:
    """The bodies that belong to one request; every one of them carries its id, time and model."""

    kind: Literal["chat", "text"]
    model: str
    include_usage: bool = False  # every chunk then has a `usage`, null in all but the last
    spelling: Spelling | None = None  # of a request for log-probabilities
    prompt_length: int = 0  # characters of a completion's prompt
    unique: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))  # seconds since the epoch

    def whole(self, answer: Piece, finish_reason: str | None, usage: dict[str, Any]) -> dict[str, Any]:
        if self.kind == "chat":
            content: dict[str, Any] = {"message": {"role": "assistant", "content": answer.text, "refusal": None}}
            return {**self._body("chat.completion", content, answer.tokens, finish_reason), "usage": usage}
        return {**self._body("text_completion", {"text": answer.text}, answer.tokens, finish_reason), "usage": usage}

    def opening(self) -> list[dict[str, Any]]:
        """The chunks before the first text: a chat names the role."""
        if self.kind == "text":
            return []
        return [self._chunk({"delta": {"role": "assistant", "content": ""}}, (), None)]

    def piece(self, piece: Piece) -> dict[str, Any]:
        content = {"delta": {"content": piece.text}} if self.kind == "chat" else {"text": piece.text}
        return self._chunk(content, piece.tokens, None)

    def closing(self, finish_reason: str | None, usage: dict[str, Any]) -> list[dict[str, Any]]:
        """The chunks after the last text: the finish reason and, when asked for, the usage (without choices)."""
        last = self._chunk({"delta": {}} if self.kind == "chat" else {"text": ""}, None, finish_reason)
        return [last, {**last, "choices": [], "usage": usage}] if self.include_usage else [last]

    def _chunk(
        self, content: dict[str, Any], tokens: Sequence[SpokenToken] | None, finish_reason: str | None
    ) -> dict[str, Any]:
        name = "chat.completion.chunk" if self.kind == "chat" else "text_completion"
        body = self._body(name, content, tokens, finish_reason)
        return {**body, "usage": None} if self.include_usage else body

    def _body(
        self, name: str, content: dict[str, Any], tokens: Sequence[SpokenToken] | None, finish_reason: str | None
    ) -> dict[str, Any]:
        logprobs = None
        if self.spelling is not None and tokens is not None:
            logprobs = (
                chat_logprobs(self.spelling, tokens)
                if self.kind == "chat"
                else text_logprobs(self.spelling, tokens, self.prompt_length)
            )
        return {
            "id": f"{'chatcmpl' if self.kind == 'chat' else 'cmpl'}-{self.unique}",
            "object": name,
            "created": self.created,
            "model": self.model,
            "choices": [{"index": 0, **content, "logprobs": logprobs, "finish_reason": finish_reason}],
        }
