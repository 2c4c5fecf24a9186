"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API, for coding agents.

Translates a request for the chat endpoint, which answers it, and the answer to content blocks.
"""

import functools
from collections.abc import Sequence
from typing import Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, TypeAdapter

from dflash_toolkit.runtime.connection import PreparedRequest

from ..answer import Answer, Piece
from ..errors import MESSAGES, messages_error
from ..logprobs import TokenStrings
from ..openapi import DECODED, Acceptance, operation
from ..parsing import Delta
from ..protocol import ApiError
from ..replies import typed_event
from ..service import Service
from .chat import answer, prompt_of
from .messages_request import CountTokensRequest, MessagesRequest

SIGNATURE = "unsigned"  # signature of reasoning; clients send back only reasoning with a signature
OBJECT = TypeAdapter(dict[str, Any])
# type of a block -> type of its deltas, and the field that holds their text
DELTAS = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}


class TextReply(BaseModel):
    type: Literal["text"]
    text: str


class ThinkingReply(BaseModel):
    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUseReply(BaseModel):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class OutputDetails(BaseModel):
    thinking_tokens: int


class MessageUsage(BaseModel):
    """The sum of all input tokens is the length of the prompt."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: OutputDetails
    dflash: Acceptance


class MessageReply(BaseModel):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextReply | ThinkingReply | ToolUseReply]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"] | None
    stop_sequence: str | None
    usage: MessageUsage


class MessageFault(BaseModel):
    type: str
    message: str


class MessagesError(BaseModel):
    """An error in Anthropic's form."""

    type: Literal["error"]
    error: MessageFault


class MessageEvent(BaseModel):
    """An event; its `type` decides which fields it has, as in Anthropic's API."""

    type: str
    index: int = 0
    message: dict[str, Any] = {}
    content_block: TextReply | ThinkingReply | ToolUseReply | None = None
    delta: dict[str, Any] = {}
    usage: MessageUsage | None = None
    error: MessageFault | None = None


class TokenCount(BaseModel):
    input_tokens: int


