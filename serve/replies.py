"""Builds the JSON of chats and completions, whole or in chunks."""

import secrets
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Protocol

import msgspec

from .answer import Answer, Piece
from .logprobs import AnswerToken, Echo, TokenStrings, chat_logprobs, text_logprobs
from .parsing import Delta, joined
from .protocol import ApiError

DONE = b"data: [DONE]\n\n"


def event(body: dict[str, Any]) -> bytes:
    """Encodes a server-sent event."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def typed_event(body: dict[str, Any]) -> bytes:
    """Encodes a server-sent event with the name of its `type`."""
    return b"event: " + body["type"].encode() + b"\n" + event(body)


class ReplyForm(Protocol):
    """Builds the reply to one request; each route has its own form."""

    @property
    def kind(self) -> Literal["chat", "text"]: ...
    @property
    def strings(self) -> TokenStrings | None:
        """The token strings, if the request wants log-probabilities."""

    @property
    def answers_per_prompt(self) -> int:
        """Number of answers to each prompt; they are consecutive."""

    @property
    def end(self) -> bytes:
        """Bytes after the last event."""

    def event(self, chunk: dict[str, Any]) -> bytes:
        """Encodes a chunk."""

    def whole(self, answers: Sequence[tuple[Piece, Answer]], usage: dict[str, Any]) -> dict[str, Any]:
        """Returns the body with all answers, whole and ended."""

    def opening(self, answers: int) -> list[dict[str, Any]]:
        """Returns the chunks before the first text."""

    def piece(self, index: int, piece: Piece) -> list[dict[str, Any]]:
        """Returns the chunks of a piece."""

    def ended(self, index: int, answer: Answer) -> list[dict[str, Any]]:
        """Returns the chunks after the last text of an answer."""

    def closing(self, usage: dict[str, Any]) -> list[dict[str, Any]]:
        """Returns the chunks after all answers."""

    def failed(self, error: ApiError) -> list[dict[str, Any]]:
        """Returns the chunks of an error that ends the stream."""


@dataclass(frozen=True, slots=True)
class Replies:
    """Builds the bodies of one request; every body carries the request's id, time and model."""

    kind: Literal["chat", "text"]
    model: str
    include_usage: bool = False  # every chunk then has a `usage`, null in all but the last
    strings: TokenStrings | None = None  # set if the request wants log-probabilities
    prompt_lengths: Sequence[int] = (0,)  # characters of each prompt of a completion
    answers_per_prompt: int = 1
    unique: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))  # seconds since the epoch
    end: bytes = DONE
    prompt_ids: Sequence[Sequence[int]] = ()  # prompt tokens of each answer, if tokens were requested
    _begun: set[int] = field(default_factory=set)  # answers with prompt tokens that were sent

    def event(self, chunk: dict[str, Any]) -> bytes:
        return event(chunk)

    def failed(self, error: ApiError) -> list[dict[str, Any]]:
        return [error.body()]

    def whole(self, answers: Sequence[tuple[Piece, Answer]], usage: dict[str, Any]) -> dict[str, Any]:
        choices = []
        for index, (piece, answer) in enumerate(answers):
            content: dict[str, Any] = {"text": piece.text}
            if self.kind == "chat":
                content = {"message": _message(piece)}
            choice = self._choice(index, content, piece.tokens, answer.reason, piece.echo)
            choices.append(choice | {"stop_reason": answer.stop_reason})
            if self.prompt_ids:
                choices[-1]["token_ids"] = piece.ids
        body = self._body("chat.completion" if self.kind == "chat" else "text_completion", choices)
        for index in range(len(answers)):
            self._add_prompt_ids(index, body, choices[index])
        return {**body, "usage": usage}

    def opening(self, answers: int) -> list[dict[str, Any]]:
        """Returns the chunks that name the role in every answer of a chat."""
        if self.kind == "text":
            return []
        first = {"delta": {"role": "assistant", "content": ""}}
        return [self._with_prompt_ids(i, [self._chunk(i, first, (), None)])[0] for i in range(answers)]

    def piece(self, index: int, piece: Piece) -> list[dict[str, Any]]:
        """Returns the chunks of a piece: one, or one for each delta of a parsed answer."""
        if self.kind == "text":
            contents: list[dict[str, Any]] = [{"text": piece.text}]
        elif piece.deltas is None:
            contents = [{"delta": {"content": piece.text}}]
        else:  # an empty delta carries tokens with text that is held back
            contents = [{"delta": _delta(delta)} for delta in piece.deltas] or [{"delta": {}}]
        chunks = [
            self._chunk(index, each, () if i else piece.tokens, None, piece.echo) for i, each in enumerate(contents)
        ]
        if piece.steps:
            chunks[0]["choices"][0]["dflash"] = [asdict(step) for step in piece.steps]
        if self.prompt_ids:
            chunks[0]["choices"][0]["token_ids"] = piece.ids
        return self._with_prompt_ids(index, chunks)

    def ended(self, index: int, answer: Answer) -> list[dict[str, Any]]:
        content: dict[str, Any] = {"delta": {}} if self.kind == "chat" else {"text": ""}
        chunk = self._chunk(index, content, None, answer.reason)
        chunk["choices"][0]["stop_reason"] = answer.stop_reason
        return self._with_prompt_ids(index, [chunk])

    def closing(self, usage: dict[str, Any]) -> list[dict[str, Any]]:
        """Returns the chunk with the usage, without choices, if it is requested."""
        return [{**self._body(self._chunk_name, []), "usage": usage}] if self.include_usage else []

    def _with_prompt_ids(self, index: int, chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Adds the prompt's tokens to the first chunk of an answer, if they were requested."""
        if index not in self._begun:
            self._begun.add(index)
            self._add_prompt_ids(index, chunks[0], chunks[0]["choices"][0])
        return chunks

    def _add_prompt_ids(self, index: int, body: dict[str, Any], choice: dict[str, Any]) -> None:
        if self.prompt_ids:  # a chat has one prompt
            (body if self.kind == "chat" else choice)["prompt_token_ids"] = self.prompt_ids[index]

    @property
    def _chunk_name(self) -> str:
        return "chat.completion.chunk" if self.kind == "chat" else "text_completion"

    def _chunk(
        self,
        index: int,
        content: dict[str, Any],
        tokens: Sequence[AnswerToken] | None,
        finish_reason: str | None,
        echo: Echo | None = None,
    ) -> dict[str, Any]:
        body = self._body(self._chunk_name, [self._choice(index, content, tokens, finish_reason, echo)])
        return {**body, "usage": None} if self.include_usage else body

    def _choice(
        self,
        index: int,
        content: dict[str, Any],
        tokens: Sequence[AnswerToken] | None,
        finish_reason: str | None,
        echo: Echo | None,
    ) -> dict[str, Any]:
        logprobs = None
        if self.strings is not None and tokens is not None:
            logprobs = (
                chat_logprobs(self.strings, tokens)
                if self.kind == "chat"
                else text_logprobs(self.strings, tokens, self.prompt_lengths[index // self.answers_per_prompt], echo)
            )
        return {"index": index, **content, "logprobs": logprobs, "finish_reason": finish_reason}

    def _body(self, name: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"{'chatcmpl' if self.kind == 'chat' else 'cmpl'}-{self.unique}",
            "object": name,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }


def _message(answer: Piece) -> dict[str, Any]:
    """Returns the message of a whole answer; only `content` has a key if it is empty."""
    if answer.deltas is None:
        return {"role": "assistant", "content": answer.text, "refusal": None}
    message = joined(answer.deltas)
    more: dict[str, Any] = {"reasoning_content": message.reasoning} if message.reasoning else {}
    if message.calls:
        more["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.calls
        ]
    return {"role": "assistant", "content": message.content or (None if more else ""), "refusal": None, **more}


def _delta(delta: Delta) -> dict[str, Any]:
    """Returns `choices[].delta` of a chunk."""
    if delta.tool is None:
        return {"reasoning_content": delta.reasoning} if delta.reasoning else {"content": delta.content}
    tool = delta.tool
    call: dict[str, Any] = {"index": tool.index, "function": {"arguments": tool.arguments}}
    if tool.id is not None:
        function = {"name": tool.name, "arguments": tool.arguments}
        call = {"index": tool.index, "id": tool.id, "type": "function", "function": function}
    return {"tool_calls": [call]}