class MessageForm:
    """Builds a message, or the events that describe its progress.

    The same methods build both: the message is the final state of the events.
    """

    kind: Literal["chat", "text"] = "chat"
    answers_per_prompt = 1
    end = b""

    def __init__(
        self, body: MessagesRequest, unique: str, prepared: PreparedRequest, strings: TokenStrings | None
    ) -> None:
        self.strings = strings
        self._body, self._id, self._prompt_tokens = body, f"msg_{unique}", len(prepared.prompt_ids)
        self._blocks: list[dict[str, Any]] = []
        self._texts: list[str] | None = None  # texts of the last block, until it is complete
        self._stop: dict[str, str | None] = {"stop_reason": None, "stop_sequence": None}

    def event(self, chunk: dict[str, Any]) -> bytes:
        return typed_event(chunk)

    def whole(self, answers: Sequence[tuple[Piece, Answer]], usage: dict[str, Any]) -> dict[str, Any]:
        ((piece, ended),) = answers
        self.piece(0, piece)
        self.ended(0, ended)
        return self._message(_usage(usage))

    def opening(self, answers: int) -> list[dict[str, Any]]:
        usage = {"input_tokens": self._prompt_tokens, "output_tokens": 0}  # the cached ones are not known yet
        return [{"type": "message_start", "message": self._message(usage)}, {"type": "ping"}]

    def piece(self, index: int, piece: Piece) -> list[dict[str, Any]]:
        events = []
        for delta in piece.deltas if piece.deltas is not None else (Delta(piece.text),):
            if (tool := delta.tool) is not None:
                if tool.id is not None:
                    events += self._begin({"type": "tool_use", "id": tool.id, "name": tool.name, "input": {}})
                events += self._more(tool.arguments)
            elif delta.reasoning:
                events += self._begin({"type": "thinking", "thinking": "", "signature": ""})
                events += self._more(delta.reasoning)
            elif delta.content:
                events += self._begin({"type": "text", "text": ""})
                events += self._more(delta.content)
        return events

    def ended(self, index: int, answer: Answer) -> list[dict[str, Any]]:
        events = [] if self._blocks else self._begin({"type": "text", "text": ""})  # clients expect a block
        if answer.reason == "length":
            full = answer.completion_tokens < self._body.max_tokens
            reason = "model_context_window_exceeded" if full else "max_tokens"
        elif isinstance(answer.stop_reason, str):
            reason, self._stop["stop_sequence"] = "stop_sequence", answer.stop_reason
        else:
            called = any(block["type"] == "tool_use" for block in self._blocks)
            reason = "tool_use" if called else "end_turn"
        self._stop["stop_reason"] = reason
        return events + self._close()

    def closing(self, usage: dict[str, Any]) -> list[dict[str, Any]]:
        return [{"type": "message_delta", "delta": self._stop, "usage": _usage(usage)}, {"type": "message_stop"}]

    def failed(self, error: ApiError) -> list[dict[str, Any]]:
        return [messages_error(error)]

    def _begin(self, block: dict[str, Any]) -> list[dict[str, Any]]:
        """Begins a block, unless it would only continue the open one."""
        if self._texts is not None and block["type"] == self._blocks[-1]["type"] != "tool_use":
            return []
        events = self._close()
        self._texts = []
        self._blocks.append(block)
        return [*events, {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": {**block}}]

    def _delta(self, **delta: str) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}

    def _more(self, text: str) -> list[dict[str, Any]]:
        if not text or self._texts is None:
            return []
        self._texts.append(text)
        kind, field = DELTAS[self._blocks[-1]["type"]]
        return [self._delta(**{"type": kind, field: text})]

    def _close(self) -> list[dict[str, Any]]:
        """Completes the open block, and returns its last events."""
        if self._texts is None:
            return []
        block, text, events = self._blocks[-1], "".join(self._texts), []
        self._texts = None
        if block["type"] == "tool_use":
            block["input"] = _arguments(text)
        else:
            block[block["type"]] = text
        if block["type"] == "thinking":
            block["signature"] = SIGNATURE
            events = [self._delta(type="signature_delta", signature=SIGNATURE)]
        return [*events, {"type": "content_block_stop", "index": len(self._blocks) - 1}]

    def _message(self, usage: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._body.model,
            "content": list(self._blocks),
            **self._stop,
            "usage": usage,
        }


def _arguments(text: str) -> dict[str, Any]:
    """Returns a call's arguments, without an incomplete end, as Anthropic's client reads their events."""
    try:
        return OBJECT.validate_json(text, experimental_allow_partial=True)
    except ValueError:
        return {}


def _usage(usage: dict[str, Any]) -> dict[str, Any]:
    """Returns the chat route's usage with this route's names."""
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"thinking_tokens": usage["completion_tokens_details"]["reasoning_tokens"]},
        "dflash": usage["dflash"],
    }


def routes(service: Service) -> APIRouter:
    found = APIRouter()
    described = operation(
        "Answer a conversation, in Anthropic's form",
        MessageReply,
        DECODED,
        body=MessagesRequest,
        events=MessageEvent,
        error=MessagesError,
    )

    @found.post(MESSAGES, openapi_extra=described)
    async def messages(request: Request) -> Response:
        body = await service.pools.parsed(request, MessagesRequest.parse)
        chat = await service.pools.run(request, body.chat)
        return await answer(service, request, chat, functools.partial(MessageForm, body, request.state.request_id))

    described = operation(
        "Count the tokens of a conversation", TokenCount, (404,), body=CountTokensRequest, error=MessagesError
    )

    @found.post(f"{MESSAGES}/count_tokens", openapi_extra=described)
    async def count(request: Request) -> Response:
        body = await service.pools.parsed(request, CountTokensRequest.parse)
        ids, _ = await prompt_of(service, request, await service.pools.run(request, body.chat))
        return JSONResponse({"input_tokens": len(ids)})

    return found
